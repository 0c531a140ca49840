"""`maxsoftmax demo`: two softmaxes on every device, checked against SciPy.

The first is the program of the Mojo GPU Puzzles, problem 18: a MAX graph of this one op, for 128 float32. MAX compiles
both graphs at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import scipy.special
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import Model
from max.graph import DeviceRef, Graph, Module, TensorType

from maxsoftmax import ops
from maxsoftmax._graph import runtime
from maxsoftmax._graph.extension import extension


class Case(NamedTuple):
    """Logits, and what their graph is made for."""

    x: np.ndarray
    dims: tuple[int | str, ...]
    """The dimensions that the graph takes; those that have names may have any size."""


class Result(NamedTuple):
    """What one softmax on one device did."""

    case: str
    device: str
    compile_s: float
    """Time to compile the graphs of all cases together, 0 if an earlier process had left them."""
    run_s: float
    """Median time of a call, transfers to and from the device included."""
    error: float
    """Largest relative error against SciPy in float64, where that exceeds 1e-30."""
    row_sum: float
    """Sum of the first row, in float64."""

    @property
    def correct(self) -> bool:
        """Whether the error is one that float32 explains, which is also what the puzzle allows."""
        return self.error < 1e-5 and abs(self.row_sum - 1) < 1e-5


def cases() -> dict[str, Case]:
    """Returns the logits, float32, by name: the puzzle's and a batch of GPT-2's size."""
    random = np.random.default_rng(0)
    return {
        "puzzle 18: 128": Case(random.standard_normal(128, dtype=np.float32), (128,)),
        "64×50257": Case(random.standard_normal((64, 50257), dtype=np.float32) * 4, ("rows", "n")),
    }


def measure(device: Device) -> list[Result]:
    """Returns what softmax of each case along its last axis does on `device`."""
    compile_s = 0.0

    @contextmanager
    def timing(what: str) -> Iterator[None]:
        nonlocal compile_s
        start = time.perf_counter()
        yield
        compile_s += time.perf_counter() - start

    all_cases = cases()
    what = "softmax of " + " and ".join("×".join(map(str, case.dims)) for case in all_cases.values()) + " float32"
    with runtime.observing(timing):
        models = runtime.models(device, what, lambda: graphs(DeviceRef.from_device(device), all_cases.values()))
    return [
        _measured(name, case, models[f"softmax_{i}"], device, compile_s)
        for i, (name, case) in enumerate(all_cases.items())
    ]


def _measured(name: str, case: Case, model: Model, device: Device, compile_s: float) -> Result:
    x = case.x
    y = _softmax(model, x, device).astype(np.float64)
    runs = [_seconds(model, x, device) for _ in range(7)]
    expected = scipy.special.softmax(x.astype(np.float64), axis=-1)
    relevant = expected > 1e-30
    error = np.abs(y - expected)[relevant] / expected[relevant]
    row_sum = float(np.atleast_2d(y)[0].sum())
    return Result(name, runtime.name(device), compile_s, float(np.median(runs)), float(error.max()), row_sum)


def graphs(device: DeviceRef, cases: Iterable[Case]) -> Module:
    """Returns the graphs of cases, `softmax_0` and so on, in one module."""
    module = Module()
    for i, case in enumerate(cases):
        graph(device, case.dims, f"softmax_{i}", module)
    return module


def graph(device: DeviceRef, dims: tuple[int | str, ...], name: str = "demo", module: Module | None = None) -> Graph:
    """Returns a graph of MAX that computes softmax of float32 along the last axis of a tensor of these dimensions."""
    kind = TensorType(DType.float32, dims, device)
    with Graph(name, input_types=[kind], custom_extensions=[extension()], module=module) as built:
        built.output(ops.softmax(built.inputs[0].tensor))
    return built


def _softmax(model: Model, x: np.ndarray, device: Device) -> np.ndarray:
    result: np.ndarray = model.execute(Buffer.from_numpy(x).to(device))[0].to_numpy()
    return result


def _seconds(model: Model, x: np.ndarray, device: Device) -> float:
    start = time.perf_counter()
    _softmax(model, x, device)
    return time.perf_counter() - start
