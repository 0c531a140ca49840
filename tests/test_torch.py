"""Softmax and its logarithm for torch, against torch's own, and what torch asks of operators."""

import subprocess
import sys

import pytest
from maxsoftmax import _native
from torch_tensors import ALONG, TOLERANCE, F, classes, close, normal, ours, same, torch, torch_device

SLOW = pytest.mark.slow
# Each dtype is other libraries to build.
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=SLOW), torch.float64]


@pytest.fixture(scope="session")
def place(device):
    return torch_device(device)


@pytest.fixture
def no_building(monkeypatch):
    monkeypatch.setattr(_native, "plan", lambda *what, **how: pytest.fail(f"plans {what}"))


# Softmax and its logarithm.


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), [((7, 300), -1), ((7, 300), 0), ((2, 3, 5, 4), 2), ((9,), 0)])
def test_along_a_dimension(place, name, dtype, shape, dim):
    mine, theirs = ALONG[name]
    x = normal(*shape, dtype=dtype, device=place)
    same(lambda x: mine(x, dim), lambda x: theirs(x, dim), x)


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 3, 4, 5)])
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_no_dimension_is_what_torch_makes_of_it(place, name, shape):
    mine, theirs = ALONG[name][0], getattr(F, name)
    same(lambda x: mine(x, None), lambda x: theirs(x, None), normal(*shape, device=place))


@pytest.mark.parametrize("name", ALONG)
def test_the_last_dimension_unless_told_otherwise(place, name):
    mine, theirs = ALONG[name]
    same(mine, lambda x: theirs(x, -1), normal(2, 3, 4, device=place))


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0,)])
def test_nothing_stays_nothing(place, name, shape, no_building):
    mine, theirs = ALONG[name]
    same(mine, lambda x: theirs(x, -1), normal(*shape, device=place))


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "steps": lambda x: x[::2, 1::3],
    "expanded": lambda x: x[:, :1].expand(6, 7),
    "backwards": lambda x: x.flip(1).t().flip(0),
}


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_lie_as_they_like(place, name, layout):
    mine, theirs = ALONG[name]
    view, x = LAYOUTS[layout], normal(6, 12, device=place)
    same(lambda x: mine(view(x)), lambda x: theirs(view(x), -1), x)


@pytest.mark.parametrize("name", ALONG)
def test_another_dtype_is_converted_to_first(place, name):
    mine, theirs = ALONG[name]
    x = normal(3, 8, dtype=torch.float16, device=place)
    same(lambda x: mine(x, dtype=torch.float32), lambda x: theirs(x, -1, dtype=torch.float32), x)
    whole = torch.arange(6, device=place).reshape(2, 3)
    close(mine(whole, 1, dtype=torch.float32), theirs(whole, 1, dtype=torch.float32))


@pytest.mark.parametrize("name", ALONG)
def test_special_values(place, name):
    mine, theirs = ALONG[name]
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[-inf, 0, 1], [nan, 0, 1], [inf, 0, 1], [-inf] * 3, [3e38, -3e38, 0]], device=place)
    close(mine(x), theirs(x, -1))


def test_parameters_of_a_module_learn(place):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3).to(place)
    mixing = torch.nn.Parameter(torch.zeros(3, device=place))
    x, target = normal(32, 4, device=place).detach(), classes(32, n=3, device=place)
    optimizer = torch.optim.SGD([*layer.parameters(), mixing], lr=0.5)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = ours.cross_entropy(layer(x) * ours.softmax(mixing), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert mixing.grad.abs().sum() > 0


# What torch asks of an operator.

TARGET = torch.tensor([0, 4, -100])


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("dim", [-1, 0])
def test_gradients_are_differences(name, dim):
    x = normal(3, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: ALONG[name][0](x, dim), x)
    assert torch.autograd.gradgradcheck(lambda x: ALONG[name][0](x, dim), x)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.2}])
def test_gradients_of_losses_are_differences(options):
    x = normal(3, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: ours.cross_entropy(x, TARGET, **options), x)
    assert torch.autograd.gradgradcheck(lambda x: ours.cross_entropy(x, TARGET, **options), x)


def test_a_third_derivative_is_that_of_torch(place):
    def third(function):
        x = normal(4, 6, device=place)
        for _ in range(3):
            (x_or_gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        value = function(x).square().sum()
        for _ in range(3):
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
            value = (slope * slope).sum()
        return value.detach(), x_or_gradient.detach()

    for mine, theirs in zip(third(ours.softmax), third(lambda x: torch.softmax(x, -1)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def calls():
    x, g = normal(3, 5), normal(3, 5, seed=1)
    of_loss = (TARGET, -100, 0.0, "mean")
    pairs = torch.stack([x.detach().amax(1), (x.detach() - x.detach().amax(1, keepdim=True)).exp().sum(1)], 1)
    return {
        "softmax": (x, 1),
        "log_softmax": (x, 1),
        "softmax_backward": (x, g, 1),
        "log_softmax_backward": (x, g, 1),
        "cross_entropy": (x, *of_loss),
        "cross_entropy_backward": (x, TARGET, pairs, torch.tensor(2.0, requires_grad=True), *of_loss[1:]),
    }


@pytest.mark.parametrize("name", calls())
def test_operators_are_as_torch_wants_them(name):
    # Of a loss the pairs have no gradient, and of its gradient they are part of the logits'.
    torch.library.opcheck(getattr(torch.ops.maxsoftmax, name).default, calls()[name])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_functions_keep_the_operators(place, dynamic):
    kept = []

    def backend(graph, inputs):
        kept.extend(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def function(x, target, softmax, log_softmax, cross_entropy):
        return cross_entropy(x * 2, target) + (softmax(x, 1) * log_softmax(x, 1)).mean()

    def mine(x, target):
        return function(x, target, ours.softmax, ours.log_softmax, ours.cross_entropy)

    def theirs(x, target):
        return function(x, target, torch.softmax, torch.log_softmax, F.cross_entropy)

    torch.compiler.reset()
    compiled = torch.compile(mine, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (6, 8):
        target = classes(rows, n=10, device=place)
        same(lambda x, t=target: compiled(x, t), lambda x, t=target: theirs(x, t), normal(rows, 10, device=place))
    for name in ("softmax", "log_softmax", "cross_entropy"):
        assert f"maxsoftmax.{name}.default" in " ".join(kept)


SAMPLED = {
    "softmax": ours.softmax,
    "log_softmax": ours.log_softmax,
    "nn.functional.cross_entropy": ours.cross_entropy,
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SAMPLED)
def test_torchs_own_samples(place, name, dtype):
    pytest.importorskip("expecttest")
    samples = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    count = 0
    for info in samples.op_db:
        if info.name == name and dtype in info.dtypes:
            for sample in info.sample_inputs(place, dtype, requires_grad=True):
                mine, theirs = (lambda x, f=f, s=sample: f(x, *s.args, **s.kwargs) for f in (SAMPLED[name], info.op))
                same(mine, theirs, sample.input)
                count += 1
    assert count > 5


# What is refused.

X = torch.zeros(3, 5)


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ([[1.0, 2.0]], TypeError, "x must be a torch.Tensor, not a list"),
        ([torch.zeros(3, dtype=torch.int64)], TypeError, "x has dtype int64, but it has to be float32, bfloat16"),
        ([torch.zeros(3, dtype=torch.complex64)], TypeError, "x has dtype complex64, but"),
        ([X, 2], IndexError, "dim 2 is out of bounds for x of rank 2: it must be from -2 to 1"),
        ([X, -3], IndexError, "dim -3 is out of bounds for x of rank 2"),
        ([torch.zeros(()), 1], IndexError, "dim 1 is out of bounds for x of rank 0: it must be from -1 to 0"),
        ([X, 0.0], TypeError, "dim must be an integer or None, not 0.0"),
        ([X, (0, 1)], TypeError, r"dim must be an integer or None, not \(0, 1\)"),
        ([X, True], TypeError, "dim must be an integer or None, not True"),
    ],
)
def test_what_has_no_softmax_is_refused_in_a_sentence(no_building, name, arguments, error, words):
    with pytest.raises(error, match=words):
        ALONG[name][0](*arguments)


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("dim", [True, 1.0])
def test_what_equals_an_integer_is_none(name, dim):
    """A call that is known by its arguments must not be taken for another."""
    mine = ALONG[name][0]
    mine(X, 1)
    with pytest.raises(TypeError, match="dim must be an integer or None"):
        mine(X, dim)


def test_the_package_does_without_torch():
    code = """
import sys
sys.modules["torch"] = None
import maxsoftmax
import maxsoftmax._commands.cli
try:
    import maxsoftmax.torch
except ImportError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert found.stdout == "maxsoftmax.torch needs PyTorch: pip install 'maxsoftmax[torch]'\n"
