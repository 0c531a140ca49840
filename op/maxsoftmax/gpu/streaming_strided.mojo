"""The fast kernels along an axis that is not the last, for what does not fit on the chip: two reads and one write an
element, in two launches.

It is `streaming` turned. In the first launch each block takes a unit of the positions of a few vectors of columns, whose length
follows from that of the row alone, so that it makes no difference to what a row sums to how many others there are, and leaves what its
columns sum to in device memory; in the second it takes a span, merges the units of its columns, and writes. That goes through everything
backwards, so that what was read last, and is still in the last cache, is read first. Logits that are computed as they are read are
computed twice. Of a gradient there are two inputs, and a sum that needs no maximum.
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
from ..math.gradient import Gradient
from ..ops.finish import Finish
from ..io.memory import MemorySource
from ..io.source import RowSource, SourceColumn
from ..io.target import RowTarget
from ..math.online import Sum
from ..queue import Queue
from ..io.rows import Rows, Source
from ..io.widening import widened
from .hardware.pair import Pair
from .partition.deal import Deal, Sources
from .partition.row import again
from .partition.scratch import Scratch
from .partition.strided import is_exact, StridedPart
from .partition.tile import COLUMN_THREADS, Tile, Way
from .hardware.pdl import pdl_wait, pdl_attributes
from .hardware.team import maximum
from .partition.pair import add, end
from .tuning import Tuned

comptime UNROLL = Tuned.strip_unroll
"""Vectors of each input that a thread has under way at a time."""

comptime Floats = Pointer[Float32, MutUntrackedOrigin]
"""Where numbers wait between the launches."""


@fieldwise_init
struct Units(TrivialRegisterPassable):
    """What units sum to: a number for each column of each unit, first all of a unit, those of a tile of columns one after the other. Of
    pairs there are first all maxima, then all sums.
    """

    var first: Floats
    """Where the first is."""
    var units: Int
    """How many units there are."""
    var tiles: Int
    """How many tiles."""
    var columns: Int
    """Columns of a tile."""

    @inline(.always)
    def at(self, unit: Int, index: Int) -> Floats:
        """Returns where those of a tile begin."""
        return self.first.unsafe_offset(
            (unit * self.tiles + index) * self.columns
        )

    @inline(.always)
    def size(self) -> Int:
        """Returns how many numbers these are, of pairs how many maxima."""
        return self.units * self.tiles * self.columns

    @inline(.always)
    def part[
        tile: Tile
    ](self, thread: Int, index: Int) -> StridedPart[tile, True]:
        """Returns what a thread takes of a tile of them, as of `Deal`: units are its positions.
        """
        var all = Int64(self.tiles * self.columns)
        var units = Int64(self.units)
        return {UInt32(index), all, all, units, thread, 0, units}


struct Running[summed: Finish, exact: Bool, tile: Tile](
    TrivialRegisterPassable
):
    """What a thread has seen of its columns.

    Parameters:
        summed: What is summed: `Finish.PAIR`, or what a gradient needs.
        exact: Of the scale of their exponentials.
        tile: A block's columns.
    """

    comptime width = Self.tile.width
    comptime of_gradient = Self.summed.is_gradient()
    comptime S = Scale[Self.exact, Self.width]
    comptime Values = SIMD[DType.float32, Self.width]

    var m: Self.Values
    """The maxima."""
    var scale: Self.S
    """What the exponentials are in."""
    var d: Sum[DType.float32, Self.width]
    """Their sums, or those of a gradient."""

    @inline(.always)
    def __init__(out self):
        """Nothing yet."""
        self.m = Self.Values(neg_inf[DType.float32]())
        self.scale = Self.S(self.m)
        self.d = Sum[DType.float32, Self.width]()

    @inline(.always)
    def add[
        Column: SourceColumn, //
    ](
        mut self,
        source: Sources[Column, Self.tile],
        raw: Array[SIMD[Column.loaded, Self.width], UNROLL],
        others: Array[SIMD[Column.loaded, Self.width], UNROLL],
    ):
        """Adds some positions of `source`, of both inputs of a gradient."""
        comptime if Self.of_gradient:
            comptime G = Gradient[
                Self.summed == Finish.GRADIENT_OF_LOGARITHMS, Self.exact
            ]
            var terms = Self.Values(0)
            comptime for j in range(UNROLL):
                terms = G.plus_term(
                    terms,
                    widened(raw[j]),
                    widened(others[j]),
                )
            add[Self.exact](self.d, terms)
            return
        var largest = raw[0]
        comptime for j in range(1, UNROLL):
            largest = maximum(largest, raw[j])
        var larger = maximum(self.m, source.logits(largest))
        # After the first few vectors hardly ever.
        if not larger.eq(self.m).reduce_and():
            var raised = Self.S(larger)
            var nothing = self.m.eq(neg_inf[DType.float32]())
            self.d.scale(
                nothing.select(Self.Values(0), self.scale.over(raised))
            )
            self.m = larger
            self.scale = raised
        var terms = self.scale.exp(source.logits(raw[0]))
        comptime for j in range(1, UNROLL):
            terms += self.scale.exp(source.logits(raw[j]))
        add[Self.exact](self.d, terms)

    @inline(.always)
    def leave(
        self, to: Units, part: StridedPart, thread: Int, unit: Int, index: Int
    ):
        """Leaves what the threads of each column have seen, as of `Deal`. Every thread of the block calls this, once.
        """
        comptime D = Deal[Self.tile]
        var mine = to.at(unit, index)
        comptime if Self.of_gradient:
            var sums = Scratch[Self.tile](part.skew)
            var sum = sums.reduce[False](thread, self.d.value)
            if D.chain(thread) == 0:
                D.store(mine, thread, sums.straight(thread, sum))
        else:
            var maxima = Scratch[Self.tile](part.skew)
            var sums = Scratch[Self.tile](part.skew)
            var all = maxima.reduce[True](thread, self.m)
            var sum = sums.reduce[False](
                thread, Pair(self.m, self.d.value).sum_over(Self.S(all))
            )
            if D.chain(thread) == 0:
                D.store(mine, thread, maxima.straight(thread, all))
                D.store(
                    mine.unsafe_offset(to.size()),
                    thread,
                    sums.straight(thread, sum),
                )

    @staticmethod
    @inline(.always)
    def merged(
        units: Units, part: StridedPart, thread: Int, index: Int
    ) -> Pair[Self.width]:
        """Returns what all units have left of a thread's columns, of a gradient as the sum. Every thread of the block calls this, once.
        """
        comptime nothing = Self.Values(neg_inf[DType.float32]())
        var maxima = Scratch[Self.tile](0)
        var sums = maxima
        comptime if not Self.of_gradient:
            sums = Scratch[Self.tile](0)
        var of_units = units.part[Self.tile.straight()](thread, index)
        var first = of_units.source(MemorySource(units.first))

        @inline(.always)
        def of_unit(
            source: type_of(first), i: Int, others: Self.Values
        ) {imm} -> Self.Values:
            """Returns what unit `i` has left in one of the two halves."""
            return rebind[Self.Values](
                source.load(
                    i,
                    of_units.left(i),
                    rebind[SIMD[DType.float32, Self.tile.straight().width]](
                        others
                    ),
                )
            )

        var i = 0
        comptime if Self.of_gradient:
            var sum = Sum[DType.float32, Self.width]()
            while of_units.has(i):
                add[Self.exact](sum, of_unit(first, i, 0))
                i += 1
            var all = sums.reduce[False](thread, sum.value)
            return Pair(Self.Values(0), sums.skewed(part.skew, thread, all))
        else:
            var second = of_units.source(
                MemorySource(units.first.unsafe_offset(units.size()))
            )
            var m = nothing
            while of_units.has(i):
                m = maximum(m, of_unit(first, i, nothing))
                i += 1
            m = maxima.reduce[True](thread, m)
            var scale = Self.S(m)
            var d = Self.Values(0)
            i = 0
            while of_units.has(i):
                d += Pair(
                    of_unit(first, i, nothing), of_unit(second, i, 0)
                ).sum_over(scale)
                i += 1
            d = sums.reduce[False](thread, d)
            return Pair(
                maxima.skewed(part.skew, thread, m),
                sums.skewed(part.skew, thread, d),
            )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(tile.threads)),
    `nvvm.minctasm`=SIMDLength(min_blocks[S](summed, tile, writes=False)),
)
def streaming_units_kernel[
    S: RowSource, summed: Finish, exact: Bool, tile: Tile
](
    sums: Floats,
    x: S,
    other: Source[S.elements],
    columns: Int64,
    inner: Int64,
    n: Int64,
    tiles: Int64,
    length: Int64,
    units: Int64,
):
    """First launch: what each block's unit of its columns sums to.

    Parameters:
        S: Where logits come from, or results whose logits' gradient is wanted: of 4 bytes or 2.
        summed: As of `Running`.
        exact: The same.
        tile: A block's columns.

    Args:
        sums: Where what they sum to goes.
        x: Logits, whose sink is not looked at, or results; those that are logarithms are not, either.
        other: The gradients of results; else not looked at.
        columns: How many there are, less than 2^31.
        inner: Those of a position.
        n: Positions.
        tiles: Blocks that a unit is shared by.
        length: Positions of a unit.
        units: How many units there are.
    """
    comptime Raw = SIMD[S.Column.loaded, tile.width]
    comptime gradient = summed.is_gradient()
    comptime at_once = tile.way != Way.VECTORS and not gradient
    comptime filler = Raw(0) if gradient else Raw(neg_inf[S.Column.loaded]())
    var thread = Int(thread_idx.x)
    var unit = UInt32(block_idx.x) // UInt32(tiles)
    var index = UInt32(block_idx.x) - unit * UInt32(tiles)
    var part = StridedPart[tile, S.in_memory](
        index, columns, inner, n, thread, unit, length
    )
    var source = part.source(x)
    var upstream = source
    comptime if gradient:
        upstream = part.source(rebind[S](MemorySource(other)))
    comptime if S.is_causal:
        part = part.before(source.length(Int(n)))
    pdl_wait()
    var running = Running[summed, exact, tile]()
    var i = 0
    while part.has(i):
        var raw = Array[Raw, UNROLL](fill=filler)
        var others = Array[Raw, UNROLL](fill=filler)
        if at_once and part.has_all(i + UNROLL - 1):
            comptime for j in range(UNROLL if at_once else 0):
                raw[j] = source.load(i + j)
        else:
            comptime for j in range(UNROLL):
                if part.has(i + j):
                    var left = part.left(i + j)
                    comptime if summed != Finish.GRADIENT_OF_LOGARITHMS:
                        raw[j] = source.load(i + j, left, raw[j])
                    comptime if gradient:
                        others[j] = upstream.load(i + j, left, others[j])
        running.add(source, raw, others)
        i += UNROLL
    running.leave(
        Units(sums, Int(units), Int(tiles), tile.columns()),
        part,
        thread,
        Int(unit),
        Int(index),
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(tile.threads)),
    `nvvm.minctasm`=SIMDLength(min_blocks[S](finish, tile, writes=True)),
)
def streaming_results_kernel[
    S: RowSource, T: RowTarget, finish: Finish, tile: Tile
](
    y: T,
    x: S,
    other: Source[S.elements],
    sums: Floats,
    columns: Int64,
    inner: Int64,
    n: Int64,
    tiles: Int64,
    share: Int64,
    units: Int64,
):
    """Second launch: each block merges the units of its columns, and writes its span of them. What is not said here is as of the first.

    - `sums`: What the first launch left.
    - `tiles`: Blocks that a span is shared by.
    - `share`: Positions a span.
    """
    comptime exact = is_exact[S, T, finish]()
    comptime gradient = finish.is_gradient()
    comptime at_once = tile.way != Way.VECTORS and not gradient
    comptime F = DType.float32
    comptime Raw = SIMD[S.Column.loaded, tile.width]
    comptime filler = Raw(0) if gradient else Raw(neg_inf[S.Column.loaded]())
    comptime width = tile.width
    comptime G = Gradient[
        finish == Finish.GRADIENT_OF_LOGARITHMS, exact, F, width
    ]
    var thread = Int(thread_idx.x)
    # The last block's work is done first.
    var block = UInt32(grid_dim.x) - 1 - UInt32(block_idx.x)
    var span = block // UInt32(tiles)
    var index = block - span * UInt32(tiles)
    var part = StridedPart[tile, S.in_memory](
        index, columns, inner, n, thread, span, share
    )
    var source = part.source(x)
    var upstream = source
    comptime if gradient:
        upstream = part.source(rebind[S](MemorySource(other)))
    pdl_wait()
    var pair = Running[finish, exact, tile].merged(
        Units(sums, Int(units), Int(tiles), tile.columns()),
        part,
        thread,
        Int(index),
    )
    comptime if not S.in_memory:
        if not part.is_there:
            return
    comptime if S.has_sink:
        pair = pair.joined[exact](part.sinks(x))
    comptime if finish == Finish.PAIR:
        if span == 0 and part.leads():
            part.write[exact](y.pairs[F](), pair)
        return
    var shared = G(pair.d)
    var scale = Scale[exact, width](pair.m)
    var factor = SIMD[F, width](0)
    comptime if not gradient:
        factor = end[finish, exact](pair, x.is_masked())

    var target = part.target(y)
    var read = part
    comptime if S.is_causal:
        read = part.before(source.length(Int(n)))
    for group in range(ceildiv(part.rounds(), UNROLL) - 1, -1, -1):
        var raw = Array[Raw, UNROLL](fill=filler)
        var others = Array[Raw, UNROLL](fill=filler)
        if at_once and read.has_all(group * UNROLL + UNROLL - 1):
            comptime for j in range(UNROLL if at_once else 0):
                raw[j] = source.load(group * UNROLL + j)
        else:
            comptime for j in range(UNROLL):
                var i = group * UNROLL + j
                if read.has(i):
                    raw[j] = source.load(i, read.left(i), raw[j])
                    comptime if gradient:
                        others[j] = upstream.load(i, read.left(i), others[j])
        comptime for j in range(UNROLL):
            var i = group * UNROLL + j
            if part.has(i):
                var result: SIMD[F, width]
                comptime if gradient:
                    result = shared.of(
                        widened(again(raw[j])), widened(again(others[j]))
                    )
                elif finish == Finish.LOGARITHMS:
                    result = (source.logits(raw[j]) - pair.m) - factor
                else:
                    result = scale.exp(source.logits(raw[j])) * factor
                target.store(i, result, part.left(i))


def min_blocks[
    S: RowSource
](finish: Finish, tile: Tile, *, writes: Bool) -> Int:
    """Returns how many blocks a multiprocessor is to hold."""
    comptime size = size_of[S.elements]()
    var blocks = Tuned.strip_readers
    if not finish.is_gradient():
        blocks = Tuned.strip_blocks(size > 2, S.in_memory, tile.width, writes)
    return blocks * COLUMN_THREADS // tile.threads


def unit_length(n: Int) -> Int:
    """Returns how many of `n` positions a unit has."""
    var length = Tuned.strip_unit
    while n > length * Tuned.strip_units:
        length *= 2
    return length


def span_length[tile: Tile](n: Int, tiles: Int, multiprocessors: Int) -> Int:
    """Returns how many positions a block takes.

    Parameters:
        tile: Its columns.

    Args:
        n: Positions.
        tiles: Blocks that a span is shared by.
        multiprocessors: How many the GPU has.
    """
    # As many as the GPU holds at a time, or several times as many: in between, some would work alone at the end.
    comptime readers = Tuned.strip_readers * COLUMN_THREADS // tile.threads
    var held = multiprocessors * readers
    var spans = held // tiles if held >= 4 * tiles else ceildiv(4 * held, tiles)
    return ceildiv(n, min(spans, ceildiv(n, tile.deep() * UNROLL)))


def streaming_strided[
    S: RowSource,
    T: RowTarget,
    //,
    finish: Finish,
    tile: Tile,
](y: T, x: S, other: Source[S.elements], rows: Rows, queue: Queue) raises:
    """Launches the two kernels, whose parameters and arguments these are. `y` is not in the memory of `x` or `other`.

    - `rows`: Rows along any axis; unless columns are dealt, all tensors can be had in vectors, and `rows.inner` is a multiple of one, or columns are skewed.
    """
    comptime summed = finish if finish.is_gradient() else Finish.PAIR
    comptime numbers = 1 if finish.is_gradient() else 2
    var tiles = tile.count(rows)
    var length = unit_length(rows.n)
    var units = ceildiv(rows.n, length)
    var memory = queue.scratch[DType.float32](
        numbers * units * tiles * tile.columns()
    )
    comptime exact = is_exact[S, T, finish]()
    queue.launch[streaming_units_kernel[S, summed, exact, tile]](
        memory.pointer,
        x,
        other,
        Int64(rows.count()),
        Int64(rows.inner),
        Int64(rows.n),
        Int64(tiles),
        Int64(length),
        Int64(units),
        grid_dim=tiles * units,
        block_dim=tile.threads,
        attributes=pdl_attributes(),
    )
    # Of pairs there is nothing to write but by the first.
    var share = rows.n
    comptime if finish != Finish.PAIR:
        share = span_length[tile](rows.n, tiles, queue.sm_count())
    queue.launch[streaming_results_kernel[S, T, finish, tile]](
        y,
        x,
        other,
        memory.pointer,
        Int64(rows.count()),
        Int64(rows.inner),
        Int64(rows.n),
        Int64(tiles),
        Int64(share),
        Int64(units),
        grid_dim=tiles * ceildiv(rows.n, share),
        block_dim=tile.threads,
        attributes=pdl_attributes(),
    )
    _ = memory^
