"""The kernel of rows of which the whole GPU holds only a part: one read, one write, and a second read of the rest, which the L2 has.

Rows are taken one after the other. A warp holds the first units of a row in shared memory, and its last one in registers. What is between them it reads again
once the row has been summed up: the L2 is told to give up everything else first.

One row of 2^24 float32, H100, in one visit, µs (a copy takes 45 to 46):

| | |
|---|---|
| as here | 59.7 |
| the L2 gives up results as it likes | 62.9 |
| and what is held | 67.2 |
| read twice, by `streaming` | 77.6 |
"""

from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    grid_dim,
)

from ..io.eviction import gone_first, gone_last
from ..io.memory import MemorySource, MemoryTarget
from ..io.rows import Rows, Source, Target, VECTOR_BYTES
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
from .hardware.cluster import Pair
from .hardware.pdl import pdl_wait
from .partition.granules import Granules
from .partition.held import Held, NO_UNIT, ROUNDS, first_unit
from .partition.row import reads_vectors
from .resident_grid import MANY, units_held, units_of, warps

comptime WARPS = warps(MANY)
"""Warps a block."""

comptime BLOCK_SIZE = WARPS * WARP_SIZE
"""Threads a block."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def resident_grid_partly_kernel[
    dtype: DType, finish: Finish, edged: Bool
](
    y: MemoryTarget[dtype, passing=True],
    x: Source[dtype],
    memory: Words,
    n: Int64,
    rows: Int64,
    units: Int64,
    zero: UInt32,
):
    """Writes softmax of rows along the last axis, or its logarithm.

    Parameters:
        dtype: Dtype of both tensors, of 4 bytes or 2.
        finish: What of each element is written.
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
    comptime H = Held[dtype, type_of(y), finish, MANY, WARPS, edged]
    var held = H(y, x, Int(n), UInt32(units))
    var board = Board[LONG_GROUP](memory, Int(rows), Int(units))
    var stride = UInt32(WARPS) * UInt32(grid_dim.x)
    var once = gone_first()
    var twice = gone_last()
    pdl_wait()
    for row in range(UInt32(rows)):
        var begin = row * UInt32(units) + first_unit()
        var end = (row + 1) * UInt32(units)
        var id = begin
        while id < end:
            var u = held.unit(id)
            var has_room = held.oldest() == NO_UNIT
            var is_last = id + stride >= end
            var raw = H.Raw(fill=H.U.Values(u.filler))
            var after = u.read[edged, told=True](
                raw, once if has_room or is_last else twice
            )
            var sum = H.Sum(u, raw, after, held.lane, zero)
            var before = board.leave(id, Pair(sum.m, sum.d), held.lane)
            board.merge[H.exact](id, before, held.lane)
            if has_room:
                held.keep(raw, id, sum.m)
            elif is_last:
                var pair = board.wait[H.exact](row, held.lane)
                held.write(pair)
                held.keep(raw, id, sum.m)
                for again in range(begin + MANY * stride, id, stride):
                    u = held.unit(again)
                    _ = u.read[edged, told=True](raw, once)
                    var m = board.largest(again)
                    held.write(pair)
                    held.keep_again(raw, again, m)
            id += stride
        var pair = board.wait[H.exact](row, held.lane)
        for _ in range(MANY):
            if held.oldest() != NO_UNIT:
                held.write(pair)
            held.forget()


def partly_units[dtype: DType](n: Int, queue: Queue) raises -> Int:
    """Returns how many units a row has, or 0 if the grid's warps hold less than half of it, or the board has no room for it.

    Parameters:
        dtype: Dtype of the logits.

    Args:
        n: Elements of the row.
        queue: Where the kernel would be launched.
    """
    var units = units_of[dtype](n)
    var most = min(2 * units_held(MANY, queue), most_units(LONG_GROUP))
    return units if units <= most else 0


def resident_grid_partly[
    dtype: DType, //, finish: Finish
](
    y: Target[dtype], x: Source[dtype], rows: Rows, units: Int, queue: Queue
) raises:
    """Launches `resident_grid_partly_kernel`.

    Parameters:
        dtype: Dtype of both tensors.
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
    var whole = reads_vectors[Granules[dtype].width](MemorySource(x), rows)
    comptime for edged in [False, True]:
        if whole != edged:
            queue.launch[resident_grid_partly_kernel[dtype, finish, edged]](
                MemoryTarget[passing=True](y),
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
