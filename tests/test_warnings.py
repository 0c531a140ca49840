import subprocess
import sys
import warnings
from pathlib import Path

import maxsoftmax
import pytest
from maxsoftmax import _cache as cache
from maxsoftmax import _warnings
from maxsoftmax._native import warm

PACKAGE = Path(maxsoftmax.__file__).parent


def compiled(name, code):
    """Returns what a module of this package would have that holds `code`."""
    found = {}
    exec(compile(code, str(PACKAGE / "_graph" / "other.py"), "exec"), found)
    return found[name]


WARNS = """
import contextlib
from maxsoftmax._warnings import warn

def plain():
    warn("told")

def hook(gradient):
    warn("told")

@contextlib.contextmanager
def managed():
    warn("told")
    yield

def within():
    with managed():
        pass
"""


@pytest.mark.parametrize("name", ["plain", "within"])
def test_a_warning_points_at_the_caller(name):
    function = compiled(name, WARNS)
    with pytest.warns(RuntimeWarning, match="told") as warned:
        lines = sys._getframe().f_lineno, function()
    assert (warned[0].filename, warned[0].lineno) == (__file__, lines[0])


def test_a_warning_comes_once_from_each_line(recwarn):
    warnings.simplefilter("default")
    function = compiled("plain", WARNS)
    for _ in range(3):
        function()
    function()
    assert len(recwarn) == 2


def test_a_warning_of_another_thread_points_at_who_started_it():
    function = compiled("plain", WARNS)
    with pytest.warns(RuntimeWarning, match="told") as warned:
        lines = sys._getframe().f_lineno, warm.parallel(lambda item: function(), [1])
    assert (warned[0].filename, warned[0].lineno) == (__file__, lines[0])
    assert _warnings._caller.get() is None


def test_a_warning_while_jax_traces_points_at_the_caller_of_jax():
    jax = pytest.importorskip("jax")
    function = compiled("plain", WARNS)
    with pytest.warns(RuntimeWarning, match="told") as warned:
        lines = sys._getframe().f_lineno, jax.jit(function)()
    assert (warned[0].filename, warned[0].lineno) == (__file__, lines[0])


def test_a_warning_while_torch_computes_gradients_points_at_the_caller_of_torch():
    torch = pytest.importorskip("torch")
    x = torch.zeros(1, requires_grad=True)
    y = x * 2
    y.register_hook(compiled("hook", WARNS))
    with pytest.warns(RuntimeWarning, match="told") as warned:
        lines = sys._getframe().f_lineno, y.backward()
    assert (warned[0].filename, warned[0].lineno) == (__file__, lines[0])


def test_a_cache_that_is_not_used_is_told_at_the_caller_s_line(tmp_path, environment):
    script = tmp_path / "script.py"
    script.write_text("import maxsoftmax\n\n\nprint(maxsoftmax.softmax([0.0, 0.0]))\n")
    (tmp_path / "file").touch()
    elsewhere = {**environment, cache.VARIABLE: str(tmp_path / "file" / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)], env=elsewhere, capture_output=True, encoding="utf-8", timeout=300, check=True
    )
    assert done.stdout == "[0.5 0.5]\n"
    assert f"{script}:4: RuntimeWarning: {tmp_path}/file/cache cannot keep compiled code" in done.stderr
