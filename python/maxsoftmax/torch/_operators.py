"""The functions of `autograd` as operators of torch.library: what torch.compile, torch.func and modes see.

Results lie as `torch.empty_like` has them. Compiled code relies on memory that is aligned, so they always are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function

from maxsoftmax.torch import _autograd as autograd
from maxsoftmax.torch import _direct as direct
from maxsoftmax.torch import _direct_divergence as direct_divergence
from maxsoftmax.torch import _direct_losses as direct_losses
from maxsoftmax.torch import _direct_tokens as direct_tokens
from maxsoftmax.torch import _linear as linear
from maxsoftmax.torch import _linear_tokens as linear_tokens
from maxsoftmax.torch._arguments import check_same, check_target, check_tokens
from maxsoftmax.torch._direct_losses import empty_losses
from maxsoftmax.torch._direct_tokens import empty_results
from maxsoftmax.torch._first_order import without_second
from maxsoftmax.torch._memory import fresh_like

_library = torch.library.Library("maxsoftmax", "DEF")
_CHOICES = "int ignore_index, float label_smoothing, str reduction"
_OF_TOKENS = "int dim, float temperature, bool entropy"

SCHEMAS = {
    "softmax": "(Tensor x, int dim) -> Tensor",
    "log_softmax": "(Tensor x, int dim) -> Tensor",
    "softmax_backward": "(Tensor y, Tensor dy, int dim) -> Tensor",
    "log_softmax_backward": "(Tensor y, Tensor dy, int dim) -> Tensor",
    "sparsemax": "(Tensor x, int dim) -> Tensor",
    "sparsemax_backward": "(Tensor y, Tensor dy, int dim) -> Tensor",
    "cross_entropy": f"(Tensor x, Tensor target, {_CHOICES}) -> (Tensor, Tensor)",
    "cross_entropy_backward": f"(Tensor x, Tensor target, Tensor pairs, Tensor dloss, {_CHOICES}) -> Tensor",
    "token_log_probs": f"(Tensor x, Tensor tokens, {_OF_TOKENS}) -> (Tensor, Tensor, Tensor)",
    "token_log_probs_backward": (
        f"(Tensor x, Tensor tokens, Tensor sums, Tensor dlog_probs, Tensor dentropy, {_OF_TOKENS}) -> Tensor"
    ),
    "kl_divergence": "(Tensor p, Tensor q, int dim, float temperature) -> (Tensor, Tensor)",
    "kl_divergence_backward": (
        "(Tensor p, Tensor q, Tensor sums, Tensor dkl, int dim, float temperature, bool of_p) -> Tensor"
    ),
}
"""The operators, as torch.ops.maxsoftmax has them."""


def _softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    return direct.softmax(x, dim, fresh_like(x))


def _log_softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    return direct.log_softmax(x, dim, fresh_like(x))


def _softmax_backward(y: torch.Tensor, dy: torch.Tensor, dim: int) -> torch.Tensor:
    return direct.softmax_backward(y, dy, dim, fresh_like(y))


def _log_softmax_backward(y: torch.Tensor, dy: torch.Tensor, dim: int) -> torch.Tensor:
    return direct.log_softmax_backward(y, dy, dim, fresh_like(y))


def _sparsemax(x: torch.Tensor, dim: int) -> torch.Tensor:
    return direct.sparsemax(x, dim, fresh_like(x))


def _sparsemax_backward(y: torch.Tensor, dy: torch.Tensor, dim: int) -> torch.Tensor:
    return direct.sparsemax_backward(y, dy, dim, fresh_like(y))


def _cross_entropy_backward(  # noqa: PLR0917 (as torch passes them)
    x: torch.Tensor,
    target: torch.Tensor,
    pairs: torch.Tensor,
    dloss: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> torch.Tensor:
    choices = ignore_index, label_smoothing, reduction
    return direct_losses.cross_entropy_backward(x, target, pairs, dloss, *choices, fresh_like(x))


def _token_log_probs_backward(  # noqa: PLR0917 (as torch passes them)
    x: torch.Tensor,
    tokens: torch.Tensor,
    sums: torch.Tensor,
    dlog_probs: torch.Tensor,
    dentropy: torch.Tensor,
    dim: int,
    temperature: float,
    entropy: bool,
) -> torch.Tensor:
    choices = dim, temperature, entropy
    return direct_tokens.token_log_probs_backward(x, tokens, sums, dlog_probs, dentropy, *choices, fresh_like(x))


def _kl_divergence_backward(  # noqa: PLR0917 (as torch passes them)
    p: torch.Tensor,
    q: torch.Tensor,
    sums: torch.Tensor,
    dkl: torch.Tensor,
    dim: int,
    temperature: float,
    of_p: bool,
) -> torch.Tensor:
    return direct_divergence.kl_divergence_backward(p, q, sums, dkl, dim, temperature, of_p, fresh_like(p))


def _like_first(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _like_cross_entropy(
    x: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    check_target(target, x)
    return empty_losses(x, reduction)


def _like_token_log_probs(
    x: torch.Tensor, tokens: torch.Tensor, dim: int, temperature: float, entropy: bool
) -> direct_tokens.Sums:
    check_tokens(tokens, x, dim)
    return empty_results(x, tokens, dim, entropy)


def _like_kl_divergence(
    p: torch.Tensor, q: torch.Tensor, dim: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    check_same(q, "teacher", p, "x")
    return direct_divergence.empty_results(p, dim)


# What becomes of them under torch.vmap: a batch is one more dimension, or more rows.


def _batched_along(operator: Any) -> Any:
    def apply(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        *tensors, dim = arguments
        tensors = [_first(x, place, info.batch_size) for x, place in zip(tensors, in_dims, strict=False)]
        if tensors[0].ndim == 1:
            # Scalars have a dimension in name only.
            return operator(*(x.unsqueeze(-1) for x in tensors), 1).squeeze(-1), 0
        return operator(*tensors, dim + 1 if dim >= 0 else dim), 0

    return apply


def _first(x: torch.Tensor, place: int | None, size: int) -> torch.Tensor:
    """Returns a tensor whose first dimension is that of the batch."""
    return x.expand(size, *x.shape) if place is None else x.movedim(place, 0)


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns a batch of logits as logits of more rows: of rank 2 or more."""
    return x if x.ndim == 2 else x.flatten(0, 1)


def _batched_cross_entropy(info: Any, in_dims: tuple[Any, ...], x: Any, target: Any, *choices: Any) -> Any:
    ignore_index, label_smoothing, reduction = choices
    x, target = _first(x, in_dims[0], info.batch_size), _first(target, in_dims[1], info.batch_size)
    loss, pairs = _operators.cross_entropy.default(_in_rows(x), _targets(target), ignore_index, label_smoothing, "none")
    loss, pairs = loss.reshape(target.shape), pairs.reshape(*target.shape, 2)
    if reduction == "none":
        return (loss, pairs), (0, 0)
    total = _sums(loss)
    if reduction == "mean":
        total = total / _counted(target, ignore_index)
    return (total, pairs), (0, 0)


def _batched_cross_entropy_backward(  # noqa: PLR0917
    info: Any, in_dims: tuple[Any, ...], x: Any, target: Any, pairs: Any, dloss: Any, *choices: Any
) -> Any:
    ignore_index, label_smoothing, reduction = choices
    x, target, pairs, dloss = (
        _first(t, place, info.batch_size) for t, place in zip((x, target, pairs, dloss), in_dims, strict=False)
    )
    if reduction == "mean":
        dloss = dloss / _counted(target, ignore_index)
    if reduction != "none":
        dloss = dloss.reshape(-1, *(1 for _ in target.shape[1:])).expand(target.shape)
    rows, targets = _in_rows(x), _targets(target)
    pairs, dloss = pairs.reshape(*targets.shape, 2), dloss.reshape(targets.shape)
    dx = _operators.cross_entropy_backward.default(rows, targets, pairs, dloss, ignore_index, label_smoothing, "none")
    return dx.reshape(x.shape), 0


def _batched_tokens(operator: Any, several: bool) -> Any:
    def apply(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        *tensors, dim, temperature, entropy = arguments
        tensors = [_first(x, place, info.batch_size) for x, place in zip(tensors, in_dims, strict=False)]
        if len(tensors) > 2 and not entropy:
            # Of no elements, and none a row.
            tensors[4] = tensors[4].reshape(0)
        found = operator(*tensors, dim + 1 if dim >= 0 else dim, temperature, entropy)
        if not several:
            return found, 0
        log_probs, entropies, sums = found
        return (log_probs, entropies if entropy else entropies.expand(info.batch_size, 0), sums), (0, 0, 0)

    return apply


def _batched_divergence(operator: Any) -> Any:
    def apply(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        tensors = [
            _first(x, place, info.batch_size) if isinstance(x, torch.Tensor) else x
            for x, place in zip(arguments, in_dims, strict=True)
        ]
        count = sum(isinstance(x, torch.Tensor) for x in tensors)
        dim = tensors[count]
        found = operator(*tensors[:count], dim + 1 if dim >= 0 else dim, *tensors[count + 1 :])
        return found, (0, 0) if isinstance(found, tuple) else 0

    return apply


def _targets(target: torch.Tensor) -> torch.Tensor:
    """Returns a batch of targets as targets of more rows."""
    return target if target.ndim == 1 else target.flatten(0, 1)


def _counted(target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Returns how many rows count, for each of a batch."""
    return _sums((target != ignore_index).long())


def _sums(x: torch.Tensor) -> torch.Tensor:
    """Returns the sum of each tensor of a batch."""
    return x.flatten(1).sum(1) if x.ndim > 1 else x


# What gradients are made of.


def _keep_result(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.choices = inputs[1:]


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, torch.Tensor)))
    ctx.choices = tuple(value for value in inputs if not isinstance(value, torch.Tensor))


def _keep_pairs(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, target, *choices = inputs
    ctx.save_for_backward(x, target, output[1])
    ctx.set_materialize_grads(False)
    ctx.choices = tuple(choices)


def _keep_sums(ctx: Any, inputs: tuple[Any, ...], output: direct_tokens.Sums) -> None:
    x, tokens, *choices = inputs
    ctx.save_for_backward(x, tokens, output[2])
    ctx.choices = tuple(choices)


def _keep_both_sums(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    p, q, *choices = inputs
    ctx.save_for_backward(p, q, output[1])
    ctx.choices = tuple(choices)


def _differentiable(name: str) -> Callable[..., Any]:
    """Returns what an operator does before it computes: note how its gradient is made.

    torch.library.register_autograd does the same, but not under torch.func.vmap of torch.func.grad.
    """
    operator = getattr(torch.ops.maxsoftmax, name).default
    keep = _KEPT.get(name, _keep_inputs)
    of_operator = getattr(autograd, f"of_{name}")

    def compute(keys: Any, arguments: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

    def forward(ctx: Any, *arguments: Any) -> Any:
        *arguments, keys = arguments  # type: ignore[assignment]
        results = compute(keys, tuple(arguments))
        keep(ctx, arguments, results)
        return results

    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return *of_operator(ctx, *gradients), None

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    apply = autograd.applied(type(f"maxsoftmax_{name}", (torch.autograd.Function,), members))

    def run(keys: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments):
            # Transforms have unwrapped the tensors of their own level: what is left is one level, whatever is below it.
            with enable_single_level_autograd_function():
                return apply(*arguments, keys)
        return compute(keys, arguments)

    return run


def _batched(name: str, operator: Any) -> Any:
    """Returns what an operator does with a batch, where that is not a function of its own."""
    if name.startswith("token_log_probs"):
        return _batched_tokens(operator, several=name == "token_log_probs")
    if name.startswith("kl_divergence"):
        return _batched_divergence(operator)
    return _batched_along(operator)


_operators = torch.ops.maxsoftmax
_KERNELS = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "softmax_backward": _softmax_backward,
    "log_softmax_backward": _log_softmax_backward,
    "sparsemax": _sparsemax,
    "sparsemax_backward": _sparsemax_backward,
    "cross_entropy": direct_losses.cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "token_log_probs": direct_tokens.token_log_probs,
    "token_log_probs_backward": _token_log_probs_backward,
    "kl_divergence": direct_divergence.kl_divergence,
    "kl_divergence_backward": _kl_divergence_backward,
}
_BATCHED = {
    "cross_entropy": _batched_cross_entropy,
    "cross_entropy_backward": _batched_cross_entropy_backward,
}
_KEPT = {
    "softmax": _keep_result,
    "log_softmax": _keep_result,
    "sparsemax": _keep_result,
    "cross_entropy": _keep_pairs,
    "token_log_probs": _keep_sums,
    "kl_divergence": _keep_both_sums,
}
_LIKE = {
    "cross_entropy": _like_cross_entropy,
    "token_log_probs": _like_token_log_probs,
    "kl_divergence": _like_kl_divergence,
}

for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _KERNELS[_name], _key)
    _full = f"maxsoftmax::{_name}"
    torch.library.register_fake(_full, _LIKE.get(_name, _like_first), lib=_library)
    _library.impl(_name, _differentiable(_name), "Autograd", with_keyset=True)
    torch.library.register_vmap(
        _full, _BATCHED.get(_name) or _batched(_name, getattr(_operators, _name).default), lib=_library
    )


# A loss of logits that are never there has results that say what was wanted, and no gradient of its gradient.

_LINEAR = (
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? upstream, "
    "int ignore_index, float label_smoothing, str reduction, float? softcap, float z_loss, int? chunk, "
    "ScalarType dtype, bool[3] wanted) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    upstream: torch.Tensor | None,
    *choices: Any,
) -> tuple[torch.Tensor, ...]:
    *options, wanted = choices
    found = linear.computed(hidden, weight, target, bias, upstream, linear.Options(*options), wanted)
    return tuple(hidden.new_empty(0) if each is None else each for each in found)


def _like_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    upstream: torch.Tensor | None,
    *choices: Any,
) -> tuple[torch.Tensor, ...]:
    *options, wanted = choices
    chosen = linear.Options(*options)
    linear.check(hidden, weight, target, bias)
    shape = target.shape if chosen.reduction == "none" else ()
    loss = hidden.new_empty(shape, dtype=direct_losses.wide(chosen.dtype))
    tensors = zip((hidden, weight, bias), wanted, strict=True)
    return loss, *(x.new_empty(x.shape) if is_wanted else hidden.new_empty(0) for x, is_wanted in tensors)


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    hidden, weight, target, bias, _, *options, wanted = inputs
    ctx.save_for_backward(hidden, weight, target, bias, *output[1:])
    ctx.options, ctx.wanted = options, wanted


def _of_linear(ctx: Any, dloss: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    """Returns the gradients that the loss came with, times its own, or those of one loss a row."""
    hidden, weight, target, bias, *found = ctx.saved_tensors
    needed = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    if ctx.options[2] == "none":
        arguments = hidden, weight, target, bias, dloss, *ctx.options, needed
        found = _operators.linear_cross_entropy.default(*arguments)[1:]
        scaled = [x if is_needed else None for x, is_needed in zip(found, needed, strict=True)]
    else:
        # Times a tensor of one number is in the dtype of the other, to which that number would be rounded.
        scaled = [
            (x.to(direct_losses.wide(x.dtype)) * dloss).to(x.dtype) if is_needed else None
            for x, is_needed in zip(found, needed, strict=True)
        ]
    dhidden, dweight, dbias = without_second("linear_cross_entropy", scaled, (hidden, weight, bias))
    return dhidden, dweight, None, dbias, *[None] * (len(ctx.options) + 2)


def _linear_token_log_probs(  # noqa: PLR0917
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    bias: torch.Tensor | None,
    dlog_probs: torch.Tensor | None,
    dentropy: torch.Tensor | None,
    *choices: Any,
) -> tuple[torch.Tensor, ...]:
    *options, wanted = choices
    upstream = dlog_probs, dentropy, linear_tokens.Options(*options)
    found = linear_tokens.computed(hidden, weight, tokens, bias, *upstream, wanted)
    return tuple(hidden.new_empty(0) if each is None else each for each in found)


def _like_linear_token_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor | None, *choices: Any
) -> tuple[torch.Tensor, ...]:
    *_, wanted = choices
    chosen = linear_tokens.Options(*choices[2:-1])
    linear_tokens.check(hidden, weight, tokens, bias)
    dtype = direct_losses.wide(chosen.dtype)
    entropies = hidden.new_empty(hidden.shape[:-1] if chosen.entropy else (0,), dtype=dtype)
    tensors = zip((hidden, weight, bias), wanted, strict=True)
    gradients = [x.new_empty(x.shape) if is_wanted else hidden.new_empty(0) for x, is_wanted in tensors]
    return hidden.new_empty(tokens.shape, dtype=dtype), entropies, *gradients


def _keep_linear_tokens(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[6:-1]


def _of_linear_tokens(ctx: Any, dlog_probs: torch.Tensor, dentropy: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    """Returns the gradients of both results."""
    needed = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    arguments = *ctx.saved_tensors, dlog_probs, dentropy, *ctx.options, needed
    hidden, weight, _, bias = ctx.saved_tensors
    found = _operators.linear_token_log_probs.default(*arguments)[2:]
    wanted = [x if is_needed else None for x, is_needed in zip(found, needed, strict=True)]
    dhidden, dweight, dbias = without_second("linear_token_log_probs", wanted, (hidden, weight, bias))
    return dhidden, dweight, None, dbias, *[None] * (len(ctx.options) + 3)


_LINEAR_TOKENS = (
    "linear_token_log_probs(Tensor hidden, Tensor weight, Tensor tokens, Tensor? bias, Tensor? dlog_probs, "
    "Tensor? dentropy, float temperature, bool entropy, float? softcap, int? chunk, ScalarType dtype, "
    "bool[3] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

for _schema, _compute, _like, _gradient, _keep in (
    (_LINEAR, _linear_cross_entropy, _like_linear_cross_entropy, _of_linear, _keep_linear),
    (
        _LINEAR_TOKENS,
        _linear_token_log_probs,
        _like_linear_token_log_probs,
        _of_linear_tokens,
        _keep_linear_tokens,
    ),
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _name = _schema.partition("(")[0]
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _compute, _key)
    torch.library.register_fake(f"maxsoftmax::{_name}", _like, lib=_library)
    torch.library.register_autograd(f"maxsoftmax::{_name}", _gradient, setup_context=_keep, lib=_library)
