"""Logits that are computed as they are read, on the GPU: once where a row fits on the chip.

Whatever MAX fused into the input is computed in the load, and nothing of it is in memory. What there is no room for is
computed again for the probabilities.
"""

from std.math import ceildiv
from std.sys import size_of
from max.gpu.host import DeviceContext
from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from ..ops.finish import Finish
from ..io.sink import WithSink
from ..io.logits import Logits
from ..io.rows import Rows
from ..io.source import RowSource
from ..io.target import RowTarget
from ..queue import Queue
from ..io.results import Results
from .hardware.cluster import PORTABLE_BLOCKS, has_clusters
from .resident import kept_dtype, resident, resident_cluster
from .partition.row import vector_width, whole_vectors
from .streaming_computed import streaming_computed
from .dispatch_strided import strided


comptime CLUSTER_BLOCK_SIZE = 256
"""Threads a block where the blocks of a cluster share a row."""


def fused[
    Fusion: InputFusion,
    Sink: InputFusion,
    Out: OutputFusion,
    in_dtype: DType,
    out_dtype: DType,
    rank: Int,
    axis: Int,
    causal: Bool,
    epilogue: Bool,
    //,
    has_sink: Bool,
    finish: Finish = Finish.PROBABILITIES,
](
    y: Results[Out, out_dtype, rank, axis, epilogue],
    x: Logits[Fusion, in_dtype, rank, axis, causal],
    sink: Logits[Sink, in_dtype, rank, axis, False],
    queue: Queue,
) raises:
    """Enqueues the softmax of every row of `x`, or its logarithm, into `y`.

    Parameters:
        Fusion: What computes the logits.
        Sink: What computes the sinks.
        Out: What takes the probabilities.
        in_dtype: Dtype of the logits.
        out_dtype: Dtype of the probabilities.
        rank: Number of dimensions.
        axis: The axis that sums to 1.
        causal: Whether rows end at the diagonal.
        epilogue: Whether something takes the probabilities.
        has_sink: Whether there is one more logit a row, in the denominator only.
        finish: What of each row is written: an element for each of its own.

    Args:
        y: Probabilities, or their logarithms, in no memory that is read for `x`.
        x: Logits.
        sink: The additional logits, one a row.
        queue: Where kernels are launched.
    """

    @inline(.always)
    def by[S: RowSource](source: S) raises {imm}:
        comptime if axis != rank - 1:
            strided[finish](y, source, x.rows(), queue)
        elif in_dtype == DType.float64:
            # Not worth kernels of its own.
            streaming_computed[finish](y, source, x.rows(), queue)
        else:
            computed[finish](y, source, x.rows(), queue)

    comptime if has_sink:
        by(WithSink(x, sink))
    else:
        by(x)


def computed[
    S: RowSource, T: RowTarget, //, finish: Finish
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Enqueues what is to be written of every row of `x` along the last axis.

    Parameters:
        S: What computes the logits, of 4 bytes or 2.
        T: What takes the results.
        finish: What of each row is written: an element for each of its own.

    Args:
        y: Results.
        x: Logits.
        rows: How the tensors are divided into rows.
        queue: Where kernels are launched.
    """
    comptime width = vector_width[S, T]()
    # Edges need a lane an element.
    if whole_vectors[width](y, x, rows) or (
        S.Line.in_memory and rows.n >= 32 * width
    ):
        _in_vectors[finish, width](y, x, rows, queue)
    else:
        _in_elements[finish](y, x, rows, queue)


def _threads(vectors: Int, width: Int, slotted: Bool) -> Int:
    """Returns how many threads a multiprocessor is to hold, which bounds the registers of each.

    Left alone, the assembler has more loads under way in half as many threads, of 8 vectors: 1.5 times as long at 8192
    columns of float32.

    Args:
        vectors: Vectors that a thread keeps in registers.
        width: Elements a vector.
        slotted: Whether it keeps others elsewhere.
    """
    if slotted:
        return 768
    return 1280 if vectors * max(width, 4) <= 16 else 1024


def _tile[
    S: RowSource,
    T: RowTarget,
    //,
    finish: Finish,
    block_size: Int,
    team: Int,
    vectors: Int,
    width: Int,
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Enqueues `resident` for rows that a team holds in registers."""
    resident[
        finish,
        block_size,
        team,
        vectors,
        _threads(vectors, width, False) // block_size,
        False,
        width,
    ](y, x, rows, queue)


def _cluster[
    S: RowSource,
    T: RowTarget,
    //,
    finish: Finish,
    vectors: Int,
    width: Int,
    slotted: Bool,
](y: T, x: S, rows: Rows, queue: Queue) raises -> Bool:
    """Enqueues `resident_cluster`, and returns whether a row fits in a cluster.
    """
    comptime step = CLUSTER_BLOCK_SIZE * width
    comptime slot = step * size_of[kept_dtype[S.elements]()]()
    comptime gpu = DeviceContext.default_device_info
    # In half of a multiprocessor's shared memory, but for what the driver and the kernel itself take of it.
    comptime slots = (
        gpu.shared_memory_per_multiprocessor // 2 - 8 * 1024
    ) // slot if slotted else 0
    comptime room = (vectors + slots) * step
    if rows.n > PORTABLE_BLOCKS * room:
        return False
    # As long as three blocks fit in a multiprocessor, fewer of them are faster.
    comptime best = min(room, 20480 if size_of[S.elements]() > 2 else 32768)
    resident_cluster[
        finish,
        CLUSTER_BLOCK_SIZE,
        vectors,
        _threads(vectors, width, slotted) // CLUSTER_BLOCK_SIZE,
        slotted,
        width,
    ](y, x, rows, min(ceildiv(rows.n, best), PORTABLE_BLOCKS), queue)
    return True


def _in_vectors[
    S: RowSource, T: RowTarget, //, finish: Finish, width: Int
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Rows of whole vectors, which are aligned as in MAX's own elementwise kernels, whose loads these are; or rows in memory that
    have edges.
    """
    # Registers for so many logits leave room for enough threads.
    comptime most = 32 // width
    var vectors = rows.n // width
    if vectors <= 16:
        _tile[finish, 128, 4, 4, width](y, x, rows, queue)
    elif vectors <= 32:
        _tile[finish, 128, 8, 4, width](y, x, rows, queue)
    elif vectors <= 64:
        _tile[finish, 128, 16, 4, width](y, x, rows, queue)
    elif vectors <= 128:
        _tile[finish, 128, 32, 4, width](y, x, rows, queue)
    elif vectors <= 256:
        _tile[finish, 64, 64, 4, width](y, x, rows, queue)
    elif vectors <= 512:
        _tile[finish, 128, 128, 4, width](y, x, rows, queue)
    elif vectors <= 1024:
        _tile[finish, 256, 256, 4, width](y, x, rows, queue)
    elif vectors <= 2048:
        _tile[finish, 512, 512, 4, width](y, x, rows, queue)
    elif most > 4 and vectors <= 3072:
        comptime if most > 4:
            _tile[finish, 512, 512, 6, width](y, x, rows, queue)
    else:
        comptime if has_clusters():
            # H200, 65536 columns of float32: 295 µs (323 with slots), of bfloat16 169 (163).
            comptime if size_of[S.elements]() > 2:
                if _cluster[finish, most, width, False](y, x, rows, queue):
                    return
            if _cluster[finish, most, width, True](y, x, rows, queue):
                return
        else:
            if vectors <= 512 * most:
                _tile[finish, 512, 512, most, width](y, x, rows, queue)
                return
        streaming_computed[finish](y, x, rows, queue)


def _in_elements[
    S: RowSource, T: RowTarget, //, finish: Finish
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Rows of any length."""
    if rows.n <= 32:
        _tile[finish, 128, 4, 8, 1](y, x, rows, queue)
    elif rows.n <= 256:
        _tile[finish, 128, 32, 8, 1](y, x, rows, queue)
    elif rows.n <= 1024:
        _tile[finish, 128, 128, 8, 1](y, x, rows, queue)
    elif rows.n <= 4096:
        _tile[finish, 512, 512, 8, 1](y, x, rows, queue)
    else:
        comptime if has_clusters():
            if _cluster[finish, 16, 1, True](y, x, rows, queue):
                return
        streaming_computed[finish](y, x, rows, queue)
