"""Softmax on the CPU: chooses how the rows of an axis are walked."""

from std.runtime import parallelism_level
from max.gpu.host import DeviceContext

from ..rows import Rows, Source, Target
from .contiguous import ContiguousRows
from .naive import naive
from .schedule import run
from .strided import StridedRows


def softmax[
    algorithm: StaticString, dtype: DType, contiguous: Bool
](y: Target[dtype], x: Source[dtype], rows: Rows, ctx: DeviceContext) raises:
    """Writes the softmax of every row of `x` to `y`.

    Parameters:
        algorithm: The kernel's name, "naive", or "auto".
        dtype: Dtype of both tensors; the arithmetic is in its accumulator.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: Probabilities.
        x: Logits; may be the same memory as `y`.
        rows: How the memory is divided into rows, none of them empty.
        ctx: The CPU to run on.
    """
    comptime assert algorithm == "auto" or algorithm == "naive"
    comptime if algorithm == "naive":
        naive(y, x, rows)
    elif contiguous:
        run(ContiguousRows(y, x, rows), ctx)
    else:
        run(StridedRows(y, x, rows, parallelism_level()), ctx)
