"""A thread per element, each computing the max and the sum of its row for itself.

The first kernel anyone would write from the formula: no thread needs another. Reads 2n + 1 elements for each one
written, so a row costs n² reads, nearly all from cache: arithmetic, not memory, is what holds it back. The
initial kernel of FastSoftmax. The output must not be the input's memory: threads still read what others have written.
"""

from std.math import ceildiv
from std.utils.numerics import neg_inf
from max.gpu import block_dim, block_idx, grid_dim, thread_idx

from ...math.exponential import Unit
from ...math.online import Normalizer, Sum, accumulator
from ...queue import Queue
from ...io.rows import Rows, Source, Target
from ..hardware.tree_reduction import MAX_GRID


def elementwise_kernel[
    dtype: DType
](y: Target[dtype], x: Source[dtype], rows: Int64, n: Int64):
    """Writes the softmax of `rows` rows of `n` contiguous elements, a thread for each element.

    Parameters:
        dtype: Dtype of both tensors.

    Args:
        y: Probabilities, not in the memory of `x`.
        x: Logits.
        rows: How many rows there are.
        n: Length of each.
    """
    comptime accum = accumulator[dtype]()
    var first = Int(block_idx.x) * Int(block_dim.x) + Int(thread_idx.x)
    var step = Int(grid_dim.x) * Int(block_dim.x)
    for element in range(first, Int(rows * n), step):
        var logits = x.unsafe_offset(element // Int(n) * Int(n))
        var m = neg_inf[accum]()
        for i in range(Int(n)):
            m = max(m, logits[unsafe_offset=i].cast[accum]())
        var unit = Unit(m)
        var d = Sum[accum, 1]()
        for i in range(Int(n)):
            d.add(unit.exp(logits[unsafe_offset=i].cast[accum]()))
        var own = x[unsafe_offset=element].cast[accum]()
        y[unsafe_offset=element] = (
            Normalizer(unit, d.value).probability(own).cast[dtype]()
        )


def elementwise[
    dtype: DType, block_size: Int
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Launches `elementwise_kernel`.

    Parameters:
        dtype: Dtype of both tensors.
        block_size: Threads a block, a power of two.

    Args:
        y: Probabilities.
        x: Logits.
        rows: Rows along the last axis.
        queue: Where kernels are launched.
    """
    queue.launch[elementwise_kernel[dtype]](
        y,
        x,
        Int64(rows.count()),
        Int64(rows.n),
        grid_dim=min(ceildiv(rows.count() * rows.n, block_size), MAX_GRID),
        block_dim=block_size,
    )
