"""Cross entropy of logits that a matrix product makes, without the logits of all rows.

Products are torch's, all else is done by the kernels. Rows are taken in chunks, whose logits lie in memory that the
next chunk uses again, and are overwritten by their gradient there. Where the loss is one number its gradients are
computed along with it, but for a factor; where there is one loss a row, logits are made again once the gradients of
losses are known. The gradients of the weight and the bias are sums over chunks: in float32 or wider, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from maxsoftmax.torch import direct_losses, direct_tokens
from maxsoftmax.torch.arguments import check_device, check_tensor, spelled
from maxsoftmax.torch.direct_losses import TargetError, wide
from maxsoftmax.torch.modes import is_watched

MEMORY = {"cpu": 24 << 20, "cuda": 512 << 20}
"""Bytes of a chunk's logits, unless told otherwise."""

STEP = 128
"""Rows by which a chunk grows: products are made of blocks of so many."""

BLOCK = 8192
"""Rows of the weight's gradient that are computed at a time where a product cannot add to float32 by itself."""

_ADDS = "dtype_out" in torch.ops.aten.addmm.overloads()
"""Whether torch's products of bfloat16 and float16 on a GPU can add to float32."""

NOTHING = (False, False, False)
"""No gradient is wanted."""

Found = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""The loss, and the gradients of hidden, weight and bias, if they are wanted."""


class Options(NamedTuple):
    """What a caller chose, checked."""

    ignore_index: int
    label_smoothing: float
    reduction: str
    softcap: float | None
    chunk: int | None
    dtype: torch.dtype
    """Of the products."""


def check(hidden: Any, weight: Any, target: Any, bias: Any) -> None:
    """Refuses tensors that do not fit.

    Raises:
        TypeError: If one is no tensor, or of another dtype than it has to be.
        ValueError: If shapes or devices do not fit.
    """
    check_tensor(hidden, "hidden")
    check_tensor(weight, "weight")
    if weight.ndim != 2 or not hidden.ndim or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, but hidden of {tuple(hidden.shape)} needs "
            f"(n, {hidden.shape[-1] if hidden.ndim else 'features'}) for n classes"
        )
    check_device(weight, "weight", hidden, "hidden")
    if bias is not None:
        check_tensor(bias, "bias")
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias has shape {tuple(bias.shape)}, but weight of {tuple(weight.shape)} needs one a row")
        check_device(bias, "bias", hidden, "hidden")
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"target must be a torch.Tensor, not a {type(target).__name__}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target has dtype {spelled(target.dtype)}, but classes are int64 or int32")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target has shape {tuple(target.shape)}, but hidden of {tuple(hidden.shape)} needs "
            f"{tuple(hidden.shape[:-1])}"
        )
    check_device(target, "target", hidden, "hidden")


def product_dtype(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype:
    """Returns the dtype of the products: that of all tensors, or what torch.autocast says.

    Raises:
        TypeError: If tensors are of several.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype is not torch.float64:
        low: torch.dtype = torch.get_autocast_dtype(kind)
        return low
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype != hidden.dtype:
            raise TypeError(f"{name} has dtype {spelled(other.dtype)}, but hidden has {spelled(hidden.dtype)}")
    return hidden.dtype


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, options: Options
) -> torch.Tensor:
    """Returns the loss, in float32 or wider, with a gradient."""
    if is_watched():
        grad = torch.is_grad_enabled()
        wanted = [grad and x is not None and x.requires_grad for x in (hidden, weight, bias)]
        found: torch.Tensor = torch.ops.maxsoftmax.linear_cross_entropy.default(
            hidden, weight, target, bias, None, *options, wanted if options.reduction != "none" else NOTHING
        )[0]
        return found
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, target, options)
    return loss


def computed(  # noqa: PLR0917 (as the operator has them)
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    upstream: torch.Tensor | None,
    options: Options,
    wanted: Sequence[bool],
) -> Found:
    """Returns the loss, and gradients.

    Args:
        hidden: (…, features).
        weight: (n, features).
        target: (…).
        bias: (n,), or None.
        upstream: The gradients of losses, one a row where there is no reduction; 1 if None.
        options: What a caller chose.
        wanted: Of which of hidden, weight and bias a gradient is wanted.
    """
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        return _computed(hidden, weight, target, bias, upstream, options, wanted)


def _computed(  # noqa: PLR0917
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    upstream: torch.Tensor | None,
    options: Options,
    wanted: Sequence[bool],
) -> Found:
    rows, classes = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    counts = classes != options.ignore_index
    _check_classes(target, counts.view(target.shape), weight.shape[0])
    # The host has to know how many rows there are to multiply.
    kept = counts.nonzero().squeeze(1)
    count = len(kept)
    scale = 1 / max(count, 1) if options.reduction == "mean" else 1.0
    accum = wide(options.dtype)
    losses = torch.zeros(len(rows), dtype=accum, device=hidden.device)
    matrix, offset = weight.to(options.dtype), None if bias is None else bias.to(options.dtype)
    dhidden = torch.zeros_like(rows) if wanted[0] and count < len(rows) else torch.empty_like(rows)
    sums = _Sums(weight, accum, scale) if wanted[1] else None
    dbias = torch.zeros(weight.shape[0], dtype=accum, device=hidden.device) if wanted[2] else None
    step = min(count, options.chunk or chunk_of(weight, options.dtype))
    room = torch.empty(step * weight.shape[0], dtype=options.dtype, device=hidden.device)
    for places in _chunks(kept, len(rows), step):
        taken, chosen = rows[places].to(options.dtype), classes[places]
        logits = _matrix(room, len(taken), weight.shape[0])
        if offset is None:
            torch.mm(taken, matrix.t(), out=logits)
        else:
            torch.addmm(offset, taken, matrix.t(), out=logits)
        if options.softcap is not None:
            logits.div_(options.softcap).tanh_().mul_(options.softcap)
        log_probs, _, pairs = direct_tokens.token_log_probs(logits, chosen, 1, 1.0, False)
        losses[places] = _smoothed(log_probs.neg_(), pairs, logits, options.label_smoothing)
        if not any(wanted):
            continue
        of_rows = torch.ones_like(chosen, dtype=options.dtype)
        if upstream is not None:
            of_rows = upstream.reshape(-1)[places].to(options.dtype)
        slope = None
        if options.softcap is not None:
            slope = logits.div(options.softcap).square_().neg_().add_(1)
        choices = options.ignore_index, options.label_smoothing, "none"
        dlogits = direct_losses.cross_entropy_backward(
            logits, chosen, pairs[:, :2].contiguous(), of_rows, *choices, logits
        )
        if slope is not None:
            dlogits.mul_(slope)
        if wanted[0]:
            product = torch.empty_like(taken).addmm_(dlogits, matrix, beta=0, alpha=scale)
            dhidden[places] = product.to(hidden.dtype)
        if sums is not None:
            sums.add(dlogits, taken)
        if dbias is not None:
            dbias.add_(dlogits.sum(0, dtype=accum), alpha=scale)
    del room
    loss = losses.view(target.shape)
    if options.reduction != "none":
        # Of no loss at all the mean is NaN, as of no number.
        loss = losses.sum() / count if options.reduction == "mean" else losses.sum()
    return (
        loss,
        dhidden.view(hidden.shape) if wanted[0] else None,
        None if sums is None else sums.rounded(),
        None if dbias is None or bias is None else dbias.to(bias.dtype),
    )


def chunk_of(weight: torch.Tensor, dtype: torch.dtype) -> int:
    """Returns how many rows to take at a time."""
    fit = MEMORY[weight.device.type] // (max(1, weight.shape[0]) * dtype.itemsize)
    return STEP * max(1, int(fit // STEP))


def _matrix(room: torch.Tensor, rows: int, n: int) -> torch.Tensor:
    """Returns memory for a chunk's logits: on a CPU those of a class are neighbours, which its products do faster."""
    some = room[: rows * n]
    return some.view(rows, n) if room.is_cuda else some.view(n, rows).t()


def _chunks(kept: torch.Tensor, rows: int, step: int) -> Iterator[slice | torch.Tensor]:
    """Yields the places of rows that count, so many at a time."""
    for first in range(0, len(kept), max(step, 1)):
        last = min(first + step, len(kept))
        yield slice(first, last) if len(kept) == rows else kept[first:last]


def _check_classes(target: torch.Tensor, counts: torch.Tensor, n: int) -> None:
    """Refuses what is no class, where that can be seen."""
    if target.device.type == "cpu":
        wrong = (counts & ((target < 0) | (target >= n))).nonzero()
        if len(wrong):
            where = tuple(wrong[0].tolist())
            name = f"target{list(where)}" if where else "target"
            raise TargetError(f"{name} is {int(target[where])}, which is neither a class from 0 to {n - 1} nor ignored")


def _smoothed(losses: torch.Tensor, pairs: torch.Tensor, logits: torch.Tensor, share: float) -> torch.Tensor:
    """Returns losses a share of whose targets is spread over all classes."""
    if not share:
        return losses
    mean = pairs[:, 0] + pairs[:, 1].log() - logits.mean(1, dtype=losses.dtype)
    return mean if share == 1 else losses * (1 - share) + mean * share


class _Sums:
    """The gradient of a weight: a sum of products, one a chunk."""

    def __init__(self, weight: torch.Tensor, accum: torch.dtype, scale: float) -> None:
        self._of, self._scale, self._is_empty = weight, scale, True
        self._sum = torch.empty(weight.shape, dtype=accum, device=weight.device)

    def add(self, dlogits: torch.Tensor, taken: torch.Tensor) -> None:
        """Adds the product of a chunk's gradients and its rows."""
        how: dict[str, Any] = {"beta": 0 if self._is_empty else 1, "alpha": self._scale}
        self._is_empty = False
        if dlogits.dtype == self._sum.dtype:
            self._sum.addmm_(dlogits.t(), taken, **how)
        elif dlogits.is_cuda and _ADDS:
            torch.addmm(self._sum, dlogits.t(), taken, out_dtype=self._sum.dtype, **how, out=self._sum)
        else:
            exact = taken.to(self._sum.dtype)
            for first in range(0, len(self._sum), BLOCK):
                block = dlogits[:, first : first + BLOCK].t().to(self._sum.dtype)
                self._sum[first : first + BLOCK].addmm_(block, exact, **how)

    def rounded(self) -> torch.Tensor:
        """Returns the sum in the weight's dtype."""
        return torch.zeros_like(self._of) if self._is_empty else self._sum.to(self._of.dtype)


class _LinearCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """The loss with a gradient, which has none."""

    @staticmethod
    def forward(  # noqa: PLR0917 (as torch passes them)
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        options: Options,
    ) -> torch.Tensor:
        """Computes gradients with the loss, but where there is one a row."""
        wanted = ctx.needs_input_grad[:3] if options.reduction != "none" else NOTHING
        loss, *found = computed(hidden, weight, target, bias, None, options, wanted)
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.options, ctx.found = options, found
        return loss

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        """Hands the gradients on, which are nobody else's; makes them anew where they are wanted again."""
        hidden, weight, bias, target = ctx.saved_tensors
        arguments, wanted = (hidden, weight, target, bias), ctx.needs_input_grad[:3]
        if ctx.options.reduction == "none":
            return *computed(*arguments, dloss, ctx.options, wanted)[1:], None, None
        found, ctx.found = ctx.found, None
        if found is None:
            found = computed(*arguments, None, ctx.options, wanted)[1:]
        # A GPU would have to be waited for.
        if dloss.is_cuda or dloss.item() != 1:
            for gradient in found:
                if gradient is not None:
                    gradient.mul_(dloss)
        return *found, None, None
