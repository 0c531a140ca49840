"""The ops with their derivatives, forward and backward, of every order.

What a change of logits makes of results is linear in it, and has a primitive: for softmax and sparsemax that of the
gradient, since their Jacobians are symmetric, for the others a formula (`…_tangent`). The gradient is its transpose: a
kernel. So `jax.grad` computes what the kernels do, and `jax.jvp` the formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.interpreters import ad

from maxsoftmax import _native
from maxsoftmax._graph.extension import CompilerError
from maxsoftmax._native import devices, load
from maxsoftmax._native.description import SPECULATIVE, library
from maxsoftmax.jax._primitives import PAIR, ROW, SUM, SUMS, TOKENS, WHOLE, accumulator, bind, formula, primitives

LOGSUMEXP, PAIRS = (1,), (0,)
"""What the library of statistics is told to return."""


def softmax(x: Any, axis: int) -> Any:
    """Returns softmax along an axis."""
    return bind("softmax", x, axis=axis)


def softmax_backward(y: Any, dy: Any, axis: int) -> Any:
    """Returns the gradient of logits, given softmax and its gradient: y · (dy - Σ y·dy)."""
    return bind("softmax_backward", y, dy, axis=axis)


def log_softmax(x: Any, axis: int) -> Any:
    """Returns the logarithm of softmax along an axis."""
    return bind("log_softmax", x, axis=axis)


def sparsemax(x: Any, axis: int) -> Any:
    """Returns sparsemax along an axis."""
    return bind("sparsemax", x, axis=axis)


def logsumexp(x: Any, axis: int) -> Any:
    """Returns ln Σ exp x along an axis."""
    return bind("logsumexp", x, axis=axis, options=LOGSUMEXP)


def max_sum(x: Any, axis: int) -> Any:
    """Returns the pairs (max x, Σ exp(x - max x)) along an axis, of shape (…, 2), which have no derivatives."""
    return bind("max_sum", x, axis=axis, options=PAIRS)


def cross_entropy(x: Any, target: Any, axis: int, ignore_index: int, label_smoothing: float) -> Any:
    """Returns a loss for each row."""
    return bind("cross_entropy", x, target, axis=axis, options=loss_options(target, ignore_index, label_smoothing))[0]


def loss_options(target: Any, ignore_index: int, label_smoothing: float) -> tuple[int, ...]:
    """Returns what the libraries of cross entropy are told."""
    # There is no reduction.
    return ignore_index, _native.bits(label_smoothing), 0, int(target.dtype == jnp.int64), 0


def token_log_probs(x: Any, tokens: Any, axis: int, temperature: float, entropy: bool) -> tuple[Any, ...]:
    """Returns the logarithms of tokens' probabilities, (…, k), and the entropies if they are wanted."""
    name = "token_log_probs_and_entropy" if entropy else "token_log_probs"
    options = tokens.shape[-1], int(tokens.dtype == jnp.int64), _native.bits(temperature)
    results: tuple[Any, ...] = bind(name, x, tokens, axis=axis, options=options)[:-1]
    return results


# What a change of logits makes of results. Primitives are called by their names, with the axis and options by theirs.


@formula((WHOLE, WHOLE), (WHOLE,))
def log_softmax_tangent(y: Any, t: Any, *, axis: int, options: tuple[()]) -> Any:
    """Returns t - Σ e^y·t."""
    kind = accumulator(y)
    mean = (jnp.exp(y.astype(kind)) * t.astype(kind)).sum(axis, keepdims=True)
    return (t.astype(kind) - mean).astype(y.dtype)


@formula((WHOLE, WHOLE), (ROW,))
def logsumexp_tangent(x: Any, t: Any, *, axis: int, options: tuple[()]) -> Any:
    """Returns Σ p·t."""
    kind = accumulator(x)
    return (softmax(x, axis).astype(kind) * t.astype(kind)).sum(axis).astype(x.dtype)


@formula((WHOLE, PAIR, ROW, WHOLE), (ROW,))
def cross_entropy_tangent(x: Any, pairs: Any, target: Any, t: Any, *, axis: int, options: tuple[int, ...]) -> Any:
    """Returns Σ (p - wanted)·t."""
    kind = accumulator(x)
    ones = jnp.ones(target.shape, x.dtype)
    by_one = bind("cross_entropy_backward", x, pairs, target, ones, axis=axis, options=options)
    return (by_one.astype(kind) * t.astype(kind)).sum(axis).astype(x.dtype)


@formula((WHOLE, PAIR, ROW, WHOLE, SUM, WHOLE), (ROW,))
def cross_entropy_speculative_tangent(  # noqa: PLR0917 (as JAX passes them)
    x: Any, pairs: Any, target: Any, ahead: Any, guesses: Any, t: Any, *, axis: int, options: tuple[int, ...]
) -> Any:
    """Returns Σ (p - wanted)·t. Of its transpose, `ahead` may be the result."""
    return cross_entropy_tangent(x, pairs, target, t, axis=axis, options=options)


@formula((WHOLE, SUMS, TOKENS, WHOLE), (TOKENS,))
def token_log_probs_tangent(x: Any, sums: Any, tokens: Any, t: Any, *, axis: int, options: tuple[int, ...]) -> Any:
    """Returns the changes of the logarithms."""
    return _tokens_tangent(x, tokens, t, axis, options)[0]


@formula((WHOLE, SUMS, TOKENS, WHOLE), (TOKENS, SUM))
def token_log_probs_and_entropy_tangent(
    x: Any, sums: Any, tokens: Any, t: Any, *, axis: int, options: tuple[int, ...]
) -> Any:
    """Returns the changes of the logarithms and of the entropies."""
    return _tokens_tangent(x, tokens, t, axis, options)


def _tokens_tangent(x: Any, tokens: Any, t: Any, axis: int, options: tuple[int, ...]) -> Any:
    return jax.jvp(lambda x: _tokens_by_jax(x, tokens, axis, options), (x,), (t,))[1]


def _tokens_by_jax(x: Any, tokens: Any, axis: int, options: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns the logarithms and the entropies by functions of JAX, which have derivatives of every kind."""
    n = x.shape[axis]
    temperature = float(np.array(options[2], np.int64).view(np.float64))
    all_of = jax.nn.log_softmax(jnp.moveaxis(x, axis, -1).astype(accumulator(x)) / temperature, -1)
    found = jnp.take_along_axis(all_of, jnp.clip(tokens, 0, n - 1), -1)
    # Nothing times infinity is not wanted here.
    entropies = -(jnp.exp(all_of) * jnp.maximum(all_of, -1e4)).sum(-1)
    return jnp.where((tokens >= 0) & (tokens < n), found, jnp.nan), entropies


# Derivatives. A rule has the change of one argument, the results and all arguments, and returns the changes of results.


def derivatives(name: str, *rules: Callable[..., Any] | None) -> None:
    """Says what a change of each argument of a primitive makes of its results: nothing, where there is no rule."""

    def changed(arrays: Any, tangents: Any, **how: Any) -> tuple[Any, Any]:
        results = primitives[name].bind(*arrays, **how)
        found = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
        for rule, tangent in zip(rules, tangents, strict=True):
            if rule is not None and type(tangent) is not ad.Zero:
                # Results behind those of the rule do not change.
                for i, part in enumerate(rule(tangent, results, *arrays, **how)):
                    found[i] = ad.add_tangents(found[i], part)
        return results, found

    ad.primitive_jvps[primitives[name]] = changed


def transpose(name: str, rule: Callable[..., Any], linear: int = 1) -> None:
    """Says how gradients of results go back to the last arguments of a primitive, so many, in which it is linear."""

    def transposed(gradients: Any, *arrays: Any, **how: Any) -> list[Any]:
        known, last = arrays[:-linear], arrays[-linear:]
        found = rule(*map(ad.instantiate_zeros, gradients), *known, **how)
        wanted = [part if ad.is_undefined_primal(array) else None for array, part in zip(last, found, strict=True)]
        return [None] * len(known) + wanted

    ad.primitive_transposes[primitives[name]] = transposed


def linear(name: str, known: int) -> Callable[..., Any]:
    """Returns the rule of the argument behind so many that a primitive is linear in."""

    def rule(t: Any, results: Any, *arrays: Any, **how: Any) -> Any:
        found = bind(name, *arrays[:known], t, **how)
        return found if isinstance(found, tuple) else (found,)

    return rule


def _dot(a: Any, b: Any, axis: int, keepdims: bool = False) -> Any:
    """Returns Σ a·b along an axis, added up in accumulators."""
    kind = accumulator(a)
    return (a.astype(kind) * b.astype(kind)).sum(axis, keepdims=keepdims).astype(a.dtype)


derivatives("softmax", lambda t, results, x, *, axis, **_: (softmax_backward(results[0], t, axis),))
derivatives(
    "softmax_backward",
    lambda t, _, y, dy, *, axis, **__: (t * (dy - _dot(y, dy, axis, True)) - y * _dot(t, dy, axis, True),),
    linear("softmax_backward", 1),
)
transpose("softmax_backward", lambda g, y, **how: (bind("softmax_backward", y, g, **how),))

derivatives("log_softmax", lambda t, results, x, **how: (log_softmax_tangent(results[0], t, **how),))
derivatives(
    "log_softmax_tangent",
    lambda s, _, y, t, *, axis, **__: (jnp.broadcast_to(-_dot(jnp.exp(y) * s, t, axis, True), y.shape),),
    linear("log_softmax_tangent", 1),
)
derivatives(
    "log_softmax_backward",
    lambda t, _, y, dy, *, axis, **__: (-jnp.exp(y) * t * dy.sum(axis, keepdims=True),),
    linear("log_softmax_backward", 1),
)
transpose("log_softmax_tangent", lambda g, y, **how: (bind("log_softmax_backward", y, g, **how),))
transpose("log_softmax_backward", lambda g, y, **how: (log_softmax_tangent(y, g, **how),))

derivatives("sparsemax", lambda t, results, x, **how: (bind("sparsemax_backward", results[0], t, **how),))
derivatives("sparsemax_backward", None, linear("sparsemax_backward", 1))
transpose("sparsemax_backward", lambda g, y, **how: (bind("sparsemax_backward", y, g, **how),))

derivatives("logsumexp", lambda t, _, x, *, axis, **__: (logsumexp_tangent(x, t, axis=axis),))
derivatives(
    "logsumexp_tangent",
    lambda s, _, x, t, *, axis, **__: (_dot(softmax_backward(softmax(x, axis), s, axis), t, axis),),
    linear("logsumexp_tangent", 1),
)
transpose("logsumexp_tangent", lambda g, x, *, axis, **_: (softmax(x, axis) * jnp.expand_dims(g, axis),))


def _of_cross_entropy(t: Any, results: Any, x: Any, target: Any, **how: Any) -> tuple[Any]:
    return (cross_entropy_tangent(x, results[1], target, t, **how),)


def _of_cross_entropy_tangent(
    s: Any, _: Any, x: Any, pairs: Any, target: Any, t: Any, *, axis: int, options: tuple[int, ...]
) -> tuple[Any]:
    """Returns the change by x, its pairs included."""
    changed = _dot(softmax_backward(softmax(x, axis), s, axis), t, axis)
    return (jnp.where(target == options[0], 0, changed).astype(x.dtype),)


def _of_cross_entropy_backward(
    t: Any, _: Any, x: Any, pairs: Any, target: Any, dloss: Any, *, axis: int, options: tuple[int, ...]
) -> tuple[Any]:
    """Returns the change of (p - wanted) · dloss by x, its pairs included."""
    scale = jnp.where(target == options[0], 0, dloss).astype(x.dtype)
    return (softmax_backward(softmax(x, axis), t * jnp.expand_dims(scale, axis), axis),)


derivatives("cross_entropy", _of_cross_entropy, None)
derivatives("cross_entropy_tangent", _of_cross_entropy_tangent, None, None, linear("cross_entropy_tangent", 3))
derivatives("cross_entropy_backward", _of_cross_entropy_backward, None, None, linear("cross_entropy_backward", 3))
derivatives("cross_entropy_speculative", _of_cross_entropy, None)
derivatives(
    "cross_entropy_speculative_tangent",
    lambda s, _, x, pairs, target, ahead, guesses, t, **how: _of_cross_entropy_tangent(
        s, _, x, pairs, target, t, **how
    ),
    *(None,) * 4,
    linear("cross_entropy_speculative_tangent", 5),
)
derivatives(
    "cross_entropy_unforeseen",
    lambda t, _, x, pairs, target, dloss, *__, **how: _of_cross_entropy_backward(t, _, x, pairs, target, dloss, **how),
    None,
    None,
    linear("cross_entropy_backward", 3),
    None,
    None,
)
transpose("cross_entropy_tangent", lambda g, *known, **how: (bind("cross_entropy_backward", *known, g, **how),))
transpose("cross_entropy_backward", lambda g, *known, **how: (cross_entropy_tangent(*known, g, **how),))
transpose(
    "cross_entropy_speculative_tangent",
    lambda g, x, pairs, target, *ahead, **how: (bind("cross_entropy_unforeseen", x, pairs, target, g, *ahead, **how),),
)
_plainly = ad.primitive_jvps[primitives["cross_entropy"]]


def _speculatively(arrays: Any, tangents: Any, *, axis: int, options: tuple[int, ...]) -> tuple[Any, Any]:
    """Is the rule of cross entropy: the gradient of logits is computed ahead, where a kernel can."""
    x, target = arrays
    if type(tangents[0]) is ad.Zero or options[1] or not _has_gradients_ahead(x, axis):
        found: tuple[Any, Any] = _plainly(arrays, tangents, axis=axis, options=options)
        return found
    *results, ahead, guesses = bind("cross_entropy_speculative", x, target, axis=axis, options=options)
    change = cross_entropy_speculative_tangent(
        x, results[1], target, ahead, guesses, tangents[0], axis=axis, options=options
    )
    return results, [change, ad.Zero(jax.typeof(results[1]).to_tangent_aval())]


ad.primitive_jvps[primitives["cross_entropy"]] = _speculatively


def _has_gradients_ahead(x: Any, axis: int) -> bool:
    """Returns whether `gpu/speculative_gradient.mojo` takes rows, where JAX computes by default."""
    n, size = x.shape[axis], x.dtype.itemsize
    fits = axis == x.ndim - 1 and size <= 4 and 57344 < n <= (1 << 19) // size and n * size % 16 == 0
    return fits and jax.default_backend() == "gpu" and _have_gradients_ahead(x.dtype.name)


@functools.cache
def _have_gradients_ahead(dtype: str) -> bool:
    """Returns whether all GPUs of the process have clusters, and there are libraries for them, or a compiler."""
    found = jax.local_devices(backend="gpu")
    try:
        # Other makers' GPUs have names here.
        clusters = all(float(getattr(device, "compute_capability", 0)) >= 9 for device in found)
        for name in SPECULATIVE if clusters else ():
            load.is_there(library(name, dtype, devices.target(found[0].local_hardware_id)))
    except (CompilerError, ValueError):
        return False
    return clusters


def _tokens(name: str) -> None:
    """Defines the derivatives of the logarithms of tokens' probabilities, with entropies or without them."""
    tangent, backward = f"{name}_tangent", f"{name}_backward"
    count = 2 if name.endswith("entropy") else 1

    def change(s: Any, x: Any, tokens: Any, *, axis: int, options: tuple[int, ...]) -> Any:
        return _tokens_tangent(x, tokens, s, axis, options)[:count]

    def of_log_probs(t: Any, results: Any, x: Any, tokens: Any, **how: Any) -> Any:
        return change_of(t, x, results[-1], tokens, **how)

    def change_of(t: Any, x: Any, sums: Any, tokens: Any, **how: Any) -> Any:
        found = bind(tangent, x, sums, tokens, t, **how)
        return found if isinstance(found, tuple) else (found,)

    def of_tangent(s: Any, _: Any, x: Any, sums: Any, tokens: Any, t: Any, **how: Any) -> Any:
        return jax.jvp(lambda x: change(t, x, tokens, **how), (x,), (s,))[1]

    def of_backward(s: Any, _: Any, x: Any, sums: Any, tokens: Any, *upstream: Any, **how: Any) -> Any:
        def gradient(x: Any) -> Any:
            return jax.vjp(lambda x: _tokens_by_jax(x, tokens, **how)[:count], x)[1](upstream)

        return jax.jvp(gradient, (x,), (s,))[1]

    def by_upstream(i: int) -> Callable[..., Any]:
        def rule(t: Any, _: Any, x: Any, sums: Any, tokens: Any, *upstream: Any, **how: Any) -> Any:
            told = [t if j == i else jnp.zeros_like(each) for j, each in enumerate(upstream)]
            return (bind(backward, x, sums, tokens, *told, **how),)

        return rule

    derivatives(name, of_log_probs, None)
    derivatives(tangent, of_tangent, None, None, linear(tangent, 3))
    derivatives(backward, of_backward, None, None, *(by_upstream(i) for i in range(count)))
    transpose(tangent, lambda *given, **how: (bind(backward, *given[count:], *given[:count], **how),))
    transpose(backward, change_of, count)


for _name in ("token_log_probs", "token_log_probs_and_entropy"):
    _tokens(_name)
