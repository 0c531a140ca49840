"""Softmax on the GPU: chooses the kernel for an axis."""

from max.gpu.host import DeviceContext

from ..rows import Rows, Source, Target
from .columns import columns
from .tree import tree


comptime AUTO_BLOCK_SIZE = 512
"""Threads a block when nobody chose: the size of the published benchmark."""


def softmax[
    algorithm: StaticString, dtype: DType, block_size: Int, contiguous: Bool
](y: Target[dtype], x: Source[dtype], rows: Rows, ctx: DeviceContext) raises:
    """Enqueues the softmax of every row of `x` into `y`.

    Parameters:
        algorithm: The kernel's name, "auto" or "tree".
        dtype: Dtype of both tensors; the arithmetic is in its accumulator.
        block_size: Threads a block of a kernel chosen by name, a power of two up to 1024.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: Probabilities.
        x: Logits; may be the same memory as `y`.
        rows: How the memory is divided into rows, none of them empty.
        ctx: The GPU and its stream.
    """
    comptime assert algorithm == "auto" or algorithm == "tree"
    comptime assert block_size.is_power_of_two() and block_size <= 1024
    comptime threads = AUTO_BLOCK_SIZE if algorithm == "auto" else block_size
    comptime if contiguous:
        tree[dtype, threads](y, x, rows, ctx)
    else:
        columns[dtype, threads](y, x, rows, ctx)
