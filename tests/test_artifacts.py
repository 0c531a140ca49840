import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import maxsoftmax
import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from maxsoftmax import _cache as cache
from maxsoftmax import ops
from maxsoftmax._commands import demo, network
from maxsoftmax._graph import artifacts, runtime
from maxsoftmax._graph.extension import distribution_version
from maxsoftmax._native import build
from maxsoftmax._native.description import Library, Target

# The package has a function of the same name.
extension = sys.modules["maxsoftmax._graph.extension"]


class Compiled:
    def __init__(self, content=b"code"):
        self.content = content

    def export_mef(self, path):
        path.write_bytes(self.content)


class Session:
    """Loads files and compiled models alike: a model is its content."""

    def __init__(self):
        self.log = []

    def load_all(self, path):
        self.log.append("load")
        return path.read_bytes()

    def init_all(self, compiled):
        self.log.append("init")
        return compiled.content


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def forbidden():
    pytest.fail("compiled again")


def entry(folder):
    (found,) = (path for path in folder.iterdir() if path.name.startswith("model-"))
    return found / artifacts.FILE


def load(session, parts=("a", "b"), compile=Compiled):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return artifacts.load(session, parts, compile)


def test_a_model_is_compiled_once(folder):
    session = Session()
    assert load(session) == b"code"
    assert load(session, compile=forbidden) == b"code"
    assert session.log == ["init", "load"]
    assert entry(folder).read_bytes() == b"code"


@pytest.mark.parametrize("other", [("a",), ("ab",), ("a", "c"), ("b", "a"), ("a", "b", "")])
def test_another_model_is_another_entry(folder, other):
    load(Session())
    assert load(Session(), other, lambda: Compiled(b"other")) == b"other"
    assert load(Session(), compile=forbidden) == b"code"


@pytest.mark.parametrize("i", range(5))
def test_what_is_around_it_makes_another_model(folder, monkeypatch, i):
    load(Session())
    changed = [*artifacts._surroundings()]
    changed[i] += "x"
    monkeypatch.setattr(artifacts, "_surroundings", lambda: tuple(changed))
    assert load(Session(), compile=lambda: Compiled(b"other")) == b"other"


def test_the_surroundings_are_those_of_this_machine():
    version, sources, ours, machine, processor = artifacts._surroundings()
    assert version == distribution_version("max", "modular")
    assert len(sources) == 32
    assert len(ours) == 64
    assert machine == os.uname().machine
    assert processor


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of this package's modules, whose contents are what keys depend on."""
    copy = tmp_path / "maxsoftmax"
    shutil.copytree(Path(maxsoftmax.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    sources = {name: extension.sources(name) for name in (extension.KERNELS, extension.NATIVE)}
    monkeypatch.setattr(extension, "sources", sources.get)
    monkeypatch.setattr(build, "sources", sources.get)
    monkeypatch.setattr(extension, "__file__", str(copy / "_graph" / "extension.py"))
    forget()
    yield copy
    forget()


def forget():
    for function in (artifacts._surroundings, build._surroundings, extension.key, extension.python_sources):
        function.cache_clear()


@pytest.mark.parametrize(
    "name", ["ops/_softmax.py", "_forms.py", "_arguments.py", "_graph/tuning.py", "_commands/network.py"]
)
def test_another_source_of_graphs_makes_another_model(package, name):
    before = artifacts._surroundings()
    with (package / name).open("a") as file:
        file.write("# changed")
    forget()
    assert artifacts._surroundings() != before


@pytest.mark.parametrize("name", ["build.py", "bundle.py", "description.py"])
def test_another_source_of_libraries_makes_another_library(package, name):
    library = Library("softmax", "float32", Target("cpu"))
    key, versions = build.key(library), build.versions()
    with (package / "_native" / name).open("a") as file:
        file.write("# changed")
    forget()
    assert build.key(library) != key
    assert build.versions()["sources"] != versions["sources"]


def test_another_version_of_this_package_makes_everything_anew(package, monkeypatch):
    library = Library("softmax", "float32", Target("cpu"))
    before = artifacts._surroundings(), extension.key(), build.key(library), build.versions()
    monkeypatch.setattr(maxsoftmax, "__version__", "9.9.9")
    forget()
    after = artifacts._surroundings(), extension.key(), build.key(library), build.versions()
    assert [old == new for old, new in zip(before, after, strict=True)] == [False] * 4


def test_all_that_runs_while_a_graph_is_made_is_a_source_of_it():
    folder = Path(maxsoftmax.__file__).parent
    ran = set()

    def note(frame, event, argument):
        ran.add(frame.f_code.co_filename)

    real = TensorType(DType.float32, (2, 3, 4), DeviceRef.CPU())
    sys.setprofile(note)
    try:
        demo.graph(DeviceRef.CPU(), ("rows", "n"))
        network.graph(network.Shape(4, 2, 8, 8, 0.1), DeviceRef.CPU())
        with Graph("all", input_types=[real, real]) as graph:
            x, mask = (value.tensor for value in graph.inputs)
            y = ops.softmax(x, mask=mask, scale=0.5)
            graph.output(ops.softmax_backward(y, ops.log_softmax(x), axis=1), ops.logsumexp(x), *ops.max_sum(x))
    finally:
        sys.setprofile(None)
    ours = {path.relative_to(folder) for path in map(Path, ran) if path.is_relative_to(folder)}
    covered = {path.relative_to(folder) for pattern in artifacts.SOURCES for path in folder.glob(pattern)}
    assert {Path("ops/_softmax.py"), Path("_forms.py"), Path("_arguments.py")} < ours
    assert {path for path in ours if path.parts[0] != "_native"} <= covered


class Elsewhere:
    def compile(self, graph, custom_extensions):
        return os.environ[runtime.MAX_CACHE]


def test_where_max_has_no_room_it_is_given_another_folder(tmp_path, monkeypatch):
    full = tmp_path / "not" / "yet"
    monkeypatch.setenv(runtime.MAX_CACHE, str(full))
    assert runtime.compiled(Elsewhere(), None) == str(full)
    monkeypatch.setattr(runtime.files, "ROOM", 2**62)
    told = re.escape(f"{full} cannot keep compiled code (No space left on device); a temporary folder is used: ")
    with pytest.warns(RuntimeWarning, match=f"{told}.* by MODULAR_CACHE_DIR$"):
        used = runtime.compiled(Elsewhere(), None)
    assert Path(used).is_dir()
    assert Path(used) != full


def test_a_damaged_model_is_compiled_anew(folder):
    load(Session())
    entry(folder).write_bytes(b"evil")
    with pytest.warns(RuntimeWarning, match="damaged or is not private"):
        assert artifacts.load(Session(), ("a", "b"), Compiled) == b"code"
    assert load(Session(), compile=forbidden) == b"code"


def test_a_model_that_max_refuses_is_compiled_anew(folder):
    class Picky(Session):
        def load_all(self, path):
            raise ValueError("not mine")

    load(Session())
    with pytest.warns(RuntimeWarning, match="is compiled anew, because MAX cannot load it: not mine"):
        assert artifacts.load(Picky(), ("a", "b"), lambda: Compiled(b"new")) == b"new"
    assert load(Session(), compile=forbidden) == b"new"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("export failed")])
def test_a_model_that_cannot_be_kept_is_used_all_the_same(folder, error):
    class Unkept(Compiled):
        def export_mef(self, path):
            path.write_bytes(b"half")
            raise error

    with pytest.warns(RuntimeWarning, match="is not kept for the next process: .*(No space|export failed)"):
        assert artifacts.load(Session(), ("a", "b"), Unkept) == b"code"
    assert os.listdir(folder) == []
    assert load(Session()) == b"code"


def test_a_compiler_that_fails_leaves_nothing(folder):
    def fail():
        raise RuntimeError("does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        artifacts.load(Session(), ("a",), fail)
    assert not folder.exists() or os.listdir(folder) == []


def compete(barrier, compiled):
    barrier.wait()

    def compile():
        (compiled / str(os.getpid())).touch()
        time.sleep(0.2)
        # Each compiles to something else, so that a mixture would show.
        return Compiled(bytes([os.getpid() % 256]) * 100_000)

    model = load(Session(), compile=compile)
    sys.exit(0 if len(set(model)) == 1 and len(model) == 100_000 else 1)


@pytest.mark.parametrize("kept", [True, False])
def test_of_processes_that_want_the_same_model_one_compiles(folder, monkeypatch, tmp_path, kept):
    if not kept:
        # Then each has to, one after the other, and they do not mix.
        monkeypatch.setattr(cache, "find", lambda *what: None)
    compiled = tmp_path / "compiled"
    compiled.mkdir()
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    processes = [context.Process(target=compete, args=(barrier, compiled)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    assert len(os.listdir(compiled)) == (1 if kept else 8)
    assert len(set(entry(folder).read_bytes())) == 1
    assert all(name.startswith("model-") for name in os.listdir(folder))


def test_the_next_process_does_not_compile(environment):
    script = """
import numpy as np, pytest
from max.graph import DeviceRef
from maxsoftmax._commands import demo
from maxsoftmax._graph import runtime
{observe}
device = runtime.device("cpu")
for _ in range(2):
    model = runtime.model(device, "softmax of float32 rows", lambda: demo.graph(DeviceRef.CPU(), ("rows", "n")))
    assert (model.execute(np.zeros((7, 4), np.float32))[0].to_numpy() == 0.25).all()
"""
    observe = "runtime._observers.append(lambda what: pytest.fail('compiled again'))"
    for first in ("", observe):
        subprocess.run([sys.executable, "-c", script.format(observe=first)], env=environment, check=True, timeout=300)
