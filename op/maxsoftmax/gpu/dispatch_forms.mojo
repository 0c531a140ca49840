"""Which kernel takes which shape of logits as attention has them: those of `auto`, which read the tensor as it is."""

from ..ops.finish import Finish
from ..ops.formed import FormedSource
from ..ops.forms import AXIS, Class, Forms
from ..io.results import IntoMemory, Results
from ..queue import Queue
from ..io.rows import Rows, Source, Target
from .dispatch import resident_fits
from .dispatch_computed import computed
from .dispatch_strided import strided
from .streaming_computed import streaming_computed


def formed[
    dtype: DType, out_dtype: DType, //, contiguous: Bool, known: Class
](
    y: Target[out_dtype],
    x: Source[dtype],
    forms: Forms[dtype],
    out_scale: Float64,
    queue: Queue,
) raises:
    """Enqueues softmax of what `forms` makes of `x`.

    Parameters:
        dtype: Dtype of the logits.
        out_dtype: Dtype of the probabilities.
        contiguous: Whether there is nothing after the axis of the softmax.
        known: What is known of `forms` at compile time: that they are of this class; nothing, if it is `Class.ANY`.

    Args:
        y: Probabilities.
        x: Logits.
        forms: What is made of them.
        out_scale: What probabilities of float8 are multiplied by.
        queue: Where kernels are launched.
    """
    comptime finish = Finish.PROBABILITIES
    var rows = Rows.of[AXIS](forms.shape)
    var target = Results[IntoMemory, out_dtype, 3, 1, False](
        IntoMemory(), y, {rows.outer, rows.n, rows.inner}, out_scale
    )
    comptime Formed[are: Class] = FormedSource[
        dtype, contiguous=contiguous, forms_are=are
    ]
    comptime if not contiguous:
        strided[finish](target, Formed[Class.ANY](x, forms), rows, queue)
    else:
        var are = forms.are()
        comptime if dtype != DType.float64:
            comptime for scaled in [Class.SCALED, Class.CUT]:
                comptime if known.may_be(scaled):
                    if are == scaled:
                        if resident_fits[finish](
                            target,
                            Formed[scaled](x, forms.scaled()),
                            rows,
                            queue,
                        ):
                            return
            comptime if known.may_be(Class.MASKED):
                if are == Class.MASKED:
                    var source = Formed[Class.MASKED](x, forms)
                    comptime if dtype == DType.float32:
                        if resident_fits[finish](target, source, rows, queue):
                            return
                    else:
                        computed[finish](target, source, rows, queue)
                        return
        streaming_computed[finish](
            target, Formed[Class.ANY](x, forms), rows, queue
        )
