"""What is known of a value of a graph that is there already: the number that it is, and what it was before."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from max import mlir
from max._core import Block, Operation
from max._core import Value as MlirValue
from max._core.dialects import mo, rmo
from max.dtype import DType
from max.graph import Dim, Shape, TensorValue, Value

INDICES = (DType.int32, DType.int64)
"""Dtypes of positions that are surely those of the elements: of fewer bits, or without a sign, they may wrap around."""

_COMPUTED = (
    *(mo.CastOp, rmo.AddOp, rmo.SubOp, rmo.MulOp, rmo.DivOp, rmo.MaxOp, rmo.MinOp, rmo.PowOp, rmo.SelectOp),
    *(rmo.ModOp, rmo.MoAbsOp, rmo.MoAtanhOp, rmo.MoCeilOp, rmo.MoCosOp),
    *(rmo.MoErfOp, rmo.MoExpOp, rmo.MoFloorOp, rmo.MoGeluOp, rmo.MoGeluQuickOp, rmo.MoGeluTanhOp, rmo.MoLog1pOp),
    *(rmo.MoLogOp, rmo.MoNegativeOp, rmo.MoReluOp, rmo.MoRoundOp, rmo.MoRsqrtOp, rmo.MoSigmoidOp, rmo.MoSiluOp),
    *(rmo.MoSinOp, rmo.MoSqrtOp, rmo.MoTanhOp, rmo.MoTruncOp),
    *(rmo.BroadcastToOp, rmo.MoGatherOp, rmo.MoTransposeOp, rmo.SliceOp),
)
"""What MAX fuses into what reads it."""

_IN_MEMORY = (Block, mo.ConstantOp, mo.ConstantExternalOp, mo.CustomOp, rmo.MatmulOp, rmo.MoReduceSoftmaxOp)

_RESHAPED = (rmo.ReshapeOp, rmo.RebindTensorShapeOp)

_MOST = 1 << 16
"""Elements of a constant that are looked at: MAX has no faster way than to print them."""

_NUMBERS = re.compile(r"dense_array<([^<>]+)> : tensor<")


def tensor(value: MlirValue) -> TensorValue:
    """Returns a value as the tensor that it is."""
    return Value.from_mlir(value).tensor


def integer(value: MlirValue) -> Dim | None:
    """Returns the integer that all elements of a tensor are, if it is known, or of what dimensions it is made."""
    source, casts = _origin(value)
    op = source.owner
    if isinstance(op, (rmo.ShapeToTensorOp, rmo.AddOp, rmo.SubOp)):
        if any(dtype not in INDICES for dtype in (tensor(source).dtype, *casts)):
            return None
        if isinstance(op, rmo.ShapeToTensorOp):
            dims = list(Shape.from_mlir(op.shape))
            return dims[0] if len(dims) == 1 else None
        left, right = (integer(operand.value) for operand in op.operands)
        if left is None or right is None:
            return None
        return left + right if isinstance(op, rmo.AddOp) else left - right
    number = constant(value)
    return Dim(int(number)) if number is not None and number.is_integer() else None


def constant(value: MlirValue) -> float | None:
    """Returns the number that all elements of a tensor are, if it is known."""
    source, casts = _origin(value)
    op = source.owner
    if not isinstance(op, mo.ConstantOp) or math.prod(int(dim) for dim in tensor(source).shape) > _MOST:
        return None
    # The text of `max._core` has infinity in 80 bits.
    found = _NUMBERS.search(str(mlir.Operation._CAPICreate(op._CAPIPtr).attributes["value"]))
    numbers = set(found[1].split(", ")) if found else set()
    number = _number(numbers.pop(), tensor(source).dtype) if len(numbers) == 1 else None
    for dtype in reversed(casts):
        number = None if number is None else _cast(number, dtype)
    return number


def _origin(value: MlirValue) -> tuple[MlirValue, list[DType]]:
    """Returns what a tensor was before casts, shapes and transfers, and the casts' dtypes, the last one first."""
    casts = []
    while isinstance(value.owner, (mo.CastOp, rmo.BroadcastToOp, *_RESHAPED)) or is_transfer(value.owner):
        if isinstance(value.owner, mo.CastOp):
            casts.append(tensor(value).dtype)
        value = value.owner.operands[0].value
    return value, casts


def is_transfer(op: Any) -> bool:
    """Returns whether an op takes a tensor from one device to another: it has no class of its own."""
    return type(op) is Operation and mlir.Operation._CAPICreate(op._CAPIPtr).name == "rmo.mo.transfer"


def is_fused(value: MlirValue) -> bool:
    """Returns whether MAX computes a tensor as it is read, and writes it to memory only where it has to."""
    return isinstance(_unshaped(value).owner, _COMPUTED)


def lies(value: MlirValue) -> bool:
    """Returns whether a tensor surely is in memory: constant, a product, from outside of the graph or of the device."""
    owner = _unshaped(value).owner
    return isinstance(owner, _IN_MEMORY) or is_transfer(owner)


def _unshaped(value: MlirValue) -> MlirValue:
    while isinstance(value.owner, _RESHAPED):
        value = value.owner.operands[0].value
    return value


def _number(text: str, dtype: DType) -> float | None:
    """Returns what MLIR writes for a number: in hexadecimal digits what decimal ones cannot say, infinity among it."""
    if dtype.is_integral():
        return float(text)
    if not dtype.is_float() or dtype.size_in_bytes < 2:
        return None
    if not text.startswith("0x"):
        # Decimal digits are as many as tell a number from its neighbours.
        return _cast(float(text), dtype)
    # Of bfloat16 the bits are the upper half of float32's.
    half = dtype == DType.bfloat16
    kind = np.dtype(np.float32 if half else dtype.to_numpy())
    return float(np.array(int(text, 16) << 16 * half, f"u{kind.itemsize}").view(kind))


def _cast(number: float, dtype: DType) -> float | None:
    """Returns a number as it is in another dtype; None if that is no number, or has not this one."""
    if dtype.is_integral():
        kept = np.iinfo(dtype.to_numpy())
        return number if number.is_integer() and kept.min <= number <= kept.max else None
    if not dtype.is_float() or dtype.size_in_bytes < 2:
        return None
    half = dtype == DType.bfloat16
    with np.errstate(over="ignore"):
        known = np.array(number, np.float32 if half else dtype.to_numpy())
    if half:
        bits = known.view(np.uint32)
        known = ((bits + (0x7FFF + (bits >> 16 & 1))) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return float(known)
