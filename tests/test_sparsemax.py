"""Sparsemax and its gradient, against sorting in float64."""

import warnings

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
from contract import DTYPES, logits
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from maxsoftmax import _native

LENGTHS = (1, 2, 3, 7, 31, 64, 129, 513, 1000, 2049, 4097, 8200, 33_000, 50_257)
"""On both sides of what each kernel takes, whatever the dtype."""

ABSOLUTE = {"float32": 2e-7, "bfloat16": 2e-7, "float16": 2e-7, "float64": 4e-16}
"""By how much results may be wrong before they are rounded: what differences of numbers up to 1 are rounded by."""

ROUNDING = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "float64": 0}
"""What that adds, relative."""


SHARE = {"float32": 2**-21, "bfloat16": 2**-8, "float16": 2**-11, "float64": 2**-50}
"""By how much equal shares may be wrong, relative: what their sum is rounded by."""


def wide(x):
    return np.asarray(x).astype(np.longdouble if np.asarray(x).dtype == np.float64 else np.float64)


def expected(x, axis=-1):
    """Returns sparsemax by sorting, as the paper has it."""
    x = np.moveaxis(wide(x), axis, -1)
    with np.errstate(invalid="ignore"):
        z = x - x.max(-1, keepdims=True)
    poisoned = np.isnan(z).any(-1, keepdims=True)
    z = np.where(poisoned, 0, z)
    ordered = -np.sort(-z, axis=-1)
    # What is not above -1 is not above the threshold, and would be inf among the sums.
    sums = np.cumsum(np.maximum(ordered, -2), axis=-1) - 1
    counts = np.arange(1, x.shape[-1] + 1)
    k = (ordered * counts > sums).sum(-1, keepdims=True)
    y = np.maximum(z - np.take_along_axis(sums, k - 1, -1) / k, 0)
    return np.moveaxis(np.where(poisoned, np.nan, y), -1, axis)


def check(y, x, axis=-1):
    """Asserts that `y` is sparsemax of `x`."""
    y = np.asarray(y)
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    name = y.dtype.name
    found, reference = y.astype(np.float64), expected(x, axis).astype(np.float64)
    np.testing.assert_allclose(found, reference, rtol=ROUNDING[name], atol=ABSOLUTE[name])


def gradient(y, dy, axis):
    y, dy = wide(y), wide(dy)
    above = y > 0
    mean = np.where(above, dy, 0).sum(axis, keepdims=True) / above.sum(axis, keepdims=True)
    return np.where(above, dy - mean, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("scale", [0.01, 4.0])
def test_rows(device, dtype, n, scale):
    x = logits((3, n), dtype, scale=scale)
    check(maxsoftmax.sparsemax(x, device=device), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("inner", [3, 33])
def test_columns(device, dtype, n, inner):
    x = logits((2, n, inner), dtype, scale=1.0)
    check(maxsoftmax.sparsemax(x, 1, device=device), x, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), [((7,), 0), ((5, 33, 4), 0), ((5, 33, 4), 1), ((2, 3, 4, 5), -2)])
def test_any_axis(device, dtype, shape, axis):
    x = logits(shape, dtype)
    check(maxsoftmax.sparsemax(x, axis, device=device), x, axis)


def test_several_axes_and_any_layout(device):
    x = logits((3, 4, 5))
    np.testing.assert_array_equal(
        maxsoftmax.sparsemax(x, None, device=device).ravel(), maxsoftmax.sparsemax(x.ravel(), device=device)
    )
    turned = np.asfortranarray(x)
    assert maxsoftmax.sparsemax(turned, 1, device=device).strides == turned.strides
    check(maxsoftmax.sparsemax(turned, 1, device=device), turned, 1)
    y = maxsoftmax.sparsemax(turned, (0, 2), device=device)
    for i in range(4):
        check(y[:, i].ravel(), x[:, i].ravel())
    gapped = logits((6, 40))[::2, ::3]
    check(maxsoftmax.sparsemax(gapped, device=device), gapped)
    dy = logits((6, 40), seed=1)[::2, ::3]
    dx = maxsoftmax.sparsemax_backward(y := maxsoftmax.sparsemax(gapped, device=device), dy, device=device)
    np.testing.assert_allclose(dx, gradient(y, dy, -1), atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 1_000_003), (1, 300_001, 2)])
def test_rows_that_are_shared_out_or_do_not_fit(device, shape):
    for scale in (1e-7, 1e-3, 4.0):
        x = logits(shape, scale=scale)
        check(maxsoftmax.sparsemax(x, 1, device=device), x, 1)


@pytest.mark.parametrize("n", [5, 100, 3000, 70_000])
def test_special_values(device, n):
    inf, nan = np.inf, np.nan
    x = np.tile(logits((n,)), (6, 1))
    x[0, n // 2] = nan
    x[1, n // 2] = inf
    x[2] = -inf
    x[3, ::2] = -inf
    x[4, 0], x[4, n // 2] = inf, nan
    y = maxsoftmax.sparsemax(x, device=device)
    assert np.isnan(y[[0, 1, 2, 4]]).all()
    check(y, x)
    assert (y[3, ::2] == 0).all()
    check(maxsoftmax.sparsemax(np.ascontiguousarray(x.T), 0, device=device), np.ascontiguousarray(x.T), 0)


def test_one_number_beside_minus_infinity(device):
    x = np.full((1, 400), -np.inf, np.float32)
    x[0, 7] = 3e38
    y = maxsoftmax.sparsemax(x, device=device)
    assert y[0, 7] == 1
    assert y.sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 1000, 50_257])
def test_equal_logits_share_alike(device, dtype, n):
    for value in (0, -3.5, 60_000):
        x = np.full((2, n), value, dtype)
        y = maxsoftmax.sparsemax(x, device=device)
        assert (y == y[0, 0]).all()
        np.testing.assert_allclose(float(y[0, 0]), 1 / n, rtol=SHARE[y.dtype.name], atol=2**-25 * (dtype == np.float16))


def test_more_equal_logits_than_float32_counts(device):
    n = 2**25 + 3
    y = maxsoftmax.sparsemax(np.zeros((1, n), np.float32), device=device)
    assert (y == y[0, 0]).all()
    np.testing.assert_allclose(y[0, 0], 1 / n, rtol=1e-6)


def test_ties_at_the_threshold(device):
    # Exactly 1 below the maximum is exactly at the threshold of one element.
    x = np.array([[3, 2, 2, 2], [0.5, 0.5, 0, 0], [0, -1, -1, -2]], np.float32)
    np.testing.assert_array_equal(
        maxsoftmax.sparsemax(x, device=device), np.array([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [1, 0, 0, 0]], np.float32)
    )


@pytest.mark.parametrize("n", [10, 3000, 50_257])
def test_huge_and_tiny_values(device, n):
    for scale in (1e-38, 1e-20, 1e6, 1e30, 6e37):
        x = logits((2, n), scale=scale)
        check(maxsoftmax.sparsemax(x, device=device), x)


@pytest.mark.parametrize("n", [2, 100, 4000, 50_257])
def test_one_element_takes_all(device, n):
    x = logits((4, n), scale=0.1)
    places = [0, n - 1, n // 2, n // 3]
    x[np.arange(4), places] = 5
    y = np.zeros_like(x)
    y[np.arange(4), places] = 1
    np.testing.assert_array_equal(maxsoftmax.sparsemax(x, device=device), y)


@pytest.mark.parametrize("n", [2, 100, 4000, 50_257, 600_000])
def test_all_elements_above_the_threshold(device, n):
    x = logits((2, n), scale=0.01 / n)
    y = maxsoftmax.sparsemax(x, device=device)
    assert (y > 0).all()
    check(y, x)
    # Where each has little, each little counts.
    np.testing.assert_allclose(y, expected(x).astype(np.float64), rtol=1e-6)


@pytest.mark.parametrize("n", [1000, 50_257])
def test_distances_that_take_the_most_steps(device, n):
    """Each step leaves out few elements, where those below the maximum are ever closer to the threshold."""
    z = -1 + 2.0 ** -np.linspace(0, 40, n)
    x = np.concatenate([[0.0], z])[None]
    for dtype in (np.float32, np.float64):
        check(maxsoftmax.sparsemax(x.astype(dtype), device=device), x.astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", LENGTHS)
def test_results_sum_to_one(device, dtype, n):
    for scale in (1e-9, 1e-4, 0.1, 1, 30):
        y = maxsoftmax.sparsemax(logits((3, n), dtype, scale=scale), device=device)
        assert (y >= 0).all()
        np.testing.assert_allclose(wide(y).sum(-1).astype(np.float64), 1, rtol=10 * ABSOLUTE[y.dtype.name])


def same(a, b):
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("n", [5, 63, 777, 4097, 40_001])
def test_bits_of_a_row_are_its_own(device, dtype, n):
    """Of the batch it is in, its place and its address; on a CPU test_batch.py has threads and offsets as well."""
    for scale in (1.0 / n, 2.0):
        x, dy = logits((70, n), dtype, scale=scale), logits((70, n), dtype, seed=1)
        y = maxsoftmax.sparsemax(x, device=device)
        dx = maxsoftmax.sparsemax_backward(y, dy, device=device)
        turned = maxsoftmax.sparsemax(np.ascontiguousarray(x.T), 0, device=device)
        dturned = maxsoftmax.sparsemax_backward(turned, np.ascontiguousarray(dy.T), 0, device=device)
        for start, stop in ((0, 1), (3, 4), (1, 34), (69, 70), (37, 70)):
            part = slice(start, stop)
            same(maxsoftmax.sparsemax(x[part], device=device), y[part])
            same(maxsoftmax.sparsemax_backward(y[part], dy[part], device=device), dx[part])
            if stop - start > 1:
                columns = np.ascontiguousarray(x.T[:, part]), np.ascontiguousarray(dy.T[:, part])
                found = maxsoftmax.sparsemax(columns[0], 0, device=device)
                same(found, turned[:, part])
                same(maxsoftmax.sparsemax_backward(found, columns[1], 0, device=device), dturned[:, part])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (4, 257), (3, 20_000), (5, 33, 4), (2, 9000, 3), (2, 400_000)])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_backward(device, dtype, shape, axis):
    if axis == len(shape):
        axis = 0
    x, dy = logits(shape, dtype, scale=0.5), logits(shape, dtype, scale=1, seed=1)
    y = maxsoftmax.sparsemax(x, axis, device=device)
    dx = maxsoftmax.sparsemax_backward(y, dy, axis, device=device)
    assert dx.dtype == dtype
    reference = gradient(y, dy, axis).astype(np.float64)
    name = dx.dtype.name
    np.testing.assert_allclose(dx.astype(np.float64), reference, rtol=ROUNDING[name], atol=5 * ABSOLUTE[name])
    assert (dx[np.asarray(y) == 0] == 0).all()


def test_backward_is_the_derivative(device):
    """By central differences in float64, which are exact as long as the same elements are above the threshold."""
    x, dy = logits((4, 6), np.float64, scale=0.5), logits((4, 6), np.float64, scale=1, seed=1)
    dx = maxsoftmax.sparsemax_backward(maxsoftmax.sparsemax(x, device=device), dy, device=device)
    assert (dx == 0).any()
    assert (dx != 0).any()
    step = 1e-7
    for at in np.ndindex(x.shape):
        shift = np.zeros_like(x)
        shift[at] = step
        change = maxsoftmax.sparsemax(x + shift, device=device) - maxsoftmax.sparsemax(x - shift, device=device)
        np.testing.assert_allclose(dx[at], (change * dy).sum() / (2 * step), atol=1e-7)


def test_backward_of_special_values(device):
    y = np.array([[0.5, 0.5, 0], [np.nan] * 3, [0, 0, 0], [1, 0, 0]], np.float32)
    dy = np.array([[1, 3, np.nan], [1, 2, 3], [1, 2, 3], [np.inf, 1, 1]], np.float32)
    dx = maxsoftmax.sparsemax_backward(y, dy, device=device)
    expected = np.array([[-1, 1, 0], [np.nan] * 3, [0] * 3, [np.nan, 0, 0]], np.float32)
    np.testing.assert_array_equal(dx, expected)
    turned = maxsoftmax.sparsemax_backward(np.ascontiguousarray(y.T), np.ascontiguousarray(dy.T), 0, device=device)
    np.testing.assert_array_equal(turned, expected.T)


@pytest.mark.parametrize(("shape", "axis"), [((0, 3), -1), ((3, 0), -1), ((0,), 0), ((2, 0, 3), 1)])
def test_nothing_has_nothing(device, shape, axis):
    x = np.zeros(shape, np.float32)
    assert maxsoftmax.sparsemax(x, axis, device=device).shape == shape
    assert maxsoftmax.sparsemax_backward(x, x, axis, device=device).shape == shape


def test_other_kinds_of_arrays():
    assert maxsoftmax.sparsemax(7) == 1
    np.testing.assert_array_equal(maxsoftmax.sparsemax([3, 1]), np.array([1.0, 0.0]))
    x = logits((4, 6))
    y = maxsoftmax.sparsemax(Buffer.from_numpy(x))
    assert isinstance(y, Buffer)
    same(y.to_numpy(), maxsoftmax.sparsemax(x))
    dx = maxsoftmax.sparsemax_backward(y, Buffer.from_numpy(x))
    same(dx.to_numpy(), maxsoftmax.sparsemax_backward(y.to_numpy(), x))


@pytest.mark.parametrize(
    "arguments",
    [
        {"x": "abc"},
        {"x": np.zeros((2, 3), complex)},
        {"x": logits((3, 5)), "axis": 2},
        {"x": logits((3, 5)), "axis": 1.5},
        {"x": logits((3, 5)), "axis": (0, 0)},
        {"x": logits((3, 5)), "axis": True},
        {"x": logits((3, 5)), "device": "tpu"},
    ],
)
def test_bad_input_is_refused_as_for_log_softmax(monkeypatch, arguments):
    monkeypatch.setattr(_native, "plan", None)
    with pytest.raises((TypeError, ValueError)) as theirs:
        maxsoftmax.log_softmax(**arguments)
    with pytest.raises(theirs.type) as ours:
        maxsoftmax.sparsemax(**arguments)
    assert str(ours.value) == str(theirs.value)
    arguments = {"y": arguments.pop("x"), "dy": logits((3, 5)), **arguments}
    with pytest.raises((TypeError, ValueError)) as theirs:
        maxsoftmax.log_softmax_backward(**arguments)
    with pytest.raises(theirs.type) as ours:
        maxsoftmax.sparsemax_backward(**arguments)
    assert str(ours.value) == str(theirs.value)


def test_a_bad_gradient_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(_native, "plan", None)
    with pytest.raises(ValueError, match=r"dy has shape \(3, 4\), but that of y is \(3, 5\)"):
        maxsoftmax.sparsemax_backward(logits((3, 5)), logits((3, 4)))
    with pytest.raises(TypeError, match="dy has dtype float64, but that of y is float32"):
        maxsoftmax.sparsemax_backward(logits((3, 5)), logits((3, 5), np.float64))


def test_a_graph_refuses_what_does_not_fit():
    types = [TensorType(DType.float32, ("a", "b"), DeviceRef.CPU()), TensorType(DType.int32, ("a",), DeviceRef.CPU())]
    with Graph("bad", input_types=types):
        x, integers = (value.tensor for value in Graph.current.inputs)
        with pytest.raises(TypeError, match="x has dtype int32, but the kernels take float32"):
            maxsoftmax.ops.sparsemax(integers)
        with pytest.raises(ValueError, match="axis 2 is out of bounds for x of rank 2"):
            maxsoftmax.ops.sparsemax(x, 2)
        with pytest.raises(ValueError, match=r"dy has shape \(b, a\), but here it needs \(a, b\)"):
            maxsoftmax.ops.sparsemax_backward(x, x.transpose(0, 1))
    with pytest.raises(LookupError, match="no graph is being built"):
        maxsoftmax.ops.sparsemax(x)


# In torch.


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def ours(torch):
    import maxsoftmax.torch

    return maxsoftmax.torch.sparsemax


@pytest.fixture
def kind(device):
    return "cuda" if device == "gpu" else "cpu"


def by_sorting(x, dim):
    """Returns sparsemax of a tensor by torch's own functions."""
    import torch

    ordered = x.sort(dim, descending=True).values
    sums = ordered.cumsum(dim) - 1
    counts = torch.ones_like(x).cumsum(dim)
    k = (ordered * counts > sums).sum(dim, keepdim=True)
    return (x - sums.gather(dim, k - 1) / k).clamp(min=0)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_torch_has_values_and_gradients_of_sorting(torch, ours, kind, dim):
    x = torch.tensor(logits((4, 300, 5), np.float64, scale=0.3), device=kind, requires_grad=True)
    weight = torch.tensor(logits((4, 300, 5), np.float64, seed=1), device=kind)
    y = ours(x, dim)
    torch.testing.assert_close(y, by_sorting(x, dim))
    (mine,) = torch.autograd.grad((y * weight).sum(), x)
    (theirs,) = torch.autograd.grad((by_sorting(x, dim) * weight).sum(), x)
    torch.testing.assert_close(mine, theirs)


def test_torch_gradients_of_every_order(torch, ours, kind):
    x = torch.tensor(logits((3, 7), np.float64, scale=0.5), device=kind, requires_grad=True)
    for dim in (0, 1):
        assert torch.autograd.gradcheck(lambda x, dim=dim: ours(x, dim), x, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(lambda x, dim=dim: ours(x, dim).square(), x)
    assert torch.autograd.gradcheck(lambda x: ours(x, 1), x, check_forward_ad=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_torch_has_the_bits_of_arrays(torch, ours, kind, dtype):
    x = torch.tensor(logits((6, 77)), device=kind).to(getattr(torch, dtype)).requires_grad_()
    y = ours(x, 0)
    assert y.dtype == x.dtype
    assert torch.equal(y.detach(), maxsoftmax.sparsemax(x.detach(), 0))
    dy = torch.tensor(logits((6, 77), seed=1), device=kind).to(x.dtype)
    y.backward(dy)
    assert torch.equal(x.grad, maxsoftmax.sparsemax_backward(y.detach(), dy, 0))


def test_torch_takes_dtype_and_out(torch, ours, kind):
    x = torch.tensor(logits((6, 7)), device=kind)
    expected = by_sorting(x, 1)
    torch.testing.assert_close(ours(x), expected)
    torch.testing.assert_close(ours(x.half(), 1, torch.float32), by_sorting(x.half().float(), 1))
    out = torch.empty_like(x)
    assert ours(x, 1, out=out) is out
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(ours(x.T, 0), expected.T)
    assert ours(x[:0]).shape == (0, 7)
    assert ours(torch.tensor(3.0, device=kind)) == 1


def test_torch_modes(torch, ours, kind):
    x = torch.tensor(logits((4, 5, 6), np.float64, scale=0.5), device=kind)
    torch.testing.assert_close(torch.func.vmap(lambda x: ours(x, 0), in_dims=1)(x), by_sorting(x, 0).movedim(1, 0))
    each = torch.func.vmap(torch.func.grad(lambda x: ours(x, 0).square().sum()))(x)
    torch.testing.assert_close(each, torch.func.vmap(torch.func.grad(lambda x: by_sorting(x, 0).square().sum()))(x))
    for place in (0, -1):
        mine = torch.func.jvp(lambda x, dim=place: ours(x, dim), (x,), (x.cos(),))
        torch.testing.assert_close(mine, torch.func.jvp(lambda x, dim=place: by_sorting(x, dim), (x,), (x.cos(),)))
    for operator, arguments in {"sparsemax": (x, 1), "sparsemax_backward": (by_sorting(x, 1), x, 1)}.items():
        inputs = tuple(a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.library.opcheck(getattr(torch.ops.maxsoftmax, operator).default, inputs)


def test_torch_compile(torch, ours, kind):
    x = torch.tensor(logits((8, 40), scale=0.5), device=kind, requires_grad=True)

    def function(x, sparsemax):
        return (sparsemax(x * 2, 1) * x.cos()).sum()

    compiled = torch.compile(lambda x: function(x, ours), fullgraph=True, backend="aot_eager")
    found = compiled(x)
    torch.testing.assert_close(found, function(x, by_sorting))
    (mine,) = torch.autograd.grad(found, x)
    (theirs,) = torch.autograd.grad(function(x, by_sorting), x)
    torch.testing.assert_close(mine, theirs)


def test_torch_refuses_what_it_refuses_for_log_softmax(torch, ours):
    import maxsoftmax.torch

    x = torch.zeros(2, 3)
    for arguments in (([1.0],), (x.int(),), (x, 2), (x, "a")):
        with pytest.raises((TypeError, IndexError)) as theirs:
            maxsoftmax.torch.log_softmax(*arguments)
        with pytest.raises(theirs.type) as mine:
            ours(*arguments)
        assert str(mine.value) == str(theirs.value)
