"""Causal masks that a graph spells out, as in softmax(where(query >= key, x, -inf)).

`drop_into` says them to the kernel, which then does not read what is masked. Only what computes the same is taken:
masks of -inf, not of large finite numbers, and positions that the graph itself counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from max import mlir
from max._core import Block, Operation
from max._core import Value as MlirValue
from max._core.dialects import mo, rmo
from max.dtype import DType
from max.graph import Dim, Graph, Shape, StaticDim, TensorValue, Value

INDICES = (DType.int32, DType.int64)
"""Dtypes of positions that are surely those of the elements: of fewer bits, or without a sign, they may wrap around."""

_NUMBERS = re.compile(r"dense_array<([^<>]+)> : tensor<")


class Position(NamedTuple):
    """A tensor whose elements say where they are along a dimension, counted from its last: its index and an offset."""

    dim: int
    offset: Dim


class Mask(NamedTuple):
    """A tensor of bools: whether a key is at most `beyond` after its query."""

    query: int
    """The dimension of queries, counted from the last."""
    key: int
    """That of keys."""
    beyond: Dim


class Masked(NamedTuple):
    """What is computed of the logits of a softmax that a graph masks."""

    x: TensorValue
    scale: float
    from_start: bool
    """Whether queries and keys are counted from the first, not from the last."""
    beyond: int
    """How many keys after its own a query sees."""


def say_causal(graph: Graph) -> int:
    """Makes those softmaxes of a graph causal that it masks so itself, and returns how many there are."""
    block = Block._from_cmlir(graph._graph_body)
    # What is said once is left to MAX, as what nobody uses.
    softmaxes = (op for op in block if isinstance(op, rmo.MoReduceSoftmaxOp) and op.results[0].num_uses)
    found = [(op, masked) for op in softmaxes if (masked := _masked(op))]
    if not found:
        return 0
    # The functions of `ops` load what a graph is built with.
    from maxsoftmax.ops._formed import causal_softmax

    results = {}
    with graph:
        for op, masked in found:
            before = len(block)
            y = causal_softmax(masked.x, op.axis, masked.scale, masked.from_start, masked.beyond)
            # What was added is behind the graph's output.
            last = op
            for added in list(block)[before:]:
                added.move_after(last)
                last = added
            results[op.results[0]] = y._mlir_value
    for op in _operations(block):
        # Some ops have something else of that name.
        for operand in Operation.operands.__get__(op):
            if operand.value in results:
                operand.value = results[operand.value]
    return len(found)


def _operations(block: Block) -> Iterator[Operation]:
    for op in block:
        yield op
        for region in op.regions:
            yield from _operations(region.front)


def _masked(softmax: Any) -> Masked | None:
    """Returns what a softmax is of, if it is of logits that are masked and perhaps scaled before or after that."""
    result = _tensor(softmax.results[0])
    axis = softmax.axis % result.rank
    # As far as the kernel counts dimensions.
    if not 0 < axis <= 4 or result.rank - axis > 2:
        return None
    masked, after = _unscaled(softmax.operands[0].value)
    select = masked.owner
    if not isinstance(select, rmo.SelectOp):
        return None
    condition, *cases = (operand.value for operand in select.operands)
    for inverted, (logits, low) in enumerate((cases, reversed(cases))):
        mask = _mask(condition, bool(inverted))
        if mask and _constant(low) == -np.inf:
            x, before = _unscaled(logits)
            taken, along = _tensor(x), (axis - 1 - result.rank, axis - result.rank)
            if (mask.query, mask.key) != along or list(taken.shape) != list(result.shape):
                continue
            queries, keys = (result.shape[dim] for dim in along)
            if [_tensor(condition).shape[dim] for dim in along] != [queries, keys]:
                continue
            for from_start, beyond in ((True, mask.beyond), (False, mask.beyond - (keys - queries))):
                if isinstance(beyond, StaticDim):
                    return Masked(taken, before * after, from_start, int(beyond))
    return None


def _unscaled(value: MlirValue) -> tuple[MlirValue, float]:
    """Returns what is multiplied by positive numbers, or divided, and their product."""
    scale = 1.0
    while isinstance(value.owner, (rmo.MulOp, rmo.DivOp)):
        left, right = (operand.value for operand in value.owner.operands)
        divided = isinstance(value.owner, rmo.DivOp)
        number = _constant(right)
        if number is None and not divided:
            left, number = right, _constant(left)
        product = 0.0 if not number else scale / number if divided else scale * number
        if not 1e-30 < product < 1e30:
            break
        value, scale = left, product
    return value, scale


def _mask(value: MlirValue, inverted: bool) -> Mask | None:
    """Returns what a tensor of bools, or its opposite, says of positions."""
    op = value.owner
    if isinstance(op, rmo.MoNotOp):
        return _mask(op.operands[0].value, not inverted)
    if isinstance(op, (rmo.BroadcastToOp, rmo.ReshapeOp)):
        inner = op.operands[0].value
        mask, old, new = _mask(inner, inverted), list(_tensor(inner).shape), list(_tensor(value).shape)
        if not mask:
            return None
        last = min(mask.query, mask.key)
        same = old[last:] == new[last:]
        if isinstance(op, rmo.ReshapeOp):
            same = same and all(dim == 1 for dim in (*old[:last], *new[:last]))
        return mask if same else None
    if not isinstance(op, (rmo.GreaterOp, rmo.GreaterEqualOp)):
        return None
    left, right = (_position(operand.value) for operand in op.operands)
    if not left or not right or left.dim == right.dim:
        return None
    query, key = (right, left) if inverted else (left, right)
    # `a > b` leaves out where they are the same, and so does the opposite of `a >= b`.
    strict = isinstance(op, rmo.GreaterOp) != inverted
    return Mask(query.dim, key.dim, query.offset - key.offset - int(strict))


def _position(value: MlirValue) -> Position | None:
    """Returns which positions a tensor has, if that is what it has."""
    op = value.owner
    if _tensor(value).dtype not in INDICES:
        return None
    if isinstance(op, rmo.MoRangeOp):
        start, _, step = (_integer(operand.value) for operand in op.operands)
        # A single position may be broadcast, and is then that of many elements.
        counts = step == 1 and _tensor(value).shape[0] != 1
        return Position(-1, start) if start is not None and counts else None
    if isinstance(op, (rmo.AddOp, rmo.SubOp)):
        return _shifted(op)
    if isinstance(op, mo.CastOp) or _is_transfer(op):
        return _position(op.operands[0].value)
    if isinstance(op, (rmo.ReshapeOp, rmo.BroadcastToOp)):
        return _spread(op, value)
    return None


def _shifted(op: rmo.AddOp | rmo.SubOp) -> Position | None:
    """Returns positions to which a number is added, or of which it is subtracted."""
    left, right = (operand.value for operand in op.operands)
    adds = isinstance(op, rmo.AddOp)
    if adds and _integer(left) is not None:
        left, right = right, left
    position, number = _position(left), _integer(right)
    if not position or number is None:
        return None
    return Position(position.dim, position.offset + number if adds else position.offset - number)


def _spread(op: rmo.ReshapeOp | rmo.BroadcastToOp, value: MlirValue) -> Position | None:
    """Returns positions that are broadcast, or given dimensions of 1."""
    inner = op.operands[0].value
    position = _position(inner)
    old, new = list(_tensor(inner).shape), list(_tensor(value).shape)
    if not position:
        return None
    if isinstance(op, rmo.BroadcastToOp):
        return position if old[position.dim] == new[position.dim] else None
    before, after = ([i for i, dim in enumerate(shape) if dim != 1] for shape in (old, new))
    if [old[i] for i in before] != [new[i] for i in after]:
        return None
    return Position(after[before.index(len(old) + position.dim)] - len(new), position.offset)


def _integer(value: MlirValue) -> Dim | None:
    """Returns the integer that all elements of a tensor are, if it is known, or of what dimensions it is made."""
    op = _origin(value).owner
    if isinstance(op, rmo.ShapeToTensorOp):
        dims = list(Shape.from_mlir(op.shape))
        return dims[0] if len(dims) == 1 else None
    if isinstance(op, (rmo.AddOp, rmo.SubOp)):
        left, right = (_integer(operand.value) for operand in op.operands)
        if left is None or right is None:
            return None
        return left + right if isinstance(op, rmo.AddOp) else left - right
    number = _constant(value)
    return Dim(int(number)) if number is not None and number.is_integer() else None


def _constant(value: MlirValue) -> float | None:
    """Returns the number that all elements of a tensor are, if it is known."""
    value = _origin(value)
    op = value.owner
    if not isinstance(op, mo.ConstantOp):
        return None
    # The text of `max._core` has infinity in 80 bits.
    found = _NUMBERS.search(str(mlir.Operation._CAPICreate(op._CAPIPtr).attributes["value"]))
    numbers = set(found[1].split(", ")) if found else set()
    return _number(numbers.pop(), _tensor(value).dtype) if len(numbers) == 1 else None


def _origin(value: MlirValue) -> MlirValue:
    """Returns what a tensor was before casts, shapes and transfers: the same number, if all elements are one."""
    while isinstance(value.owner, (mo.CastOp, rmo.ReshapeOp, rmo.BroadcastToOp)) or _is_transfer(value.owner):
        value = value.owner.operands[0].value
    return value


def _is_transfer(op: Any) -> bool:
    """Returns whether an op takes a tensor from one device to another: it has no class of its own."""
    return type(op) is Operation and mlir.Operation._CAPICreate(op._CAPIPtr).name == "rmo.mo.transfer"


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


def _tensor(value: MlirValue) -> TensorValue:
    return Value.from_mlir(value).tensor
