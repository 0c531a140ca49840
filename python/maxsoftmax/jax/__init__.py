"""Softmax, its relatives and cross entropy for arrays of JAX, with derivatives of every order.

They are called under `jax.jit`, `jax.grad`, `jax.vmap`, `jax.lax.scan`, `jax.shard_map` and the like, or without. XLA
calls the kernels where its arrays are, on the CPU and on CUDA devices. When a function is compiled for another platform
it is refused. Under `jax.shard_map` rows may be divided over devices: `axis_name` says along which axis of the mesh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, overload

try:
    import jax
except ImportError as error:
    raise ImportError("maxsoftmax.jax needs JAX: pip install 'maxsoftmax[jax]'") from error

from jax import numpy as jnp

from maxsoftmax._arguments import (
    FLOATS,
    are_several,
    check_flag,
    check_ignore_index,
    check_label_smoothing,
    check_temperature,
    check_tokens_shape,
    normalize_axes,
    normalize_axis,
    words,
)
from maxsoftmax.jax import _differentiable as differentiable
from maxsoftmax.jax import _sharded as sharded
from maxsoftmax.jax import _weighted as weighted
from maxsoftmax.jax._primitives import accumulator

__all__ = [
    "cross_entropy",
    "log_softmax",
    "logsumexp",
    "softmax",
    "softmax_cross_entropy_with_integer_labels",
    "sparsemax",
    "token_log_probs",
]


def __dir__() -> list[str]:
    """Returns what there is to use here, without what it is made of."""
    return sorted(__all__)


Axes = int | Sequence[int] | None

AxisName = Hashable | Sequence[Hashable] | None
"""One axis of a mesh, or several of them, as `jax.lax.psum` takes them."""

IGNORED = -100
"""The label of rows that do not count, where nobody says another."""

NOBODY = -(1 << 31)
"""What the kernels are told to ignore where the caller cannot say that anything is."""


def softmax(x: Any, axis: Axes = -1, where: Any = None, *, axis_name: AxisName = None) -> jax.Array:
    """Returns softmax of an array along one axis or several, as `jax.nn.softmax` does.

    Args:
        x: Logits: of any shape; float32, bfloat16, float16, or float64 where JAX has it. Integers and bools become
            floats of JAX's default dtype.
        axis: The axis or axes that will sum to 1; None for all of them together.
        where: Which elements count, if not None: bools that broadcast to the shape of `x`. Others are 0.
        axis_name: The axis of the mesh, or several, that rows are divided along, under `jax.shard_map` or the like:
            then `x` is this device's shard of every row. None if it has whole rows.

    Returns:
        Probabilities, of the shape and dtype of `x`.

    Raises:
        TypeError: If an argument is not of its type, or the dtype is not one of these.
        ValueError: If there is no such axis, or `where` has another shape.
        NameError: If there is no such axis of a mesh here.
        RuntimeError: If the library cannot be built.

    Example:
        >>> import jax, maxsoftmax.jax
        >>> jax.jit(maxsoftmax.jax.softmax)(jax.numpy.zeros((1, 4)))
        Array([[0.25, 0.25, 0.25, 0.25]], dtype=float32)
    """
    return _along("softmax", x, axis, where, axis_name)


def log_softmax(x: Any, axis: Axes = -1, where: Any = None, *, axis_name: AxisName = None) -> jax.Array:
    """Returns the logarithm of softmax of an array along one axis or several, as `jax.nn.log_softmax` does.

    Args:
        x: Logits: of any shape; float32, bfloat16, float16, or float64 where JAX has it.
        axis: The axis or axes along which probabilities sum to 1; None for all of them together.
        where: Which elements count, if not None: bools that broadcast to the shape of `x`. Others are -inf.
        axis_name: The axis of the mesh, or several, along which rows are divided; None if each device has whole rows.

    Returns:
        Logarithms of probabilities, of the shape and dtype of `x`.

    Raises:
        TypeError: If an argument is not of its type, or the dtype is not one of these.
        ValueError: If there is no such axis, or `where` has another shape.
        NameError: If there is no such axis of a mesh here.
        RuntimeError: If the library cannot be built.

    Example:
        >>> import jax, maxsoftmax.jax
        >>> maxsoftmax.jax.log_softmax(jax.numpy.zeros((1, 2)))
        Array([[-0.6931472, -0.6931472]], dtype=float32)
    """
    return _along("log_softmax", x, axis, where, axis_name)


def sparsemax(x: Any, axis: Axes = -1) -> jax.Array:
    """Returns sparsemax of an array along one axis or several: the probabilities nearest to it, most of them 0.

    It is max(x - max x - t, 0), where t is what makes it sum to 1 (Martins and Astudillo 2016, arXiv 1602.02068).

    Args:
        x: Logits: of any shape; float32, bfloat16, float16, or float64 where JAX has it.
        axis: The axis or axes that will sum to 1; None for all of them together.

    Returns:
        Probabilities, of the shape and dtype of `x`.

    Raises:
        TypeError: If an argument is not of its type, or the dtype is not one of these.
        ValueError: If there is no such axis.
        RuntimeError: If the library cannot be built.

    Example:
        >>> import jax, maxsoftmax.jax
        >>> maxsoftmax.jax.sparsemax(jax.numpy.array([2.0, 1.5, 0.0]))
        Array([0.75, 0.25, 0.  ], dtype=float32)
    """
    return _along("sparsemax", x, axis, None)


def logsumexp(  # noqa: PLR0917 (as JAX has them)
    a: Any,
    axis: Axes = None,
    b: Any = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: Any = None,
    *,
    axis_name: AxisName = None,
) -> Any:
    """Returns ln Σ b · exp a along one axis or several, as `jax.nn.logsumexp` does.

    Args:
        a: Logits: of any shape; float32, bfloat16, float16, or float64 where JAX has it.
        axis: The axis or axes that are reduced; None for all of them together.
        b: What exponentials are multiplied by, if not None: real numbers that broadcast with `a`, of any sign.
        keepdims: Whether these axes stay, of length 1.
        return_sign: Whether to return the sign of the sum: 1, -1, 0 of no sum at all. Without it the logarithm of a
            negative sum is NaN.
        where: Which elements count, if not None: bools that broadcast to the shape of `a`.
        axis_name: The axis of the mesh, or several, along which rows are divided; None if each device has whole rows.

    Returns:
        The logarithms, of the shape of `a` without the axes, and its dtype, or what JAX makes of it and that of `b`:
        -inf for nothing but -inf. With `return_sign` a tuple of them and the signs. All devices that share a row have
        the same bits.

    Raises:
        TypeError: If an argument is not of its type, or the dtype is not one of these.
        ValueError: If there is no such axis, `where` has another shape, or `b` does not broadcast with `a`.
        NameError: If there is no such axis of a mesh here.
        RuntimeError: If the library cannot be built.

    Example:
        >>> import jax, maxsoftmax.jax
        >>> maxsoftmax.jax.logsumexp(jax.numpy.array([[1000.0], [-1000.0]]), axis=-1)
        Array([ 1000., -1000.], dtype=float32)
        >>> maxsoftmax.jax.logsumexp(jax.numpy.array([1000.0, 1000.0]), b=jax.numpy.array([1, -3]), return_sign=True)
        (Array(1000.6932, dtype=float32), Array(-1., dtype=float32))
    """
    a, names = _logits(a, "a"), _names(axis_name)
    keepdims, return_sign = check_flag("keepdims", keepdims), check_flag("return_sign", return_sign)
    if b is None and not return_sign:
        return _logsumexp(a, _checked_where(where, a, "a"), normalize_axes(axis, a.ndim, "a"), keepdims, names)
    b = _weights(b)
    try:
        a = jnp.broadcast_to(a, jnp.broadcast_shapes(a.shape, b.shape))
    except ValueError:
        raise ValueError(f"b has shape {b.shape}, which does not broadcast with a of {a.shape}") from None
    axes = normalize_axes(axis, a.ndim, "a")
    found, sign = _weighted(a, b, _checked_where(where, a, "a"), axes, keepdims, names)
    return (found, sign) if return_sign else jnp.where(sign < 0, jnp.nan, found)


def cross_entropy(
    logits: Any,
    labels: Any,
    axis: int = -1,
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    axis_name: AxisName = None,
) -> jax.Array:
    """Returns the cross entropy of logits and labels, one for each row: -ln softmax(logits)[label].

    Args:
        logits: Logits: of rank 1 or more; float32, bfloat16, float16, or float64 where JAX has it.
        labels: The class of each row: integers, of the shape of `logits` without the axis, from 0 to n - 1 or
            `ignore_index`. On a GPU, and where rows are divided, another one makes its row's loss NaN. Where rows are
            divided, they count the classes of all shards, and all devices that share a row have its label.
        axis: The axis of the classes.
        ignore_index: The label of rows that do not count: their loss is 0.
        label_smoothing: From 0 to 1: the share of a label that is spread evenly over all classes.
        axis_name: The axis of the mesh, or several, along which rows are divided; None if each device has whole rows.

    Returns:
        The losses, of the shape of `labels` and the dtype of `logits`. Their sum or mean is left to the caller.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes do not fit, or there is no such axis, index or share; where rows are divided, if labels
            may differ between devices that share a row, as `shard_map` sees it.
        NameError: If there is no such axis of a mesh here.
        RuntimeError: If the library cannot be built.
        jax.errors.JaxRuntimeError: If a label on a CPU is not a class, when it is computed.

    Example:
        >>> import jax, maxsoftmax.jax
        >>> logits, labels = jax.numpy.zeros((3, 4)), jax.numpy.array([0, 3, -100])
        >>> jax.jit(maxsoftmax.jax.cross_entropy)(logits, labels)
        Array([1.3862944, 1.3862944, 0.       ], dtype=float32)
    """
    logits, labels = _logits(logits, "logits"), jnp.asarray(labels)
    choices = check_ignore_index(ignore_index), check_label_smoothing(label_smoothing)
    place = _check_labels(logits, labels, axis)
    return _cross_entropy(logits, labels, place, *choices, _names(axis_name))


def softmax_cross_entropy_with_integer_labels(
    logits: Any, labels: Any, axis: int | Sequence[int] = -1, where: Any = None
) -> jax.Array:
    """Returns what `cross_entropy` does, by the name and the arguments that optax has.

    Args:
        logits: Logits: of rank 1 or more; float32, bfloat16, float16, or float64 where JAX has it.
        labels: The class of each row: integers, of the shape of `logits` without the axis, from 0 to n - 1. None is
            ignored.
        axis: The axis of the classes, or several, along which classes are counted in this order, the last one fastest.
        where: Which rows or which elements count, if not None: bools of the rank of `labels` or of `logits`, which
            broadcast to their shape. A row of which nothing counts has no loss: 0. What a label names need not count.

    Returns:
        The losses, one for each row.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes do not fit, or there is no such axis.
        RuntimeError: If the library cannot be built.
        jax.errors.JaxRuntimeError: If a label on a CPU is not a class, when it is computed.

    Example:
        >>> import maxsoftmax.jax
        >>> maxsoftmax.jax.softmax_cross_entropy_with_integer_labels([0.0, 0.0], 1)
        Array(0.6931472, dtype=float32)
    """
    logits, labels = _logits(logits, "logits"), jnp.asarray(labels)
    along: Any = axis
    if are_several(axis):
        rows, axes = _apart(axis, logits.ndim)
        shape = *(logits.shape[i] for i in rows), math.prod(logits.shape[i] for i in axes)
        if where is not None and jnp.ndim(where) == logits.ndim:
            where = _checked_where(where, logits, "logits").transpose(*rows, *axes).reshape(shape)
        logits, along = logits.transpose(*rows, *axes).reshape(shape), -1
    if where is None:
        return cross_entropy(logits, labels, along, ignore_index=NOBODY)
    place = _check_labels(logits, labels, along)
    if jnp.ndim(where) != logits.ndim:
        counted = _checked_where(where, labels, "labels")
        wide = labels if labels.dtype in (jnp.int32, jnp.int64) else labels.astype(jnp.int32)
        return cross_entropy(logits, jnp.where(counted, wide, NOBODY), place, ignore_index=NOBODY)
    return _masked_cross_entropy(logits, labels, _checked_where(where, logits, "logits"), place)


@overload
def token_log_probs(
    x: Any, tokens: Any, axis: int = ..., *, temperature: float | None = ..., entropy: Literal[False] = ...
) -> jax.Array: ...
@overload
def token_log_probs(
    x: Any, tokens: Any, axis: int = ..., *, temperature: float | None = ..., entropy: Literal[True]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def token_log_probs(
    x: Any, tokens: Any, axis: int = ..., *, temperature: float | None = ..., entropy: bool
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def token_log_probs(
    x: Any, tokens: Any, axis: int = -1, *, temperature: float | None = None, entropy: bool = False
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns the logarithms of the probabilities of some tokens of each row, and the entropy of the row if asked for.

    These are the elements of `log_softmax(x / temperature)` that `tokens` names, without the others.

    Args:
        x: Logits, of rank 1 or more; float32, bfloat16, float16, or float64 where JAX has it.
        tokens: Which elements of each row: integers, of the shape of `x` without `axis`, or with `axis` of another
            length, for as many tokens a row. What is not from 0 to n - 1 has the logarithm NaN.
        axis: The axis of the tokens' probabilities.
        temperature: A positive number that logits are divided by; 1 if None.
        entropy: Whether to return the entropy of each row, too: -Σ p ln p.

    Returns:
        The logarithms, of the shape of `tokens`, or with `entropy` a tuple of them and the entropies, of the shape of
        `x` without `axis`. Both are float64 if `x` is, else float32.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes do not fit, there is no such axis, or the temperature is not allowed.
        RuntimeError: If the library cannot be built.

    Example:
        >>> import jax, maxsoftmax.jax
        >>> logits, tokens = jax.numpy.array([[0.0, 0.0], [9.0, -jax.numpy.inf]]), jax.numpy.array([1, 0])
        >>> jax.jit(maxsoftmax.jax.token_log_probs)(logits, tokens)
        Array([-0.6931472,  0.       ], dtype=float32)
    """
    x, tokens = _logits(x), jnp.asarray(tokens)
    if not x.ndim:
        raise ValueError("x has rank 0, but logits need an axis of tokens: reshape it to rank 1 first")
    place = normalize_axis(axis, x.ndim)
    choices = check_temperature(temperature), check_flag("entropy", entropy)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens have dtype {tokens.dtype}, but they are integers")
    check_tokens_shape(tokens.shape, x.shape, place)
    return _token_log_probs(x, tokens, place, *choices)


def _logits(x: Any, name: str = "x") -> jax.Array:
    """Returns logits as an array of a dtype that the kernels compute.

    Raises:
        TypeError: If there is none.
    """
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be an array of numbers, not {type(x).__name__}") from None
    if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool:
        x = x.astype(float)
    if x.dtype.name not in FLOATS:
        raise TypeError(f"{name} has dtype {x.dtype.name}, but the kernels take {', '.join(FLOATS)}")
    return x


def _weights(b: Any) -> jax.Array:
    """Returns what exponentials are multiplied by, as an array of real numbers.

    Raises:
        TypeError: If it is none.
    """
    try:
        found = jnp.asarray(1 if b is None else b)
    except (TypeError, ValueError):
        raise TypeError(f"b must be an array of real numbers, not {type(b).__name__}") from None
    if not (jnp.issubdtype(found.dtype, jnp.integer) or found.dtype == bool or found.dtype.name in FLOATS):
        raise TypeError(f"b has dtype {found.dtype.name}, but is an array of real numbers")
    return found


def _check_labels(logits: jax.Array, labels: jax.Array, axis: Any) -> int:
    """Returns which dimension the classes are, if there is one label for each row.

    Raises:
        TypeError: If labels are no integers, or the axis is none.
        ValueError: If there is no such axis, or labels have another shape.
    """
    if not logits.ndim:
        raise ValueError("logits have rank 0, but need an axis of classes")
    place = normalize_axis(axis, logits.ndim, name="logits")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels have dtype {labels.dtype}, but classes are integers")
    rows = (*logits.shape[:place], *logits.shape[place + 1 :])
    if labels.shape != rows:
        raise ValueError(
            f"labels have shape {labels.shape}, but logits of {logits.shape} with classes along axis {axis} "
            f"need {words(rows)}"
        )
    return place


def _apart(axis: Any, rank: int) -> tuple[list[int], list[int]]:
    """Returns the axes of rows, ascending, and those of classes, as they are told.

    Raises:
        TypeError: If one is no integer.
        ValueError: If one is named twice, or there is no such axis.
    """
    among = normalize_axes(axis, rank, "logits")
    return [i for i in range(rank) if i not in among], [normalize_axis(a, rank, name="logits") for a in axis]


def _checked_where(where: Any, x: jax.Array, name: str = "x") -> Any:
    """Returns which elements of `x` count, None if all do.

    Raises:
        TypeError: If these are not bools.
        ValueError: If they do not broadcast to the shape of `x`.
    """
    if where is None:
        return None
    where = jnp.asarray(where)
    if where.dtype != bool:
        raise TypeError(f"where has dtype {where.dtype.name}, but says which elements count by bools")
    try:
        return jnp.broadcast_to(where, x.shape)
    except ValueError:
        raise ValueError(f"where has shape {where.shape}, which does not broadcast to {name} of {x.shape}") from None


def _names(axis_name: Any) -> sharded.Names:
    """Returns the axes of a mesh that rows are divided along."""
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def _along(name: str, x: Any, axis: Axes, where: Any, axis_name: AxisName = None) -> jax.Array:
    x = _logits(x)
    return _computed(x, _checked_where(where, x), name, normalize_axes(axis, x.ndim), _names(axis_name))


@functools.partial(jax.jit, static_argnames=("name", "axes", "names"), inline=True)
def _computed(
    x: jax.Array, where: jax.Array | None, name: str, axes: tuple[int, ...], names: sharded.Names
) -> jax.Array:
    masked = x if where is None else jnp.where(where, x, -jnp.inf)
    rows, place, undo = _merged(masked, axes)
    if names and x.size:
        y = undo(getattr(sharded, name)(rows, place, names))
    else:
        y = undo(getattr(differentiable, name)(rows, place))
    if where is None:
        return y
    return jnp.where(where, y, 0 if name == "softmax" else -jnp.inf)


@functools.partial(jax.jit, static_argnames=("axes", "keepdims", "names"), inline=True)
def _logsumexp(
    a: jax.Array, where: jax.Array | None, axes: tuple[int, ...], keepdims: bool, names: sharded.Names
) -> jax.Array:
    rows, place, _ = _merged(a if where is None else jnp.where(where, a, -jnp.inf), axes)
    shape = [1 if i in axes else n for i, n in enumerate(a.shape) if keepdims or i not in axes]
    found = sharded.logsumexp(rows, place, names) if names and a.size else differentiable.logsumexp(rows, place)
    return found.reshape(shape)


@functools.partial(jax.jit, static_argnames=("axes", "keepdims", "names"), inline=True)
def _weighted(  # noqa: PLR0917 (as JAX passes them)
    a: jax.Array, b: jax.Array, where: Any, axes: tuple[int, ...], keepdims: bool, names: sharded.Names
) -> tuple[jax.Array, jax.Array]:
    dtype = jnp.result_type(a, b)
    a = a.astype(dtype)
    a, b = (array.astype(accumulator(a)) for array in (a, b))
    plain = functools.partial(_logsumexp, where=None, axes=axes, keepdims=keepdims, names=names)
    found, sign = weighted.logsumexp(a, b, where, plain)
    return found.astype(dtype), sign.astype(dtype)


@functools.partial(jax.jit, static_argnames=("place",), inline=True)
def _masked_cross_entropy(logits: jax.Array, labels: jax.Array, where: jax.Array, place: int) -> jax.Array:
    # What a label names need not count, so that this is more than the loss of masked logits.
    wide = logits.astype(accumulator(logits))
    total = logsumexp(wide, place, where=where)
    found = total - jnp.take_along_axis(wide, jnp.expand_dims(labels, place), place).squeeze(place)
    return jnp.where(where.any(place), found, 0).astype(logits.dtype)


@functools.partial(jax.jit, static_argnames=("axis", "ignore_index", "label_smoothing", "names"), inline=True)
def _cross_entropy(  # noqa: PLR0917 (as JAX passes them)
    logits: jax.Array, labels: jax.Array, axis: int, ignore_index: int, label_smoothing: float, names: sharded.Names
) -> jax.Array:
    if labels.dtype not in (jnp.int32, jnp.int64):
        labels = labels.astype(jnp.int32)
    if not logits.shape[axis]:
        # None of them has a class.
        return jnp.where(labels == ignore_index, 0, jnp.nan).astype(logits.dtype)
    if names and logits.size:
        return sharded.cross_entropy(logits, labels, axis, names, (ignore_index, label_smoothing))
    return differentiable.cross_entropy(logits, labels, axis, ignore_index, label_smoothing)


@functools.partial(jax.jit, static_argnames=("axis", "temperature", "entropy"), inline=True)
def _token_log_probs(logits: jax.Array, tokens: jax.Array, axis: int, temperature: float, entropy: bool) -> Any:
    if tokens.dtype not in (jnp.int32, jnp.int64):
        tokens = tokens.astype(jnp.int32)
    several = tokens.ndim == logits.ndim
    # Those of a row are neighbours.
    each = jnp.moveaxis(tokens, axis, -1) if several else tokens[..., None]
    log_probs, *entropies = differentiable.token_log_probs(logits, each, axis, temperature, entropy)
    result = jnp.moveaxis(log_probs, -1, axis) if several else log_probs.squeeze(-1)
    return (result, *entropies) if entropy else result


def _merged(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, int, Callable[[jax.Array], jax.Array]]:
    """Returns an array whose axes are one, which of its dimensions that is, and what gives a result the shape of `x`.

    Only axes that are no neighbours are moved, to the end.
    """
    first, count = (axes[0] if axes else 0), len(axes)
    if axes == tuple(range(first, first + count)):
        joined = math.prod(x.shape[first : first + count])
        rows = x.reshape(*x.shape[:first], joined, *x.shape[first + count :])
        return rows, first, lambda y: y.reshape(x.shape)
    ends = tuple(range(x.ndim - count, x.ndim))
    moved = jnp.moveaxis(x, axes, ends)
    rows = moved.reshape(*moved.shape[:-count], -1 if x.size else math.prod(moved.shape[-count:]))
    return rows, x.ndim - count, lambda y: jnp.moveaxis(y.reshape(moved.shape), ends, axes)
