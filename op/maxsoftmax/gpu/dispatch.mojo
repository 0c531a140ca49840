"""Which kernel takes which shape: the table of `auto` on a GPU, but for rows along an axis that is not the last.

Rows are measured in vectors of 16 bytes. The figures are shares of a device copy's rate on an H200, float32 / bfloat16,
at the longest row of each line that was measured, and some 500 / 250 MB of it; a line's neighbours do worse there.
"""

from std.math import ceildiv
from std.sys import size_of
from max.gpu.host import DeviceContext

from ..ops.finish import Finish
from ..io.memory import MemorySource, MemoryTarget
from ..queue import Queue
from ..io.rows import Rows, Source, Target, VECTOR_BYTES
from ..io.source import RowSource
from ..io.target import RowTarget
from .hardware.cluster import PORTABLE_BLOCKS, has_clusters
from .fallback import fallback
from .ladder import online
from .streaming_operations import Exponentials, Quotients
from .streaming import streaming, streaming_pairs
from .dispatch_strided import strided
from .partition.row import whole_vectors
from .resident import resident, resident_cluster


def auto[
    dtype: DType, finish: Finish, contiguous: Bool
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Enqueues the softmax of every row of `x` into `y` by the fastest kernel for the shape.

    Parameters:
        dtype: Dtype of both tensors.
        finish: What of each row is written.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: Probabilities, not in the memory of `x`.
        x: Logits.
        rows: How the memory is divided into rows.
        queue: Where kernels are launched.
    """
    if rows.n == 0:
        # Only pairs are written of rows of nothing.
        fallback[finish](MemoryTarget(y), MemorySource(x), rows, queue)
        return
    comptime if not contiguous:
        strided[finish](MemoryTarget(y), MemorySource(x), rows, queue)
    elif dtype != DType.float64:
        _contiguous[dtype, finish](y, x, rows, queue)
    elif finish == Finish.PROBABILITIES:
        # Not worth kernels of its own.
        online[dtype, 512, 4](y, x, rows, queue)
    else:
        fallback[finish](MemoryTarget(y), MemorySource(x), rows, queue)


def _contiguous[
    dtype: DType, finish: Finish
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Rows along the last axis: parameters and arguments are as of `auto`."""
    if resident_fits[finish](MemoryTarget(y), MemorySource(x), rows, queue):
        return
    comptime if finish == Finish.PAIR:
        streaming_pairs[Exponentials[dtype, True]](
            y.unsafe_bitcast[Float32](), x, rows, queue
        )
    else:
        streaming[
            Exponentials[dtype, False], Quotients[finish, size_of[dtype]() > 2]
        ](y, x, x, rows, queue)


def resident_fits[
    S: RowSource, T: RowTarget, //, finish: Finish
](y: T, x: S, rows: Rows, queue: Queue) raises -> Bool:
    """Enqueues what is to be written of every row, if rows fit on the chip.

    Parameters:
        S: Where logits come from: memory, of 4 bytes or 2.
        T: Where results go.
        finish: What of each row is written.

    Args:
        y: Results.
        x: Logits.
        rows: Rows along the last axis, none of them empty.
        queue: Where kernels are launched.

    Returns:
        Whether they do.
    """
    comptime gpu = DeviceContext.default_device_info
    comptime wide = size_of[S.elements]() > 2
    # Vectors in slots of one multiprocessor; what a few blocks have of static memory, and the driver keeps, is left.
    comptime slots = (
        gpu.shared_memory_per_multiprocessor - 16 * 1024
    ) // VECTOR_BYTES
    comptime width = VECTOR_BYTES // size_of[S.elements]()
    var vectors = rows.n // width
    # An edge of an unaligned row needs a lane an element.
    var aligned = whole_vectors[width](y, x, rows)
    if rows.n <= 4:
        resident[finish, 128, 1, 4, 8, width=1](y, x, rows, queue)
    elif rows.n <= 8:
        # 0.84 / 0.68 (7 columns)
        resident[finish, 128, 2, 4, 8, width=1](y, x, rows, queue)
    elif rows.n <= 16:
        # 0.87 / 0.66 (13 columns)
        resident[finish, 128, 4, 4, 8, width=1](y, x, rows, queue)
    elif rows.n <= 32:
        # 0.95 / 0.74 (30 columns)
        resident[finish, 128, 8, 4, 8, width=1](y, x, rows, queue)
    elif rows.n <= 64 and not wide and not aligned:
        resident[finish, 128, 16, 4, 8, width=1](y, x, rows, queue)
    elif rows.n <= 128 and not wide and not aligned:
        resident[finish, 128, 32, 4, 8, width=1](y, x, rows, queue)
    elif vectors <= 8 and aligned and not wide:
        resident[finish, 128, 4, 2, 8](y, x, rows, queue)  # - / 1.00
    elif vectors <= 16 and not aligned and not wide:
        resident[finish, 128, 8, 2, 12](y, x, rows, queue)
    elif vectors <= 16:
        resident[finish, 128, 8, 2, 8](y, x, rows, queue)  # 0.99 / 0.99
    elif vectors <= 32:
        resident[finish, 128, 16, 2, 8](y, x, rows, queue)  # 0.98 / 0.99
    elif vectors <= 64:
        comptime if wide:
            resident[finish, 128, 16, 4, 8](y, x, rows, queue)  # 0.98
        else:
            resident[finish, 128, 32, 2, 8](y, x, rows, queue)  # 0.99
    elif vectors <= 128:
        resident[finish, 64, 32, 4, 16](y, x, rows, queue)  # 0.99 / 0.99
    elif vectors <= 256:
        resident[finish, 64, 64, 4, 24](y, x, rows, queue)  # 1.00 / 1.00
    elif vectors <= 384:
        resident[finish, 64, 64, 6, 16](y, x, rows, queue)  # - / 0.98
    elif vectors <= 512:
        resident[finish, 128, 128, 4, 12](y, x, rows, queue)  # 0.96 / 0.99
    elif vectors <= 768:
        resident[finish, 128, 128, 6, 8](y, x, rows, queue)  # 0.98 / 0.98
    elif vectors <= 1024:
        comptime if wide:
            resident[finish, 256, 256, 4, 6](y, x, rows, queue)  # 0.97
        else:
            resident[finish, 128, 128, 8, 8](y, x, rows, queue)  # 0.99
    elif vectors <= 1536:
        resident[finish, 256, 256, 6, 4](y, x, rows, queue)  # 0.98 / 0.98
    elif vectors <= 2048:
        resident[finish, 256, 256, 8, 4](y, x, rows, queue)  # 0.97 / 0.98
    else:
        comptime if finish == Finish.PAIR:
            return False
        elif has_clusters():
            return _clustered[finish, slots](y, x, rows, queue)
        else:
            return _unclustered[finish, slots](y, x, rows, queue)
    return True


def _clustered[
    S: RowSource, T: RowTarget, //, finish: Finish, slots: Int
](y: T, x: S, rows: Rows, queue: Queue) raises -> Bool:
    """Long rows, on GPUs that have clusters."""
    comptime room = _room(5, 4, slots)
    var vectors = rows.n // (VECTOR_BYTES // size_of[S.elements]())
    if vectors <= PORTABLE_BLOCKS * room:
        # Blocks work best at 8 to 11 vectors a thread, of 16 bits at 8. Few rows would be faster over more of the GPU, but
        # the bits of a row may not depend on how many others there are.
        comptime best = 2740 if size_of[S.elements]() > 2 else 2100
        var blocks = min(ceildiv(vectors, min(best, room)), PORTABLE_BLOCKS)
        if vectors <= min(3300, room):
            resident[finish, 256, 256, 5, 4, True](y, x, rows, queue)  # 0.97
        else:
            # 0.93 / 0.97 (151936 columns)
            resident_cluster[finish, 256, 5, 4](y, x, rows, blocks, queue)
    elif vectors <= PORTABLE_BLOCKS * _room(16, 2, slots):
        # 0.88 / 0.91 (262144 and 400001 columns)
        resident_cluster[finish, 256, 16, 2](y, x, rows, PORTABLE_BLOCKS, queue)
    else:
        return False
    return True


def _unclustered[
    S: RowSource, T: RowTarget, //, finish: Finish, slots: Int
](y: T, x: S, rows: Rows, queue: Queue) raises -> Bool:
    """Long rows, on other GPUs: nobody has measured these choices."""
    var vectors = rows.n // (VECTOR_BYTES // size_of[S.elements]())
    if vectors <= _room(5, 4, slots):
        resident[finish, 256, 256, 5, 4, True](y, x, rows, queue)
    elif vectors <= _room(16, 2, slots):
        resident[finish, 256, 256, 16, 2, True](y, x, rows, queue)
    else:
        return False
    return True


def _room(registers: Int, resident: Int, slots: Int) -> Int:
    """Returns how many vectors surely fit in a block of 256 threads, in its registers and its part of the slots.
    """
    # The last round is always in registers; what is cut to lines of 128 bytes may be a few vectors longer.
    return (registers + slots // (256 * resident) + 1) * 256 - 16
