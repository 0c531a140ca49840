"""Softmax, its relatives and cross entropy of rows that are divided along axes of a mesh, with derivatives.

Each device has a shard of every row, all of one length, in the order of the mesh. A kernel makes a pair (m, d) of each
row's shard. One all-gather tells all pairs to every device, which merges them in the order of the shards, so that what
there is one of for each row has the same bits on all devices. A change of results is a sum over devices, by `psum`. Its
transpose tells nothing where shard_map knows which arrays are the same on all devices: gradients of losses need no
collective. A kernel makes them from logits and pairs of whole rows; without a target these are probabilities.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from maxsoftmax.jax import _differentiable as differentiable
from maxsoftmax.jax._differentiable import derivatives, linear, transpose
from maxsoftmax.jax._primitives import PAIR, ROW, SUM, WHOLE, accumulator, bind, formula, spread, varying

ABSENT, IGNORED, WRONG = -1, -2, -3
"""What a row's class is in a shard, if it is elsewhere, the row does not count, or its target is no class."""

Names = tuple[Any, ...]
"""Axes of the mesh that rows are divided along."""


def softmax(x: Any, axis: int, names: Names) -> Any:
    """Returns this device's shard of softmax."""
    return _softmax(_apart(x, names), axis, names)


def log_softmax(x: Any, axis: int, names: Names) -> Any:
    """Returns this device's shard of the logarithm of softmax."""
    return _log_softmax(_apart(x, names), axis, names)


def logsumexp(x: Any, axis: int, names: Names) -> Any:
    """Returns ln Σ exp x of whole rows."""
    pairs = _numbers(_apart(x, names), None, axis, names)[0]
    m, d = pairs[..., 0], pairs[..., 1]
    # Where m is infinite, d says nothing of it, but for NaN beside -inf only.
    says_nothing = (m == math.inf) | ((m == -math.inf) & (d == 0))
    return jnp.where(says_nothing, m, m + jnp.log(d)).astype(x.dtype)


def cross_entropy(x: Any, target: Any, axis: int, names: Names, choices: tuple[int, float]) -> Any:
    """Returns a loss for each whole row, NaN where a target is no class.

    Raises:
        ValueError: If targets may differ along the axes that rows are divided along.
    """
    apart = sorted(map(str, varying(target) & frozenset(names)))
    if apart:
        raise ValueError(f"labels may differ along {', '.join(apart)}, but devices with shards of a row need its label")
    losses = _numbers(_apart(x, names), target, axis, names, choices)[1]
    return losses.astype(x.dtype)


def _apart(x: Any, names: Names) -> Any:
    """Returns a shard, which differs from device to device, though shard_map may not know it."""
    return spread(x, varying(lax.axis_index(names)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _softmax(x: Any, axis: int, names: Names) -> Any:
    return _probabilities(x, _numbers(x, None, axis, names)[0], axis)


def _of_softmax(axis: int, names: Names, arrays: Any, tangents: Any) -> tuple[Any, Any]:
    y, (t,) = _softmax(*arrays, axis, names), tangents
    wide, t = y.astype(accumulator(y)), t.astype(accumulator(y))
    mean = lax.psum((wide * t).sum(axis, keepdims=True), names)
    return y, (wide * (t - mean)).astype(y.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _log_softmax(x: Any, axis: int, names: Names) -> Any:
    pairs = jnp.expand_dims(_numbers(x, None, axis, names)[0], axis)
    return ((x.astype(pairs.dtype) - pairs[..., 0]) - jnp.log(pairs[..., 1])).astype(x.dtype)


def _of_log_softmax(axis: int, names: Names, arrays: Any, tangents: Any) -> tuple[Any, Any]:
    y, (t,) = _log_softmax(*arrays, axis, names), tangents
    t = t.astype(accumulator(y))
    mean = lax.psum((jnp.exp(y.astype(t.dtype)) * t).sum(axis, keepdims=True), names)
    return y, (t - mean).astype(y.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _numbers(x: Any, target: Any, axis: int, names: Names, choices: tuple[int, float] = (0, 0.0)) -> tuple[Any, Any]:
    """Returns the pairs of whole rows, and with a target the losses in accumulators, by one all-gather.

    Args:
        x: This device's shard.
        target: The class of each row among those of all shards, or None.
        axis: The axis of the classes.
        names: The axes of the mesh.
        choices: The class of rows that do not count, and the share of a target that all classes have.
    """
    n, (ignore_index, share) = x.shape[axis], choices
    pairs = differentiable.max_sum(x, axis)
    mine = [pairs[..., 0], pairs[..., 1]]
    if target is not None:
        place = _place(target, n, names, ignore_index)
        logits = jnp.take_along_axis(x, jnp.expand_dims(jnp.maximum(place, 0), axis), axis).squeeze(axis)
        mine.append(jnp.where(place >= 0, logits, 0).astype(pairs.dtype))
        if share:
            below = (jnp.expand_dims(mine[0], axis) - x.astype(pairs.dtype)).sum(axis)
            mine.append(jnp.where(mine[0] == -math.inf, math.inf, below))
    # Where nobody asks which arrays are the same on all devices, nothing can be said to be.
    known = "invarying" if varying(lax.axis_index(names)) else "varying"
    every = lax.all_gather(jnp.stack(mine), names, to=known)
    m = every[:, 0].max(0)
    d = _in_order(jnp.where(every[:, 0] == m, every[:, 1], every[:, 1] * jnp.exp(every[:, 0] - m)))
    d = jnp.where(m == math.inf, math.nan, d)
    whole = jnp.stack((m, d), -1)
    if target is None:
        return whole, None
    losses, total = m - _in_order(every[:, 2]), n * len(every)
    if share:
        mean = _in_order(every[:, 3] + n * (m - every[:, 0])) / total
        # Nothing times infinity is not wanted here.
        losses = mean if share == 1 else losses * (1 - share) + mean * share
    losses = jnp.where((target >= 0) & (target < total), losses + jnp.log(d), math.nan)
    return whole, jnp.where(target == ignore_index, 0, losses)


def _of_numbers(axis: int, names: Names, choices: tuple[int, float], arrays: Any, tangents: Any) -> Any:
    """Returns them and their changes, those of m by way of d."""
    (x, target), (t, _) = arrays, tangents
    whole, losses = _numbers(x, target, axis, names, choices)

    def changed(place: Any, even: float, rest: float) -> Any:
        return lax.psum(shard_tangent(x, whole, place, t, axis=axis, options=(even, rest)), names)

    d = whole[..., 1]
    of_whole = jnp.stack((jnp.zeros_like(d), d * changed(_nowhere(x, axis), 0.0, 0.0)), -1)
    if target is None:
        return (whole, None), (of_whole, None)
    n, (ignore_index, share) = x.shape[axis], choices
    place = _place(target, n, names, ignore_index)
    of_losses = changed(place, share / (n * lax.axis_size(names)), 1 - share)
    return (whole, losses), (of_whole, of_losses)


_softmax.defjvp(_of_softmax)
_log_softmax.defjvp(_of_log_softmax)
_numbers.defjvp(_of_numbers)


def _place(target: Any, n: int, names: Names, ignore_index: int) -> Any:
    """Returns the class of each row among the n of this shard, or `ABSENT`, `IGNORED` or `WRONG`."""
    place = target - lax.axis_index(names) * n
    place = jnp.where((place >= 0) & (place < n), place, ABSENT)
    place = jnp.where((target >= 0) & (target < n * lax.axis_size(names)), place, WRONG)
    return jnp.where(target == ignore_index, IGNORED, place).astype(jnp.int32)


def _nowhere(x: Any, axis: int) -> Any:
    """Returns the places of rows without a target."""
    return jnp.full((*x.shape[:axis], *x.shape[axis + 1 :]), ABSENT, jnp.int32)


def _in_order(terms: Any) -> Any:
    """Returns the sum over the first dimension, from the first term to the last: the same bits wherever a row is."""
    return functools.reduce(operator.add, terms)


@formula((WHOLE, PAIR, ROW, SUM), (WHOLE,))
def shard_gradient(x: Any, pairs: Any, place: Any, dloss: Any, *, axis: int, options: tuple[float, float]) -> Any:
    """Returns (p - even - rest where the target is) · dloss, of options even and rest."""
    even, rest = options
    n, inner = x.shape[axis], math.prod(x.shape[axis + 1 :])
    # The kernel takes the rest for 1 less all even shares, which are those of the shard, and knows no class elsewhere:
    # one element a row is computed here.
    somewhere = jnp.where(place == ABSENT, 0, place)
    told = differentiable.loss_options(place, IGNORED, min(even * n, 1.0))
    upstream = dloss.astype(x.dtype)
    dx = bind("cross_entropy_backward", x, pairs, somewhere, upstream, axis=axis, options=told)
    index = jnp.maximum(place, 0)
    logits = jnp.take_along_axis(x, jnp.expand_dims(index, axis), axis).squeeze(axis).astype(pairs.dtype)
    p = jnp.exp(logits - pairs[..., 0]) / pairs[..., 1]
    exact = (p - even - jnp.where(place == ABSENT, 0, rest)) * dloss
    exact = jnp.where(place == WRONG, math.nan, jnp.where(place == IGNORED, 0, exact)).astype(x.dtype)
    rows = jnp.arange(place.size)
    at = rows // inner, index.reshape(-1), rows % inner
    dx = dx.reshape(-1, n, inner).at[at].set(exact.reshape(-1), mode="promise_in_bounds", unique_indices=True)
    return dx.reshape(x.shape)


@formula((WHOLE, PAIR, ROW, WHOLE), (SUM,))
def shard_tangent(x: Any, pairs: Any, place: Any, t: Any, *, axis: int, options: tuple[float, float]) -> Any:
    """Returns Σ (p - even - rest where the target is) · t of the shard."""
    ones = jnp.ones(place.shape, pairs.dtype)
    by_one = bind("shard_gradient", x, pairs, place, ones, axis=axis, options=options)
    return (by_one.astype(pairs.dtype) * t.astype(pairs.dtype)).sum(axis)


def _probabilities(x: Any, pairs: Any, axis: int) -> Any:
    """Returns p."""
    place = _nowhere(x, axis)
    ones = jnp.ones(place.shape, pairs.dtype)
    return shard_gradient(x, pairs, place, ones, axis=axis, options=(0.0, 0.0))


def _below(pairs: Any, s: Any) -> Any:
    """Returns the change of ln p by that of pairs."""
    return -(s[..., 0] + s[..., 1] / pairs[..., 1])


def _of_tangent(s: Any, _: Any, x: Any, pairs: Any, place: Any, t: Any, *, axis: int, **__: Any) -> Any:
    """Returns the change of Σ (p - wanted) · t, if logits change by s and pairs do not."""
    p = _probabilities(x, pairs, axis).astype(pairs.dtype)
    return (jnp.where(place == IGNORED, 0, (p * s.astype(p.dtype) * t.astype(p.dtype)).sum(axis)),)


def _of_tangent_by_pairs(s: Any, _: Any, x: Any, pairs: Any, place: Any, t: Any, *, axis: int, **__: Any) -> Any:
    p = _probabilities(x, pairs, axis).astype(pairs.dtype)
    return (jnp.where(place == IGNORED, 0, (p * t.astype(p.dtype)).sum(axis) * _below(pairs, s)),)


def _of_gradient(s: Any, _: Any, x: Any, pairs: Any, place: Any, dloss: Any, *, axis: int, **__: Any) -> Any:
    """Returns the change of (p - wanted) · dloss, if logits change by s and pairs do not."""
    scale = jnp.expand_dims(jnp.where(place == IGNORED, 0, dloss), axis)
    return ((_probabilities(x, pairs, axis) * s * scale).astype(x.dtype),)


def _of_gradient_by_pairs(s: Any, _: Any, x: Any, pairs: Any, place: Any, dloss: Any, *, axis: int, **__: Any) -> Any:
    scale = jnp.expand_dims(jnp.where(place == IGNORED, 0, dloss) * _below(pairs, s), axis)
    return ((_probabilities(x, pairs, axis) * scale).astype(x.dtype),)


derivatives("shard_tangent", _of_tangent, _of_tangent_by_pairs, None, linear("shard_tangent", 3))
derivatives("shard_gradient", _of_gradient, _of_gradient_by_pairs, None, linear("shard_gradient", 3))
transpose("shard_tangent", lambda g, *known, **how: (shard_gradient(*known, g, **how),))
transpose("shard_gradient", lambda g, *known, **how: (shard_tangent(*known, g, **how),))
