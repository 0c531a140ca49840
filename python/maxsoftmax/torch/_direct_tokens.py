"""The logarithms of tokens' probabilities and their gradient, from memory to the kernel, as `direct` runs softmax.

Tensors of one element a row, or of some, lie in the order in which the kernels count the rows of the logits.
"""

from __future__ import annotations

from typing import Any

import torch

from maxsoftmax import _native
from maxsoftmax.torch import _layouts as layouts
from maxsoftmax.torch import _memory as memory
from maxsoftmax.torch._arguments import check_result, check_tensor, check_tokens
from maxsoftmax.torch._direct_losses import wide
from maxsoftmax.torch._memory import dense, like, placed, plan, remember, run

Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The logarithms, the entropies (of no elements where they are not wanted), and what the gradient needs."""

_forward = memory.table()
_backward = memory.table()


def token_log_probs(x: torch.Tensor, tokens: torch.Tensor, dim: int, temperature: float, entropy: bool) -> Sums:
    """Returns the logarithms, the entropies, and (m, d, entropy) of all rows, of shape (…, 3)."""
    key = _key(dim, temperature, entropy, x, tokens)
    found = _forward.get(key)
    try:
        source = x.data_ptr()
    except RuntimeError:
        # As in `direct`.
        computed: Sums = torch.ops.maxsoftmax.token_log_probs(x, tokens, dim, temperature, entropy)
        return computed
    if found is None or not source or x.is_neg():
        return _first(x, tokens, dim, temperature, entropy)
    planned, results = found
    made = _made(results, x)
    log_probs, entropies, sums = made
    told = log_probs.data_ptr(), entropies.data_ptr() if entropy else 0, sums.data_ptr(), source, tokens.data_ptr()
    error = run(planned, *told)
    if error:
        _native.fail(error)
    return made


def token_log_probs_backward(  # noqa: PLR0917 (as torch passes them)
    x: torch.Tensor,
    tokens: torch.Tensor,
    sums: torch.Tensor,
    dlog_probs: torch.Tensor,
    dentropy: torch.Tensor,
    dim: int,
    temperature: float,
    entropy: bool,
    dx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the gradient of the logits, in `dx` if that is given, which lies as `x` does."""
    choices = dim, temperature, entropy
    key = _key(*choices, x, tokens, sums, dlog_probs, dentropy)
    planned = _backward.get(key)
    try:
        source, upstream = x.data_ptr(), dlog_probs.data_ptr()
        of_entropy = dentropy.data_ptr() if entropy else 0
    except RuntimeError:
        # As in `direct`.
        return torch.ops.maxsoftmax.token_log_probs_backward(x, tokens, sums, dlog_probs, dentropy, *choices)
    if planned is None or not source or x.is_neg() or dlog_probs.is_neg() or dentropy.is_neg():
        return _first_gradient(x, tokens, sums, dlog_probs, dentropy, choices, dx)
    if dx is None:
        dx = like(x) if source & 15 else planned[4](x)
    told = dx.data_ptr(), source, sums.data_ptr(), tokens.data_ptr(), upstream, of_entropy
    error = run(planned, *told)
    if error:
        _native.fail(error)
    return dx


def empty_results(x: torch.Tensor, tokens: torch.Tensor, dim: int, entropy: bool) -> Sums:
    """Returns uninitialized results."""
    return _made(_results(x, tokens, dim, entropy), x)


def _key(dim: int, temperature: float, entropy: bool, *tensors: torch.Tensor) -> tuple[Any, ...]:
    """Returns what a plan depends on."""
    return (dim, temperature, entropy, *[(t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def _results(x: torch.Tensor, tokens: torch.Tensor, dim: int, entropy: bool) -> tuple[Any, ...]:
    """Returns shapes and strides of the logarithms, the entropies and the sums."""
    place = dim % x.ndim
    dims = layouts.order(x.shape, x.stride()) or list(range(x.ndim))
    rows = x.shape[:place] + x.shape[place + 1 :]
    strides = layouts.strides_of_rows(x.shape, dims, place)
    of_tokens = strides
    if tokens.ndim == x.ndim:
        # Those of a row are neighbours.
        each = [step * tokens.shape[place] for step in strides]
        of_tokens = (*each[:place], 1, *each[place:])
    of_sums = tuple(3 * step for step in strides)
    entropies = (rows, strides) if entropy else ((0,), (1,))
    return (tokens.shape, of_tokens), entropies, ((*rows, 3), (*of_sums, 1))


def _made(results: tuple[Any, ...], x: torch.Tensor) -> Sums:
    dtype, device = wide(x.dtype), x.device
    first, second, third = (torch.empty_strided(*how, dtype=dtype, device=device) for how in results)
    return first, second, third


def _options(x: torch.Tensor, tokens: torch.Tensor, place: int, temperature: float) -> tuple[int, ...]:
    """Returns what the kernels are told beside tensors."""
    each = tokens.shape[place] if tokens.ndim == x.ndim else 1
    return each, int(tokens.dtype is torch.int64), _native.bits(temperature)


def _first(x: torch.Tensor, tokens: torch.Tensor, dim: int, temperature: float, entropy: bool) -> Sums:
    check_tensor(x)
    check_tokens(tokens, x, dim)
    if x.is_meta:
        return empty_results(x, tokens, dim, entropy)
    if not x.numel():
        # Without tokens there are no probabilities, and without rows there is nothing.
        made = empty_results(x, tokens, dim, entropy)
        for result in made:
            result.fill_(float("nan"))
        return made
    x, dims = dense(x)
    results = _results(x, tokens, dim, entropy)
    tokens = placed(tokens, results[0][1])
    key = _key(dim, temperature, entropy, x, tokens)
    if key not in _forward:
        place = dim % x.ndim
        rows = layouts.rows(x.shape, dims, place)
        remember(_forward, key, (plan("token_log_probs", x, rows, _options(x, tokens, place, temperature)), results))
    return token_log_probs(x, tokens, dim, temperature, entropy)


def _first_gradient(  # noqa: PLR0917 (as torch passes them)
    x: torch.Tensor,
    tokens: torch.Tensor,
    sums: torch.Tensor,
    dlog_probs: torch.Tensor,
    dentropy: torch.Tensor,
    choices: tuple[int, float, bool],
    dx: torch.Tensor | None,
) -> torch.Tensor:
    dim, temperature, entropy = choices
    check_tensor(x)
    check_tokens(tokens, x, dim)
    if not x.numel() or x.is_meta:
        return torch.empty_like(x) if dx is None else dx
    x, dims = dense(x)
    place = dim % x.ndim
    of_tokens, of_rows, of_sums = _results(x, tokens, dim, entropy)
    dtype = wide(x.dtype)
    check_result(sums, "sums", x, of_sums[0], dtype)
    check_result(dlog_probs, "dlog_probs", x, tuple(of_tokens[0]), dtype)
    check_result(dentropy, "dentropy", x, tuple(of_rows[0]), dtype)
    tokens, sums = placed(tokens, of_tokens[1]), placed(sums, of_sums[1])
    dlog_probs, dentropy = placed(dlog_probs, of_tokens[1]), placed(dentropy, of_rows[1])
    key = _key(*choices, x, tokens, sums, dlog_probs, dentropy)
    if key not in _backward:
        rows, told = layouts.rows(x.shape, dims, place), _options(x, tokens, place, temperature)
        remember(_backward, key, plan("token_log_probs_backward", x, rows, told))
    return token_log_probs_backward(x, tokens, sums, dlog_probs, dentropy, *choices, dx)
