"""Warp shuffles inside a warp, shared memory only between warps.

Reads and writes as `tree` does. Its reductions take five exchanges between registers and two barriers, where a tree
takes a barrier a level; that shows on short rows, while long ones wait for memory as before. Published as llm.c's
softmax_forward kernels 3 and 4 and as step 3 of FastSoftmax.
"""

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
from ..hardware.tree_reduction import MAX_GRID, larger, plus
from ..hardware.warp_reduction import block_reduce


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def warp_kernel[
    dtype: DType, block_size: Int
](y: Target[dtype], x: Source[dtype], rows: Int64, n: Int64):
    """Writes the softmax of `rows` rows of `n` contiguous elements.

    Parameters:
        dtype: Dtype of both tensors.
        block_size: Threads a block, a power of two from 32.

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

    for row in range(Int(block_idx.x), Int(rows), Int(grid_dim.x)):
        var logits = x.unsafe_offset(row * Int(n))
        var probabilities = y.unsafe_offset(row * Int(n))

        var m = neg_inf[accum]()
        for i in range(thread, Int(n), block_size):
            m = max(m, logits[unsafe_offset=i].cast[accum]())
        m = block_reduce[block_size, larger[accum]](maxima, thread, m)

        var unit = Unit(m)
        var d = Sum[accum, 1]()
        for i in range(thread, Int(n), block_size):
            d.add(unit.exp(logits[unsafe_offset=i].cast[accum]()))
        var row_d = block_reduce[block_size, plus[accum]](sums, thread, d)

        var normalizer = Normalizer(unit, row_d.value)
        for i in range(thread, Int(n), block_size):
            probabilities[unsafe_offset=i] = normalizer.probability(
                logits[unsafe_offset=i].cast[accum]()
            ).cast[dtype]()


def warp[
    dtype: DType, block_size: Int
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Launches `warp_kernel`, a block per row.

    Parameters:
        dtype: Dtype of both tensors.
        block_size: Threads a block, a power of two from 32.

    Args:
        y: Probabilities.
        x: Logits.
        rows: Rows along the last axis.
        queue: Where kernels are launched.
    """
    queue.launch[warp_kernel[dtype, block_size]](
        y,
        x,
        Int64(rows.count()),
        Int64(rows.n),
        grid_dim=min(rows.count(), MAX_GRID),
        block_dim=block_size,
    )
