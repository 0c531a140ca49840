"""`maxsoftmax demo`: two softmaxes on every device, checked against SciPy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import scipy.special
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import Model
from max.graph import DeviceRef, Graph, TensorType

from maxsoftmax import ops, runtime
from maxsoftmax.extension import extension


class Result(NamedTuple):
    """What one softmax on one device did."""

    case: str
    device: str
    compile_s: float
    """Time to compile the model, 0 if an earlier case had left it."""
    run_s: float
    """Median time of a call, transfers to and from the device included."""
    error: float
    """Largest relative error against SciPy in float64, where that exceeds 1e-30."""
    row_sum: float
    """Sum of the first row, in float64."""

    @property
    def correct(self) -> bool:
        """Whether the error is one that float32 explains."""
        return self.error < 1e-5 and abs(self.row_sum - 1) < 1e-5


def cases() -> dict[str, np.ndarray]:
    """Returns the logits, float32, by name: the published example (0, 1, …, 127) and a batch of GPT-2's size."""
    return {
        "128": np.arange(128, dtype=np.float32),
        "64×50257": np.random.default_rng(0).standard_normal((64, 50257), dtype=np.float32) * 4,
    }


def measure(case: str, x: np.ndarray, device: Device) -> Result:
    """Returns what softmax of `x` along its last axis does on `device`."""
    compile_s = 0.0

    @contextmanager
    def timing(what: str) -> Iterator[None]:
        nonlocal compile_s
        start = time.perf_counter()
        yield
        compile_s += time.perf_counter() - start

    with runtime.observing(timing):
        model = runtime.model(device, "softmax of float32 rows", lambda: graph(DeviceRef.from_device(device)))
    rows = np.atleast_2d(x)
    y = _softmax(model, rows, device).astype(np.float64).reshape(x.shape)
    runs = [_seconds(model, rows, device) for _ in range(7)]
    expected = scipy.special.softmax(x.astype(np.float64), axis=-1)
    relevant = expected > 1e-30
    error = np.abs(y - expected)[relevant] / expected[relevant]
    row_sum = float(np.atleast_2d(y)[0].sum())
    return Result(case, runtime.name(device), compile_s, float(np.median(runs)), float(error.max()), row_sum)


def graph(device: DeviceRef) -> Graph:
    """Returns a graph of MAX that computes softmax of float32 along the last axis of (rows, n)."""
    kind = TensorType(DType.float32, ("rows", "n"), device)
    with Graph("demo", input_types=[kind], custom_extensions=[extension()]) as built:
        built.output(ops.softmax(built.inputs[0].tensor))
    return built


def _softmax(model: Model, x: np.ndarray, device: Device) -> np.ndarray:
    result: np.ndarray = model.execute(Buffer.from_numpy(x).to(device))[0].to_numpy()
    return result


def _seconds(model: Model, x: np.ndarray, device: Device) -> float:
    start = time.perf_counter()
    _softmax(model, x, device)
    return time.perf_counter() - start
