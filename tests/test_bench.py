import errno
import importlib.util
import json
import math
import os
import shlex
import sys
import weakref
from dataclasses import asdict
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import scipy.special
from fakes import Fake, Watch, array, fake, raising, results, softmax, spoilt, timed
from max.driver import CPU, Buffer
from max.dtype import DType
from maxsoftmax._arguments import ALGORITHMS, DTYPES, check_block_size, check_unroll
from maxsoftmax.bench import clock as clocks
from maxsoftmax.bench import data, protocol, run
from maxsoftmax.bench.cases import PEERS, SUITES, Case, Entry, entries, searched
from maxsoftmax.bench.clock import Clock, HostClock
from maxsoftmax.bench.data import Inputs, check
from maxsoftmax.bench.protocol import PLACEMENTS, REPEATS, Machine, measure, record, rotated
from maxsoftmax.bench.providers import PROVIDERS, Unsupported
from maxsoftmax.bench.results import Results
from maxsoftmax.bench.run import Bench

CASE = Case((4, 8))
ENTRY = Entry("fake")

# What has to be installed for a provider that is not a dependency of the package.
LIBRARIES = {
    "torch": "torch",
    "torch.compile": "torch",
    "jax": "jax",
    "maxsoftmax.jax": "jax",
    "onnxruntime": "onnxruntime",
}


class Ledger(Clock):
    """A clock that calls what it has to time, writes down in which order, and says what it was told to say."""

    def __init__(self, cache=0, calls=(), copies=(), note=""):
        self.cache = cache
        self.note = note
        self.log = []
        self.laps = set()
        self.script = {"calls": iter(calls), "copy": iter(copies)}

    def seconds(self, lap, repeats, replay):
        kind = "copy" if lap in self.laps else "calls"
        outputs = [y._data_ptr() for y in lap()]
        self.log.append((kind, outputs, repeats, replay))
        return next(self.script[kind], [1e-3] * repeats)

    def copy(self, inputs):
        lap = HostClock().copy(inputs)
        self.laps.add(lap)
        self.log.append(("copied", [x._data_ptr() for x in inputs]))
        return lap

    def of(self, kind):
        return [event[1:] for event in self.log if event[0] == kind]


def measured(kind=Fake, clock=None, case=CASE, entry=ENTRY):
    return measure("suite", case, entry, kind(CPU(), 1), Machine(CPU(), clock or Ledger()))


def untimed(clock):
    return not clock.of("calls") and not clock.of("copy")


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


def one_off(y):
    y[2, 3] *= 1.01


def put(value, *place):
    def spoil(y):
        y[place] = value

    return spoil


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


# The numbers, and what the check believes.


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


# Clocks.


def test_the_host_s_clock_times_every_lap_but_the_first(monkeypatch):
    stopped = Watch()
    monkeypatch.setattr(clocks, "time", stopped)
    lengths = iter([100.0, 8.0, 4.0, 12.0])

    def lap():
        stopped.now += next(lengths)
        return [None] * 4

    assert HostClock().seconds(lap, 3, replay=False) == [2.0, 1.0, 3.0]
    assert next(lengths, None) is None


def test_the_host_s_copy_copies_every_input_every_time():
    inputs = Inputs.place(CASE, 3, CPU()).buffers
    lap = HostClock().copy(inputs)
    for _ in range(2):
        for x in inputs:
            array(x)[...] += 1
        outputs = lap()
        for x, y in zip(inputs, outputs, strict=True):
            np.testing.assert_array_equal(array(x), array(y))
    assert len({b._data_ptr() for b in (*inputs, *outputs)}) == 6


# A run.


@pytest.fixture
def bench():
    return Bench(CPU(), ["maxsoftmax", "bench", "a b"], 1)


@pytest.fixture
def provider(monkeypatch):
    """Registers a provider by a name."""

    def register(name, kind=None):
        monkeypatch.setitem(PROVIDERS, name, type("Named", (kind or Fake,), {"name": name}))
        return Entry(name)

    return register


def went(bench, cases, ways):
    bench.run("suite", cases, ways, lambda case, entry: None)
    return [(r.provider, r.status, r.note) for r in bench.results.records]


def test_one_that_fails_does_not_keep_the_next_from_its_turn(bench, provider):
    ways = [
        provider("a"),
        provider("b", fake(prepare=raising(RuntimeError("out of luck")))),
        provider("c", spoilt(one_off)),
        provider("d", fake(__init__=raising(ImportError("No module named 'd'")))),
        provider("e", fake(__init__=raising(OSError("libe.so is broken")))),
        provider("f", fake(version=raising(ValueError("no version")))),
        provider("g", fake(devices=("gpu",), __init__=raising(AssertionError("was made")))),
        provider("h", fake(share=raising(Unsupported("takes no such case")))),
        provider("i"),
    ]
    assert went(bench, [CASE], ways) == [
        ("a", "ok", ""),
        ("b", "failed", "RuntimeError: out of luck"),
        ("c", "wrong", ""),
        ("d", "missing", "not installed: No module named 'd'"),
        ("e", "missing", "cannot be used: OSError: libe.so is broken"),
        ("f", "missing", "cannot be used: ValueError: no version"),
        ("g", "missing", "does not compute on a CPU"),
        ("h", "missing", "takes no such case"),
        ("i", "ok", ""),
    ]


def test_a_library_is_imported_once_and_only_when_its_turn_comes(bench, provider):
    made = []
    ways = [
        provider("a", fake(__init__=lambda self, device, threads: made.append((device, threads)))),
        provider("b", fake(__init__=lambda self, device, threads: made.append("b") or raising(ImportError("b"))())),
    ]
    provider("c", fake(__init__=raising(AssertionError("was made"))))
    assert made == []
    went(bench, [CASE, Case((2, 3))], ways)
    assert made == [(CPU(), 1), "b"]
    assert bench.results.versions["a"] == "1.2.3"
    assert not {"b", "c"} & set(bench.results.versions)


def test_every_entry_on_every_case_and_progress_before_each(bench, provider):
    cases, ways = [CASE, Case((2, 3))], [provider("a"), provider("b")]
    told = []
    bench.run("suite", cases, ways, lambda *what: told.append((*what, len(bench.results.records))))
    assert told == [(case, entry, 2 * i + j) for i, case in enumerate(cases) for j, entry in enumerate(ways)]
    assert [(r.shape, r.provider) for r in bench.results.records] == [(c.shape, e.provider) for c, e, _ in told]


def test_providers_are_told_first_what_will_be_asked_of_them(bench, provider):
    told = []

    def foresee(self, ways):
        told.append(list(ways))
        raise RuntimeError("does not compile")

    a, b = provider("a", fake(foresee=foresee)), provider("b", fake(foresee=foresee))
    other = a._replace(algorithm="naive")
    cases = [CASE, Case((2, 3)), Case((4, 5))]
    assert [status for _, status, _ in went(bench, cases, [a, b, other])] == ["ok"] * 9
    assert told == [[(case, entry) for case in cases for entry in mine] for mine in ((a, other), (b,))]


def test_an_interruption_leaves_what_was_measured(bench, provider):
    numbers = count()

    def prepare(self, case, entry):
        if next(numbers) == 2:
            raise KeyboardInterrupt
        return softmax

    entry = provider("a", fake(prepare=prepare))
    with pytest.raises(KeyboardInterrupt):
        went(bench, [Case((n, 3)) for n in (2, 3, 4, 5)], [entry])
    assert [r.shape for r in bench.results.records] == [(2, 3), (3, 3)]


def test_who_was_hopeless_on_a_smaller_case_is_spared_the_larger_ones(bench, provider):
    a, b = provider("a"), provider("b")
    past = {"median_s": 60.0, "gbps": 1.0}
    bench.results.records = [
        record("suite", Case((4, 8)), a, "ok", **past),
        record("suite", Case((4, 8)), b._replace(algorithm="naive"), "ok", **past),
        record("another", Case((4, 8)), b, "ok", **past),
    ]
    before = len(bench.results.records)
    cases = [
        Case((8, 8)),
        Case((4, 8)),
        Case((2, 3)),
        Case((8, 8), DType.float64),
        Case((8, 8), axis=0),
    ]
    found = went(bench, cases, [a, b])[before:]
    assert found[0] == ("a", "missing", "not run: 4×8 took 60.00 s")
    assert [status for _, status, _ in found[1:]] == ["ok"] * (2 * len(cases) - 1)


def test_slow_is_not_hopeless(bench, provider):
    a = provider("a")
    bench.results.records = [record("suite", CASE, a, "ok", median_s=run.HOPELESS_S * 0.9)]
    assert went(bench, [Case((8, 8))], [a])[1] == ("a", "ok", "")


def test_results_say_where_and_when_and_how(bench):
    found = bench.results
    assert found.device == run.processor() != ""
    assert found.threads == 1
    assert shlex.split(found.command) == ["maxsoftmax", "bench", "a b"]
    assert found.date.endswith("+00:00")
    assert set(found.versions) == {"python", "max", "mojo"}
    assert all(version[0].isdigit() for version in found.versions.values())


@pytest.mark.parametrize("name", [name for name in PROVIDERS if name not in ("maxsoftmax", "max")])
def test_every_provider_computes_or_says_why_not(bench, name, monkeypatch):
    for variable in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        # Set by the provider; undone at the end.
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
        monkeypatch.delenv(variable)
    ((_, status, note),) = went(bench, [CASE], [Entry(name)])
    if "cpu" not in PROVIDERS[name].devices:
        assert (status, note) == ("missing", "does not compute on a CPU")
    elif name in LIBRARIES and importlib.util.find_spec(LIBRARIES[name]) is None:
        assert status == "missing"
        assert note.startswith("not installed: ")
    else:
        assert (status, note) == ("ok", "")
        assert bench.results.versions[name][0].isdigit()
        # The other axis, and what the library does not claim.
        assert went(bench, [Case((2, 3, 4), axis=1)], [Entry(name)])[-1][1] == "ok"


@pytest.mark.parametrize(
    "name", [name for name, library in LIBRARIES.items() if library != "torch"] + ["scipy", "numpy"]
)
def test_a_library_that_is_not_there_is_missing(bench, name, monkeypatch):
    # What None stands for in sys.modules: import fails.
    for library in ("jax", "onnxruntime", "onnx", "scipy.special"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(PROVIDERS["numpy"], "__init__", raising(ImportError("No module named 'numpy'")))
    ((_, status, note),) = went(bench, [CASE], [Entry(name)])
    assert status == "missing"
    assert note.startswith("not installed: ")


# The suites.


@pytest.mark.parametrize("name", [name for name, suite in SUITES.items() if not suite.calls])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_suites_name_what_there_is(name, kind):
    ways = entries(SUITES[name], kind)
    assert len(set(ways)) == len(ways)
    for entry in ways:
        assert kind in PROVIDERS[entry.provider].devices
        if entry.provider == "maxsoftmax":
            assert entry.algorithm in ALGORITHMS[kind]
            check_block_size(entry.block_size, entry.algorithm, kind)
            check_unroll(entry.unroll, entry.algorithm, kind)
    assert len(set(SUITES[name].cases)) == len(SUITES[name].cases) > 0
    if SUITES[name].ways and kind == "gpu":
        assert ways == list(SUITES[name].ways)
        return
    ours = [entry.algorithm for entry in ways if entry.provider == "maxsoftmax"]
    assert ours == (list(ALGORITHMS[kind]) if SUITES[name].rungs else ["auto"])
    assert [entry.provider for entry in ways[len(ours) :]] == list(PEERS[kind])


def test_the_suite_of_block_sizes_has_the_published_kernels_at_every_block():
    ways = entries(SUITES["blocks"], "gpu")
    sizes = {name: [way.block_size for way in ways if way.algorithm == name] for name in ("naive", "tree", "warp")}
    assert set(map(tuple, sizes.values())) == {(32, 64, 128, 256, 512, 1024)}
    assert {way.algorithm for way in ways} == {*sizes, "tree_blocked", "vector", "online"}
    assert SUITES["blocks"].cases == SUITES["ladder"].cases


def test_the_suite_of_widths_searches_what_each_kernel_leaves():
    ways = entries(SUITES["widths"], "gpu")
    assert set(searched("online")) == {
        Entry("maxsoftmax", "online", block, unroll) for block in (128, 256, 512, 1024) for unroll in (1, 2, 4, 8)
    }
    assert {way for way in ways if way.algorithm == "online"} == set(searched("online"))
    assert [way.block_size for way in ways if way.algorithm == "tree"] == [128, 256, 512, 1024]
    assert [case.shape for case in SUITES["widths"].cases] == [(128, 2**i) for i in range(10, 18)]


def test_names_of_cases_and_entries():
    assert str(CASE) == "4×8 float32"
    assert (
        str(Case((2, 3, 5), DType.bfloat16, 1)) == str(Case((2, 3, 5), DType.bfloat16, -2)) == "2×3×5 bfloat16, axis 1"
    )
    assert str(Case((2, 3), axis=1)) == "2×3 float32"
    assert (CASE.size, CASE.nbytes, CASE.moved) == (32, 128, 256)
    assert Case((4, 8), DType.bfloat16).moved == 128
    assert str(Entry("torch")) == "torch"
    assert str(Entry("maxsoftmax", "auto")) == "maxsoftmax:auto"
    assert str(Entry("maxsoftmax", "online", 512, 4)) == "maxsoftmax:online,512,4"


# JSON.


@pytest.fixture
def kept():
    return results(
        timed(Case((8, 1024)), Entry("maxsoftmax", "online", 512, 4)),
        timed(Case((2, 3, 5), DType.bfloat16, 1), Entry("torch")),
        record("cpu", CASE, Entry("jax"), "missing", note="not installed: “jax”"),
        record("cpu", CASE, Entry("numpy"), "failed", note="MemoryError: "),
        record("cpu", CASE, Entry("scipy"), "wrong", max_rel_error=0.5),
    )


def test_what_is_written_is_read_again(kept, tmp_path):
    path = tmp_path / "results.json"
    kept.write(path)
    assert Results.read(path) == kept
    assert os.listdir(tmp_path) == ["results.json"]
    assert path.read_text(encoding="utf-8").endswith("}\n")


def test_what_was_measured_is_read_again(bench, provider, tmp_path):
    went(bench, [CASE, Case((2, 3, 4), axis=1)], [provider("a"), provider("b", spoilt(one_off))])
    bench.results.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == bench.results


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_json_that_others_can_read(tmp_path, value):
    given = results(measured(spoilt(put(value, 1, 1))))
    given.write(tmp_path / "results.json")
    text = (tmp_path / "results.json").read_text(encoding="utf-8")
    # Python alone reads and writes NaN.
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert Results.read(tmp_path / "results.json") == given


def test_a_command_that_is_no_text_does_not_cost_the_records(kept, tmp_path):
    # What Python makes of a byte that is not UTF-8.
    kept.command = "maxsoftmax bench --json x\udcff.json"
    kept.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == kept


def edited(**changes):
    """Returns JSON of one record, changed; ... leaves a field out."""
    given = asdict(results(timed()))
    (record,) = given["records"]
    for name, value in changes.items():
        where = given if name in given else record
        if value is ...:
            del where[name]
        else:
            where[name] = value
    return json.dumps(given)


def test_a_file_edited_to_no_effect_is_read(tmp_path):
    (tmp_path / "x.json").write_text(edited(note="mine", shape=[3, 4], threads=None))
    found = Results.read(tmp_path / "x.json")
    assert (found.threads, found.records[0].note, found.records[0].shape) == (None, "mine", (3, 4))
    # What earlier versions did not know.
    (tmp_path / "x.json").write_text(edited(host_s=..., processor=..., rounds=...))
    assert Results.read(tmp_path / "x.json").records[0].host_s is None
    (tmp_path / "x.json").write_text(edited(repeats=...))
    assert Results.read(tmp_path / "x.json").records[0].repeats == 0


NOT_RESULTS = {
    "empty": "",
    "cut short": edited()[:-20],
    "no text": b"\xff\xfe\x00",
    "list": "[]",
    "number": "5",
    "null": "null",
    "nothing": "{}",
    "deep": "[" * 100000,
    "records": edited(records=5),
    "a record": edited(records=[5]),
    "text of a record": edited(records=["abc"]),
    "no device": edited(device=...),
    "no provider": edited(provider=...),
    "no status": edited(status=...),
    "unknown status": edited(status="fine"),
    "no time": edited(median_s=None),
    "text of a time": edited(median_s="fast"),
    "negative time": edited(median_s=-1.0),
    "no time at all": edited(median_s=0.0),
    "number of a shape": edited(shape=5),
    "no shape": edited(shape=None),
    "text of a shape": edited(shape="48"),
    "texts of a shape": edited(shape=["4", "8"]),
    "rank 0": edited(shape=[]),
    "no rate": edited(gbps=None),
    "text of a rate": edited(copy_gbps="fast"),
    "no error": edited(max_rel_error=None),
    "no axis": edited(axis=None),
    "text of an axis": edited(axis="1"),
    "axis that is not there": edited(axis=2),
    "infinite time": edited(median_s=math.inf),
    "error that is no number": edited(max_rel_error=math.nan),
    "text of a wrong error": edited(status="wrong", max_rel_error="large"),
    "number of a provider": edited(provider=5),
    "no note": edited(note=None),
    "text of a call's time": edited(host_s="fast"),
    "no time of a call": edited(host_s=0.0),
    "list of versions": edited(versions=["1"]),
}


@pytest.mark.parametrize("what", NOT_RESULTS)
def test_what_is_not_results_is_refused_in_one_sentence(tmp_path, what):
    path, content = tmp_path / "x.json", NOT_RESULTS[what]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"x\.json is not a file of benchmark results: .") as refused:
        Results.read(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (edited(colour="red"), "'colour'"),
        (edited(provider=...), "'provider'"),
        (edited(device=...), "'device'"),
        (edited(status="fine"), "'fine'"),
        (edited(median_s=-1.0), "median_s"),
    ],
)
def test_what_is_wrong_with_it_is_named(tmp_path, content, named):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=named):
        Results.read(tmp_path / "x.json")


def test_an_unknown_field_of_the_whole_is_refused(tmp_path):
    given = {**json.loads(edited()), "colour": "red"}
    (tmp_path / "x.json").write_text(json.dumps(given))
    with pytest.raises(ValueError, match=r"x\.json is not a file of benchmark results: .*'colour'"):
        Results.read(tmp_path / "x.json")


def test_a_missing_file_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        Results.read(tmp_path / "nowhere.json")


def test_results_in_a_missing_folder_leave_nothing(kept, tmp_path):
    with pytest.raises(OSError, match=r"nowhere/x\.json") as refused:
        kept.write(tmp_path / "nowhere" / "x.json")
    assert refused.value.errno == errno.ENOENT
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_results_in_a_read_only_folder_leave_nothing(kept, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match=r"x\.json"):
        kept.write(tmp_path / "x.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_results_appear_whole_or_not_at_all(kept, tmp_path, monkeypatch, error, existing):
    if existing:
        (tmp_path / "x.json").write_text("mine")
    write = Path.write_bytes

    def full(self, content):
        write(self, content[: len(content) // 2])
        assert len(os.listdir(tmp_path)) == existing + 1
        raise error

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(type(error)):
        kept.write(tmp_path / "x.json")
    assert os.listdir(tmp_path) == ["x.json"] * existing
    assert not existing or (tmp_path / "x.json").read_text() == "mine"


def test_results_do_not_replace_what_is_no_file(kept, tmp_path):
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError, match=r"x\.json exists and is not a file"):
        kept.write(tmp_path / "x.json")
    assert os.listdir(tmp_path / "x.json") == []
