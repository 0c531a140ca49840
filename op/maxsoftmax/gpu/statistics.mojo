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


def of_pairs[
    dtype: DType, out: DType, //, contiguous: Bool, apart: Bool
](result: Target[out], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Enqueues the pairs of rows, and then `of_pairs_kernel`, whose result this is.
    """
    comptime accum = accumulator[dtype]()
    if rows.count() == 0:
        return
    var pairs = queue.scratch[accum](2 * rows.count())
    auto[dtype, Finish.PAIR, contiguous](
        pairs.pointer.unsafe_bitcast[Scalar[dtype]](), x, rows, queue
    )
    queue.launch[of_pairs_kernel[accum, out, apart]](
        result,
        pairs.pointer,
        Int64(rows.count()),
        grid_dim=ceildiv(rows.count(), BLOCK_SIZE),
        block_dim=BLOCK_SIZE,
        attributes=pdl_attributes(),
    )
    _ = pairs^


def of_pairs_kernel[
    accum: DType, out: DType, apart: Bool
](result: Target[out], pairs: Source[accum], rows: Int64):
    """Writes all m, and then all d, or ln Σ exp x of each row, a thread a row.

    - `apart`: Whether all m and all d are written.
    - `result`: (2, rows), or (rows,).
    - `pairs`: (rows, 2).
    """
    var row = Int(block_idx.x) * Int(block_dim.x) + Int(thread_idx.x)
    pdl_wait()
    if row < Int(rows):
        var m = pairs[unsafe_offset=2 * row]
        var d = pairs[unsafe_offset=2 * row + 1]
        comptime if apart:
            result[unsafe_offset=row] = m.cast[out]()
            result[unsafe_offset=Int(rows) + row] = d.cast[out]()
        else:
            result[unsafe_offset=row] = log_of_sum(m, d).cast[out]()
