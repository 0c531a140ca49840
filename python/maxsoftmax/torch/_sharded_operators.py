"""The functions of `sharded` as operators of torch.library, with gradients: torch.compile takes them without a break.

A process group is there by its name. A step of the exchange is inside its operator, so that all ranks that run the same
graph exchange in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from maxsoftmax.torch import _sharded as sharded
from maxsoftmax.torch._direct_losses import wide
from maxsoftmax.torch._exchange import named

_library = torch.library.Library("maxsoftmax", "FRAGMENT")
_operators = torch.ops.maxsoftmax


def _named(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that takes the name of its group, the last argument."""

    def computed(*given: Any) -> Any:
        *rest, name = given
        return compute(*rest, named(name))

    return computed


def _cross_entropy(*given: Any) -> tuple[torch.Tensor, ...]:
    *found, classes = sharded.cross_entropy(*given)
    # The host has it.
    return *found, torch.tensor(classes)


def _cross_entropy_backward(  # noqa: PLR0917 (as torch passes them)
    x: torch.Tensor,
    pairs: torch.Tensor,
    own: torch.Tensor,
    dloss: torch.Tensor,
    classes: torch.Tensor,
    label_smoothing: float,
    reduction: str,
) -> torch.Tensor:
    return sharded.cross_entropy_backward(x, pairs, own, dloss, int(classes), label_smoothing, reduction)


def _like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x if sharded.is_laid(x) else x.contiguous())


def _like_logsumexp(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = x.shape[0], *x.shape[2:]
    return x.new_empty(shape), x.new_empty((*shape, 2), dtype=wide(x.dtype))


def _like_cross_entropy(  # noqa: PLR0917 (as torch passes them)
    x: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    lengths: Sequence[int] | None,
    name: str,
) -> tuple[torch.Tensor, ...]:
    loss = x.new_empty(target.shape if reduction == "none" else ())
    pairs = x.new_empty(2 * target.numel() + 1, dtype=wide(x.dtype))
    own = torch.empty(target.shape, dtype=torch.int64, device=x.device)
    return loss, pairs, own, torch.empty((), dtype=torch.int64, device="cpu")


def _keep_softmax(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.choices = inputs[1:]


def _of_softmax(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    (y,) = ctx.saved_tensors
    return _operators.sharded_softmax_backward.default(y, dy, *ctx.choices), None, None


def _keep_logsumexp(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[0], output[1])


def _of_logsumexp(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[Any, ...]:
    x, pairs = ctx.saved_tensors
    return _operators.sharded_logsumexp_backward.default(x, pairs, dy), None


def _keep_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(inputs[0], *output[1:])
    ctx.choices = inputs[3:5]


def _of_cross_entropy(ctx: Any, dloss: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    x, pairs, own, classes = ctx.saved_tensors
    dx = _operators.sharded_cross_entropy_backward.default(x, pairs, own, dloss, classes, *ctx.choices)
    return dx, *[None] * 6


def _of_gradient(ctx: Any, *_: Any) -> Any:
    raise RuntimeError("gradients of rows that are split over processes are of the first order: they have none")


def _define(
    schema: str, compute: Callable[..., Any], like: Callable[..., Any], gradient: Any, keep: Any = None
) -> None:
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    for key in ("CPU", "CUDA"):
        _library.impl(name, compute, key)
    torch.library.register_fake(f"maxsoftmax::{name}", like, lib=_library)
    torch.library.register_autograd(f"maxsoftmax::{name}", gradient, setup_context=keep, lib=_library)


_CHOICES = "float label_smoothing, str reduction"
_define(
    "sharded_softmax(Tensor x, bool log, str group) -> Tensor",
    _named(sharded.softmax),
    _like,
    _of_softmax,
    _keep_softmax,
)
_define(
    "sharded_softmax_backward(Tensor y, Tensor dy, bool log, str group) -> Tensor",
    _named(sharded.softmax_backward),
    _like,
    _of_gradient,
)
_define(
    "sharded_logsumexp(Tensor x, str group) -> (Tensor, Tensor)",
    _named(sharded.logsumexp),
    _like_logsumexp,
    _of_logsumexp,
    _keep_logsumexp,
)
_define(
    "sharded_logsumexp_backward(Tensor x, Tensor pairs, Tensor dy) -> Tensor",
    sharded.logsumexp_backward,
    _like,
    _of_gradient,
)
_define(
    f"sharded_cross_entropy(Tensor x, Tensor target, int ignore_index, {_CHOICES}, int[]? lengths, str group) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _named(_cross_entropy),
    _like_cross_entropy,
    _of_cross_entropy,
    _keep_cross_entropy,
)
_define(
    "sharded_cross_entropy_backward(Tensor x, Tensor pairs, Tensor own, Tensor dloss, Tensor classes, "
    f"{_CHOICES}) -> Tensor",
    _cross_entropy_backward,
    _like,
    _of_gradient,
)
