"""Cross entropy without the logits of all rows, for torch, against torch's own functions in float64."""

import contextlib

import pytest
from torch_tensors import TOLERANCE, F, classes, normal, ours, torch, torch_device

products = pytest.importorskip("maxsoftmax.torch._products")

DTYPES = [pytest.param(d, marks=[pytest.mark.slow] * (d is torch.float16)) for d in TOLERANCE]

CHOICES = [
    {},
    {"reduction": "sum", "ignore_index": 3},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0, "reduction": "sum"},
    {"softcap": 5.0},
    {"softcap": 5.0, "label_smoothing": 0.2, "reduction": "none"},
    {"z_loss": 0.05},
    {"z_loss": 0.01, "softcap": 5.0, "label_smoothing": 0.2, "reduction": "sum"},
]


@pytest.fixture(scope="session")
def place(device):
    return torch_device(device)


def reference(hidden, weight, target, bias=None, *, softcap=None, z_loss=0.0, **options):
    """Returns the loss with all logits."""
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, target.flatten().long(), **options)
    if z_loss:
        counts = target.flatten() != options.get("ignore_index", -100)
        terms = z_loss * logits.logsumexp(1).square() * counts
        how = options.get("reduction", "mean")
        loss = loss + (terms if how == "none" else terms.sum() / (counts.sum() if how == "mean" else 1))
    return loss.view(target.shape) if options.get("reduction") == "none" else loss


def sampled(rows, n, features, place, *, dtype=torch.float32, ignored=()):
    """Returns hidden, weight, bias and targets, some of which do not count."""
    hidden = normal(*rows, features, dtype=dtype, device=place, scale=1)
    weight = normal(n, features, dtype=dtype, device=place, seed=3, scale=0.5)
    bias = normal(n, dtype=dtype, device=place, seed=4, scale=1)
    target = classes(*rows, n=n, device=place)
    target.view(-1)[list(ignored)] = -100
    return hidden, weight, bias, target


def exact(*tensors):
    return [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def check(function, tensors, target, dtype, limit=None, **options):
    """Asserts that the loss and all gradients are those of float64."""
    wide = exact(*tensors)
    loss = function(*tensors[:2], target, *tensors[2:])
    expected = reference(*wide[:2], target, *wide[2:], **options)
    assert loss.shape == expected.shape
    upstream = normal(*loss.shape, device=loss.device, seed=9, scale=1).detach().double()
    found = torch.autograd.grad(loss, [t for t in tensors if t is not None], upstream.to(loss.dtype))
    gradients = torch.autograd.grad(expected, [t for t in wide if t is not None], upstream)
    assert error(loss.detach(), expected.detach()) <= 4 * TOLERANCE[dtype]
    for mine, theirs, of in zip(found, gradients, [t for t in tensors if t is not None], strict=True):
        assert (mine.dtype, mine.shape) == (of.dtype, of.shape)
        assert error(mine, theirs) <= (limit or 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", CHOICES, ids=str)
@pytest.mark.parametrize("chunk", [None, 1, 7, 64])
def test_values_and_gradients(place, dtype, options, chunk):
    hidden, weight, bias, target = sampled((4, 16), 130, 24, place, dtype=dtype, ignored=(0, 5, 6, 63))
    target = target.where(target != -100, options.get("ignore_index", -100))
    for given in (bias, None):
        check(
            lambda *tensors: ours.linear_cross_entropy(*tensors, chunk=chunk, **options),
            (hidden, weight, given),
            target,
            dtype,
            **options,
        )


@pytest.mark.parametrize("chunk", [1, 16, 100, 256])
@pytest.mark.parametrize("n", [2, 300, 301])
@pytest.mark.parametrize("block", [7, 8192])
def test_the_weights_gradient_is_rounded_once(place, chunk, n, block, monkeypatch):
    """Whatever the chunk, it is not further from float64 than that of one product of all rows."""
    monkeypatch.setattr(products, "BLOCK", block)
    hidden, weight, _, target = sampled((256,), n, 64, place, dtype=torch.bfloat16)
    (dweight,) = torch.autograd.grad(ours.linear_cross_entropy(hidden, weight, target, chunk=chunk), weight)
    rows, matrix = exact(hidden, weight)
    (expected,) = torch.autograd.grad(reference(rows, matrix, target), matrix)
    (whole,) = torch.autograd.grad(reference(hidden, weight, target), weight)
    assert error(dweight, expected) <= 1.02 * error(whole, expected)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_under_autocast(place, low, reduction):
    hidden, weight, bias, target = sampled((60,), 130, 24, place, ignored=(7,))
    with torch.autocast(place, dtype=low):

        def mine(*tensors):
            loss = ours.linear_cross_entropy(*tensors, reduction=reduction, chunk=16)
            assert loss.dtype == torch.float32
            return loss

        check(mine, (hidden, weight, bias), target, low, reduction=reduction)


def test_rows_that_do_not_count_are_not_looked_at(place):
    hidden, weight, bias, target = sampled((40,), 50, 8, place)
    target[::3] = -100
    spoiled = hidden.detach().clone()
    spoiled[::3] = float("nan")
    results = []
    for given in (hidden.detach(), spoiled):
        rows = given.requires_grad_()
        loss = ours.linear_cross_entropy(rows, weight, target, bias, chunk=9)
        results.append((loss.detach(), *torch.autograd.grad(loss, (rows, weight, bias))))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert (results[0][1][::3] == 0).all()


@pytest.mark.parametrize(("reduction", "value"), [("mean", float("nan")), ("sum", 0.0)])
@pytest.mark.parametrize("rows", [0, 5])
def test_without_a_row_that_counts(place, reduction, value, rows):
    hidden, weight, bias, target = sampled((rows,), 20, 8, place)
    target.fill_(-100)
    loss = ours.linear_cross_entropy(hidden, weight, target, bias, reduction=reduction)
    torch.testing.assert_close(loss.item(), value, equal_nan=True)
    for gradient in torch.autograd.grad(loss, (hidden, weight, bias)):
        assert (gradient == 0).all()


def test_only_what_wants_a_gradient_has_one(place):
    hidden, weight, bias, target = sampled((20,), 30, 8, place)
    tensors = hidden, weight, bias
    whole = torch.autograd.grad(ours.linear_cross_entropy(hidden, weight, target, bias), tensors)
    for i in range(3):
        given = [t.detach().requires_grad_(i == j) for j, t in enumerate(tensors)]
        (alone,) = torch.autograd.grad(ours.linear_cross_entropy(*given[:2], target, given[2]), given[i])
        assert torch.equal(alone, whole[i])
    with torch.no_grad():
        assert not ours.linear_cross_entropy(hidden, weight, target, bias).requires_grad


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_may_be_asked_for_again(place, reduction):
    hidden, weight, bias, target = sampled((20,), 30, 8, place)
    loss = ours.linear_cross_entropy(hidden, weight, target, bias, reduction=reduction).sum()
    for times in (1, 2, 3):
        loss.backward(retain_graph=True)
        if times == 1:
            first = [t.grad.clone() for t in (hidden, weight, bias)]
        for mine, once in zip((hidden, weight, bias), first, strict=True):
            torch.testing.assert_close(mine.grad, times * once)


def test_tensors_lie_as_they_like(place):
    hidden, weight, bias, target = sampled((6, 10), 30, 8, place)
    turned = hidden.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    matrix = weight.detach().t().contiguous().t().requires_grad_()
    chosen = target.t().contiguous().t().int()
    check(lambda *tensors: ours.linear_cross_entropy(*tensors, chunk=16), (turned, matrix, bias), chosen, torch.float32)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(place, reduction):
    tensors = hidden, weight, bias, target = sampled((20,), 30, 8, place)

    def function(hidden, weight, target, bias):
        return ours.linear_cross_entropy(hidden * 2, weight, target, bias, reduction=reduction).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, plain = (torch.autograd.grad(f(hidden, weight, target, bias), tensors[:3]) for f in (compiled, function))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_operator_is_as_torch_wants_it(reduction):
    hidden, weight, bias, target = sampled((6,), 30, 8, "cpu")
    wanted = [True] * 3 if reduction == "mean" else [False] * 3
    arguments = hidden, weight, target, bias, None, -100, 0.1, reduction, None, 0.01, 4, torch.float32, wanted
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.maxsoftmax.linear_cross_entropy.default, arguments, test_utils=tests)


def test_gradients_are_differences():
    hidden, weight, bias, target = sampled((5,), 7, 3, "cpu", dtype=torch.float64, ignored=(2,))
    for options in ({}, {"reduction": "none", "softcap": 2.0, "label_smoothing": 0.1}):
        assert torch.autograd.gradcheck(
            lambda *tensors, o=options: ours.linear_cross_entropy(*tensors[:2], target, tensors[2], chunk=2, **o),
            (hidden, weight, bias),
        )


@pytest.mark.gpu
def test_a_mistake_on_a_gpu_is_not_a_number():
    hidden, weight, _, target = sampled((3,), 5, 4, "cuda")
    target[1] = 7
    losses = ours.linear_cross_entropy(hidden, weight, target, reduction="none")
    assert losses.isnan().tolist() == [False, True, False]


H, W, T = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"hidden": [[0.0]]}, TypeError, "hidden must be a torch.Tensor, not a list"),
        ({"weight": W.long()}, TypeError, "weight has dtype int64"),
        ({"weight": W.double()}, TypeError, "weight has dtype float64, but hidden has float32"),
        (
            {"weight": torch.zeros(5, 3)},
            ValueError,
            r"weight has shape \(5, 3\), but hidden of \(3, 4\) needs \(n, 4\)",
        ),
        ({"bias": torch.zeros(4)}, ValueError, r"bias has shape \(4,\), but weight of \(5, 4\) needs one a row"),
        ({"target": T[:2]}, ValueError, r"target has shape \(2,\), but hidden of \(3, 4\) needs \(3,\)"),
        ({"target": T.float()}, TypeError, "target has dtype float32, but classes are int64 or int32"),
        ({"target": T.to("meta")}, ValueError, "target is on meta, but hidden is on cpu"),
        ({"target": T + 5}, ValueError, r"target\[0\] is 5, which is neither a class from 0 to 4 nor ignored"),
        ({"target": T + 5}, IndexError, "neither a class"),
        ({"chunk": 0}, ValueError, "chunk must be a positive number of rows, not 0"),
        ({"chunk": 1.5}, TypeError, "chunk must be an integer or None, not 1.5"),
        ({"softcap": -1}, ValueError, "softcap must be a positive, finite number, not -1"),
        ({"z_loss": -1}, ValueError, "z_loss must be 0 or a positive, finite number, not -1"),
        ({"z_loss": "much"}, TypeError, "z_loss must be a number, not 'much'"),
        ({"reduction": "max"}, ValueError, "reduction 'max' does not exist"),
        ({"label_smoothing": 2}, ValueError, "label_smoothing 2 is not from 0 to 1"),
        ({"ignore_index": None}, TypeError, "ignore_index must be an integer"),
    ],
)
def test_what_is_wrong_is_refused_in_a_sentence(wrong, error, words):
    with pytest.raises(error, match=words):
        ours.linear_cross_entropy(**{"hidden": H, "weight": W, "target": T, **wrong})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_the_loss_is_not_rounded(place, dtype):
    """A scale of the loss may be too large for the gradients' dtype, or have no number there."""
    hidden, weight, _, target = sampled((40,), 33, 16, place, dtype=dtype)
    for scale in (65536.0 * 2, 1 / 3):
        with torch.autocast(hidden.device.type, dtype):
            # Its loss is of float32.
            loss = ours.linear_cross_entropy(hidden, weight, target)
        assert loss.dtype is torch.float32
        found = torch.autograd.grad(loss * scale, (hidden, weight))
        plain = torch.autograd.grad(ours.linear_cross_entropy(hidden, weight, target), (hidden, weight))
        for gradient, unit in zip(found, plain, strict=True):
            expected = unit.double() * scale
            inside = expected.abs() < torch.finfo(dtype).max
            torch.testing.assert_close(gradient[inside], expected[inside].to(dtype), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("rows", "n"), [(3, 1), (5, 7), (9, 128), (70, 1000), (9, 1023), (33, 4097), (5, 50257), (3, 128256), (2, 600001)]
)
def test_logits_are_overwritten_by_gradients(dtype, index, rows, n):
    from maxsoftmax.torch._direct_losses import overwrite, wide

    for offset in (0, 1):
        memory = normal(rows * n + offset, dtype=dtype, device="cuda", scale=2).detach().clone()
        x = memory[offset:].view(rows, n)
        target = classes(rows, n=n, device="cuda").to(index)
        target[rows // 2] = -100
        expected, y = x.double().clone(), torch.softmax(x.double(), 1)
        y[torch.arange(rows), target.clamp(min=0).long()] -= 1
        y[rows // 2] = 0
        target[0], y[0] = n, float("nan")
        pairs = overwrite(x, target, -100)
        limit = TOLERANCE[dtype]
        torch.testing.assert_close(
            x.double(), y, rtol=limit, atol=1e-7 if dtype is torch.float32 else limit * 1e-2, equal_nan=True
        )
        m = expected.max(1).values
        assert pairs.dtype == wide(dtype)
        torch.testing.assert_close(pairs[:, 0].double(), m, rtol=0, atol=0)
        d = (expected - m[:, None]).exp().sum(1)
        torch.testing.assert_close(pairs[:, 1].double(), d, rtol=1e-5, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.overrides.BaseTorchFunctionMode])
def test_a_second_derivative_is_refused(reduction, mode):
    hidden = H.clone().requires_grad_()
    # A mode sees an operator, which has a way of its own.
    with mode():
        loss = ours.linear_cross_entropy(hidden, W, T, reduction=reduction).sum()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        (loss + gradient.square().sum()).backward()
