"""The operators for torch, against torch's own."""

import subprocess
import sys

import pytest
from maxsoftmax import runtime

torch = pytest.importorskip("torch")
ours = pytest.importorskip("maxsoftmax.torch")
F = torch.nn.functional

SLOW = pytest.mark.slow
# Each dtype, and each choice of a loss, is another model to compile.
DTYPES = [
    torch.float32,
    torch.bfloat16,
    pytest.param(torch.float16, marks=SLOW),
    pytest.param(torch.float64, marks=SLOW),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# Ours, and torch's own.
ALONG = {"softmax": (ours.softmax, torch.softmax), "log_softmax": (ours.log_softmax, torch.log_softmax)}


@pytest.fixture(scope="session")
def place(device):
    """Torch's name of a device of ours."""
    if device == "gpu" and not torch.cuda.is_available():
        pytest.skip("this torch has no GPU")
    return {"cpu": "cpu", "gpu": "cuda"}[device]


@pytest.fixture
def no_compiling(monkeypatch):
    monkeypatch.setattr(runtime, "model", lambda *what: pytest.fail(f"compiles {what}"))


def normal(*shape, dtype=torch.float32, device="cpu", seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return x.to(device, dtype).requires_grad_()


def classes(*shape, n, device="cpu", dtype=torch.int64, seed=1):
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(a, b):
    assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    tolerance = TOLERANCE[b.dtype]
    finite = b[b.isfinite()].abs()
    scale = max(1.0, finite.max().item()) if finite.numel() else 1.0
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def same(mine, theirs, x):
    """Asserts that two functions have the same result for `x`, and the same gradient."""
    results, gradients = [], []
    for function in (mine, theirs):
        y = function(x)
        dy = normal(*y.shape, device=y.device, seed=2, scale=1).detach().to(y.dtype)
        results.append(y.detach())
        gradients.append(torch.autograd.grad(y, x, dy)[0])
    close(*results)
    close(*gradients)


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
def test_nothing_stays_nothing(place, name, shape, no_compiling):
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


# Cross entropy.


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(d, marks=SLOW) for d in list(TOLERANCE) if d != torch.float32)]
)
@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=SLOW), pytest.param("none", marks=SLOW)])
def test_cross_entropy(place, dtype, reduction):
    target = classes(20, n=130, device=place)
    target[::7] = -100
    x = normal(20, 130, dtype=dtype, device=place)
    same(
        lambda x: ours.cross_entropy(x, target, reduction=reduction),
        lambda x: F.cross_entropy(x, target, reduction=reduction),
        x,
    )


@pytest.mark.parametrize(("shape", "of_target"), [((9,), ()), ((3, 9, 4), (3, 4)), ((2, 9, 3, 4), (2, 3, 4))])
def test_cross_entropy_has_its_classes_along_dimension_1(place, shape, of_target):
    target = classes(*of_target, n=9, device=place)
    same(lambda x: ours.cross_entropy(x, target), lambda x: F.cross_entropy(x, target), normal(*shape, device=place))


@pytest.mark.slow
@pytest.mark.parametrize(("ignored", "smoothing"), [(2, 0.0), (-100, 0.2), (2, 0.3)])
def test_choices_of_cross_entropy(place, ignored, smoothing):
    target = classes(20, n=7, device=place, dtype=torch.int64)
    options = {"ignore_index": ignored, "label_smoothing": smoothing}
    x = normal(20, 7, device=place)
    same(lambda x: ours.cross_entropy(x, target, **options), lambda x: F.cross_entropy(x, target, **options), x)


def test_a_share_is_not_rounded_on_its_way(place):
    target = classes(20, n=7, device=place, dtype=torch.int64)
    x = normal(20, 7, dtype=torch.float64, device=place).detach()
    close(ours.cross_entropy(x, target, label_smoothing=0.2), F.cross_entropy(x, target, label_smoothing=0.2))


def test_without_a_row_that_counts(place):
    target = torch.full((4,), -100, device=place)
    x = normal(4, 6, device=place)
    loss = ours.cross_entropy(x, target)
    assert loss.isnan()
    (dx,) = torch.autograd.grad(loss, x)
    assert (dx == 0).all()


def test_logits_and_targets_lie_as_they_like(place):
    target = classes(2, 24, n=9, device=place)[1, ::3]
    same(
        lambda x: ours.cross_entropy(x.t(), target),
        lambda x: F.cross_entropy(x.t(), target),
        normal(9, 8, device=place),
    )


# What torch asks of an operator.

TARGET = torch.tensor([0, 4, -100])


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("dim", [-1, pytest.param(0, marks=SLOW)])
def test_gradients_are_differences(name, dim):
    x = normal(3, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: ALONG[name][0](x, dim), x)
    assert torch.autograd.gradgradcheck(lambda x: ALONG[name][0](x, dim), x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(pytest.param(o, marks=SLOW) for o in ({"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.2})),
    ],
)
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


# A dtype each, because the losses compile dozens of models.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SAMPLED)
def test_torchs_own_samples(place, name, dtype):
    pytest.importorskip("expecttest")
    samples = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    count = sum(
        agrees(SAMPLED[name], info.op, sample)
        for info in samples.op_db
        if info.name == name and dtype in info.dtypes
        for sample in info.sample_inputs(place, dtype, requires_grad=True)
    )
    assert count > 5


def agrees(mine, theirs, sample):
    """Asserts that a sample has torch's result, and returns whether it is supported; if not, it is refused."""
    target = sample.args[0] if mine is ours.cross_entropy else None
    if target is not None and (sample.kwargs.get("weight") is not None or target.is_floating_point()):
        with pytest.raises((TypeError, ValueError), match="not supported"):
            mine(sample.input, target, **sample.kwargs)
        return False
    same(*(lambda x, f=f: f(x, *sample.args, **sample.kwargs) for f in (mine, theirs)), sample.input)
    return True


# What is refused.

X, T = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)


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
def test_what_has_no_softmax_is_refused_in_a_sentence(no_compiling, name, arguments, error, words):
    with pytest.raises(error, match=words):
        ALONG[name][0](*arguments)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"x": X.long()}, TypeError, "x has dtype int64"),
        ({"x": torch.zeros(())}, ValueError, "x has rank 0"),
        ({"target": torch.zeros(3, 5)}, TypeError, "target has dtype float32, but it has to be int32 or int64 classes"),
        ({"target": [0, 0, 0]}, TypeError, "target must be a torch.Tensor, not a list"),
        ({"target": T[:2]}, ValueError, r"target has shape \(2,\), but x of \(3, 5\) needs \(3,\)"),
        ({"target": T + 5}, ValueError, r"target\[0\] is 5, which is neither a class from 0 to 4 nor ignore_index"),
        ({"target": T.to("meta")}, ValueError, "target is on meta, but x is on cpu"),
        ({"weight": torch.ones(5)}, ValueError, "weight must be None: weights of classes are not supported"),
        ({"reduction": "max"}, ValueError, "reduction 'max' does not exist"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index must be an integer"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing 2.0 is not from 0 to 1"),
    ],
)
def test_a_bad_loss_is_refused_in_a_sentence(no_compiling, wrong, error, words):
    with pytest.raises(error, match=words):
        ours.cross_entropy(**{"x": X, "target": T, **wrong})


def test_the_package_does_without_torch():
    code = """
import sys
sys.modules["torch"] = None
import maxsoftmax
import maxsoftmax.cli
try:
    import maxsoftmax.torch
except ImportError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert found.stdout == "maxsoftmax.torch needs PyTorch: pip install 'maxsoftmax[torch]'\n"


# On a GPU.


@pytest.mark.gpu
def test_work_is_done_in_the_order_of_the_current_stream():
    """A kernel reads what a slow one before it on torch's stream wrote, and is read by one after it, unsynchronized."""
    expected = torch.softmax(torch.ones(512, 4096), -1).sum().item() * 2
    stream = torch.cuda.Stream()
    ours.softmax(torch.ones(2, 2, device="cuda"))
    for _ in range(20):
        with torch.cuda.stream(stream):
            x = torch.zeros(512, 4096, device="cuda")
            torch.cuda._sleep(10_000_000)
            x += 1
            y = ours.softmax(x)
            total = (y * 2).sum()
            # What was let go of must not be given to others before it has been read.
            del x, y
        ours.softmax(torch.randn(512, 4096, device="cuda"))
        stream.synchronize()
        assert total.item() == pytest.approx(expected, rel=1e-5)
