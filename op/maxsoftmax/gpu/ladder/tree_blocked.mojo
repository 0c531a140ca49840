"""The tree kernel with a contiguous chunk of the row for each thread: what coalescing is worth.

The same trees and as many reads as `tree`, but the threads of a warp are a chunk apart, so that each access touches as
many cache lines as there are threads. Published as step 1 of FastSoftmax, whose next step strides as `tree` does.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)

from ...math.exponential import Unit
from ...math.online import Normalizer, Sum, accumulator
from ...queue import Queue
from ...io.rows import Rows, Source, Target
from ..hardware.tree_reduction import MAX_GRID, larger, plus, tree_reduce


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def tree_blocked_kernel[
    dtype: DType, block_size: Int
](y: Target[dtype], x: Source[dtype], rows: Int64, n: Int64):
    """Writes the softmax of `rows` rows of `n` contiguous elements.

    Parameters:
        dtype: Dtype of both tensors.
        block_size: Threads a block, a power of two.

    Args:
        y: Probabilities; may be the same memory as `x`.
        x: Logits.
        rows: How many; block b takes row b and every gridDim-th after it.
        n: Length of each.
    """
    comptime accum = accumulator[dtype]()
    var maxima = unsafe_stack_allocation[
        block_size, Scalar[accum], address_space=AddressSpace.SHARED
    ]()
    var sums = unsafe_stack_allocation[
        block_size, Sum[accum, 1], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var chunk = ceildiv(Int(n), block_size)
    var start = thread * chunk
    var end = min(start + chunk, Int(n))

    for row in range(Int(block_idx.x), Int(rows), Int(grid_dim.x)):
        var logits = x.unsafe_offset(row * Int(n))
        var probabilities = y.unsafe_offset(row * Int(n))

        var m = neg_inf[accum]()
        for i in range(start, end):
            m = max(m, logits[unsafe_offset=i].cast[accum]())
        m = tree_reduce[block_size, larger[accum]](maxima, thread, m)

        var unit = Unit(m)
        var d = Sum[accum, 1]()
        for i in range(start, end):
            d.add(unit.exp(logits[unsafe_offset=i].cast[accum]()))
        var row_d = tree_reduce[block_size, plus[accum]](sums, thread, d)

        var normalizer = Normalizer(unit, row_d.value)
        for i in range(start, end):
            probabilities[unsafe_offset=i] = normalizer.probability(
                logits[unsafe_offset=i].cast[accum]()
            ).cast[dtype]()


def tree_blocked[
    dtype: DType, block_size: Int
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Launches `tree_blocked_kernel`, a block per row.

    Parameters:
        dtype: Dtype of both tensors.
        block_size: Threads a block, a power of two.

    Args:
        y: Probabilities.
        x: Logits.
        rows: Rows along the last axis.
        queue: Where kernels are launched.
    """
    queue.launch[tree_blocked_kernel[dtype, block_size]](
        y,
        x,
        Int64(rows.count()),
        Int64(rows.n),
        grid_dim=min(rows.count(), MAX_GRID),
        block_dim=block_size,
    )
