import math

import numpy as np
import pytest
from fakes import CASE, array, measured, softmax
from max.driver import CPU, Buffer
from max.dtype import DType
from maxsoftmax._arguments import DTYPES
from maxsoftmax._bench import data
from maxsoftmax._bench.cases import Case
from maxsoftmax._bench.data import Inputs, check


@pytest.mark.parametrize(
    "case", [CASE, Case((7,)), Case((2, 3, 5), axis=1), Case((6, 4), axis=0), Case((3, 1))], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_knows_the_numbers_that_were_placed(case, dtype):
    case = case._replace(dtype=dtype)
    inputs = Inputs.place(case, 5, CPU())
    assert [(tuple(x.shape), x.dtype) for x in inputs.buffers] == [(case.shape, dtype)] * 5
    right = [softmax(x, case.axis) for x in inputs.buffers]
    for i, y in enumerate(right):
        found = check(inputs, i, y)
        assert found.correct
        # All that is lost is rounding.
        assert found.error <= data.TOLERANCE[dtype][0] / 2
        if math.prod(case.shape) > case.shape[case.axis] > 1:
            assert not check(inputs, (i + 1) % 5, y).correct


def test_an_axis_is_a_matter_of_the_case():
    case = Case((2, 3, 5), axis=1)
    inputs = Inputs.place(case, 1, CPU())
    (x,) = inputs.buffers
    assert check(inputs, 0, softmax(x, 1)).correct
    assert check(inputs._replace(case=case._replace(axis=-2)), 0, softmax(x, 1)).correct
    for axis in (0, 2):
        assert not check(inputs, 0, softmax(x, axis)).correct
    assert measured(case=case).status == "ok"


def test_inputs_are_random_logits():
    (x,) = Inputs.place(Case((1000, 64)), 1, CPU()).buffers
    x = array(x)
    assert np.isfinite(x).all()
    assert abs(x.mean()) < 0.1
    assert 3.9 < x.std() < 4.1


@pytest.mark.parametrize("n", [1024, 50257, 2**20])
def test_rows_differ_even_where_the_random_numbers_begin_again(n):
    # More than there are.
    rows = data.BLOCK // n + 3
    (x,) = Inputs.place(Case((rows, n)), 1, CPU()).buffers
    assert len({row.tobytes() for row in array(x)}) == rows


@pytest.mark.parametrize("block", [data.BLOCK, 23])
def test_everybody_gets_a_piece_of_the_same_numbers(monkeypatch, block):
    # 23 are fewer than the case has, so that they begin again.
    monkeypatch.setattr(data, "BLOCK", block)
    inputs = Inputs.place(CASE, 3, CPU())
    for number, (x, offset) in enumerate(zip(inputs.buffers, inputs.offsets, strict=True)):
        expected = array(data._block(DType.float32))[(offset + np.arange(CASE.size)) % block]
        np.testing.assert_array_equal(array(x).ravel(), expected)
        assert check(inputs, number, softmax(x)).correct


def test_everybody_gets_another_piece():
    first, second = (Inputs.place(CASE, 3, CPU()).offsets for _ in range(2))
    assert first != second


def test_bfloat16_is_float32_cut_short():
    wide, short = (array(data._block(dtype))[:10000].astype(np.float32) for dtype in (DType.float32, DType.bfloat16))
    np.testing.assert_allclose(short, wide, rtol=2**-7)
    assert len(np.unique(short)) > 1000


def test_the_numbers_are_widened_once_for_all_rows(monkeypatch):
    widened = []
    floats = data._floats
    monkeypatch.setattr(data, "_floats", lambda buffer: widened.append(buffer.num_elements) or floats(buffer))
    inputs = Inputs.place(Case((20, 8), DType.bfloat16), 1, CPU())
    assert check(inputs, 0, softmax(inputs.buffers[0])).correct
    # 26 ms each time, for thousands of rows, is more than all the rest of the benchmark.
    assert widened.count(data.BLOCK) == 1


def test_the_first_row_and_the_last_are_always_looked_at(monkeypatch):
    monkeypatch.setattr(data, "CHECKED", 16)
    inputs = Inputs.place(Case((1000, 8)), 1, CPU())
    (x,) = inputs.buffers
    for row in (0, -1):
        y = softmax(x)
        array(y)[row, 5] *= 1.01
        assert not check(inputs, 0, y).correct
    # The rest is for another time: it was told to look at two rows.
    y = softmax(x)
    array(y)[500] = 0
    assert check(inputs, 0, y).correct


def test_rows_between_are_drawn_by_chance(monkeypatch):
    monkeypatch.setattr(data, "CHECKED", 8 * 20)
    inputs = Inputs.place(Case((100, 8)), 1, CPU())
    y = softmax(inputs.buffers[0])
    array(y)[1:50] = 0
    # All 18 in the other half: less likely than 10⁻⁵.
    assert not check(inputs, 0, y).correct


def test_a_row_longer_than_what_is_checked_is_checked_whole(monkeypatch):
    monkeypatch.setattr(data, "CHECKED", 16)
    inputs = Inputs.place(Case((3, 100)), 1, CPU())
    y = softmax(inputs.buffers[0])
    assert check(inputs, 0, y).correct
    array(y)[2, 99] *= 1.01
    assert not check(inputs, 0, y).correct


@pytest.mark.parametrize("case", [Case((64, 5000)), Case((1, 2**20)), Case((50, 3, 40), axis=1)], ids=str)
def test_plain_float32_arithmetic_is_not_wrong(case):
    def softmax32(x):
        e = np.exp(x - x.max(axis=case.axis, keepdims=True))
        return e / e.sum(axis=case.axis, keepdims=True)

    inputs = Inputs.place(case, 1, CPU())
    found = check(inputs, 0, Buffer.from_numpy(softmax32(array(inputs.buffers[0]))))
    assert found.correct
    assert 0 < found.error < 1e-5


def test_underflow_to_zero_is_not_wrong(monkeypatch):
    # So far below the maximum that float32 has no normal number for it.
    block = data._block(DType.float32).to_numpy() * 20
    monkeypatch.setitem(data._blocks, DType.float32, Buffer.from_numpy(block))
    inputs = Inputs.place(Case((64, 64)), 1, CPU())
    y = softmax(inputs.buffers[0])
    tiny = array(y) < 1e-38
    assert tiny.any()
    array(y)[tiny] = 0
    assert check(inputs, 0, y).correct
    array(y)[tiny] = 1e-20
    assert not check(inputs, 0, y).correct
