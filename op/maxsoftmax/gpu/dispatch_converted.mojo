"""Which kernel takes which shape where results are of another dtype than logits: those of `auto`, with another target."""

from ..ops.finish import Finish
from ..ops.formed import FormedSource
from ..ops.forms import Class, Forms
from ..io.memory import MemorySource
from ..io.results import IntoMemory, Results
from ..queue import Queue
from ..io.rows import Rows, Source, Target
from .dispatch import resident_fits
from .dispatch_strided import strided
from .streaming_computed import streaming_computed


def converted[
    dtype: DType, out_dtype: DType, //, finish: Finish, contiguous: Bool
](
    y: Target[out_dtype],
    x: Source[dtype],
    rows: Rows,
    out_scale: Float64,
    queue: Queue,
) raises:
    """Enqueues softmax of every row of `x`, or its logarithm, into `y`.

    Parameters:
        dtype: Dtype of the logits.
        out_dtype: Dtype of the results.
        finish: What of each row is written: an element for each of its own.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: Results, not in the memory of `x`.
        x: Logits.
        rows: How the memory is divided into rows, none of them empty.
        out_scale: What results of float8 are multiplied by.
        queue: Where kernels are launched.
    """
    var target = Results[IntoMemory, out_dtype, 3, 1, False](
        IntoMemory(), y, {rows.outer, rows.n, rows.inner}, out_scale
    )
    comptime if not contiguous:
        # Those that read memory keep logits as they are, and are as accurate; here they are widened.
        strided[finish](
            target,
            FormedSource[dtype, contiguous=False, forms_are=Class.ANY](
                x, Forms[dtype].of_nothing(rows)
            ),
            rows,
            queue,
        )
    else:
        var source = MemorySource(x)
        comptime if dtype != DType.float64:
            if resident_fits[finish](target, source, rows, queue):
                return
        streaming_computed[finish](target, source, rows, queue)
