import math
import weakref

import numpy as np
import pytest
import scipy.special
from fakes import CASE, Ledger, Watch, array, fake, measured, one_off, put, raising, softmax, spoilt, untimed
from max.driver import Buffer
from max.dtype import DType
from maxsoftmax._arguments import DTYPES
from maxsoftmax._bench import protocol
from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.data import check
from maxsoftmax._bench.protocol import PLACEMENTS, REPEATS, rotated
from maxsoftmax._bench.providers import Unsupported


@pytest.fixture
def watch(monkeypatch):
    """Time that passes only in `slow` providers."""
    stopped = Watch()
    monkeypatch.setattr(protocol, "time", stopped)
    return stopped


def slow(watch, *seconds, **members):
    """Returns a provider whose calls take `seconds`, the last of them from then on, and the list of its calls."""
    calls = []

    def prepare(self, case, entry):
        def function(x):
            watch.now += seconds[min(len(calls), len(seconds) - 1)]
            calls.append(x)
            return softmax(x, case.axis)

        return function

    return fake(prepare=prepare, **members), calls


# The order of things.


def test_the_result_is_checked_before_anything_is_timed(monkeypatch):
    clock = Ledger()
    monkeypatch.setattr(protocol, "check", lambda *given: clock.log.append(("check",)) or check(*given))
    assert measured(clock=clock).status == "ok"
    # The copy lies beside every placement, not before or after all of them.
    assert [event[0] for event in clock.log] == ["check", *["copied", "copy", "calls"] * PLACEMENTS]


def test_every_placement_lies_elsewhere():
    shared = []
    clock = Ledger()
    assert measured(fake(share=lambda self, x: shared.append(x._data_ptr()) or x), clock).status == "ok"
    assert len(set(shared)) == len(shared) == PLACEMENTS
    # What is copied beside a placement is its own input.
    assert [inputs for (inputs,) in clock.of("copied")] == [[pointer] for pointer in shared]
    outputs = [pointer for pointers, *_ in clock.of("calls") for pointer in pointers]
    # Each placement keeps an output, but which block of memory it leaves for the next is the allocator's affair.
    assert len(set(outputs)) > PLACEMENTS // 2


@pytest.mark.parametrize(("held", "most"), [(0, 1), (2 * CASE.moved, 2), (10 * CASE.moved, PLACEMENTS)])
def test_earlier_placements_are_kept_as_far_as_memory_allows(monkeypatch, held, most):
    class Shared:
        def __init__(self, x):
            self.x = x

    monkeypatch.setattr(protocol, "HELD", held)
    alive, there = weakref.WeakSet(), []

    def share(self, x):
        alive.add(shared := Shared(x))
        return shared

    def prepare(self, case, entry):
        return lambda shared: there.append(len(alive)) or softmax(shared.x)

    assert measured(fake(share=share, prepare=prepare)).status == "ok"
    assert max(there) == most


def test_inputs_of_a_small_case_take_turns_until_the_cache_is_exceeded():
    clock = Ledger(cache=1000)
    pointers = []

    def prepare(self, case, entry):
        return lambda x: pointers.append(x._data_ptr()) or softmax(x)

    assert measured(fake(prepare=prepare), clock).status == "ok"
    n = rotated(CASE, 1000)
    assert n * CASE.nbytes > protocol.ROTATION * 1000 > (n - 1) * CASE.nbytes
    # One lap is a call on each, in turn, and is short enough to be worth replaying.
    assert [(len(ys), len(set(ys)), replay) for ys, _, replay in clock.of("calls")] == [(n, n, True)] * PLACEMENTS
    assert [(len(ys), replay) for ys, _, replay in clock.of("copy")] == [(n, True)] * PLACEMENTS
    for placement, (inputs,) in enumerate(clock.of("copied")):
        # Each placement is one lap that was timed and one that was kept.
        mine = pointers[1 + 2 * n * placement :][: 2 * n]
        assert mine == inputs * 2
        assert len(set(inputs)) == n


def test_inputs_that_take_turns_hold_different_numbers():
    seen = []
    measured(fake(share=lambda self, x: seen.append(array(x).tobytes()) or x), Ledger(cache=200))
    n = rotated(CASE, 200)
    assert n > 2
    assert len(set(seen[:n])) == n
    # Every placement draws anew, and hardly ever the same.
    assert len(seen) == n * PLACEMENTS
    assert len(set(seen)) >= len(seen) - 2


def test_how_many_inputs_take_turns():
    assert rotated(CASE, 0) == 1
    assert rotated(CASE, 1) == 1
    assert rotated(CASE, 10**9) == protocol.TINY_INPUTS
    assert rotated(Case((8, 1024, 50257)), 50 * 2**20) == 1
    clock = Ledger()
    measured(clock=clock)
    assert [(len(ys), replay) for ys, _, replay in clock.of("calls")] == [(1, False)] * PLACEMENTS


# The figures.


def test_the_figure_is_the_median_of_the_placements():
    # The median of all repetitions would be 2, the mean of the placements 2.98.
    calls = [[0.1, n, n] for n in (5, 1, 3, 2, 4)]
    copies = [[0.1, n, n] for n in (0.5, 0.1, 0.3, 0.2, 0.4)]
    found = measured(clock=Ledger(calls=calls, copies=copies))
    assert (found.median_s, found.min_s, found.repeats) == (3, 0.1, 15)
    # Read once and written once: 2 × 4 × 8 × 4 bytes.
    assert found.gbps == pytest.approx(256 / 3 * 1e-9)
    assert found.copy_gbps == pytest.approx(256 / 0.3 * 1e-9)
    assert found.copy_s == pytest.approx(0.3)
    assert found.gflops == pytest.approx(5 * 32 / 3 * 1e-9)


def test_what_a_record_says():
    entry = Entry("fake", "online", 256, 8)
    case = Case((2, 3, 5), DType.float64, axis=1)
    found = measured(case=case, entry=entry)
    assert (found.suite, found.op, found.dtype, found.shape, found.axis) == (
        "suite",
        "softmax",
        "float64",
        (2, 3, 5),
        1,
    )
    assert (found.provider, found.algorithm, found.block_size, found.unroll) == entry
    assert (found.status, found.note, found.size) == ("ok", "", 30)
    assert 0 <= found.max_rel_error < 1e-15


def test_short_calls_are_repeated_as_often_as_planned(watch):
    clock = Ledger()
    kind, calls = slow(watch, 1e-6)
    found = measured(kind, clock)
    assert [repeats for _, repeats, _ in clock.of("calls")] == [REPEATS] * PLACEMENTS
    assert [repeats for _, repeats, _ in clock.of("copy")] == [REPEATS] * PLACEMENTS
    assert found.repeats == REPEATS * PLACEMENTS
    # One to check; in each placement one for the clock and one to keep.
    assert len(calls) == 1 + 2 * PLACEMENTS


@pytest.mark.parametrize(("seconds", "repeats"), [(0.09, 4), (0.15, 2), (0.3, 1), (1.9, 1)])
def test_slower_calls_are_repeated_less_often(watch, seconds, repeats):
    clock = Ledger()
    kind, _ = slow(watch, seconds)
    assert measured(kind, clock).repeats == repeats * PLACEMENTS
    assert [given for _, given, _ in clock.of("calls")] == [repeats] * PLACEMENTS


@pytest.mark.parametrize(
    ("seconds", "turns", "repeats"), [(0.001, 4, 20), (0.024, 4, 4), (0.03, 3, 4), (0.06, 1, 6), (0.3, 1, 1)]
)
def test_of_slower_calls_fewer_inputs_take_turns_less_often(watch, seconds, turns, repeats):
    clock = Ledger(cache=100)
    kind, calls = slow(watch, seconds)
    assert rotated(CASE, 100) == 4
    measured(kind, clock)
    assert [repeats for _, repeats, _ in clock.of("calls")] == [repeats] * PLACEMENTS
    # The check, again where the first call may have been slow for its own reasons, and two laps in each placement.
    assert len(calls) == 1 + (seconds > 0.025) + 2 * turns * PLACEMENTS
    # Copies always go over all inputs.
    assert [len(inputs) for (inputs,) in clock.of("copied")] == [4] * PLACEMENTS


def test_a_slow_first_call_does_not_count(watch):
    clock = Ledger(cache=100)
    kind, calls = slow(watch, 0.09, 0.001)
    measured(kind, clock)
    assert len(calls) == 2 + 2 * 4 * PLACEMENTS


def test_a_very_long_call_is_made_once(watch):
    clock = Ledger(copies=[[1e-3]])
    kind, calls = slow(watch, protocol.BUDGET_S * 1.5)
    found = measured(kind, clock)
    assert len(calls) == 1
    assert not clock.of("calls")
    assert len(clock.of("copy")) == 1
    assert (found.status, found.repeats) == ("ok", 1)
    assert found.median_s == found.min_s == pytest.approx(protocol.BUDGET_S * 1.5)
    assert found.copy_gbps == pytest.approx(CASE.moved / 1e-3 * 1e-9)
    assert "host's clock" in found.note


def test_a_very_long_call_is_checked_all_the_same(watch):
    kind, _ = slow(watch, protocol.BUDGET_S * 1.5, result=lambda self, y: Buffer.zeros(y.shape, y.dtype))
    found = measured(kind)
    assert (found.status, found.median_s) == ("wrong", None)


@pytest.mark.parametrize("compiling", [protocol.BUDGET_S * 5, protocol.BUDGET_S / 2])
def test_the_time_that_a_first_call_compiles_is_not_the_call_s(watch, compiling):
    clock = Ledger()
    kind, _ = slow(watch, compiling, 1e-6, lazy=True)
    assert measured(kind, clock).status == "ok"
    assert [repeats for _, repeats, _ in clock.of("calls")] == [REPEATS] * PLACEMENTS


def test_who_enqueues_elsewhere_is_timed_by_the_host_and_its_copy_is_not():
    clock = Ledger(copies=[[1e-3]] * PLACEMENTS, calls=[[7.0]] * PLACEMENTS)
    found = measured(fake(own_stream=True), clock)
    assert found.status == "ok"
    assert found.median_s < 1
    assert not clock.of("calls")
    assert found.copy_gbps == pytest.approx(CASE.moved / 1e-3 * 1e-9)


def test_a_provider_decides_how_a_lap_is_made():
    clock = Ledger()
    laps = []

    def lap(self, function, xs):
        laps.append(len(xs))
        return lambda: [function(x) for x in xs] * 3

    assert measured(fake(lap=lap), clock).status == "ok"
    assert laps == [1] * PLACEMENTS
    assert [len(ys) for ys, *_ in clock.of("calls")] == [3] * PLACEMENTS


def test_how_the_clock_timed_is_said_once():
    assert measured(clock=Ledger(note="not replayed: no reason")).note == "not replayed: no reason"


# Wrong results, and errors.


def reverse(y):
    y[:] = y[::-1].copy()


@pytest.mark.parametrize(
    "spoil",
    [
        one_off,
        reverse,
        put(0, 1),
        put(0, 0),
        put(0, -1),
        put(1 / 8, slice(None)),
        lambda y: scipy.special.softmax(y, axis=0),
        np.log,
        lambda y: -y,
    ],
    ids=["1 %", "order", "row", "first", "last", "uniform", "twice", "log", "sign"],
)
@pytest.mark.parametrize("dtype", [DType.float32, DType.float64])
def test_wrong_numbers_are_found_and_not_timed(spoil, dtype):
    clock = Ledger()
    found = measured(spoilt(spoil), clock, Case((4, 8), dtype))
    assert (found.status, found.median_s, found.gbps, found.repeats) == ("wrong", None, None, 0)
    assert found.max_rel_error > 0.009
    assert untimed(clock)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_found_and_has_no_error_in_numbers(dtype, value):
    clock = Ledger()
    found = measured(spoilt(put(value, 1, 1)), clock, Case((4, 8), dtype))
    assert (found.status, found.max_rel_error) == ("wrong", None)
    assert "not a finite number" in found.note
    assert untimed(clock)


@pytest.mark.parametrize("dtype", [DType.float16, DType.bfloat16])
def test_short_floats_that_are_off_are_found(dtype):
    def spoil(y):
        y[2, np.argmax(y[2])] *= 0.9

    assert measured(spoilt(spoil), case=Case((4, 8), dtype)).status == "wrong"


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda y: y.T, "8×4 float32"),
        (lambda y: y[:-1], "3×8 float32"),
        (lambda y: y.ravel(), "32 float32"),
        (lambda y: y.astype(np.float64), "4×8 float64"),
        (lambda y: y.astype(np.float16), "4×8 float16"),
    ],
)
def test_another_shape_or_dtype_is_refused(spoil, found):
    clock = Ledger()
    record = measured(spoilt(spoil), clock)
    assert record.status == "failed"
    assert record.note == f"ValueError: the result is {found} where 4×8 float32 was asked for"
    assert untimed(clock)


@pytest.mark.parametrize("shape", [(4, 8), (64, 100), (30, 4000)])
def test_memory_in_which_nothing_was_written_is_not_taken_for_the_result_of_who_came_before(shape):
    # An allocator likes to give out what was just freed: here, what was right.
    idle = fake(prepare=lambda self, case, entry: lambda x: Buffer(case.dtype, case.shape))
    for _ in range(3):
        assert measured(case=Case(shape)).status == "ok"
        assert measured(idle, case=Case(shape)).status != "ok"


@pytest.mark.parametrize("where", ["share", "prepare", "result", "lap"])
def test_what_a_provider_raises_is_its_result(where):
    found = measured(fake(**{where: raising(RuntimeError("no\n  such kernel"))}))
    assert (found.status, found.note) == ("failed", "RuntimeError: no such kernel")
    assert found.median_s is None


def test_what_a_call_raises_is_its_result():
    clock = Ledger()
    found = measured(fake(prepare=lambda *_: raising(MemoryError("x" * 10000))), clock)
    assert found.status == "failed"
    assert found.note.startswith("MemoryError: xxx")
    assert len(found.note) < 400
    assert untimed(clock)


@pytest.mark.parametrize("where", ["share", "prepare"])
def test_a_case_that_a_provider_does_not_claim_is_no_failure(where):
    found = measured(fake(**{where: raising(Unsupported("takes no bfloat16"))}))
    assert (found.status, found.note) == ("missing", "takes no bfloat16")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_is_not_the_provider_s(error):
    with pytest.raises(error):
        measured(fake(share=raising(error())))
