"""Rows that are split over devices: their shards, and what these tell each other."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from max.dtype import DType
from max.graph import BufferValueLike, Dim, StaticDim, TensorValue, TensorValueLike
from max.graph import ops as max_ops

from maxsoftmax._arguments import accumulator, check_dtype, words
from maxsoftmax.ops._softmax import softmax
from maxsoftmax.ops._values import as_tensor, axis_of, kept_dims, product

Shards = Sequence[TensorValueLike]
Signals = Iterable[BufferValueLike]


class Rows(NamedTuple):
    """Shards of rows."""

    shards: list[TensorValue]
    axis: int
    signals: list[Any]

    @property
    def lengths(self) -> list[int]:
        """The classes of each shard."""
        return [int(x.shape[self.axis]) for x in self.shards]

    @property
    def starts(self) -> list[int]:
        """The classes before each shard."""
        return list(itertools.accumulate(self.lengths, initial=0))[:-1]

    @property
    def classes(self) -> int:
        """How many there are of a row."""
        return sum(self.lengths)

    @property
    def kept(self) -> list[Dim]:
        """The dimensions beside the axis."""
        return kept_dims(self.shards[0], self.axis)

    @property
    def rows(self) -> Dim:
        """How many there are."""
        return product(self.kept)

    @property
    def wide(self) -> DType:
        """The dtype of the accumulator."""
        return accumulator(self.shards[0].dtype)


def split_rows(shards: Any, signals: Any, axis: int | None) -> Rows:
    """Returns shards that fit each other.

    Args:
        shards: What a caller passed.
        signals: What a caller passed; None if nothing travels.
        axis: The axis that is split; None if it is that of a loss.

    Raises:
        TypeError: If they are no tensors, or not of one dtype.
        ValueError: If they do not fit.
    """
    if isinstance(shards, TensorValue) or not isinstance(shards, Sequence):
        raise TypeError(f"shards must be a list of tensors of the graph, one a device, not {shards!r}")
    if not shards:
        raise ValueError("shards is empty, but there has to be a tensor for each device")
    found = [as_tensor(x, f"shards[{i}]") for i, x in enumerate(shards)]
    first = found[0]
    check_dtype(first.dtype, "shards[0]")
    place = axis_of(axis if axis is not None else min(first.rank, 2) - 1, first, "shards[0]")
    for i, x in enumerate(found):
        if x.dtype != first.dtype:
            raise TypeError(f"shards[{i}] has dtype {x.dtype.name}, but shards[0] has {first.dtype.name}")
        beside = [list(y.shape[:place]) + list(y.shape[place + 1 :]) for y in (x, first)]
        if x.rank != first.rank or beside[0] != beside[1]:
            raise ValueError(
                f"shards[{i}] has shape {words(x.shape)} and shards[0] {words(first.shape)}, but they may differ along "
                f"axis {place} only"
            )
        if not isinstance(x.shape[place], StaticDim):
            raise ValueError(
                f"shards[{i}] has shape {words(x.shape)}, but its length along axis {place} must be static"
            )
    devices = {x.device for x in found}
    if len(devices) not in (1, len(found)):
        raise ValueError(f"shards are on {len(devices)} devices, but {len(found)} need as many, or one for all")
    buffers = [] if signals is None else list(signals)
    if signals is not None and len(devices) > 1 and len(buffers) != len(found):
        raise ValueError(
            f"signals has {len(buffers)} buffers, but {len(found)} devices need one each: max.nn.Signals makes them"
        )
    return Rows(found, place, buffers)


def gather(split: Rows, numbers: list[list[TensorValue]]) -> list[list[list[TensorValue]]]:
    """Returns the numbers of all shards on each device, by one collective: its [shard][number], each (rows,)."""
    mine = [max_ops.stack(each, 0) for each in numbers]
    count = len(numbers[0])
    if len({x.device for x in split.shards}) > 1:
        every = max_ops.allgather(mine, split.signals, axis=0)
    else:
        every = [max_ops.concat(mine, 0)] * len(mine)
    return [[[y[count * i + j] for j in range(count)] for i in range(len(mine))] for y in every]


def merge(
    split: Rows, numbers: list[list[TensorValue]], gathered: list[list[list[TensorValue]]] | None = None
) -> list[tuple[TensorValue, TensorValue]]:
    """Returns the pair (m, d) of whole rows on each device, merged from those of the shards in their order."""
    results = []
    for every in gather(split, numbers) if gathered is None else gathered:
        m = functools.reduce(max_ops.max, [top for top, *_ in every])
        terms = [max_ops.where(max_ops.equal(top, m), d, d * exp(top - m)) for top, d, *_ in every]
        results.append((m, functools.reduce(operator.add, terms)))
    return results


def exp(x: TensorValue) -> TensorValue:
    """Returns e^x of what is not above 0."""
    if x.dtype != DType.float64:
        return max_ops.exp(x)
    # MAX's has eleven digits. Softmax of x and 0 is e^x and 1 over their sum.
    both = softmax(max_ops.stack([x, max_ops.broadcast_to(number(0, x), x.shape)], -1))
    return both[..., 0] / both[..., 1]


def stacked(m: TensorValue, d: TensorValue) -> TensorValue:
    """Returns pairs as the kernels take them."""
    return max_ops.stack([m, d], 1)


def along(y: TensorValue, split: Rows) -> TensorValue:
    """Returns (rows,) with the dimensions of shards, whose axis has length 1."""
    kept = split.kept
    return max_ops.reshape(y, [*kept[: split.axis], 1, *kept[split.axis :]])


def number(value: float, like: TensorValue) -> TensorValue:
    """Returns a constant of the dtype of a tensor, where that is."""
    return max_ops.constant(value, like.dtype, like.device)
