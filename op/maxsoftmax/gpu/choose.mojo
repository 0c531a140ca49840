"""Which kernel takes which shape: the one table of `auto` on a GPU.

Rows are measured in vectors of 16 bytes. The figures are shares of a device copy's rate on an H200, float32 / bfloat16,
at the longest row of each line and some 500 / 250 MB of it; a line's neighbours do worse there.
"""

from std.math import ceildiv
from std.sys import size_of
from max.gpu.host import DeviceContext

from ..rows import Rows, Source, Target
from .cluster import MOST_BLOCKS
from .columns import columns
from .grid import grid
from .ladder import online
from .stripe import VECTOR_BYTES
from .tile import tile, tile_cluster

comptime COLUMNS_BLOCK_SIZE = 512
"""Threads a block along an axis that is not the last."""


def auto[
    dtype: DType, contiguous: Bool
](y: Target[dtype], x: Source[dtype], rows: Rows, ctx: DeviceContext) raises:
    """Enqueues the softmax of every row of `x` into `y` by the fastest kernel for the shape.

    Parameters:
        dtype: Dtype of both tensors.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: Probabilities, not in the memory of `x`.
        x: Logits.
        rows: How the memory is divided into rows, none of them empty.
        ctx: The GPU and its stream.
    """
    comptime if not contiguous:
        columns[dtype, COLUMNS_BLOCK_SIZE](y, x, rows, ctx)
    elif dtype == DType.float64:
        # Not worth kernels of its own.
        online[dtype, 512, 4](y, x, rows, ctx)
    else:
        _contiguous[dtype](y, x, rows, ctx)


def _contiguous[
    dtype: DType
](y: Target[dtype], x: Source[dtype], rows: Rows, ctx: DeviceContext) raises:
    comptime gpu = DeviceContext.default_device_info
    comptime wide = size_of[dtype]() > 2
    comptime has_clusters = gpu.api == "cuda" and gpu.compute >= 9.0
    # Vectors in slots of one multiprocessor; what a few blocks have of static memory, and the driver keeps, is left.
    comptime slots = (
        gpu.shared_memory_per_multiprocessor - 16 * 1024
    ) // VECTOR_BYTES
    comptime width = VECTOR_BYTES // size_of[dtype]()
    var vectors = rows.n // width
    # An edge of an unaligned row needs a lane an element.
    var aligned = (
        rows.n % width == 0
        and Int(x) % VECTOR_BYTES == 0
        and Int(y) % VECTOR_BYTES == 0
    )
    if rows.n <= 8:
        tile[dtype, 128, 1, 8, 8, width=1](y, x, rows, ctx)
    elif rows.n <= 16:
        tile[dtype, 128, 2, 8, 8, width=1](y, x, rows, ctx)
    elif rows.n <= 32:
        tile[dtype, 128, 4, 8, 8, width=1](y, x, rows, ctx)
    elif rows.n <= 64 and not wide and not aligned:
        tile[dtype, 128, 8, 8, 8, width=1](y, x, rows, ctx)
    elif rows.n <= 128 and not wide and not aligned:
        tile[dtype, 128, 16, 8, 8, width=1](y, x, rows, ctx)
    elif vectors <= 8 and aligned and not wide:
        tile[dtype, 128, 2, 4, 8](y, x, rows, ctx)  # - / 0.91
    elif vectors <= 16 and (aligned or wide):
        tile[dtype, 128, 4, 4, 8](y, x, rows, ctx)  # 0.96 / 0.90
    elif vectors <= 32:
        tile[dtype, 128, 8, 4, 8](y, x, rows, ctx)  # 0.94 / 0.92
    elif vectors <= 64:
        tile[dtype, 128, 16, 4, 8](y, x, rows, ctx)  # 0.95 / 0.92
    elif vectors <= 128:
        tile[dtype, 128, 32, 4, 8](y, x, rows, ctx)  # - / 0.92
    elif vectors <= 256:
        tile[dtype, 64, 64, 4, 24](y, x, rows, ctx)  # 0.98 / 0.95
    elif vectors <= 384:
        tile[dtype, 64, 64, 6, 16](y, x, rows, ctx)  # 0.99 / 0.99
    elif vectors <= 512:
        tile[dtype, 128, 128, 4, 12](y, x, rows, ctx)  # 0.95 / 0.94
    elif vectors <= 768:
        tile[dtype, 128, 128, 6, 8](y, x, rows, ctx)  # 0.98 / 0.99
    elif vectors <= 1024:
        comptime if wide:
            tile[dtype, 256, 256, 4, 6](y, x, rows, ctx)  # 0.94
        else:
            tile[dtype, 128, 128, 8, 8](y, x, rows, ctx)  # 0.94
    elif vectors <= 1536:
        tile[dtype, 256, 256, 6, 4](y, x, rows, ctx)  # 0.98 / 0.98
    elif vectors <= 2048:
        tile[dtype, 256, 256, 8, 4](y, x, rows, ctx)  # 0.97 / 0.94
    elif vectors <= 6 * 256 + slots // 4:
        tile[dtype, 256, 256, 6, 4, True](y, x, rows, ctx)  # 0.95 / 0.95
    elif vectors <= 6 * 512 + slots // 2:
        tile[dtype, 512, 512, 6, 2, True](y, x, rows, ctx)  # 0.87 / 0.94
    else:
        comptime if has_clusters:
            comptime few = 2 * (10 * 256 + slots // 3)
            comptime some = 6 * 256 + slots // 4
            comptime many = 6 * 512 + slots // 2
            if vectors <= few:
                # 0.82 / 0.84 (50257 and 100001 columns)
                tile_cluster[dtype, 256, 10, 3](y, x, rows, 2, ctx)
                return
            elif vectors <= MOST_BLOCKS * some:
                # 0.86 / 0.84 (128256 columns)
                var blocks = ceildiv(vectors, some)
                tile_cluster[dtype, 256, 6, 4](y, x, rows, blocks, ctx)
                return
            elif vectors <= MOST_BLOCKS * few // 2:
                # 0.78 / 0.83 (200001 and 262144 columns)
                tile_cluster[dtype, 256, 10, 3](y, x, rows, MOST_BLOCKS, ctx)
                return
            elif vectors <= MOST_BLOCKS * many:
                # 0.75 / - (262144 columns)
                tile_cluster[dtype, 512, 6, 2](y, x, rows, MOST_BLOCKS, ctx)
                return
        grid[dtype](y, x, rows, gpu.sm_count, ctx)
