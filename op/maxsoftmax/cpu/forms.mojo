"""Logits as attention has them, on a CPU: functions, which are called as they are read."""

from std.sys import size_of
from std.utils import IndexList
from extensibility.managed_tensor_slice import InputFusion

from ..ops.forms import AXIS, Forms, place_of, RANK, spread
from ..ops.made import made_softmax
from ..kernels import Kernels
from ..queue import Queue
from ..io.results import IntoMemory, Results
from ..io.rows import Rows, Source, Target


@fieldwise_init
struct _Memory[of: DType](InputFusion):
    """Elements as they lie in row-major memory.

    Parameters:
        of: Their dtype.
    """

    var x: Source[Self.of]
    """Where the first is."""
    var shape: IndexList[RANK]
    """The shape of `Forms`."""

    @inline(.always)
    def load[
        dtype: DType, rank: Int, simd_width: Int, element_alignment: Int = 1
    ](self, idx: IndexList[rank]) -> SIMD[dtype, simd_width]:
        """Returns elements."""
        var place = place_of(spread[AXIS](idx, 0), self.shape)
        return rebind[SIMD[dtype, simd_width]](
            self.x.unsafe_load[
                width=simd_width,
                alignment=element_alignment * size_of[Self.of](),
            ](place)
        )


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
        _Memory(x, forms.shape),
        forms,
        rows,
        queue,
    )
