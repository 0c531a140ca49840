"""Arrays that broadcast to logits, told by their strides in the six dimensions that the library of forms takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from maxsoftmax._arrays.layout import Layout
from maxsoftmax._arrays.memory import Array, product

OUTER = 4
"""How many dimensions may come before the axis; the last of them is that of queries, where there is one."""


class Walk(NamedTuple):
    """The order in which a kernel meets the elements of logits."""

    shape: tuple[int, ...]
    """Of the logits, as the caller has it."""
    order: tuple[int, ...]
    """Its dimensions, from the one with the largest steps on."""
    outside: list[int]
    """Those of them outside of the axis, without those of 1."""
    axis: int | None
    """The axis, if it is longer than 1."""
    inside: list[int]
    """The dimensions inside of the axis."""
    queries: int | None
    """The dimension of queries, if there are several and their number counts."""

    @classmethod
    def of(cls, shape: Sequence[int], layout: Layout, axis: int, causal: bool) -> Walk:
        """Returns how logits of this layout are walked."""
        longer = [i for i in layout.order if shape[i] != 1]
        queries = axis - 1 if causal and shape[axis - 1] != 1 else None
        if axis in longer:
            at = longer.index(axis)
            return cls(tuple(shape), layout.order, longer[:at], axis, longer[at + 1 :], queries)
        # An axis of 1 may be anywhere.
        at = len(longer) if queries is None else longer.index(queries) + 1
        return cls(tuple(shape), layout.order, longer[:at], None, longer[at:], queries)

    @property
    def is_possible(self) -> bool:
        """Whether queries lie where the kernel looks for them: right outside of the axis."""
        return self.queries is None or self.outside[-1:] == [self.queries]

    @property
    def inmost(self) -> int | None:
        """The dimension in which neighbours are neighbours in memory, if there are any."""
        if self.inside:
            return self.inside[-1]
        if self.axis is not None:
            return self.axis
        return self.outside[-1] if self.outside else None


class Dimensions(NamedTuple):
    """Logits and what broadcasts to them, as the library takes them."""

    shape: tuple[int, ...]
    """Four dimensions outside of the axis, the axis, and one inside."""
    strides: list[tuple[int, ...]]
    """Of each array, over these six."""


def steps(array: Array, rank: int) -> list[int]:
    """Returns the strides of an array over the dimensions that it broadcasts to: 0 where it does."""
    own = zip(array.shape, array.strides, strict=True)
    return [0] * (rank - len(array.shape)) + [0 if size == 1 else step for size, step in own]


def merged(walk: Walk, arrays: Sequence[Sequence[int]], causal: bool) -> Dimensions | None:
    """Returns logits in six dimensions, or None if arrays broadcast to them in more ways than these can tell.

    Args:
        walk: How the logits are walked.
        arrays: The `steps` of each array.
        causal: Whether the last of the outer dimensions is that of queries.
    """
    shape = walk.shape
    alone = walk.outside[-1:] if walk.queries is not None else []
    outer: list[list[int]] = list(_groups(shape, walk.outside[: len(walk.outside) - len(alone)], arrays))
    if causal:
        outer.append(alone)
    inner = list(_groups(shape, walk.inside, arrays))
    if len(outer) > OUTER or len(inner) > 1:
        return None
    groups = [
        *[[] for _ in range(OUTER - len(outer))],
        *outer,
        [] if walk.axis is None else [walk.axis],
        *(inner or [[]]),
    ]
    sizes = tuple(product([shape[i] for i in group]) for group in groups)
    return Dimensions(sizes, [tuple(own[group[-1]] if group else 0 for group in groups) for own in arrays])


def _groups(shape: Sequence[int], dims: Sequence[int], arrays: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yields neighbouring dimensions that are one for every array: walked in one step, or broadcast."""
    group: list[int] = []
    for i in dims:
        if group and not all(own[group[-1]] == own[i] * shape[i] for own in arrays):
            yield group
            group = []
        group.append(i)
    if group:
        yield group
