import json
import os
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError

import maxsoftmax
import numpy as np
import pytest
from commands import fails, misused
from contract import check
from max.dtype import DType
from maxsoftmax import ahead, artifacts, cli, eager, runtime
from test_artifacts import Compiled, Session

PARTS = ["gpu:1", "sm_90a", "bfloat16", "rows", "vector", "block_size=128", "unroll=4", "n=50257"]
NAME = "softmax-gpu1-sm_90a-bfloat16-rows-vector-block_size128-unroll4-n50257.mef"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(artifacts.VARIABLE, str(tmp_path))
    assert artifacts.folder() == tmp_path
    return tmp_path


def silently(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return artifacts.precompiled(folder, Session(), PARTS)


def test_what_was_written_is_loaded(folder):
    assert silently(folder) is None
    assert artifacts.write(folder, PARTS, Compiled()) == folder / NAME
    assert sorted(os.listdir(folder)) == [NAME[:-4] + ".json", NAME]
    assert silently(folder) == b"code"
    assert artifacts.is_precompiled(folder, PARTS)
    assert not artifacts.is_precompiled(folder, PARTS[:-1])


def test_the_folder_is_made(tmp_path):
    assert artifacts.write(tmp_path / "a" / "b", PARTS, Compiled()).exists()


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_there_is_no_folder(monkeypatch, value):
    if value is None:
        monkeypatch.delenv(artifacts.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(artifacts.VARIABLE, value)
    assert artifacts.folder() is None


def alter(path, **values):
    about = path.with_suffix(".json")
    about.write_text(json.dumps({**json.loads(about.read_text()), **values}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b"evil"), "it is damaged"),
        (lambda path: path.chmod(0o666), "others may write to it"),
        (lambda path: path.parent.chmod(0o777), "others may write to it"),
        (lambda path: path.with_suffix(".json").unlink(), "No such file"),
        (lambda path: path.with_suffix(".json").write_text("{"), "Expecting"),
        (lambda path: alter(path, max="1.0"), "it was compiled for max 1.0, and this is "),
        (lambda path: alter(path, machine="pdp11"), "it was compiled for machine pdp11, and this is "),
    ],
)
def test_what_cannot_be_trusted_or_used_is_left_alone_with_a_warning(folder, damage, reason):
    path = artifacts.write(folder, PARTS, Compiled())
    damage(path)
    with pytest.warns(RuntimeWarning, match=f"is not used: .*{reason}"):
        assert artifacts.precompiled(folder, Session(), PARTS) is None


def test_what_max_refuses_is_left_alone_with_a_warning(folder):
    class Picky(Session):
        def load(self, path):
            raise ValueError("not mine")

    artifacts.write(folder, PARTS, Compiled())
    with pytest.warns(RuntimeWarning, match="is not used: not mine"):
        assert artifacts.precompiled(folder, Picky(), PARTS) is None


def test_what_root_has_installed_may_be_used(folder, monkeypatch):
    artifacts.write(folder, PARTS, Compiled())
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    if owner == 0:
        assert silently(folder) == b"code"
    else:
        with pytest.warns(RuntimeWarning, match="belongs to another user"):
            assert artifacts.precompiled(folder, Session(), PARTS) is None


def test_a_model_for_one_length_is_for_that_length_only(folder):
    device = runtime.device("cpu")
    signature = runtime.Signature(device, DType.float32, True, "auto", 128, 4)
    artifacts.write(folder, [*signature.parts(), "n=7"], Compiled())
    assert runtime._precompiled_for(signature, 7, folder).n == 7
    assert runtime._precompiled_for(signature, 8, folder) == signature


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_80"], "--arch goes with --device gpu"),
        (["--device", "gpu", "--arch", "x86"], "--arch 'x86' is not an architecture that Mojo knows: choose from gfx"),
        (["--device", "gpu", "--arch", "sm_99"], "--arch 'sm_99' is not an architecture that Mojo knows"),
        (["--algorithm", "tree"], "algorithm 'tree'"),
    ],
)
def test_what_cannot_be_compiled_is_one_sentence(capsys, tmp_path, arguments, message):
    assert message in fails(capsys, "compile", *arguments, "-o", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("arguments", [["--n", "0"], ["--n", "x"], ["--dtype", "int8"], ["--axis", "3"]])
def test_wrong_usage_exits_with_2(capsys, tmp_path, arguments):
    misused(capsys, "compile", *arguments, "-o", str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_the_device_here_is_the_one_to_compile_for():
    assert ahead.target("cpu", None) == runtime.device("cpu")


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch):
    def missing(*names):
        raise PackageNotFoundError(names[-1])

    # The package has a function of the same name.
    extension = sys.modules["maxsoftmax.extension"]
    monkeypatch.setattr(extension, "distribution_version", missing)
    with pytest.raises(RuntimeError, match=r"compiler is not installed.*maxsoftmax compile"):
        extension.key.__wrapped__()


def test_a_compiled_folder_serves_where_nothing_can_be_compiled(capsys, tmp_path, environment):
    assert cli.main(["compile", "-o", str(tmp_path / "models")]) == 0
    assert "softmax-cpu-float32-rows-auto.mef: " in capsys.readouterr().out
    code = """
import maxsoftmax, numpy as np, pytest, sys
def missing(*names): raise extension.PackageNotFoundError(names[-1])
extension = sys.modules["maxsoftmax.extension"]
extension.distribution_version = missing
y = maxsoftmax.softmax(np.zeros((7, 4), np.float32))
assert (y == 0.25).all()
with pytest.raises(RuntimeError, match="compiler is not installed"):
    maxsoftmax.softmax(np.zeros((7, 4), np.float16))
"""
    alone = {
        **environment,
        artifacts.VARIABLE: str(tmp_path / "models"),
        "MAXSOFTMAX_CACHE_DIR": str(tmp_path / "cache"),
    }
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=alone, check=True, timeout=120)
    assert not (tmp_path / "cache").exists()


def test_a_fixed_length_gives_the_same(tmp_path, monkeypatch):
    x = np.random.default_rng(0).standard_normal((3, 7), dtype=np.float32)
    assert cli.main(["compile", "--n", "7", "-o", str(tmp_path)]) == 0
    monkeypatch.setenv(artifacts.VARIABLE, str(tmp_path))
    monkeypatch.setattr(eager, "_shortcuts", {})
    with runtime.observing(lambda signature: pytest.fail("compiled again")):
        check(maxsoftmax.softmax(x), x)
    assert any(signature.n == 7 for signature in runtime._models)
