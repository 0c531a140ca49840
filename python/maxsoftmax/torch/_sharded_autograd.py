"""Softmax, its relatives and cross entropy of a shard of rows as functions with gradients, of the first order.

Each takes the shortest of three ways, as those of `_autograd` do: to the kernels, through a `torch.autograd.Function`,
or as an operator (`_sharded_operators`), if somebody beside the caller has to see it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import is_grad_enabled as _has_gradients

from maxsoftmax.torch import _sharded as sharded
from maxsoftmax.torch import _sharded_operators  # noqa: F401 (torch knows them from here on)
from maxsoftmax.torch._autograd import applied
from maxsoftmax.torch._exchange import Group, checked_lengths, group_of, place_in
from maxsoftmax.torch._memory import PLAIN
from maxsoftmax.torch._modes import is_watched

_operators = torch.ops.maxsoftmax


def softmax(x: torch.Tensor, log: bool, group: Any) -> torch.Tensor:
    """Returns a shard of softmax of whole rows, or of its logarithm."""
    if type(x) not in PLAIN or is_watched():
        watched: torch.Tensor = _operators.sharded_softmax.default(x, log, place_in(group).name)
        return watched
    if x.requires_grad and _has_gradients():
        return _apply_softmax(x, log, group_of(group))
    return sharded.softmax(x, log, group_of(group))


def logsumexp(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns ln Σ exp of whole rows."""
    if type(x) not in PLAIN or is_watched():
        watched: torch.Tensor = _operators.sharded_logsumexp.default(x, place_in(group).name)[0]
        return watched
    if x.requires_grad and _has_gradients():
        return _apply_logsumexp(x, group_of(group))
    return sharded.logsumexp(x, group_of(group))[0]


def cross_entropy(
    x: torch.Tensor, target: torch.Tensor, choices: tuple[int, float, str], lengths: Any, group: Any
) -> torch.Tensor:
    """Returns the loss of logits and classes.

    Args:
        x: The shard.
        target: The class of each row.
        choices: What is ignored, how much is smoothed, and what becomes of the losses.
        lengths: The classes of each rank, or None.
        group: The group that a caller named.
    """
    if type(x) not in PLAIN or type(target) not in PLAIN or is_watched():
        place = place_in(group)
        told = *choices, checked_lengths(lengths, x.shape[1], place), place.name
        watched: torch.Tensor = _operators.sharded_cross_entropy.default(x, target, *told)[0]
        return watched
    found = group_of(group)
    known = checked_lengths(lengths, x.shape[1], found)
    if x.requires_grad and _has_gradients():
        return _apply_cross_entropy(x, target, *choices, known, found)
    return sharded.cross_entropy(x, target, *choices, known, found)[0]


class _Softmax(torch.autograd.Function):  # type: ignore[misc]
    """Softmax, or its logarithm, with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: bool, group: Group) -> torch.Tensor:
        """Keeps the result."""
        y = sharded.softmax(x, log, group)
        ctx.save_for_backward(y)
        ctx.choices = log, group
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Sends one number a row."""
        (y,), (log, group) = ctx.saved_tensors, ctx.choices
        if _is_seen(dy):
            return _operators.sharded_softmax_backward.default(y, dy, log, group.name), None, None
        return sharded.softmax_backward(y, dy, log, group), None, None


class _LogSumExp(torch.autograd.Function):  # type: ignore[misc]
    """ln Σ exp with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Keeps logits and pairs."""
        sums, pairs = sharded.logsumexp(x, group)
        ctx.save_for_backward(x, pairs)
        return sums

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Sends nothing."""
        given = *ctx.saved_tensors, dy
        if _is_seen(dy):
            return _operators.sharded_logsumexp_backward.default(*given), None
        return sharded.logsumexp_backward(*given), None


class _CrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """Cross entropy with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, target: torch.Tensor, *choices: Any) -> torch.Tensor:
        """Keeps logits, pairs, and the shard's own targets."""
        loss, pairs, own, ctx.classes = sharded.cross_entropy(x, target, *choices)
        ctx.save_for_backward(x, pairs, own)
        ctx.choices = choices[1:3]
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        """Sends nothing."""
        x, pairs, own = ctx.saved_tensors
        if _is_seen(dloss):
            given = x, pairs, own, dloss, torch.tensor(ctx.classes), *ctx.choices
            dx = _operators.sharded_cross_entropy_backward.default(*given)
        else:
            dx = sharded.cross_entropy_backward(x, pairs, own, dloss, ctx.classes, *ctx.choices)
        return dx, *[None] * 7


def _is_seen(gradient: torch.Tensor) -> bool:
    """Returns whether somebody has to see how a gradient is computed: who wants one of it, torch.compile, or a mode."""
    return _has_gradients() or type(gradient) not in PLAIN or is_watched()


_apply_softmax = applied(_Softmax)
_apply_logsumexp = applied(_LogSumExp)
_apply_cross_entropy = applied(_CrossEntropy)
