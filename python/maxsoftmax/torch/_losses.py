"""Cross entropy with everything that `torch.nn.functional.cross_entropy` takes.

The kernels take targets that are classes. Weights of classes multiply what the kernels return for each row. Where
targets are probabilities, and where a share of a weighted target is spread over all classes, the loss is a sum over
the logarithm of softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import _reduction

from maxsoftmax._arguments import check_ignore_index, check_label_smoothing, check_reduction, check_z_loss, class_axis
from maxsoftmax.torch import _autograd as autograd
from maxsoftmax.torch._arguments import check_device, check_result, check_target, check_tensor, spelled
from maxsoftmax.torch._direct_losses import class_dimension, wide
from maxsoftmax.torch._modes import autocast


def cross_entropy(  # noqa: PLR0917 (as torch has them)
    x: Any,
    target: Any,
    weight: Any,
    size_average: bool | None,
    ignore_index: Any,
    reduce: bool | None,
    reduction: Any,
    label_smoothing: Any,
    z_loss: Any,
) -> torch.Tensor:
    """Returns the loss for any arguments, all of them checked."""
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if reduction == "elementwise_mean":
        _reduction.get_enum(reduction)  # which warns
        reduction = "mean"
    check_tensor(x)
    x = autocast(x, ("cpu", "cuda"))
    _check_is_tensor(target, "target")
    choices = check_ignore_index(ignore_index), check_label_smoothing(label_smoothing), check_reduction(reduction)
    class_axis(x.ndim)
    factor = check_z_loss(z_loss)
    if factor and (weight is not None or target.is_floating_point()):
        other = "a target of probabilities" if weight is None else "weight"
        raise ValueError(f"z_loss {z_loss} does not go with {other}: add the term to the loss")
    if weight is not None:
        weight = _checked_weight(weight, x)
    if target.is_floating_point():
        target = autocast(target, ("cpu", "cuda"))
        return _of_probabilities(x, _checked_probabilities(target, x, choices[0]), weight, *choices[1:])
    if target.dtype is torch.uint8:
        target = target.long()
    check_target(target, x)
    if factor:
        return _with_z_loss(x, target, factor, *choices)
    if weight is None:
        return autograd.cross_entropy(x, target, *choices)
    return _weighted(x, target, weight, *choices)


def _with_z_loss(  # noqa: PLR0917
    x: torch.Tensor, target: torch.Tensor, factor: float, ignore_index: int, label_smoothing: float, reduction: str
) -> torch.Tensor:
    """Returns the loss of classes with squares of logsumexp, whose gradient is that of the loss with another d."""
    losses, pairs = autograd.cross_entropy_and_pairs(x, target, ignore_index, label_smoothing)
    counts = target != ignore_index
    # Of m the gradients cancel out.
    logsumexp = pairs[..., 0].detach() + pairs[..., 1].log()
    losses = losses.to(wide(x.dtype)) + torch.where(counts, factor * logsumexp.square(), 0.0)
    return _reduced(losses, counts, reduction).to(x.dtype)


def _weighted(  # noqa: PLR0917
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> torch.Tensor:
    """Returns the loss of classes that count by their weights."""
    losses = autograd.cross_entropy(x, target, ignore_index, 0.0, "none")
    counts = target != ignore_index
    # What is neither a class nor ignored has been refused on a CPU, and is NaN on a GPU.
    n = x.shape[class_dimension(x)]
    classes = target.long().clamp(0, max(n - 1, 0)).masked_fill(~counts, 0)
    weights = torch.where(counts, weight[classes] if n else x.new_zeros(()), x.new_zeros(()))
    losses = torch.where(counts, losses * weights, x.new_zeros(()))
    loss = _reduced(losses, weights, reduction)
    if not label_smoothing:
        return loss
    place = class_dimension(x)
    spread = (autograd.log_softmax(x, place) * _along(weight, x)).sum(place).neg()
    spread = torch.where(counts, spread, x.new_zeros(()))
    return (1 - label_smoothing) * loss + _reduced(spread, weights, reduction) * (label_smoothing / n)


def _reduced(losses: torch.Tensor, weights: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / weights.sum()


def _of_probabilities(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, label_smoothing: float, reduction: str
) -> torch.Tensor:
    """Returns the loss where each row has a probability for each class."""
    place = class_dimension(x)
    n = x.shape[place]
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / n
    terms = autograd.log_softmax(x, place) * target
    if weight is not None:
        terms = terms * _along(weight, x)
    if reduction == "none":
        return -terms.sum(place)
    total = -terms.sum()
    if reduction == "sum":
        return total
    # Of no loss at all the mean is NaN, as of no number.
    return total / (x.numel() / n) if x.numel() else total * float("nan")


def _along(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns weights of classes in the rank of the logits."""
    return weight.reshape(-1, *(1 for _ in range(x.ndim - 1 - class_dimension(x))))


def _check_is_tensor(value: Any, name: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not a {type(value).__name__}")


def _checked_weight(weight: Any, x: torch.Tensor) -> torch.Tensor:
    _check_is_tensor(weight, "weight")
    weight = autocast(weight, ("cpu", "cuda"))
    check_result(weight, "weight", x, (x.shape[class_dimension(x)],), x.dtype)
    return weight


def _checked_probabilities(target: torch.Tensor, x: torch.Tensor, ignore_index: int) -> torch.Tensor:
    if target.shape != x.shape:
        raise ValueError(
            f"target has dtype {spelled(target.dtype)} and shape {tuple(target.shape)}, but probabilities need the "
            f"shape of x, {tuple(x.shape)}, and classes have to be int64, int32 or uint8"
        )
    if ignore_index >= 0:
        raise ValueError(f"ignore_index {ignore_index} has no meaning for a target of probabilities: leave it out")
    check_device(target, "target", x)
    return target
