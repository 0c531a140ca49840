"""What each op has to come to, in float64, and how large the terms are that rounding errors come from."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from maxsoftmax._bench.cases import KEPT, SCALE, Case

RUNNING_SUM = 1e-7
"""What `mean_loss` itself may be off by, of very short rows."""


class Expected(NamedTuple):
    """Exact results, and the yardstick of their errors."""

    values: np.ndarray
    terms: np.ndarray
    """Magnitudes of what is added up to give `values`: an error of so much is a relative error of 1."""
    below: np.ndarray
    """By how much a logit is below what its exponential is taken over: that may be off by so many more roundings."""


def softmax(x: np.ndarray) -> Expected:
    """Returns softmax of the columns of a matrix."""
    # Imported only where it is needed, so that the command starts fast.
    import scipy.special

    y = scipy.special.softmax(x, axis=0)
    return Expected(y, y, x.max(axis=0) - x)


def log_softmax(x: np.ndarray) -> Expected:
    """Returns the logarithm of softmax of the columns of a matrix."""
    below = x.max(axis=0) - x
    log_sum = np.log(np.exp(-below).sum(axis=0))
    return Expected(-below - log_sum, 1 + below + log_sum, np.zeros_like(x))


def scaled_softmax(x: np.ndarray) -> Expected:
    """Returns softmax of the scaled columns of a matrix."""
    return softmax(x * SCALE)


def rescaled_softmax(x: np.ndarray) -> Expected:
    """Returns softmax of the scaled columns of a matrix, times what is kept."""
    y = scaled_softmax(x)
    return Expected(y.values * KEPT, y.terms * KEPT, y.below)


def of_query(op: str, x: np.ndarray, query: int) -> Expected:
    """Returns softmax of one row of scores, a matrix of one column, of the keys that the query sees."""
    return softmax(np.where(_seen(op, query, np.arange(len(x)))[:, None], x, -np.inf))


def mask(case: Case) -> np.ndarray:
    """Returns which keys each query sees: bools of (queries, keys)."""
    queries, keys = (np.arange(size, dtype=np.int32) for size in case.shape[-2:])
    return _seen(case.op, queries[:, None], keys)


def _seen(op: str, query: Any, key: np.ndarray) -> np.ndarray:
    seen: np.ndarray = query >= key if op == "causal_softmax" else (query + key) % 4 != 0
    return seen


def softmax_backward(y: np.ndarray, dy: np.ndarray) -> Expected:
    """Returns the gradient of logits in the columns of a matrix."""
    products = y * dy
    terms = y * (np.abs(dy) + np.abs(products).sum(axis=0))
    return Expected(y * (dy - products.sum(axis=0)), terms, np.zeros_like(y))


def cross_entropy_gradient(x: np.ndarray, target: int, rows: int) -> Expected:
    """Returns the gradient of one row of logits, a matrix of one column, by the mean loss of `rows`."""
    y, _, below = softmax(x)
    # Some libraries round the logarithm of a probability before they take its exponential.
    below = below - np.log(y.max())
    wanted = np.zeros_like(y)
    wanted[target] = 1
    return Expected((y - wanted) / rows, (y + wanted) / rows, below)


def mean_loss(block: np.ndarray, offset: int, shape: tuple[int, int], target: np.ndarray) -> float:
    """Returns the mean cross entropy of all rows of a matrix that repeats a block over and over, from `offset` on."""
    rows, n = shape
    # Sums of any stretch are differences of running sums, so that billions of elements need not be added up.
    sums = np.concatenate(([0.0], np.cumsum(np.exp(block))))
    starts = offset + np.arange(rows) * n

    def up_to(end: np.ndarray) -> np.ndarray:
        whole, rest = np.divmod(end, len(block))
        result: np.ndarray = whole * sums[-1] + sums[rest]
        return result

    chosen = block[(starts + target) % len(block)]
    return float(np.mean(np.log(up_to(starts + n) - up_to(starts)) - chosen))
