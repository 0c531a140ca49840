"""The ops with their gradients, of every order: those of the first are ops, too."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import numpy as jnp

from maxsoftmax import _native
from maxsoftmax.jax.primitives import bind

LOGSUMEXP = (1,)
"""What the library of statistics is told to return it."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def softmax(x: Any, axis: int) -> Any:
    """Returns softmax along an axis."""
    return bind("softmax", x, axis=axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def softmax_backward(y: Any, dy: Any, axis: int) -> Any:
    """Returns the gradient of logits, given softmax and its gradient: y · (dy - Σ y·dy)."""
    return bind("softmax_backward", y, dy, axis=axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def log_softmax(x: Any, axis: int) -> Any:
    """Returns the logarithm of softmax along an axis."""
    return bind("log_softmax", x, axis=axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def log_softmax_backward(y: Any, dy: Any, axis: int) -> Any:
    """Returns the gradient of logits, given the logarithm of softmax and its gradient: dy - e^y · Σ dy."""
    return bind("log_softmax_backward", y, dy, axis=axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sparsemax(x: Any, axis: int) -> Any:
    """Returns sparsemax along an axis."""
    return bind("sparsemax", x, axis=axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def sparsemax_backward(y: Any, dy: Any, axis: int) -> Any:
    """Returns the gradient of logits, given sparsemax and its gradient."""
    return bind("sparsemax_backward", y, dy, axis=axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def logsumexp(x: Any, axis: int) -> Any:
    """Returns ln Σ exp x along an axis."""
    return bind("statistics", x, axis=axis, options=LOGSUMEXP)


def cross_entropy(x: Any, target: Any, axis: int, ignore_index: int, label_smoothing: float) -> Any:
    """Returns a loss for each row."""
    return _losses(x, target, axis, ignore_index, label_smoothing)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _losses(x: Any, target: Any, axis: int, ignore_index: int, label_smoothing: float) -> Any:
    """Returns the losses, and the pairs of all rows, through which no gradient goes."""
    options = _options(target, ignore_index, label_smoothing)
    return bind("cross_entropy", x, target, axis=axis, options=options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def cross_entropy_backward(  # noqa: PLR0917 (as JAX passes them)
    x: Any, pairs: Any, target: Any, dloss: Any, axis: int, ignore_index: int, label_smoothing: float
) -> Any:
    """Returns the gradient of logits, given the pairs of their rows and the gradient of the losses."""
    options = _options(target, ignore_index, label_smoothing)
    return bind("cross_entropy_backward", x, pairs, target, dloss, axis=axis, options=options)


def _options(target: Any, ignore_index: int, label_smoothing: float) -> tuple[int, ...]:
    # There is no reduction.
    return ignore_index, _native.bits(label_smoothing), 0, int(target.dtype == jnp.int64), 0


def _keeping_result(function: Any) -> Any:
    def forward(x: Any, axis: int) -> tuple[Any, Any]:
        y = function(x, axis)
        return y, y

    return forward


def _keeping_arguments(function: Any) -> Any:
    def forward(y: Any, dy: Any, axis: int) -> tuple[Any, Any]:
        return function(y, dy, axis), (y, dy)

    return forward


softmax.defvjp(_keeping_result(softmax), lambda axis, y, dy: (softmax_backward(y, dy, axis),))
log_softmax.defvjp(_keeping_result(log_softmax), lambda axis, y, dy: (log_softmax_backward(y, dy, axis),))
sparsemax.defvjp(_keeping_result(sparsemax), lambda axis, y, dy: (sparsemax_backward(y, dy, axis),))


def _of_softmax_backward(axis: int, kept: Any, g: Any) -> tuple[Any, Any]:
    """Returns the gradients of dx = y · (dy - Σ y·dy) by y and by dy."""
    y, dy = kept
    by_y = g * (dy - (y * dy).sum(axis, keepdims=True)) - dy * (y * g).sum(axis, keepdims=True)
    return by_y, softmax_backward(y, g, axis)


def _of_log_softmax_backward(axis: int, kept: Any, g: Any) -> tuple[Any, Any]:
    """Returns the gradients of dx = dy - e^y · Σ dy by y and by dy."""
    y, dy = kept
    weighted = g * jnp.exp(y)
    return -weighted * dy.sum(axis, keepdims=True), g - weighted.sum(axis, keepdims=True)


def _of_sparsemax_backward(axis: int, kept: Any, g: Any) -> tuple[Any, Any]:
    """Returns the gradients of dx: by y there is none, and in dy it is linear and its own transpose."""
    y, _ = kept
    return jnp.zeros_like(y), sparsemax_backward(y, g, axis)


softmax_backward.defvjp(_keeping_arguments(softmax_backward), _of_softmax_backward)
log_softmax_backward.defvjp(_keeping_arguments(log_softmax_backward), _of_log_softmax_backward)
sparsemax_backward.defvjp(_keeping_arguments(sparsemax_backward), _of_sparsemax_backward)
logsumexp.defvjp(
    lambda x, axis: (logsumexp(x, axis), x),
    lambda axis, x, dy: (softmax(x, axis) * jnp.expand_dims(dy, axis),),
)


def _forward(x: Any, target: Any, *choices: Any) -> tuple[Any, Any]:
    losses, pairs = _losses(x, target, *choices)
    return (losses, pairs), (x, pairs, target)


def _of_losses(axis: int, ignore_index: int, label_smoothing: float, kept: Any, given: Any) -> tuple[Any, None]:
    """Returns the gradient of the losses."""
    return cross_entropy_backward(*kept, given[0], axis, ignore_index, label_smoothing), None


_losses.defvjp(_forward, _of_losses)


def _of_cross_entropy_backward(
    axis: int, ignore_index: int, label_smoothing: float, kept: Any, g: Any
) -> tuple[Any, None, None, Any]:
    """Returns the gradients of dx = (softmax(x) - wanted) · dloss by x, its pairs included, and by dloss."""
    x, pairs, target, dloss = kept
    scale = jnp.where(target == ignore_index, 0, dloss).astype(x.dtype)
    by_x = softmax_backward(softmax(x, axis), g * jnp.expand_dims(scale, axis), axis)
    by_one = cross_entropy_backward(x, pairs, target, jnp.ones_like(dloss), axis, ignore_index, label_smoothing)
    return by_x, None, None, (g * by_one).sum(axis)


cross_entropy_backward.defvjp(lambda *given: (cross_entropy_backward(*given), given[:4]), _of_cross_entropy_backward)
