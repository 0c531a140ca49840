"""Providers, clocks and records for tests of the benchmark, so that nothing has to be compiled or waited for."""

import ml_dtypes
import numpy as np
import scipy.special
from max.driver import Buffer
from max.dtype import DType
from maxsoftmax.bench.cases import Case, Entry
from maxsoftmax.bench.protocol import record
from maxsoftmax.bench.providers import Provider
from maxsoftmax.bench.results import Results


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
