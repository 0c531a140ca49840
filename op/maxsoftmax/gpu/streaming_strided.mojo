"""The fast kernels along an axis that is not the last, for what does not fit on the chip: two reads and one write an
element, in two launches.

It is `streaming` turned. In the first launch each block takes a unit of the positions of a few vectors of columns, whose length
follows from that of the row alone, so that it makes no difference to a row's pair how many others there are, and leaves their pairs
in device memory; in the second it takes a span, merges the pairs of its columns, and writes. That goes through everything backwards, so
that what was read last, and is still in the last cache, is read first. Logits that are computed as they are read are
computed twice.
"""

from std.math import ceildiv
from std.sys import size_of
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)

from ..math.exponential import Scale
from ..ops.finish import Finish
from ..io.source import RowSource
from ..io.target import RowTarget
from ..math.online import Sum
from ..queue import Queue
from ..io.rows import Rows
from .hardware.cluster import Pair
from .partition.strided import (
    COLUMN_THREADS,
    StridedPart,
    Scratch,
    end,
    is_exact,
)
from .hardware.pdl import pdl_wait, pdl_attributes
from .hardware.team import maximum
from .resident import add, write_pair
from .tuning import Tuned

comptime UNROLL = Tuned.strip_unroll
"""Vectors that a thread has under way at a time."""

comptime Floats = Pointer[Float32, MutUntrackedOrigin]
"""Where pairs wait between the launches: for each unit, first the maxima of all columns, then their sums."""


struct Running[exact: Bool, width: Int](TrivialRegisterPassable):
    """What a thread has seen of its columns.

    Parameters:
        exact: Of the scale of their exponentials.
        width: How many columns.
    """

    comptime S = Scale[Self.exact, Self.width]
    comptime Values = SIMD[DType.float32, Self.width]

    var m: Self.Values
    """The maxima."""
    var scale: Self.S
    """What the exponentials are in."""
    var d: Sum[DType.float32, Self.width]
    """Their sums."""

    @inline(.always)
    def __init__(out self):
        """Nothing yet."""
        self.m = Self.Values(neg_inf[DType.float32]())
        self.scale = Self.S(self.m)
        self.d = Sum[DType.float32, Self.width]()

    @inline(.always)
    def add[
        dtype: DType, //
    ](mut self, raw: Array[SIMD[dtype, Self.width], UNROLL]):
        """Adds some positions."""
        var largest = raw[0]
        comptime for j in range(1, UNROLL):
            largest = maximum(largest, raw[j])
        var larger = maximum(self.m, largest.cast[DType.float32]())
        # After the first few vectors hardly ever.
        if not larger.eq(self.m).reduce_and():
            var raised = Self.S(larger)
            var nothing = self.m.eq(neg_inf[DType.float32]())
            self.d.scale(
                nothing.select(Self.Values(0), self.scale.over(raised))
            )
            self.m = larger
            self.scale = raised
        var terms = self.scale.exp(raw[0].cast[DType.float32]())
        comptime for j in range(1, UNROLL):
            terms += self.scale.exp(raw[j].cast[DType.float32]())
        add[Self.exact](self.d, terms)

    @inline(.always)
    def leave[
        lanes: Int
    ](self, pairs: Floats, unit: UInt32, index: UInt32, total: UInt32):
        """Leaves the pairs of what the threads of each lane have seen. Every thread of the block calls this, once.

        Parameters:
            lanes: Vectors of columns that the block takes.

        Args:
            pairs: Where.
            unit: Which positions they are of.
            index: Which vector of columns this thread has.
            total: How many there are.
        """
        var maxima = Scratch[lanes, Self.width]()
        var sums = Scratch[lanes, Self.width]()
        var thread = Int(thread_idx.x)
        var all = maxima.reduce[True](thread, self.m)
        var sum = sums.reduce[False](
            thread, Pair(self.m, self.d.value).sum_over(Self.S(all))
        )
        if thread < lanes and index < total:
            var mine = pairs.unsafe_offset(
                (Int(unit) * 2 * Int(total) + Int(index)) * Self.width
            )
            mine.unsafe_store[alignment=4 * Self.width](0, all)
            mine.unsafe_store[alignment=4 * Self.width](
                Int(total) * Self.width, sum
            )


@inline(.always)
def merge_units[
    exact: Bool, lanes: Int, width: Int
](pairs: Floats, index: UInt32, total: UInt32, units: Int) -> Pair[width]:
    """Returns what all units have left of a vector of columns. Every thread of the block calls this, once.

    Parameters:
        exact: Of the scale that the sums are in.
        lanes: Vectors of columns that the block takes.
        width: Columns a vector.

    Args:
        pairs: Where they are.
        index: Which vector of columns this thread has.
        total: How many there are.
        units: How many.
    """
    comptime Values = SIMD[DType.float32, width]
    comptime deep = COLUMN_THREADS // lanes
    var maxima = Scratch[lanes, width]()
    var sums = Scratch[lanes, width]()
    var thread = Int(thread_idx.x)
    # Lanes beyond the last column read the last one's pairs.
    var column = Int(min(index, total - 1)) * width
    var stride = Int(total) * width
    var m = Values(neg_inf[DType.float32]())
    for i in range(thread // lanes, units, deep):
        m = maximum(
            m,
            pairs.unsafe_load[width=width, alignment=4 * width](
                column + 2 * i * stride
            ),
        )
    m = maxima.reduce[True](thread, m)
    var scale = Scale[exact, width](m)
    var d = Values(0)
    for i in range(thread // lanes, units, deep):
        var theirs = pairs.unsafe_offset(column + 2 * i * stride)
        d += Pair(
            theirs.unsafe_load[width=width, alignment=4 * width](),
            theirs.unsafe_load[width=width, alignment=4 * width](stride),
        ).sum_over(scale)
    return Pair(m, sums.reduce[False](thread, d))


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(COLUMN_THREADS)),
    `nvvm.minctasm`=SIMDLength(min_blocks[S](width, writes=False)),
)
def streaming_pairs_kernel[
    S: RowSource, lanes: Int, width: Int
](
    pairs: Floats,
    x: S,
    total: Int64,
    across: Int64,
    n: Int64,
    tiles: Int64,
    length: Int64,
):
    """First launch: the pairs of each block's unit of its columns.

    Parameters:
        S: Where logits come from, of 4 bytes or 2.
        lanes: Vectors of columns that a block takes, a power of two.
        width: Columns a vector.

    Args:
        pairs: Where the pairs go.
        x: Logits; their sink is not looked at.
        total: Vectors of columns, less than 2^31.
        across: Those of a position.
        n: Positions.
        tiles: Blocks that a unit is shared by.
        length: Positions of a unit.
    """
    comptime Raw = SIMD[S.Column.loaded, width]
    var thread = Int(thread_idx.x)
    var unit = UInt32(block_idx.x) // UInt32(tiles)
    var index = (UInt32(block_idx.x) - unit * UInt32(tiles)) * UInt32(
        lanes
    ) + UInt32(thread % lanes)
    var part = StridedPart[lanes, width, S.in_memory](
        index,
        UInt32(total),
        UInt32(across),
        Int(n),
        thread,
        Int(unit),
        Int(length),
    )
    var source = part.source(x)
    comptime if S.is_causal:
        part = part.before(source.length(Int(n)))
    pdl_wait()
    var running = Running[is_exact[S](), width]()
    var i = 0
    while part.has(i):
        var raw = Array[Raw, UNROLL](fill=Raw(neg_inf[S.Column.loaded]()))
        comptime for j in range(UNROLL):
            if part.has(i + j):
                raw[j] = source.load[width](i + j)
        running.add(raw)
        i += UNROLL
    running.leave[lanes](pairs, unit, index, UInt32(total))


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(COLUMN_THREADS)),
    `nvvm.minctasm`=SIMDLength(min_blocks[S](width, writes=True)),
)
def streaming_results_kernel[
    S: RowSource, T: RowTarget, finish: Finish, lanes: Int, width: Int
](
    y: T,
    x: S,
    pairs: Floats,
    total: Int64,
    across: Int64,
    n: Int64,
    tiles: Int64,
    share: Int64,
    units: Int64,
):
    """Second launch: each block merges the pairs of its columns, and writes its span of them.

    Parameters:
        S: Where logits come from, of 4 bytes or 2.
        T: Where results go.
        finish: What of each row is written.
        lanes: Vectors of columns that a block takes, a power of two.
        width: Columns a vector.

    Args:
        y: Results.
        x: Logits.
        pairs: What the first launch left.
        total: Vectors of columns, less than 2^31.
        across: Those of a position.
        n: Positions.
        tiles: Blocks that a span is shared by.
        share: Positions a span.
        units: How many units there are.
    """
    comptime exact = is_exact[S]()
    comptime Raw = SIMD[S.Column.loaded, width]
    comptime Vector = SIMD[DType.float32, width]
    var thread = Int(thread_idx.x)
    # The last block's work is done first.
    var block = UInt32(grid_dim.x) - 1 - UInt32(block_idx.x)
    var span = block // UInt32(tiles)
    var index = (block - span * UInt32(tiles)) * UInt32(lanes) + UInt32(
        thread % lanes
    )
    var part = StridedPart[lanes, width, S.in_memory](
        index,
        UInt32(total),
        UInt32(across),
        Int(n),
        thread,
        Int(span),
        Int(share),
    )
    var source = part.source(x)
    pdl_wait()
    var pair = merge_units[exact, lanes, width](
        pairs, index, UInt32(total), Int(units)
    )
    comptime if not S.in_memory:
        if index >= UInt32(total):
            return
    comptime if S.has_sink:
        pair = pair.joined[exact](
            x.sink[width](part.outer, part.inner).cast[DType.float32]()
        )
    comptime if finish == Finish.PAIR:
        if span == 0 and thread < lanes and index < UInt32(total):
            write_pair[exact](
                y.pairs[DType.float32](), Int(index) * width, pair
            )
        return
    var scale = Scale[exact, width](pair.m)
    var factor = end[finish, exact](pair, x.is_masked())

    var target = part.target(y)
    var read = part
    comptime if S.is_causal:
        read = part.before(source.length(Int(n)))
    for group in range(ceildiv(part.rounds(), UNROLL) - 1, -1, -1):
        var raw = Array[Raw, UNROLL](fill=Raw(neg_inf[S.Column.loaded]()))
        comptime for j in range(UNROLL):
            if read.has(group * UNROLL + j):
                raw[j] = source.load[width](group * UNROLL + j)
        comptime for j in range(UNROLL):
            if part.has(group * UNROLL + j):
                var logits = raw[j].cast[DType.float32]()
                var result: Vector
                comptime if finish == Finish.LOGARITHMS:
                    result = (logits - pair.m) - factor
                else:
                    result = scale.exp(logits) * factor
                target.store(group * UNROLL + j, result)


def min_blocks[S: RowSource](width: Int, *, writes: Bool) -> Int:
    """Returns how many blocks a multiprocessor is to hold."""
    return Tuned.strip_blocks(
        size_of[S.elements]() > 2, S.in_memory, width, writes
    )


def unit_length(n: Int) -> Int:
    """Returns how many of `n` positions a unit has."""
    var length = Tuned.strip_unit
    while n > length * Tuned.strip_units:
        length *= 2
    return length


def span_length[lanes: Int](n: Int, tiles: Int, multiprocessors: Int) -> Int:
    """Returns how many positions a block takes.

    Parameters:
        lanes: Vectors of columns that it takes.

    Args:
        n: Positions.
        tiles: Blocks that a span is shared by.
        multiprocessors: How many the GPU has.
    """
    # As many as the GPU holds at a time, or several times as many: in between, some would work alone at the end.
    var held = multiprocessors * Tuned.strip_readers
    var spans = held // tiles if held >= 4 * tiles else ceildiv(4 * held, tiles)
    return ceildiv(n, min(spans, ceildiv(n, COLUMN_THREADS // lanes * UNROLL)))


def streaming_strided[
    S: RowSource, T: RowTarget, //, finish: Finish, lanes: Int, width: Int
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Launches the two kernels.

    Parameters:
        S: Where logits come from, of 4 bytes or 2.
        T: Where results go.
        finish: What of each row is written.
        lanes: Vectors of columns that a block takes, a power of two.
        width: Columns a vector: a power of two.

    Args:
        y: Results, not in the memory of `x`.
        x: Logits.
        rows: Rows along any axis; `x` and `y` can be had in vectors of `width`, and `rows.inner` is a multiple of it.
        queue: Where kernels are launched.
    """
    var across = rows.inner // width
    var total = rows.outer * across
    var tiles = ceildiv(total, lanes)
    var length = unit_length(rows.n)
    var units = ceildiv(rows.n, length)
    var memory = queue.scratch[DType.float32](2 * units * total * width)
    var pairs = memory.pointer
    queue.launch[streaming_pairs_kernel[S, lanes, width]](
        pairs,
        x,
        Int64(total),
        Int64(across),
        Int64(rows.n),
        Int64(tiles),
        Int64(length),
        grid_dim=tiles * units,
        block_dim=COLUMN_THREADS,
        attributes=pdl_attributes(),
    )
    # Of pairs there is nothing to write but by the first.
    var share = rows.n
    comptime if finish != Finish.PAIR:
        share = span_length[lanes](rows.n, tiles, queue.sm_count())
    queue.launch[streaming_results_kernel[S, T, finish, lanes, width]](
        y,
        x,
        pairs,
        Int64(total),
        Int64(across),
        Int64(rows.n),
        Int64(tiles),
        Int64(share),
        Int64(units),
        grid_dim=tiles * ceildiv(rows.n, share),
        block_dim=COLUMN_THREADS,
        attributes=pdl_attributes(),
    )
    _ = memory^
