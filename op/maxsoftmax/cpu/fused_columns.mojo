"""Logits that are computed as they are read, along an axis that is not the last, on the CPU: twice, once for the pair and once for
the probabilities.

It is `strided` with loads and stores that are functions. A panel does not reach beyond the last axis, because these do not.
"""

from std.math import ceildiv
from std.utils.numerics import neg_inf

from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from ..logits import Logits, Row
from ..online import MaxSum, accumulator
from ..results import ResultRow, Results
from ..queue import Queue
from ..rows import Rows
from .memory import rounded
from .panels import Panels
from .schedule import Bundles, Pairs, Room, run, spans_of

comptime UNROLL = 8
"""Positions between two rescalings of d."""


def fused_columns[
    Fusion: InputFusion,
    Sink: InputFusion,
    Out: OutputFusion,
    in_dtype: DType,
    out_dtype: DType,
    rank: Int,
    axis: Int,
    causal: Bool,
    epilogue: Bool,
    //,
    has_sink: Bool,
](
    y: Results[Out, out_dtype, rank, axis, epilogue],
    x: Logits[Fusion, in_dtype, rank, axis, causal],
    sink: Logits[Sink, in_dtype, rank, axis, False],
    queue: Queue,
) raises:
    """Writes the softmax of every column of `x` to `y`.

    Parameters:
        Fusion: What computes the logits.
        Sink: What computes the sinks.
        Out: What takes the probabilities.
        in_dtype: Dtype of the logits.
        out_dtype: Dtype of the probabilities.
        rank: Number of dimensions.
        axis: The axis that sums to 1, not the last.
        causal: Whether rows end at the diagonal.
        epilogue: Whether something takes the probabilities.
        has_sink: Whether there is one more logit a row, in the denominator only.

    Args:
        y: Probabilities.
        x: Logits.
        sink: The additional logits, one a row.
        queue: The CPU to run on.
    """
    var rows = x.rows()
    var last = x.shape[rank - 1]
    var lines = rows.inner // last
    run(
        _Columns[
            Fusion,
            Sink,
            Out,
            in_dtype,
            out_dtype,
            rank,
            axis,
            causal,
            epilogue,
            has_sink,
        ](
            y,
            x,
            sink,
            lines,
            Panels[accumulator[in_dtype]()](
                Rows(rows.outer * lines, rows.n, last), spans_of(rows.n)
            ),
        ),
        queue,
    )


@fieldwise_init
struct _Columns[
    Fusion: InputFusion,
    Sink: InputFusion,
    Out: OutputFusion,
    in_dtype: DType,
    out_dtype: DType,
    rank: Int,
    axis: Int,
    causal: Bool,
    epilogue: Bool,
    has_sink: Bool,
](Bundles):
    """Columns in bundles of neighbours along the last axis that are walked side by side. Parameters as of `fused_columns`.
    """

    comptime accum = accumulator[Self.in_dtype]()
    comptime lanes = Panels[Self.accum].lanes
    comptime Vector = SIMD[Self.accum, Self.lanes]
    comptime Source = Row[
        Self.Fusion, Self.in_dtype, Self.rank, Self.axis, Self.causal
    ]

    comptime Target = ResultRow[
        Self.Out, Self.out_dtype, Self.rank, Self.axis, Self.epilogue
    ]

    var y: Results[
        Self.Out, Self.out_dtype, Self.rank, Self.axis, Self.epilogue
    ]
    var x: Logits[Self.Fusion, Self.in_dtype, Self.rank, Self.axis, Self.causal]
    var sink: Logits[Self.Sink, Self.in_dtype, Self.rank, Self.axis, False]
    var lines: Int
    """How many times the last axis lies between two neighbours in a column."""
    var panels: Panels[Self.accum]
    """Of the last axis. Lanes beyond the end of a narrow one hold -inf and are not stored."""

    def count(self) -> Int:
        return self.panels.count()

    def length(self) -> Int:
        return self.panels.rows.n

    def pairs(self) -> Int:
        return self.panels.vectors()

    def room(self) -> Int:
        return 0

    @inline(.always)
    def _place(self, bundle: Int) -> Tuple[Int, Int, Int]:
        """Returns where the bundle's first column is, before and after the axis, and the number of columns.
        """
        var first, _, count = self.panels.place(bundle)
        var line, column = divmod(first, self.panels.rows.inner)
        var outer, after = divmod(line, self.lines)
        return outer, after * self.panels.rows.inner + column, count

    def reduce(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        room: Room[Self.accum],
    ):
        var outer, inner, count = self._place(bundle)
        for pair in range(ceildiv(count, Int(Self.lanes))):
            part[unsafe_offset=pair] = MaxSum[Self.accum, Self.lanes]()
            comptime if Self.has_sink:
                if start == 0:
                    var sinks = _load[Self.lanes](
                        self.sink.row(outer, inner),
                        0,
                        pair * Int(Self.lanes),
                        count,
                    )
                    part[unsafe_offset=pair].add(
                        Array[Self.Vector, 1](fill=rebind[Self.Vector](sinks))
                    )
        var row = self.x.row(outer, inner)
        var stop = min(end, row.length)
        var i = start
        while i + UNROLL <= stop:
            self._add[UNROLL](row, i, count, part)
            i += UNROLL
        while i < stop:
            self._add[1](row, i, count, part)
            i += 1

    @inline(.always)
    def _add[
        n: Int
    ](
        self,
        row: Self.Source,
        i: Int,
        count: Int,
        part: Pairs[Self.accum, Self.lanes],
    ):
        """Adds `n` positions of `count` columns to their pairs."""
        for pair in range(ceildiv(count, Int(Self.lanes))):
            var column = pair * Int(Self.lanes)
            var logits = Array[Self.Vector, n](fill=0)
            comptime for j in range(n):
                logits[j] = rebind[Self.Vector](
                    _load[Self.lanes](row, i + j, column, count)
                )
            part[unsafe_offset=pair].add(logits)

    def write(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        total: Pairs[Self.accum, Self.lanes],
        room: Room[Self.accum],
    ):
        var outer, inner, count = self._place(bundle)
        var row = self.x.row(outer, inner)
        var target = self.y.row(outer, inner)
        var i = start
        while i + UNROLL <= end:
            self._write[UNROLL](target, row, i, count, total)
            i += UNROLL
        while i < end:
            self._write[1](target, row, i, count, total)
            i += 1

    @inline(.always)
    def _write[
        n: Int
    ](
        self,
        target: Self.Target,
        row: Self.Source,
        i: Int,
        count: Int,
        total: Pairs[Self.accum, Self.lanes],
    ):
        """Writes `n` positions of `count` columns."""
        for pair in range(ceildiv(count, Int(Self.lanes))):
            var column = pair * Int(Self.lanes)
            var whole = total[unsafe_offset=pair]
            var normalizer = whole.normalizer()
            var empty = whole.m.eq(neg_inf[Self.accum]()) & whole.d.value.eq(0)
            comptime for j in range(n):
                var values = normalizer.probability(
                    rebind[Self.Vector](
                        _load[Self.lanes](row, i + j, column, count)
                    )
                )
                if self.x.masked:
                    values = empty.select(Self.Vector(0), values)
                _store(target, i + j, column, count, values)


@inline(.always)
def _load[
    lanes: SIMDLength
](row: Row, i: Int, column: Int, count: Int) -> SIMD[row.accum, lanes]:
    """Returns position `i` of the columns from `column` on, -inf from `count` on and where nothing takes part.
    """
    comptime half = Int(lanes) // 2
    var result = SIMD[row.accum, lanes](neg_inf[row.accum]())
    if i >= row.length:
        return result
    if column + Int(lanes) <= count:
        return row.beside(column).load[Int(lanes)](i)
    var lane = 0
    if column + half <= count:
        result = result.insert[offset=0](row.beside(column).load[half](i))
        lane = half
    while column + lane < count:
        result[lane] = row.beside(column + lane).load[1](i)
        lane += 1
    return result


@inline(.always)
def _store[
    accum: DType, lanes: SIMDLength, //
](row: ResultRow, i: Int, column: Int, count: Int, values: SIMD[accum, lanes]):
    """Hands on position `i` of the columns from `column` on, up to `count`, rounded.
    """
    # No earlier, because LLVM takes vectors of bfloat16 apart, at a call an element, where the hardware has none.
    comptime half = Int(lanes) // 2
    if column + Int(lanes) <= count:
        row.beside(column).store(i, rounded[row.dtype](values))
        return
    var lane = 0
    if column + half <= count:
        row.beside(column).store(i, rounded[row.dtype](values.slice[half]()))
        lane = half
    while column + lane < count:
        row.beside(column + lane).store(i, rounded[row.dtype](values[lane]))
        lane += 1
