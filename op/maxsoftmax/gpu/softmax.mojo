"""Softmax on the GPU: chooses the kernel for an axis."""

from ..ops.finish import Finish
from ..io.memory import MemorySource, MemoryTarget
from ..queue import Queue
from ..io.rows import Rows, Source, Target
from .dispatch import auto
from .fallback import fallback
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


def softmax[
    algorithm: StaticString,
    dtype: DType,
    block_size: Int,
    unroll: Int,
    contiguous: Bool,
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
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
        queue: Where kernels are launched.
    """
    comptime assert block_size.is_power_of_two() and block_size <= 1024
    comptime if algorithm == "auto":
        auto[dtype, Finish.PROBABILITIES, contiguous](y, x, rows, queue)
    elif not contiguous:
        fallback[Finish.PROBABILITIES, block_size](
            MemoryTarget(y), MemorySource(x), rows, queue
        )
    elif algorithm == "tree":
        tree[dtype, block_size](y, x, rows, queue)
    elif algorithm == "elementwise":
        elementwise[dtype, block_size](y, x, rows, queue)
    elif algorithm == "naive":
        naive[dtype, block_size](y, x, rows, queue)
    elif algorithm == "tree_blocked":
        tree_blocked[dtype, block_size](y, x, rows, queue)
    elif algorithm == "warp":
        warp[dtype, block_size](y, x, rows, queue)
    elif algorithm == "vector":
        vector[dtype, block_size, unroll](y, x, rows, queue)
    elif algorithm == "online":
        online[dtype, block_size, unroll](y, x, rows, queue)
    elif algorithm == "multipass":
        multipass[dtype, block_size](y, x, rows, queue)
    elif algorithm == "split":
        split[dtype, block_size](y, x, rows, queue)
    else:
        comptime assert False, "there is no such algorithm"
