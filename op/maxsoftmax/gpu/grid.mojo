"""The fast kernels of rows that do not fit on the chip: two reads and one write an element, in two launches.

Each row is shared by as many blocks as the GPU holds at a time. The first launch leaves a pair of each block in device memory;
the second merges those of its row, and writes. It goes through the row backwards, so that what was read last, and
is still in the last cache, is read first.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
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

from ..exponential import Scale, logarithm
from ..finish import Finish
from ..online import Sum
from ..queue import Queue
from ..rows import Rows, Source, Target
from .cluster import Pair
from .overlap import follow, overlapped
from .part import Part
from .quick_pairs import BLOCK_SIZE, Pairs, quick_pairs_kernel
from .team import greater, largest_lane, maximum, team_reduce, total
from .tile import write_pair
from .tree_reduction import MAX_GRID, Shared

comptime UNROLL = 4
"""Vectors that a thread has under way at a time."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE)),
    `nvvm.minctasm`=SIMDLength(1024 // BLOCK_SIZE),
)
def pairs_kernel[
    dtype: DType
](
    pairs: Pairs,
    x: Source[dtype],
    rows: Int64,
    n: Int64,
    blocks: Int64,
    share: Int64,
):
    """First launch: the pair of each block's part of each of its rows.

    Parameters:
        dtype: Dtype of the logits, of 4 bytes or 2.

    Args:
        pairs: Where the pairs go.
        x: Logits.
        rows: How many.
        n: Length of each.
        blocks: Blocks that share a row.
        share: Vectors of a row that a block takes.
    """
    comptime P = Part[dtype, BLOCK_SIZE]
    comptime S = Scale[size_of[dtype]() > 2]
    var scratch = _scratch()
    var thread = Int(thread_idx.x)
    var rank = Int(block_idx.x) % Int(blocks)
    follow()
    for row in range(
        Int(block_idx.x) // Int(blocks),
        Int(rows),
        Int(grid_dim.x) // Int(blocks),
    ):
        var part = P(
            x.unsafe_mut_cast[True](),
            x,
            row,
            Int(n),
            thread,
            rank,
            Int(share),
        )
        var edges = part.load_edges(x)
        var m = largest_lane(edges)
        var scale = S(m)
        var d = Sum[DType.float32, P.width]()
        d.value[0] = scale.exp(edges).reduce_add()
        for i in range(0, part.rounds() + 1, UNROLL):
            var raw = Array[P.Raw, UNROLL](fill=P.Raw(neg_inf[dtype]()))
            comptime for j in range(UNROLL):
                if part.has(i + j):
                    raw[j] = part.load(i + j)
            var largest = raw[0]
            comptime for j in range(1, UNROLL):
                largest = maximum(largest, raw[j])
            m = maximum(m, largest_lane(largest).cast[DType.float32]())
            var larger = S(m)
            # The first maximum may be one of nothing, which is no larger than any.
            d.scale(scale.over(larger) if scale.m <= larger.m else Float32(0))
            scale = larger
            var terms = scale.exp(raw[0].cast[DType.float32]())
            comptime for j in range(1, UNROLL):
                terms += scale.exp(raw[j].cast[DType.float32]())
            d.add(terms)
        var all = team_reduce[BLOCK_SIZE, greater](scratch, thread, m)
        var sum = team_reduce[BLOCK_SIZE, total](
            scratch.unsafe_offset(BLOCK_SIZE // WARP_SIZE),
            thread,
            Pair(m, d.collapse().value).sum_over(S(all)),
        )
        if thread == 0:
            pairs[unsafe_offset=row * Int(blocks) + rank] = Pair(all, sum)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE)),
    `nvvm.minctasm`=SIMDLength(1024 // BLOCK_SIZE),
)
def quotients_kernel[
    dtype: DType, finish: Finish
](
    y: Target[dtype],
    x: Source[dtype],
    pairs: Pairs,
    rows: Int64,
    n: Int64,
    blocks: Int64,
    share: Int64,
):
    """Second launch: each block merges the pairs of a row, and writes its part of it.
    """
    comptime P = Part[dtype, BLOCK_SIZE]
    comptime S = Scale[size_of[dtype]() > 2]
    var scratch = _scratch()
    var thread = Int(thread_idx.x)
    var rank = Int(block_idx.x) % Int(blocks)
    follow()
    for row in range(
        Int(block_idx.x) // Int(blocks),
        Int(rows),
        Int(grid_dim.x) // Int(blocks),
    ):
        var mine = pairs.unsafe_offset(row * Int(blocks))
        var m = neg_inf[DType.float32]()
        for i in range(thread, Int(blocks), BLOCK_SIZE):
            m = maximum(m, mine[unsafe_offset=i].m)
        m = team_reduce[BLOCK_SIZE, greater](scratch, thread, m)
        var scale = S(m)
        var d = Float32(0)
        for i in range(thread, Int(blocks), BLOCK_SIZE):
            d += mine[unsafe_offset=i].sum_over(scale)
        d = team_reduce[BLOCK_SIZE, total](
            scratch.unsafe_offset(BLOCK_SIZE // WARP_SIZE), thread, d
        )
        var pair = Pair(m, d)
        comptime if finish == Finish.PAIR:
            if rank == 0 and thread == 0:
                write_pair[size_of[dtype]() > 2](y, row, pair)
            continue
        var factor = pair.reciprocal()
        comptime if finish == Finish.LOGARITHMS:
            factor = logarithm(pair.relative[size_of[dtype]() > 2]())

        @inline(.always)
        def finished[
            width: SIMDLength
        ](x: SIMD[DType.float32, width]) {imm} -> SIMD[DType.float32, width]:
            comptime if finish == Finish.LOGARITHMS:
                return (x - m) - factor
            else:
                return scale.exp(x) * factor

        var part = P(y, x, row, Int(n), thread, rank, Int(share))
        comptime for aligned in [True, False]:
            if part.aligned == aligned:
                for group in range(part.rounds() // UNROLL, -1, -1):
                    var raw = Array[P.Raw, UNROLL](fill=P.Raw(0))
                    comptime for j in range(UNROLL):
                        if part.has(group * UNROLL + j):
                            raw[j] = part.load(group * UNROLL + j)
                    comptime for j in range(UNROLL):
                        if part.has(group * UNROLL + j):
                            part.store[aligned](
                                group * UNROLL + j,
                                finished(raw[j].cast[DType.float32]()).cast[
                                    dtype
                                ](),
                            )
        part.store_edges(y, finished(part.load_edges(x)))


def grid[
    dtype: DType, finish: Finish
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Launches the two kernels.

    Parameters:
        dtype: Dtype of both tensors, of 4 bytes or 2.
        finish: What of each row is written.

    Args:
        y: Probabilities, not in the memory of `x`.
        x: Logits.
        rows: Rows along the last axis.
        queue: Where kernels are launched.
    """
    comptime tile = Part[dtype, BLOCK_SIZE].width * BLOCK_SIZE * UNROLL
    var held = queue.sm_count() * (1024 // BLOCK_SIZE)
    var blocks = min(max(1, held // rows.count()), ceildiv(rows.n, tile))
    var share = ceildiv(rows.n, Part[dtype, BLOCK_SIZE].width * blocks)
    var count = min(rows.count(), MAX_GRID // blocks) * blocks
    comptime if finish == Finish.PAIR:
        if blocks == 1:
            queue.launch[quick_pairs_kernel[dtype, True]](
                y.unsafe_bitcast[Pair[]](),
                x,
                Int64(rows.count()),
                Int64(rows.n),
                Int64(blocks),
                Int64(share),
                grid_dim=count,
                block_dim=BLOCK_SIZE,
                attributes=overlapped(),
            )
            return
    var memory = queue.scratch[DType.float32](2 * rows.count() * blocks)
    var pairs = memory.pointer.unsafe_bitcast[Pair[]]()
    comptime first = quick_pairs_kernel[
        dtype, False
    ] if finish == Finish.PAIR else pairs_kernel[dtype]
    queue.launch[first](
        pairs,
        x,
        Int64(rows.count()),
        Int64(rows.n),
        Int64(blocks),
        Int64(share),
        grid_dim=count,
        block_dim=BLOCK_SIZE,
        attributes=overlapped(),
    )
    queue.launch[quotients_kernel[dtype, finish]](
        y,
        x,
        pairs,
        Int64(rows.count()),
        Int64(rows.n),
        Int64(blocks),
        Int64(share),
        grid_dim=count,
        block_dim=BLOCK_SIZE,
        attributes=overlapped(),
    )
    _ = memory^


@inline(.always)
def _scratch() -> Shared[Float32]:
    """Returns memory for two reductions of a block."""
    return unsafe_stack_allocation[
        2 * BLOCK_SIZE // WARP_SIZE,
        Float32,
        address_space=AddressSpace.SHARED,
    ]()
