"""What is known of a value of a graph that is there already: the number that it is, and what it was before."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from max import mlir
from max._core import Block, Operation
from max._core import Value as MlirValue
from max._core.dialects import mo, rmo
from max.dtype import DType
from max.graph import Dim, Shape, TensorValue, Value

_COMPUTED = (
    *(mo.CastOp, rmo.AddOp, rmo.SubOp, rmo.MulOp, rmo.DivOp, rmo.MaxOp, rmo.MinOp, rmo.PowOp, rmo.SelectOp),
    *(rmo.MoAbsOp, rmo.MoExpOp, rmo.MoLogOp, rmo.MoNegativeOp, rmo.MoSqrtOp, rmo.MoTanhOp),
    *(rmo.BroadcastToOp, rmo.MoTransposeOp, rmo.SliceOp),
)

_IN_MEMORY = (Block, mo.ConstantOp, mo.ConstantExternalOp, rmo.MatmulOp)

_NUMBERS = re.compile(r"dense_array<([^<>]+)> : tensor<")


def tensor(value: MlirValue) -> TensorValue:
    """Returns a value as the tensor that it is."""
    return Value.from_mlir(value).tensor


def integer(value: MlirValue) -> Dim | None:
    """Returns the integer that all elements of a tensor are, if it is known, or of what dimensions it is made."""
    op = origin(value).owner
    if isinstance(op, rmo.ShapeToTensorOp):
        dims = list(Shape.from_mlir(op.shape))
        return dims[0] if len(dims) == 1 else None
    if isinstance(op, (rmo.AddOp, rmo.SubOp)):
        left, right = (integer(operand.value) for operand in op.operands)
        if left is None or right is None:
            return None
        return left + right if isinstance(op, rmo.AddOp) else left - right
    number = constant(value)
    return Dim(int(number)) if number is not None and number.is_integer() else None


def constant(value: MlirValue) -> float | None:
    """Returns the number that all elements of a tensor are, if it is known."""
    value = origin(value)
    op = value.owner
    if not isinstance(op, mo.ConstantOp):
        return None
    # The text of `max._core` has infinity in 80 bits.
    found = _NUMBERS.search(str(mlir.Operation._CAPICreate(op._CAPIPtr).attributes["value"]))
    numbers = set(found[1].split(", ")) if found else set()
    return _number(numbers.pop(), tensor(value).dtype) if len(numbers) == 1 else None


def origin(value: MlirValue) -> MlirValue:
    """Returns what a tensor was before casts, shapes and transfers: the same number, if all elements are one."""
    while isinstance(value.owner, (mo.CastOp, rmo.ReshapeOp, rmo.BroadcastToOp)) or is_transfer(value.owner):
        value = value.owner.operands[0].value
    return value


def is_transfer(op: Any) -> bool:
    """Returns whether an op takes a tensor from one device to another: it has no class of its own."""
    return type(op) is Operation and mlir.Operation._CAPICreate(op._CAPIPtr).name == "rmo.mo.transfer"


def is_fused(value: MlirValue) -> bool:
    """Returns whether MAX computes a tensor as it is read, and writes it to memory only where it has to."""
    return isinstance(value.owner, _COMPUTED)


def lies(value: MlirValue) -> bool:
    """Returns whether a tensor surely is in memory: constant, a product, from outside of the graph or of the device."""
    while isinstance(value.owner, rmo.ReshapeOp):
        value = value.owner.operands[0].value
    return isinstance(value.owner, _IN_MEMORY) or is_transfer(value.owner)


def _number(text: str, dtype: DType) -> float | None:
    """Returns what MLIR writes for a number: in hexadecimal digits what decimal ones cannot say, infinity among it."""
    if dtype.is_integral():
        return float(text)
    if not dtype.is_float() or dtype.size_in_bytes < 2:
        return None
    # Of bfloat16 the bits are the upper half of float32's.
    half = dtype == DType.bfloat16
    kind = np.dtype(np.float32 if half else dtype.to_numpy())
    bits = np.dtype(f"u{kind.itemsize}")
    if text.startswith("0x"):
        return float(np.array(int(text, 16) << 16 * half, bits).view(kind))
    known = np.array(float(text), kind)
    # Decimal digits are as many as tell a number from its neighbours.
    return float(((known.view(bits) + 0x8000) & 0xFFFF0000).view(kind) if half else known)
