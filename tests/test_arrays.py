import subprocess
import sys
import threading

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from contract import DTYPES, check, logits, spare
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

LENGTHS = [0, 1, 2, 31, 32, 33, 127, 128, 129, 1000, 1023, 1024, 1025, 50257, 131072]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_every_length_along_the_last_axis(how, dtype, n):
    x = logits((3, n), dtype)
    y = maxsoftmax.softmax(x, **how)
    assert y.dtype == x.dtype
    check(y, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_every_length_along_a_strided_axis(how, dtype, n):
    x = logits((2, n, 3), dtype)
    check(maxsoftmax.softmax(x, axis=1, **how), x, axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (5, 9), (4, 33, 5), (2, 3, 17, 4), (2, 3, 2, 5, 3)])
def test_every_axis_of_every_rank(how, dtype, shape):
    x = logits(shape, dtype)
    for axis in range(-len(shape), len(shape)):
        check(maxsoftmax.softmax(x, axis=axis, **how), x, axis=axis)


@pytest.mark.parametrize("inner", [1, 2, 3, 15, 16, 17, 31, 32, 33, 100, 1023, 1025, 2100])
def test_every_width_beside_a_strided_axis(how, inner):
    x = logits((3, 40, inner))
    check(maxsoftmax.softmax(x, axis=1, **how), x, axis=1)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 100, 4097])
def test_every_number_of_rows(how, rows):
    x = logits((rows, 65))
    check(maxsoftmax.softmax(x, **how), x)


@pytest.mark.parametrize("shape", [(3, 100_003), (2, 70_001, 2), (1, 1 << 21)])
def test_few_long_rows_are_shared_out_and_merge(how, shape):
    spare(how, shape[1])
    x = logits(shape)
    check(maxsoftmax.softmax(x, axis=1, **how), x, axis=1)


def test_a_row_of_2_to_the_24(how):
    spare(how, 1 << 24)
    x = logits((1 << 24,))
    y = maxsoftmax.softmax(x, **how)
    check(y, x)
    assert abs(y.sum(dtype=np.float64) - 1) < 1e-6


@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 1), (1, 2), (0, 2), (2, 0), (-1, -3), None, ()])
def test_axes_as_scipy_has_them(how, axis):
    x = logits((3, 4, 5))
    check(maxsoftmax.softmax(x, axis=axis, **how), x, axis=axis)


def test_axis_may_be_a_list_or_a_numpy_integer():
    x = logits((3, 4))
    np.testing.assert_array_equal(maxsoftmax.softmax(x, axis=[0, 1]), maxsoftmax.softmax(x, axis=None))
    np.testing.assert_array_equal(maxsoftmax.softmax(x, axis=np.int64(1)), maxsoftmax.softmax(x))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_become_what_scipy_makes_of_them(dtype):
    x = np.array([[1, 2, 3], [3, 5, 4]], dtype)
    y = maxsoftmax.softmax(x)
    # SciPy's own difference of unsigned integers wraps around, so only its dtype can be compared.
    with np.errstate(all="ignore"):
        assert y.dtype == scipy.special.softmax(x, axis=-1).dtype
    check(y, x.astype(np.float64))


def test_bools_become_float64():
    y = maxsoftmax.softmax(np.array([True, False]))
    assert y.dtype == np.float64
    check(y, np.array([1.0, 0.0]))


def test_lists_and_scalars():
    np.testing.assert_allclose(maxsoftmax.softmax([1000, 0, 0, 0]), [1, 0, 0, 0])
    np.testing.assert_allclose(maxsoftmax.softmax([[1.0, 1.0]]), [[0.5, 0.5]])
    for scalar in (1000, 2.5, np.float32(3), np.array(3.0)):
        for axis in (-1, 0, None):
            y = maxsoftmax.softmax(scalar, axis=axis)
            assert isinstance(y, np.floating)
            assert y == 1


def test_other_memory_orders(how):
    x = logits((6, 7, 8))
    for view in (
        x.T,
        np.asfortranarray(x),
        x[::2, ::-1, 1::3],
        np.moveaxis(x, 0, 1),
        np.broadcast_to(x[0], x.shape),
        x[:, :, :1],
        x.astype(">f4"),
    ):
        for axis in range(3):
            check(maxsoftmax.softmax(view, axis=axis, **how), view, axis=axis)


def test_the_input_is_not_changed_and_may_be_read_only(how):
    x = logits((3, 65))
    before = x.copy()
    x.flags.writeable = False
    maxsoftmax.softmax(x, **how)
    np.testing.assert_array_equal(x, before)


def test_memory_at_odd_addresses(how):
    for offset in range(1, 9):
        x = np.frombuffer(b"\0" * offset + logits((3, 67)).tobytes(), np.uint8)[offset:].view(np.float32)
        check(maxsoftmax.softmax(x, **how), x)
        x = logits((3 * 67 + offset,))[offset:].reshape(3, 67)
        check(maxsoftmax.softmax(x, **how), x)


@pytest.mark.parametrize("shape", [(64, 1000), (2, 70_001, 2), (1, 500_001)])
def test_reruns_give_the_same_bits(how, shape):
    spare(how, shape[1])
    x = logits(shape)
    first = maxsoftmax.softmax(x, axis=1, **how)
    for _ in range(20):
        np.testing.assert_array_equal(maxsoftmax.softmax(x, axis=1, **how), first)


def test_the_number_of_cores_does_not_matter(environment):
    program = """
import hashlib, os, sys
import numpy as np
if sys.argv[1] == "one":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import maxsoftmax
random = np.random.default_rng(0)
digest = hashlib.sha256()
along_the_last = [((3, 100_000), 1), ((7, 40_000), 1), ((2, 300_000), 1)]
for shape, axis in [*along_the_last, ((40_000, 112), 0), ((2, 30_000, 5), 1), ((90, 3000), 0)]:
    x = np.float32(random.standard_normal(shape) * 5 + random.uniform(0, 20, shape))
    digest.update(maxsoftmax.softmax(x, axis=axis).tobytes())
print(digest.hexdigest())
"""
    digests = {
        subprocess.run(
            [sys.executable, "-c", program, cores], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for cores in ("one", "all")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


def test_rows_do_not_depend_on_their_company(how):
    x = logits((300, 20_000))
    y = maxsoftmax.softmax(x, **how)
    for i in (0, 150, 299):
        np.testing.assert_array_equal(maxsoftmax.softmax(x[i], **how), y[i])


finite = {"allow_nan": False, "allow_infinity": False}


@given(
    x=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=1, max_dims=5, min_side=0, max_side=9),
        elements=st.one_of(
            st.floats(-30, 30, width=32, **finite),
            st.floats(width=32, **finite),
            st.sampled_from([np.nan, np.inf, -np.inf, 0.0]),
        ),
    ),
    data=st.data(),
)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_array_any_axis_any_strides(how, x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1), label="axis")
    order = data.draw(st.permutations(range(x.ndim)), label="order")
    steps = data.draw(st.tuples(*[st.sampled_from([1, 2, -1]) for _ in range(x.ndim)]), label="steps")
    view = x.transpose(order)[tuple(slice(None, None, s) for s in steps)]
    check(maxsoftmax.softmax(view, axis=axis, **how), view, axis=axis)


@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_axes_as_scipy(how, data):
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=5, max_side=6))
    axes = data.draw(hnp.valid_tuple_axes(len(shape), min_size=1))
    x = logits(shape, seed=data.draw(st.integers(0, 99)))
    check(maxsoftmax.softmax(x, axis=axes, **how), x, axis=axes)


def test_threads_get_their_own_results(device):
    inputs = [logits((50, 100 + i), seed=i) for i in range(16)]
    results = [None] * len(inputs)
    start = threading.Barrier(len(inputs))

    def work(i):
        start.wait()
        for _ in range(10):
            results[i] = maxsoftmax.softmax(inputs[i], device=device)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, y in zip(inputs, results, strict=True):
        check(y, x)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 1 << 30), ((1 << 31) + 5, 1), (2, 1 << 30, 2)])
def test_more_than_2_to_the_31_elements(device, shape):
    # bfloat16 takes the least memory; rows repeat one period, so that their softmax is known.
    period = logits((64,), ml_dtypes.bfloat16)
    x = np.resize(period, shape)
    y = maxsoftmax.softmax(x, axis=1, device=device)
    flat, rows = y.reshape(-1), shape[1] if len(shape) == 2 else shape[1] * shape[2]
    for start in (0, (1 << 31) - 64, x.size - 64 - x.size % 64):
        part = np.resize(period, x.size % 64 + 64)[:64].astype(np.float64) if rows > 1 else np.zeros(64)
        if len(shape) == 2:
            repeats = shape[1] / 64 if shape[1] > 1 else None
            want = np.exp(part) / (np.exp(part).sum() * repeats) if repeats else np.ones(64)
        else:
            sums = [np.exp(part[i::2]).sum() * shape[1] / 32 for i in range(2)]
            want = np.exp(part) / np.resize(sums, 64)
        np.testing.assert_allclose(flat[start : start + 64].astype(np.float64), want, rtol=1e-2)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("axis", [None, 1, (0, 2)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_weighted_sums_are_scipy_s(dtype, axis, keepdims):
    random = np.random.default_rng(0)
    x = (3 * random.standard_normal((4, 5, 6))).astype(dtype)
    x[1] = -np.inf
    weights = random.integers(-2, 3, (5, 1)).astype(np.float32)
    how = {"axis": axis, "keepdims": keepdims}
    rough = {np.float64: 1e-9, np.float32: 2e-5}.get(dtype, 0.05)
    for b in (None, np.abs(weights), weights, 2):
        found, sign = maxsoftmax.logsumexp(x, b=b, return_sign=True, **how)
        with np.errstate(divide="ignore", invalid="ignore"):
            theirs = scipy.special.logsumexp(x.astype(np.float64), b=b, return_sign=True, **how)
        assert (found.dtype, found.shape, sign.dtype) == (np.dtype(dtype), np.shape(theirs[0]), np.dtype(dtype))
        # What two sums leave of each other has fewer digits.
        np.testing.assert_allclose(found.astype(np.float64), theirs[0], rtol=rough, atol=rough)
        np.testing.assert_array_equal(sign.astype(np.float64), theirs[1])
        alone = maxsoftmax.logsumexp(x, b=b, **how).astype(np.float64)
        np.testing.assert_array_equal(alone, np.where(sign < 0, np.nan, found).astype(np.float64))


@pytest.mark.parametrize(
    ("b", "error", "words"),
    [
        (["a"], TypeError, r"b must be an array of real numbers, not \['a'\]"),
        ([1, 2], ValueError, r"b has shape \(2,\), which does not broadcast with x of \(3,\)"),
    ],
)
def test_weights_that_are_none_are_refused(b, error, words):
    with pytest.raises(error, match=words):
        maxsoftmax.logsumexp([1.0, 2.0, 3.0], b=b)


def test_weights_of_zero_take_away_whatever_is_there():
    x = np.array([np.inf, 1.0, np.nan])
    assert maxsoftmax.logsumexp(x, b=[0, 2, 0]) == pytest.approx(1 + np.log(2))
    assert np.isnan(maxsoftmax.logsumexp(np.zeros(2, np.float32), b=[1, np.nan], return_sign=True)).all()
