"""Rows along any axis but the last: the tree kernel, turned.

Neighbouring threads take neighbouring rows, so that their accesses coalesce although each row's own elements are
`inner` apart. A block is a matrix of threads: as many columns as rows it takes, up to a warp's 32, and the threads of a
column share its row and meet in a shared-memory tree. Like `tree`, it reads each element three times.
"""

from std.bit import next_power_of_two
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

from ..exponential import Unit
from ..finish import Finish
from ..online import MaxSum, Sum, accumulator
from ..queue import Queue
from ..rows import Rows, Source, Target
from .overlap import follow, overlapped
from .tree_reduction import MAX_GRID, larger, plus, tree_reduce


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def columns_kernel[
    dtype: DType, finish: Finish, block_size: Int
](
    y: Target[dtype],
    x: Source[dtype],
    outer: Int64,
    n: Int64,
    inner: Int64,
    columns: Int64,
):
    """Writes the softmax along the middle axis of a row-major (outer, n, inner) tensor.

    Parameters:
        dtype: Dtype of both tensors.
        finish: What of each row is written.
        block_size: Threads a block, a power of two.

    Args:
        y: Probabilities, or what else is written; may be the same memory as `x`.
        x: Logits.
        outer: First dimension.
        n: Length of the rows.
        inner: Last dimension, and the distance between neighbours in a row.
        columns: Rows a block takes at a time, a power of two up to `block_size`.
    """
    comptime accum = accumulator[dtype]()
    var maxima = unsafe_stack_allocation[
        block_size, Scalar[accum], address_space=AddressSpace.SHARED
    ]()
    var sums = unsafe_stack_allocation[
        block_size, Sum[accum, 1], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var start = thread // Int(columns)
    var step = block_size // Int(columns)
    var tiles = ceildiv(Int(inner), Int(columns))

    follow()
    for tile in range(Int(block_idx.x), Int(outer) * tiles, Int(grid_dim.x)):
        var column = tile % tiles * Int(columns) + thread % Int(columns)
        # Threads beyond the last column only keep the others company at the barriers.
        var end = Int(n) if column < Int(inner) else 0
        var offset = tile // tiles * Int(n) * Int(inner) + column
        var logits = x.unsafe_offset(offset)
        var probabilities = y.unsafe_offset(offset)

        var m = neg_inf[accum]()
        for i in range(start, end, step):
            m = max(m, logits[unsafe_offset=i * Int(inner)].cast[accum]())
        m = tree_reduce[block_size, larger[accum]](
            maxima, thread, m, Int(columns)
        )

        var unit = Unit(m)
        var d = Sum[accum, 1]()
        for i in range(start, end, step):
            d.add(unit.exp(logits[unsafe_offset=i * Int(inner)].cast[accum]()))
        var row_d = tree_reduce[block_size, plus[accum]](
            sums, thread, d, Int(columns)
        )

        var pair = MaxSum[accum, 1](m, row_d)
        comptime if finish == Finish.PAIR:
            if start == 0 and column < Int(inner):
                var row = tile // tiles * Int(inner) + column
                var to = y.unsafe_bitcast[Scalar[accum]]().unsafe_offset(
                    2 * row
                )
                to[unsafe_offset=0] = m
                to[unsafe_offset=1] = pair.relative()
            continue

        comptime if finish == Finish.LOGARITHMS:
            var row = pair.logarithms()
            for i in range(start, end, step):
                var logit = logits[unsafe_offset=i * Int(inner)]
                probabilities[unsafe_offset=i * Int(inner)] = row.probability(
                    logit.cast[accum]()
                ).cast[dtype]()
        else:
            var row = pair.normalizer()
            for i in range(start, end, step):
                var logit = logits[unsafe_offset=i * Int(inner)]
                probabilities[unsafe_offset=i * Int(inner)] = row.probability(
                    logit.cast[accum]()
                ).cast[dtype]()


def columns[
    dtype: DType, finish: Finish, block_size: Int
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Launches `columns_kernel`, a block for every 32 neighbouring rows.

    Parameters:
        dtype: Dtype of both tensors.
        finish: What of each row is written.
        block_size: Threads a block, a power of two.

    Args:
        y: Probabilities, or what else is written.
        x: Logits.
        rows: Rows along any axis.
        queue: Where kernels are launched.
    """
    var width = min(32, block_size, next_power_of_two(rows.inner))
    queue.launch[columns_kernel[dtype, finish, block_size]](
        y,
        x,
        Int64(rows.outer),
        Int64(rows.n),
        Int64(rows.inner),
        Int64(width),
        grid_dim=min(rows.outer * ceildiv(rows.inner, width), MAX_GRID),
        block_dim=block_size,
        attributes=overlapped(),
    )
