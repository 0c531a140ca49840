"""Where results go: memory, or what MAX fused into the output of an op."""

from extensibility.managed_tensor_slice import OutputFusion
from std.sys import size_of

from ..math.online import accumulator
from ..io.results import ResultRow, Results
from ..io.rows import Rows, Target
from .memory import before_line, fetch_to_write, LINE, store, stream
from .sources import place_of
from .tuning import NEVER, STREAMED


trait RowTarget(TrivialRegisterPassable):
    """A tensor that an operation writes, at one of its rows, or at neighbours side by side. Places are as of `RowSource`.
    """

    comptime holds: DType
    """Dtype of what may wait for results where these go; uint8 if nothing may."""
    comptime streams: Bool = False
    """Whether results are written past the caches."""
    comptime line: Int = 1
    """Elements of a line."""
    comptime Streaming: RowTarget
    """The same, written past the caches."""

    def row(self, outer: Int, inner: Int) -> Self:
        """Returns the target at the row with these places before and after the axis, given the target at no row.
        """
        ...

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

    def streaming(self) -> Optional[Self.Streaming]:
        """Returns the target that is written past the caches, if that is best: no cache would hold the results until they are read.
        """
        return None

    def line_from(self, i: Int) -> Int:
        """Returns the first element from `i` on, along the last axis, from which on `stream` may write.
        """
        return i

    def stream[
        accum: DType, width: SIMDLength, //
    ](self, i: Int, column: Int, values: SIMD[accum, width]):
        """Writes `values`, rounded, past the caches, from such an element on along the last axis; of rows side by side a
        line of them.
        """
        pass

    @inline(.always)
    def put[
        accum: DType, width: SIMDLength, //, may_stream: Bool
    ](self, i: Int, column: Int, count: Int, values: SIMD[accum, width]):
        """Writes the first `count` of `values`, as `stream` does where that is best and `may_stream` says that it may, else as `store`.
        """
        comptime if Self.streams and may_stream:
            self.stream(i, column, values)
        else:
            self.store(i, column, count, values)

    def memory[accum: DType](self) -> Optional[Target[accum]]:
        """Returns where accumulators may wait for the results of the row."""
        return None


struct ToMemory[dtype: DType, contiguous: Bool, streamed: Bool = False](
    RowTarget
):
    """A tensor in memory.

    Parameters:
        dtype: Dtype of the tensor.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.
        streamed: Whether it is written past the caches.
    """

    comptime holds = Self.dtype
    comptime streams = Self.streamed
    comptime line = LINE // size_of[Self.dtype]()
    comptime Streaming = ToMemory[Self.dtype, Self.contiguous, True]

    var y: Target[Self.dtype]
    var rows: Rows[]
    var scale: Float64
    """What results of float8 are multiplied by."""

    @inline(.always)
    def __init__(
        out self, y: Target[Self.dtype], rows: Rows, scale: Float64 = 1
    ):
        self.y = y
        self.rows = rows
        self.scale = scale

    @inline(.always)
    def row(self, outer: Int, inner: Int) -> Self:
        var start = outer * self.rows.n * self.rows.inner + inner
        return {self.y.unsafe_offset(start), self.rows, self.scale}

    @inline(.always)
    def store[
        accum: DType, width: SIMDLength, //
    ](self, i: Int, column: Int, count: Int, values: SIMD[accum, width]):
        var place = place_of[Self.contiguous](i, column, self.rows)
        store(self.y.unsafe_offset(place), values, count, self.scale)

    @inline(.always)
    def prefetch[count: Int, ahead: Int = 0](self, i: Int, column: Int):
        comptime if Self.streams:
            return
        var place = place_of[Self.contiguous](i, column, self.rows)
        fetch_to_write[count, ahead](self.y.unsafe_offset(place))

    @inline(.always)
    def streaming(self) -> Optional[Self.Streaming]:
        comptime size = size_of[Self.dtype]()
        # Of narrower results, those of rows side by side are less than a line.
        comptime fills = size == size_of[accumulator[Self.dtype]()]()
        comptime if STREAMED == NEVER or not (Self.contiguous or fills):
            return None
        comptime unit = size if Self.contiguous else LINE
        var apart = 0 if Self.contiguous else self.rows.inner * size
        if (
            self.rows.count() * self.rows.n * size < STREAMED
            or (Int(self.y) | apart) % unit != 0
        ):
            return None
        return Self.Streaming(self.y, self.rows, self.scale)

    @inline(.always)
    def line_from(self, i: Int) -> Int:
        comptime if not Self.streams:
            return i
        return i + before_line(self.y.unsafe_offset(i))

    @inline(.always)
    def stream[
        accum: DType, width: SIMDLength, //
    ](self, i: Int, column: Int, values: SIMD[accum, width]):
        var place = place_of[Self.contiguous](i, column, self.rows)
        stream(self.y.unsafe_offset(place), values, self.scale)

    @inline(.always)
    def memory[accum: DType](self) -> Optional[Target[accum]]:
        return self.y.unsafe_bitcast[Scalar[accum]]()


@fieldwise_init
struct HandedOn[Out: OutputFusion, dtype: DType, rank: Int, axis: Int](
    RowTarget
):
    """A tensor whose elements are handed on as they are computed.

    Parameters:
        Out: What takes them.
        dtype: Dtype of the elements.
        rank: Number of dimensions.
        axis: The axis of the rows.
    """

    comptime holds = DType.uint8
    comptime Streaming = Self

    var y: Results[Self.Out, Self.dtype, Self.rank, Self.axis, True]
    var at: ResultRow[Self.Out, Self.dtype, Self.rank, Self.axis, True]

    @inline(.always)
    def row(self, outer: Int, inner: Int) -> Self:
        return {self.y, self.y.row(outer, inner)}

    @inline(.always)
    def store[
        accum: DType, width: SIMDLength, //
    ](self, i: Int, column: Int, count: Int, values: SIMD[accum, width]):
        @inline(.always)
        def hand_on(lane: Int, piece: SIMD[accum, _]) {imm}:
            # Rounded no earlier, because LLVM takes vectors of bfloat16 apart, at a call an element, where the hardware
            # has none.
            comptime if Self.axis == Self.rank - 1:
                self.at.store(i + lane, piece)
            else:
                self.at.beside(column + lane).store(i, piece)

        comptime half = max(1, Int(width) // 2)
        if count >= Int(width):
            hand_on(0, values)
            return
        var lane = 0
        if half <= count:
            hand_on(0, values.slice[half]())
            lane = half
        while lane < count:
            hand_on(lane, values[lane])
            lane += 1
