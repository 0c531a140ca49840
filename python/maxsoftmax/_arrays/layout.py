"""How memory is divided into rows: axes and strides in, (outer, n, inner) out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from maxsoftmax._arrays.memory import Array, product


class Rows(NamedTuple):
    """A row-major array as the kernels see it: `outer` × `n` × `inner`, softmax along the middle."""

    outer: int
    n: int
    inner: int

    @classmethod
    def of(cls, shape: Sequence[int], axes: Sequence[int]) -> Rows:
        """Returns the view of an array in C order along consecutive `axes`; if none, every element is a row."""
        first, last = (axes[0], axes[-1] + 1) if axes else (len(shape), len(shape))
        return cls(product(list(shape[:first])), product(list(shape[first:last])), product(list(shape[last:])))

    @property
    def contiguous(self) -> bool:
        """Whether neighbours in a row are neighbours in memory."""
        return self.inner == 1


class Layout(NamedTuple):
    """How an array without gaps lies in memory, and its rows there."""

    order: tuple[int, ...]
    """Its dimensions, from the one with the largest steps to the one with the smallest."""
    rows: Rows


def lay_out(array: Array, axes: Sequence[int]) -> Layout | None:
    """Returns how a kernel walks an array along some of its axes, or None if it has to be copied first."""
    shape, strides = array.shape, array.strides
    order = descending(strides)
    # Dimensions of 1 may lie anywhere, and their strides be anything.
    longer = [i for i in order if shape[i] != 1]
    step = 1
    for i in reversed(longer):
        if strides[i] != step:
            return None
        step *= shape[i]
    places = [place for place, i in enumerate(longer) if i in axes]
    if not are_consecutive(places):
        return None
    return Layout(order, Rows.of([shape[i] for i in longer], places))


def order_to_copy(array: Array, axes: Sequence[int]) -> tuple[int, ...]:
    """Returns the order of dimensions for a copy of an array that cannot be walked: as it is, if its axes allow."""
    order = descending(array.strides)
    longer = [i for i in order if array.shape[i] != 1]
    if are_consecutive([place for place, i in enumerate(longer) if i in axes]):
        return order
    return tuple(i for i in range(len(array.shape)) if i not in axes) + tuple(axes)


def descending(strides: Sequence[int]) -> tuple[int, ...]:
    """Returns dimensions in the order of their steps, the largest first; as they are, where steps are equal."""
    steps = [-abs(step) for step in strides]
    return tuple(sorted(range(len(steps)), key=steps.__getitem__))


def are_consecutive(axes: Sequence[int]) -> bool:
    """Returns whether ascending axes are neighbours."""
    return not axes or axes[-1] - axes[0] == len(axes) - 1


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Returns the order that undoes another one."""
    places = [0] * len(order)
    for place, i in enumerate(order):
        places[i] = place
    return tuple(places)


def without(order: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """Returns the order of the dimensions that are left when `axes` are taken away."""
    kept = [i for i in range(len(order)) if i not in axes]
    return tuple(kept.index(i) for i in order if i not in axes)


def same_steps(array: Array, other: Array) -> bool:
    """Returns whether two arrays of one shape are walked alike."""
    return array.strides == other.strides or all(
        mine == theirs or size == 1
        for size, mine, theirs in zip(array.shape, array.strides, other.strides, strict=True)
    )
