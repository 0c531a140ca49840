"""The way of arrays to a GPU and back, with a CPU in its place where there is none; the real one is in other files."""

import max.driver
import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
from contract import DTYPES, check, logits
from max.driver import CPU, Buffer
from max.dtype import DType
from maxsoftmax import _native
from maxsoftmax._arrays import convert, devices, dlpack, kinds, shortcuts
from test_gradients import close
from test_layouts import OPS, ORDERS, SHAPE, TARGET, Producer, compute, ordered, reference

PLACE = 0
"""The index of the GPU that is none."""


class OnDevice(Producer):
    """Exports an array of the host as if it were on the GPU."""

    def __dlpack__(self, *, stream=None, **options):
        assert stream == 7
        return super().__dlpack__(**options)

    @staticmethod
    def from_dlpack(array):
        return OnDevice(np.from_dlpack(array))


@pytest.fixture
def pretended(monkeypatch):
    """Has the host's memory taken for that of a GPU, and counts how often it is waited for."""
    own, waits = _native.plan, []
    monkeypatch.setattr(
        _native, "plan", lambda name, dtype, device, *others, **more: own(name, dtype, -1, *others, **more)
    )
    monkeypatch.setattr(_native, "index", lambda spec: -1 if spec == "cpu" else PLACE)
    monkeypatch.setattr(devices, "of", lambda number: CPU())
    monkeypatch.setattr(devices, "queue", lambda number: 7)
    monkeypatch.setattr(devices, "finish", lambda *given: waits.append(given))
    shortcuts.forget()
    yield waits
    shortcuts.forget()


@pytest.fixture
def elsewhere(pretended, monkeypatch):
    """Has DLPack say so, too."""
    monkeypatch.setattr(dlpack, "ON_HOST", ())
    monkeypatch.setattr(dlpack, "ON_GPU", (1,))
    return pretended


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("op", [op for op in OPS if not op.endswith("_")])
def test_numpy_there_and_back(pretended, monkeypatch, op, order):
    function = getattr(maxsoftmax, op)
    monkeypatch.setattr(maxsoftmax, op, lambda *given, **options: function(*given, device="gpu", **options))
    x = ordered(logits(SHAPE), order)
    for result, expected in zip(compute(op, x, 1), reference(op, x, 1), strict=True):
        assert isinstance(result, np.ndarray)
        close(result, expected, scale=10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_there_and_back(pretended, dtype):
    x = logits((3, 4, 50), dtype)
    for given, axis in ((x, -1), (x.T, 0), (x, (0, 2)), (x[:, ::2], 1), (x[:0], 1), (x[0, 0, 0], None)):
        y = maxsoftmax.softmax(given, axis, device="gpu")
        assert y.dtype == dtype
        check(y, given, axis)
    assert maxsoftmax.softmax(np.array([1, 2]), device="gpu").dtype == np.float64
    loss = maxsoftmax.cross_entropy(np.zeros((0, 3), dtype), np.zeros(0, int), device="gpu")
    assert np.isnan(loss)
    x.flags.writeable = False
    check(maxsoftmax.softmax(x, device="gpu"), x)


@pytest.mark.parametrize("where", [None, "cpu"])
@pytest.mark.parametrize("op", OPS)
def test_producers_stay_where_they_are(elsewhere, monkeypatch, op, where):
    if where is not None:
        if op.endswith("_"):
            pytest.skip("is done where the array is")
        function = getattr(maxsoftmax, op)
        monkeypatch.setattr(maxsoftmax, op, lambda *given, **options: function(*given, device=where, **options))
    x = logits(SHAPE)
    monkeypatch.setattr(maxsoftmax, "cross_entropy_forward", numpys(maxsoftmax.cross_entropy_forward))
    for axis in (1, -1, (0, 2)) if not op.startswith("cross") else (1,):
        for result, expected in zip(compute(op, x, axis, OnDevice), reference(op, x, axis), strict=True):
            assert isinstance(result, OnDevice)
            close(result.array, expected, scale=30)


def numpys(function):
    """Returns a function that is told that its arrays are on the host."""
    return lambda x, *others, **options: function(np.array(x), *others, **options)


def test_producers_with_gaps_are_copied_by_their_own_means(elsewhere):
    class Library:
        @staticmethod
        def ascontiguousarray(x):
            return Able(np.ascontiguousarray(x.array))

        @staticmethod
        def from_dlpack(array):
            return Able(np.from_dlpack(array))

    class Able(OnDevice):
        def __array_namespace__(self):
            return Library

    class Unable(OnDevice):
        pass

    x = logits((6, 8))
    for view in (x, x.T, x[:, ::2]):
        y = maxsoftmax.softmax(Able(view), axis=0)
        assert type(y) is Able
        check(y.array, view, axis=0)
    check(maxsoftmax.softmax(Unable(x)).array, x)
    with pytest.raises(
        TypeError, match=r"x, a .*Unable, cannot be shared: it is not contiguous: pass a contiguous copy"
    ):
        maxsoftmax.softmax(Unable(x.T))


def test_masks_follow_logits(elsewhere):
    x, mask, scale = logits((2, 5, 7)), np.tri(5, 7, dtype=bool), logits((5, 1), np.float16)
    expected = maxsoftmax.softmax(x, mask=mask, scale=scale, sink=np.zeros((2, 1, 1)), device="cpu")
    for kind in (OnDevice, lambda array: array):
        y = maxsoftmax.softmax(OnDevice(x), mask=kind(mask), scale=scale, sink=np.zeros((2, 1, 1)))
        np.testing.assert_array_equal(y.array, expected)
    # Four dimensions do not tell of it.
    x = logits((2, 3, 2, 3, 2, 5))
    mask = np.random.default_rng(0).random((2, 1, 2, 1, 2, 5)) < 0.7
    other = np.random.default_rng(1).random((1, 3, 1, 3, 1, 1)) + 1
    expected = maxsoftmax.softmax(x, mask=mask, temperature=other, causal=True, device="cpu")
    np.testing.assert_array_equal(
        maxsoftmax.softmax(OnDevice(x), mask=mask, temperature=other, causal=True).array, expected
    )


def test_targets_of_the_host_are_looked_at_before_they_go(pretended):
    with pytest.raises(
        ValueError, match=r"^target\[1\] is 9, which is neither a class from 0 to 4 nor ignore_index -100$"
    ):
        maxsoftmax.cross_entropy(logits((3, 5)), np.array([0, 9, 1]), device="gpu")


def test_memory_of_another_kind_is_waited_for(elsewhere):
    x = logits(SHAPE)
    pairs = maxsoftmax.cross_entropy_forward(x, TARGET, device="cpu")[1]
    assert not elsewhere
    maxsoftmax.cross_entropy_backward(OnDevice(x), TARGET, pairs)
    assert elsewhere


def test_kinds_are_known():
    assert kinds.of([1.0]) is kinds.NUMPY
    assert kinds.of(np.float32(1)) is kinds.NUMPY
    assert kinds.of(Producer(np.zeros(3))) is kinds.FOREIGN
    assert kinds.of(Buffer.zeros((3,), DType.float32, CPU())) is kinds.BUFFERS
    assert not convert.is_buffer(np.zeros(3))


@pytest.mark.parametrize("axis", [1, (0, 2), None])
@pytest.mark.parametrize("op", OPS)
def test_buffers_of_the_host_stay_buffers(op, axis):
    if op.startswith("cross") and axis != 1:
        pytest.skip("has one axis")
    x = logits(SHAPE)
    for _ in range(3):
        results = compute(op, x, axis, lambda array: Buffer.from_numpy(np.ascontiguousarray(array)))
        for result, expected in zip(results, reference(op, x, axis), strict=True):
            assert isinstance(result, Buffer)
            assert tuple(result.shape) == expected.shape
            close(result.to_numpy(), expected, scale=30)


def test_buffers_with_gaps():
    x = logits((4, 12))
    buffer = Buffer.from_numpy(x)[:, ::2]
    check(maxsoftmax.softmax(buffer).to_numpy(), x[:, ::2])
    bits = logits((4, 12), ml_dtypes.bfloat16).view(np.uint16)
    y = maxsoftmax.softmax(Buffer.from_numpy(bits).view(DType.bfloat16, (4, 12)), axis=0)
    assert y.dtype == DType.bfloat16
    m, d = maxsoftmax.max_sum(y, axis=1)
    assert (m.dtype, d.dtype, tuple(m.shape)) == (DType.float32, DType.float32, (4,))


def test_a_wrong_target_in_a_buffer_is_told(device):
    if device == "gpu" or max.driver.accelerator_count():
        pytest.skip("is NaN there")
    x, target = Buffer.from_numpy(logits((3, 2, 4))), np.zeros((3, 4), int)
    for _ in range(2):
        maxsoftmax.cross_entropy(x, Buffer.from_numpy(target))
    target[2, 1] = 5
    with pytest.raises(ValueError, match=r"^target\[2, 1\] is 5, which"):
        maxsoftmax.cross_entropy(x, Buffer.from_numpy(target))
