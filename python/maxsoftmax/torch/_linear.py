"""Cross entropy of logits that a matrix product makes, without the logits of all rows.

Products are torch's (`products`), all else is done by the kernels. Rows are taken in chunks, whose logits are
overwritten by their gradient. Where the loss is one number its gradients are computed along with it, but for a factor;
where there is one loss a row, logits are made again once the gradients of losses are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from maxsoftmax.torch import _direct_losses as direct_losses
from maxsoftmax.torch import _direct_tokens as direct_tokens
from maxsoftmax.torch._arguments import check_device, check_tensor, spelled
from maxsoftmax.torch._direct_losses import TargetError, wide
from maxsoftmax.torch._first_order import without_second
from maxsoftmax.torch._modes import is_watched
from maxsoftmax.torch._products import Products

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
    z_loss: float
    chunk: int | None
    dtype: torch.dtype
    """Of the products."""


def check(hidden: Any, weight: Any, target: Any, bias: Any) -> None:
    """Refuses tensors that do not fit.

    Raises:
        TypeError: If one is no tensor, or of another dtype than it has to be.
        ValueError: If shapes or devices do not fit.
    """
    check_matrices(hidden, weight, bias)
    check_integers(target, "target", hidden)
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target has shape {tuple(target.shape)}, but hidden of {tuple(hidden.shape)} needs "
            f"{tuple(hidden.shape[:-1])}"
        )


def check_matrices(hidden: Any, weight: Any, bias: Any) -> None:
    """Refuses what logits cannot be made of.

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


def check_integers(chosen: Any, name: str, hidden: torch.Tensor) -> None:
    """Refuses what are no classes, or no tokens.

    Raises:
        TypeError: If they are no tensor of integers.
        ValueError: If they are elsewhere.
    """
    if not isinstance(chosen, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not a {type(chosen).__name__}")
    if chosen.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} has dtype {spelled(chosen.dtype)}, but classes are int64 or int32")
    check_device(chosen, name, hidden, "hidden")


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
    losses = torch.zeros(len(rows), dtype=wide(options.dtype), device=hidden.device)
    some = None if count == len(rows) else kept
    how = options.dtype, options.softcap, options.chunk
    products = Products(rows, weight, bias, some, *how, wanted, scale)
    of_losses = None if upstream is None else upstream.reshape(-1)
    for places in products.places():
        given = None if of_losses is None else of_losses[places].to(options.dtype)
        losses[places] = _of_chunk(products, places, classes[places], given, options, any(wanted))
    loss = losses.view(target.shape)
    if options.reduction != "none":
        # Of no loss at all the mean is NaN, as of no number.
        loss = losses.sum() / count if options.reduction == "mean" else losses.sum()
    dhidden, dweight, dbias = products.gradients()
    return loss, None if dhidden is None else dhidden.view(hidden.shape), dweight, dbias


def _of_chunk(  # noqa: PLR0917
    products: Products,
    places: slice | torch.Tensor,
    classes: torch.Tensor,
    upstream: torch.Tensor | None,
    options: Options,
    wanted: bool,
) -> torch.Tensor:
    """Returns the losses of a chunk; adds its gradients, if any are wanted."""
    taken = products.rows(places)
    logits = products.logits(taken)
    if (
        wanted
        and logits.is_cuda
        and upstream is None
        and not (options.label_smoothing or options.softcap or options.z_loss)
    ):
        losses = _overwritten(logits, classes, options.ignore_index)
        products.add(places, taken, logits)
        return losses
    log_probs, _, sums = direct_tokens.token_log_probs(logits, classes, 1, 1.0, False)
    pairs = sums[:, :2].contiguous()
    losses = _smoothed(log_probs.neg_(), pairs, logits, options.label_smoothing)
    if options.z_loss:
        logsumexp = pairs[:, 0] + pairs[:, 1].log()
        losses = losses + options.z_loss * logsumexp.square()
        # The gradient of the term is that of the loss's probabilities, times this.
        pairs[:, 1] /= 1 + 2 * options.z_loss * logsumexp
    if wanted:
        of_rows = torch.ones_like(classes, dtype=logits.dtype) if upstream is None else upstream
        choices = options.ignore_index, options.label_smoothing, "none"

        def backward(part: slice) -> torch.Tensor:
            x = logits[part]
            return direct_losses.cross_entropy_backward(x, classes[part], pairs[part], of_rows[part], *choices, x)

        products.overwritten(logits, backward)
        products.add(places, taken, logits)
    return losses


def _overwritten(logits: torch.Tensor, classes: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Overwrites logits by the gradients of losses, which it returns, in one read and one write."""
    n = logits.shape[1]
    is_class = (classes >= 0) & (classes < n)
    chosen = logits.gather(1, classes.clamp(0, n - 1).long()[:, None])[:, 0]
    m, d = direct_losses.overwrite(logits, classes.contiguous(), ignore_index).unbind(1)
    return torch.where(is_class, m - chosen + d.log(), torch.nan)


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
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        """Hands the gradients on, which are nobody else's; makes them anew where they are wanted again."""
        hidden, weight, bias, target = ctx.saved_tensors
        arguments, wanted = (hidden, weight, target, bias), ctx.needs_input_grad[:3]
        each = ctx.options.reduction == "none"
        found, ctx.found = None if each else ctx.found, None
        if found is None:
            found = computed(*arguments, dloss if each else None, ctx.options, wanted)[1:]
        # The host waits: times a tensor would be rounded to the gradients' dtype, and take 2 ms where one waits 0.05.
        factor = 1 if each else dloss.item()
        if factor != 1:
            for gradient in found:
                if gradient is not None:
                    gradient.mul_(factor)
        return *without_second("linear_cross_entropy", found, (hidden, weight, bias)), None, None
