"""Columns of tensors with hardly anything after the axis: a cache's sector, or less; of many positions of 16 bits up to a line.

All positions of some outer indices lie side by side in memory: a panel. A block brings one into shared memory by 16 bytes at a time, takes its columns
as `resident_strided` takes columns of tensors, with the same bits, puts results where the logits were, and writes the panel as it was read.
"""

from std.math import align_up, ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.memory import external_memory
from max.gpu.sync import barrier

from ..io.memory import MemorySource, MemoryTarget
from ..io.rows import Rows, Source, Target, VECTOR_BYTES, nowhere, unseen
from ..ops.finish import Finish
from ..queue import Queue
from .hardware.panel import fetch, shift, write
from .hardware.pdl import pdl_attributes, pdl_wait
from .hardware.tree_reduction import Shared
from .partition.tile import COLUMN_THREADS, Tile
from .resident_strided import resident_columns
from .tuning import Strip


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(COLUMN_THREADS)),
    `nvvm.minctasm`=SIMDLength(t.blocks),
)
def resident_panel_kernel[
    dtype: DType, finish: Finish, t: Strip, tile: Tile
](
    y: Target[dtype],
    x: Source[dtype],
    outer: Int64,
    inner: Int64,
    n: Int64,
    together: Int64,
):
    """Writes the softmax along the middle axis of a row-major (outer, n, inner) tensor, or its logarithm.

    Parameters:
        dtype: Dtype of both tensors, of 4 bytes or 2.
        finish: Which of them.
        t: How columns are held, by a block in its registers.
        tile: As of `resident_strided_kernel`, not skewed.

    Args:
        y: Results; may be the memory of `x`.
        x: Logits.
        outer: The first dimension.
        inner: The last.
        n: The one between.
        together: Outer indices of a panel, of which a block takes all columns at a time.
    """
    var room = external_memory[
        Scalar[dtype],
        address_space=AddressSpace.SHARED,
        alignment=VECTOR_BYTES,
    ]()
    var first = Int(block_idx.x) * Int(together)
    var outers = min(Int(together), Int(outer) - first)
    var start = first * Int(n) * Int(inner)
    var count = outers * Int(n) * Int(inner)
    var source = x.unsafe_offset(start)
    var panel = room.unsafe_offset(shift(source))
    pdl_wait()
    fetch[COLUMN_THREADS](panel, source, Int32(count))
    # A source is taken for memory that nobody writes: nothing is read of it before the barrier if nobody knows where it is.
    var memory = Shared[Scalar[dtype]](
        unsafe_from_address=unseen(Int(panel))
    ).address_space_cast[AddressSpace.GENERIC]()
    resident_columns[finish, t, tile, of_block=True](
        MemoryTarget(memory),
        MemorySource[dtype, outlasts=False](Source[dtype](memory)),
        nowhere[dtype](),
        Int64(outers) * inner,
        inner,
        n,
        n,
        0,
    )
    barrier()
    write[COLUMN_THREADS](y.unsafe_offset(start), panel, Int32(count))


def panel_outers[tile: Tile](rows: Rows, size: Int) -> Int:
    """Returns how many outer indices a panel has, 0 where `resident_strided` is faster: where so much lies side by side that few reads are wasted.

    On an H100, µs by panels (without): 262144×8×5 of float32 30.6 (76.6), 30000×64×3 28.0 (37.0), but 32768×16×17 35.3 (26.4) and 16384×100×9 53.1 (48.2);
    of bfloat16 17.1 (41.9), 23.0 (50.8), 25.9 (18.3) and 28.8 (49.9), 2048×128×55 25.5 (32.6), 1048576×3×2 16.1 (14.1). By the vector 131072×8×4 of float32
    16.4 (23.4), but 1048576×2×8 of bfloat16 33.2 (26.8). Larger panels, of which each block asked for its next one before it took the columns of one, were slower.

    Parameters:
        tile: A block's columns.

    Args:
        rows: Rows along the middle axis.
        size: Bytes of an element.
    """
    comptime dealt = tile.is_dealt()
    var most = 32 if dealt else VECTOR_BYTES
    if (
        rows.n < 4
        or rows.inner * size > most
        and not (dealt and tile.lanes <= 8 and size == 2)
    ):
        return 0
    return tile.columns() // rows.inner


def resident_panel[
    dtype: DType, //, finish: Finish, t: Strip, tile: Tile
](
    y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue, together: Int
) raises:
    """Launches `resident_panel_kernel`, whose parameters and arguments these are, with a block for each panel.
    """
    queue.launch[resident_panel_kernel[dtype, finish, t.kernel(), tile]](
        y,
        x,
        Int64(rows.outer),
        Int64(rows.inner),
        Int64(rows.n),
        Int64(together),
        grid_dim=ceildiv(rows.outer, together),
        block_dim=COLUMN_THREADS,
        # A kernel is loaded once for each amount.
        shared_mem_bytes=align_up(
            together * rows.n * rows.inner * size_of[dtype]() + VECTOR_BYTES,
            4096,
        ),
        attributes=pdl_attributes(),
    )
