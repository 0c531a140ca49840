"""Softmax, its relatives and cross entropy of a shard of rows, and their gradients, by the kernels.

Logits are (rows, n, …), with the shard's n classes along dimension 1, and what there is one of for each row is
(rows, …). Each step is a call of a library: `shard`, or for losses `shard_loss`. Between them ranks exchange numbers of
rows, and the kernels merge what all sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from maxsoftmax import _native
from maxsoftmax._native.description import POINTERS
from maxsoftmax.torch import _layouts as layouts
from maxsoftmax.torch import _memory as memory
from maxsoftmax.torch._direct_losses import REDUCTIONS, TargetError, wide
from maxsoftmax.torch._exchange import HEADER, Group, exchanged, gathered

IGNORED, WRONG = -1, -2
"""What a row's class is among those of a shard, if the row does not count, or its target is no class."""

OF_RESULTS = 2
"""What is added to the number of a second pass, 0 for probabilities and 1 for logarithms, where it is a gradient."""

SUMS = 4
"""What is added to the same number, where it is sums for gradients."""

PAIRS = 6
"""The step that merges pairs."""

TARGETS, TERMS, LOSSES, GRADIENT = range(4)
"""The steps of a loss."""

_plans = memory.table()


def laid(x: torch.Tensor) -> torch.Tensor:
    """Returns a shard as the kernels take it on all ranks: without gaps, its rows in their order."""
    return memory.materialized(x if is_laid(x) else x.contiguous())


def is_laid(x: torch.Tensor) -> bool:
    """Returns whether a shard lies so."""
    if not x.numel():
        # Strides of nothing may be anything.
        return True
    dims = layouts.order(x.shape, x.stride())
    rows = [dim for dim in dims or [] if dim != 1 and x.shape[dim] != 1]
    return dims is not None and rows == sorted(rows)


def softmax(x: torch.Tensor, log: bool, group: Group) -> torch.Tensor:
    """Returns a shard of softmax of whole rows, or of its logarithm."""
    x = laid(x)
    return _second(x, int(log), x, gathered(_pairs(x), group))


def softmax_backward(y: torch.Tensor, dy: torch.Tensor, log: bool, group: Group) -> torch.Tensor:
    """Returns the gradient of logits, given a shard of results and its gradient."""
    y = laid(y)
    dy = memory.placed(dy, y.stride())
    sums = _by_row(y, wide(y.dtype))
    _run("shard", y, (SUMS + int(log),), sums, y, dy)
    return _second(y, OF_RESULTS + int(log), dy, gathered(sums, group))


def logsumexp(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ln Σ exp of whole rows, and their pairs."""
    x = laid(x)
    every = gathered(_pairs(x), group)
    sums, pairs = _by_row(x, x.dtype), torch.empty_like(every[0])
    _run("shard", x, (PAIRS, len(every)), sums, pairs, every)
    return sums, pairs


def logsumexp_backward(x: torch.Tensor, pairs: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Returns p · dy of a shard: the gradient of a loss whose targets are all in others."""
    own = torch.full_like(dy, x.shape[1], dtype=torch.int64, memory_format=torch.contiguous_format)
    return cross_entropy_backward(x, pairs, own, dy, 0, 0.0, "none")


def cross_entropy(  # noqa: PLR0917
    x: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    lengths: Sequence[int] | None,
    group: Group,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Returns the loss, and what its gradient needs.

    Returns:
        The loss; the pairs of whole rows, and behind them how many rows count; the shard's own targets; and how many
        classes there are in all.

    Raises:
        TargetError: On all ranks, if on a CPU a target is neither a class nor ignored.
    """
    x, target = laid(x), target.contiguous()
    rows, kind = target.numel(), wide(x.dtype)
    is_wide, smoothed = int(target.dtype is torch.int64), _native.bits(label_smoothing)
    header = HEADER * 8 // kind.itemsize
    # Headers are integers of 64 bits, on all ranks at even places.
    message = x.new_empty(header + 3 * rows + rows % 2, dtype=kind)
    pairs, terms = message[header : header + 2 * rows], message[header + 2 * rows :]
    own = torch.empty_like(target, dtype=torch.int64)

    def fill(start: int, classes: int, chosen: int) -> None:
        told = (ignore_index, 0, 0, is_wide, 0, TARGETS, classes, start, chosen)
        _run("shard_loss", x, told, own, message, target)
        _run("shard_loss", x, (IGNORED, smoothed, 0, 1, 0, TERMS, classes), terms, pairs, x, own)

    chosen = str(x.dtype), ignore_index, label_smoothing, reduction
    found = exchanged(message, fill, x.shape[1], group, lengths, chosen)
    if x.device.type == "cpu":
        _check(target, own == WRONG, found.classes, ignore_index)
    loss = x.new_empty(target.shape if reduction == "none" else ())
    whole = x.new_empty(2 * rows + 1, dtype=kind)
    told = (ignore_index, smoothed, REDUCTIONS[reduction], is_wide, 1, LOSSES, 0, group.size, len(message))
    _run("shard_loss", x, told, loss, whole, found.every, target)
    return loss, whole, own, found.classes


def cross_entropy_backward(  # noqa: PLR0917
    x: torch.Tensor,
    pairs: torch.Tensor,
    own: torch.Tensor,
    dloss: torch.Tensor,
    classes: int,
    label_smoothing: float,
    reduction: str,
) -> torch.Tensor:
    """Returns (p - wanted) · dloss of a shard, over the number of rows that count if the loss is a mean."""
    x, dloss = laid(x), dloss.contiguous()
    dx = memory.fresh_like(x)
    if x.numel():
        smoothed, counted = _native.bits(label_smoothing), int(reduction == "mean")
        told = (IGNORED, smoothed, REDUCTIONS[reduction], 1, counted, GRADIENT, classes)
        _run("shard_loss", x, told, dx, x, pairs, own, dloss)
    return dx


def _pairs(x: torch.Tensor) -> torch.Tensor:
    """Returns the pairs (m, d) of the rows of a shard, (…, 2); (-inf, 0) without classes."""
    pairs = x.new_empty((x.shape[0], *x.shape[2:], 2), dtype=wide(x.dtype))
    _run("statistics", x, (0,), pairs, x)
    return pairs


def _second(x: torch.Tensor, what: int, other: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Returns what elements of a shard turn into, given what all ranks sent of rows."""
    y = memory.fresh_like(x)
    if x.numel():
        _run("shard", x, (what, len(numbers)), y, x, other, numbers)
    return y


def _by_row(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialized tensor of one number a row."""
    return x.new_empty((x.shape[0], *x.shape[2:]), dtype=dtype)


def _run(library: str, x: torch.Tensor, options: tuple[int, ...], *tensors: torch.Tensor) -> None:
    """Computes a step: results come first among its tensors."""
    key = (library, x.shape, x.stride(), x.dtype, x.device, options)
    planned = _plans.get(key)
    if planned is None:
        dims = layouts.order(x.shape, x.stride()) or range(x.ndim)
        planned = memory.plan(library, x, layouts.rows(x.shape, dims, 1), options)
        memory.remember(_plans, key, planned)
    # What has no elements has no address either; nobody reads there.
    addresses = [t.data_ptr() or memory.VECTOR for t in tensors]
    missing = POINTERS[library] - 1 - len(addresses)
    error = memory.run(planned, *addresses, *[0] * missing)
    if error:
        _native.fail(error)


def _check(target: torch.Tensor, is_wrong: torch.Tensor, total: int, ignore_index: int) -> None:
    """Refuses what is no class.

    Raises:
        TargetError: On all ranks, if a target is neither a class nor ignored.
    """
    if is_wrong.any():
        where = tuple(is_wrong.nonzero()[0].tolist())
        raise TargetError(
            f"target{list(where)} is {int(target[where])}, which is neither a class from 0 to {total - 1} of all "
            f"shards nor ignore_index {ignore_index}"
        )
