"""The KL divergence of two tensors' rows and its gradient, against float64."""

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from contract import DTYPES, logits
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

SHAPES = [((5,), 0), ((7, 33), -1), ((7, 33), 0), ((3, 50_257), 1), ((3, 40, 5), 1), ((2, 9000, 20), 1)]

ABSOLUTE = {"float32": 3e-7, "bfloat16": 3e-7, "float16": 3e-7, "float64": 6e-16}
"""By how much divergences may be wrong, times how far logits are apart: what their sums are rounded by."""

ROUNDED = {"float32": 1e-6, "bfloat16": 8e-3, "float16": 1e-3, "float64": 4e-15}
"""Relative to the largest: what gradients are rounded by."""


def wide(x):
    return np.asarray(x).astype(np.longdouble if np.asarray(x).dtype == np.float64 else np.float64)


def pair(shape, dtype=np.float32, scale=3.0):
    """Returns logits of a student and of a teacher."""
    return logits(shape, dtype, scale=scale), np.flip(logits(shape, dtype, scale=scale, seed=5)).copy()


def expected(x, teacher, axis=-1, temperature=1.0, reverse=False):
    """Returns the divergences and the gradient of the student."""
    sides = [wide(teacher) / temperature, wide(x) / temperature]
    with np.errstate(invalid="ignore"):
        log_p, log_q = (scipy.special.log_softmax(z, axis) for z in (sides[::-1] if reverse else sides))
        p, apart = np.exp(log_p), np.where(np.isneginf(log_p), 0, log_p - log_q)
        kl = (p * apart).sum(axis)
        slope = p * (apart - np.expand_dims(kl, axis)) if reverse else np.exp(log_q) - p
    return kl, slope / temperature


def same(a, b):
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


def check(found, reference, x):
    (kl, dx), (of_rows, of_logits) = found, reference
    assert kl.dtype == (np.float64 if x.dtype == np.float64 else np.float32)
    assert (kl.shape, dx.shape, dx.dtype) == (of_rows.shape, x.shape, x.dtype)
    apart = 8 + float(np.abs(wide(x)).max())
    np.testing.assert_allclose(wide(kl), of_rows, rtol=0, atol=ABSOLUTE[x.dtype.name] * apart)
    limit = ROUNDED[x.dtype.name] * float(np.abs(of_logits).max())
    np.testing.assert_allclose(wide(dx), of_logits, rtol=ROUNDED[x.dtype.name], atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("reverse", [False, True])
def test_values_and_gradients(device, dtype, shape, axis, reverse):
    x, teacher = pair(shape, dtype)
    options = {"axis": axis, "temperature": 1.7, "reverse": reverse, "device": device}
    found = maxsoftmax.kl_divergence_backward(x, teacher, **options)
    check(found, expected(x, teacher, axis, 1.7, reverse), x)
    same(maxsoftmax.kl_divergence(x, teacher, **options), found[0])
    dkl = np.arange(found[0].size, dtype=found[0].dtype).reshape(found[0].shape)
    scaled = maxsoftmax.kl_divergence_backward(x, teacher, dkl, **options)[1]
    limit = ROUNDED[x.dtype.name] * dkl.max(initial=1)
    np.testing.assert_allclose(wide(scaled), wide(found[1]) * np.expand_dims(wide(dkl), axis), atol=limit)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shift", [0.0, 100.0, -100.0])
def test_of_one_and_the_same(device, reverse, shift):
    x = logits((5, 5003), np.float32, scale=30.0)
    kl, dx = maxsoftmax.kl_divergence_backward(x, x + np.float32(shift), reverse=reverse, device=device)
    # A shift rounds logits.
    np.testing.assert_allclose(kl, 0, atol=1e-6 * (1 + abs(shift)))
    np.testing.assert_allclose(dx, 0, atol=1e-6 * (1 + abs(shift)))
    if not shift:
        assert not kl.any()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("n", [5, 777, 4097, 50_257])
def test_bits_of_a_row_are_its_own(device, dtype, n):
    x, teacher = pair((80, n), dtype)
    options = {"temperature": 0.9, "device": device}
    for reverse in (False, True):
        whole = maxsoftmax.kl_divergence_backward(x, teacher, reverse=reverse, **options)
        for start, stop in ((0, 1), (3, 4), (1, 34), (79, 80)):
            part = maxsoftmax.kl_divergence_backward(x[start:stop], teacher[start:stop], reverse=reverse, **options)
            for found, of_all in zip(part, whole, strict=True):
                same(found, of_all[start:stop])


def test_special_values(device):
    inf, nan = np.inf, np.nan
    x = np.zeros((8, 3), np.float32)
    teacher = x.copy()
    x[0], teacher[1] = -inf, -inf
    x[2, 1], teacher[3, 1] = nan, nan
    x[4, 2], teacher[5, 2] = inf, inf
    # Of what the teacher does not rule out, and of what it does.
    x[6, 0] = -inf
    teacher[7, 0] = -inf
    both = np.log(1.5)
    for axis in (1, 0):
        given = [np.ascontiguousarray(z.T) if axis == 0 else z for z in (x, teacher)]
        kl, dx = maxsoftmax.kl_divergence_backward(*given, axis=axis, device=device)
        dx = dx.T if axis == 0 else dx
        np.testing.assert_allclose(kl, [*[nan] * 6, inf, both], rtol=1e-6)
        assert np.isnan(dx[:6]).all()
        np.testing.assert_allclose(dx[7], [1 / 3, 1 / 3 - 0.5, 1 / 3 - 0.5], rtol=1e-6)
        kl, dx = maxsoftmax.kl_divergence_backward(*given, axis=axis, reverse=True, device=device)
        np.testing.assert_allclose(kl, [*[nan] * 6, both, inf], rtol=1e-6)
        dx = dx.T if axis == 0 else dx
        np.testing.assert_allclose(dx[6], 0, atol=1e-7)
        # A row that nobody wants a gradient of has none, whatever its divergence.
        dkl = np.array([0] * 8, np.float32)
        dx = maxsoftmax.kl_divergence_backward(*given, dkl, axis=axis, reverse=True, device=device)[1]
        assert not (dx.T if axis == 0 else dx)[7].any()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4)])
def test_of_nothing(device, shape):
    kl, dx = maxsoftmax.kl_divergence_backward(np.zeros(shape), np.zeros(shape), axis=1, device=device)
    assert kl.shape == (shape[0], *shape[2:])
    assert np.isnan(kl).all()
    assert dx.shape == shape


def test_arrays_lie_as_they_like(device):
    x, teacher = pair((4, 6, 50))
    for axis in range(3):
        reference = expected(x, teacher, axis)
        for order in ((2, 0, 1), (1, 2, 0)):
            turned = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
            check(maxsoftmax.kl_divergence_backward(turned, teacher, axis=axis, device=device), reference, x)
            wider = np.repeat(teacher, 2, 2)[:, :, ::2]
            check(maxsoftmax.kl_divergence_backward(turned, wider, axis=axis, device=device), reference, x)


X = np.zeros((3, 5), np.float32)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"x": np.float32(1), "teacher": np.float32(1)}, ValueError, "x has rank 0, but logits need"),
        ({"x": X.astype(complex)}, TypeError, "x has dtype complex"),
        ({"teacher": X[:2]}, ValueError, r"teacher has shape \(2, 5\), but that of x is \(3, 5\)"),
        ({"teacher": X.astype(np.float64)}, TypeError, "teacher has dtype float64, but that of x is float32"),
        ({"dkl": X}, ValueError, r"dkl has shape \(3, 5\), but that of the divergences is \(3,\)"),
        ({"axis": 2}, ValueError, "axis 2 is out of bounds for x of rank 2"),
        ({"temperature": 0}, ValueError, "temperature must be a positive, finite number, not 0"),
        ({"reverse": 1}, TypeError, "reverse must be True or False, not 1"),
    ],
)
def test_what_is_wrong_is_refused_in_a_sentence(wrong, error, words):
    with pytest.raises(error, match=words) as raised:
        maxsoftmax.kl_divergence_backward(**{"x": X, "teacher": X, **wrong})
    assert "\n" not in str(raised.value)


def test_a_graph_refuses_what_does_not_fit():
    types = [TensorType(DType.float32, ("a", "b"), DeviceRef.CPU()), TensorType(DType.float32, ("a",), DeviceRef.CPU())]
    with Graph("bad", input_types=types):
        x, dkl = (value.tensor for value in Graph.current.inputs)
        with pytest.raises(ValueError, match=r"teacher has shape \(a,\), but here it needs \(a, b\)"):
            maxsoftmax.ops.kl_divergence(x, dkl)
        with pytest.raises(ValueError, match=r"dkl has shape \(a, b\), but here it needs \(a,\)"):
            maxsoftmax.ops.kl_divergence_backward(x, x, x)
        with pytest.raises(TypeError, match="reverse must be True or False"):
            maxsoftmax.ops.kl_divergence(x, x, reverse=None)
