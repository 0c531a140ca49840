"""Tensors of bools that say which keys are not after a query, of positions that the graph itself counts."""

from __future__ import annotations

from typing import NamedTuple

from max._core import Value as MlirValue
from max._core.dialects import mo, rmo
from max.graph import Dim, StaticDim

from maxsoftmax._graph.values import INDICES, integer, is_transfer, tensor

FURTHEST = 1 << 30
"""Up to where positions are surely not beyond what their dtype has."""


class Position(NamedTuple):
    """A tensor whose elements say where they are along a dimension, counted from its last: its index and an offset."""

    dim: int
    offset: Dim


class Causal(NamedTuple):
    """A tensor of bools: whether a key is at most `beyond` after its query."""

    query: int
    """The dimension of queries, counted from the last."""
    key: int
    """That of keys."""
    beyond: Dim


def causal(value: MlirValue, inverted: bool) -> Causal | None:
    """Returns what a tensor of bools, or its opposite, says of positions."""
    op = value.owner
    if isinstance(op, rmo.MoNotOp):
        return causal(op.operands[0].value, not inverted)
    if isinstance(op, (rmo.BroadcastToOp, rmo.ReshapeOp)):
        inner = op.operands[0].value
        said, old, new = causal(inner, inverted), list(tensor(inner).shape), list(tensor(value).shape)
        if not said:
            return None
        last = min(said.query, said.key)
        same = old[last:] == new[last:]
        if isinstance(op, rmo.ReshapeOp):
            same = same and all(dim == 1 for dim in (*old[:last], *new[:last]))
        return said if same else None
    if not isinstance(op, (rmo.GreaterOp, rmo.GreaterEqualOp)):
        return None
    left, right = (_position(operand.value) for operand in op.operands)
    if not left or not right or left.dim == right.dim:
        return None
    query, key = (right, left) if inverted else (left, right)
    # `a > b` leaves out where they are the same, and so does the opposite of `a >= b`.
    strict = isinstance(op, rmo.GreaterOp) != inverted
    return Causal(query.dim, key.dim, query.offset - key.offset - int(strict))


def _position(value: MlirValue) -> Position | None:
    """Returns which positions a tensor has, if that is what it has."""
    op = value.owner
    if tensor(value).dtype not in INDICES:
        return None
    if isinstance(op, rmo.MoRangeOp):
        start, _, step = (integer(operand.value) for operand in op.operands)
        # A single position may be broadcast, and is then that of many elements.
        counts = step == 1 and tensor(value).shape[0] != 1
        return Position(-1, start) if start is not None and counts else None
    if isinstance(op, (rmo.AddOp, rmo.SubOp)):
        return _shifted(op)
    if isinstance(op, mo.CastOp) or is_transfer(op):
        return _position(op.operands[0].value)
    if isinstance(op, (rmo.ReshapeOp, rmo.BroadcastToOp)):
        return _spread(op, value)
    return None


def _shifted(op: rmo.AddOp | rmo.SubOp) -> Position | None:
    """Returns positions to which a number is added, or of which it is subtracted."""
    left, right = (operand.value for operand in op.operands)
    adds = isinstance(op, rmo.AddOp)
    if adds and integer(left) is not None:
        left, right = right, left
    position, number = _position(left), integer(right)
    if not position or number is None:
        return None
    offset = position.offset + number if adds else position.offset - number
    return None if isinstance(offset, StaticDim) and abs(int(offset)) > FURTHEST else Position(position.dim, offset)


def _spread(op: rmo.ReshapeOp | rmo.BroadcastToOp, value: MlirValue) -> Position | None:
    """Returns positions that are broadcast, or given dimensions of 1."""
    inner = op.operands[0].value
    position = _position(inner)
    old, new = list(tensor(inner).shape), list(tensor(value).shape)
    if not position:
        return None
    if isinstance(op, rmo.BroadcastToOp):
        return position if old[position.dim] == new[position.dim] else None
    before, after = ([i for i, dim in enumerate(shape) if dim != 1] for shape in (old, new))
    if [old[i] for i in before] != [new[i] for i in after]:
        return None
    return Position(after[before.index(len(old) + position.dim)] - len(new), position.offset)
