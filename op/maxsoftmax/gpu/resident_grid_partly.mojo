"""The kernel of rows of which the whole GPU holds only a part: one read, one write, and a second read of the rest, which the L2 has.

Rows are taken one after the other. Each warp asks a counter for its next unit. It holds its first units of a row in shared memory, and its last one in registers. What
is between them it reads again, or computes again, once the row has been summed up: the L2 is told to give up everything else first.

µs on an H100 (a copy takes 45 to 46) and an H200 (31.8, 91 and 23), each in one visit:

| float32 | 1×2^24 | H200: 1×2^24 | 4×12000000 | 1×12000000 |
|---|---|---|---|---|
| as here | – | 45.6 | 122 | 33.1 |
| by a counter that is asked before a unit is summed | – | 45.9 | 127 | 35.9 |
| units dealt out in turn | 59.7 | 46–47 | 140 | 37.5 |
| the same, and the L2 gives up results as it likes | 62.9 | – | – | – |
| and what is held | 67.2 | – | – | – |
| and what is held as it likes, but results first | – | 51 | – | – |
| what is held in registers written from there, and what is read again before what is in shared memory | – | 53.7 | 142 | 36.1 |
| what is read again first of all, 8 vectors at a time: the assembler has no registers left | – | 59.9 | 158 | 40.3 |
| one more unit in registers, as 12 warps have room for: not 21 but 15 MB are read again | – | 45.3 | 128 | 34.9 |
| the same, and what is in registers is written from there | – | 46.3 | 131 | 33.9 |
| read twice, by `streaming` | 77.6 | – | – | – |

One more unit in registers, measured beside 45.6, 122 and 32.6, gains a hundredth where the row is longest, and loses five and seven elsewhere.

On the H200 all of 1×2^24 is read after 26 µs and written after 44: as long as it is read, memory is busy, for what the call before has left in the L2 is written then.
"""

from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    grid_dim,
)
from max.gpu.primitives import warp

from ..io.eviction import GONE_FIRST, GONE_LAST
from ..io.rows import Rows, VECTOR_BYTES
from ..io.source import RowSource
from ..io.target import RowTarget
from ..ops.finish import Finish
from ..queue import Queue
from .hardware.board import (
    Board,
    LONG_GROUP,
    Words,
    clear,
    cooperative,
    most_units,
)
from .hardware.pair import Pair
from .hardware.pdl import pdl_wait
from .partition.granules import Granules
from .partition.held import Held, NO_UNIT, ROUNDS, first_unit
from .partition.row import reads_vectors
from .partition.unit import lies
from .resident_grid import MANY, units_held, units_of

comptime WARPS = 14
"""Warps a block: by 12, which hold less, 1×2^24 of float32 takes 45.8 µs, and not 45.2 (H200)."""

comptime BLOCK_SIZE = WARPS * WARP_SIZE
"""Threads a block."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def resident_grid_partly_kernel[
    S: RowSource, T: RowTarget, finish: Finish, edged: Bool
](
    y: T,
    x: S,
    memory: Words,
    n: Int64,
    rows: Int64,
    units: Int64,
    zero: UInt32,
):
    """Writes softmax of rows along the last axis, or its logarithm.

    Parameters:
        S: As of `Held`.
        T: Where results go, no memory of the logits.
        finish: What of each element is written.
        edged: Whether rows may begin or end between two multiples of 16 bytes: with or without it results are the same.

    Args:
        y: Results.
        x: Logits.
        memory: A board.
        n: Length of each row.
        rows: How many there are.
        units: How many units each of them has.
        zero: What nobody but the caller knows to be 0.
    """
    comptime H = Held[S, T, finish, MANY, WARPS, edged]
    var held = H(y, x, Int(n), UInt32(units))
    var board = Board[LONG_GROUP](memory, Int(rows), Int(units))
    var stride = UInt32(WARPS) * UInt32(grid_dim.x)
    pdl_wait()
    var id = first_unit()
    for row in range(UInt32(rows)):
        var end = (row + 1) * UInt32(units)
        # Which units are to be read again: each lane knows one.
        var again = NO_UNIT
        var count = 0
        while id < end:
            var u = held.unit(id)
            var has_room = held.oldest() == NO_UNIT
            var is_likely_last = id + stride >= end
            var raw = H.Raw(fill=H.U.Values(u.filler))
            var after = held.read[past_l1=True](
                id,
                u,
                raw,
                GONE_FIRST if has_room or is_likely_last else GONE_LAST,
            )
            var sum = H.Sum(u, raw, after, held.lane, zero, held.factor())
            var before = board.leave(id, Pair(sum.m, sum.d), held.lane)
            board.merge[H.exact, H.sums](id, before, held.lane)
            var next = NO_UNIT
            # Who knows no more of them leaves the rest of the row to others.
            if count < WARP_SIZE:
                next = stride + warp.shuffle_idx(board.ask(held.lane), 0)
            if has_room:
                held.keep(raw, id, sum.m)
            elif next < end:
                if held.lane == count:
                    again = id
                count += 1
            else:
                var pair = board.wait[H.exact, H.sums](row, held.lane)
                held.write(pair)
                held.keep(raw, id, sum.m)
                for i in range(count):
                    var other = warp.shuffle_idx(again, UInt32(i))
                    u = held.unit(other)
                    _ = held.read[past_l1=True](other, u, raw, GONE_FIRST)
                    var m = board.largest(other)
                    held.write(pair)
                    held.keep_again(raw, other, m)
            id = next
        var pair = board.wait[H.exact, H.sums](row, held.lane)
        for _ in range(MANY):
            if held.oldest() != NO_UNIT:
                held.write(pair)
            held.forget()
        if id == NO_UNIT:
            id = stride + warp.shuffle_idx(board.ask(held.lane), 0)


def partly_units[dtype: DType](n: Int, queue: Queue) raises -> Int:
    """Returns how many units a row has, or 0 if the grid's warps hold less than half of it, or the board has no room for it.

    Parameters:
        dtype: Dtype of the logits.

    Args:
        n: Elements of the row.
        queue: Where the kernel would be launched.
    """
    var units = units_of[dtype](n)
    var most = min(2 * units_held(MANY, WARPS, queue), most_units(LONG_GROUP))
    return units if units <= most else 0


def resident_grid_partly[
    S: RowSource, T: RowTarget, //, finish: Finish
](y: T, x: S, rows: Rows, units: Int, queue: Queue) raises:
    """Launches `resident_grid_partly_kernel`.

    Parameters:
        S: As of the kernel.
        T: Where results go.
        finish: What of each element is written.

    Args:
        y: Results.
        x: Logits.
        rows: Rows along the last axis.
        units: How many units each of them has: what `partly_units` returns.
        queue: Where kernels are launched.
    """
    var size = Board[LONG_GROUP].size(rows.count(), units)
    var memory = queue.scratch[DType.uint64](size)
    clear(memory.pointer, size, queue)
    comptime lie = lies[S]()
    var whole = lie and reads_vectors[Granules[S.Line.held].width](x, rows)
    comptime for edged in [False, True]:
        comptime if lie or edged:
            if whole != edged:
                queue.launch[resident_grid_partly_kernel[S, T, finish, edged]](
                    y,
                    x,
                    memory.pointer,
                    Int64(rows.n),
                    Int64(rows.count()),
                    Int64(units),
                    UInt32(0),
                    grid_dim=queue.sm_count(),
                    block_dim=BLOCK_SIZE,
                    shared_mem_bytes=MANY * BLOCK_SIZE * ROUNDS * VECTOR_BYTES,
                    attributes=cooperative(),
                )
    _ = memory^
