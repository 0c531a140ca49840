"""Which kernel takes which rows of which the gradient of logits is wanted."""

from std.sys import size_of

from ..queue import Queue
from ..io.memory import MemorySource, MemoryTarget
from ..io.rows import Rows, Source, Target, VECTOR_BYTES
from ..ops.finish import Finish
from .copy import copy
from .dispatch import resident_fits
from .dispatch_strided import strided
from .fallback import fallback
from .streaming_operations import Gradients, Products
from .streaming import streaming


def backward[
    dtype: DType, log: Bool, contiguous: Bool
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Enqueues the gradient of the logits of every row.

    Parameters:
        dtype: Dtype of all tensors; the arithmetic is in its accumulator.
        log: Whether y are logarithms of probabilities.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        dx: Gradient of the logits, not in the memory of `y` or `dy`: one of them may be moved there.
        y: Results of the forward op.
        dy: Their gradient.
        rows: How the memory is divided into rows, none of them empty.
        queue: Where kernels are launched.
    """
    comptime finish = Finish.GRADIENT_OF_LOGARITHMS if log else Finish.GRADIENT

    @inline(.always)
    def compute[
        contiguous: Bool
    ](y: Source[dtype], dy: Source[dtype]) raises {imm}:
        var to, of_y = MemoryTarget(dx), MemorySource(y)
        comptime if not contiguous:
            strided[finish](to, of_y, rows, queue, dy)
        else:
            comptime if dtype != DType.float64:
                if not resident_fits[finish](to, of_y, rows, queue, dy):
                    streaming[
                        Products[dtype, log],
                        Gradients[log, size_of[dtype]() > 2],
                    ](dx, y, dy, rows, queue)

    comptime if not contiguous:
        compute[False](y, dy)
    else:
        # What is read by the vector begins alike: where it does not, what the results will take the place of is moved first.
        var size = rows.count() * rows.n
        if dtype == DType.float64:
            fallback[finish](MemoryTarget(dx), MemorySource(y), rows, queue, dy)
        elif (Int(y) - Int(dy)) % VECTOR_BYTES == 0:
            compute[True](y, dy)
        elif (Int(y) - Int(dx)) % VECTOR_BYTES == 0:
            copy(dx, dy, size, queue)
            compute[True](y, dx)
        elif (Int(dy) - Int(dx)) % VECTOR_BYTES == 0:
            copy(dx, y, size, queue)
            compute[True](dx, dy)
        else:
            fallback[finish](MemoryTarget(dx), MemorySource(y), rows, queue, dy)
