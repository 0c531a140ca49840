"""Logits as attention has them, on a CPU: functions, which are called as they are read."""

from std.utils import IndexList

from ..ops.forms import AXIS, Forms, RANK
from ..ops.made import InMemory, made_softmax
from ..kernels import Kernels
from ..queue import Queue
from ..io.results import IntoMemory, Results
from ..io.rows import Rows, Source, Target


def formed[
    dtype: DType, out_dtype: DType, //, K: Kernels, contiguous: Bool
](
    y: Target[out_dtype],
    x: Source[dtype],
    forms: Forms[dtype],
    rows: Rows,
    out_scale: Float64,
    queue: Queue,
) raises:
    """Writes softmax of what `forms` makes of `x`: see `Kernels.formed`.

    Parameters:
        dtype: Dtype of the logits.
        out_dtype: Dtype of the probabilities.
        K: What has `fused`.
        contiguous: Whether there is nothing after the axis of the softmax.

    Args:
        y: Probabilities.
        x: Logits.
        forms: What is made of them.
        rows: How the tensor is divided into rows.
        out_scale: What probabilities of float8 are multiplied by.
        queue: Where to compute.
    """
    # Rows along the last axis have other kernels, which are chosen by the rank.
    comptime rank = RANK - 1 if contiguous else RANK
    var shape = IndexList[rank]()
    comptime for i in range(rank):
        shape[i] = forms.shape[i]
    made_softmax[K, AXIS](
        Results[IntoMemory, out_dtype, rank, AXIS, False](
            IntoMemory(), y, shape, out_scale
        ),
        InMemory[dtype, AXIS](x, forms.shape),
        forms,
        rows,
        queue,
    )
