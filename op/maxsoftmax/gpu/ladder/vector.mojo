"""The warp kernel with accesses of 16 bytes, several under way at a time.

As many bytes as before, three reads and one write an element, in a quarter (float32) or an eighth (bfloat16) of the
instructions; unrolling keeps loads in flight while earlier ones are summed. Reading the row three times is what holds it
back once the rows in flight exceed the cache. Published as steps 4 and 5 of FastSoftmax.
"""

from std.memory import unsafe_stack_allocation
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
from .stripe import Stripe
from ..hardware.tree_reduction import MAX_GRID, larger, plus
from ..hardware.warp_reduction import block_reduce


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def vector_kernel[
    dtype: DType, block_size: Int, unroll: Int
](y: Target[dtype], x: Source[dtype], rows: Int64, n: Int64):
    """Writes the softmax of `rows` rows of `n` contiguous elements, a block for each row.

    Parameters:
        dtype: Dtype of both tensors.
        block_size: Threads a block, a power of two from 32.
        unroll: Vectors that a thread has under way at a time.

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
        var stripe = Stripe[dtype, block_size](
            y.unsafe_offset(row * Int(n)),
            x.unsafe_offset(row * Int(n)),
            Int(n),
            thread,
        )
        var edges = stripe.load_edges()

        var largest = edges
        var vector = thread
        while vector + (unroll - 1) * block_size < stripe.vectors:
            var logits = stripe.load[unroll](vector)
            comptime for i in range(unroll):
                largest = max(largest, logits[i])
            vector += unroll * block_size
        while vector < stripe.vectors:
            largest = max(largest, stripe.load[1](vector)[0])
            vector += block_size
        var m = block_reduce[block_size, larger[accum]](
            maxima, thread, largest.reduce_max()
        )

        var unit = Unit(m)
        var d = Sum(unit.exp(edges))
        vector = thread
        while vector + (unroll - 1) * block_size < stripe.vectors:
            var logits = stripe.load[unroll](vector)
            comptime for i in range(unroll):
                d.add(unit.exp(logits[i]))
            vector += unroll * block_size
        while vector < stripe.vectors:
            d.add(unit.exp(stripe.load[1](vector)[0]))
            vector += block_size
        var row_d = block_reduce[block_size, plus[accum]](
            sums, thread, d.collapse()
        )

        var normalizer = Normalizer(unit, row_d.value)
        vector = thread
        while vector + (unroll - 1) * block_size < stripe.vectors:
            var logits = stripe.load[unroll](vector)
            comptime for i in range(unroll):
                stripe.store(
                    vector + i * block_size, normalizer.probability(logits[i])
                )
            vector += unroll * block_size
        while vector < stripe.vectors:
            stripe.store(
                vector, normalizer.probability(stripe.load[1](vector)[0])
            )
            vector += block_size
        stripe.store_edges(normalizer.probability(edges))


def vector[
    dtype: DType, block_size: Int, unroll: Int
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Launches `vector_kernel`, a block per row.

    Parameters:
        dtype: Dtype of both tensors.
        block_size: Threads a block, a power of two from 32.
        unroll: Vectors that a thread has under way at a time.

    Args:
        y: Probabilities.
        x: Logits.
        rows: Rows along the last axis.
        queue: Where kernels are launched.
    """
    queue.launch[vector_kernel[dtype, block_size, unroll]](
        y,
        x,
        Int64(rows.count()),
        Int64(rows.n),
        grid_dim=min(rows.count(), MAX_GRID),
        block_dim=block_size,
    )
