"""What a kernel of rows along an axis that is not the last asks of where their elements come from.

Such rows are neighbours in memory, and are taken by the vector: one element of each of `width` neighbouring rows. A
`SourceColumn` is what one thread reads of the rows of one vector.
"""

from std.builtin.device_passable import DevicePassable
from std.sys import size_of
from std.utils.numerics import neg_inf

from .rows import Source


trait SourceColumn(TrivialRegisterPassable):
    """Some elements of `width` neighbouring rows, at equal distances along the rows.
    """

    comptime loaded: DType
    """Dtype of the elements as they are had: their own of what is in memory, the accumulator of what is computed."""

    def load[width: Int](self, i: Int) -> SIMD[Self.loaded, width]:
        """Returns element `i` of `width` neighbouring rows."""
        ...

    @inline(.always)
    def length(self, n: Int) -> Int:
        """Returns how many elements of the whole rows take part, of `n`: from there on, all are -inf.
        """
        return n

    @inline(.always)
    def address(self, i: Int) -> Source[Self.loaded]:
        """Returns where in memory element `i` of the first row is, of a source that is there.
        """
        return Source[Self.loaded](unsafe_from_address=size_of[Self.loaded]())


trait RowSource(DevicePassable, TrivialRegisterPassable):
    """A tensor of logits, seen as (outer, n, inner), and maybe one more logit for each row.
    """

    comptime elements: DType
    """Dtype of the logits, where they are in memory or were computed in."""
    comptime in_memory: Bool = False
    """Whether the logits lie in memory, in row-major order."""
    comptime is_causal: Bool = False
    """Whether rows may end before the tensor does."""
    comptime has_sink: Bool = False
    """Whether there is one more logit a row, in the denominator only."""
    comptime Column: SourceColumn
    """What a thread reads."""

    def column(
        self,
        outer: Int,
        inner: Int,
        first: Int,
        step: Int,
        n: Int,
        stride: Int,
    ) -> Self.Column:
        """Returns every `step`-th element of a row and its neighbours.

        Args:
            outer: Place of the row before the axis, counted as in row-major memory.
            inner: Place of the row after it.
            first: The first element.
            step: From one element to the next.
            n: Length of the axis.
            stride: Product of the dimensions after it.
        """
        ...

    @inline(.always)
    def is_masked(self) -> Bool:
        """Returns whether a row of nothing but -inf gives 0 (of logarithms -inf), not NaN.
        """
        return False

    @inline(.always)
    def sink[
        width: Int
    ](self, outer: Int, inner: Int) -> SIMD[Self.Column.loaded, width]:
        """Returns the additional logits of `width` neighbouring rows, the first of them as for `column`.
        """
        return SIMD[Self.Column.loaded, width](neg_inf[Self.Column.loaded]())

    def in_vectors[width: Int](self) -> Bool:
        """Returns whether `width` neighbours can be had at a time, given that `inner` is a multiple of it.
        """
        ...
