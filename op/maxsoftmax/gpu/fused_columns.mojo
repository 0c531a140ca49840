"""Rows along an axis that is not the last, where logits are computed as they are read."""

from std.bit import next_power_of_two
from std.math import ceildiv
from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from ..finish import Finish
from ..io.sink import WithSink
from ..logits import Logits
from ..queue import Queue
from ..results import Results
from .fused_twice import columns_kernel
from .overlap import overlapped
from .strided import strided
from .tree_reduction import MAX_GRID

comptime BLOCK_SIZE = 512
"""Threads a block of the kernel of any column."""


def fused_columns[
    Fusion: InputFusion,
    Sink: InputFusion,
    Out: OutputFusion,
    in_dtype: DType,
    out_dtype: DType,
    rank: Int,
    axis: Int,
    causal: Bool,
    epilogue: Bool,
    //,
    has_sink: Bool,
](
    y: Results[Out, out_dtype, rank, axis, epilogue],
    x: Logits[Fusion, in_dtype, rank, axis, causal],
    sink: Logits[Sink, in_dtype, rank, axis, False],
    queue: Queue,
) raises:
    """Enqueues the softmax of every column of `x` into `y`.

    Parameters:
        Fusion: What computes the logits.
        Sink: What computes the sinks.
        Out: What takes the probabilities.
        in_dtype: Dtype of the logits.
        out_dtype: Dtype of the probabilities.
        rank: Number of dimensions.
        axis: The axis that sums to 1, not the last.
        causal: Whether rows end at the diagonal.
        epilogue: Whether something takes the probabilities.
        has_sink: Whether there is one more logit a row, in the denominator only.

    Args:
        y: Probabilities, in no memory that is read for `x`.
        x: Logits.
        sink: The additional logits, one a row.
        queue: Where kernels are launched.
    """
    var rows = x.rows()
    comptime if in_dtype != DType.float64:
        var taken: Bool
        comptime if has_sink:
            taken = strided[Finish.PROBABILITIES](
                y, WithSink(x, sink), rows, queue
            )
        else:
            taken = strided[Finish.PROBABILITIES](y, x, rows, queue)
        if taken:
            return
    var columns = min(32, next_power_of_two(rows.inner))
    queue.launch[
        columns_kernel[
            Fusion,
            Sink,
            Out,
            in_dtype,
            out_dtype,
            rank,
            axis,
            causal,
            epilogue,
            has_sink,
            BLOCK_SIZE,
        ]
    ](
        y,
        x,
        sink,
        Int64(rows.outer),
        Int64(rows.n),
        Int64(rows.inner),
        Int64(columns),
        grid_dim=min(rows.outer * ceildiv(rows.inner, columns), MAX_GRID),
        block_dim=BLOCK_SIZE,
        attributes=overlapped(),
    )
