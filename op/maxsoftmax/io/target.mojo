"""What a kernel of rows along an axis that is not the last asks of where results go; see `source`."""

from std.builtin.device_passable import DevicePassable

from .rows import Target


trait TargetColumn(TrivialRegisterPassable):
    """Places of some elements of neighbouring rows, at equal distances along the rows.
    """

    comptime stored: DType
    """Dtype of the results."""

    def store[
        accum: DType, width: SIMDLength, //
    ](self, i: Int, values: SIMD[accum, width]):
        """Writes element `i` of `width` neighbouring rows, rounded."""
        ...

    @inline(.always)
    def forget(mut self):
        """Hides from the compiler, where that is worth it, that distances are what they were: it would keep them all, in
        registers.
        """
        pass


trait RowTarget(DevicePassable, TrivialRegisterPassable):
    """A tensor of results, seen as (outer, n, inner)."""

    comptime Column: TargetColumn
    """Where a thread writes."""

    def column(
        self,
        outer: Int,
        inner: Int,
        first: Int,
        step: Int,
        n: Int,
        stride: Int,
    ) -> Self.Column:
        """Returns the places of every `step`-th element of a row and its neighbours. Arguments are as of `RowSource.column`.
        """
        ...

    def pairs[accum: DType](self) -> Target[accum]:
        """Returns where the pair of row 0 goes, if pairs are what is written: to memory, the one row after the other.
        """
        ...

    def in_vectors[width: Int](self) -> Bool:
        """Returns whether `width` neighbours can be written at a time, given that `inner` is a multiple of it.
        """
        ...
