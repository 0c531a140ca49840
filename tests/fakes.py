"""Providers, clocks and records for tests of the benchmark, so that nothing has to be compiled or waited for."""

import ml_dtypes
import numpy as np
import scipy.special
from max.driver import CPU, Buffer
from max.dtype import DType
from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.clock import Clock, HostClock
from maxsoftmax._bench.protocol import Machine, measure, record
from maxsoftmax._bench.providers import Provider
from maxsoftmax._bench.results import Results


def array(buffer):
    """Returns a buffer of the host as NumPy sees it, sharing its memory."""
    if buffer.dtype == DType.bfloat16:
        return buffer.view(DType.uint16, buffer.shape).to_numpy().view(ml_dtypes.bfloat16)
    return buffer.to_numpy()


def softmax(x, axis=-1):
    """Returns softmax of a buffer in a new one: exact, then rounded."""
    y = Buffer(x.dtype, x.shape)
    array(y)[...] = scipy.special.softmax(array(x).astype(np.float64), axis=axis)
    return y


class Fake(Provider):
    """Computes what it should."""

    name = "fake"
    devices = ("cpu",)

    def version(self):
        return "1.2.3"

    def share(self, x):
        return x

    def prepare(self, case, entry):
        return lambda x: softmax(x, case.axis)

    def result(self, y):
        return y


def fake(**members):
    """Returns a provider that differs from `Fake` in its `members`."""
    return type("Fake", (Fake,), members)


def spoilt(spoil):
    """Returns a provider whose results went through `spoil`, which changes an array or returns another."""

    def prepare(self, case, entry):
        def function(x):
            y = softmax(x, case.axis)
            other = spoil(array(y))
            return y if other is None else Buffer.from_numpy(np.ascontiguousarray(other))

        return function

    return fake(prepare=prepare)


def raising(error):
    """Returns a function that raises `error`, whatever it is called with."""

    def function(*arguments, **options):
        raise error

    return function


class Watch:
    """Stands in for the module `time`: passes only where it is told to."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


CASE = Case((4, 8))
NUMPY = Entry("numpy")
ENTRY = Entry("fake")


def timed(case=CASE, entry=NUMPY, seconds=1e-3, copy=100.0, suite="custom"):
    """Returns a record of a measurement that succeeded."""
    return record(
        suite,
        case,
        entry,
        "ok",
        median_s=seconds,
        min_s=seconds / 2,
        repeats=100,
        gbps=case.moved / seconds * 1e-9,
        copy_gbps=copy,
        max_rel_error=1e-7,
    )


def results(*records, device="A processor", threads=4):
    versions = {"python": "3.12.0", "max": "26.7.0"}
    command = "maxsoftmax bench cpu"
    return Results(device, versions, "2026-01-01T00:00:00+00:00", command, threads, records=list(records))


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


def one_off(y):
    y[2, 3] *= 1.01


def put(value, *place):
    def spoil(y):
        y[place] = value

    return spoil


def went(bench, cases, ways):
    bench.run("suite", cases, ways, lambda case, entry: None)
    return [(r.provider, r.status, r.note) for r in bench.results.records]
