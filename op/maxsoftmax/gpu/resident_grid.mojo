"""The fast kernel of rows that are longer than what clusters are good at, and that the whole GPU holds: one read and one write an element.

Units are those of `resident_units`. A warp holds its last unit in registers, and those before, one or two, in shared memory, until all of their row has been
summed up, which goes by the `Board`. All blocks are on the GPU at once, so that nobody waits for a block that waits for room.

Where warps take many units, each asks a counter for its next one, since not all multiprocessors are equally fast. It asks when it has waited, not before.

Of other ways to deal out units and to keep them none was faster at all lengths (H100, float32, µs; a copy takes 179, 180, 46.5, 4.3 and 24.1; before the L2 was told
anything):

| | 64×2^20 | 16×2^22 | 16×2^20 | 1×2^20 | 1×2^23 |
|---|---|---|---|---|---|
| as here | 185 | 187 | 48.6 | 7.0 | 31.1 |
| all in turn, one in shared memory | 204 | 210 | 52.1 | 7.0 | 31.3 |
| all in turn, two in shared memory of 13 warps | 193 | 199 | 48.6 | 7.3 | – |
| by the counter, one in shared memory | 191 | 204 | 50.1 | 7.0 | – |
| by the counter, two, and warps begin 2 or 4 µs after each other | 186, 185 | 187, 188 | 48.6, 49.0 | – | – |
| in turn, one, the next unit asked for before this one is summed, to be in the L2 | 250 | 254 | – | 7.0 | 32.8 |
| in turn, two of 14 warps, which copies bring there | 225 | 255 | – | 8.0 | 34.1 |
| one row after the other, the next unit on its way to shared memory | – | – | – | – | 30.5 |
| read twice, by `streaming` | – | – | – | – | 38.5 |

On an H200, where a copy takes 127, 128, 33.4 and 3.4:

| | 64×2^20 | 16×2^22 | 16×2^20 | 1×2^20 |
|---|---|---|---|---|
| as here | 144 | 147 | 38.1 | 6.3 |
| without telling the L2 that nobody reads logits again | 145 | 146 | 40.0 | – |
| units of 8 vectors a lane, of 24 warps (12 of 18, 20 of 11, 24 of 9) | 167 (149, 144, 146) | 187 (158, 147, 146) | 44.4 (40.4, 37.6, 38.1) | – |
| a group is merged after its last unit's warp has waited for an older row | 145 | 152 | 38.6 | – |
| whether a row is there is first asked before a unit is summed | 146 | 158 | 38.6 | – |

In an earlier session, where it took 128, 128 and 3.9:

| | 64×2^20 | 16×2^22 | 1×2^20 |
|---|---|---|---|
| all in turn, one in shared memory | 162 | 174 | 7.8 |
| in turn, seven warps, four in shared memory, which copies bring there | 167 | – | 8.0 |
| in turn, nine warps, three in shared memory | 156 | 174 | 8.0 |
| read twice, by `streaming` | 219 | 218 | 10.4 |

On the H200 neither fewer instructions nor shorter waits change 64×2^20: its DRAM is at work 0.75 of the time, for a copy 0.84.
"""

from std.math import ceildiv
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    grid_dim,
)
from max.gpu.primitives import warp

from ..io.eviction import gone_first
from ..io.memory import MemorySource
from ..io.rows import Rows, Source, VECTOR_BYTES
from ..io.target import RowTarget
from ..ops.finish import Finish
from ..queue import Queue
from .hardware.board import (
    Board,
    GROUP,
    Words,
    clear,
    cooperative,
    most_units,
)
from .hardware.cluster import Pair
from .hardware.pdl import pdl_wait
from .partition.granules import Granules
from .partition.held import Held, NO_UNIT, ROUNDS, first_unit
from .partition.row import reads_vectors
from .partition.unit import unit_elements

comptime FEW = 1
"""Units that a warp has in shared memory, of blocks with as many warps as have 128 registers each, all of a multiprocessor: 1×2^22 of float32 takes 16.6 µs, and
by `MANY` 17.4 (H100)."""

comptime MANY = 2
"""The same, of as many as have room for two: 16×2^22 of float32 takes 187 µs, and by `FEW` 208 (H100)."""


def warps(parked: Int) -> Int:
    """Returns how many warps a block has that park so many units each."""
    return 16 if parked == FEW else 14


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(warps(parked) * WARP_SIZE)
    )
)
def resident_grid_kernel[
    dtype: DType, T: RowTarget, finish: Finish, parked: Int, edged: Bool
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
        parked: How many units a warp has in shared memory: `FEW`, if nobody takes more than one beside those, or `MANY`.
        edged: Whether rows may begin or end between two multiples of 16 bytes: with or without it results are the same.

    Args:
        y: Results, not in the memory of the logits.
        x: Logits.
        memory: A board.
        n: Length of each row.
        rows: How many there are.
        units: How many units each of them has.
        zero: What nobody but the caller knows to be 0.
    """
    comptime H = Held[dtype, T, finish, parked, warps(parked), edged]
    comptime many = parked == MANY
    var held = H(y, x, Int(n), UInt32(units))
    var board = Board[GROUP](memory, Int(rows), Int(units))
    var end = UInt32(rows) * UInt32(units)
    var stride = UInt32(warps(parked)) * UInt32(grid_dim.x)
    var once = gone_first()
    pdl_wait()
    var id = first_unit()
    while id < end:
        var u = held.unit(id)
        var raw = H.Raw(fill=H.U.Values(u.filler))
        var after = u.read[edged, told=many](raw, once)
        var sum = H.Sum(u, raw, after, held.lane, zero)
        var before = board.leave(id, Pair(sum.m, sum.d), held.lane)
        var oldest = held.oldest()
        var row = board.row(oldest)
        var seen = UInt64(0)
        if oldest != NO_UNIT:
            seen = board.seen(row, held.lane)
        board.merge[H.exact](id, before, held.lane)
        if oldest != NO_UNIT:
            seen = board.there(row, seen, held.lane)
        var next = id
        comptime if many:
            # Nobody waits who has asked for a unit and has not left it.
            next = board.ask(held.lane)
        if oldest != NO_UNIT:
            held.write(board.merged[H.exact](seen))
        held.keep(raw, id, sum.m)
        comptime if many:
            next = warp.shuffle_idx(next, 0)
        id = next + stride
    for _ in range(parked):
        if held.oldest() != NO_UNIT:
            var row = board.row(held.oldest())
            held.write(board.wait[H.exact](row, held.lane))
        held.forget()


def grid_units[dtype: DType](n: Int, queue: Queue) raises -> Int:
    """Returns how many units a row has, or 0 if the grid's warps do not hold it, or the board has no room for it.

    Parameters:
        dtype: Dtype of the logits.

    Args:
        n: Elements of the row.
        queue: Where the kernel would be launched.
    """
    var units = units_of[dtype](n)
    var most = min(units_held(MANY, queue), most_units(GROUP))
    return units if units <= most else 0


def units_of[dtype: DType](n: Int) -> Int:
    """Returns how many units a row has.

    Parameters:
        dtype: Dtype of the logits.

    Args:
        n: Elements of the row.
    """
    return ceildiv(n, unit_elements[dtype](ROUNDS))


def units_held(parked: Int, queue: Queue) raises -> Int:
    """Returns how many units all warps hold together: of a row that has more, some might not be left before all wait for it.

    Args:
        parked: Units that each of them parks, beside the one in registers.
        queue: Where the kernel would be launched.
    """
    return (parked + 1) * warps(parked) * queue.sm_count()


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
        units: How many units each of them has: what `grid_units` returns.
        queue: Where kernels are launched.
    """
    var count = rows.count() * units
    var blocks = min(queue.sm_count(), count)
    var few = count <= units_held(FEW, queue)
    var whole = reads_vectors[Granules[dtype].width](MemorySource(x), rows)
    var size = Board[GROUP].size(rows.count(), units)
    var memory = queue.scratch[DType.uint64](size)
    clear(memory.pointer, size, queue)
    comptime for parked in [FEW, MANY]:
        comptime threads = warps(parked) * WARP_SIZE
        comptime for edged in [False, True]:
            if (parked == FEW) == few and whole != edged:
                queue.launch[
                    resident_grid_kernel[dtype, T, finish, parked, edged]
                ](
                    y,
                    x,
                    memory.pointer,
                    Int64(rows.n),
                    Int64(rows.count()),
                    Int64(units),
                    UInt32(0),
                    grid_dim=blocks,
                    block_dim=threads,
                    shared_mem_bytes=parked * threads * ROUNDS * VECTOR_BYTES,
                    attributes=cooperative(),
                )
    _ = memory^
