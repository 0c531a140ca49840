"""Where the elements of rows come from: memory, or what MAX fused into the input of an op."""

from std.sys import size_of
from std.utils.numerics import neg_inf

from extensibility.managed_tensor_slice import InputFusion

from ..io.logits import Logits, Row
from ..io.rows import Rows, Source
from .memory import fetch, load


trait RowSource(TrivialRegisterPassable):
    """Tensors that an operation reads."""

    comptime is_computed: Bool = False
    """Whether an element is better kept than loaded again, and a row may end before the tensor does."""
    comptime has_sink: Bool = False
    """Whether there is one more logit a row, in the denominator only."""

    comptime Row: SourceRow
    """A row of them."""

    def row(self, outer: Int, inner: Int) -> Self.Row:
        """Returns the row with these places before and after the axis."""
        ...


trait SourceRow(TrivialRegisterPassable):
    """A row, or neighbouring rows side by side.

    A vector begins at the row's element `i`, and `column` further along the last axis, where that is another one.
    """

    def length(self, n: Int) -> Int:
        """Returns how many of the row's `n` elements take part: the rest are -inf.
        """
        return n

    def load[
        accum: DType, width: SIMDLength
    ](self, i: Int, column: Int, count: Int) -> SIMD[accum, width]:
        """Returns `count` neighbours along the last axis, followed by -inf."""
        ...

    def load_other[
        accum: DType, width: SIMDLength
    ](self, i: Int, column: Int, count: Int) -> SIMD[accum, width]:
        """Returns those of the second tensor, where there is one."""
        return 0

    def load_sink[
        accum: DType, width: SIMDLength
    ](self, column: Int, count: Int) -> SIMD[accum, width]:
        """Returns the sinks of neighbouring rows, where there are sinks."""
        return neg_inf[accum]()

    def prefetch[count: Int, ahead: Int = 0](self, i: Int, column: Int):
        """Prefetches `count` elements, `ahead` bytes behind. They need not exist.
        """
        pass


@fieldwise_init
struct Memory[dtype: DType, contiguous: Bool, two: Bool = False](
    RowSource, SourceRow
):
    """One tensor in memory, or two; a row of them is the same, moved to its first element.

    Parameters:
        dtype: Dtype of the tensors.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.
        two: Whether there is a second tensor.
    """

    comptime Row = Memory[Self.dtype, Self.contiguous, Self.two]

    var x: Source[Self.dtype]
    var other: Source[Self.dtype]
    """The second tensor; any memory if there is none."""
    var rows: Rows[]

    @inline(.always)
    def row(self, outer: Int, inner: Int) -> Self.Row:
        var start = outer * self.rows.n * self.rows.inner + inner
        return {
            self.x.unsafe_offset(start),
            self.other.unsafe_offset(start),
            self.rows,
        }

    @inline(.always)
    def load[
        accum: DType, width: SIMDLength
    ](self, i: Int, column: Int, count: Int) -> SIMD[accum, width]:
        var place = place_of[Self.contiguous](i, column, self.rows)
        return rebind[SIMD[accum, width]](
            load[width](self.x.unsafe_offset(place), count)
        )

    @inline(.always)
    def load_other[
        accum: DType, width: SIMDLength
    ](self, i: Int, column: Int, count: Int) -> SIMD[accum, width]:
        comptime if Self.two:
            var place = place_of[Self.contiguous](i, column, self.rows)
            return rebind[SIMD[accum, width]](
                load[width](self.other.unsafe_offset(place), count)
            )
        else:
            return 0

    @inline(.always)
    def prefetch[count: Int, ahead: Int = 0](self, i: Int, column: Int):
        var place = place_of[Self.contiguous](i, column, self.rows)
        fetch[count, ahead](self.x.unsafe_offset(place))
        comptime if Self.two:
            fetch[count, ahead](self.other.unsafe_offset(place))


@inline(.always)
def place_of[contiguous: Bool](i: Int, column: Int, rows: Rows) -> Int:
    """Returns how far behind the row's first element a vector begins."""
    comptime if contiguous:
        return i
    else:
        return i * rows.inner + column


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

    comptime is_computed = True
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
        return min(n, self.x.end)

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
](row: Row, i: Int, column: Int, var count: Int) -> SIMD[accum, width]:
    """Returns `count` neighbours along the last axis, none beyond the tensor, and -inf where nothing takes part.
    """
    var result = SIMD[accum, width](neg_inf[accum]())

    @inline(.always)
    def piece[size: Int](lane: Int) {imm} -> SIMD[accum, size]:
        comptime if row.axis == row.rank - 1:
            return rebind[SIMD[accum, size]](row.load[size, 1](i + lane))
        else:
            return rebind[SIMD[accum, size]](
                row.beside(column + lane).load[size, 1](i)
            )

    # As wide as vectors of the hardware: what computes them may take wider ones apart.
    comptime size = min(Int(width), 64 // size_of[accum]())
    comptime half = max(1, size // 2)
    if i >= row.end:
        return result
    if count >= Int(width):
        comptime for lane in range(0, Int(width), size):
            result = result.insert[offset=lane](piece[size](lane))
        return result
    var lane = 0
    comptime if row.axis != row.rank - 1:
        if half <= count:
            result = result.insert[offset=0](piece[half](0))
            lane = half
    else:
        count = min(count, row.end - i)
    while lane < count:
        result[lane] = piece[1](lane)
        lane += 1
    return result
