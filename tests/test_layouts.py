"""Arrays as they lie: every op walks memory of any order, and calls like one that came before take a shortcut."""

import itertools
import subprocess
import sys

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from contract import DTYPES, logits
from max.driver import Buffer
from maxsoftmax import _arrays
from maxsoftmax._arrays import call, dlpack, functions, losses, memory, shortcuts
from test_gradients import backward, close, wide
from test_gradients import losses as losses_of

SHAPE = (4, 6, 10)
TARGET = np.random.default_rng(3).integers(0, SHAPE[1], (SHAPE[0], SHAPE[2]))


def reference(op, x, axis):
    """Returns what an op makes of an array, in float64, as a tuple."""
    x = wide(x)
    plain = {"softmax": scipy.special.softmax, "log_softmax": scipy.special.log_softmax}
    plain["logsumexp"] = scipy.special.logsumexp
    if op in plain:
        return (plain[op](x, axis=axis),)
    if op == "max_sum":
        m = x.max(axis=axis)
        return m, np.exp(x - x.max(axis=axis, keepdims=True)).sum(axis=axis)
    if op.endswith("softmax_backward"):
        axes = tuple(range(x.ndim)) if axis is None else axis
        return (backward(x / 9, x, axes, op.startswith("log")),)
    rows = np.moveaxis(x, 1, -1).reshape(-1, SHAPE[1])
    loss, gradient = losses_of(rows, TARGET.reshape(-1), -100, 0.1)
    along = np.moveaxis(gradient.reshape(SHAPE[0], SHAPE[2], SHAPE[1]), -1, 1)
    return (loss.reshape(TARGET.shape) if op == "cross_entropy" else along,)


def compute(op, x, axis=-1, convert=lambda a: a):
    """Returns what an op makes of an array, in a tuple; `convert` makes arrays the kind that they should be."""
    function = getattr(maxsoftmax, op)
    if op.endswith("softmax_backward"):
        y = np.empty_like(x)
        y[...] = x / 9
        return (function(convert(y), convert(x), axis),)
    if op == "cross_entropy":
        return (function(convert(x), convert(TARGET), label_smoothing=0.1, reduction="none"),)
    if op.startswith("cross_entropy_backward"):
        _, pairs = maxsoftmax.cross_entropy_forward(x, TARGET, label_smoothing=0.1)
        x = x.copy(order="K") if op.endswith("_") else x
        given = convert(x)
        options = {"label_smoothing": 0.1, "reduction": "sum"}
        return (function(given, convert(TARGET), convert(pairs), **options),)
    result = function(convert(x), axis)
    return result if isinstance(result, tuple) else (result,)


ALONG = ["softmax", "log_softmax", "softmax_backward", "log_softmax_backward"]
REDUCED = ["logsumexp", "max_sum"]
LOSSES = ["cross_entropy", "cross_entropy_backward", "cross_entropy_backward_"]
OPS = [*ALONG, *REDUCED, *LOSSES]

ORDERS = list(itertools.permutations(range(3)))


def ordered(x, order):
    """Returns an array of the same elements whose dimensions lie in an order."""
    return np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))


@pytest.fixture
def seen(monkeypatch):
    """The addresses that kernels are given."""
    found = []
    original = call.Call.run

    def record(self, name, rows, options, arrays, *others):
        found.append({array.address for array in arrays if array is not None})
        return original(self, name, rows, options, arrays, *others)

    monkeypatch.setattr(call.Call, "run", record)
    shortcuts.forget()
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("op", OPS)
def test_memory_without_gaps_is_walked_where_it_lies(seen, op, order):
    x = ordered(logits(SHAPE), order)
    for axis in range(3) if op not in LOSSES else [1]:
        # The gradients' y is another array, in the same order.
        given = x.copy(order="K") if op.endswith("_") else x
        if op == "cross_entropy_backward_":
            pairs = maxsoftmax.cross_entropy_forward(x, TARGET, label_smoothing=0.1)[1]
            options = {"label_smoothing": 0.1, "reduction": "sum"}
            results = (maxsoftmax.cross_entropy_backward_(given, TARGET, pairs, **options),)
            assert results[0] is given
        else:
            results = compute(op, given, axis)
        assert memory.address(given) in seen[-1]
        for result, expected in zip(results, reference(op, x, axis), strict=True):
            assert result.shape == expected.shape
            close(result, expected, scale=10)
            if result.shape == x.shape:
                assert result.strides == x.strides
            else:
                # In the order of what is left.
                kept = [i for i in order if i != axis]
                assert sorted(kept, key=lambda i: -result.strides[i - (i > axis)]) == kept


@pytest.mark.parametrize("op", OPS)
def test_axes_that_are_neighbours_in_memory_are_one(seen, op):
    if op in LOSSES:
        pytest.skip("has one axis")
    x = ordered(logits(SHAPE), (1, 0, 2))
    for axis in [(0, 1), (0, 2), None, (2, 0, 1)]:
        for result, expected in zip(compute(op, x, axis), reference(op, x, axis), strict=True):
            close(result, expected, scale=30)
        assert memory.address(x) in seen[-1]
    # These are none, so there is a copy.
    for result, expected in zip(compute(op, x, (1, 2)), reference(op, x, (1, 2)), strict=True):
        close(result, expected, scale=30)
    assert memory.address(x) not in seen[-1]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "lie",
    [
        lambda x: np.repeat(x, 2, axis=2)[:, :, ::2],
        lambda x: x[::-1, :, ::-1][::-1, :, ::-1][:, ::-1],
        lambda x: x.astype(">f4"),
        lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape),
        lambda x: np.lib.stride_tricks.as_strided(x, x.shape, (240, 40, 4)),
    ],
    ids=["gaps", "backwards", "byte order", "odd address", "as it is"],
)
def test_other_memory_is_copied(op, lie):
    if op.endswith("_"):
        with pytest.raises(ValueError, match="contiguous, writeable array of floats"):
            maxsoftmax.cross_entropy_backward_(np.repeat(logits(SHAPE), 2, 2)[:, :, ::2], TARGET, None)
        return
    given = lie(logits(SHAPE))
    for _ in range(3):
        for result, expected in zip(compute(op, given, 1), reference(op, given, 1), strict=True):
            close(result, expected, scale=10)


@pytest.mark.parametrize("op", OPS)
def test_what_is_read_only_is_not_copied(seen, op):
    x = logits(SHAPE)
    before = x.copy()
    x.flags.writeable = False
    if op.endswith("_"):
        with pytest.raises(ValueError, match="contiguous, writeable array of floats"):
            maxsoftmax.cross_entropy_backward_(x, TARGET, np.zeros((*TARGET.shape, 2), np.float32))
        return
    for _ in range(2):
        compute(op, x, 1)
    assert memory.address(x) in seen[-1]
    np.testing.assert_array_equal(x, before)


def test_a_dimension_of_1_may_lie_anywhere(seen):
    x = logits((5, 7))
    for view in (x[:, None], x[None].T, np.lib.stride_tricks.as_strided(x, (5, 1, 7), (28, 12345 * 4, 4))):
        for axis in range(3):
            close(maxsoftmax.log_softmax(view, axis), scipy.special.log_softmax(wide(view), axis=axis))
            assert memory.address(x) in seen[-1]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_of_another_layout_are_read_in_it(op, dtype):
    if not op.endswith("backward"):
        pytest.skip("takes one array")
    x = logits(SHAPE, dtype)
    expected = compute(op, x, 1)[0]
    if op.startswith("cross"):
        pairs = maxsoftmax.cross_entropy_forward(x, TARGET, label_smoothing=0.1)[1]
        options = {"label_smoothing": 0.1, "reduction": "sum"}
        others = np.asfortranarray(TARGET), np.asfortranarray(pairs)
        np.testing.assert_array_equal(maxsoftmax.cross_entropy_backward(x, *others, **options), expected)
    else:
        dx = getattr(maxsoftmax, op)(x / 9, np.asfortranarray(x), 1)
        np.testing.assert_array_equal(dx, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_losses_of_rows_in_another_order_have_their_own_targets(order):
    x, dloss = ordered(logits(SHAPE), order), logits(TARGET.shape, seed=4)
    expected, gradient = losses_of(np.moveaxis(x, 1, -1).reshape(-1, SHAPE[1]), TARGET.reshape(-1), -100, 0)
    for _ in range(2):
        loss, pairs = maxsoftmax.cross_entropy_forward(x, TARGET, reduction="none")
        close(loss, expected.reshape(TARGET.shape), scale=10)
        close(pairs[..., 0], x.max(axis=1))
        dx = maxsoftmax.cross_entropy_backward(x, TARGET, pairs, dloss, reduction="none")
        want = np.moveaxis(gradient.reshape(*TARGET.shape, SHAPE[1]), -1, 1) * dloss[:, None]
        close(dx, want, scale=10)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("times", [1, 2])
def test_a_wrong_target_is_told_by_its_own_index(order, times):
    x, wrong = ordered(logits(SHAPE), order), TARGET.copy()
    for _ in range(times):
        maxsoftmax.cross_entropy(x, TARGET)
    wrong[2, 7] = SHAPE[1]
    with pytest.raises(
        ValueError, match=r"^target\[2, 7\] is 6, which is neither a class from 0 to 5 nor ignore_index"
    ):
        maxsoftmax.cross_entropy(x, wrong)
    with pytest.raises(ValueError, match=r"^target is -2, which is neither a class from 0 to 5 nor ignore_index -1$"):
        maxsoftmax.cross_entropy(x[0, :, 0], np.array(-2), ignore_index=-1)


# Shortcuts.


@pytest.fixture
def fresh():
    shortcuts.forget()
    yield
    shortcuts.forget()


@pytest.fixture
def quick(fresh, monkeypatch):
    """Has every call fail that is not remembered, once it is called."""

    def forbid():
        for module in (functions, losses, sys.modules["maxsoftmax._arrays.attention"]):
            monkeypatch.setattr(module, "Call", lambda *_: pytest.fail("the long way"))

    return forbid


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("axis", [-1, 1, 0, None, (1,), (0, 1), [2]])
@pytest.mark.parametrize("op", [*ALONG, *REDUCED])
def test_the_second_call_takes_a_shortcut_to_the_same(quick, op, axis, order):
    x = ordered(logits(SHAPE), order)
    if isinstance(axis, tuple) and len(axis) > 1 and abs(order.index(0) - order.index(1)) != 1:
        pytest.skip("is copied")
    first = compute(op, x, axis)
    quick()
    second = compute(op, x.copy(order="K"), axis)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
        assert (type(one), one.dtype, one.shape, one.strides) == (type(other), other.dtype, other.shape, other.strides)
    # It is nobody else's memory.
    kept = [np.copy(one) for one in second]
    compute(op, x * 2, axis)
    for one, other in zip(kept, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["softmax", "logsumexp"])
def test_shortcuts_of_every_dtype(quick, op, dtype):
    x = logits((3, 50), dtype)
    first = compute(op, x)
    quick()
    for one, other in zip(first, compute(op, x), strict=True):
        assert other.dtype == one.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_shortcuts_of_losses(quick, reduction):
    x, target = logits((5, 9)), np.array([0, 8, -100, 3, 3], np.int32)
    options = {"reduction": reduction, "label_smoothing": 0.2}

    def everything(x):
        loss, pairs = maxsoftmax.cross_entropy_forward(x, target, **options)
        dloss = np.ones_like(loss) if reduction == "none" else None
        dx = maxsoftmax.cross_entropy_backward(x, target, pairs, dloss, **options)
        written = maxsoftmax.cross_entropy_backward_(x.copy(), target, pairs, dloss, **options)
        return maxsoftmax.cross_entropy(x, target, **options), loss, pairs, dx, written

    first = everything(x)
    quick()
    for one, other in zip(first, everything(x), strict=True):
        assert type(one) is type(other)
        np.testing.assert_array_equal(one, other)


def test_shortcuts_with_masks(quick):
    x, mask, sink = logits((2, 5, 7)), np.tri(5, 7, dtype=bool), logits((2, 1, 1))
    options = {"scale": 0.5, "mask": mask, "causal": True, "sink": sink}
    first = maxsoftmax.softmax(x, **options)
    quick()
    np.testing.assert_array_equal(maxsoftmax.softmax(x, **options), first)
    other = maxsoftmax.softmax(x, **{**options, "mask": ~mask})
    assert (other != first).any()


@pytest.mark.parametrize("axis", [-1, 1, 0, None])
def test_buffers_take_a_shortcut_to_the_same(device, quick, axis):
    from maxsoftmax._graph import runtime

    x = logits((3, 50))
    buffer = Buffer.from_numpy(x).to(runtime.device(device))
    first, _ = (maxsoftmax.softmax(buffer, axis=axis) for _ in range(2))
    quick()
    second = maxsoftmax.softmax(buffer, axis=axis)
    assert second.device == buffer.device
    here = runtime.device("cpu")
    np.testing.assert_array_equal(second.to(here).to_numpy(), first.to(here).to_numpy())


@pytest.mark.parametrize("axis", [-1, 1, (1,), [1], (-1,), np.int64(1), np.int8(-1), (np.int64(1),)])
@pytest.mark.parametrize("op", [*ALONG, *REDUCED])
def test_every_spelling_of_an_axis_is_the_same(fresh, op, axis):
    x = logits((3, 50))
    expected = compute(op, x)
    for _ in range(2):
        for one, other in zip(expected, compute(op, x, axis), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"axis": axis} for axis in (True, 1.0, "1", (True,), (1.0,), (1, 1), {1})),
        *({"device": device} for device in ("tpu", [])),
        {"algorithm": ["auto"]},
        {"causal": 0},
    ],
)
def test_what_equals_a_good_argument_is_still_refused(fresh, wrong):
    x = logits((2, 3))
    for axis in (1, (1,)):
        maxsoftmax.softmax(x, axis=axis, device="cpu")
        maxsoftmax.softmax(x, axis=1, causal=True)
    with pytest.raises((TypeError, ValueError)):
        maxsoftmax.softmax(x, **{"axis": 1, "device": "cpu", **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        *({"ignore_index": index} for index in (0.0, False, [])),
        *({"label_smoothing": share} for share in (False, np.array([0.0]))),
        {"reduction": ["mean"]},
    ],
)
def test_what_equals_a_good_option_is_still_refused(fresh, wrong):
    x, target = logits((2, 3)), np.array([1, 2])
    right = {"ignore_index": 0, "label_smoothing": 0.0}
    for _ in range(2):
        maxsoftmax.cross_entropy(x, target, **right)
    with pytest.raises(TypeError):
        maxsoftmax.cross_entropy(x, target, **{**right, **wrong})


class Subclass(np.ndarray):
    pass


@pytest.mark.parametrize(
    "other",
    [
        np.asfortranarray,
        lambda x: x[:, ::-1],
        lambda x: np.lib.stride_tricks.as_strided(x, writeable=False),
        lambda x: x.astype(">f4"),
        lambda x: x.view(Subclass),
        lambda x: x.astype(ml_dtypes.bfloat16),
        lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape),
        np.ndarray.tolist,
    ],
)
def test_other_arrays_than_the_one_that_came_before(fresh, other):
    x = logits((4, 6))
    maxsoftmax.softmax(x)
    given = other(x)
    y = maxsoftmax.softmax(given)
    assert type(y) is np.ndarray
    np.testing.assert_allclose(np.asarray(y, np.float64), maxsoftmax.softmax(np.array(given, np.float64)), rtol=1e-2)


def test_shortcuts_do_not_pile_up(fresh, monkeypatch):
    monkeypatch.setattr(shortcuts, "MOST", 3)
    for n in range(1, 9):
        maxsoftmax.softmax(logits((n,)))
        assert len(functions._softmax) <= 3


def test_nothing_to_compute_needs_no_shortcut(fresh):
    maxsoftmax.softmax(np.zeros((0, 3), np.float32))
    maxsoftmax.softmax(np.float32(1))
    maxsoftmax.softmax(np.zeros((), np.float32))
    assert not functions._softmax


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_empty_arrays(shape):
    x = np.zeros(shape, np.float32)
    for axis in (0, -1, None):
        assert maxsoftmax.softmax_backward(x, x, axis).shape == shape
        m, d = maxsoftmax.max_sum(x, axis)
        assert m.shape == d.shape == np.sum(x, axis=axis).shape
        assert (m == -np.inf).all()
        assert (d == 0).all()
        assert (maxsoftmax.logsumexp(x, axis) == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_of_nothing(dtype):
    x, target = np.zeros((0, 3), dtype), np.zeros(0, int)
    assert maxsoftmax.cross_entropy(x, target, reduction="sum") == 0
    loss, pairs = maxsoftmax.cross_entropy_forward(x, target)
    assert np.isnan(loss)
    assert loss.dtype == dtype
    assert pairs.shape == (0, 2)
    assert maxsoftmax.cross_entropy(x, target, reduction="none").shape == (0,)
    assert maxsoftmax.cross_entropy_backward(x, target, pairs).shape == (0, 3)
    x = np.zeros((2, 0), dtype)
    assert maxsoftmax.cross_entropy(x, np.array([-100, -100]), reduction="sum") == 0
    with pytest.raises(ValueError, match=r"target\[0\] is 0"):
        maxsoftmax.cross_entropy(x, np.array([0, -100]))


# Addresses.


def test_arrays_are_in_memory_what_extensions_take_them_for():
    assert memory._is_as_compiled()
    for x in (np.zeros(3), logits((4, 5))[::-1, ::2], np.zeros((), ml_dtypes.bfloat16), np.zeros((0, 3))):
        assert memory._quickly(x) == memory._slowly(x)


def test_where_they_are_not_numpy_is_asked(monkeypatch):
    monkeypatch.setattr(memory, "DATA", memory.DATA + 8)
    assert not memory._is_as_compiled()
    monkeypatch.setattr(memory, "DATA", 0)
    assert not memory._is_as_compiled()


# Forks and processes.


def test_a_fork_computes_the_same(environment):
    program = """
import os, sys
import numpy as np
import maxsoftmax
x = np.random.default_rng(0).standard_normal((300, 20_000), dtype=np.float32)
target = np.arange(300)

def everything():
    loss, pairs = maxsoftmax.cross_entropy_forward(x, target)
    yield from (maxsoftmax.softmax(x), maxsoftmax.softmax(x, axis=0), maxsoftmax.log_softmax(x), loss, pairs)
    yield maxsoftmax.cross_entropy_backward(x, target, pairs)
    yield from maxsoftmax.max_sum(x)
    yield maxsoftmax.softmax(x, scale=0.5, causal=True)

before = [list(everything()) for _ in range(2)][1]
child = os.fork()
if child == 0:
    for expected, found in zip(before, everything(), strict=True):
        np.testing.assert_array_equal(found, expected)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
for expected, found in zip(before, everything(), strict=True):
    np.testing.assert_array_equal(found, expected)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_call_needs_no_more_of_max_than_its_libraries(environment):
    program = """
import sys
import numpy as np
import maxsoftmax
maxsoftmax.softmax(np.zeros((8, 64), np.float32))
for name in ("max.driver", "max.graph", "max.engine", "scipy", "maxsoftmax.ops", "maxsoftmax._graph.runtime"):
    assert name not in sys.modules, name
from maxsoftmax import ops
assert maxsoftmax.ops is ops
assert callable(maxsoftmax.extension)
assert callable(maxsoftmax.dropin)
assert "ops" in maxsoftmax.__all__
try:
    maxsoftmax.nothing
except AttributeError as error:
    assert "has no attribute 'nothing'" in str(error)
"""
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


def test_all_that_is_public_is_there():
    for name in maxsoftmax.__all__:
        assert getattr(maxsoftmax, name) is not None
    assert set(_arrays.__all__) - {"Rows"} <= set(maxsoftmax.__all__)


# DLPack, read from capsules.


class Producer:
    """Exports an array of NumPy, by the version of DLPack that it is told to."""

    def __init__(self, array, versioned=True):
        self.array, self.versioned = array, versioned

    def __dlpack__(self, **options):
        if not self.versioned and "max_version" in options:
            raise TypeError("what is max_version?")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    @staticmethod
    def from_dlpack(array):
        return Producer(np.from_dlpack(array))


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("op", OPS)
def test_producers_are_read_where_they_lie(seen, op, order, versioned):
    x = ordered(logits(SHAPE), order)
    if op.endswith("_") and not versioned:
        given = Producer(x, versioned=False), TARGET, maxsoftmax.cross_entropy_forward(x, TARGET)[1]
        with pytest.raises(ValueError, match="contiguous, writeable array of floats"):
            maxsoftmax.cross_entropy_backward_(*given)
        return
    results = compute(op, x, 1, lambda array: Producer(array, versioned))
    for result, expected in zip(results, reference(op, x, 1), strict=True):
        assert isinstance(result, Producer)
        close(result.array, expected, scale=10)
        if expected.shape == SHAPE:
            assert result.array.strides == x.strides
    if op in ("softmax", "logsumexp"):
        assert memory.address(x) in seen[-1]


def test_producers_that_are_read_only_or_have_gaps(seen):
    x = logits((6, 8))
    x.flags.writeable = False
    y = maxsoftmax.softmax(Producer(x))
    np.testing.assert_array_equal(y.array, maxsoftmax.softmax(x))
    assert memory.address(x) in seen[0]
    for view in (x[:, ::2], x[::-1], np.broadcast_to(x[0], (3, 8))):
        np.testing.assert_array_equal(maxsoftmax.softmax(Producer(view)).array, maxsoftmax.softmax(np.array(view)))
    with pytest.raises(ValueError, match="contiguous, writeable"):
        maxsoftmax.cross_entropy_backward_(Producer(x), np.zeros(6, int), np.zeros((6, 2), np.float32))


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lambda x: x.astype(np.complex64), "x has dtype complex64, but the kernels take float16"),
        (lambda x: x.astype(np.complex128), "x has dtype complex128"),
    ],
)
def test_producers_of_anything_else_are_refused(lie, words):
    with pytest.raises(TypeError, match=words):
        maxsoftmax.softmax(Producer(lie(logits((2, 3)))))


def test_capsules_that_are_none_are_refused():
    class Odd(Producer):
        def __dlpack__(self, **options):
            return object()

    with pytest.raises(TypeError, match=r"cannot be shared: what it exports is no capsule of DLPack"):
        maxsoftmax.softmax(Odd(logits((2, 3))))

    class Elsewhere(Producer):
        def __dlpack_device__(self):
            return 8, 0

    with pytest.raises(TypeError, match=r"cannot be shared: it is neither in memory of the host nor in that of a GPU"):
        maxsoftmax.softmax(Elsewhere(logits((2, 3))))


def test_a_capsule_is_lent_and_not_used_up():
    x = logits((2, 3))
    lent = dlpack.read(Producer(x))
    assert lent.array.address == memory.address(x)
    assert lent.writeable
    assert (memory.view(lent.array) == x).all()
