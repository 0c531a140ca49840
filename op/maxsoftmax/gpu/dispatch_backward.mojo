"""Which kernel takes which rows of which the gradient of logits is wanted."""

from std.sys import size_of
from max.gpu.host import DeviceContext

from ..queue import Queue
from ..io.memory import MemorySource, MemoryTarget
from ..io.rows import Rows, Source, Target, VECTOR_BYTES
from .copy import copy
from .fallback_backward import fallback_backward
from .resident_backward import resident_backward, resident_backward_cluster
from .resident_strided_backward import (
    resident_strided_backward,
    strided_backward_room,
)
from .hardware.cluster import PORTABLE_BLOCKS
from .streaming_operations import Gradients, Products
from .streaming import streaming
from .streaming_strided_backward import streaming_strided_backward
from .tuning import HAS_ROOM, Tuned, slots


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
        dx: Gradient of the logits, not in the memory of `y` or `dy`: one of them may be moved there.
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
        # What is read by the vector begins alike: where it does not, what the results will take the place of is moved first.
        var size = rows.count() * rows.n
        if (Int(y) - Int(dy)) % VECTOR_BYTES == 0:
            _contiguous[dtype, log](dx, y, dy, rows, queue)
        elif (Int(y) - Int(dx)) % VECTOR_BYTES == 0:
            copy(dx, dy, size, queue)
            _contiguous[dtype, log](dx, y, dx, rows, queue)
        elif (Int(dy) - Int(dx)) % VECTOR_BYTES == 0:
            copy(dx, y, size, queue)
            _contiguous[dtype, log](dx, dx, dy, rows, queue)
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
    comptime wide = size_of[dtype]() > 2
    comptime width = VECTOR_BYTES // size_of[dtype]()
    comptime table = Tuned.backward(wide, log)
    # By nothing but the length, as a row's bits are not to depend on its address.
    var vectors = rows.n // width
    var whole = rows.n % width == 0
    comptime for i in range(len(table)):
        comptime t = table[i]
        comptime room = t.room(slots() // 2)
        comptime if t.best > 0:
            if vectors <= PORTABLE_BLOCKS * room:
                resident_backward_cluster[
                    dtype, log, t.block_size, t.vectors, t.blocks
                ](dx, y, dy, rows, t.cluster_blocks(vectors, room), queue)
                return
        else:
            var length = vectors if t.in_vectors else rows.n
            if length <= room and t.lengths.are(whole):
                comptime for edged in [False, True]:
                    comptime if edged or t.has_twin():
                        if edged or (whole and Int(y) % VECTOR_BYTES == 0):
                            resident_backward[
                                dtype,
                                log,
                                t.block_size,
                                t.team,
                                t.vectors,
                                t.blocks,
                                width if t.in_vectors else 1,
                                edged,
                            ](dx, y, dy, rows, queue)
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
        _by[log, dealt=False](dx, y, dy, rows, queue)
    else:
        _by[log, dealt=True](dx, y, dy, rows, queue)


def _by[
    dtype: DType, //, log: Bool, dealt: Bool
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Columns that are taken by vectors, or by as many that are dealt."""
    comptime width = VECTOR_BYTES // size_of[dtype]()
    var to, of_y, of_dy = MemoryTarget(dx), MemorySource(y), MemorySource(dy)
    comptime gpu = DeviceContext.default_device_info
    comptime table = Tuned.strips_backward()
    comptime for i in range(len(table)):
        comptime t = table[i]
        comptime room = strided_backward_room(
            t.lanes,
            t.vectors,
            t.blocks,
            width,
            gpu.shared_memory_per_multiprocessor,
        ) if t.up_to == HAS_ROOM else t.up_to
        if rows.n <= t.most_blocks() * room:
            resident_strided_backward[
                log,
                t.lanes,
                t.vectors,
                t.blocks,
                t.width(width, dealt, fewest=1),
                dealt,
                t.slotted,
                t.together != 1,
            ](to, of_y, of_dy, rows, queue, t.cluster_blocks(rows.n, room))
            return
    # 0.57 / 0.52 (20000 positions)
    streaming_strided_backward[log, 8, width, dealt](
        to, of_y, of_dy, rows, queue
    )
