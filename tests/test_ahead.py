import contextlib
import json
import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
from commands import fails, misused
from contract import check
from maxsoftmax import _native
from maxsoftmax._commands import ahead, cli
from maxsoftmax._native import build, load, machine, precompiled
from maxsoftmax._native.description import BUNDLE, WHOLE, Library, Target

LIBRARY = Library("softmax", "float32", Target("cpu"), "naive")
NAME = "softmax-float32-cpu-naive"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of libraries, none of which the compiler has made."""
    monkeypatch.setenv(precompiled.VARIABLE, str(tmp_path))
    assert precompiled.folder() == tmp_path

    @contextlib.contextmanager
    def built(library, target_cpu=""):
        # Several are built at once.
        path = tmp_path / f"partial-{threading.get_ident()}"
        path.write_text(f"code {target_cpu}")
        yield path
        path.unlink()

    monkeypatch.setattr(build, "built", built)
    monkeypatch.setattr(build, "features", lambda target_cpu="": FEATURES[target_cpu])
    monkeypatch.setattr(machine, "processor", lambda: "flags\t: avx avx2 avx512_bf16 avx512f fma")
    precompiled._warn_if_useless.cache_clear()
    return tmp_path


FEATURES = {
    "": ["avx", "avx2", "avx512bf16", "avx512f", "fma"],
    "x86-64-v3": ["avx", "avx2", "fma"],
    "x86-64-v4": ["avx", "avx2", "avx512f", "fma"],
    "sapphirerapids": ["avx", "avx2", "avx512f", "avx512fp16", "fma"],
}


@pytest.fixture
def elsewhere(folder, monkeypatch):
    """Has the processor be another one from here on."""

    def become(flags):
        monkeypatch.setattr(machine, "processor", lambda: f"flags\t: {flags}")

    return become


def silently(library=LIBRARY):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return precompiled.find(library)


def test_what_was_written_is_found(folder):
    assert precompiled.write(folder, LIBRARY) == folder / f"{NAME}.so"
    assert sorted(os.listdir(folder)) == [f"{NAME}.json", f"{NAME}.so"]
    assert silently() == folder / f"{NAME}.so"
    assert silently(LIBRARY._replace(dtype="float16")) is None
    assert silently(LIBRARY._replace(algorithm="auto")) is None
    assert silently(LIBRARY._replace(target=Target("gpu", "sm_90a"))) is None


def test_a_library_for_one_gpu_is_for_that_gpu_only(folder):
    mine = Library("softmax", "float32", Target("gpu", "sm_90a"))
    path = precompiled.write(folder, mine, "x86-64-v3")
    assert path.name == "softmax-float32-gpu-sm_90a-x86-64-v3.so"
    assert silently(mine) == path
    with pytest.warns(
        RuntimeWarning, match=f"{path.name} is not used: it was built for GPU sm_90a, and this one is sm_80"
    ):
        assert precompiled.find(mine._replace(target=Target("gpu", "sm_80"))) is None
    other = precompiled.write(folder, mine._replace(target=Target("gpu", "sm_80")))
    assert silently(mine._replace(target=Target("gpu", "sm_80"))) == other


def test_it_says_what_it_is(folder):
    about = json.loads(precompiled.write(folder, LIBRARY, "x86-64-v4").with_suffix(".json").read_text())
    assert about.pop("sha256")
    assert about == {
        **{"library": "softmax", "dtype": "float32", "device": "cpu", "architecture": "", "algorithm": "naive"},
        **{"block_size": None, "unroll": None, "out_dtype": "", "target_cpu": "x86-64-v4", "processor": ""},
        **build.versions(),
        "mojo": build.compiler(),
        "features": FEATURES["x86-64-v4"],
    }
    assert build.versions().keys() == {"maxsoftmax", "sources", "max", "machine"}


def test_the_folder_is_made(folder):
    assert precompiled.write(folder / "a" / "b", LIBRARY).exists()


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_there_is_no_folder(monkeypatch, value):
    if value is None:
        monkeypatch.delenv(precompiled.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(precompiled.VARIABLE, value)
    assert precompiled.folder() is None
    assert precompiled.find(LIBRARY) is None


def alter(path, **values):
    about = path.with_suffix(".json")
    about.write_text(json.dumps({**json.loads(about.read_text()), **values}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b"evil"), "it is damaged"),
        (lambda path: path.chmod(0o666), "others may write to it"),
        (lambda path: path.parent.chmod(0o777), "others may write to it"),
        (lambda path: path.with_suffix(".json").chmod(0o666), "others may write to it"),
        (lambda path: path.with_suffix(".json").unlink(), "there is no .*.json beside it"),
        (lambda path: path.with_suffix(".json").write_text("{"), "Expecting"),
        (lambda path: path.with_suffix(".json").write_text("[" * 100_000), "recursion"),
        (lambda path: path.with_suffix(".json").write_text("[]"), "holds no object"),
        (lambda path: alter(path, maxsoftmax="0.0.1"), "it was built for maxsoftmax 0.0.1, and this is "),
        (lambda path: alter(path, sources="other"), "it was built from other sources of this package"),
        (lambda path: alter(path, max="1.0"), "it was built for max 1.0, and this is "),
        (lambda path: alter(path, machine="pdp11"), "it was built for machine pdp11, and this is "),
        (lambda path: alter(path, processor="", features=["sse4a", "avx"]), "for a CPU with sse4a, which this one"),
        (lambda path: alter(path, processor="", features=None), "it was built for another CPU"),
        (lambda path: alter(path, sha256=None), "it is damaged"),
    ],
)
def test_what_cannot_be_trusted_or_used_is_left_alone_with_a_warning(folder, damage, reason):
    path = precompiled.write(folder, LIBRARY)
    damage(path)
    with pytest.warns(RuntimeWarning, match=f"{NAME}.so is not used: .*{reason}") as warned:
        assert precompiled.find(LIBRARY) is None
    assert len(warned) == 1
    assert "\n" not in str(warned[0].message)


def test_what_root_has_installed_may_be_used(folder, monkeypatch):
    path = precompiled.write(folder, LIBRARY)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    if owner == 0:
        assert silently() == path
    else:
        with pytest.warns(RuntimeWarning, match="belongs to another user"):
            assert precompiled.find(LIBRARY) is None


def test_the_best_that_a_cpu_can_run_is_taken(folder, elsewhere):
    here, v3, v4 = (precompiled.write(folder, LIBRARY, cpu) for cpu in ("", "x86-64-v3", "x86-64-v4"))
    more = precompiled.write(folder, LIBRARY, "sapphirerapids")
    assert len({here, v3, v4, more}) == 4
    assert silently() == here
    elsewhere("avx avx2 avx512f fma")
    assert silently() == v4
    elsewhere("avx avx2 fma sse4a")
    assert silently() == v3
    elsewhere("avx avx2 avx512f avx512_fp16 fma")
    assert silently() == more
    elsewhere("avx")
    with pytest.warns(RuntimeWarning, match="was built for a CPU with") as warned:
        assert precompiled.find(LIBRARY) is None
    assert len(warned) == 4


@pytest.mark.parametrize(
    ("make", "reason"),
    [(lambda path: None, "No such file"), (lambda path: path.mkdir(), "it holds no library")],
)
def test_a_folder_of_no_use_is_a_warning(folder, monkeypatch, make, reason):
    make(folder / "other")
    monkeypatch.setenv(precompiled.VARIABLE, str(folder / "other"))
    check_useless(reason)


def check_useless(reason):
    """Asserts that a library is looked for in vain, with a warning, once."""
    assert silently() is None
    with pytest.warns(RuntimeWarning, match=f"MAXSOFTMAX_PRECOMPILED names .*, which is of no use here: {reason}"):
        precompiled.warn_if_useless(LIBRARY, LIBRARY._replace(name=BUNDLE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        precompiled.warn_if_useless(LIBRARY, LIBRARY._replace(name=BUNDLE))


def test_a_folder_of_other_libraries_is_a_warning(folder):
    precompiled.write(folder, LIBRARY._replace(name="statistics"))
    check_useless(f"it does not hold {LIBRARY}")


def test_a_library_that_is_refused_is_a_warning_once(folder, monkeypatch):
    monkeypatch.setattr(load, "_kept", lambda key: "from the cache")
    monkeypatch.setattr(load, "_entry", lambda loaded, wanted, bundled: loaded)
    precompiled.write(folder, LIBRARY).write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning) as warned:
        assert load._find(LIBRARY) == "from the cache"
    assert ["it is damaged" in str(each.message) for each in warned] == [True]


def test_what_cannot_be_loaded_is_left_alone_with_a_warning(folder, monkeypatch):
    precompiled.write(folder, LIBRARY)
    monkeypatch.setattr(load, "_kept", lambda key: "from the cache")
    monkeypatch.setattr(load, "_entry", lambda loaded, wanted, bundled: loaded)
    with pytest.warns(RuntimeWarning, match=f"{NAME}.so is not used: "):
        assert load._find(LIBRARY) == "from the cache"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_80"], "--arch goes with --device gpu"),
        (["--device", "gpu", "--arch", "x86"], "--arch 'x86' is not an architecture that Mojo knows: choose from gfx"),
        (["--device", "gpu", "--arch", "sm_99"], "--arch 'sm_99' is not an architecture that Mojo knows"),
        (["--target-cpu", "pdp11"], "--target-cpu 'pdp11' is not a CPU that Mojo knows: choose from "),
        (["--algorithm", "tree"], "algorithm 'tree'"),
        (["--algorithm", "naive", "--op", "logsumexp"], "--algorithm naive is one of softmax"),
        (["--algorithm", "naive", "--out-dtype", "float16"], "--algorithm naive writes the dtype of logits"),
        (["--op", "logsumexp", "--out-dtype", "float16"], "out_dtype float16 goes with softmax and log_softmax"),
    ],
)
def test_what_cannot_be_compiled_is_one_sentence(capsys, tmp_path, arguments, message):
    assert message in fails(capsys, "compile", *arguments, "-o", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("arguments", [["--op", "what"], ["--dtype", "int8"], ["--device", "tpu"]])
def test_wrong_usage_exits_with_2(capsys, tmp_path, arguments):
    misused(capsys, "compile", *arguments, "-o", str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_all_that_was_asked_for_is_compiled(capsys, folder):
    (folder / "out").mkdir()
    many = ["--op", "softmax", "--op", "max_sum", "--op", "logsumexp", "--dtype", "f32", "--dtype", "bf16"]
    status = cli.main(["compile", *many, "--target-cpu", "x86-64-v4", "-o", str(folder / "out")])
    assert status == 0, capsys.readouterr().err
    names = {f"{name}-{t}-cpu-x86-64-v4" for name in ("softmax", "softmax_forms", "statistics") for t in TWO}
    assert {path.name for path in (folder / "out").iterdir()} == {f"{name}{s}" for name in names for s in SUFFIXES}
    printed = capsys.readouterr()
    assert sorted(printed.out.splitlines()) == sorted(f"{folder}/out/{name}.so: 14 bytes" for name in names)
    assert printed.err == ""
    assert cli.main(["compile", "--op", "softmax", "-o", str(folder / "out"), "--json", "-"]) == 0
    printed, told = capsys.readouterr()
    files = {f"{folder}/out/{name}-float32-cpu.so": 5 for name in ("softmax", "softmax_forms")}
    assert json.loads(printed) == {"libraries": files}
    assert sorted(told.splitlines()) == sorted(f"{path}: 5 bytes" for path in files)


TWO, SUFFIXES = ("float32", "bfloat16"), (".so", ".json")


def test_without_a_choice_everything_is_compiled(capsys, folder):
    assert cli.main(["compile", "-o", str(folder / "out")]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}/out/all-float32-cpu.so: ")
    assert cli.main(["compile", "--device", "gpu", "--arch", "sm_90a", "-o", str(folder / "gpu")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(WHOLE)


def test_softmax_is_compiled_for_another_dtype(capsys, folder):
    eight = ["--dtype", "f32", "--dtype", "bf16", "--out-dtype", "float8_e4m3fn"]
    assert cli.main(["compile", *eight, "-o", str(folder / "out")]) == 0, capsys.readouterr().err
    assert {path.name for path in (folder / "out").glob("*.so")} == {
        f"{name}-{dtype}-float8_e4m3fn-cpu.so" for name in ("softmax", "softmax_forms", "log_softmax") for dtype in TWO
    }


def test_a_gpu_is_launched_from_any_cpu_unless_told_otherwise(capsys, folder, monkeypatch):
    monkeypatch.setattr(ahead.platform, "machine", lambda: "x86_64")
    gpu = ["compile", "--device", "gpu", "--arch", "gfx942", "--algorithm", "online", "-o", str(folder / "out")]
    for more, cpu in (([], "x86-64-v3"), (["--target-cpu", "x86-64-v4"], "x86-64-v4")):
        assert cli.main([*gpu, *more]) == 0
        assert f"{folder}/out/softmax-float32-gpu-gfx942-online-{cpu}.so: " in capsys.readouterr().out


def test_without_a_compiler_compiling_is_one_sentence(capsys, tmp_path, monkeypatch):
    def missing(*names):
        raise extension.PackageNotFoundError(names[-1])

    # The package has a function of the same name.
    extension = sys.modules["maxsoftmax._graph.extension"]
    monkeypatch.setattr(extension, "distribution_version", missing)
    assert "compiler is not installed" in fails(capsys, "compile", "-o", str(tmp_path))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder of what the compiler has made of the same kernel for two CPUs."""
    folder = tmp_path_factory.mktemp("compiled")
    with contextlib.redirect_stdout(sys.stderr):
        for more in ([], ["--target-cpu", "x86-64-v3"] if os.uname().machine == "x86_64" else []):
            assert cli.main(["compile", "--algorithm", "naive", *more, "-o", str(folder)]) == 0
    return folder


ALONE = """
import numpy as np, sys, warnings
from maxsoftmax import _native
def missing(*names): raise extension.PackageNotFoundError(names[-1])
extension = sys.modules["maxsoftmax._graph.extension"]
extension.distribution_version = missing
x, y = np.zeros((7, 4), np.float32), np.empty((7, 4), np.float32)
plan = _native.plan("softmax", "float32", -1, (7, 4, 1), algorithm="naive")
assert not plan.run(plan.call, 0, y.ctypes.data, x.ctypes.data, None)
assert (y == 0.25).all()
# That it is not in the folder, either.
warnings.simplefilter("ignore")
try:
    _native.plan("softmax", "float16", -1, (7, 4, 1), algorithm="naive")
except RuntimeError as error:
    assert "compiler is not installed" in str(error)
else:
    raise AssertionError
"""


def without_a_compiler(compiled, tmp_path, environment):
    alone = {**environment, precompiled.VARIABLE: str(compiled), "MAXSOFTMAX_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-W", "error", "-c", ALONE], env=alone, check=True, timeout=120)
    assert not (tmp_path / "cache").exists()


def test_a_compiled_folder_serves_where_nothing_can_be_compiled(compiled, tmp_path, environment):
    without_a_compiler(compiled, tmp_path, environment)


def test_what_was_compiled_for_another_cpu_serves_where_it_can_run(compiled, tmp_path, environment):
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    for path in compiled.glob(f"{NAME}-x86-64-v3.*"):
        (chosen / path.name).write_bytes(path.read_bytes())
    if not list(chosen.iterdir()):
        pytest.skip("no x86-64 here")
    without_a_compiler(chosen, tmp_path, environment)


def test_what_cannot_be_used_is_built_where_there_is_a_compiler(compiled, tmp_path, monkeypatch):
    path = tmp_path / f"{NAME}.so"
    path.write_bytes((compiled / path.name).read_bytes())
    path.with_suffix(".json").write_text((compiled / path.name).with_suffix(".json").read_text())
    alter(path, max="1.0")
    monkeypatch.setenv(precompiled.VARIABLE, str(tmp_path))
    monkeypatch.setattr(load, "_libraries", {})
    for function in (_native.plan, load.functions):
        function.cache_clear()
    x = np.random.default_rng(0).standard_normal((3, 7), dtype=np.float32)
    y = np.empty_like(x)
    with pytest.warns(RuntimeWarning, match="is not used: it was built for max 1.0"):
        made = _native.plan("softmax", "float32", -1, (3, 7, 1), algorithm="naive")
    assert not made.run(made.call, 0, y.ctypes.data, x.ctypes.data, None)
    check(y, x)
