"""The logarithms of tokens' probabilities, of logits that a matrix product makes, without the logits of all rows.

As in `linear`, rows are taken in chunks. The logits are made again once gradients are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from maxsoftmax._arguments import words
from maxsoftmax.torch import _direct_tokens as direct_tokens
from maxsoftmax.torch._direct_losses import wide
from maxsoftmax.torch._first_order import without_second
from maxsoftmax.torch._linear import NOTHING, check_integers, check_matrices
from maxsoftmax.torch._modes import is_watched
from maxsoftmax.torch._products import Products

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""The logarithms, the entropies (of no elements where they are not wanted), and the gradients that are wanted."""


class Options(NamedTuple):
    """What a caller chose, checked."""

    temperature: float
    entropy: bool
    softcap: float | None
    chunk: int | None
    dtype: torch.dtype
    """Of the products."""


def check(hidden: Any, weight: Any, tokens: Any, bias: Any) -> None:
    """Refuses tensors that do not fit.

    Raises:
        TypeError: If one is no tensor, or of another dtype than it has to be.
        ValueError: If shapes or devices do not fit.
    """
    check_matrices(hidden, weight, bias)
    check_integers(tokens, "tokens", hidden)
    rows = tuple(hidden.shape[:-1])
    if tuple(tokens.shape) != rows and tuple(tokens.shape[:-1]) != rows:
        raise ValueError(
            f"tokens has shape {tuple(tokens.shape)}, but hidden of {tuple(hidden.shape)} needs {rows}, or "
            f"{words((*rows, 'k'))} for k a row"
        )


def linear_token_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor | None, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logarithms and the entropies, with a gradient."""
    if is_watched():
        operator = torch.ops.maxsoftmax.linear_token_log_probs.default
        log_probs, entropies, *_ = operator(hidden, weight, tokens, bias, None, None, *options, NOTHING)
        return log_probs, entropies
    found: tuple[torch.Tensor, torch.Tensor] = _LinearTokenLogProbs.apply(hidden, weight, bias, tokens, options)
    return found


def computed(  # noqa: PLR0917 (as the operator has them)
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    bias: torch.Tensor | None,
    dlog_probs: torch.Tensor | None,
    dentropy: torch.Tensor | None,
    options: Options,
    wanted: Sequence[bool],
) -> Found:
    """Returns the logarithms and the entropies, or gradients.

    Args:
        hidden: (…, features).
        weight: (n, features).
        tokens: (…), or (…, k).
        bias: (n,), or None.
        dlog_probs: The gradients of the logarithms, if gradients are wanted.
        dentropy: Those of the entropies, if there are any.
        options: What a caller chose.
        wanted: Of which of hidden, weight and bias a gradient is wanted.
    """
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        rows = hidden.reshape(-1, hidden.shape[-1])
        chosen = tokens.reshape(len(rows), *tokens.shape[hidden.ndim - 1 :])
        products = Products(rows, weight, bias, None, options.dtype, options.softcap, options.chunk, wanted, 1.0)
        accum, place = wide(options.dtype), hidden.device
        log_probs = torch.empty(chosen.shape, dtype=accum, device=place)
        entropies = torch.empty(len(rows) if options.entropy else 0, dtype=accum, device=place)
        choices: tuple[int, float, bool] = (1, options.temperature, options.entropy)
        for places in products.places():
            taken, some = products.rows(places), chosen[places]
            logits = products.logits(taken)
            found, of_rows, sums = direct_tokens.token_log_probs(logits, some, *choices)
            log_probs[places] = found
            if options.entropy:
                entropies[places] = of_rows
            if dlog_probs is None or dentropy is None:
                continue
            given = dlog_probs.reshape(chosen.shape)[places]
            of_entropy = dentropy.reshape(-1)[places] if options.entropy else of_rows
            dlogits = direct_tokens.token_log_probs_backward(logits, some, sums, given, of_entropy, *choices)
            if options.softcap is not None:
                dlogits.mul_(products.slope(logits))
            products.add(places, taken, dlogits)
        dhidden, dweight, dbias = products.gradients()
        dhidden = None if dhidden is None else dhidden.view(hidden.shape)
        shape = hidden.shape[:-1] if options.entropy else (0,)
        return log_probs.view(tokens.shape), entropies.view(shape), dhidden, dweight, dbias


class _LinearTokenLogProbs(torch.autograd.Function):  # type: ignore[misc]
    """The logarithms and the entropies with a gradient, which has none."""

    @staticmethod
    def forward(  # noqa: PLR0917 (as torch passes them)
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps what the logits are made of."""
        ctx.save_for_backward(hidden, weight, bias, tokens)
        ctx.options = options
        return computed(hidden, weight, tokens, bias, None, None, options, NOTHING)[:2]

    @staticmethod
    def backward(ctx: Any, dlog_probs: torch.Tensor, dentropy: torch.Tensor) -> tuple[Any, ...]:
        """Makes the logits again."""
        hidden, weight, bias, tokens = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        found = computed(hidden, weight, tokens, bias, dlog_probs, dentropy, ctx.options, wanted)[2:]
        return *without_second("linear_token_log_probs", found, (hidden, weight, bias)), None, None
