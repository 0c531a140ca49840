"""Where the elements of rows come from: memory, or what MAX fused into the input of an op."""

from std.sys import size_of
from std.utils.numerics import neg_inf

from extensibility.managed_tensor_slice import InputFusion

from ..logits import Logits, Row
from ..online import accumulator
from ..rows import Rows, Source
from .memory import fetch, load


trait SourceRow(TrivialRegisterPassable):
    """A row, or neighbouring rows side by side.

    A vector begins at the row's element `i`, and `column` further along the last axis, where that is another one.
    """

    def length(self, n: Int) -> Int:
        """Returns how many of `n` elements take part: the rest are -inf."""
        ...

    def load[
        accum: DType, width: SIMDLength
    ](self, i: Int, column: Int, count: Int) -> SIMD[accum, width]:
        """Returns `count` neighbours along the last axis, followed by -inf."""
        ...

    def load_other[
        accum: DType, width: SIMDLength
    ](self, i: Int, column: Int, count: Int) -> SIMD[accum, width]:
        """Returns those of the second tensor, where there is one."""
        return SIMD[accum, width](0)

    def load_sink[
        accum: DType, width: SIMDLength
    ](self, column: Int, count: Int) -> SIMD[accum, width]:
        """Returns the sinks of neighbouring rows, where there are sinks."""
        return SIMD[accum, width](neg_inf[accum]())

    def prefetch[count: Int, ahead: Int = 0](self, i: Int, column: Int):
        """Prefetches `count` elements, `ahead` bytes behind. They need not exist.
        """
        pass


trait RowSource(TrivialRegisterPassable):
    """Tensors that an operation reads, all of one shape."""

    comptime accum: DType
    """Dtype of the arithmetic."""
    comptime is_computed: Bool
    """Whether an element takes longer to load again than from where it was kept."""
    comptime has_other: Bool
    """Whether there are two tensors."""
    comptime has_sink: Bool
    """Whether there is one more logit a row, in the denominator only."""
    comptime Row: SourceRow
    """A row of them."""

    def row(self, outer: Int, inner: Int) -> Self.Row:
        """Returns the row with these places before and after the axis."""
        ...


@fieldwise_init
struct Memory[dtype: DType, contiguous: Bool, two: Bool = False](RowSource):
    """One tensor in memory, or two.

    Parameters:
        dtype: Dtype of the tensors.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.
        two: Whether there is a second tensor.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime is_computed = False
    comptime has_other = Self.two
    comptime has_sink = False
    comptime Row = MemoryRow[Self.dtype, Self.contiguous, Self.two]

    var x: Source[Self.dtype]
    var other: Source[Self.dtype]
    """The second tensor; any memory if there is none."""
    var rows: Rows

    @inline(.always)
    def row(self, outer: Int, inner: Int) -> Self.Row:
        var start = outer * self.rows.n * self.rows.inner + inner
        return {
            self.x.unsafe_offset(start),
            self.other.unsafe_offset(start),
            self.rows.inner,
        }


@fieldwise_init
struct MemoryRow[dtype: DType, contiguous: Bool, two: Bool](SourceRow):
    """A row of `Memory`, whose parameters these are."""

    var x: Source[Self.dtype]
    var other: Source[Self.dtype]
    var step: Int
    """From one element of the row to the next."""

    @inline(.always)
    def _place(self, i: Int, column: Int) -> Int:
        comptime if Self.contiguous:
            return i
        else:
            return i * self.step + column

    @inline(.always)
    def length(self, n: Int) -> Int:
        return n

    @inline(.always)
    def load[
        accum: DType, width: SIMDLength
    ](self, i: Int, column: Int, count: Int) -> SIMD[accum, width]:
        var at = self.x.unsafe_offset(self._place(i, column))
        return rebind[SIMD[accum, width]](load[width](at, count))

    @inline(.always)
    def load_other[
        accum: DType, width: SIMDLength
    ](self, i: Int, column: Int, count: Int) -> SIMD[accum, width]:
        var at = self.other.unsafe_offset(self._place(i, column))
        return rebind[SIMD[accum, width]](load[width](at, count))

    @inline(.always)
    def prefetch[count: Int, ahead: Int = 0](self, i: Int, column: Int):
        var place = self._place(i, column)
        fetch[count, ahead](self.x.unsafe_offset(place))
        comptime if Self.two:
            fetch[count, ahead](self.other.unsafe_offset(place))


@fieldwise_init
struct Computed[
    Fusion: InputFusion,
    Sink: InputFusion,
    dtype: DType,
    rank: Int,
    axis: Int,
    causal: Bool,
    sinks: Bool,
](RowSource):
    """Logits that are computed as they are loaded.

    Parameters:
        Fusion: What computes the logits.
        Sink: What computes the sinks.
        dtype: Dtype of both.
        rank: Number of dimensions.
        axis: The axis of the rows.
        causal: Whether rows end at the diagonal.
        sinks: Whether there are sinks.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime is_computed = True
    comptime has_other = False
    comptime has_sink = Self.sinks
    comptime Row = ComputedRow[
        Self.Fusion, Self.Sink, Self.dtype, Self.rank, Self.axis, Self.causal
    ]

    var x: Logits[Self.Fusion, Self.dtype, Self.rank, Self.axis, Self.causal]
    var sink: Logits[Self.Sink, Self.dtype, Self.rank, Self.axis, False]

    @inline(.always)
    def row(self, outer: Int, inner: Int) -> Self.Row:
        return {self.x.row(outer, inner), self.sink.row(outer, inner)}


@fieldwise_init
struct ComputedRow[
    Fusion: InputFusion,
    Sink: InputFusion,
    dtype: DType,
    rank: Int,
    axis: Int,
    causal: Bool,
](SourceRow):
    """A row of `Computed`, whose parameters these are."""

    var x: Row[Self.Fusion, Self.dtype, Self.rank, Self.axis, Self.causal]
    var sink: Row[Self.Sink, Self.dtype, Self.rank, Self.axis, False]

    @inline(.always)
    def length(self, n: Int) -> Int:
        return min(n, self.x.length)

    @inline(.always)
    def load[
        accum: DType, width: SIMDLength
    ](self, i: Int, column: Int, count: Int) -> SIMD[accum, width]:
        return _load[accum, width](self.x, i, column, count)

    @inline(.always)
    def load_sink[
        accum: DType, width: SIMDLength
    ](self, column: Int, count: Int) -> SIMD[accum, width]:
        return _load[accum, width](self.sink, 0, column, count)


@inline(.always)
def _load[
    accum: DType, width: SIMDLength
](row: Row, i: Int, column: Int, count: Int) -> SIMD[accum, width]:
    """Returns `count` neighbours along the last axis, none beyond the tensor, and -inf where nothing takes part.
    """
    comptime along = row.axis == row.rank - 1
    # Vectors that the hardware has: what computes them may take wider ones apart.
    comptime piece = min(Int(width), 64 // size_of[accum]())
    comptime half = piece // 2
    var result = SIMD[accum, width](neg_inf[accum]())
    if i >= row.length:
        return result
    if count >= Int(width):
        comptime for k in range(0, Int(width), piece):
            comptime if along:
                var values = row.load[piece](i + k)
                result = result.insert[offset=k](
                    rebind[SIMD[accum, piece]](values)
                )
            else:
                var values = row.beside(column + k).load[piece](i)
                result = result.insert[offset=k](
                    rebind[SIMD[accum, piece]](values)
                )
        return result
    var lane = 0
    comptime if not along and half > 0:
        if half <= count:
            var values = row.beside(column).load[half](i)
            result = result.insert[offset=0](rebind[SIMD[accum, half]](values))
            lane = half
    while lane < count:
        comptime if along:
            if i + lane >= row.length:
                return result
            var value = row.load[1](i + lane)
            result[lane] = rebind[Scalar[accum]](value)
        else:
            var value = row.beside(column + lane).load[1](i)
            result[lane] = rebind[Scalar[accum]](value)
        lane += 1
    return result
