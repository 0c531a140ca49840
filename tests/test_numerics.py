import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
from contract import DTYPES, check, logits, spare

SPECIAL = {
    "nan poisons its row": [[np.nan, 0, 1], [1, 2, 3]],
    "inf turns its row to nan": [[np.inf, 0, 1], [np.inf, np.inf, -np.inf]],
    "all -inf is nan": [[-np.inf] * 3, [0, -np.inf, -np.inf]],
    "-inf beside numbers is 0": [[-np.inf, 1, 2], [3, -np.inf, -np.inf]],
    "nan beside infinities": [[np.nan, np.inf, -np.inf], [np.nan, -np.inf, -np.inf]],
    "subnormals": [[1e-40, -1e-40, 0], [1e-45, 1e-45, 1e-38]],
    "largest": [[3e38, -3e38, 0], [3e38, 3e38, 2.9999e38]],
    "smallest": [[-3e38, -3e38, -3e38], [-3e38, -2.9e38, 0]],
    "signed zeros": [[0.0, -0.0, 0.0], [-0.0, -0.0, -0.0]],
}


@pytest.mark.parametrize("case", SPECIAL)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("padding", [0, 40, 20_000])
def test_special_values(how, case, dtype, padding):
    x = np.array(SPECIAL[case]).astype(dtype)
    # Among copies of their last element they meet every lane, thread and span.
    x = np.concatenate([np.repeat(x[:, -1:], padding, 1), x, np.repeat(x[:, -1:], padding, 1)], axis=1)
    check(maxsoftmax.softmax(x, **how), x)
    check(maxsoftmax.softmax(x.T, axis=0, **how), x.T, axis=0)
    strided = np.stack([x, x[::-1]] * 4, axis=-1)
    check(maxsoftmax.softmax(strided, axis=1, **how), strided, axis=1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_poisoned_row_leaves_its_neighbours_alone(how, value):
    x = logits((3, 4, 50))
    x[1, 2, 30] = value
    for axis in range(3):
        check(maxsoftmax.softmax(x, axis=axis, **how), x, axis=axis)


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e8, -1e30])
def test_a_common_offset_costs_nothing(how, offset):
    x = (logits((4, 1000)) + np.float32(offset)).astype(np.float32)
    check(maxsoftmax.softmax(x, **how), x)


@pytest.mark.parametrize("n", [1000, 50257, 1 << 20])
@pytest.mark.parametrize("low", [-0.1, -3.3, -7.07, -11.9])
@pytest.mark.parametrize("high", [0.0, 0.7, 3.3, 5.9])
def test_equal_terms_add_up(how, n, low, high):
    spare(how, n)
    # Rounding errors of equal terms all point the same way, in their exponents and in a plain running sum.
    x = np.full(n, low, np.float32)
    x[n // 2] = high
    check(maxsoftmax.softmax(x, **how), x)


def test_what_evolution_found_to_be_hardest(how):
    # A dominant term and smaller ones that all round the same way.
    x = np.array([33.27418, 20.567358, 19.468746, 19.468746, 19.468746, 19.343584, 19.579973, 19.468746], np.float32)
    check(maxsoftmax.softmax(x, **how), x)
    check(maxsoftmax.softmax(np.tile(x[:, None], (1, 2)), axis=0, **how), np.tile(x[:, None], (1, 2)), axis=0)
    x = np.full(128, 19.41884232, np.float32)
    x[77] = 24.27646255
    check(maxsoftmax.softmax(x, **how), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_too_small_for_a_normal_number(how, dtype):
    low = {"float32": -104.5, "bfloat16": -93.0, "float16": -18.0, "float64": -746.0}[np.dtype(dtype).name]
    x = np.concatenate([[0.0], np.linspace(low, low * 0.8, 300)]).astype(dtype)
    y = maxsoftmax.softmax(x, **how)
    check(y, x)
    assert np.count_nonzero((y > 0) & (y < ml_dtypes.finfo(y.dtype).smallest_normal)) > 10


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_most_of_a_row_far_below_the_rest(how, dtype):
    low = {"float32": 90, "float64": 715}[np.dtype(dtype).name]
    x = logits((2, 20_000), dtype)
    # Whole parts of the row that some core or block reduces by itself, before it and after it.
    x[0, 7000:] -= low
    x[1, :13_000] -= low
    y = maxsoftmax.softmax(x, **how)
    check(y, x)
    assert np.count_nonzero((y > 0) & (y < np.finfo(dtype).smallest_normal)) > 1000
    check(maxsoftmax.softmax(x.T, axis=0, **how), x.T, axis=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_sum_to_one(how, dtype):
    tolerance = {2: 2e-2, 4: 2e-6, 8: 1e-14}[np.dtype(dtype).itemsize]
    y = maxsoftmax.softmax(logits((100, 300), dtype), **how)
    np.testing.assert_allclose(y.astype(np.float64).sum(axis=-1), 1, atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("n", [2, 40, 5000])
def test_nan_among_nothing_but_infinities(device, dtype, n):
    x = np.full((3, n), -np.inf, dtype)
    x[0, n // 2], x[2, 0], x[2, 1] = np.nan, np.inf, np.nan
    for given, axis in ((x, 1), (np.ascontiguousarray(x.T), 0)):
        found = maxsoftmax.logsumexp(given, axis=axis, device=device).astype(np.float64)
        np.testing.assert_array_equal(found, [np.nan, -np.inf, np.nan])
        assert np.isnan(maxsoftmax.max_sum(given, axis=axis, device=device)[1])[[0, 2]].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [40, 5000, 70_000])
def test_the_gradient_of_nothing_but_infinities(device, dtype, n):
    x = logits((3, n), dtype)
    x[1] = -np.inf
    target = np.array([5, 6, -100])
    for given, axis in ((x, 1), (np.ascontiguousarray(x.T)[None], 1)):
        labels = target if given is x else target[None]
        loss, pairs = maxsoftmax.cross_entropy_forward(given, labels, reduction="none", device=device)
        dx = maxsoftmax.cross_entropy_backward(
            given, labels, pairs, np.ones_like(loss), reduction="none", device=device
        )
        of_rows = np.isnan(np.moveaxis(dx, axis, -1).reshape(3, n))
        assert np.isnan(loss).ravel().tolist() == [False, True, False]
        assert of_rows[1].all()
        assert not of_rows[[0, 2]].any()
