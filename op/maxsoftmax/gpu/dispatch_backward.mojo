"""Which backward kernel takes which shape: the tables of `dispatch` and of `dispatch_strided`, at half the vectors, since
there are two inputs."""

from std.math import ceildiv
from std.sys import size_of
from max.gpu.host import DeviceContext

from ..queue import Queue
from ..io.memory import MemorySource, MemoryTarget
from ..io.rows import Rows, Source, Target, VECTOR_BYTES
from .fallback_backward import fallback_backward
from .resident_backward import (
    backward_room,
    resident_backward,
    resident_backward_cluster,
)
from .resident_strided_backward import (
    resident_strided_backward,
    strided_backward_room,
)
from .hardware.cluster import PORTABLE_BLOCKS, has_clusters
from .streaming_operations import Gradients, Products
from .streaming import streaming
from .streaming_strided_backward import streaming_strided_backward


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
    comptime if dtype == DType.float64:
        fallback_backward[dtype, log](dx, y, dy, rows, queue)
    elif not contiguous:
        _strided[dtype, log](dx, y, dy, rows, queue)
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


def _strided[
    dtype: DType, log: Bool
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Rows along another axis: parameters and arguments are as of `backward`.
    """
    comptime width = VECTOR_BYTES // size_of[dtype]()
    comptime most = (1 << 31) - 1
    if rows.n > most // 2 or rows.count() > most:
        # The others count in 32 bits.
        fallback_backward[dtype, log](dx, y, dy, rows, queue)
    elif (
        rows.inner % width == 0
        and (Int(dx) | Int(y) | Int(dy)) % VECTOR_BYTES == 0
    ):
        _in_vectors[log](
            MemoryTarget[dtype](dx),
            MemorySource[dtype](y),
            MemorySource[dtype](dy),
            rows,
            queue,
        )
    else:
        _in_elements[log](
            MemoryTarget[dtype](dx),
            MemorySource[dtype](y),
            MemorySource[dtype](dy),
            rows,
            queue,
        )


def _in_vectors[
    dtype: DType, //, log: Bool
](
    dx: MemoryTarget[dtype],
    y: MemorySource[dtype],
    dy: MemorySource[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Columns that can be taken by the vector: from 65 positions on in pieces of 128 bytes.
    """
    comptime gpu = DeviceContext.default_device_info
    comptime width = VECTOR_BYTES // size_of[dtype]()
    comptime Room[lanes: Int, vectors: Int, resident: Int] = (
        strided_backward_room(
            lanes,
            vectors,
            resident,
            width,
            gpu.shared_memory_per_multiprocessor,
        )
    )
    comptime room = Room[8, 3, 3]
    comptime wide = Room[8, 8, 2]
    comptime tall = Room[4, 8, 2]
    if rows.n <= 4:
        resident_strided_backward[log, 256, 4, 3, width](dx, y, dy, rows, queue)
        return
    elif rows.n <= 16:
        resident_strided_backward[log, 64, 4, 3, width](dx, y, dy, rows, queue)
        return
    elif rows.n <= 64:
        resident_strided_backward[log, 16, 4, 3, width](dx, y, dy, rows, queue)
        return
    elif rows.n <= 128:
        # 1.00 / 1.00
        resident_strided_backward[log, 8, 4, 3, width](dx, y, dy, rows, queue)
        return
    elif rows.n <= room:
        # 0.99 / 0.98 (300 positions)
        resident_strided_backward[log, 8, 3, 3, width, True](
            dx, y, dy, rows, queue
        )
        return
    comptime if has_clusters():
        if rows.n <= PORTABLE_BLOCKS * room:
            # 0.97 / 0.87 (1024 positions); with as few blocks as have room 0.93 / 0.84.
            var blocks = 2 if rows.n <= 2 * room else PORTABLE_BLOCKS
            resident_strided_backward[log, 8, 3, 3, width, True, True](
                dx, y, dy, rows, queue, blocks
            )
            return
        elif rows.n <= PORTABLE_BLOCKS * wide:
            # 0.85 / 0.72 (4096 positions)
            resident_strided_backward[log, 8, 8, 2, width, True, True](
                dx, y, dy, rows, queue, PORTABLE_BLOCKS
            )
            return
        elif rows.n <= PORTABLE_BLOCKS * tall:
            # 0.75 / 0.76 (8000 positions)
            resident_strided_backward[log, 4, 8, 2, width, True, True](
                dx, y, dy, rows, queue, PORTABLE_BLOCKS
            )
            return
    else:
        if rows.n <= wide:
            resident_strided_backward[log, 8, 8, 2, width, True](
                dx, y, dy, rows, queue
            )
            return
    # 0.57 / 0.52 (20000 positions)
    streaming_strided_backward[log, 8, width](dx, y, dy, rows, queue)


def _in_elements[
    dtype: DType, //, log: Bool
](
    dx: MemoryTarget[dtype],
    y: MemorySource[dtype],
    dy: MemorySource[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Columns that have to be taken one by one."""
    if rows.n <= 8:
        resident_strided_backward[log, 256, 8, 4, 1](dx, y, dy, rows, queue)
        return
    elif rows.n <= 64:
        resident_strided_backward[log, 64, 16, 3, 1](dx, y, dy, rows, queue)
        return
    elif rows.n <= 128:
        resident_strided_backward[log, 32, 16, 3, 1](dx, y, dy, rows, queue)
        return
    comptime if has_clusters():
        if rows.n <= 128 * PORTABLE_BLOCKS:
            resident_strided_backward[log, 32, 16, 3, 1, clustered=True](
                dx, y, dy, rows, queue, ceildiv(rows.n, 128)
            )
            return
    if rows.inner < 16:
        # Neighbours are few; those of other positions are not far.
        streaming_strided_backward[log, 8, 1](dx, y, dy, rows, queue)
    else:
        streaming_strided_backward[log, 32, 1](dx, y, dy, rows, queue)
