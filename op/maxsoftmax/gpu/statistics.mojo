"""What there is one of for each row, made of the pairs of rows, on the GPU."""

from std.math import ceildiv
from max.gpu import block_dim, block_idx, thread_idx

from ..ops.finish import Finish
from ..math.loss import log_of_sum
from ..math.online import accumulator
from ..queue import Queue
from ..io.rows import Rows, Source, Target
from .dispatch import auto
from .hardware.pdl import pdl_wait, pdl_attributes

comptime BLOCK_SIZE = 256
"""Threads a block."""


def max_sum_apart[
    dtype: DType, //, contiguous: Bool
](
    result: Target[accumulator[dtype]()],
    x: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Enqueues all m, and then all d.

    Parameters:
        dtype: Dtype of the logits.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        result: (2, rows).
        x: Logits.
        rows: How the memory is divided into rows.
        queue: Where kernels are launched.
    """
    comptime accum = accumulator[dtype]()
    if rows.count() == 0:
        return
    var pairs = queue.scratch[accum](2 * rows.count())
    auto[dtype, Finish.PAIR, contiguous](
        pairs.pointer.unsafe_bitcast[Scalar[dtype]](), x, rows, queue
    )
    queue.launch[split_kernel[accum]](
        result,
        pairs.pointer,
        Int64(rows.count()),
        grid_dim=ceildiv(rows.count(), BLOCK_SIZE),
        block_dim=BLOCK_SIZE,
        attributes=pdl_attributes(),
    )
    _ = pairs^


def logsumexp[
    dtype: DType, //, contiguous: Bool
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Enqueues ln Σ exp x of each row.

    Parameters:
        dtype: Dtype of both tensors.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: (rows,).
        x: Logits.
        rows: How the memory is divided into rows.
        queue: Where kernels are launched.
    """
    comptime accum = accumulator[dtype]()
    if rows.count() == 0:
        return
    var pairs = queue.scratch[accum](2 * rows.count())
    auto[dtype, Finish.PAIR, contiguous](
        pairs.pointer.unsafe_bitcast[Scalar[dtype]](), x, rows, queue
    )
    queue.launch[logarithms_kernel[accum, dtype]](
        y,
        pairs.pointer,
        Int64(rows.count()),
        grid_dim=ceildiv(rows.count(), BLOCK_SIZE),
        block_dim=BLOCK_SIZE,
        attributes=pdl_attributes(),
    )
    _ = pairs^


def split_kernel[
    accum: DType
](result: Target[accum], pairs: Source[accum], rows: Int64):
    """Writes all m, and then all d, a thread a row.

    Parameters:
        accum: Dtype of both.

    Args:
        result: (2, rows).
        pairs: (rows, 2).
        rows: How many.
    """
    var row = Int(block_idx.x) * Int(block_dim.x) + Int(thread_idx.x)
    pdl_wait()
    if row < Int(rows):
        result[unsafe_offset=row] = pairs[unsafe_offset=2 * row]
        result[unsafe_offset=Int(rows) + row] = pairs[unsafe_offset=2 * row + 1]


def logarithms_kernel[
    accum: DType, dtype: DType
](result: Target[dtype], pairs: Source[accum], rows: Int64):
    """Writes ln Σ exp x of each row, a thread a row.

    Parameters:
        accum: Dtype of the pairs.
        dtype: Dtype of the results.

    Args:
        result: (rows,).
        pairs: (rows, 2).
        rows: How many.
    """
    var row = Int(block_idx.x) * Int(block_dim.x) + Int(thread_idx.x)
    pdl_wait()
    if row < Int(rows):
        result[unsafe_offset=row] = log_of_sum(
            pairs[unsafe_offset=2 * row], pairs[unsafe_offset=2 * row + 1]
        ).cast[dtype]()
