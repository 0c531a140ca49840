"""Devices, sessions, and models: compiled once for each way to call the op, then reused for every shape."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from max.driver import CPU, Accelerator, Device, accelerator_count
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType

from maxsoftmax import ops
from maxsoftmax.arguments import ALGORITHMS
from maxsoftmax.extension import extension


@dataclass(frozen=True)
class Signature:
    """All that a compiled model depends on."""

    device: Device
    """Where it runs."""
    dtype: DType
    """Of its input and output."""
    contiguous: bool
    """Whether it takes (rows, n), softmax along the last axis, or (outer, n, inner), along the middle one."""
    algorithm: str
    block_size: int
    unroll: int

    def choices(self) -> dict[str, int]:
        """Returns what the algorithm leaves to its caller, by name."""
        leaves = ALGORITHMS[self.device.label][self.algorithm]
        chosen = {"block_size": (leaves.block_sizes, self.block_size), "unroll": (leaves.unrolls, self.unroll)}
        return {name: value for name, (allowed, value) in chosen.items() if allowed}

    def __str__(self) -> str:
        place = "the last axis" if self.contiguous else "an axis before it"
        return f"softmax of {self.dtype.name} along {place} on {name(self.device)}"


Observer = Callable[[Signature], AbstractContextManager[Any]]

_observers: list[Observer] = []
_models: dict[Signature, Model] = {}
_compiling = threading.Lock()


def devices() -> list[Device]:
    """Returns the CPU and every GPU that MAX can use."""
    return [CPU(), *(Accelerator(i) for i in range(accelerator_count()))]


def name(device: Device) -> str:
    """Returns how `device` is called in the arguments of this package: "cpu", "gpu" or "gpu:1"."""
    return device.label if device.id == 0 else f"{device.label}:{device.id}"


def device(spec: Any) -> Device:
    """Returns the device that `spec` names: "cpu", "gpu", "gpu:1", or a `max.driver.Device`, which is itself.

    Raises:
        TypeError: If it is neither a string nor a device.
        ValueError: If this machine has no such device.
    """
    if isinstance(spec, Device):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"device must be a string such as 'cpu' or 'gpu', or a max.driver.Device, not {spec!r}")
    present = {name(d): d for d in devices()}
    if spec not in present:
        raise ValueError(f"device {spec!r} is not on this machine, which has {', '.join(map(repr, present))}")
    return present[spec]


def model(signature: Signature) -> Model:
    """Returns the model for `signature`, compiling it the first time (seconds). Safe to call from several threads."""
    if signature not in _models:
        # One lock for all: MAX compiles one graph at a time anyway.
        with _compiling:
            if signature not in _models:
                with ExitStack() as stack:
                    for observer in _observers:
                        stack.enter_context(observer(signature))
                    _models[signature] = _session(signature.device).load(_graph(signature))
    return _models[signature]


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Enters what `observer` returns around every compilation meanwhile, for whoever wants to show or time it."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@functools.cache
def _session(device: Device) -> InferenceSession:
    return InferenceSession(devices=[device])


def _graph(signature: Signature) -> Graph:
    dims = ("rows", "n") if signature.contiguous else ("outer", "n", "inner")
    place = DeviceRef.from_device(signature.device)
    with Graph(
        "maxsoftmax",
        input_types=[TensorType(signature.dtype, dims, place)],
        custom_extensions=[extension()],
    ) as graph:
        graph.output(
            ops.softmax(
                graph.inputs[0].tensor,
                axis=1,
                algorithm=signature.algorithm,
                **signature.choices(),
            )
        )
    return graph
