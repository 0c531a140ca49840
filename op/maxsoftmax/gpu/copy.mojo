"""A copy, for what has to be in memory before something else reads it."""

from std.math import ceildiv
from max.gpu import block_dim, block_idx, thread_idx

from ..queue import Queue
from ..io.rows import Source, Target

comptime BLOCK_SIZE = 256
"""Threads a block."""


def copy[
    dtype: DType
](y: Target[dtype], x: Source[dtype], size: Int, queue: Queue) raises:
    """Enqueues a copy of `size` elements."""
    queue.launch[copy_kernel[dtype]](
        y,
        x,
        Int64(size),
        grid_dim=ceildiv(size, BLOCK_SIZE),
        block_dim=BLOCK_SIZE,
    )


def copy_kernel[dtype: DType](y: Target[dtype], x: Source[dtype], size: Int64):
    """Copies an element a thread."""
    var i = Int(block_idx.x) * Int(block_dim.x) + Int(thread_idx.x)
    if i < Int(size):
        y[unsafe_offset=i] = x[unsafe_offset=i]
