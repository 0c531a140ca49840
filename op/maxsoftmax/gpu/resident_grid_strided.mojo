"""The fast kernel along an axis that is not the last of long columns, which the whole GPU holds: one read and one write an element.

It is `resident_grid` turned. Teams of eight warps of a block ask a counter for units. A warp holds its part of two: the last one in registers, and the one
before in shared memory, until all of its strip of columns has been summed up, which goes by the `ColumnBoard`. All blocks are on the GPU at once, so that nobody waits
for a block that waits for room.

Against units dealt out in turn the counter gives, of float32 (of bfloat16), on an H100: 50257×1024 1.00 (1.00) of the time, 50257×2048 1.00 (0.97), 50257×1023 1.02
(0.94), 8×30000×1001 along the middle axis 0.93 (0.93), 8×100000×64 1.03, 80000×512 1.00 (1.03), and 175000×256 0.8 (0.91) of that of two launches.

What of others a warp has to hear waits behind what its neighbours load, so that few words and few steps matter more than who computes (50257×1024, µs):

| | H100, float32 | bfloat16 | H200, float32 | bfloat16 |
|---|---|---|---|---|
| a copy | 138 | 86 | 98 | 76 |
| as here | 164 | 96 | 127 | 82 |
| the last warp of a team to come merges what all have left, where here one of them waits for all | 165 | 97 | 130 | 86 |
| whoever leaves the last of some units merges them, and then of some groups | 270 | 225 | – | – |
| one block merges, units and then groups, each warp by itself | 181 | 174 | 152 | 127 |
| two do, and exponentials are not computed again | 168 | 106 | 134 | 88 |
| each vector that is written makes room for one of the next unit | – | – | 136 | 128 |
| read twice, by `streaming_strided` | 238 | 134 | 192 | 113 |

Of other ways to wait for each other none was faster at all lengths (H200, µs, while two blocks merged; the figures above are from before bfloat16 was widened in one operation an element, and its
50257×1024 takes 74 now):

| | 8×30000×1001 along the middle axis, float32 | bfloat16 | 50257×1023, float32 | 50257×1024, float32 | 8×100000×64, float32 |
|---|---|---|---|---|---|
| as here: of a team only the warp that takes a unit waits until all have left it | 874 | 500 | 211 | 127 | 134 |
| nor do warps wait for each other's writing, but look for which unit is next | 861 | 509 | 210 | 130 | 135 |
| all of a team wait until all have left a unit | 915 | 515 | 218 | 125 | 128 |
| a unit is asked for one ahead, and all wait | 905 | 694 | 266 | 169 | 179 |
| strips of 16 vectors, units of 256 positions, and all wait | 1529 | 1465 | 364 | 257 | 210 |
| strips of 16 vectors by one team of 16 warps | 925 | 599 | 255 | 174 | 215 |
"""

from std.math import ceildiv
from std.memory import bitcast, unsafe_stack_allocation
from std.sys import size_of
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.primitives import warp
from max.gpu.sync import barrier

from ..io.rows import Positions, Rows, VECTOR_BYTES
from ..io.source import RowSource
from ..io.target import RowTarget
from ..io.widening import widened
from ..math.exponential import Scale
from ..math.online import Sum
from ..ops.finish import Finish
from ..queue import Queue
from .hardware.board import Words, clear, cooperative
from .hardware.column_board import ColumnBoard
from .hardware.meeting import Meeting
from .hardware.pair import Pair
from .hardware.pdl import pdl_wait
from .hardware.slots import Slots
from .hardware.team import maximum
from .partition.deal import Deal
from .partition.pair import add, end
from .partition.scratch import combine_columns, put_askew, put_straight
from .partition.strided import StridedPart, is_exact
from .partition.tile import COLUMN_THREADS, Tile
from .partition.unit_sum import multiplied

comptime LANES = 8
"""Vectors of columns that a warp takes: a line of the cache."""

comptime UNIT = 512
"""Positions of a unit: a column's bits follow from it."""

comptime UNROLL = 4
"""Vectors whose exponentials are added up before they are added to a sum."""

comptime ROUNDS = UNIT // (COLUMN_THREADS // LANES)
"""Vectors of a unit that each thread takes."""

comptime WARPS = COLUMN_THREADS // WARP_SIZE
"""Warps that share a unit."""

comptime TEAMS = 2
"""How many such are a block, with as many threads as have 128 registers each, all of a multiprocessor."""

comptime BLOCK_SIZE = TEAMS * COLUMN_THREADS
"""Threads a block."""

comptime UNDER_WAY = 8
"""Vectors of 16 bits that a thread has under way at a time: 50257×1024 of bfloat16 take 102 µs, and by 16 106, but of float32 173 and 168 (H100)."""

comptime MERGERS = 4
"""Blocks that hold nothing, but merge what others leave, at most."""


def mergers[dtype: DType]() -> Int:
    """Returns how many blocks merge: exponentials of float32 take them longer. By four and by two, 8×20000×1024 of float32 along the middle axis takes 361 and 468 µs, 20000×2048 100 and
    124; 8×20000×1024 of bfloat16 212 and 208, 20000×2048 60 and 61, 8×100000×64 78 and 76 (H200).

    Parameters:
        dtype: Dtype of the logits.
    """
    return MERGERS if size_of[dtype]() > 2 else MERGERS // 2


comptime GRID_LENGTH = 10000
"""Positions of the shortest columns. By clusters that hold them (by the whole GPU), µs on an H200, of float32 and of bfloat16: 8×7168×1024 along the middle axis 130 (135), 71 (106); 8×8000×1001
215 (228), 118 (135); 10000×2048 58 (52), 39 (36); 8×12000×1024 244 (210), 126 (128); 13000×4096 147 (125), 79 (77); 4×16000×1023 255 (239), 193 (138); 16384×1024 54 (43), 33 (28)."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def resident_grid_strided_kernel[
    S: RowSource, T: RowTarget, finish: Finish, tile: Tile
](
    y: T,
    x: S,
    memory: Words,
    columns: Int64,
    inner: Int64,
    n: Int64,
    strips: Int64,
    units: Int64,
    zero: UInt32,
):
    """Writes softmax of columns, or its logarithm.

    Parameters:
        S: Where logits come from: memory, of 4 bytes or 2, maybe times a factor.
        T: Where results go.
        finish: What of each element is written.
        tile: A team's columns.

    Args:
        y: Results, not in the memory of the logits.
        x: Logits.
        memory: A board.
        columns: How many there are, less than 2^31.
        inner: Those of a position.
        n: Positions.
        strips: How many strips of `LANES` vectors the columns are.
        units: How many units each of them has.
        zero: What nobody but the caller knows to be 0.
    """
    comptime F = DType.float32
    comptime dtype = S.Column.loaded
    comptime scaled = S.Column.scaled
    comptime width = tile.width
    comptime Raw = SIMD[dtype, width]
    comptime D = Deal[tile]
    comptime Part = StridedPart[tile, True]
    comptime Values = SIMD[F, width]
    comptime exact = is_exact[S, T, finish]()
    # Exponentials are kept in place of the logits, unless that takes twice the room.
    comptime keeps = finish == Finish.PROBABILITIES and dtype == F
    comptime of_lane = LANES * width // WARP_SIZE
    comptime merging = mergers[dtype]()
    comptime none = UInt32.MAX
    comptime filler = Raw(neg_inf[dtype]())
    var thread = Int(thread_idx.x) % COLUMN_THREADS
    var team = Int(thread_idx.x) // COLUMN_THREADS
    var lane = thread % WARP_SIZE
    var slots = Slots[dtype, BLOCK_SIZE, width]()
    comptime M = Meeting[tile]
    comptime assert M.room >= WARPS * tile.columns(), "no room to merge"
    var room = unsafe_stack_allocation[
        TEAMS * M.room,
        UInt64,
        alignment=VECTOR_BYTES,
        address_space=AddressSpace.SHARED,
    ]()
    var board = ColumnBoard[of_lane](memory, Int(strips), Int(units))
    var end_id = UInt32(strips) * UInt32(units)
    pdl_wait()
    if block_idx.x < merging:
        board.merge[exact, TEAMS * WARPS](
            room,
            UInt32(strips),
            UInt32(block_idx.x),
            UInt32(merging),
            Int(thread_idx.x) // WARP_SIZE,
            lane,
        )
        return
    var meeting = M(room, team, thread)
    barrier()
    var holders = UInt32(grid_dim.x - merging)
    var multiplier = Float32(1)
    comptime if scaled:
        multiplier = x.column(
            Positions(0, 0, 0, 1, Int(n), Int(inner))
        ).factor()

    @inline(.always)
    def scale_of(m: Values) {imm} -> Scale[exact, width]:
        """Returns the scale of a maximum for elements: a factor of them is best in its slope.
        """
        var scale = Scale[exact, width](m)
        comptime if scaled and not exact:
            scale.slope *= multiplier
        return scale

    @inline(.always)
    def logits[every: Bool](elements: Raw) {imm} -> Values:
        """Returns elements times the factor; only where exponentials need that, unless `every`.
        """
        return rebind[Values](
            multiplied[scaled and (exact or every)](elements, multiplier)
        )

    @inline(.always)
    def of_unit(id: UInt32) {imm} -> Part:
        """Returns what of a unit is this thread's."""
        var strip = id // UInt32(units)
        return {
            strip,
            columns,
            inner,
            n,
            thread,
            id - strip * UInt32(units),
            Int64(UNIT),
        }

    @inline(.always)
    def write(id: UInt32, m: Values, found: Pair[of_lane]) {imm}:
        """Writes the results of the unit in shared memory.

        - `m`: The largest logits of this warp's part.
        - `found`: The pairs of its strip.
        """
        var part = of_unit(id)
        var pair = Pair[width](0, 0)
        comptime for k in range(width):
            var column = D.column(lane, k // D.chains if tile.is_dealt() else 0)
            comptime if not tile.is_dealt():
                column += k
            comptime if tile.is_skewed():
                column = max(0, column - Int(part.skew))
            comptime for i in range(of_lane):
                var whose = UInt32(column // of_lane)
                var of_m = warp.shuffle_idx(found.m[i], whose)
                var of_d = warp.shuffle_idx(found.d[i], whose)
                if column % of_lane == i:
                    pair.m[k] = of_m
                    pair.d[k] = of_d
        var rest = Values(1)
        var factor = end[finish, exact, keeps, quick=True](pair, x.is_masked())
        var of_strip = scale_of(pair.m)
        comptime if keeps:
            var scale = Scale[exact, width](m)
            rest = scale.over_lowered(of_strip) * scale.quick_factor()
            rest = m.eq(neg_inf[F]()).select(Values(0), rest)
            # Both together may be too small for a normal number: then one after the other.
            var both = rest * factor
            var fits = both.gt(1e-30)
            factor = fits.select(both, factor)
            rest = fits.select(Values(1), rest)
        elif finish == Finish.PROBABILITIES:
            factor *= of_strip.quick_factor()
        var target = part.target(y)
        for first in range(0, ROUNDS, UNROLL):
            comptime for j in range(UNROLL):
                var i = first + j
                if part.has(i):
                    var kept = slots.take(i)
                    var result: Values
                    comptime if finish == Finish.LOGARITHMS:
                        result = (logits[True](kept) - pair.m) - factor
                    elif keeps:
                        result = widened(kept) * rest * factor
                    else:
                        result = of_strip.quick(logits[False](kept)) * factor
                    target.store(i, result, part.left(i))

    var parked = none
    var parked_m = Values(0)
    var turn = 0
    var stride = UInt32(TEAMS) * holders
    # A strip's units are spread over the GPU.
    var id = UInt32(team) * holders + UInt32(block_idx.x - merging)
    while True:
        var raw = Array[Raw, ROUNDS](fill=filler)
        var m = Values(0)
        var seen = board.Bits(0)
        if id < end_id:
            var part = of_unit(id)
            var source = part.source(x)
            if part.has_all(ROUNDS - 1):
                comptime for j in range(ROUNDS):
                    var late = UInt32(0)
                    comptime if dtype != F and j >= UNDER_WAY:
                        var before = raw[j - UNDER_WAY][0].cast[F]()
                        late = bitcast[DType.uint32](before) & zero
                    raw[j] = source.load(j + Int(late))
            else:
                comptime for j in range(ROUNDS):
                    if part.has(j):
                        raw[j] = source.load(j, part.left(j), raw[j])
            if parked != none:
                seen = board.seen(parked // UInt32(units), lane)
            var largest = raw[0]
            comptime for j in range(1, ROUNDS):
                largest = maximum(largest, raw[j])
            comptime if tile.is_skewed():
                m = D.of_chains[combine_columns[True, F, width]](
                    put_straight[tile](largest.cast[F](), part.skew, lane)
                )
            else:
                m = D.of_chains[combine_columns[True, dtype, width]](
                    largest
                ).cast[F]()
            comptime if scaled:
                m *= multiplier
            var straight_m = m
            m = put_askew[tile](m, part.skew, lane)
            var scale = scale_of(m)
            var sum = Sum[F, width]()
            comptime for i in range(0, ROUNDS, UNROLL):
                var terms = Values(0)
                comptime for j in range(i, i + UNROLL):
                    var e = scale.quick(logits[False](raw[j]))
                    comptime if keeps:
                        raw[j] = rebind[Raw](e)
                    terms = e if j == i else terms + e
                add[exact](sum, terms)
            var d = D.of_chains[combine_columns[False, F, width]](
                put_straight[tile](sum.value - sum.excess, part.skew, lane)
            )
            if meeting.leave(
                turn,
                Pair(
                    straight_m,
                    d * Scale[exact, width](straight_m).quick_factor(),
                ),
                thread // WARP_SIZE,
                lane,
            ):
                var strip = id // UInt32(units)
                board.leave(
                    strip,
                    id - strip * UInt32(units),
                    meeting.take[of_lane, exact](lane),
                    lane,
                )
        var found = Pair[of_lane](0, 0)
        if parked != none:
            found = board.wait(parked // UInt32(units), seen, lane)
        # Nobody waits who has asked for a unit and has not left it.
        var next = board.ask(thread)
        if parked != none:
            write(parked, parked_m, found)
        if id >= end_id:
            return
        comptime for j in range(ROUNDS):
            slots.keep(j, raw[j])
        parked = id
        parked_m = m
        id = stride + meeting.told(turn, next, thread)
        turn += 1


def grid_column_units(n: Int, queue: Queue) raises -> Int:
    """Returns how many units a column has, or 0 if the grid's teams do not hold it, or it is too short.

    Args:
        n: Positions.
        queue: Where the kernel would be launched.
    """
    if n < GRID_LENGTH:
        return 0
    # The same lengths of all dtypes.
    var teams = max(0, (queue.sm_count() - MERGERS) * TEAMS)
    var units = ceildiv(n, UNIT)
    # Who waits for a column has left its part of it, and holds two units.
    return units if units <= 2 * teams else 0


def resident_grid_strided[
    S: RowSource, T: RowTarget, //, finish: Finish, tile: Tile
](y: T, x: S, rows: Rows, units: Int, queue: Queue) raises:
    """Launches `resident_grid_strided_kernel`.

    Parameters:
        S: Where logits come from, as of the kernel.
        T: Where results go.
        finish: What of each element is written.
        tile: A team's columns, of `LANES` vectors.

    Args:
        y: Results.
        x: Logits.
        rows: Rows along an axis that is not the last.
        units: How many units each of them has: what `grid_column_units` returns.
        queue: Where kernels are launched.
    """
    var strips = tile.count(rows)
    var size = ColumnBoard[tile.columns() // WARP_SIZE].size(strips, units)
    var memory = queue.scratch[DType.uint64](size)
    clear(memory.pointer, size, queue)
    queue.launch[resident_grid_strided_kernel[S, T, finish, tile]](
        y,
        x,
        memory.pointer,
        Int64(rows.count()),
        Int64(rows.inner),
        Int64(rows.n),
        Int64(strips),
        Int64(units),
        UInt32(0),
        grid_dim=min(
            queue.sm_count(), mergers[S.Column.loaded]() + strips * units
        ),
        block_dim=BLOCK_SIZE,
        shared_mem_bytes=BLOCK_SIZE * ROUNDS * VECTOR_BYTES,
        attributes=cooperative(),
    )
    _ = memory^
