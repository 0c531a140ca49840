import multiprocessing
import os
import subprocess
import sys
import warnings

import pytest
from maxsoftmax import _cache as cache
from maxsoftmax._graph import artifacts
from maxsoftmax._graph.extension import distribution_version


class Compiled:
    def __init__(self, content=b"code"):
        self.content = content

    def export_mef(self, path):
        path.write_bytes(self.content)


class Session:
    """Loads files and compiled models alike: a model is its content."""

    def __init__(self):
        self.log = []

    def load(self, path):
        self.log.append("load")
        return path.read_bytes()

    def init(self, compiled):
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


def test_a_damaged_model_is_compiled_anew(folder):
    load(Session())
    entry(folder).write_bytes(b"evil")
    with pytest.warns(RuntimeWarning, match="damaged or is not private"):
        assert artifacts.load(Session(), ("a", "b"), Compiled) == b"code"
    assert load(Session(), compile=forbidden) == b"code"


def test_a_model_that_max_refuses_is_compiled_anew(folder):
    class Picky(Session):
        def load(self, path):
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


def compete(barrier):
    barrier.wait()
    # Each compiles to something else, so that a mixture would show.
    content = bytes([os.getpid() % 256]) * 100_000
    model = load(Session(), compile=lambda: Compiled(content))
    sys.exit(0 if len(set(model)) == 1 and len(model) == 100_000 else 1)


def test_processes_that_compile_at_once_do_not_mix(folder):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    processes = [context.Process(target=compete, args=(barrier,)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
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
