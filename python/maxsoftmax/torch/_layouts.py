"""Where the elements of a tensor lie, as the kernels count them: row-major (outer, n, inner).

Whatever the order of its dimensions, a tensor without gaps or overlaps is taken as it lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def order(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """Returns the dimensions of a tensor, the outermost first, or None if its memory has gaps or overlaps."""
    dims = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    expected = 1
    for dim in reversed(dims):
        if shape[dim] != 1:
            if strides[dim] != expected:
                return None
            expected *= max(shape[dim], 1)
    return dims


def rows(shape: Sequence[int], dims: Sequence[int], dim: int) -> tuple[int, int, int]:
    """Returns (outer, n, inner) of a tensor whose dimensions lie in the order `dims`, for rows along `dim`."""
    if not shape:
        return 1, 1, 1
    place = dims.index(dim)
    return math.prod(shape[d] for d in dims[:place]), shape[dim], math.prod(shape[d] for d in dims[place + 1 :])


def strides_of_rows(shape: Sequence[int], dims: Sequence[int], dim: int) -> tuple[int, ...]:
    """Returns the strides of a tensor of one element a row, in the order in which the kernels count rows."""
    strides = [0] * len(shape)
    step = 1
    for d in reversed(dims):
        if d != dim:
            strides[d] = step
            step *= max(shape[d], 1)
    return (*strides[:dim], *strides[dim + 1 :])


def lie_alike(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Returns whether two tensors of a shape have their elements in the same places, whatever their strides say."""
    return all(a == b for size, a, b in zip(shape, one, other, strict=True) if size != 1)
