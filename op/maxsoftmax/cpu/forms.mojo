"""Logits as attention has them, on a CPU: functions, which are called as they are read."""

from std.utils import IndexList
from extensibility.managed_tensor_slice import InputFusion

from ..ops.finish import Finish
from ..ops.forms import AXIS, Forms, RANK
from ..kernels import Kernels
from ..io.logits import Logits
from ..math.online import accumulator
from ..queue import Queue
from ..io.results import IntoMemory, Results
from ..io.rows import Source, Target


@fieldwise_init
struct _Formed[of: DType](InputFusion):
    """The logits, for kernels whose logits are functions."""

    var x: Source[Self.of]
    var forms: Forms[Self.of]

    @inline(.always)
    def load[
        dtype: DType, rank: Int, simd_width: Int, element_alignment: Int = 1
    ](self, idx: IndexList[rank]) -> SIMD[dtype, simd_width]:
        var at = IndexList[RANK](0)
        comptime for i in range(rank):
            at[i] = idx[i]
        var z = self.forms.logits[simd_width, element_alignment, rank - 1](
            self.x, at
        )
        return rebind[SIMD[dtype, simd_width]](z)


@fieldwise_init
struct _Sink[of: DType](InputFusion):
    """The additional logits, for kernels whose logits are functions."""

    var forms: Forms[Self.of]

    @inline(.always)
    def load[
        dtype: DType, rank: Int, simd_width: Int, element_alignment: Int = 1
    ](self, idx: IndexList[rank]) -> SIMD[dtype, simd_width]:
        var at = IndexList[RANK](0)
        comptime for i in range(rank):
            at[i] = idx[i]
        return rebind[SIMD[dtype, simd_width]](
            self.forms.sinks[simd_width, rank - 1](at)
        )


def formed[
    dtype: DType, out_dtype: DType, //, K: Kernels, contiguous: Bool
](
    y: Target[out_dtype],
    x: Source[dtype],
    forms: Forms[dtype],
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
        out_scale: What probabilities of float8 are multiplied by.
        queue: Where to compute.
    """
    # Rows along the last axis have other kernels, which are chosen by the rank.
    comptime rank = RANK - 1 if contiguous else RANK
    comptime accum = accumulator[dtype]()
    var shape = IndexList[rank]()
    var ones = IndexList[rank]()
    comptime for i in range(rank):
        shape[i] = forms.shape[i]
        ones[i] = 1 if i == AXIS else forms.shape[i]
    var results = Results[IntoMemory, out_dtype, rank, AXIS, False](
        IntoMemory(), y, shape, out_scale
    )
    var logits = Logits[_Formed[dtype], accum, rank, AXIS, True](
        _Formed(x, forms),
        shape,
        forms.masked,
        0 if forms.causal else forms.shape[AXIS - 1],
    )
    var sinks = Logits[_Sink[dtype], accum, rank, AXIS, False](
        _Sink(forms), ones, forms.masked
    )
    K.fused[has_sink=True, finish=Finish.PROBABILITIES](
        results, logits, sinks, queue
    )
