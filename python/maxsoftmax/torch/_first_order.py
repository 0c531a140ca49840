"""Gradients that have none themselves: whoever differentiates them is told so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def without_second(
    name: str, gradients: Iterable[torch.Tensor | None], inputs: Iterable[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Returns gradients that refuse to be differentiated.

    torch's `once_differentiable` says nothing where the gradient of the result is a constant, as that of a loss is.

    Args:
        name: The function that they are of.
        gradients: Those of its inputs, None where none is wanted.
        inputs: What they belong to.
    """
    if not torch.is_grad_enabled():
        return list(gradients)
    cause = next(x for x in inputs if x is not None and x.requires_grad)
    return [None if gradient is None else _Refusing.apply(gradient, cause, name) for gradient in gradients]


class _Refusing(torch.autograd.Function):  # type: ignore[misc]
    """A gradient as it is."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, cause: torch.Tensor, name: str) -> torch.Tensor:
        """Says that the gradient depends on the input that is its cause."""
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        """Refuses."""
        raise RuntimeError(f"{ctx.name} has no second derivative")
