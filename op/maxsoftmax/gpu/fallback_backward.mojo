"""The backward kernel along any axis and of any alignment: `fallback` with two inputs and a single sum."""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)

from ..math.gradient import Gradient
from ..math.online import Sum, accumulator
from ..queue import Queue
from ..io.rows import Rows, Source, Target
from .fallback import columns_of_block
from .hardware.pdl import pdl_wait, pdl_attributes
from .hardware.tree_reduction import MAX_GRID, plus, tree_reduce

comptime BLOCK_SIZE = 256
"""Threads a block."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def fallback_backward_kernel[
    dtype: DType, log: Bool
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    outer: Int64,
    n: Int64,
    inner: Int64,
    columns: Int64,
):
    """Writes the gradient along the middle axis of row-major (outer, n, inner) tensors.

    Parameters:
        dtype: Dtype of all tensors.
        log: Whether y are logarithms of probabilities.

    Args:
        dx: Gradient of the logits; may be the same memory as `y` or `dy`.
        y: Results of the forward op.
        dy: Their gradient.
        outer: First dimension.
        n: Length of the rows.
        inner: Last dimension, and the distance between neighbours in a row.
        columns: Rows a block takes at a time, a power of two up to `BLOCK_SIZE`.
    """
    comptime accum = accumulator[dtype]()
    comptime G = Gradient[log, True, accum]
    var sums = unsafe_stack_allocation[
        BLOCK_SIZE, Sum[accum, 1], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var start = thread // Int(columns)
    var step = BLOCK_SIZE // Int(columns)
    var tiles = ceildiv(Int(inner), Int(columns))

    pdl_wait()
    for tile in range(Int(block_idx.x), Int(outer) * tiles, Int(grid_dim.x)):
        var column = tile % tiles * Int(columns) + thread % Int(columns)
        # Threads beyond the last column only keep the others company at the barriers.
        var end = Int(n) if column < Int(inner) else 0
        var offset = tile // tiles * Int(n) * Int(inner) + column
        var sum = Sum[accum, 1]()
        for i in range(start, end, step):
            var at = offset + i * Int(inner)
            sum.add(
                G.term(
                    y[unsafe_offset=at].cast[accum](),
                    dy[unsafe_offset=at].cast[accum](),
                )
            )
        var gradient = G(
            tree_reduce[BLOCK_SIZE, plus[accum]](
                sums, thread, sum, Int(columns)
            ).value
        )
        for i in range(start, end, step):
            var at = offset + i * Int(inner)
            dx[unsafe_offset=at] = gradient.of(
                y[unsafe_offset=at].cast[accum](),
                dy[unsafe_offset=at].cast[accum](),
            ).cast[dtype]()


def fallback_backward[
    dtype: DType, log: Bool
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Launches `fallback_backward_kernel`, a block for every few neighbouring rows.

    Parameters:
        dtype: Dtype of all tensors.
        log: Whether y are logarithms of probabilities.

    Args:
        dx: Gradient of the logits.
        y: Results of the forward op.
        dy: Their gradient.
        rows: Rows along any axis.
        queue: Where kernels are launched.
    """
    var width = columns_of_block[dtype](BLOCK_SIZE, rows)
    queue.launch[fallback_backward_kernel[dtype, log]](
        dx,
        y,
        dy,
        Int64(rows.outer),
        Int64(rows.n),
        Int64(rows.inner),
        Int64(width),
        grid_dim=min(rows.outer * ceildiv(rows.inner, width), MAX_GRID),
        block_dim=BLOCK_SIZE,
        attributes=pdl_attributes(),
    )
