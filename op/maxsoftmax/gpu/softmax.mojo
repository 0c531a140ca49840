"""Softmax on the GPU: chooses the kernel for an axis."""

from max.gpu.host import DeviceContext

from ..rows import Rows, Source, Target
from .columns import columns
from .ladder import (
    elementwise,
    multipass,
    naive,
    online,
    split,
    tree,
    tree_blocked,
    vector,
    warp,
)


comptime AUTO_BLOCK_SIZE = 512
"""Threads a block when nobody chose: the size of the published benchmark."""

comptime AUTO_UNROLL = 4
"""Vectors under way at a time when nobody chose."""


def softmax[
    algorithm: StaticString,
    dtype: DType,
    block_size: Int,
    unroll: Int,
    contiguous: Bool,
](y: Target[dtype], x: Source[dtype], rows: Rows, ctx: DeviceContext) raises:
    """Enqueues the softmax of every row of `x` into `y`.

    Parameters:
        algorithm: The kernel's name, or "auto".
        dtype: Dtype of both tensors; the arithmetic is in its accumulator.
        block_size: Threads a block of a kernel chosen by name, a power of two up to 1024.
        unroll: Vectors that a thread of `vector` or `online` has under way at a time.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: Probabilities, not in the memory of `x`.
        x: Logits.
        rows: How the memory is divided into rows, none of them empty.
        ctx: The GPU and its stream.
    """
    comptime assert block_size.is_power_of_two() and block_size <= 1024
    comptime threads = AUTO_BLOCK_SIZE if algorithm == "auto" else block_size
    comptime if not contiguous:
        columns[dtype, threads](y, x, rows, ctx)
    elif algorithm == "auto":
        # The fastest rung: 8192×50257 float32 takes it 1.38 ms on an H200, `vector` 2.00, `tree` 2.86, a copy 0.78.
        online[dtype, threads, AUTO_UNROLL](y, x, rows, ctx)
    elif algorithm == "tree":
        tree[dtype, threads](y, x, rows, ctx)
    elif algorithm == "elementwise":
        elementwise[dtype, threads](y, x, rows, ctx)
    elif algorithm == "naive":
        naive[dtype, threads](y, x, rows, ctx)
    elif algorithm == "tree_blocked":
        tree_blocked[dtype, threads](y, x, rows, ctx)
    elif algorithm == "warp":
        warp[dtype, threads](y, x, rows, ctx)
    elif algorithm == "vector":
        vector[dtype, threads, unroll](y, x, rows, ctx)
    elif algorithm == "online":
        online[dtype, threads, unroll](y, x, rows, ctx)
    elif algorithm == "multipass":
        multipass[dtype, threads](y, x, rows, ctx)
    elif algorithm == "split":
        split[dtype, threads](y, x, rows, ctx)
    else:
        comptime assert False, "there is no such algorithm"
