"""What a kernel asks of where results go; see `source`."""

from std.builtin.device_passable import DevicePassable
from std.sys import size_of

from .rounding import rounded
from .rows import Positions, Target


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
    def results(self, values: SIMD[_, _]) -> SIMD[Self.stored, values.length]:
        """Returns values as they are written."""
        return rounded[Self.stored](values)

    @inline(.always)
    def address(self, i: Int) -> Target[Self.stored]:
        """Returns where in memory element `i` of the first row goes, to a target that is there.
        """
        return Target[Self.stored](unsafe_from_address=size_of[Self.stored]())

    @inline(.always)
    def forget(mut self):
        """Hides from the compiler, where that is worth it, that distances are what they were: it would keep them all, in
        registers.
        """
        pass


trait TargetLine(TrivialRegisterPassable):
    """Places of a row along the last axis, or of what of it begins at one of its elements.
    """

    comptime stored: DType
    """Dtype of the results."""

    def onwards(self, start: Int) -> Self:
        """Returns what of the row begins at its element `start`."""
        ...

    @inline(.always)
    def begin(mut self):
        """Looks at what results depend on, once the kernels before this one are done.
        """
        pass

    def is_aligned[width: Int](self) -> Bool:
        """Returns whether `width` elements can be written at a time."""
        ...

    def store[
        accum: DType, width: SIMDLength, //, aligned: Bool
    ](self, i: Int, values: SIMD[accum, width]):
        """Writes the elements from `i` on, rounded: a multiple of `width`, and one by one if they are not `aligned`.
        """
        ...


trait RowTarget(DevicePassable, TrivialRegisterPassable):
    """A tensor of results, seen as (outer, n, inner)."""

    comptime Line: TargetLine
    """Where a thread writes of a row along the last axis."""
    comptime Column: TargetColumn
    """Where it writes of rows along another."""
    comptime in_memory: Bool = False
    """Whether results lie in row-major memory, rounded as they are."""
    comptime has_pairs: Bool = False
    """Whether the pairs of rows are wanted beside results."""

    def line(self, row: Int, n: Int) -> Self.Line:
        """Returns the places of row `row` along the last axis, of `n` elements.
        """
        ...

    def column(self, at: Positions) -> Self.Column:
        """Returns the places of some elements of a row and its neighbours."""
        ...

    def pairs[accum: DType](self) -> Target[accum]:
        """Returns where the pair of row 0 goes, if pairs are what is written: to memory, the one row after the other.
        """
        ...

    def in_vectors[width: Int](self) -> Bool:
        """Returns whether `width` neighbours can be written at a time, given that `inner` is a multiple of it.
        """
        ...
