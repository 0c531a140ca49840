"""Ops of one tensor along an axis whose results have its shape, and their gradients."""

from __future__ import annotations

from typing import Any

from max.dtype import DType
from max.graph import TensorType, TensorValue, TensorValueLike
from max.graph import ops as max_ops

from maxsoftmax._arguments import FLOAT8, Out, accumulator, check_dtype, check_out
from maxsoftmax.ops._values import add_op, as_tensor, axis_of, bits_of, check_like


def along_op(op: str, x: TensorValue, axis: int, out: Out | None) -> TensorValue:
    """Adds an op of one input that keeps its shape."""
    type, parameters = result_type(x, out)
    if out is not None and type.dtype.size_in_bytes > x.dtype.size_in_bytes:
        # The kernels take exponentials as accurate as logits are.
        x = max_ops.cast(x, accumulator(x.dtype))
    (y,) = add_op(op, [x], [type], {"axis": axis, **parameters})
    return y


def checked_out(out_dtype: Any, out_scale: Any, x: TensorValue, algorithm: str = "auto") -> Out | None:
    """Returns how results are to be written, None if as they always are."""
    out = check_out(out_dtype, out_scale, x.dtype.name, algorithm)
    if out is not None and out.dtype in FLOAT8 and x.device.is_cpu():
        raise ValueError(
            f"out_dtype {out.dtype} needs a GPU, as MAX has no float8 in graphs on a CPU: x is on {x.device}"
        )
    return out


def result_type(x: TensorValue, out: Out | None) -> tuple[TensorType, dict[str, int]]:
    """Returns the type of results of the shape of `x`, and the parameters of an op that writes them."""
    dtype, scale = (x.dtype, 1.0) if out is None else (getattr(DType, out.dtype), out.scale)
    return TensorType(dtype, x.shape, x.device), {"out_scale": bits_of(scale)}


def backward_op(op: str, y: TensorValueLike, dy: TensorValueLike, axis: int, **options: bool) -> TensorValue:
    """Adds an op of results and their gradients, which returns that of the input."""
    y, dy = as_tensor(y, "y"), as_tensor(dy, "dy")
    check_dtype(y.dtype, "y")
    check_like(dy, "dy", y.dtype, y.shape, y.device)
    (dx,) = add_op(op, [y, dy], [y.type], {"axis": axis_of(axis, y, "y"), **options})
    return dx
