"""Softmax, its relatives and cross entropy of a shard of rows, with gradients.

Logits are (rows, n, …), with the shard's n classes along dimension 1, and what there is one of for each row is
(rows, …). Pairs (m, d) of whole rows are merged from those of all shards. A kernel makes gradients of losses from
logits and such pairs; without a target these are probabilities, so that the second pass of softmax is one read and one
write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from maxsoftmax import _native
from maxsoftmax.torch import direct_losses, layouts, memory
from maxsoftmax.torch.direct_losses import TargetError, wide
from maxsoftmax.torch.exchange import Group, Numbers, Sender, gathered, in_order, merged

IGNORED, WRONG = -1, -2
"""What a row's class is among those of a shard, if the row does not count, or its target is no class."""

MEMORY = {"cpu": 16 << 20, "cuda": 128 << 20}
"""Bytes of accumulators that a piece of a shard has, where torch's own functions compute it."""

_plans = memory.table()


class Options(NamedTuple):
    """What a caller chose of a loss, checked."""

    ignore_index: int
    label_smoothing: float
    reduction: str


def max_sum(x: torch.Tensor) -> torch.Tensor:
    """Returns the pairs (m, d) of the rows of a shard, (…, 2); (-inf, 0) without classes."""
    if not x.numel():
        pairs = x.new_zeros((x.shape[0], *x.shape[2:], 2), dtype=wide(x.dtype))
        pairs[..., 0] = -math.inf
        return pairs
    x, dims = memory.dense(x)
    key = (x.shape, x.stride(), x.dtype, x.device)
    planned = _plans.get(key)
    if planned is None:
        planned = memory.plan("statistics", x, layouts.rows(x.shape, dims, 1), (0,))
        memory.remember(_plans, key, planned)
    pairs = direct_losses.empty_losses(x, "mean")[1]
    error = memory.run(planned, pairs.data_ptr(), x.data_ptr())
    if error:
        _native.fail(error)
    return pairs


def _longest(x: torch.Tensor) -> int:
    """Returns the longest dimension of the rows of a shard."""
    return max((dim for dim in range(x.ndim) if dim != 1), key=lambda dim: x.shape[dim])


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Returns a shard, and tensors of as many rows, in pieces of whole rows, along the longest dimension of rows."""
    x = tensors[0]
    dim = _longest(x)
    count = math.ceil(x.numel() * wide(x.dtype).itemsize / MEMORY[x.device.type])
    step = math.ceil(x.shape[dim] / max(count, 1))
    return zip(*(t.split(max(step, 1), dim) for t in tensors), strict=True)


def _distances(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pairs of the rows of a shard, and Σ (m - x) of each, in the dtype of pairs.

    The loss that is spread evenly over all classes is the mean of m - x and ln d. A loss has the dtype of its logits,
    so those of 16 bits are converted.
    """
    if not x.numel():
        pairs = max_sum(x)
        return pairs, pairs[..., 1].clone()
    pieces = [(x,)] if x.dtype is wide(x.dtype) else _pieces(x)
    losses, pairs = [], []
    for (piece,) in pieces:
        target = torch.zeros(piece.shape[:1] + piece.shape[2:], dtype=torch.int64, device=x.device)
        loss, pair = direct_losses.cross_entropy(piece.to(wide(x.dtype)), target, IGNORED, 1.0, "none")
        losses.append(loss)
        pairs.append(pair)
    dim = max(_longest(x) - 1, 0)
    loss, both = torch.cat(losses, dim), torch.cat(pairs, dim)
    m, d = both.unbind(-1)
    return both, ((loss - d.log()) * x.shape[1]).masked_fill(m == -math.inf, math.inf)


def _whole(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pairs of whole rows, by one collective: m and d, in float64."""
    every = gathered(max_sum(x), group)
    return merged(every[..., 0], every[..., 1])


def _pairs(m: torch.Tensor, d: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns pairs as the kernels take them."""
    return torch.stack((m, d), -1).to(wide(x.dtype))


def _gradient(  # noqa: PLR0917
    x: torch.Tensor,
    pairs: torch.Tensor,
    place: torch.Tensor,
    is_here: torch.Tensor,
    dloss: torch.Tensor,
    even: float,
    rest: float,
    reduction: str,
) -> torch.Tensor:
    """Returns (p - even - rest where the target is) · dloss, over the number of rows that count if that is a mean.

    Args:
        x: Logits of the shard.
        pairs: The pairs of whole rows.
        place: The class of each row among those of the shard: any if it is elsewhere, or `IGNORED` or `WRONG`.
        is_here: Whether the class is in the shard.
        dloss: The gradient of each row's loss, or of all.
        even: The share of the target that every class has.
        rest: What the target has beside.
        reduction: What became of the losses.
    """
    if not x.numel():
        return torch.empty_like(x)
    # The kernel takes the rest for 1 less all even shares, which are those of the shard, and knows no class elsewhere:
    # one element a row is computed here.
    choices = IGNORED, min(even * x.shape[1], 1.0), reduction
    dx = direct_losses.cross_entropy_backward(x, place, pairs, dloss, *choices)
    index = place.clamp(min=0).unsqueeze(1)
    m, d = pairs.double().unbind(-1)
    p = (x.gather(1, index).squeeze(1).double() - m).exp() / d
    scale = dloss.double()
    if reduction == "mean":
        scale = scale / (place != IGNORED).sum()
    exact = (p - even - rest * is_here.double()) * scale
    exact = exact.masked_fill(place == WRONG, math.nan).masked_fill(place == IGNORED, 0)
    return dx.scatter_(1, index, exact.to(x.dtype).unsqueeze(1))


def _probabilities(x: torch.Tensor, pairs: torch.Tensor, dloss: torch.Tensor, reduction: str) -> torch.Tensor:
    """Returns p · dloss, with one `dloss` a row or one for all."""
    place = torch.zeros(pairs.shape[:-1], dtype=torch.int64, device=x.device)
    return _gradient(x, pairs, place, torch.zeros_like(place, dtype=torch.bool), dloss, 0.0, 0.0, reduction)


def _sums(terms: Iterator[torch.Tensor], x: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns the sums over whole rows, given those of the pieces of a shard, by one collective: (rows, 1, …)."""
    return in_order(gathered(torch.cat(list(terms), _longest(x)), group))


class Softmax(torch.autograd.Function):  # type: ignore[misc]
    """Softmax of a shard, with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Keeps its result."""
        y = _probabilities(x, _pairs(*_whole(x, group), x), x.new_ones(()), "sum")
        ctx.save_for_backward(y)
        ctx.group = group
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Returns y · (dy - Σ y·dy)."""
        (y,) = ctx.saved_tensors
        kind = wide(y.dtype)
        total = _sums(((a.to(kind) * b).sum(1, keepdim=True) for a, b in _pieces(y, dy)), y, ctx.group)
        dx = torch.empty_like(y)
        for out, a, b, sums in _pieces(dx, y, dy, total):
            torch.mul(torch.sub(b, sums), a, out=out)
        return dx, None


class LogSoftmax(torch.autograd.Function):  # type: ignore[misc]
    """The logarithm of softmax of a shard, with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Keeps its result, (x - m) - ln d."""
        m, d = _whole(x, group)
        kind = wide(x.dtype)
        y = memory.fresh_like(x)
        for out, a, top, rest in _pieces(y, x, m.to(kind).unsqueeze(1), d.log().to(kind).unsqueeze(1)):
            torch.sub(torch.sub(a, top), rest, out=out)
        ctx.save_for_backward(y)
        ctx.group = group
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Returns dy - e^y · Σ dy."""
        (y,) = ctx.saved_tensors
        kind = wide(y.dtype)
        total = _sums((b.to(kind).sum(1, keepdim=True) for _, b in _pieces(y, dy)), y, ctx.group)
        dx = torch.empty_like(y)
        for out, a, b, sums in _pieces(dx, y, dy, total):
            torch.sub(b, a.to(kind).exp() * sums, out=out)
        return dx, None


class LogSumExp(torch.autograd.Function):  # type: ignore[misc]
    """ln Σ exp of whole rows, with the gradient of a shard."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Keeps the pairs."""
        m, d = _whole(x, group)
        ctx.save_for_backward(x, _pairs(m, d, x))
        # Where m is infinite, d says nothing of it, but for NaN beside -inf only.
        says_nothing = (m == math.inf) | ((m == -math.inf) & (d == 0))
        return torch.where(says_nothing, m, m + d.log()).to(x.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Returns p · dy."""
        x, pairs = ctx.saved_tensors
        return _probabilities(x, pairs, dy, "none"), None


class CrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """Cross entropy of whole rows, with the gradient of a shard."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, x: torch.Tensor, target: torch.Tensor, options: Options, group: Group, lengths: Any
    ) -> torch.Tensor:
        """Keeps logits, pairs of whole rows and what is wanted of the shard."""
        target = target.long()
        counts = target != options.ignore_index
        numbers = _numbers(x, target, options, group, lengths)
        total = sum(numbers.lengths)
        is_wrong = counts & ((target < 0) | (target >= total))
        if x.device.type == "cpu":
            _check(target, is_wrong, total, options.ignore_index)
        m, d = merged(numbers.rows[:, 0], numbers.rows[:, 1])
        losses = _losses(numbers, m, d, options.label_smoothing)
        losses = losses.masked_fill(is_wrong, math.nan).masked_fill(~counts, 0)
        place = target - numbers.start
        is_here = counts & (place >= 0) & (place < x.shape[1])
        place = (place * is_here).masked_fill(is_wrong, WRONG).masked_fill(~counts, IGNORED)
        ctx.save_for_backward(x, _pairs(m, d, x), place, is_here)
        ctx.options, ctx.total = options, total
        if options.reduction == "mean":
            losses = losses.sum() / counts.sum()
        elif options.reduction == "sum":
            losses = losses.sum()
        return losses.to(x.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        """Returns (p - wanted) · dloss of the shard: nothing is told to other ranks."""
        x, pairs, place, is_here = ctx.saved_tensors
        share = ctx.options.label_smoothing
        even = share / max(ctx.total, 1)
        dx = _gradient(x, pairs, place, is_here, dloss, even, 1 - share, ctx.options.reduction)
        return dx, None, None, None, None


def _numbers(x: torch.Tensor, target: torch.Tensor, options: Options, group: Group, lengths: Any) -> Numbers:
    """Returns what all ranks know of all rows: m, d, the target's logit or 0, and with smoothing Σ (m - x)."""
    n, smoothed = x.shape[1], bool(options.label_smoothing)
    pairs, *sums = _distances(x) if smoothed else (max_sum(x),)
    sender = Sender(pairs[..., 0], n, 4 if smoothed else 3, group, lengths, (str(x.dtype), *options))
    sender.rows[:2] = pairs.movedim(-1, 0)
    sender.rows[3:] = sums[0] if smoothed else 0
    found = None
    while found is None:
        place = target - sender.start
        is_here = (target != options.ignore_index) & (place >= 0) & (place < n)
        logits = x.gather(1, (place * is_here).unsqueeze(1)).squeeze(1) if n else pairs[..., 1]
        sender.rows[2] = logits.to(pairs.dtype).masked_fill(~is_here, 0)
        found = sender.exchange()
    return found


def _losses(numbers: Numbers, m: torch.Tensor, d: torch.Tensor, share: float) -> torch.Tensor:
    """Returns -ln p of the targets, of which the mean over all classes replaces a share, in float64."""
    losses = m - in_order(numbers.rows[:, 2].double())
    if share:
        below = torch.zeros_like(m)
        for n, rows in zip(numbers.lengths, numbers.rows.double(), strict=True):
            if n:
                below = below + (rows[3] + n * (m - rows[0]))
        below = below * (share / max(sum(numbers.lengths), 1))
        # Nothing times infinity is not wanted here.
        losses = below if share == 1 else losses * (1 - share) + below
    return losses + d.log()


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
