"""ln |Σ b · exp x| and its sign, as SciPy has them: one sum of what is positive, and one of what is negative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from maxsoftmax._arrays.bits import narrowed, widened
from maxsoftmax._arrays.call import Call
from maxsoftmax._arrays.memory import HOST, accumulator, view


def logsumexp(x: Any, b: Any, return_sign: bool, plain: Callable[[np.ndarray], Any]) -> Any:
    """Returns the logarithm, NaN of a negative sum unless its sign is returned, too.

    Args:
        x: Logits, on the host.
        b: What exponentials are multiplied by, or None.
        return_sign: Whether to return the sign.
        plain: Returns ln Σ exp of an array along the axes.

    Raises:
        TypeError: If `b` is not of real numbers.
        ValueError: If it does not broadcast against `x`, or one of them is on a GPU.
    """
    call = Call(x, "x", None)
    dtype = call.x.dtype
    wide = np.dtype(accumulator(dtype))
    if call.x.device != HOST:
        raise ValueError("x is on a GPU, but b and return_sign are for arrays on the host")
    logits = widened(view(call.x), dtype, wide)
    weights = np.ones((), wide) if b is None else _weights(b, wide)
    try:
        logits, weights = np.broadcast_arrays(logits, weights)
    except ValueError:
        raise ValueError(f"b has shape {weights.shape}, which does not broadcast with x of {logits.shape}") from None
    nothing = np.array(-np.inf, wide)
    with np.errstate(divide="ignore", invalid="ignore"):
        # Where the weight is 0 nothing is added, whatever the logit is.
        terms = np.where(weights == 0, nothing, logits + np.log(np.abs(weights)))
        gains, losses = (plain(np.where(of, terms, nothing)) for of in (~(weights < 0), weights < 0))
        larger, smaller = np.maximum(gains, losses), np.minimum(gains, losses)
        found = np.where(smaller == -np.inf, larger, larger + np.log1p(-np.exp(smaller - larger)))
    sign = _order(gains, losses)
    if not return_sign:
        found = np.where(sign < 0, np.nan, found)
    results = [call.kind.convert(call.given, narrowed(y.astype(wide), dtype), dtype, HOST) for y in (found, sign)]
    return tuple(results) if return_sign else results[0]


def _order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns 1 where `a` is larger, -1 where `b` is, 0 where they are the same, and NaN beside NaN."""
    found: np.ndarray = np.where(np.isnan(a) | np.isnan(b), np.nan, np.where(a > b, 1.0, np.where(a < b, -1.0, 0.0)))
    return found


def _weights(b: Any, wide: np.dtype) -> np.ndarray:
    try:
        found = np.asarray(b)
    except (TypeError, ValueError):
        found = np.empty(0, object)
    if found.dtype.kind not in "biuf":
        raise TypeError(f"b must be an array of real numbers, not {b!r}")
    return found.astype(wide)
