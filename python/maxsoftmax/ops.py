"""Softmax for the values of a `max.graph.Graph`."""

from __future__ import annotations

from typing import Any

import numpy as np
from max.dtype import DType
from max.graph import Graph, TensorType, TensorValue, TensorValueLike
from max.graph import ops as max_ops

from maxsoftmax import forms, tuning
from maxsoftmax.arguments import check_algorithm, check_dtype, normalize_axis
from maxsoftmax.extension import extension
from maxsoftmax.forms import Forms


def softmax(
    x: TensorValueLike,
    axis: int = -1,
    *,
    scale: float | TensorValueLike | None = None,
    mask: TensorValueLike | None = None,
    causal: bool = False,
    temperature: float | TensorValueLike | None = None,
    sink: TensorValueLike | None = None,
    algorithm: str = "auto",
    block_size: int | None = None,
    unroll: int | None = None,
) -> TensorValue:
    """Adds softmax along one axis to the graph that is being built.

    Computes exp(z - max z) / (Σ exp(z - max z) + exp(sink - max z)) along `axis`, in float32 or wider, where z is
    (x · scale + mask) / temperature. The kernel runs where `x` lives, and computes z as it reads `x`, as well as what
    MAX can fuse of how the graph computes `x`. The graph should be given `maxsoftmax.extension()` in its
    `custom_extensions`; one that was not is given it here.

    Args:
        x: Logits: any rank from 1, any dimensions (static or symbolic, 0 included); float32, bfloat16, float16 or
            float64.
        axis: The axis that will sum to 1; negative counts from the last.
        scale: A number, or a tensor that broadcasts to `x`, such as 1/√d.
        mask: A tensor that broadcasts to `x`: of bools, True where an element takes part, or of floats to be added.
            Where there is a mask, causal or not, a row in which nothing takes part is 0, as in attention, and not NaN.
        causal: Whether `axis` is that of keys, after one of queries, and a query sees no key after it. Both are counted
            from their end, so that the last query sees every key, however many there are of either.
        temperature: A positive number, or a tensor of them that broadcasts to `x`, such as one for each row.
        sink: Logits that take part in the denominator only, one a row: a tensor that broadcasts to `x` with `axis` of
            length 1. One for each head of (batch, heads, queries, keys) has the shape (heads, 1, 1).
        algorithm: "auto", or the name of a kernel that the device has.
        block_size: Threads a block, where a GPU kernel was named: a power of two up to 1024; 128 if None.
        unroll: Vectors that a thread has under way at a time, for "vector" and "online": 1, 2, 4 or 8; 4 if None.
            Where neither is given, these two use what `maxsoftmax tune` found for the GPU, if it was run.

    Returns:
        Probabilities, of the shape, dtype and device of `x`.

    Raises:
        TypeError: If the dtype of `x` or the type of another argument is not one of these.
        ValueError: If `x` is a scalar, there is no such axis, algorithm, block size or unroll, a tensor does not
            broadcast, a number is not allowed, or `algorithm` is not "auto" and cannot do what was asked for.
        LookupError: If no graph is being built.
    """
    graph = Graph.current
    try:
        x = TensorValue(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"x must be a tensor of the graph, not {x!r}") from error
    device = "gpu" if x.device.is_gpu() else "cpu"
    check_dtype(x.dtype)
    if x.rank == 0:
        raise ValueError("x has rank 0, but softmax needs an axis: reshape it to rank 1 first")
    algorithm = check_algorithm(algorithm, device)
    axis = normalize_axis(axis, x.rank)
    choice = tuning.choice(x.device, algorithm, x.dtype, block_size, unroll)
    wanted = Forms(scale, mask, causal, temperature, sink)
    forms.check(wanted, axis, algorithm)
    if wanted.any:
        return _with_forms(graph, x, axis, wanted)
    _load_extension(graph)
    if algorithm == "auto" and not _is_input(graph, x):
        # What computes `x` may be fused into the kernel.
        return _custom("softmax_fused", [x], x.type, axis=axis)
    return _custom("softmax", [x], x.type, axis=axis, algorithm=algorithm, **choice._asdict())


def _with_forms(graph: Graph, x: TensorValue, axis: int, wanted: Forms) -> TensorValue:
    """Adds softmax of what `wanted` makes of `x`, which the kernel computes as it reads `x`."""
    wide = DType.float64 if x.dtype == DType.float64 else DType.float32
    rows = [*x.shape[:axis], 1, *x.shape[axis + 1 :]]
    scale = _operand("scale", wanted.scale, x, x.shape)
    mask = _operand("mask", wanted.mask, x, x.shape, or_bool=True)
    temperature = _operand("temperature", wanted.temperature, x, x.shape)
    sink = _operand("sink", wanted.sink, x, rows)
    _load_extension(graph)
    z = max_ops.cast(x, wide)
    if scale is not None:
        z = z * max_ops.cast(scale, wide)
    if mask is not None and mask.dtype != DType.bool:
        z = z + max_ops.cast(mask, wide)
    if temperature is not None:
        z = z / max_ops.cast(temperature, wide)
    if mask is not None and mask.dtype == DType.bool:
        z = max_ops.where(mask, z, max_ops.constant(-np.inf, wide, x.device))
    parameters = {"axis": axis, "causal": wanted.causal, "masked": wanted.masked}
    if sink is None:
        return _custom("softmax_masked", [z], x.type, **parameters)
    sink = max_ops.broadcast_to(max_ops.cast(sink, wide), rows)
    return _custom("softmax_sink", [z, sink], x.type, **parameters)


def _operand(name: str, value: Any, x: TensorValue, whole: Any, or_bool: bool = False) -> TensorValue | None:
    """Returns an argument as a tensor that broadcasts to `whole`, on the device of `x`; None if it is None."""
    if value is None:
        return None
    if forms.is_number(value):
        return max_ops.constant(float(value), DType.float64 if x.dtype == DType.float64 else DType.float32, x.device)
    if isinstance(value, np.ndarray):
        value = max_ops.constant(value, DType.from_numpy(value.dtype), x.device)
    try:
        operand = TensorValue(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a tensor of the graph, not {value!r}") from error
    if not (operand.dtype.is_float() or (or_bool and operand.dtype == DType.bool)):
        allowed = "floats or bools" if or_bool else "floats"
        raise TypeError(f"{name} has dtype {operand.dtype.name}, but must be of {allowed}")
    forms.check_shape(name, operand.shape, whole)
    if operand.device != x.device:
        raise ValueError(f"{name} is on {operand.device}, but must be on {x.device}, where x is")
    return operand


def _custom(name: str, values: list[TensorValue], type: TensorType, **parameters: bool | int | str) -> TensorValue:
    (y,) = max_ops.custom(name, device=type.device, values=values, out_types=[type], parameters=parameters)
    return y.tensor


def _is_input(graph: Graph, x: TensorValue) -> bool:
    """Returns whether `x` comes from outside of the graph, as it lies in memory."""
    return any(value._mlir_value == x._mlir_value for value in graph.inputs)


def _load_extension(graph: Graph) -> None:
    """Gives `graph` the kernels unless it has them."""
    if "softmax" not in graph._kernel_library:
        graph._import_kernels([extension()])
