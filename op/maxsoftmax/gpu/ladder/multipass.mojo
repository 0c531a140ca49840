"""Four launches: the maxima, the exponentials, their sums, and the quotients.

What a framework without fusion does. Between launches everything goes through memory: four reads and two writes an
element, and for 16-bit dtypes the exponentials take a float32 tensor of their own. Published as kernel 2 of the
worklog.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_dim,
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
def max_kernel[
    dtype: DType, accum: DType, block_size: Int
](maxima: Target[accum], x: Source[dtype], rows: Int64, n: Int64):
    """First launch, a block per row: the maximum of each."""
    var scratch = unsafe_stack_allocation[
        block_size, Scalar[accum], address_space=AddressSpace.SHARED
    ]()
    for row in range(Int(block_idx.x), Int(rows), Int(grid_dim.x)):
        var logits = x.unsafe_offset(row * Int(n))
        var m = neg_inf[accum]()
        for i in range(Int(thread_idx.x), Int(n), block_size):
            m = max(m, logits[unsafe_offset=i].cast[accum]())
        m = block_reduce[block_size, larger[accum]](
            scratch, Int(thread_idx.x), m
        )
        if thread_idx.x == 0:
            maxima[unsafe_offset=row] = m


def exp_kernel[
    dtype: DType, accum: DType
](
    exponentials: Target[accum],
    x: Source[dtype],
    maxima: Source[accum],
    rows: Int64,
    n: Int64,
):
    """Second launch, a thread per element: e^x in the unit of its row."""
    var first = Int(block_idx.x) * Int(block_dim.x) + Int(thread_idx.x)
    var step = Int(grid_dim.x) * Int(block_dim.x)
    for i in range(first, Int(rows * n), step):
        var unit = Unit(maxima[unsafe_offset=i // Int(n)])
        exponentials[unsafe_offset=i] = unit.exp(
            x[unsafe_offset=i].cast[accum]()
        )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def sum_kernel[
    accum: DType, block_size: Int
](sums: Target[accum], exponentials: Source[accum], rows: Int64, n: Int64):
    """Third launch, a block per row: the sum of its exponentials."""
    var scratch = unsafe_stack_allocation[
        block_size, Sum[accum, 1], address_space=AddressSpace.SHARED
    ]()
    for row in range(Int(block_idx.x), Int(rows), Int(grid_dim.x)):
        var terms = exponentials.unsafe_offset(row * Int(n))
        var d = Sum[accum, 1]()
        for i in range(Int(thread_idx.x), Int(n), block_size):
            d.add(terms[unsafe_offset=i])
        var row_d = block_reduce[block_size, plus[accum]](
            scratch, Int(thread_idx.x), d
        )
        if thread_idx.x == 0:
            sums[unsafe_offset=row] = row_d.value


def normalize_kernel[
    dtype: DType, accum: DType
](
    y: Target[dtype],
    exponentials: Source[accum],
    maxima: Source[accum],
    sums: Source[accum],
    rows: Int64,
    n: Int64,
):
    """Fourth launch, a thread per element: the quotient."""
    var first = Int(block_idx.x) * Int(block_dim.x) + Int(thread_idx.x)
    var step = Int(grid_dim.x) * Int(block_dim.x)
    for i in range(first, Int(rows * n), step):
        var row = i // Int(n)
        var normalizer = Normalizer(
            Unit(maxima[unsafe_offset=row]), sums[unsafe_offset=row]
        )
        y[unsafe_offset=i] = normalizer.divide(
            exponentials[unsafe_offset=i]
        ).cast[dtype]()


def multipass[
    dtype: DType, block_size: Int
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Launches the four kernels.

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
    var row_blocks = min(rows.count(), MAX_GRID)
    var blocks = min(ceildiv(rows.count() * rows.n, block_size), MAX_GRID)
    # The output holds the exponentials meanwhile, where it is wide enough.
    comptime in_place = dtype == accum
    var wide = queue.scratch[accum](1 if in_place else rows.count() * rows.n)
    var exponentials = wide.pointer
    comptime if in_place:
        exponentials = rebind[type_of(exponentials)](y)
    var of_rows = queue.scratch[accum](2 * rows.count())
    var maxima = of_rows.pointer
    var sums = maxima.unsafe_offset(rows.count())

    queue.launch[max_kernel[dtype, accum, block_size]](
        maxima, x, count, n, grid_dim=row_blocks, block_dim=block_size
    )
    queue.launch[exp_kernel[dtype, accum]](
        exponentials, x, maxima, count, n, grid_dim=blocks, block_dim=block_size
    )
    queue.launch[sum_kernel[accum, block_size]](
        sums, exponentials, count, n, grid_dim=row_blocks, block_dim=block_size
    )
    queue.launch[normalize_kernel[dtype, accum]](
        y,
        exponentials,
        maxima,
        sums,
        count,
        n,
        grid_dim=blocks,
        block_dim=block_size,
    )
    _ = wide^
    _ = of_rows^
