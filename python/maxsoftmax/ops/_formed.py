"""Softmax of what is made of logits: scaled, masked, divided, cut by their place."""

from __future__ import annotations

from typing import Any

import numpy as np
from max.dtype import DType
from max.graph import Graph, TensorType, TensorValue
from max.graph import ops as max_ops

from maxsoftmax import _forms as forms
from maxsoftmax._arguments import Out, accumulator, is_number
from maxsoftmax._forms import Forms
from maxsoftmax._graph.values import is_fused
from maxsoftmax.ops._along import along_op, result_type
from maxsoftmax.ops._values import add_op, bits_of, check_own

_OPERANDS = ("scale", "mask", "temperature", "sink")
"""What logits may be scaled, masked or divided by, and what is added to their denominator, as the op takes them."""

_BEFORE, _AFTER = 4, 1
"""How many dimensions there may be before and after the axis for the op that reads them in memory."""


def counts(axis: int, rank: int) -> bool:
    """Returns whether the op that reads logits in memory has as many dimensions before and after the axis."""
    return axis <= _BEFORE and rank - axis - 1 <= _AFTER


def with_forms(x: TensorValue, axis: int, wanted: Forms, out: Out | None) -> TensorValue:
    """Adds softmax of what `wanted` makes of `x`, which the kernel computes as it reads `x`."""
    wide = accumulator(x.dtype)
    type, written = result_type(x, out)
    shared = {"axis": axis, "causal": wanted.causal, "masked": wanted.masked, **written}
    rows = [*x.shape[:axis], 1, *x.shape[axis + 1 :]]
    numbers = {name: value for name, value in wanted._asdict().items() if is_number(value)}
    tensors = {
        name: _operand(name, getattr(wanted, name), x, rows if name == "sink" else x.shape, name == "mask")
        for name in _OPERANDS
        if getattr(wanted, name) is not None and name not in numbers
    }
    plain = all(lies and operand.dtype in (wide, x.dtype, DType.bool) for operand, lies in tensors.values())
    in_memory = counts(axis, x.rank) and not is_fused(x._mlir_value)
    if plain and {"mask", "sink"}.isdisjoint(numbers) and in_memory:
        operands = {name: operand for name, (operand, _) in tensors.items()}
        return _of_memory(x, operands, numbers, type, {**shared, "from_start": False, "beyond": 0})
    scale, mask, temperature, sink = (
        max_ops.constant(float(numbers[name]), wide, x.device) if name in numbers else tensors.get(name, (None,))[0]
        for name in _OPERANDS
    )
    z = max_ops.cast(x, wide)
    if scale is not None:
        z = z * max_ops.cast(scale, wide)
    if mask is not None and mask.dtype != DType.bool:
        z = z + max_ops.cast(mask, wide)
    if temperature is not None:
        z = z / max_ops.cast(temperature, wide)
    if mask is not None and mask.dtype == DType.bool:
        z = max_ops.where(mask, z, max_ops.constant(-np.inf, wide, x.device))
    if sink is None:
        (y,) = add_op("softmax_masked", [z], [type], shared)
    else:
        sink = max_ops.broadcast_to(max_ops.cast(sink, wide), rows)
        (y,) = add_op("softmax_sink", [z, sink], [type], shared)
    return y


def spelled_softmax(
    x: TensorValue,
    axis: int,
    dtype: DType,
    scale: float,
    *,
    cut: tuple[bool, int] | None = None,
    keep: TensorValue | None = None,
    added: TensorValue | None = None,
    factor: float = 1.0,
) -> TensorValue:
    """Adds softmax of `x * scale` as a graph spells it out: a row that is masked as a whole is NaN.

    Args:
        x: Logits.
        axis: The axis that sums to 1, counted from 0.
        dtype: That of the results.
        scale: A positive number.
        cut: Whether queries and keys are counted from the first of each, not from the last, and how many keys after
            its own a query sees; it sees all if None.
        keep: Bools in memory that broadcast to `x`, False where an element takes no part.
        added: Floats in memory that broadcast to `x`, and are added to `x * scale`, instead of bools.
        factor: A positive number that they are multiplied by.
    """
    out = None if dtype == x.dtype else Out(dtype.name, 1.0)
    mask = keep if added is None else added
    if scale == 1.0 and cut is None and mask is None:
        return along_op("softmax_fused", x, axis, out)
    type, written = result_type(x, out)
    from_start, beyond = cut or (False, 0)
    options = {"axis": axis, "causal": cut is not None, "masked": False, "from_start": from_start, "beyond": beyond}
    numbers = {"scale": scale / factor, "temperature": 1 / factor}
    return _of_memory(x, {} if mask is None else {"mask": mask}, numbers, type, {**options, **written})


def _of_memory(
    x: TensorValue, operands: dict[str, TensorValue], numbers: dict[str, Any], type: TensorType, options: dict[str, Any]
) -> TensorValue:
    """Adds the op that reads `x` and operands as they lie in memory."""
    nothing = max_ops.constant(np.zeros([1] * len(x.shape), np.float32), DType.float32, x.device)
    laid = [_of_rank(len(x.shape), operands.get(name, nothing)) for name in _OPERANDS]
    kinds = {f"has_{name}": name in operands for name in _OPERANDS}
    bits = {name: bits_of(numbers.get(name, 1.0)) for name in ("scale", "temperature")}
    (y,) = add_op("softmax_formed", [x, *laid], [type], {**options, **kinds, **bits})
    return y


def _operand(name: str, value: Any, x: TensorValue, whole: Any, or_bool: bool) -> tuple[TensorValue, bool]:
    """Returns an argument as a tensor that broadcasts to `whole`, on the device of `x`, and whether it is in memory."""
    constant = isinstance(value, np.ndarray)
    if constant:
        # Here, where it costs nothing; MAX would run a model for it.
        value = value.reshape([*[1] * (len(x.shape) - value.ndim), *value.shape])
        value = max_ops.constant(value, DType.from_numpy(value.dtype), x.device)
    try:
        operand = TensorValue(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a tensor of the graph, not {value!r}") from error
    check_own(operand, name)
    if not (operand.dtype.is_float() or (or_bool and operand.dtype == DType.bool)):
        allowed = "floats or bools" if or_bool else "floats"
        raise TypeError(f"{name} has dtype {operand.dtype.name}, but must be of {allowed}")
    forms.check_shape(name, operand.shape, whole)
    if operand.device != x.device:
        raise ValueError(f"{name} is on {operand.device}, but must be on {x.device}, where x is")
    lies = constant or _is_input(operand)
    if not lies and list(operand.shape) != list(whole):
        # MAX 26.7 gets wrong what it fuses of a broadcast, a comparison and another broadcast: a mask of positions.
        (operand,) = add_op("in_memory", [operand], [operand.type], {})
        lies = True
    return operand, lies


def _of_rank(rank: int, x: TensorValue) -> TensorValue:
    """Returns `x` with as many dimensions of 1 before its own as it lacks."""
    missing = rank - len(x.shape)
    return max_ops.reshape(x, [*[1] * missing, *x.shape]) if missing else x


def _is_input(x: TensorValue) -> bool:
    """Returns whether `x` comes from outside of the graph, as it lies in memory."""
    return any(value._mlir_value == x._mlir_value for value in Graph.current.inputs)
