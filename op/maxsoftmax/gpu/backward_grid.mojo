"""The backward kernels of rows that do not fit on the chip: four reads and one write an element, in two launches.

As in `grid`, each row is shared by several blocks. The first launch leaves a sum of each block in device memory; the
second adds those of its row, and writes, backwards: what was read last is still in the last cache.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.sync import barrier

from ..gradient import Gradient
from ..online import Sum
from ..queue import Queue
from ..rows import Rows, Source, Target
from .overlap import follow, overlapped
from .part import Part
from .team import team_reduce, total
from .tile import add
from .tree_reduction import MAX_GRID

comptime BLOCK_SIZE = 256
"""Threads a block."""

comptime UNROLL = 2
"""Vectors of each input that a thread has under way at a time."""

comptime Floats = Pointer[Float32, MutUntrackedOrigin]
"""Where the sums of the blocks wait between the launches."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE)),
    `nvvm.minctasm`=SIMDLength(1024 // BLOCK_SIZE),
)
def backward_grid_kernel[
    dtype: DType, log: Bool, first: Bool
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    sums: Floats,
    rows: Int64,
    n: Int64,
    blocks: Int64,
    share: Int64,
):
    """Sums each block's part of each of its rows, or adds those of a row and writes its gradient.

    Parameters:
        dtype: Dtype of all tensors, of 4 bytes or 2.
        log: Whether y are logarithms of probabilities.
        first: Which of the two.

    Args:
        dx: Gradient of the logits.
        y: Results of the forward op.
        dy: Their gradient, aligned as `y` is.
        sums: One a block and row.
        rows: How many.
        n: Length of each.
        blocks: Blocks that share a row.
        share: Vectors of a row that a block takes.
    """
    comptime P = Part[dtype, BLOCK_SIZE]
    comptime exact = size_of[dtype]() > 2
    comptime G = Gradient[log, exact]
    var scratch = unsafe_stack_allocation[
        BLOCK_SIZE // WARP_SIZE, Float32, address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var rank = Int(block_idx.x) % Int(blocks)
    follow()
    for row in range(
        Int(block_idx.x) // Int(blocks),
        Int(rows),
        Int(grid_dim.x) // Int(blocks),
    ):
        var mine = sums.unsafe_offset(row * Int(blocks))
        var part = P(dx, y, row, Int(n), thread, rank, Int(share))
        var upstream = part
        upstream.source = part.source.unsafe_offset(
            (Int(dy) - Int(y)) // size_of[dtype]()
        )
        var result_edges = part.load_edges(y, 0)
        var gradient_edges = part.load_edges(dy, 0)
        comptime if first:
            var sum = Sum[DType.float32, P.width]()
            sum.value[0] = G.term(result_edges, gradient_edges).reduce_add()
            for i in range(0, part.rounds() + 1, UNROLL):
                var terms = SIMD[DType.float32, P.width](0)
                comptime for j in range(UNROLL):
                    if part.has(i + j):
                        terms += G.term(
                            part.load(i + j).cast[DType.float32](),
                            upstream.load(i + j).cast[DType.float32](),
                        )
                add[exact](sum, terms)
            var of_block = team_reduce[BLOCK_SIZE, total](
                scratch, thread, sum.collapse().value
            )
            if thread == 0:
                mine[unsafe_offset=rank] = of_block
        else:
            var sum = Float32(0)
            for i in range(thread, Int(blocks), BLOCK_SIZE):
                sum += mine[unsafe_offset=i]
            var gradient = G(
                team_reduce[BLOCK_SIZE, total](scratch, thread, sum)
            )
            comptime for aligned in [True, False]:
                if part.aligned == aligned:
                    for group in range(part.rounds() // UNROLL, -1, -1):
                        comptime for j in range(UNROLL):
                            var i = group * UNROLL + j
                            if part.has(i):
                                part.store[aligned](
                                    i,
                                    gradient.of(
                                        part.load(i).cast[DType.float32](),
                                        upstream.load(i).cast[DType.float32](),
                                    ).cast[dtype](),
                                )
            part.store_edges(dx, gradient.of(result_edges, gradient_edges))
        # The next row is summed in the same scratch memory.
        barrier()


def backward_grid[
    dtype: DType, log: Bool
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Launches the two kernels.

    Parameters:
        dtype: Dtype of all tensors, of 4 bytes or 2.
        log: Whether y are logarithms of probabilities.

    Args:
        dx: Gradient of the logits, not in the memory of `y` or `dy`.
        y: Results of the forward op.
        dy: Their gradient.
        rows: Rows along the last axis.
        queue: Where kernels are launched.
    """
    comptime tile = Part[dtype, BLOCK_SIZE].width * BLOCK_SIZE * UNROLL
    var held = queue.sm_count() * (1024 // BLOCK_SIZE)
    var blocks = min(max(1, held // rows.count()), ceildiv(rows.n, tile))
    var share = ceildiv(rows.n, Part[dtype, BLOCK_SIZE].width * blocks)
    var memory = queue.scratch[DType.float32](rows.count() * blocks)
    var sums = memory.pointer
    comptime for first in [True, False]:
        queue.launch[backward_grid_kernel[dtype, log, first]](
            dx,
            y,
            dy,
            sums,
            Int64(rows.count()),
            Int64(rows.n),
            Int64(blocks),
            Int64(share),
            grid_dim=min(rows.count(), MAX_GRID // blocks) * blocks,
            block_dim=BLOCK_SIZE,
            attributes=overlapped(),
        )
    _ = memory^
