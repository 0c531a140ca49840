"""What every softmax has to satisfy, against scipy.special.softmax in float64."""

import ml_dtypes
import numpy as np
import pytest
import scipy.special

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, np.float64]

# Below this the contract says nothing of relative error; float16's and bfloat16's last place is counted everywhere.
SMALLEST = {"float32": 1e-30, "float64": 1e-290}
# In float64 the contract has the same form, and twice the bound for one unit in the last place.
SCALE = {"float32": 1.0, "float64": 2.0**-28}


def expected(x, axis=-1):
    """Returns softmax in float64, or wider for x in float64, where SciPy's own sums would be the larger error."""
    wide = np.longdouble if x.dtype == np.float64 else np.float64
    with np.errstate(invalid="ignore"):
        return scipy.special.softmax(x.astype(wide), axis=axis)


def check(y, x, axis=-1):
    """Asserts that `y` is softmax of `x` along `axis`, as the contract has it."""
    y, x = np.asarray(y), np.asarray(x)
    assert y.shape == x.shape
    if x.size == 0:
        return
    reference = expected(x, axis)
    if y.dtype.itemsize == 2:
        _check_last_place(y, reference)
        return
    np.testing.assert_array_equal(np.isnan(y), np.isnan(reference))
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float64)
        distance = np.abs(wide - wide.max(axis=axis, keepdims=True))
        relevant = reference > SMALLEST[y.dtype.name]
        error = np.abs(y.astype(np.float64) - reference)[relevant] / reference[relevant]
    allowed = SCALE[y.dtype.name] * (4e-7 + 1.5e-7 * distance[relevant])
    worst = np.argmax(error - allowed) if error.size else None
    assert error.size == 0 or error[worst] <= allowed[worst], f"error {error[worst]} where {allowed[worst]} is allowed"
    # Below it a percent will do, down to the last place of the smallest subnormal.
    tiny = (reference <= SMALLEST[y.dtype.name]) & ~np.isnan(reference)
    np.testing.assert_allclose(
        y[tiny], reference[tiny].astype(y.dtype), rtol=1e-2, atol=np.finfo(y.dtype).smallest_subnormal
    )
    assert (y[x == -np.inf][~np.isnan(y[x == -np.inf])] == 0).all()


def _check_last_place(y, reference):
    rounded = reference.astype(y.dtype)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(rounded))
    finite = ~np.isnan(rounded)
    # Bits of non-negative floats are ordered like the floats.
    steps = np.abs(y[finite].view(np.uint16).astype(np.int32) - rounded[finite].view(np.uint16).astype(np.int32))
    assert steps.size == 0 or steps.max() <= 1


def logits(shape, dtype=np.float32, scale=4.0, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def spare(how, n):
    """Skips rows that take a teaching kernel minutes: its work grows with n², or a single thread does all of it."""
    limit = {"elementwise": 1 << 18, "naive": 1 << 22 if how["device"] == "gpu" else None}.get(how["algorithm"])
    if limit and n > limit:
        pytest.skip(f"rows of {n} take {how['algorithm']} minutes")
