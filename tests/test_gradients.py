"""The relatives of softmax and their gradients, against float64 NumPy and SciPy."""

import warnings

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from buffers import array_of, buffer_of
from contract import DTYPES, logits
from max.driver import CPU, Buffer
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from maxsoftmax import _native
from maxsoftmax._graph import runtime

TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Relative, and absolute in terms of the largest value."""


def close(actual, expected, scale=1.0):
    """Asserts equality up to the rounding of the dtype, special values included."""
    actual = np.asarray(actual)
    tolerance = TOLERANCE[actual.dtype.name]
    np.testing.assert_allclose(
        actual.astype(np.float64), np.asarray(expected), rtol=tolerance, atol=tolerance * scale, equal_nan=True
    )


def wide(x):
    return np.asarray(x).astype(np.float64)


def backward(y, dy, axis, log):
    y, dy = wide(y), wide(dy)
    if log:
        return dy - np.exp(y) * dy.sum(axis, keepdims=True)
    return y * (dy - (y * dy).sum(axis, keepdims=True))


def losses(x, target, ignored, smoothing):
    """Returns the loss of each row of (rows, n), and its gradient."""
    log_p = scipy.special.log_softmax(wide(x), axis=1)
    n = x.shape[1]
    valid = target != ignored
    wanted = np.full(log_p.shape, smoothing / n)
    wanted[np.arange(len(target)), np.where(valid, target, 0)] += 1 - smoothing
    with np.errstate(invalid="ignore"):
        loss = np.where(valid, -np.where(wanted > 0, wanted * log_p, 0).sum(1), 0)
    gradient = (np.exp(log_p) - wanted) * valid[:, None]
    return loss, gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 1000), (5, 33, 4), (2, 20_000), (2, 3, 70_001)])
@pytest.mark.parametrize("axis", [-1, 0])
def test_log_softmax(device, dtype, shape, axis):
    x = logits(shape, dtype)
    y = maxsoftmax.log_softmax(x, axis, device=device)
    assert y.dtype == x.dtype
    close(y, scipy.special.log_softmax(wide(x), axis=axis))


def test_log_softmax_of_special_values(device):
    inf, nan = np.inf, np.nan
    x = np.array([[-inf, 0, 1], [nan, 0, 1], [inf, 0, 1], [-inf] * 3, [1e38, -1e38, 0]], np.float32)
    y = maxsoftmax.log_softmax(x, device=device)
    for i in (0, 4):
        close(y[i], scipy.special.log_softmax(wide(x[i])))
    assert np.isnan(y[1:4]).all()


def test_a_peak_leaves_its_logarithm_exact(device):
    x = np.array([[0.0, -1e4, -2e4], [50.0, 0.0, -50.0]], np.float32)
    np.testing.assert_array_equal(maxsoftmax.log_softmax(x, device=device), x - x[:, :1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (4, 257), (3, 20_000), (5, 33, 4)])
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("log", [False, True])
def test_backward(device, dtype, shape, axis, log):
    x = logits(shape, dtype)
    dy = logits(shape, dtype, scale=1, seed=1)
    forward = scipy.special.log_softmax if log else scipy.special.softmax
    y = forward(wide(x), axis=axis).astype(dtype)
    function = maxsoftmax.log_softmax_backward if log else maxsoftmax.softmax_backward
    dx = function(y, dy, axis, device=device)
    assert dx.dtype == x.dtype
    expected = backward(y, dy, axis, log)
    close(dx, expected, scale=max(1, np.abs(expected).max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    # Whole vectors beside each other, then columns one by one: from one position to more than a cluster holds.
    [
        *[(70, 1, 64), (9, 4, 40), (3, 13, 64), (2, 50, 72), (3, 128, 64), (2, 400, 40), (2, 3000, 72), (1, 5000, 40)],
        *[(1, 11_000, 64), (1, 30_000, 40)],
        *[(300, 1, 3), (9, 8, 33), (3, 50, 33), (5, 100, 7), (2, 1000, 33), (2, 3000, 33), (1, 20_000, 3)],
    ],
)
@pytest.mark.parametrize("log", [False, True])
def test_backward_along_another_axis(device, dtype, shape, log):
    x, dy = logits(shape, dtype), logits(shape, dtype, scale=1, seed=1)
    y = (scipy.special.log_softmax if log else scipy.special.softmax)(wide(x), axis=1).astype(dtype)
    function = maxsoftmax.log_softmax_backward if log else maxsoftmax.softmax_backward
    expected = backward(y, dy, 1, log)
    close(function(y, dy, 1, device=device), expected, scale=max(1, np.abs(expected).max()))


@pytest.mark.parametrize("log", [False, True])
def test_backward_is_the_derivative(device, log):
    """By central differences in float64."""
    x, dy = logits((3, 6), np.float64), logits((3, 6), np.float64, scale=1, seed=1)
    forward = maxsoftmax.log_softmax if log else maxsoftmax.softmax
    function = maxsoftmax.log_softmax_backward if log else maxsoftmax.softmax_backward
    dx = function(forward(x, device=device), dy, device=device)
    step = 1e-6
    for at in np.ndindex(x.shape):
        shift = np.zeros_like(x)
        shift[at] = step
        change = forward(x + shift, device=device) - forward(x - shift, device=device)
        np.testing.assert_allclose(dx[at], (change * dy).sum() / (2 * step), atol=1e-8)


@pytest.mark.parametrize("axis", [(0, 2), None, (1, 2)])
def test_several_axes(device, axis):
    x, dy = logits((3, 4, 5)), logits((3, 4, 5), scale=1, seed=1)
    y = maxsoftmax.log_softmax(x, axis, device=device)
    close(y, scipy.special.log_softmax(wide(x), axis=axis))
    kept = tuple(range(3)) if axis is None else axis
    close(maxsoftmax.log_softmax_backward(y, dy, axis, device=device), backward(y, dy, kept, True), scale=4)
    close(maxsoftmax.logsumexp(x, axis, device=device), scipy.special.logsumexp(wide(x), axis=axis), scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (3, 1000), (5, 33, 4), (2, 40_000), (3, 0), (0, 3)])
@pytest.mark.parametrize("axis", [-1, 0])
def test_logsumexp(device, dtype, shape, axis):
    x = logits(shape, dtype)
    y = maxsoftmax.logsumexp(x, axis, device=device)
    assert y.dtype == x.dtype
    with np.errstate(divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        largest = wide(x).max(axis, keepdims=True, initial=-np.inf)
        finite = np.where(np.isfinite(largest), largest, 0)
        expected = np.log(np.exp(wide(x) - finite).sum(axis)) + finite.squeeze(axis)
    close(y, expected, scale=4)


@pytest.mark.parametrize(
    ("n", "dtype"),
    # The last parts of these rows end where whole vectors do, and with less.
    [
        (8704, np.float32),
        (65_024, np.float32),
        (2**20 + 512, np.float32),
        (128_000, ml_dtypes.bfloat16),
        (50_257, np.float32),
    ],
)
def test_a_nan_is_not_lost_in_a_long_row(device, n, dtype):
    x = np.zeros((6, n), dtype)
    for row, place in enumerate((0, n - 600, n - 1)):
        x[row, place] = np.nan
    x[1, n - 599 :] = -np.inf
    x[3, 3], x[3, n - 2] = np.nan, np.inf
    x[4, 3:] = -np.inf
    target = np.zeros(len(x), np.int64)
    m, d = maxsoftmax.max_sum(x, device=device)
    assert np.isnan(np.asarray(d, np.float64)[:4]).all()
    for y in (
        maxsoftmax.logsumexp(x, device=device),
        maxsoftmax.cross_entropy(x, target, reduction="none", device=device),
        maxsoftmax.softmax(x, device=device)[:, 0],
        maxsoftmax.log_softmax(x, device=device)[:, 0],
    ):
        np.testing.assert_array_equal(np.isnan(np.asarray(y, np.float64)), [True] * 4 + [False] * 2)
    np.testing.assert_array_equal(np.asarray(m, np.float64)[4:], [0, 0])
    np.testing.assert_array_equal(np.asarray(d, np.float64)[4:], [3, n])


@pytest.mark.parametrize("axis", [0, 1, -1, (0, 2), (1, 2), None])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 0, 4)])
def test_axes_stay_where_they_are_kept(axis, order, shape):
    x = np.asarray(np.random.default_rng(0).standard_normal(shape, dtype=np.float32), order=order)
    kept = np.sum(x, axis=axis, keepdims=True).shape
    # The second call is made like the first.
    for keepdims in (True, np.True_, False, True):
        y = maxsoftmax.logsumexp(x, axis, keepdims=keepdims)
        m, d = maxsoftmax.max_sum(x, axis, keepdims=keepdims)
        plain = maxsoftmax.logsumexp(x, axis), *maxsoftmax.max_sum(x, axis)
        for found, expected in zip((y, m, d), plain, strict=True):
            assert found.shape == (kept if keepdims else expected.shape)
            np.testing.assert_array_equal(np.reshape(found, np.shape(expected)), expected)
    with pytest.raises(TypeError, match="keepdims must be True or False, not 1"):
        maxsoftmax.logsumexp(x, axis, keepdims=1)


def test_logsumexp_of_special_values(device):
    inf, nan = np.inf, np.nan
    x = np.array([[-inf, 0, 1], [nan, 0, 1], [inf, 0, 1], [-inf] * 3, [inf, -inf, nan]], np.float32)
    y = maxsoftmax.logsumexp(x, device=device)
    close(y, [np.log(1 + np.e), nan, inf, -inf, nan])


def test_pairs_of_shards_merge(device):
    x = logits((5, 3000))
    (m1, d1), (m2, d2) = (maxsoftmax.max_sum(part, device=device) for part in (x[:, :1234], x[:, 1234:]))
    m, d = maxsoftmax.max_sum(x, device=device)
    np.testing.assert_array_equal(m, x.max(axis=1))
    close(d1 * np.exp(m1 - m) + d2 * np.exp(m2 - m), wide(d))
    close(d, np.exp(wide(x) - wide(x).max(1, keepdims=True)).sum(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("n", [1, 10, 20_001])
def test_cross_entropy(device, dtype, smoothing, n):
    x = logits((6, n), dtype)
    target = np.array([0, n - 1, -100, n // 2, 0, n - 1])
    expected, gradient = losses(x, target, -100, smoothing)
    reduced = {"none": expected, "sum": expected.sum(), "mean": expected.sum() / 5}
    for reduction, want in reduced.items():
        loss = maxsoftmax.cross_entropy(x, target, label_smoothing=smoothing, reduction=reduction, device=device)
        assert loss.dtype == x.dtype
        close(loss, want, scale=4)
    loss, pairs = maxsoftmax.cross_entropy_forward(x, target, label_smoothing=smoothing, device=device)
    dx = maxsoftmax.cross_entropy_backward(x, target, pairs, label_smoothing=smoothing, device=device)
    assert dx.dtype == x.dtype
    close(dx, gradient / 5, scale=1 / n)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements(device):
    # Rows repeat one period, so that what comes out is known; bfloat16 takes the least memory.
    n = (1 << 30) + 64
    shape = 2, n
    period = logits((64,), ml_dtypes.bfloat16)
    log_p = wide(period) - np.log(np.exp(wide(period)).sum() * (n // 64))
    x = np.resize(period, shape)

    def check(found, expected):
        assert found.shape == shape
        for row in (0, 1):
            for part in (found[row, :64], found[row, -64:]):
                np.testing.assert_allclose(wide(part), expected, rtol=1e-2, atol=1e-2 * np.abs(expected).max())

    check(maxsoftmax.log_softmax(x, device=device), log_p)
    target = np.array([n - 1, 5])
    loss, pairs = maxsoftmax.cross_entropy_forward(x, target, device=device)
    np.testing.assert_allclose(wide(loss), -(log_p[63] + log_p[5]) / 2, rtol=1e-2)
    dx = maxsoftmax.cross_entropy_backward(x, target, pairs, device=device)
    for row, place in enumerate(target):
        np.testing.assert_allclose(wide(dx[row, place]), -1 / 2, rtol=1e-2)
        dx[row, place] = dx[row, place - 64 if row == 0 else place + 64]
    check(dx, np.exp(log_p) / 2)
    del dx
    y = np.resize(np.exp(log_p).astype(ml_dtypes.bfloat16), shape)
    p = wide(y[0, :64])
    check(maxsoftmax.softmax_backward(y, x, device=device), p * (wide(period) - (p * wide(period)).sum() * (n // 64)))


def test_cross_entropy_of_each_row_has_a_gradient_of_each(device):
    x, target = logits((4, 50)), np.array([3, -100, 49, 0], np.int32)
    loss, pairs = maxsoftmax.cross_entropy_forward(x, target, reduction="none", device=device)
    dloss = np.array([1.0, 2.0, -3.0, 0.5], np.float32)
    dx = maxsoftmax.cross_entropy_backward(x, target, pairs, dloss, reduction="none", device=device)
    expected, gradient = losses(x, target, -100, 0)
    close(loss, expected, scale=4)
    close(dx, gradient * dloss[:, None])


@pytest.mark.parametrize("shape", [(2, 7, 3, 4), (1, 7, 4, 9), (2, 30, 9, 250)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_of_images_has_its_classes_along_axis_1(device, shape, smoothing):
    x = logits(shape)
    target = np.random.default_rng(0).integers(0, shape[1], (shape[0], *shape[2:]))
    target[0, 1] = -100
    x[0, :, 1, 2] = np.nan
    rows = x.transpose(0, 2, 3, 1).reshape(-1, shape[1])
    expected, gradient = losses(np.nan_to_num(rows), target.reshape(-1), -100, smoothing)
    counted = np.count_nonzero(target != -100)
    loss, pairs = maxsoftmax.cross_entropy_forward(x, target, label_smoothing=smoothing, device=device)
    close(loss, expected.sum() / counted, scale=4)
    dx = maxsoftmax.cross_entropy_backward(x, target, pairs, np.float32(2), label_smoothing=smoothing, device=device)
    close(dx.transpose(0, 2, 3, 1).reshape(rows.shape), gradient * 2 / counted, scale=1 / counted)


@pytest.mark.parametrize("shape", [(50, 20_001), (2, 30, 9, 250)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_logits_are_overwritten_by_their_gradient_if_asked(device, dtype, shape):
    x, target = logits(shape, dtype), np.random.default_rng(0).integers(0, shape[1], (shape[0], *shape[2:]))
    target[0] = -100
    _, pairs = maxsoftmax.cross_entropy_forward(x, target, device=device)
    expected = maxsoftmax.cross_entropy_backward(x, target, pairs, device=device)
    place = runtime.device(device)
    buffers = [buffer_of(array).to(place) for array in (x, target, pairs)]
    before = buffers[0]
    assert maxsoftmax.cross_entropy_backward_(*buffers) is before
    np.testing.assert_array_equal(array_of(before.to(CPU())), expected)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        ([[1.0, 2.0]], TypeError, "x is to be overwritten, so that it must be a NumPy array, .*, not a list"),
        (np.zeros((2, 3), int), ValueError, "must be a contiguous, writeable array of floats"),
        (np.zeros((2, 6), np.float32)[:, ::2], ValueError, "must be a contiguous, writeable array of floats"),
        (np.broadcast_to(np.float32(0), (2, 3)), ValueError, "must be a contiguous, writeable array of floats"),
    ],
)
def test_what_cannot_be_overwritten_is_refused(monkeypatch, x, error, words):
    monkeypatch.setattr(_native, "plan", None)
    with pytest.raises(error, match=words):
        maxsoftmax.cross_entropy_backward_(x, np.zeros(2, int), np.zeros((2, 2), np.float32))


def test_only_a_buffer_of_a_graph_is_overwritten():
    types = [
        TensorType(kind, dims, DeviceRef.CPU())
        for kind, dims in ((DType.float32, [2, 3]), (DType.int64, [2]), (DType.float32, [2, 2]))
    ]
    with Graph("g", input_types=types) as graph, pytest.raises(TypeError, match="x must be a buffer of the graph"):
        maxsoftmax.ops.cross_entropy_backward_(*graph.inputs)


def test_smoothing_spreads_a_share_over_all_classes(device):
    x, target = logits((6, 300)), np.array([0, 299, -100, 150, 0, 299])
    expected, gradient = losses(x, target, -100, 0.2)
    loss, pairs = maxsoftmax.cross_entropy_forward(x, target, label_smoothing=0.2, device=device)
    close(loss, expected.sum() / 5, scale=4)
    dx = maxsoftmax.cross_entropy_backward(x, target, pairs, label_smoothing=0.2, device=device)
    close(dx, gradient / 5)


def test_cross_entropy_of_one_row(device):
    x = logits((9,))
    close(maxsoftmax.cross_entropy(x, np.int64(4), device=device), losses(x[None], np.array([4]), -100, 0)[0][0])


def test_without_a_row_that_counts_the_mean_is_nan(device):
    x, target = logits((3, 5)), np.full(3, -100)
    loss, pairs = maxsoftmax.cross_entropy_forward(x, target, device=device)
    assert np.isnan(loss)
    np.testing.assert_array_equal(maxsoftmax.cross_entropy_backward(x, target, pairs, device=device), np.zeros((3, 5)))
    assert maxsoftmax.cross_entropy(x, target, reduction="sum", device=device) == 0


def test_an_ignored_row_does_not_count_whatever_is_in_it(device):
    x = logits((3, 5))
    x[1] = np.nan
    target = np.array([1, -100, 2])
    loss, pairs = maxsoftmax.cross_entropy_forward(x, target, device=device)
    close(loss, losses(x[::2], target[::2], -100, 0)[0].mean())
    dx = maxsoftmax.cross_entropy_backward(x, target, pairs, device=device)
    np.testing.assert_array_equal(dx[1], np.zeros(5))
    assert np.isfinite(dx).all()


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"target": np.array([0, 5, 1])}, ValueError, r"target\[1\] is 5, which is neither a class from 0 to 4 nor"),
        ({"target": np.array([0, -1, 1])}, ValueError, r"target\[1\] is -1, which is neither"),
        ({"target": np.zeros(2, np.int64)}, ValueError, r"target has shape \(2,\), but x of \(3, 5\) needs \(3,\)"),
        ({"target": np.zeros(3)}, TypeError, "target has dtype float64, but classes are int32 or int64"),
        ({"target": np.zeros(3, np.int16)}, TypeError, "target has dtype int16, but classes are int32 or int64"),
        ({"x": np.float32(1)}, ValueError, "x has rank 0"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing 1.5 is not from 0 to 1"),
        ({"label_smoothing": "x"}, TypeError, "label_smoothing must be a number from 0 to 1, not 'x'"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index must be an integer, not 1.5"),
        ({"ignore_index": 1 << 70}, ValueError, "ignore_index 1180591620717411303424 has more than 64 bits"),
        ({"reduction": "max"}, ValueError, "reduction 'max' does not exist: choose from 'mean', 'sum', 'none'"),
        ({"reduction": 3}, TypeError, "reduction must be a string, not 3"),
    ],
)
def test_a_bad_loss_is_refused_in_a_sentence(wrong, error, words):
    arguments = {"x": logits((3, 5)), "target": np.zeros(3, np.int64), **wrong}
    with pytest.raises(error, match=words):
        maxsoftmax.cross_entropy(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((logits((3, 5)), logits((3, 4))), ValueError, r"dy has shape \(3, 4\), but that of y is \(3, 5\)"),
        ((logits((3, 5)), logits((3, 5), np.float64)), TypeError, "dy has dtype float64, but that of y is float32"),
        ((logits((3, 5)), logits((3, 5)), 2), ValueError, "axis 2 is out of bounds for y of rank 2"),
        (("abc", logits((3, 5))), TypeError, "y has dtype <U3"),
    ],
)
def test_a_bad_gradient_is_refused_in_a_sentence(monkeypatch, arguments, error, words):
    monkeypatch.setattr(_native, "plan", None)
    with pytest.raises(error, match=words):
        maxsoftmax.softmax_backward(*arguments)


@pytest.mark.gpu
def test_a_target_that_is_no_class_is_nan_on_a_gpu():
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 50257, device="cuda")
    target = torch.tensor([5, 1 << 40, -3], device="cuda")
    loss, pairs = maxsoftmax.cross_entropy_forward(x, target, reduction="none")
    assert torch.isnan(loss).tolist() == [False, True, True]
    dx = maxsoftmax.cross_entropy_backward(x, target, pairs, reduction="none", dloss=torch.ones_like(loss))
    assert torch.isnan(dx).any(dim=1).tolist() == [False, True, True]


def test_a_graph_refuses_what_does_not_fit():
    place = DeviceRef.CPU()
    types = [TensorType(DType.float32, ("a", "b"), place), TensorType(DType.int64, ("b",), place)]
    with Graph("bad", input_types=types):
        x, target = (value.tensor for value in Graph.current.inputs)
        with pytest.raises(ValueError, match=r"target has shape \(b,\), but x of \(a, b\) needs \(a,\)"):
            maxsoftmax.ops.cross_entropy(x, target)
        with pytest.raises(TypeError, match="target has dtype float32, but classes are int32 or int64"):
            maxsoftmax.ops.cross_entropy(x, x)
        for reduced in (maxsoftmax.ops.logsumexp, maxsoftmax.ops.max_sum):
            with pytest.raises(TypeError, match="keepdims must be True or False, not 1"):
                reduced(x, keepdims=1)
        with pytest.raises(ValueError, match=r"dy has shape \(b, a\), but here it needs \(a, b\)"):
            maxsoftmax.ops.softmax_backward(x, x.transpose(0, 1))


@pytest.mark.parametrize("kind", ["torch", "buffer", "bfloat16"])
def test_the_kind_of_array_stays(kind):
    x = logits((4, 6))
    if kind == "torch":
        torch = pytest.importorskip("torch")
        assert isinstance(maxsoftmax.log_softmax(torch.tensor(x)), torch.Tensor)
        assert maxsoftmax.cross_entropy(torch.tensor(x), torch.tensor([0, 1, 2, 3])).shape == ()
    elif kind == "buffer":
        assert isinstance(maxsoftmax.log_softmax(Buffer.from_numpy(x)), Buffer)
    else:
        assert maxsoftmax.log_softmax(x.astype(ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("shape", [(3, 5), (3, 5001), (3, 7, 4)])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_a_share_of_what_is_impossible_is_infinite(device, shape, share):
    x = logits(shape, np.float32)
    x[0, 1] = x[1] = -np.inf
    x[2, 3] = np.nan
    target = np.zeros(shape[:1] + shape[2:], np.int64)
    loss = maxsoftmax.cross_entropy(x, target, label_smoothing=share, reduction="none", device=device)
    assert np.isposinf(loss[0]).all()
    assert np.isnan(loss[2]).all()
    assert not np.isfinite(loss[1]).any()
