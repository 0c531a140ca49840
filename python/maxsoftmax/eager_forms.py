"""Softmax of arrays with a scale, masks, a temperature or a sink: one model for each combination, rank and axis."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from maxsoftmax import forms, ops, runtime
from maxsoftmax.extension import extension
from maxsoftmax.forms import Forms

OPERANDS = ("scale", "mask", "temperature", "sink")
"""What may be an array."""


class Operand(NamedTuple):
    """What a compiled model depends on of an argument."""

    name: str
    dtype: DType
    ones: tuple[bool, ...]
    """Which of its dimensions are 1, and so may be broadcast."""

    def __str__(self) -> str:
        return f"{self.name}={self.dtype.name}:{''.join('1' if one else 'n' for one in self.ones)}"


class Signature(NamedTuple):
    """All that a compiled model depends on."""

    device: Device
    dtype: DType
    rank: int
    axis: int
    causal: bool
    operands: tuple[Operand, ...]

    def parts(self) -> tuple[str, ...]:
        """Returns all of it in words."""
        place = runtime.name(self.device)
        architecture = "" if self.device.is_host else self.device.architecture_name
        how = [f"rank={self.rank}", f"axis={self.axis}", *(["causal"] if self.causal else [])]
        return ("forms", place, architecture, self.dtype.name, *how, *map(str, self.operands))


def softmax(x: Buffer, axis: int, wanted: Forms, operands: dict[str, Buffer], device: Device) -> Buffer:
    """Returns softmax of a contiguous buffer, on its device.

    Args:
        x: Logits, of a dtype that the kernels take.
        axis: The axis that sums to 1, counted from 0.
        wanted: What was asked for, checked.
        operands: Its arrays, by name.
        device: Where to compute.

    Raises:
        ValueError: If one does not broadcast.
    """
    shape = tuple(x.shape)
    rows = (*shape[:axis], 1, *shape[axis + 1 :])
    for name, value in operands.items():
        forms.check_shape(name, tuple(value.shape), rows if name == "sink" else shape)
    if x.num_elements == 0:
        return Buffer(x.dtype, shape, x.device)
    inputs, signed = [x], []
    for name, value in operands.items():
        full = (1,) * (len(shape) - value.rank) + tuple(value.shape)
        inputs.append(value.view(value.dtype, full))
        signed.append(Operand(name, value.dtype, tuple(size == 1 for size in full)))
    signature = Signature(device, x.dtype, len(shape), axis, wanted.causal, tuple(signed))
    model = runtime.of_graph(device, signature.parts(), functools.partial(_graph, signature))
    return model.execute(*(value.to(device) for value in inputs))[0].to(x.device)


def number(value: Any, dtype: DType) -> np.ndarray:
    """Returns a number as an operand for `x` of `dtype`."""
    return np.full((), value, np.float64 if dtype == DType.float64 else np.float32)


def _graph(signature: Signature) -> Graph:
    place = DeviceRef.from_device(signature.device)
    dims = [f"d{i}" for i in range(signature.rank)]
    types = [TensorType(signature.dtype, dims, place)]
    for operand in signature.operands:
        own = [1 if one else dim for one, dim in zip(operand.ones, dims, strict=True)]
        types.append(TensorType(operand.dtype, own, place))
    with Graph("maxsoftmax", input_types=types, custom_extensions=[extension()]) as graph:
        x, *values = (value.tensor for value in graph.inputs)
        named: dict[str, Any] = {operand.name: value for operand, value in zip(signature.operands, values, strict=True)}
        graph.output(ops.softmax(x, signature.axis, causal=signature.causal, **named))
    return graph
