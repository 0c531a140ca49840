"""Where results go: memory, or what MAX fused into the output of an op."""

from extensibility.managed_tensor_slice import OutputFusion

from ..online import accumulator
from ..results import ResultRow, Results
from ..rows import Rows, Target
from .memory import fetch_to_write, rounded, store


trait TargetRow(TrivialRegisterPassable):
    """A row, or neighbouring rows side by side. Places are as of `SourceRow`.
    """

    def store[
        accum: DType, width: SIMDLength, //
    ](self, i: Int, column: Int, count: Int, values: SIMD[accum, width]):
        """Writes the first `count` of `values`, rounded, or all if `count` is at least their number.
        """
        ...

    def prefetch[count: Int, ahead: Int = 0](self, i: Int, column: Int):
        """Prefetches `count` elements, `ahead` bytes behind. They need not exist.
        """
        pass

    def accumulators[accum: DType](self, i: Int) -> Optional[Target[accum]]:
        """Returns where accumulators may wait for the results from `i` on, if they may there.
        """
        return None


trait RowTarget(TrivialRegisterPassable):
    """A tensor that an operation writes."""

    comptime dtype: DType
    """Dtype of the elements."""
    comptime is_memory: Bool
    """Whether they can be read again."""
    comptime Row: TargetRow
    """A row of it."""

    def row(self, outer: Int, inner: Int) -> Self.Row:
        """Returns the row with these places before and after the axis."""
        ...


@fieldwise_init
struct ToMemory[of: DType, contiguous: Bool](RowTarget):
    """A tensor in memory.

    Parameters:
        of: Dtype of the tensor.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.
    """

    comptime dtype = Self.of
    comptime is_memory = True
    comptime Row = ToMemoryRow[Self.of, Self.contiguous]

    var y: Target[Self.of]
    var rows: Rows

    @inline(.always)
    def row(self, outer: Int, inner: Int) -> Self.Row:
        var start = outer * self.rows.n * self.rows.inner + inner
        return {self.y.unsafe_offset(start), self.rows.inner}


@fieldwise_init
struct ToMemoryRow[dtype: DType, contiguous: Bool](TargetRow):
    """A row of `ToMemory`, whose parameters these are."""

    var y: Target[Self.dtype]
    var step: Int
    """From one element of the row to the next."""

    @inline(.always)
    def _at(self, i: Int, column: Int) -> Target[Self.dtype]:
        comptime if Self.contiguous:
            return self.y.unsafe_offset(i)
        else:
            return self.y.unsafe_offset(i * self.step + column)

    @inline(.always)
    def store[
        accum: DType, width: SIMDLength, //
    ](self, i: Int, column: Int, count: Int, values: SIMD[accum, width]):
        store(
            self._at(i, column),
            rebind[SIMD[accumulator[Self.dtype](), width]](values),
            count,
        )

    @inline(.always)
    def prefetch[count: Int, ahead: Int = 0](self, i: Int, column: Int):
        fetch_to_write[count, ahead](self._at(i, column))

    @inline(.always)
    def accumulators[accum: DType](self, i: Int) -> Optional[Target[accum]]:
        comptime if Self.dtype == accum:
            return self._at(i, 0).unsafe_bitcast[Scalar[accum]]()
        else:
            return None


@fieldwise_init
struct HandedOn[Out: OutputFusion, of: DType, rank: Int, axis: Int](RowTarget):
    """A tensor whose elements are handed on as they are computed.

    Parameters:
        Out: What takes them.
        of: Dtype of the elements.
        rank: Number of dimensions.
        axis: The axis of the rows.
    """

    comptime dtype = Self.of
    comptime is_memory = False
    comptime Row = HandedOnRow[Self.Out, Self.of, Self.rank, Self.axis]

    var y: Results[Self.Out, Self.of, Self.rank, Self.axis, True]

    @inline(.always)
    def row(self, outer: Int, inner: Int) -> Self.Row:
        return {self.y.row(outer, inner)}


@fieldwise_init
struct HandedOnRow[Out: OutputFusion, dtype: DType, rank: Int, axis: Int](
    TargetRow
):
    """A row of `HandedOn`, whose parameters these are."""

    var y: ResultRow[Self.Out, Self.dtype, Self.rank, Self.axis, True]

    @inline(.always)
    def _store(self, i: Int, column: Int, values: SIMD[Self.dtype, _]):
        comptime if Self.axis == Self.rank - 1:
            self.y.store(i + column, values)
        else:
            self.y.beside(column).store(i, values)

    @inline(.always)
    def store[
        accum: DType, width: SIMDLength, //
    ](self, i: Int, column: Int, count: Int, values: SIMD[accum, width]):
        # Rounded no earlier, because LLVM takes vectors of bfloat16 apart, at a call an element, where the hardware has
        # none.
        comptime half = Int(width) // 2
        if count >= Int(width):
            self._store(i, column, rounded[Self.dtype](values))
            return
        var lane = 0
        comptime if half > 0:
            if half <= count:
                self._store(
                    i, column, rounded[Self.dtype](values.slice[half]())
                )
                lane = half
        while lane < count:
            self._store(i, column + lane, rounded[Self.dtype](values[lane]))
            lane += 1
