"""Logits that are computed as they are read, on the GPU: once where a row fits on the chip.

Whatever MAX fused into the input is computed in the load, and nothing of it is in memory. What there is no room for is
computed again for the probabilities.
"""

from std.math import ceildiv
from std.sys import size_of
from max.gpu.host import DeviceContext, Dim
from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from ..ops.finish import Finish
from ..io.sink import WithSink
from ..io.logits import Logits
from ..queue import Queue
from ..io.results import Results
from .hardware.cluster import PORTABLE_BLOCKS, has_clusters
from .resident_computed import resident_computed_kernel, kept_dtype
from .streaming_computed import streaming_computed_kernel
from .hardware.pdl import pdl_attributes
from .dispatch_strided import strided
from .partition.stripe import VECTOR_BYTES
from .hardware.tree_reduction import MAX_GRID

comptime BLOCK_SIZE = 512
"""Threads a block where a row is read twice."""

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
    # 16 accumulators of float8 would be more registers than there are.
    comptime width = VECTOR_BYTES // max(2, size_of[out_dtype]())
    comptime Tile[
        block_size: Int,
        team: Int,
        vectors: Int,
        clustered: Bool,
        slotted: Bool,
        width: Int,
    ] = resident_computed_kernel[
        Fusion,
        Sink,
        Out,
        in_dtype,
        out_dtype,
        rank,
        axis,
        causal,
        epilogue,
        has_sink,
        finish,
        block_size,
        team,
        vectors,
        clustered,
        slotted,
        width,
    ]
    var rows = x.rows()

    @inline(.always)
    def tile[
        block_size: Int,
        team: Int,
        vectors: Int,
        width: Int,
    ]() raises {imm}:
        queue.launch[Tile[block_size, team, vectors, False, False, width]](
            y,
            x,
            sink,
            Int64(rows.count()),
            Int64(rows.n),
            Int64(rows.n),
            grid_dim=ceildiv(rows.count(), block_size // team),
            block_dim=block_size,
            attributes=pdl_attributes(),
        )

    @inline(.always)
    def cluster[vectors: Int, width: Int, slotted: Bool]() raises {imm} -> Bool:
        """Launches the kernel with a cluster for each row, and returns whether a row fits in one.
        """
        comptime step = CLUSTER_BLOCK_SIZE * width
        comptime slot = step * size_of[kept_dtype[in_dtype]()]()
        comptime gpu = DeviceContext.default_device_info
        # In half of a multiprocessor's shared memory, but for what the driver and the kernel itself take of it.
        comptime slots = (
            gpu.shared_memory_per_multiprocessor // 2 - 8 * 1024
        ) // slot if slotted else 0
        comptime room = (vectors + slots) * step
        if rows.n > PORTABLE_BLOCKS * room:
            return False
        # As long as three blocks fit in a multiprocessor, fewer of them are faster.
        comptime best = min(room, 20480 if size_of[in_dtype]() > 2 else 32768)
        var blocks = min(ceildiv(rows.n, best), PORTABLE_BLOCKS)
        # Whole lines of memory, so that no two blocks write to one.
        comptime line = 8 * width
        var share = ceildiv(rows.n, blocks * line) * line
        var bytes = max(0, ceildiv(share, step) - vectors) * slot
        queue.launch[
            Tile[
                CLUSTER_BLOCK_SIZE,
                CLUSTER_BLOCK_SIZE,
                vectors,
                True,
                slotted,
                width,
            ]
        ](
            y,
            x,
            sink,
            Int64(rows.count()),
            Int64(rows.n),
            Int64(share),
            grid_dim=rows.count() * blocks,
            block_dim=CLUSTER_BLOCK_SIZE,
            shared_mem_bytes=bytes,
            cluster_dim=Dim(blocks, 1, 1),
            attributes=pdl_attributes(),
        )
        return True

    @inline(.always)
    def long[width: Int]() raises {imm}:
        queue.launch[
            streaming_computed_kernel[
                Fusion,
                Sink,
                Out,
                in_dtype,
                out_dtype,
                rank,
                axis,
                causal,
                epilogue,
                has_sink,
                finish,
                BLOCK_SIZE,
                8,
                width,
            ]
        ](
            y,
            x,
            sink,
            Int64(rows.count()),
            Int64(rows.n),
            grid_dim=min(rows.count(), MAX_GRID),
            block_dim=BLOCK_SIZE,
            attributes=pdl_attributes(),
        )

    @inline(.always)
    def in_vectors() raises {imm}:
        """Rows of whole vectors, which are aligned as in MAX's own elementwise kernels, whose loads these are.
        """
        # Registers for so many logits leave room for enough threads.
        comptime most = 32 // width
        var vectors = rows.n // width
        if vectors <= 16:
            tile[128, 4, 4, width]()
        elif vectors <= 32:
            tile[128, 8, 4, width]()
        elif vectors <= 64:
            tile[128, 16, 4, width]()
        elif vectors <= 128:
            tile[128, 32, 4, width]()
        elif vectors <= 256:
            tile[64, 64, 4, width]()
        elif vectors <= 512:
            tile[128, 128, 4, width]()
        elif vectors <= 1024:
            tile[256, 256, 4, width]()
        elif vectors <= 2048:
            tile[512, 512, 4, width]()
        elif most > 4 and vectors <= 3072:
            comptime if most > 4:
                tile[512, 512, 6, width]()
        else:
            comptime if has_clusters():
                # H200, 65536 columns of float32: 295 µs (323 with slots), of bfloat16 169 (163).
                comptime if size_of[in_dtype]() > 2:
                    if cluster[most, width, False]():
                        return
                if cluster[most, width, True]():
                    return
            else:
                if vectors <= 512 * most:
                    tile[512, 512, most, width]()
                    return
            long[width]()

    @inline(.always)
    def in_elements() raises {imm}:
        """Rows of any length."""
        if rows.n <= 32:
            tile[128, 4, 8, 1]()
        elif rows.n <= 256:
            tile[128, 32, 8, 1]()
        elif rows.n <= 1024:
            tile[128, 128, 8, 1]()
        elif rows.n <= 4096:
            tile[512, 512, 8, 1]()
        else:
            comptime if has_clusters():
                if cluster[16, 1, True]():
                    return
            long[1]()

    comptime if axis != rank - 1:
        comptime if has_sink:
            strided[finish](y, WithSink(x, sink), rows, queue)
        else:
            strided[finish](y, x, rows, queue)
    elif in_dtype == DType.float64:
        # Not worth kernels of its own.
        long[1]()
    else:
        if x.in_vectors[width]():
            in_vectors()
        else:
            in_elements()
