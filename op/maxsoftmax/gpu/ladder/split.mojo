"""One row over the whole grid: blocks reduce spans of it, and their (m, d) pairs merge in a second launch.

Two reads and one write an element, like `online`, but a single row keeps every multiprocessor busy. The third launch,
which writes, cannot start before the second has merged. Published as kernel 3 of the worklog.
"""

from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)

from ...math.online import MaxSum, accumulator
from ...queue import Queue
from ...io.rows import Rows, Source, Target
from ..hardware.tree_reduction import MAX_GRID
from ..hardware.warp_reduction import pair_reduce

comptime Pairs[accum: DType] = Pointer[MaxSum[accum, 1], MutUntrackedOrigin]
"""Where pairs wait between launches."""

comptime SPAN = 16384
"""Elements of a row that a block reduces."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def span_kernel[
    dtype: DType, accum: DType, block_size: Int
](pairs: Pairs[accum], x: Source[dtype], rows: Int64, n: Int64):
    """First launch, a block per span: its pair."""
    var spans = ceildiv(Int(n), SPAN)
    for task in range(Int(block_idx.x), Int(rows) * spans, Int(grid_dim.x)):
        var logits = x.unsafe_offset(task // spans * Int(n))
        var start = task % spans * SPAN
        var pair = MaxSum[accum, 1]()
        for i in range(
            start + Int(thread_idx.x), min(start + SPAN, Int(n)), block_size
        ):
            pair.add(
                Array[Scalar[accum], 1](
                    fill=logits[unsafe_offset=i].cast[accum]()
                )
            )
        pair = pair_reduce[block_size](Int(thread_idx.x), pair)
        if thread_idx.x == 0:
            pairs[unsafe_offset=task] = pair


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def merge_kernel[
    accum: DType, block_size: Int
](totals: Pairs[accum], pairs: Pairs[accum], rows: Int64, spans: Int64):
    """Second launch, a block per row: the pair of all its spans."""
    for row in range(Int(block_idx.x), Int(rows), Int(grid_dim.x)):
        var pair = MaxSum[accum, 1]()
        for span in range(Int(thread_idx.x), Int(spans), block_size):
            pair.merge(pairs[unsafe_offset=row * Int(spans) + span])
        pair = pair_reduce[block_size](Int(thread_idx.x), pair)
        if thread_idx.x == 0:
            totals[unsafe_offset=row] = pair


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def write_kernel[
    dtype: DType, accum: DType, block_size: Int
](
    y: Target[dtype],
    x: Source[dtype],
    totals: Pairs[accum],
    rows: Int64,
    n: Int64,
):
    """Third launch, a block per span: its probabilities."""
    var spans = ceildiv(Int(n), SPAN)
    for task in range(Int(block_idx.x), Int(rows) * spans, Int(grid_dim.x)):
        var row = task // spans
        var start = task % spans * SPAN
        var normalizer = totals[unsafe_offset=row].normalizer()
        for i in range(
            start + Int(thread_idx.x), min(start + SPAN, Int(n)), block_size
        ):
            var at = row * Int(n) + i
            y[unsafe_offset=at] = normalizer.probability(
                x[unsafe_offset=at].cast[accum]()
            ).cast[dtype]()


def split[
    dtype: DType, block_size: Int
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Launches the three kernels.

    Parameters:
        dtype: Dtype of both tensors.
        block_size: Threads a block, a power of two from 32.

    Args:
        y: Probabilities.
        x: Logits.
        rows: Rows along the last axis.
        queue: Where kernels are launched.
    """
    comptime accum = accumulator[dtype]()
    var count = Int64(rows.count())
    var n = Int64(rows.n)
    var spans = ceildiv(rows.n, SPAN)
    var tasks = rows.count() * spans
    comptime words = size_of[MaxSum[accum, 1]]() // size_of[accum]()
    var scratch = queue.scratch[accum](words * (tasks + rows.count()))
    var pairs = scratch.pointer.unsafe_bitcast[MaxSum[accum, 1]]()
    var totals = pairs.unsafe_offset(tasks)
    var blocks = min(tasks, MAX_GRID)

    queue.launch[span_kernel[dtype, accum, block_size]](
        pairs, x, count, n, grid_dim=blocks, block_dim=block_size
    )
    queue.launch[merge_kernel[accum, block_size]](
        totals,
        pairs,
        count,
        Int64(spans),
        grid_dim=min(rows.count(), MAX_GRID),
        block_dim=block_size,
    )
    queue.launch[write_kernel[dtype, accum, block_size]](
        y, x, totals, count, n, grid_dim=blocks, block_dim=block_size
    )
    _ = scratch^
