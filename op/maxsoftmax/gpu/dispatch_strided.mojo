"""Which kernel takes which rows along an axis that is not the last: the table of `auto` and of `fused` for them.

The figures are shares of a device copy's rate on an H200, of float32 in memory.
"""

from std.math import ceildiv
from std.sys import size_of
from max.gpu.host import DeviceContext

from ..ops.finish import Finish
from ..io.source import RowSource
from ..io.target import RowTarget
from ..queue import Queue
from ..io.rows import Rows, VECTOR_BYTES
from .hardware.cluster import PORTABLE_BLOCKS, has_clusters
from .fallback import fallback
from .resident_strided import resident_strided, resident_room
from .streaming_strided import streaming_strided


def strided[
    S: RowSource, T: RowTarget, //, finish: Finish
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Enqueues what is to be written of every row of `x` by the fastest kernel for the shape.

    Parameters:
        S: Where logits come from.
        T: Where results go.
        finish: What of each row is written.

    Args:
        y: Results, in no memory that is read for `x`.
        x: Logits.
        rows: How the tensors are divided into rows, none of them empty.
        queue: Where kernels are launched.
    """
    comptime if S.elements == DType.float64:
        # Not worth kernels of its own.
        fallback[finish](y, x, rows, queue)
    else:
        # 16 accumulators of float8 would be more registers than there are.
        comptime width = VECTOR_BYTES // max(2, size_of[T.Column.stored]())
        comptime most = (1 << 31) - 1
        if rows.n > most // 2 or rows.count() > most:
            # The others count in 32 bits.
            fallback[finish](y, x, rows, queue)
        elif (
            rows.inner % width == 0
            and x.in_vectors[width]()
            and y.in_vectors[width]()
        ):
            _in_vectors[finish, width](y, x, rows, queue)
        else:
            _in_elements[finish](y, x, rows, queue)


def _in_vectors[
    S: RowSource, T: RowTarget, //, finish: Finish, width: Int
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Columns that can be taken by the vector: from 129 positions on in pieces of 128 bytes.
    """
    comptime gpu = DeviceContext.default_device_info
    comptime vectors = 3 if S.in_memory else 4
    # H200, 16×1024×1024 scaled along axis 1: float32 48 µs by three blocks, 54 by two; bfloat16 38 and 30.
    comptime computing = 3 if size_of[S.elements]() > 2 else 2
    comptime resident = 4 if S.in_memory else computing
    comptime Room[lanes: Int, vectors: Int, resident: Int] = resident_room[S](
        lanes,
        vectors,
        resident,
        width,
        has_clusters(),
        gpu.shared_memory_per_multiprocessor,
    )
    comptime room = Room[8, vectors, resident]
    comptime wide = Room[8, 16, 2]
    comptime tall = Room[4, 16, 2]
    if rows.n <= 4:
        resident_strided[finish, 256, 4, 4, width](y, x, rows, queue)
        return
    elif rows.n <= 16:
        resident_strided[finish, 64, 4, 4, width](y, x, rows, queue)
        return
    elif rows.n <= 64:
        resident_strided[finish, 16, 4, 4, width](y, x, rows, queue)
        return
    elif rows.n <= 128:
        # 0.94
        resident_strided[finish, 8, 4, 4, width](y, x, rows, queue)
        return
    elif rows.n <= room:
        resident_strided[finish, 8, vectors, resident, width, True](
            y, x, rows, queue
        )
        return
    comptime if has_clusters():
        if rows.n <= PORTABLE_BLOCKS * room:
            # 0.93 / 0.82 (1000 and 4000 positions)
            resident_strided[finish, 8, vectors, resident, width, True, True](
                y, x, rows, queue, ceildiv(rows.n, room)
            )
            return
    comptime if has_clusters() and S.in_memory:
        if rows.n <= PORTABLE_BLOCKS * wide:
            resident_strided[finish, 8, 16, 2, width, True, True](
                y, x, rows, queue, PORTABLE_BLOCKS
            )
            return
        elif rows.n <= PORTABLE_BLOCKS * tall:
            resident_strided[finish, 4, 16, 2, width, True, True](
                y, x, rows, queue, PORTABLE_BLOCKS
            )
            return
    comptime if not has_clusters() and S.in_memory:
        if rows.n <= wide:
            resident_strided[finish, 8, 16, 2, width, True](y, x, rows, queue)
            return
    # 0.53 (50257 positions)
    streaming_strided[finish, 8, width](y, x, rows, queue)


def _in_elements[
    S: RowSource, T: RowTarget, //, finish: Finish
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Columns that have to be taken one by one."""
    comptime gpu = DeviceContext.default_device_info
    # Of computed logits the addresses are as many as the elements.
    comptime few = 6 if S.in_memory else 4
    comptime many = 4 if S.in_memory else 3
    if rows.n <= 8:
        # 0.98
        resident_strided[finish, 256, 8, few, 1](y, x, rows, queue)
        return
    elif rows.n <= 64:
        # 0.63
        resident_strided[finish, 64, 16, many, 1](y, x, rows, queue)
        return
    elif rows.n <= 128:
        resident_strided[finish, 32, 16, many, 1](y, x, rows, queue)
        return
    comptime if has_clusters():
        if rows.n <= 128 * PORTABLE_BLOCKS:
            resident_strided[finish, 32, 16, many, 1, clustered=True](
                y, x, rows, queue, ceildiv(rows.n, 128)
            )
            return
    comptime if S.in_memory:
        if rows.inner < 16:
            # Neighbours are few; those of other positions are not far.
            streaming_strided[finish, 8, 1](y, x, rows, queue)
            return
    streaming_strided[finish, 32, 1](y, x, rows, queue)
