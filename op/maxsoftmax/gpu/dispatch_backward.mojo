"""Which backward kernel takes which shape: the table of `dispatch`, at half the vectors, since there are two inputs."""

from std.math import ceildiv
from std.sys import size_of
from max.gpu.host import DeviceContext

from ..queue import Queue
from ..io.rows import Rows, Source, Target
from .fallback_backward import fallback_backward
from .resident_backward import (
    backward_room,
    resident_backward,
    resident_backward_cluster,
)
from .hardware.cluster import PORTABLE_BLOCKS, has_clusters
from .streaming_operations import Gradients, Products
from .streaming import streaming
from .partition.stripe import VECTOR_BYTES


def backward[
    dtype: DType, log: Bool, contiguous: Bool
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Enqueues the gradient of the logits of every row.

    Parameters:
        dtype: Dtype of all tensors; the arithmetic is in its accumulator.
        log: Whether y are logarithms of probabilities.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        dx: Gradient of the logits, not in the memory of `y` or `dy`.
        y: Results of the forward op.
        dy: Their gradient.
        rows: How the memory is divided into rows, none of them empty.
        queue: Where kernels are launched.
    """
    comptime if dtype == DType.float64 or not contiguous:
        fallback_backward[dtype, log](dx, y, dy, rows, queue)
    else:
        if (Int(y) - Int(dy)) % VECTOR_BYTES == 0:
            _contiguous[dtype, log](dx, y, dy, rows, queue)
        else:
            fallback_backward[dtype, log](dx, y, dy, rows, queue)


def _contiguous[
    dtype: DType, log: Bool
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Rows along the last axis: parameters and arguments are as of `backward`.
    """
    comptime gpu = DeviceContext.default_device_info
    comptime wide = size_of[dtype]() > 2
    comptime width = VECTOR_BYTES // size_of[dtype]()
    # As in `dispatch`.
    comptime slots = (
        gpu.shared_memory_per_multiprocessor - 16 * 1024
    ) // VECTOR_BYTES
    # Of 262144 columns, blocks of 256 threads make 0.93 of a copy's rate in bfloat16, blocks of 512 0.89; of 128256 columns
    # of float32 they make 0.98 and 1.02.
    comptime room = backward_room(3, 3 if wide else 2, slots)
    comptime widest_room = backward_room(7, 1, slots, 512)
    # Exponentials, and twice as many elements, take more registers.
    comptime threads = 1024 if wide and not log else 768
    var vectors = rows.n // width
    # An edge of an unaligned row needs a lane an element.
    var aligned = (
        rows.n % width == 0
        and Int(y) % VECTOR_BYTES == 0
        and Int(dx) % VECTOR_BYTES == 0
    )
    if rows.n <= 4:
        resident_backward[dtype, log, 128, 1, 4, threads // 128, 1](
            dx, y, dy, rows, queue
        )
    elif rows.n <= 8:
        resident_backward[dtype, log, 128, 2, 4, threads // 128, 1](
            dx, y, dy, rows, queue
        )
    elif rows.n <= 16:
        resident_backward[dtype, log, 128, 4, 4, threads // 128, 1](
            dx, y, dy, rows, queue
        )
    elif rows.n <= 32:
        resident_backward[dtype, log, 128, 8, 4, threads // 128, 1](
            dx, y, dy, rows, queue
        )
    elif rows.n <= 64 and not wide and not aligned:
        resident_backward[dtype, log, 128, 16, 4, threads // 128, 1](
            dx, y, dy, rows, queue
        )
    elif rows.n <= 128 and not wide and not aligned:
        resident_backward[dtype, log, 128, 32, 4, threads // 128, 1](
            dx, y, dy, rows, queue
        )
    elif vectors <= 8 and aligned and not wide:
        resident_backward[dtype, log, 128, 2, 4, threads // 128](
            dx, y, dy, rows, queue
        )
    elif vectors <= 16 and not aligned and not wide:
        resident_backward[dtype, log, 128, 8, 2, threads // 128](
            dx, y, dy, rows, queue
        )
    elif vectors <= 16:
        resident_backward[dtype, log, 128, 4, 4, threads // 128](
            dx, y, dy, rows, queue
        )
    elif vectors <= 32:
        resident_backward[dtype, log, 128, 8, 4, threads // 128](
            dx, y, dy, rows, queue
        )
    elif vectors <= 64:
        resident_backward[dtype, log, 128, 16, 4, threads // 128](
            dx, y, dy, rows, queue
        )
    elif vectors <= 128:
        resident_backward[dtype, log, 128, 32, 4, threads // 128](
            dx, y, dy, rows, queue
        )
    elif vectors <= 256:
        resident_backward[dtype, log, 64, 64, 4, threads // 64](
            dx, y, dy, rows, queue
        )
    elif vectors <= 512:
        resident_backward[dtype, log, 128, 128, 4, threads // 128](
            dx, y, dy, rows, queue
        )
    elif vectors <= 1024:
        resident_backward[dtype, log, 256, 256, 4, threads // 256](
            dx, y, dy, rows, queue
        )
    elif vectors <= 1536:
        resident_backward[dtype, log, 256, 256, 6, 3](dx, y, dy, rows, queue)
    elif vectors <= 2048:
        resident_backward[dtype, log, 256, 256, 8, 2](dx, y, dy, rows, queue)
    else:
        comptime if has_clusters():
            if vectors <= PORTABLE_BLOCKS * room:
                var blocks = min(ceildiv(vectors, 1400), PORTABLE_BLOCKS)
                resident_backward_cluster[dtype, log, 256, 3, 3](
                    dx, y, dy, rows, blocks, queue
                )
                return
            elif vectors <= PORTABLE_BLOCKS * widest_room:
                resident_backward_cluster[dtype, log, 512, 7, 1](
                    dx, y, dy, rows, PORTABLE_BLOCKS, queue
                )
                return
        streaming[Products[dtype, log], Gradients[log, wide]](
            dx, y, dy, rows, queue
        )
