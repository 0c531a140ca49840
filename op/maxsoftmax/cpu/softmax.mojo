"""Softmax on the CPU, its logarithm and its pairs: chooses how the rows of an axis are walked."""

from ..finish import Finish
from ..online import accumulator
from ..queue import Queue
from ..rows import Rows, Source, Target
from .contiguous import ContiguousRows
from .naive import naive
from .operations import Form, LogSoftmax, Softmax, Statistics
from .schedule import run
from .sources import Memory
from .targets import ToMemory
from .walk import walk


def softmax[
    algorithm: StaticString, dtype: DType, contiguous: Bool
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Writes the softmax of every row of `x` to `y`.

    Parameters:
        algorithm: The kernel's name, "naive", or "auto".
        dtype: Dtype of both tensors; the arithmetic is in its accumulator.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: Probabilities.
        x: Logits; may be the same memory as `y`.
        rows: How the memory is divided into rows, none of them empty.
        queue: The CPU to run on.
    """
    comptime assert algorithm == "auto" or algorithm == "naive"
    comptime if algorithm == "naive":
        naive(y, x, rows)
    else:
        auto[dtype, Finish.PROBABILITIES, contiguous](y, x, rows, queue)


def auto[
    dtype: DType, finish: Finish, contiguous: Bool
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Writes the softmax of every row of `x`, or what else `finish` says, to `y`.

    Parameters:
        dtype: Dtype of both tensors; the arithmetic is in its accumulator.
        finish: What of each row is written.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: Probabilities, or what else is written.
        x: Logits; may be the same memory as `y`.
        rows: How the memory is divided into rows; only pairs are written of empty ones.
        queue: The CPU to run on.
    """
    comptime if contiguous:
        run(ContiguousRows[dtype, finish](y, x, rows), queue)
    else:
        var source = Memory[dtype, False](x, x, rows)
        var target = ToMemory[dtype, False](y, rows)
        comptime if finish == Finish.LOGARITHMS:
            walk[False](source, LogSoftmax(), target, rows, queue)
        elif finish == Finish.PAIR:
            var pairs = y.unsafe_bitcast[Scalar[accumulator[dtype]()]]()
            walk[False](
                source,
                Statistics[dtype](pairs, x, rows, Form.PAIRS),
                target,
                rows,
                queue,
            )
        else:
            walk[False](source, Softmax(False), target, rows, queue)
