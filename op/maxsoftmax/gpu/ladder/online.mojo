"""Max and sum in one pass: the pair (m, d) instead of one after the other.

Two reads and one write an element where `vector` has three and one, for one more exponential a group of vectors, to
rescale the sum when the maximum has grown. Published as step 6 of FastSoftmax, llm.c's softmax_forward kernels 5 to 8
and Milakov and Gimelshein 2018 (arXiv 1805.02867). What is left is the second read.
"""

from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)

from ...math.online import MaxSum
from ...queue import Queue
from ...io.rows import Rows, Source, Target
from .stripe import Stripe
from ..hardware.tree_reduction import MAX_GRID
from ..hardware.warp_reduction import pair_reduce


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def online_kernel[
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
    comptime S = Stripe[dtype, block_size]
    var thread = Int(thread_idx.x)

    for row in range(Int(block_idx.x), Int(rows), Int(grid_dim.x)):
        var stripe = S(
            y.unsafe_offset(row * Int(n)),
            x.unsafe_offset(row * Int(n)),
            Int(n),
            thread,
        )
        var edges = stripe.load_edges()

        var pair = MaxSum[S.accum, S.width]()
        pair.add(Array[S.Vector, 1](fill=edges))
        var vector = thread
        while vector + (unroll - 1) * block_size < stripe.vectors:
            pair.add(stripe.load[unroll](vector))
            vector += unroll * block_size
        while vector < stripe.vectors:
            pair.add(stripe.load[1](vector))
            vector += block_size

        var normalizer = pair_reduce[block_size](thread, pair).normalizer()
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


def online[
    dtype: DType, block_size: Int, unroll: Int
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Launches `online_kernel`, a block per row.

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
    queue.launch[online_kernel[dtype, block_size, unroll]](
        y,
        x,
        Int64(rows.count()),
        Int64(rows.n),
        grid_dim=min(rows.count(), MAX_GRID),
        block_dim=block_size,
    )
