"""Softmax, its logarithm, sparsemax, cross entropy and their gradients as functions with gradients, of every order.

Each function takes the shortest of three ways: to the kernel, if nobody wants a gradient; through a
`torch.autograd.Function`; or as an operator (`operators`), if somebody beside the caller has to see it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import is_grad_enabled as _has_gradients

from maxsoftmax.torch import _direct as direct
from maxsoftmax.torch import _direct_divergence as direct_divergence
from maxsoftmax.torch import _direct_losses as direct_losses
from maxsoftmax.torch import _direct_tokens as direct_tokens
from maxsoftmax.torch._arguments import check_tensor, dimension
from maxsoftmax.torch._direct_losses import class_dimension
from maxsoftmax.torch._memory import PLAIN
from maxsoftmax.torch._modes import is_forward, is_watched

_operators = torch.ops.maxsoftmax

LEAST = {torch.float16: 6e-8, torch.float64: 1e-200}
"""A gradient that is as good as 0, of a loss whose pairs have one; 1e-30 of other dtypes."""


def _is_dtensor(x: torch.Tensor) -> bool:
    """Returns whether `x` is split over processes, importing nothing: whoever made it has imported what it needs."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def _dtensors() -> Any:
    """Returns the functions for such tensors, which are made of those here."""
    # As a statement, which torch.compile follows.
    from maxsoftmax.torch import _dtensor as dtensor

    return dtensor


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns softmax along a dimension."""
    if type(x) not in PLAIN or is_watched():
        check_tensor(x)
        if _is_dtensor(x):
            return _dtensors().along("softmax", x, dimension(x, dim))
        return torch.softmax(x, dim) if is_forward() else _operators.softmax.default(x, dimension(x, dim))
    if x.requires_grad and _has_gradients():
        return _apply_softmax(x, dim)
    return direct.softmax(x, dim)


def log_softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the logarithm of softmax along a dimension."""
    if type(x) not in PLAIN or is_watched():
        check_tensor(x)
        if _is_dtensor(x):
            return _dtensors().along("log_softmax", x, dimension(x, dim))
        return torch.log_softmax(x, dim) if is_forward() else _operators.log_softmax.default(x, dimension(x, dim))
    if x.requires_grad and _has_gradients():
        return _apply_log_softmax(x, dim)
    return direct.log_softmax(x, dim)


def sparsemax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns sparsemax along a dimension."""
    if type(x) not in PLAIN or is_watched():
        check_tensor(x)
        place = dimension(x, dim)
        return sparsemax_by_torch(x, place) if is_forward() else _operators.sparsemax.default(x, place)
    if x.requires_grad and _has_gradients():
        return _apply_sparsemax(x, dim)
    return direct.sparsemax(x, dim)


def sparsemax_by_torch(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns sparsemax by functions of torch, which have derivatives that are computed forward: by sorting."""
    if not x.numel() or not x.ndim:
        return x * 0 + 1
    wide = x if x.dtype is torch.float64 else x.float()
    z = wide - wide.amax(dim, keepdim=True)
    ordered = z.sort(dim, descending=True).values
    sums = ordered.cumsum(dim) - 1
    counts = torch.ones_like(ordered).cumsum(dim)
    found = (ordered * counts > sums).sum(dim, keepdim=True).clamp(min=1)
    return (z - sums.gather(dim, found - 1) / found).clamp(min=0).to(x.dtype)


def softmax_backward(y: torch.Tensor, dy: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the gradient of logits, given softmax and its gradient."""
    if type(y) not in PLAIN or type(dy) not in PLAIN or is_watched():
        return _operators.softmax_backward.default(y, dy, dim)
    if _has_gradients() and (y.requires_grad or dy.requires_grad):
        return _apply_softmax_backward(y, dy, dim)
    return direct.softmax_backward(y, dy, dim)


def log_softmax_backward(y: torch.Tensor, dy: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the gradient of logits, given the logarithm of softmax and its gradient."""
    if type(y) not in PLAIN or type(dy) not in PLAIN or is_watched():
        return _operators.log_softmax_backward.default(y, dy, dim)
    if _has_gradients() and (y.requires_grad or dy.requires_grad):
        return _apply_log_softmax_backward(y, dy, dim)
    return direct.log_softmax_backward(y, dy, dim)


def sparsemax_backward(y: torch.Tensor, dy: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the gradient of logits, given sparsemax and its gradient."""
    if type(y) not in PLAIN or type(dy) not in PLAIN or is_watched():
        return _operators.sparsemax_backward.default(y, dy, dim)
    if _has_gradients() and (y.requires_grad or dy.requires_grad):
        return _apply_sparsemax_backward(y, dy, dim)
    return direct.sparsemax_backward(y, dy, dim)


def cross_entropy(
    x: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> torch.Tensor:
    """Returns the loss of logits and classes."""
    if type(x) not in PLAIN or type(target) not in PLAIN or is_watched():
        check_tensor(x)
        if _is_dtensor(x):
            return _dtensors().cross_entropy(x, target, ignore_index, label_smoothing, reduction)
        if is_forward():
            options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
            return torch.nn.functional.cross_entropy(x, target.long(), **options)
        return _operators.cross_entropy.default(x, target, ignore_index, label_smoothing, reduction)[0]
    if x.requires_grad and _has_gradients():
        choices = ignore_index, label_smoothing, reduction
        return _apply_cross_entropy(x, target, direct_losses.training(x, target, *choices), choices)
    return direct_losses.cross_entropy(x, target, ignore_index, label_smoothing, reduction)[0]


def cross_entropy_and_pairs(
    x: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of each row, and the pairs (m, d), whose d has a gradient, too."""
    choices = ignore_index, label_smoothing, "none"
    if type(x) not in PLAIN or type(target) not in PLAIN or is_watched():
        if is_forward():
            options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
            m = x.detach().amax(class_dimension(x), keepdim=True)
            d = (x - m).exp().sum(class_dimension(x))
            losses = torch.nn.functional.cross_entropy(x, target.long(), **options)
            return losses, torch.stack((m.squeeze(class_dimension(x)), d), -1)
        watched: tuple[torch.Tensor, torch.Tensor] = _operators.cross_entropy.default(x, target, *choices)
        return watched
    if x.requires_grad and _has_gradients():
        found: tuple[torch.Tensor, torch.Tensor] = _apply_cross_entropy_and_pairs(x, target, *choices)
        return found
    return direct_losses.cross_entropy(x, target, *choices)


def cross_entropy_backward(  # noqa: PLR0917 (as torch passes them)
    x: torch.Tensor,
    target: torch.Tensor,
    pairs: torch.Tensor,
    dloss: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> torch.Tensor:
    """Returns the gradient of logits, given the pairs of their rows and the gradient of the loss."""
    choices = ignore_index, label_smoothing, reduction
    if type(x) not in PLAIN or type(dloss) not in PLAIN or is_watched():
        return _operators.cross_entropy_backward.default(x, target, pairs, dloss, *choices)
    if _has_gradients() and (x.requires_grad or dloss.requires_grad):
        return _apply_cross_entropy_backward(x, target, pairs, dloss, *choices)
    return direct_losses.cross_entropy_backward(x, target, pairs, dloss, *choices)


def token_log_probs(
    x: torch.Tensor, tokens: torch.Tensor, dim: int, temperature: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logarithms of tokens' probabilities, and the entropies, or no elements."""
    choices = dim, temperature, entropy
    if type(x) not in PLAIN or type(tokens) not in PLAIN or is_watched():
        if is_forward():
            return token_log_probs_by_torch(x, tokens, *choices)
        log_probs, entropies, _ = _operators.token_log_probs.default(x, tokens, *choices)
        return log_probs, entropies
    if x.requires_grad and _has_gradients():
        found: tuple[torch.Tensor, torch.Tensor] = _apply_token_log_probs(x, tokens, *choices)
        return found
    return direct_tokens.token_log_probs(x, tokens, *choices)[:2]


def token_log_probs_by_torch(
    x: torch.Tensor, tokens: torch.Tensor, dim: int, temperature: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `token_log_probs` does by functions of torch, which have derivatives of every kind."""
    n, several = x.shape[dim], tokens.ndim == x.ndim
    all_of = torch.log_softmax(x.to(direct_losses.wide(x.dtype)) / temperature, dim)
    places = (tokens if several else tokens.unsqueeze(dim)).long()
    found = all_of.gather(dim, places.clamp(0, n - 1))
    log_probs = torch.where((places >= 0) & (places < n), found, float("nan"))
    # Nothing times infinity is not wanted here.
    entropies = -(all_of.exp() * all_of.clamp(min=-1e4)).sum(dim) if entropy else all_of.new_zeros(0)
    return log_probs if several else log_probs.squeeze(dim), entropies


def token_log_probs_backward(  # noqa: PLR0917 (as torch passes them)
    x: torch.Tensor,
    tokens: torch.Tensor,
    sums: torch.Tensor,
    dlog_probs: torch.Tensor,
    dentropy: torch.Tensor,
    dim: int,
    temperature: float,
    entropy: bool,
) -> torch.Tensor:
    """Returns the gradient of logits, given what their rows sum to and the gradients of both results."""
    tensors, choices = (x, tokens, sums, dlog_probs, dentropy), (dim, temperature, entropy)
    if any(type(t) not in PLAIN for t in tensors) or is_watched():
        return _operators.token_log_probs_backward.default(*tensors, *choices)
    if _has_gradients() and (x.requires_grad or dlog_probs.requires_grad or dentropy.requires_grad):
        return _apply_token_log_probs_backward(*tensors, *choices)
    return direct_tokens.token_log_probs_backward(*tensors, *choices)


def kl_divergence(p: torch.Tensor, q: torch.Tensor, dim: int, temperature: float) -> torch.Tensor:
    """Returns the divergences of the probabilities of `q` from those of `p`."""
    if type(p) not in PLAIN or type(q) not in PLAIN or is_watched():
        if is_forward():
            return kl_divergence_by_torch(p, q, dim, temperature)
        return _operators.kl_divergence.default(p, q, dim, temperature)[0]
    if _has_gradients() and (p.requires_grad or q.requires_grad):
        return _apply_kl_divergence(p, q, dim, temperature)
    return direct_divergence.kl_divergence(p, q, dim, temperature)[0]


def kl_divergence_by_torch(p: torch.Tensor, q: torch.Tensor, dim: int, temperature: float) -> torch.Tensor:
    """Returns what `kl_divergence` does by functions of torch, which have derivatives of every kind."""
    log_p, log_q = (torch.log_softmax(x.to(direct_losses.wide(x.dtype)) / temperature, dim) for x in (p, q))
    # Nothing times infinity is not wanted here.
    return torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p.clamp(min=-1e4) - log_q)).sum(dim)


def kl_divergence_backward(  # noqa: PLR0917 (as torch passes them)
    p: torch.Tensor,
    q: torch.Tensor,
    sums: torch.Tensor,
    dkl: torch.Tensor,
    dim: int,
    temperature: float,
    of_p: bool,
) -> torch.Tensor:
    """Returns the gradient of the logits of p or q, given what their rows sum to and the divergences' gradient."""
    tensors, choices = (p, q, sums, dkl), (dim, temperature, of_p)
    if any(type(t) not in PLAIN for t in tensors) or is_watched():
        return _operators.kl_divergence_backward.default(*tensors, *choices)
    if _has_gradients() and any(t.requires_grad for t in (p, q, dkl)):
        return _apply_kl_divergence_backward(*tensors, *choices)
    return direct_divergence.kl_divergence_backward(*tensors, *choices)


# The gradients, and theirs. A context has all tensors that they need, and what was chosen beside.


def _of_result(backward: Callable[..., torch.Tensor]) -> Callable[..., tuple[Any, ...]]:
    """Returns the gradient of what has one that is made of its result."""

    def of(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (y,), (dim,) = ctx.saved_tensors, ctx.choices
        return backward(y, dy, dim), None

    return of


of_softmax = _of_result(softmax_backward)
of_log_softmax = _of_result(log_softmax_backward)
of_sparsemax = _of_result(sparsemax_backward)


def of_softmax_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Returns the gradient of dx = y · (dy - Σ y·dy): by y and by dy."""
    (y, dy), (dim,) = ctx.saved_tensors, ctx.choices
    by_y = by_dy = None
    if ctx.needs_input_grad[0]:
        by_y = g * (dy - (y * dy).sum(dim, keepdim=True)) - dy * (y * g).sum(dim, keepdim=True)
    if ctx.needs_input_grad[1]:
        by_dy = softmax_backward(y, g, dim)
    return by_y, by_dy, None


def of_log_softmax_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Returns the gradient of dx = dy - e^y · Σ dy: by y and by dy."""
    (y, dy), (dim,) = ctx.saved_tensors, ctx.choices
    weighted = g * y.exp()
    return -weighted * dy.sum(dim, keepdim=True), g - weighted.sum(dim, keepdim=True), None


def of_sparsemax_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Returns the gradient of dx: by y there is none, and in dy it is linear and its own transpose."""
    (y, *_), (dim,) = ctx.saved_tensors, ctx.choices
    return None, sparsemax_backward(y, g, dim), None


def of_cross_entropy(ctx: Any, dloss: torch.Tensor | None, dpairs: torch.Tensor | None = None) -> tuple[Any, ...]:
    """Returns the gradient of the loss, and of what is made of the pairs (m, d): of d for any m, as of logsumexp."""
    x, target, pairs = ctx.saved_tensors
    _, _, reduction = ctx.choices
    if dloss is None:
        dloss = torch.zeros_like(pairs[..., 0] if reduction == "none" else pairs.sum(), dtype=x.dtype)
    more = None
    if dpairs is not None:
        # It is a share of the probabilities, as is the loss's.
        share = dpairs[..., 1] * pairs[..., 1]
        if _has_gradients() or reduction != "none":
            place = class_dimension(x)
            more = (softmax(x, place) * share.unsqueeze(place)).to(x.dtype)
        else:
            # Of a loss without a gradient the share would be lost.
            dloss = torch.where((dloss == 0) & (share != 0), LEAST.get(x.dtype, 1e-30), dloss)
            raised = 1 + torch.where(dloss == 0, 0.0, share / dloss)
            pairs = torch.stack((pairs[..., 0], pairs[..., 1] / raised), -1)
    dx = cross_entropy_backward(x, target, pairs, dloss, *ctx.choices)
    return dx if more is None else dx + more, None, None, None, None


def of_cross_entropy_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Returns the gradient of dx = (softmax(x) - wanted) · dloss / rows: by x, its pairs included, and by dloss."""
    (x, target, pairs, dloss), (ignore_index, _, reduction) = ctx.saved_tensors, ctx.choices
    place = class_dimension(x)
    by_x = by_dloss = None
    if ctx.needs_input_grad[0]:
        counts = target != ignore_index
        scale = dloss * counts
        if reduction == "mean":
            scale = scale / counts.sum().clamp(min=1)
        by_x = softmax_backward(softmax(x, place), g * scale.unsqueeze(place), place)
    if ctx.needs_input_grad[3]:
        by_one = g * cross_entropy_backward(x, target, pairs, torch.ones_like(dloss), *ctx.choices)
        by_dloss = by_one.sum(place) if reduction == "none" else by_one.sum()
    return by_x, None, None, by_dloss, None, None, None


def of_token_log_probs(
    ctx: Any, dlog_probs: torch.Tensor, dentropy: torch.Tensor, dsums: torch.Tensor | None = None
) -> tuple[Any, ...]:
    """Returns the gradient of both results: nobody is given the sums."""
    x, tokens, sums = ctx.saved_tensors
    dx = token_log_probs_backward(x, tokens, sums, dlog_probs, dentropy, *ctx.choices)
    return dx, None, None, None, None


def of_token_log_probs_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Returns the gradient of dx, by x, its sums included, and by the gradients of the results."""
    x, tokens, _, dlog_probs, dentropy = ctx.saved_tensors
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        given = _graph_of(x, dlog_probs, dentropy)
        results = token_log_probs_by_torch(given[0], tokens, *ctx.choices)
        upstream = given[1:] if ctx.choices[-1] else given[1:2]
        (dx,) = torch.autograd.grad(results[: len(upstream)], given[0], upstream, create_graph=True)
    found = torch.autograd.grad(dx, given, g, create_graph=again, allow_unused=True)
    return found[0], None, None, found[1], found[2], None, None, None


def of_kl_divergence(ctx: Any, dkl: torch.Tensor, dsums: torch.Tensor | None = None) -> tuple[Any, ...]:
    """Returns the gradients of the logits that want one: nobody is given the sums."""
    (p, q, sums), (dim, temperature) = ctx.saved_tensors, ctx.choices
    found = [
        kl_divergence_backward(p, q, sums, dkl, dim, temperature, of_p) if wanted else None
        for of_p, wanted in zip((True, False), ctx.needs_input_grad, strict=False)
    ]
    return *found, None, None


def of_kl_divergence_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Returns the gradient of dx, by both tensors of logits, their sums included, and by the divergences' gradient."""
    p, q, _, dkl = ctx.saved_tensors
    *choices, of_p = ctx.choices
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        given = _graph_of(p, q, dkl)
        kl = kl_divergence_by_torch(*given[:2], *choices)
        (dx,) = torch.autograd.grad(kl, given[0 if of_p else 1], given[2], create_graph=True)
    by_p, by_q, by_dkl = torch.autograd.grad(dx, given, g, create_graph=again)
    return by_p, by_q, None, by_dkl, None, None, None


def _graph_of(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns tensors that want a gradient: views, so that what is made of them is a graph of its own."""
    return [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]


def _keeping_result(name: str, compute: Callable[..., torch.Tensor], gradient: Callable[..., Any]) -> Any:
    """Returns a `torch.autograd.Function` of logits and a dimension that keeps its result."""

    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        y = compute(x, dim)
        ctx.save_for_backward(y)
        ctx.choices = (dim,)
        return y

    return _function(name, forward, gradient)


def _keeping_both(name: str, compute: Callable[..., torch.Tensor], gradient: Callable[..., Any]) -> Any:
    """Returns a `torch.autograd.Function` of a result, its gradient and a dimension that keeps these two."""

    def forward(ctx: Any, y: torch.Tensor, dy: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.save_for_backward(y, dy)
        ctx.choices = (dim,)
        return compute(y, dy, dim)

    return _function(name, forward, gradient)


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    parts = {"__module__": __name__, "forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(torch.autograd.Function)(name, (torch.autograd.Function,), parts)


_Softmax = _keeping_result("_Softmax", direct.softmax, of_softmax)
_LogSoftmax = _keeping_result("_LogSoftmax", direct.log_softmax, of_log_softmax)
_Sparsemax = _keeping_result("_Sparsemax", direct.sparsemax, of_sparsemax)
_SoftmaxBackward = _keeping_both("_SoftmaxBackward", direct.softmax_backward, of_softmax_backward)
_LogSoftmaxBackward = _keeping_both("_LogSoftmaxBackward", direct.log_softmax_backward, of_log_softmax_backward)


class _SparsemaxBackward(torch.autograd.Function):  # type: ignore[misc]
    """The gradient of sparsemax with a gradient."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, dy: torch.Tensor, dim: int) -> torch.Tensor:
        """Keeps what says which elements are above 0."""
        ctx.save_for_backward(y)
        ctx.choices = (dim,)
        return direct.sparsemax_backward(y, dy, dim)

    backward = staticmethod(of_sparsemax_backward)


class _CrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """Cross entropy with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, target: torch.Tensor, step: Any, choices: Any) -> torch.Tensor:
        """Keeps what the gradient needs, and how it is computed."""
        made = direct_losses.trained(step, x, target) if step else None
        if made is None:
            made, step = direct_losses.cross_entropy(x, target, *choices), None
        loss, kept = made
        ctx.save_for_backward(x, target, kept)
        ctx.step, ctx.choices = step, choices
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        """Takes the shortest way, if nobody wants a gradient of the gradient."""
        x, target, kept = ctx.saved_tensors
        if ctx.step:
            if not _has_gradients() and type(dloss) is torch.Tensor and not is_watched():
                dx = direct_losses.gradient(ctx.step, x, target, kept, dloss)
                if dx is not None:
                    return dx, None, None, None
            kept = direct_losses.pairs_of(kept, x)
        return cross_entropy_backward(x, target, kept, dloss, *ctx.choices), None, None, None


class _CrossEntropyAndPairs(torch.autograd.Function):  # type: ignore[misc]
    """Cross entropy and the pairs with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, target: torch.Tensor, *choices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps what the gradient needs."""
        losses, pairs = direct_losses.cross_entropy(x, target, *choices)
        ctx.save_for_backward(x, target, pairs)
        ctx.set_materialize_grads(False)
        ctx.choices = choices
        return losses, pairs

    backward = staticmethod(of_cross_entropy)


class _CrossEntropyBackward(torch.autograd.Function):  # type: ignore[misc]
    """The gradient of cross entropy with a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, dloss: torch.Tensor, *choices: Any
    ) -> torch.Tensor:
        """Keeps all of it."""
        ctx.save_for_backward(x, target, pairs, dloss)
        ctx.choices = choices
        return direct_losses.cross_entropy_backward(x, target, pairs, dloss, *choices)

    backward = staticmethod(of_cross_entropy_backward)


class _TokenLogProbs(torch.autograd.Function):  # type: ignore[misc]
    """The logarithms of tokens' probabilities with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: torch.Tensor, *choices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps what the gradient needs."""
        log_probs, entropies, sums = direct_tokens.token_log_probs(x, tokens, *choices)
        ctx.save_for_backward(x, tokens, sums)
        ctx.choices = choices
        return log_probs, entropies

    backward = staticmethod(of_token_log_probs)


class _TokenLogProbsBackward(torch.autograd.Function):  # type: ignore[misc]
    """That gradient with a gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        """Keeps all of it."""
        ctx.save_for_backward(*arguments[:5])
        ctx.choices = arguments[5:]
        return direct_tokens.token_log_probs_backward(*arguments)

    backward = staticmethod(of_token_log_probs_backward)


class _KlDivergence(torch.autograd.Function):  # type: ignore[misc]
    """The divergences with a gradient."""

    @staticmethod
    def forward(ctx: Any, p: torch.Tensor, q: torch.Tensor, *choices: Any) -> torch.Tensor:
        """Keeps what the gradient needs."""
        kl, sums = direct_divergence.kl_divergence(p, q, *choices)
        ctx.save_for_backward(p, q, sums)
        ctx.choices = choices
        return kl

    backward = staticmethod(of_kl_divergence)


class _KlDivergenceBackward(torch.autograd.Function):  # type: ignore[misc]
    """That gradient with a gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        """Keeps all of it."""
        ctx.save_for_backward(*arguments[:4])
        ctx.choices = arguments[4:]
        return direct_divergence.kl_divergence_backward(*arguments)

    backward = staticmethod(of_kl_divergence_backward)


def applied(function: type[torch.autograd.Function]) -> Callable[..., torch.Tensor]:
    """Returns what applies a function, without a look for transforms, which `is_watched` has taken."""
    applied: Callable[..., torch.Tensor] = super(torch.autograd.Function, function).apply
    return applied


_apply_softmax = applied(_Softmax)
_apply_log_softmax = applied(_LogSoftmax)
_apply_softmax_backward = applied(_SoftmaxBackward)
_apply_log_softmax_backward = applied(_LogSoftmaxBackward)
_apply_sparsemax = applied(_Sparsemax)
_apply_sparsemax_backward = applied(_SparsemaxBackward)
_apply_cross_entropy = applied(_CrossEntropy)
_apply_cross_entropy_and_pairs: Callable[..., Any] = applied(_CrossEntropyAndPairs)
_apply_cross_entropy_backward = applied(_CrossEntropyBackward)
_apply_token_log_probs: Callable[..., Any] = applied(_TokenLogProbs)
_apply_token_log_probs_backward = applied(_TokenLogProbsBackward)
_apply_kl_divergence = applied(_KlDivergence)
_apply_kl_divergence_backward = applied(_KlDivergenceBackward)
