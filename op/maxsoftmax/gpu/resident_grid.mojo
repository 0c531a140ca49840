"""The fast kernel of rows that no cluster holds, and the whole GPU does: one read and one write an element.

Units are those of `resident_units`, dealt to all warps in turn. A warp holds two: the last one in registers, and the one before in shared memory, until
all of its row has been summed up, which goes by the `Board`. All blocks are on the GPU at once, so that nobody waits for a block that waits for room.

Of other ways to deal out units and to keep them none was faster at all lengths (H200, float32, µs; a copy takes 128 and 128):

| | 64×2^20 | 16×2^22 | 1×2^20 |
|---|---|---|---|
| as here | 162 | 174 | 7.8 |
| taken from a counter, those that there is no room for read again | 146 | 241 | 10.4 |
| the same, two in shared memory, which leaves the L1 little room | 148 | 157 | 10.3 |
| seven warps, four in shared memory, which copies bring there | 167 | – | 8.0 |
| nine warps, three in shared memory, and one in registers | 156 | 174 | 8.0 |
| read twice, by `streaming` | 219 | 218 | 10.4 |

On an H100, where a copy takes 179, 179 and 4.3, and of one row of 2^23 24.0:

| | 64×2^20 | 16×2^22 | 1×2^20 | 1×2^23 |
|---|---|---|---|---|
| as here | 204 | 210 | 7.0 | 31.4 |
| the next unit asked for before this one is summed, to be in the L2 | 250 | 254 | 7.0 | 32.8 |
| 14 warps, a unit in registers and two in shared memory, which copies bring there | 225 | 255 | 8.0 | 34.1 |
| one row after the other, the next unit on its way to shared memory | – | – | – | 30.5 |
| read twice, by `streaming` | – | – | – | 38.5 |

The last but one takes longer rows, too, of which it reads again what there is no room for: 1×2^24 68.7, and `streaming` 77.6. In 16 bits it spills, and 1×2^24
takes 53.6 instead of 32.0.
"""

from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_idx,
    grid_dim,
    thread_idx,
)

from ..io.rows import Rows, Source, VECTOR_BYTES
from ..io.target import RowTarget
from ..math.exponential import Scale
from ..ops.finish import Finish
from ..queue import Queue
from .hardware.board import (
    Board,
    MOST_UNITS,
    Words,
    clear,
    cooperative,
    sleep,
    units_in_turns,
)
from .hardware.cluster import Pair
from .hardware.pdl import pdl_wait
from .hardware.slots import Slots
from .partition.unit import Unit, unit_elements
from .partition.unit_result import factors
from .partition.unit_sum import UnitSum

comptime ROUNDS = 16
"""Vectors of a unit that each lane takes: a row's bits follow from it."""

comptime BLOCK_SIZE = 512
"""Threads a block: as many as have 128 registers each, all of a multiprocessor."""

comptime WARPS = BLOCK_SIZE // WARP_SIZE
"""Warps a block."""

comptime LEAST_FILL = 0.62
"""How much of two units a warp a longer row has at least: reading twice takes 1.05 of the time of 8×5000000 of float32, which has 0.59, but 0.96 of that of
8×4400000, and 0.86 of 8×9000000 of bfloat16, which have 0.52 and 0.53 (H100)."""

comptime MANY_TURNS = 4
"""More units a warp than that take long enough for warps to begin one after the other."""

comptime DELAY = 2000
"""ns between a multiprocessor's first four warps, the next four, and so on.

Warps that all read, sum and write at the same time leave the memory idle in between: 64 rows of 2^20 float32 take 170 µs without.
"""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def resident_grid_kernel[
    dtype: DType, T: RowTarget, finish: Finish, edged: Bool
](
    y: T,
    x: Source[dtype],
    memory: Words,
    n: Int64,
    rows: Int64,
    units: Int64,
    zero: UInt32,
):
    """Writes softmax of rows along the last axis, or its logarithm.

    Parameters:
        dtype: Dtype of the logits, of 4 bytes or 2.
        T: Where results go.
        finish: What of each element is written.
        edged: Whether rows may begin or end between two multiples of 16 bytes: with or without it results are the same.

    Args:
        y: Results, not in the memory of the logits.
        x: Logits.
        memory: A board.
        n: Length of each row.
        rows: How many there are.
        units: How many units each of them is dealt out as.
        zero: What nobody but the caller knows to be 0.
    """
    comptime F = DType.float32
    comptime U = Unit[dtype, ROUNDS]
    comptime width = U.width
    comptime Vector = SIMD[F, width]
    comptime exact = size_of[dtype]() > 2 or size_of[T.Line.stored]() > 2
    # Exponentials are kept in place of the logits, unless that takes twice the room.
    comptime keeps = finish == Finish.PROBABILITIES and dtype == F
    comptime none = UInt32.MAX
    var slots = Slots[dtype, BLOCK_SIZE, width]()
    var lane = Int(thread_idx.x) % WARP_SIZE
    var warp_index = Int(thread_idx.x) // WARP_SIZE
    var board = Board(memory, Int(rows), Int(units))
    var end = UInt32(rows) * UInt32(units)
    pdl_wait()

    @inline(.always)
    def of_unit(id: UInt32) {imm} -> U:
        """Returns what of a unit is this lane's."""
        var row = board.row(id)
        return U(
            U.G(x, Int(row), Int(n)), Int(id - row * board.units_of_row), lane
        )

    @inline(.always)
    def write(id: UInt32, m: Float32, pair: Pair[]) {imm}:
        """Writes the results of the unit in shared memory.

        - `m`: Its largest logit.
        - `pair`: That of its row.
        """
        var u = of_unit(id)
        var scale = Scale[exact](m)
        var of_row = Scale[exact](pair.m)
        var factor, rest = factors[finish, keeps](m, scale, of_row, pair)

        @inline(.always)
        def finished(values: U.Values, rest: Float32) {imm} -> Vector:
            """Returns results of what is kept."""
            comptime if finish == Finish.LOGARITHMS:
                return (rebind[Vector](values.cast[F]()) - pair.m) - factor
            elif keeps:
                return rebind[Vector](values) * rest * factor
            else:
                return rebind[Vector](of_row.quick(values.cast[F]())) * factor

        @inline(.always)
        def plain(j: Int) {imm} -> SIMD[F, width]:
            return finished(slots.take(j), 1)

        @inline(.always)
        def any(j: Int) {imm} -> SIMD[F, width]:
            return finished(slots.take(j), rest)

        @inline(.always)
        def some(j: Int, logits: U.Values) {imm} -> SIMD[F, width]:
            comptime if keeps:
                return finished(
                    rebind[U.Values](scale.quick(logits.cast[F]())), rest
                )
            else:
                return finished(logits, rest)

        var row = Int(board.row(id))
        u.store[edged](
            y.line(row, Int(n)).onwards(u.first * width - Int(u.g.shift)),
            rest == 1,
            plain,
            any,
            some,
        )

    var parked = none
    var parked_m = Float32(0)
    var stride = UInt32(WARPS) * UInt32(grid_dim.x)
    if end > MANY_TURNS * stride:
        sleep(UInt32(DELAY) * UInt32(warp_index // 4))
    # A row's units are spread over the GPU.
    var id = UInt32(warp_index * grid_dim.x + block_idx.x)
    while id < end:
        var u = of_unit(id)
        var raw = Array[U.Values, ROUNDS](fill=U.Values(u.filler))
        var after = u.read[edged](raw)
        var sum = UnitSum[dtype, ROUNDS, exact, keeps, edged](
            u, raw, after, lane, zero
        )
        var before = board.leave(id, Pair(sum.m, sum.d), lane)
        var row = board.row(parked)
        var seen = UInt64(0)
        if parked != none:
            seen = board.seen(row, lane)
        board.merge[exact](id, before, lane)
        if parked != none:
            write(parked, parked_m, board.wait[exact](row, seen, lane))
        comptime for j in range(ROUNDS):
            slots.keep(j, raw[j])
        parked = id
        parked_m = sum.m
        id += stride
    if parked != none:
        var row = board.row(parked)
        write(
            parked,
            parked_m,
            board.wait[exact](row, board.seen(row, lane), lane),
        )


def grid_units[dtype: DType](n: Int, queue: Queue) raises -> Int:
    """Returns how many units a row is dealt out as, those that are empty included, or 0 if the grid's warps do not hold it, or too little else.

    Parameters:
        dtype: Dtype of the logits.

    Args:
        n: Elements of the row.
        queue: Where the kernel would be launched.
    """
    var units = units_in_turns(
        ceildiv(n, unit_elements[dtype](ROUNDS)),
        queue.sm_count() * WARPS,
        LEAST_FILL,
    )
    return units if units <= MOST_UNITS else 0


def resident_grid[
    dtype: DType, T: RowTarget, //, finish: Finish
](y: T, x: Source[dtype], rows: Rows, units: Int, queue: Queue) raises:
    """Launches `resident_grid_kernel`.

    Parameters:
        dtype: Dtype of the logits.
        T: Where results go.
        finish: What of each element is written.

    Args:
        y: Results.
        x: Logits.
        rows: Rows along the last axis.
        units: How many units each of them is dealt out as: what `grid_units` returns.
        queue: Where kernels are launched.
    """
    var whole = (Int(x) | (rows.n * size_of[dtype]())) % VECTOR_BYTES == 0
    var size = Board.size(rows.count(), units)
    var memory = queue.scratch[DType.uint64](size)
    clear(memory.pointer, size, queue)
    comptime for edged in [False, True]:
        if whole != edged:
            queue.launch[resident_grid_kernel[dtype, T, finish, edged]](
                y,
                x,
                memory.pointer,
                Int64(rows.n),
                Int64(rows.count()),
                Int64(units),
                UInt32(0),
                grid_dim=min(queue.sm_count(), rows.count() * units),
                block_dim=BLOCK_SIZE,
                shared_mem_bytes=BLOCK_SIZE * ROUNDS * VECTOR_BYTES,
                attributes=cooperative(),
            )
    _ = memory^
