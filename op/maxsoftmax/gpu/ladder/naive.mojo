"""A thread per row, one element after another.

Three reads and one write an element, like `tree`, but neighbouring threads are n elements apart: every access of a
warp touches 32 cache lines to use one element of each, and fewer rows than the GPU has threads leave it idle.
Published as llm.c's softmax_forward kernel 1.
"""

from std.math import ceildiv
from std.utils.numerics import neg_inf
from max.gpu import block_dim, block_idx, grid_dim, thread_idx

from ...math.exponential import Unit
from ...math.online import Normalizer, Sum, accumulator
from ...queue import Queue
from ...io.rows import Rows, Source, Target
from ..hardware.tree_reduction import MAX_GRID


def naive_kernel[
    dtype: DType
](y: Target[dtype], x: Source[dtype], rows: Int64, n: Int64):
    """Writes the softmax of `rows` rows of `n` contiguous elements, a thread for each row.

    Parameters:
        dtype: Dtype of both tensors.

    Args:
        y: Probabilities; may be the same memory as `x`.
        x: Logits.
        rows: How many rows there are.
        n: Length of each.
    """
    comptime accum = accumulator[dtype]()
    var first = Int(block_idx.x) * Int(block_dim.x) + Int(thread_idx.x)
    var step = Int(grid_dim.x) * Int(block_dim.x)
    for row in range(first, Int(rows), step):
        var logits = x.unsafe_offset(row * Int(n))
        var probabilities = y.unsafe_offset(row * Int(n))
        var m = neg_inf[accum]()
        for i in range(Int(n)):
            m = max(m, logits[unsafe_offset=i].cast[accum]())
        var unit = Unit(m)
        var d = Sum[accum, 1]()
        for i in range(Int(n)):
            d.add(unit.exp(logits[unsafe_offset=i].cast[accum]()))
        var normalizer = Normalizer(unit, d.value)
        for i in range(Int(n)):
            probabilities[unsafe_offset=i] = normalizer.probability(
                logits[unsafe_offset=i].cast[accum]()
            ).cast[dtype]()


def naive[
    dtype: DType, block_size: Int
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Launches `naive_kernel`.

    Parameters:
        dtype: Dtype of both tensors.
        block_size: Threads a block, a power of two.

    Args:
        y: Probabilities.
        x: Logits.
        rows: Rows along the last axis.
        queue: Where kernels are launched.
    """
    queue.launch[naive_kernel[dtype]](
        y,
        x,
        Int64(rows.count()),
        Int64(rows.n),
        grid_dim=min(ceildiv(rows.count(), block_size), MAX_GRID),
        block_dim=block_size,
    )
