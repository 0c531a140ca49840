"""Every public function has an example, and every example is true."""

import doctest
import importlib.util
import re
import subprocess
import sys

import maxsoftmax
import numpy
import pytest

NEEDS = {"torch": ["torch"], "torch.distributed": ["torch", "torch.distributed"], "jax": ["jax"]}
FUNCTIONS = {
    "": [name for name in maxsoftmax.__all__ if name != "ops"],
    "ops": [
        *("softmax", "log_softmax", "sparsemax", "max_sum", "logsumexp", "token_log_probs", "cross_entropy"),
        *("softmax_backward", "log_softmax_backward", "sparsemax_backward"),
        *("cross_entropy_forward", "cross_entropy_backward", "cross_entropy_backward_"),
        *("linear_cross_entropy", "linear_cross_entropy_backward", "linear_token_log_probs"),
        *("linear_token_log_probs_backward", "token_log_probs_backward", "kl_divergence", "kl_divergence_backward"),
    ],
    "ops.sharded": [
        *("softmax", "log_softmax", "logsumexp", "token_log_probs", "cross_entropy"),
        *("softmax_backward", "log_softmax_backward", "cross_entropy_forward", "cross_entropy_backward"),
    ],
    "nn": ["Softmax"],
    "torch": [
        *("softmax", "log_softmax", "sparsemax", "cross_entropy", "token_log_probs", "linear_cross_entropy"),
        *("linear_token_log_probs", "kl_divergence", "patch"),
    ],
    "torch.distributed": ["softmax", "log_softmax", "logsumexp", "cross_entropy"],
    "jax": [
        *("softmax", "log_softmax", "sparsemax", "logsumexp", "cross_entropy", "token_log_probs"),
        "softmax_cross_entropy_with_integer_labels",
    ],
}
EXAMPLES = [(module, name) for module, names in FUNCTIONS.items() for name in names]


def imported(module):
    for needed in NEEDS.get(module, ()):
        pytest.importorskip(needed)
    return importlib.import_module(f"maxsoftmax.{module}".rstrip("."))


@pytest.mark.parametrize("module", FUNCTIONS)
def test_every_public_function_is_among_them(module):
    home = imported(module)
    public = getattr(home, "__all__", None) or [
        name
        for name, value in vars(home).items()
        if getattr(value, "__module__", "") == home.__name__ and name[0] != "_"
    ]
    functions = {name for name in public if callable(getattr(home, name))}
    assert functions == set(FUNCTIONS[module])


@pytest.fixture
def group():
    """A process group of one."""
    torch = pytest.importorskip("torch")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("module", "name"), EXAMPLES, ids=lambda part: part or "maxsoftmax")
def test_examples_are_true(module, name, request):
    home = imported(module)
    names = {"maxsoftmax": maxsoftmax, "numpy": numpy}
    if module == "torch.distributed":
        request.getfixturevalue("group")
        names["torch"] = importlib.import_module("torch")
    example = doctest.DocTestParser().get_doctest(getattr(home, name).__doc__, names, f"{module}.{name}", None, 0)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


def test_dir_shows_what_users_use(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "max" or (name == "jax" and find(name)))
    modules = {"nn", "ops", *(["jax"] if find("jax") else [])}
    assert set(dir(maxsoftmax)) == {*maxsoftmax.__all__, *modules, "__version__"}


MODULES = """
import sys
import maxsoftmax
assert not [name for name in ("max.graph", "torch", "jax") if name in sys.modules]
for name in dir(maxsoftmax):
    assert getattr(maxsoftmax, name) is not None
sys.modules["torch"] = None
sys.modules.pop("maxsoftmax.torch", None)
vars(maxsoftmax).pop("torch", None)
try:
    maxsoftmax.torch
except ImportError as error:
    assert "maxsoftmax.torch needs PyTorch: pip install" in str(error)
else:
    raise AssertionError
"""


def test_modules_are_imported_when_they_are_asked_for(environment):
    subprocess.run([sys.executable, "-c", MODULES], env=environment, check=True, timeout=120)


@pytest.mark.parametrize(("module", "name"), EXAMPLES, ids=lambda part: part or "maxsoftmax")
def test_arguments_are_described_where_they_are(module, name):
    described = getattr(imported(module), name).__doc__.partition("Args:")[2].partition("Returns:")[0]
    # On hover there is nothing else to read.
    assert (
        re.search(
            r"\bas (for|of) `|\bas for\b|whatever `maxsoftmax|that `softmax` takes", " ".join(described.split()), re.I
        )
        is None
    )
