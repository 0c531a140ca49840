"""The logarithms of tokens' probabilities, the entropy and their gradients, against float64."""

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from contract import DTYPES, logits
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

SHAPES = [((5,), 0), ((9, 1), 1), ((7, 33), -1), ((7, 33), 0), ((3, 50_257), 1), ((3, 40, 5), 1), ((2, 9000, 20), 1)]

RELATIVE = {"float32": 4e-7, "bfloat16": 4e-7, "float16": 4e-7, "float64": 2e-15}
"""By how much results may be wrong, beside what rounding differences of logits costs."""


def wide(x):
    return np.asarray(x).astype(np.longdouble if np.asarray(x).dtype == np.float64 else np.float64)


def tokens_of(shape, axis, each, seed=1, dtype=np.int64):
    """Returns one token for each row, or `each` along the axis."""
    axis %= len(shape)
    of = [each] if each else []
    return np.random.default_rng(seed).integers(0, shape[axis], (*shape[:axis], *of, *shape[axis + 1 :]), dtype)


def expected(x, tokens, axis=-1, temperature=1.0):
    """Returns the logarithms and the entropies."""
    with np.errstate(invalid="ignore"):
        all_of = scipy.special.log_softmax(wide(x) / temperature, axis)
        terms = np.exp(all_of) * np.where(np.isneginf(all_of), 0, all_of)
    several = tokens.ndim == x.ndim
    found = np.take_along_axis(all_of, tokens if several else np.expand_dims(tokens, axis), axis)
    return found if several else found.squeeze(axis), -terms.sum(axis)


def check(found, reference, x, temperature=1.0):
    assert found.dtype == (np.float64 if x.dtype == np.float64 else np.float32)
    assert found.shape == reference.shape
    finite = wide(x)[np.isfinite(wide(x))]
    size = 8 + (np.abs(finite).max() / temperature if finite.size else 0)
    limit = RELATIVE[x.dtype.name]
    np.testing.assert_allclose(found.astype(reference.dtype), reference, rtol=limit, atol=limit * float(size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("each", [None, 1, 3])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_values(device, dtype, shape, axis, each, temperature):  # noqa: PLR0917
    x, tokens = logits(shape, dtype), tokens_of(shape, axis, each, dtype=np.int32 if each == 1 else np.int64)
    options = {"temperature": temperature, "device": device}
    found, entropy = maxsoftmax.token_log_probs(x, tokens, axis, entropy=True, **options)
    of_tokens, of_rows = expected(x, tokens, axis, temperature or 1.0)
    check(found, of_tokens, x, temperature or 1.0)
    check(entropy, of_rows, x)
    same(maxsoftmax.token_log_probs(x, tokens, axis, **options), found)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, 1e4])
@pytest.mark.parametrize("shift", [0.0, 3e4, -3e4])
def test_peaks_and_plateaus(device, scale, shift):
    x = logits((5, 5003), np.float32, scale=scale) + np.float32(shift)
    tokens = x.argmax(-1)
    found, entropy = maxsoftmax.token_log_probs(x, tokens, entropy=True, device=device)
    of_tokens, of_rows = expected(x, tokens)
    np.testing.assert_allclose(found, of_tokens, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(entropy, of_rows, rtol=2e-6, atol=1e-6)


def same(a, b):
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("n", [5, 63, 777, 4097, 50_257, 151_936])
def test_bits_of_a_row_are_its_own(device, dtype, n):
    """Alone, in batches to 300, and at any address; on a CPU test_batch.py has threads and offsets as well."""
    count = 300 if n < 60_000 else 40
    x, tokens = logits((count, n), dtype), tokens_of((count, n), 1, 2)
    options = {"temperature": 0.9, "entropy": True, "device": device}
    whole = maxsoftmax.token_log_probs(x, tokens, **options)
    for start, stop in ((0, 1), (3, 4), (1, 34), (count - 1, count)):
        part = maxsoftmax.token_log_probs(x[start:stop], tokens[start:stop], **options)
        for found, of_all in zip(part, whole, strict=True):
            same(found, of_all[start:stop])
    if device == "cpu":
        # Its threads share a row, where there are few of them; rows side by side are reduced by other lanes.
        return
    for row in range(8):
        memory = np.empty(n + 8, dtype)
        memory[row : row + n] = x[row]
        part = maxsoftmax.token_log_probs(memory[row : row + n], tokens[row], **options)
        for found, of_all in zip(part, whole, strict=True):
            same(found, of_all[row])


def test_special_values(device):
    x = np.zeros((6, 4), np.float32)
    x[0] = -np.inf
    x[1, 2] = np.nan
    x[2, 1] = np.inf
    x[3, 1:] = -np.inf
    x[4, :2] = -np.inf
    tokens = np.tile(np.arange(4), (6, 1))
    for axis, turned in ((1, x), (0, np.ascontiguousarray(x.T))):
        found, entropy = maxsoftmax.token_log_probs(
            turned, np.moveaxis(tokens, 1, axis), axis, entropy=True, device=device
        )
        found = np.moveaxis(found, axis, 1)
        assert np.isnan(found[:3]).all()
        assert np.isnan(entropy[:3]).all()
        np.testing.assert_array_equal(found[3], [0, -np.inf, -np.inf, -np.inf])
        np.testing.assert_allclose(found[4:], [[-np.inf, -np.inf, -np.log(2), -np.log(2)], [-np.log(4)] * 4], rtol=3e-7)
        np.testing.assert_allclose(entropy[3:], [0, np.log(2), np.log(4)], rtol=3e-7)


def test_what_is_no_token_is_not_a_number(device):
    x = logits((3, 5))
    found = maxsoftmax.token_log_probs(x, [[0, -1], [5, 4], [2**31, 1]], device=device)
    np.testing.assert_array_equal(np.isnan(found), [[False, True], [True, False], [True, False]])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 4)])
def test_of_nothing(device, shape):
    tokens = np.zeros((*shape[:1], *shape[2:]), np.int64)
    found, entropy = maxsoftmax.token_log_probs(np.zeros(shape), tokens, 1, entropy=True, device=device)
    assert found.shape == entropy.shape == tokens.shape
    assert np.isnan(found).all()
    assert np.isnan(entropy).all()
    assert maxsoftmax.token_log_probs(np.zeros((3, 5)), np.zeros((3, 0), int), device=device).shape == (3, 0)


def test_arrays_lie_as_they_like(device):
    x = logits((4, 6, 50))
    for axis in range(3):
        tokens = tokens_of(x.shape, axis, 2)
        reference = expected(x, tokens, axis)
        for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)):
            back = np.argsort(order)
            turned = np.ascontiguousarray(x.transpose(order)).transpose(back)
            for result, of in zip(
                maxsoftmax.token_log_probs(turned, tokens, axis, entropy=True, device=device), reference, strict=True
            ):
                check(result, of, x)
        # With gaps.
        wider = np.repeat(x, 2, 2)[:, :, ::2]
        check(maxsoftmax.token_log_probs(wider, np.repeat(tokens, 2, 0)[::2], axis, device=device), reference[0], x)


def test_buffers_of_max():
    x, tokens = logits((3, 9)), tokens_of((3, 9), 1, None)
    found = maxsoftmax.token_log_probs(Buffer.from_numpy(x), Buffer.from_numpy(tokens))
    assert isinstance(found, Buffer)
    same(found.to_numpy(), maxsoftmax.token_log_probs(x, tokens))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), [((5,), 0), ((7, 33), 0), ((3, 5003), 1), ((3, 40, 5), 1)])
@pytest.mark.parametrize("each", [None, 2])
def test_gradients(device, dtype, shape, axis, each):
    x, tokens = logits(shape, dtype), tokens_of(shape, axis, each)
    several = tokens if each else np.expand_dims(tokens, axis)
    upstream = logits(several.shape, np.float64 if dtype == np.float64 else np.float32, seed=2)
    dentropy = logits(upstream.sum(axis).shape, upstream.dtype, seed=3)
    z = scipy.special.log_softmax(wide(x) / 0.7, axis)
    p, entropy = np.exp(z), -(np.exp(z) * z).sum(axis, keepdims=True)
    hits = np.zeros(z.shape, z.dtype)
    for i in range(several.shape[axis]):
        places, given = (np.take(a, [i], axis) for a in (several, upstream))
        np.put_along_axis(hits, places, np.take_along_axis(hits, places, axis) + given, axis)
    of_tokens = hits - p * upstream.sum(axis, keepdims=True)
    both = of_tokens - p * (z + entropy) * np.expand_dims(dentropy, axis)
    given = upstream if each else upstream.squeeze(axis)
    for reference, more in ((of_tokens, None), (both, dentropy)):
        dx = maxsoftmax.token_log_probs_backward(x, tokens, given, more, axis, temperature=0.7, device=device)
        assert (dx.dtype, dx.shape) == (x.dtype, x.shape)
        limit = {"float64": 2e-14, "float32": 4e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[x.dtype.name]
        np.testing.assert_allclose(
            wide(dx), reference / 0.7, rtol=limit, atol=limit * float(np.abs(reference).max(initial=1))
        )


def test_gradients_that_do_not_fit_are_refused():
    for wrong, error, words in (
        ({"dlog_probs": X}, ValueError, r"dlog_probs has shape \(3, 5\), but that of the logarithms is \(3,\)"),
        ({"dlog_probs": T.astype(np.float64)}, TypeError, "dlog_probs has dtype float64, but that of the logarithms"),
        ({"dentropy": X}, ValueError, r"dentropy has shape \(3, 5\), but that of the entropies is \(3,\)"),
    ):
        with pytest.raises(error, match=words):
            maxsoftmax.token_log_probs_backward(**{"x": X, "tokens": T, "dlog_probs": X[:, 0], **wrong})


X, T = np.zeros((3, 5), np.float32), np.zeros(3, np.int64)

WRONG = [
    ({"x": np.float32(1)}, ValueError, "x has rank 0, but logits need"),
    ({"x": X.astype(complex)}, TypeError, "x has dtype complex"),
    (
        {"tokens": T[:2]},
        ValueError,
        r"tokens has shape \(2,\), but x of \(3, 5\) needs \(3,\), or \(3, k\) for k a row",
    ),
    ({"tokens": np.zeros((2, 5), int)}, ValueError, r"tokens has shape \(2, 5\), but x of \(3, 5\) needs"),
    ({"tokens": T.astype(np.float32)}, TypeError, "tokens has dtype float32"),
    ({"axis": 2}, ValueError, "axis 2 is out of bounds for x of rank 2"),
    ({"temperature": 0}, ValueError, "temperature must be a positive, finite number, not 0"),
    ({"temperature": float("nan")}, ValueError, "temperature must be a positive, finite number, not nan"),
    ({"temperature": "hot"}, TypeError, "temperature must be a number, not 'hot'"),
    ({"entropy": 1}, TypeError, "entropy must be True or False, not 1"),
]


@pytest.mark.parametrize(("wrong", "error", "words"), WRONG)
def test_what_is_wrong_is_refused_in_a_sentence(wrong, error, words):
    with pytest.raises(error, match=words) as raised:
        maxsoftmax.token_log_probs(**{"x": X, "tokens": T, **wrong})
    assert "\n" not in str(raised.value)


# Graphs


def test_a_graph_refuses_what_does_not_fit():
    types = [TensorType(DType.float32, ("a", "b"), DeviceRef.CPU()), TensorType(DType.int32, ("b",), DeviceRef.CPU())]
    with Graph("bad", input_types=types):
        x, tokens = (value.tensor for value in Graph.current.inputs)
        with pytest.raises(ValueError, match=r"tokens has shape \(b,\), but x of \(a, b\) needs \(a,\)"):
            maxsoftmax.ops.token_log_probs(x, tokens)
        with pytest.raises(TypeError, match="tokens has dtype float32, but classes are"):
            maxsoftmax.ops.token_log_probs(x, x)
        with pytest.raises(ValueError, match="temperature must be a positive"):
            maxsoftmax.ops.token_log_probs(x, tokens, 0, temperature=-1.0)
