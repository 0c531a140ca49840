"""Sparsemax and its gradient on memory: what graphs, libraries and Mojo programs call."""

from ...queue import Queue
from ...io.rows import Rows, Source, Target
from .columns import columns_on_cpu, gradient_columns_on_cpu
from .gpu import columns_on_gpu, gradients_on_gpu, rows_on_gpu
from .rows import GradientsRow, LogitsRow, rows_on_cpu


def sparsemax[
    dtype: DType, //, target: StaticString, contiguous: Bool = False
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Writes sparsemax of every row of `x`: max(x - max x - t, 0), t being what makes it sum to 1.

    Parameters:
        dtype: Dtype of both tensors: float32, bfloat16, float16 or float64.
        target: "cpu" or "gpu".
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: Probabilities; not in the memory of `x`.
        x: Logits.
        rows: How the memory is divided into rows.
        queue: Where to compute.
    """
    if rows.is_empty():
        return
    # Where a dimension of 1 is the last, rows are contiguous all the same, and have the same bits.
    if contiguous or rows.inner == 1:
        comptime if target == "cpu":
            rows_on_cpu(LogitsRow(y, x, rows.n), rows, queue)
        else:
            rows_on_gpu(y, x, rows, queue)
        return
    comptime if not contiguous:
        comptime if target == "cpu":
            columns_on_cpu(y, x, rows, queue)
        else:
            columns_on_gpu(y, x, rows, queue)


def sparsemax_backward[
    dtype: DType, //, target: StaticString, contiguous: Bool = False
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes the gradient of the logits of every row: dy less its mean over what is above 0 in `y`, and 0 elsewhere.

    Parameters:
        dtype: Dtype of all tensors.
        target: "cpu" or "gpu".
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        dx: Gradient of the logits; not in the memory of `y` or `dy`.
        y: What sparsemax returned.
        dy: The gradient of that.
        rows: How the memory is divided into rows.
        queue: Where to compute.
    """
    if rows.is_empty():
        return
    if contiguous or rows.inner == 1:
        comptime if target == "cpu":
            rows_on_cpu(GradientsRow(dx, y, dy, rows.n), rows, queue)
        else:
            gradients_on_gpu[True](dx, y, dy, rows, queue)
        return
    comptime if not contiguous:
        comptime if target == "cpu":
            gradient_columns_on_cpu(dx, y, dy, rows, queue)
        else:
            gradients_on_gpu[False](dx, y, dy, rows, queue)
