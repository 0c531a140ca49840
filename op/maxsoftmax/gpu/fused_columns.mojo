"""Which kernel takes which columns, where logits are computed as they are read: the table of `fused` along an axis that is not
the last.
"""

from std.bit import next_power_of_two
from std.math import ceildiv
from std.sys import size_of
from max.gpu.host import DeviceContext, Dim
from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from ..finish import Finish
from ..io.sink import WithSink
from ..logits import Logits
from ..queue import Queue
from ..results import Results
from .cluster import PORTABLE_BLOCKS, has_clusters
from .column_part import COLUMN_THREADS
from .fused_column_tile import (
    fused_column_room,
    fused_column_tile_kernel,
    fused_slot_bytes,
)
from .fused_twice import columns_kernel
from .overlap import overlapped
from .streaming_columns import streaming_columns
from .stripe import VECTOR_BYTES
from .tree_reduction import MAX_GRID

comptime BLOCK_SIZE = 512
"""Threads a block of the kernel of any column."""


def fused_columns[
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
](
    y: Results[Out, out_dtype, rank, axis, epilogue],
    x: Logits[Fusion, in_dtype, rank, axis, causal],
    sink: Logits[Sink, in_dtype, rank, axis, False],
    queue: Queue,
) raises:
    """Enqueues the softmax of every column of `x` into `y`.

    Parameters:
        Fusion: What computes the logits.
        Sink: What computes the sinks.
        Out: What takes the probabilities.
        in_dtype: Dtype of the logits.
        out_dtype: Dtype of the probabilities.
        rank: Number of dimensions.
        axis: The axis that sums to 1, not the last.
        causal: Whether rows end at the diagonal.
        epilogue: Whether something takes the probabilities.
        has_sink: Whether there is one more logit a row, in the denominator only.

    Args:
        y: Probabilities, in no memory that is read for `x`.
        x: Logits.
        sink: The additional logits, one a row.
        queue: Where kernels are launched.
    """
    comptime gpu = DeviceContext.default_device_info
    comptime most = (1 << 31) - 1
    var rows = x.rows()

    @inline(.always)
    def tile[
        lanes: Int,
        vectors: Int,
        slotted: Bool,
        clustered: Bool,
        width: Int,
    ](blocks: Int = 1) raises {imm}:
        comptime deep = COLUMN_THREADS // lanes
        var across = rows.inner // width
        var total = rows.outer * across
        var share = ceildiv(rows.n, blocks)
        var bytes = 0
        comptime if slotted:
            bytes = max(0, ceildiv(share, deep) - vectors) * fused_slot_bytes[
                in_dtype
            ](width)
        comptime kernel = fused_column_tile_kernel[
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
            lanes,
            vectors,
            slotted,
            clustered,
            width,
        ]
        var together: Optional[Dim] = None
        comptime if clustered:
            together = Dim(blocks, 1, 1)
        queue.launch[kernel](
            y,
            x,
            sink,
            Int64(total),
            Int64(across),
            Int64(rows.n),
            Int64(share),
            grid_dim=ceildiv(total, lanes) * blocks,
            block_dim=COLUMN_THREADS,
            shared_mem_bytes=bytes,
            cluster_dim=together,
            attributes=overlapped(),
        )

    @inline(.always)
    def grid[lanes: Int, width: Int]() raises {imm}:
        comptime if has_sink:
            streaming_columns[Finish.PROBABILITIES, lanes, width](
                y, WithSink(x, sink), rows, gpu.sm_count, queue
            )
        else:
            streaming_columns[Finish.PROBABILITIES, lanes, width](
                y, x, rows, gpu.sm_count, queue
            )

    @inline(.always)
    def in_vectors[width: Int]() raises {imm}:
        """Columns by the vector, in pieces of 128 bytes."""
        comptime lanes = 128 // (width * size_of[out_dtype]())
        comptime room = fused_column_room[in_dtype](
            lanes,
            4,
            width,
            has_clusters(),
            gpu.shared_memory_per_multiprocessor,
        )
        if rows.n <= 4:
            tile[256, 4, False, False, width]()
        elif rows.n <= 16:
            tile[64, 4, False, False, width]()
        elif rows.n <= 64:
            tile[16, 4, False, False, width]()
        elif rows.n <= 128:
            tile[8, 4, False, False, width]()
        elif rows.n <= room:
            tile[lanes, 4, True, False, width]()
        else:
            comptime if has_clusters():
                if rows.n <= PORTABLE_BLOCKS * room:
                    tile[lanes, 4, True, True, width](ceildiv(rows.n, room))
                    return
            grid[lanes, width]()

    @inline(.always)
    def in_elements() raises {imm}:
        """Columns one by one."""
        if rows.n <= 8:
            tile[256, 8, False, False, 1]()
        elif rows.n <= 64:
            tile[64, 16, False, False, 1]()
        elif rows.n <= 128:
            tile[32, 16, False, False, 1]()
        else:
            comptime if has_clusters():
                if rows.n <= 128 * PORTABLE_BLOCKS:
                    tile[32, 16, False, True, 1](ceildiv(rows.n, 128))
                    return
            grid[32, 1]()

    comptime if in_dtype != DType.float64:
        comptime width = VECTOR_BYTES // size_of[out_dtype]()
        # The others count in 32 bits.
        if rows.n <= most // 2 and rows.count() <= most:
            if x.shape[rank - 1] % width == 0:
                in_vectors[width]()
            else:
                in_elements()
            return
    var columns = min(32, next_power_of_two(rows.inner))
    queue.launch[
        columns_kernel[
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
            BLOCK_SIZE,
        ]
    ](
        y,
        x,
        sink,
        Int64(rows.outer),
        Int64(rows.n),
        Int64(rows.inner),
        Int64(columns),
        grid_dim=min(rows.outer * ceildiv(rows.inner, columns), MAX_GRID),
        block_dim=BLOCK_SIZE,
        attributes=overlapped(),
    )
