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
from ..io.memory import MemorySource
from ..io.source import RowSource
from ..io.target import RowTarget
from ..math.online import Sum
from ..queue import Queue
from ..io.rows import Rows
from .hardware.cluster import Pair
from .partition.deal import COLUMN_THREADS, Deal
from .partition.strided import end, is_exact, Scratch, StridedPart
from .hardware.pdl import pdl_wait, pdl_attributes
from .hardware.team import maximum
from .resident import add
from .tuning import Tuned

comptime UNROLL = Tuned.strip_unroll
"""Vectors that a thread has under way at a time."""

comptime Floats = Pointer[Float32, MutUntrackedOrigin]
"""Where pairs wait between the launches: first all maxima, then all sums."""


@fieldwise_init
struct Units(TrivialRegisterPassable):
    """A number for each column of each unit: first all of a unit, those of a tile of columns one after the other.
    """

    var units: Int
    """How many units there are."""
    var tiles: Int
    """How many tiles."""
    var columns: Int
    """Columns of a tile."""

    @inline(.always)
    def place(self, unit: Int, tile: Int) -> Int:
        """Returns where those of a tile begin."""
        return (unit * self.tiles + tile) * self.columns

    @inline(.always)
    def size(self) -> Int:
        """Returns how many numbers these are."""
        return self.place(self.units, 0)

    @inline(.always)
    def part[
        lanes: Int, width: Int, dealt: Bool
    ](self, thread: Int, tile: Int) -> StridedPart[lanes, width, True, dealt]:
        """Returns what a thread takes of them: units are its positions.

        Parameters:
            lanes: As of `Deal`.
            width: As of `Deal`.
            dealt: As of `Deal`.

        Args:
            thread: This thread's index in the block.
            tile: Which columns.
        """
        var all = UInt32(self.tiles * self.columns)
        return {UInt32(tile), all, all, self.units, thread, 0, self.units}


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
        lanes: Int, dealt: Bool
    ](self, pairs: Floats, thread: Int, unit: Int, tile: Int, layout: Units):
        """Leaves the pairs of what the threads of each column have seen. Every thread of the block calls this, once.

        Parameters:
            lanes: As of `Deal`.
            dealt: As of `Deal`.

        Args:
            pairs: Where.
            thread: This thread's index in the block.
            unit: Which positions they are of.
            tile: Which columns.
            layout: How many there are of each.
        """
        comptime D = Deal[lanes, Self.width, dealt]
        var maxima = Scratch[lanes, Self.width, dealt]()
        var sums = Scratch[lanes, Self.width, dealt]()
        var all = maxima.reduce[True](thread, self.m)
        var sum = sums.reduce[False](
            thread, Pair(self.m, self.d.value).sum_over(Self.S(all))
        )
        if D.chain(thread) == 0:
            var mine = pairs.unsafe_offset(layout.place(unit, tile))
            D.store(mine, thread, all)
            D.store(mine.unsafe_offset(layout.size()), thread, sum)


@inline(.always)
def merge_units[
    exact: Bool, lanes: Int, width: Int, dealt: Bool
](pairs: Floats, thread: Int, tile: Int, layout: Units) -> Pair[width]:
    """Returns what all units have left of a thread's columns. Every thread of the block calls this, once.

    Parameters:
        exact: Of the scale that the sums are in.
        lanes: As of `Deal`.
        width: As of `Deal`.
        dealt: As of `Deal`.

    Args:
        pairs: Where they are.
        thread: This thread's index in the block.
        tile: Which columns.
        layout: How many there are of each.
    """
    comptime Values = SIMD[DType.float32, width]
    comptime nothing = Values(neg_inf[DType.float32]())
    var maxima = Scratch[lanes, width, dealt]()
    var sums = Scratch[lanes, width, dealt]()
    var part = layout.part[lanes, width, dealt](thread, tile)
    var of_m = part.source(MemorySource(pairs))
    var of_d = part.source(MemorySource(pairs.unsafe_offset(layout.size())))
    var m = nothing
    var i = 0
    while part.has(i):
        m = maximum(m, of_m.load(i, part.left(i), nothing))
        i += 1
    m = maxima.reduce[True](thread, m)
    var scale = Scale[exact, width](m)
    var d = Values(0)
    i = 0
    while part.has(i):
        d += Pair(
            of_m.load(i, part.left(i), nothing),
            of_d.load(i, part.left(i), Values(0)),
        ).sum_over(scale)
        i += 1
    return Pair(m, sums.reduce[False](thread, d))


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(COLUMN_THREADS)),
    `nvvm.minctasm`=SIMDLength(min_blocks[S](width, writes=False)),
)
def streaming_pairs_kernel[
    S: RowSource, lanes: Int, width: Int, dealt: Bool
](
    pairs: Floats,
    x: S,
    columns: Int64,
    inner: Int64,
    n: Int64,
    tiles: Int64,
    length: Int64,
    units: Int64,
):
    """First launch: the pairs of each block's unit of its columns.

    Parameters:
        S: Where logits come from, of 4 bytes or 2.
        lanes: Vectors of columns that a block takes, a power of two.
        width: Columns a vector.
        dealt: As of `StridedPart`, of logits in memory.

    Args:
        pairs: Where the pairs go.
        x: Logits; their sink is not looked at.
        columns: How many there are, less than 2^31.
        inner: Those of a position.
        n: Positions.
        tiles: Blocks that a unit is shared by.
        length: Positions of a unit.
        units: How many units there are.
    """
    comptime Raw = SIMD[S.Column.loaded, width]
    var thread = Int(thread_idx.x)
    var unit = UInt32(block_idx.x) // UInt32(tiles)
    var tile = UInt32(block_idx.x) - unit * UInt32(tiles)
    var part = StridedPart[lanes, width, S.in_memory, dealt](
        tile,
        UInt32(columns),
        UInt32(inner),
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
        if dealt and part.has_all(i + UNROLL - 1):
            comptime for j in range(UNROLL if dealt else 0):
                raw[j] = source.load(i + j)
        else:
            comptime for j in range(UNROLL):
                if part.has(i + j):
                    raw[j] = source.load(i + j, part.left(i + j), raw[j])
        running.add(raw)
        i += UNROLL
    running.leave[lanes, dealt](
        pairs,
        thread,
        Int(unit),
        Int(tile),
        Units(Int(units), Int(tiles), lanes * width),
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(COLUMN_THREADS)),
    `nvvm.minctasm`=SIMDLength(min_blocks[S](width, writes=True)),
)
def streaming_results_kernel[
    S: RowSource,
    T: RowTarget,
    finish: Finish,
    lanes: Int,
    width: Int,
    dealt: Bool,
](
    y: T,
    x: S,
    pairs: Floats,
    columns: Int64,
    inner: Int64,
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
        dealt: As of `StridedPart`, of logits in memory.

    Args:
        y: Results.
        x: Logits.
        pairs: What the first launch left.
        columns: How many there are, less than 2^31.
        inner: Those of a position.
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
    var tile = block - span * UInt32(tiles)
    var part = StridedPart[lanes, width, S.in_memory, dealt](
        tile,
        UInt32(columns),
        UInt32(inner),
        Int(n),
        thread,
        Int(span),
        Int(share),
    )
    var source = part.source(x)
    pdl_wait()
    var pair = merge_units[exact, lanes, width, dealt](
        pairs,
        thread,
        Int(tile),
        Units(Int(units), Int(tiles), lanes * width),
    )
    comptime if not S.in_memory:
        if not part.is_there:
            return
    comptime if S.has_sink:
        pair = pair.joined[exact](part.sinks(x).cast[DType.float32]())
    comptime if finish == Finish.PAIR:
        if span == 0 and part.leads():
            part.write[exact](y.pairs[DType.float32](), pair)
        return
    var scale = Scale[exact, width](pair.m)
    var factor = end[finish, exact](pair, x.is_masked())

    var target = part.target(y)
    var read = part
    comptime if S.is_causal:
        read = part.before(source.length(Int(n)))
    for group in range(ceildiv(part.rounds(), UNROLL) - 1, -1, -1):
        var raw = Array[Raw, UNROLL](fill=Raw(neg_inf[S.Column.loaded]()))
        if dealt and read.has_all(group * UNROLL + UNROLL - 1):
            comptime for j in range(UNROLL if dealt else 0):
                raw[j] = source.load(group * UNROLL + j)
        else:
            comptime for j in range(UNROLL):
                var i = group * UNROLL + j
                if read.has(i):
                    raw[j] = source.load(i, read.left(i), raw[j])
        comptime for j in range(UNROLL):
            var i = group * UNROLL + j
            if part.has(i):
                var logits = raw[j].cast[DType.float32]()
                var result: Vector
                comptime if finish == Finish.LOGARITHMS:
                    result = (logits - pair.m) - factor
                else:
                    result = scale.exp(logits) * factor
                target.store(i, result, part.left(i))


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
    S: RowSource,
    T: RowTarget,
    //,
    finish: Finish,
    lanes: Int,
    width: Int,
    dealt: Bool,
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Launches the two kernels.

    Parameters:
        S: Where logits come from, of 4 bytes or 2.
        T: Where results go.
        finish: What of each row is written.
        lanes: Vectors of columns that a block takes, a power of two.
        width: Columns a vector: a power of two.
        dealt: Whether they are dealt.

    Args:
        y: Results, not in the memory of `x`.
        x: Logits.
        rows: Rows along any axis; unless columns are dealt, `x` and `y` can be had in vectors of `width`, and `rows.inner` is a multiple
            of it.
        queue: Where kernels are launched.
    """
    var tiles = ceildiv(rows.count(), lanes * width)
    var length = unit_length(rows.n)
    var units = ceildiv(rows.n, length)
    var memory = queue.scratch[DType.float32](
        2 * Units(units, tiles, lanes * width).size()
    )
    var pairs = memory.pointer
    queue.launch[streaming_pairs_kernel[S, lanes, width, dealt]](
        pairs,
        x,
        Int64(rows.count()),
        Int64(rows.inner),
        Int64(rows.n),
        Int64(tiles),
        Int64(length),
        Int64(units),
        grid_dim=tiles * units,
        block_dim=COLUMN_THREADS,
        attributes=pdl_attributes(),
    )
    # Of pairs there is nothing to write but by the first.
    var share = rows.n
    comptime if finish != Finish.PAIR:
        share = span_length[lanes](rows.n, tiles, queue.sm_count())
    queue.launch[streaming_results_kernel[S, T, finish, lanes, width, dealt]](
        y,
        x,
        pairs,
        Int64(rows.count()),
        Int64(rows.inner),
        Int64(rows.n),
        Int64(tiles),
        Int64(share),
        Int64(units),
        grid_dim=tiles * ceildiv(rows.n, share),
        block_dim=COLUMN_THREADS,
        attributes=pdl_attributes(),
    )
    _ = memory^
