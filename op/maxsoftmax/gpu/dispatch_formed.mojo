"""Which kernel takes rows along the last axis whose logits are made of what lies in memory."""

from std.sys import size_of

from ..io.rows import Rows, Source
from ..io.target import RowTarget
from ..ops.finish import Finish
from ..ops.formed import FormedSource
from ..ops.forms import Class, Forms, Kind
from ..queue import Queue
from .dispatch import grid_fits, teams_fit, units_fit
from .dispatch_computed import computed
from .resident_masked import is_of_grid, masked_fits
from .streaming_computed import streaming_computed
from .tuning import Tuned


def formed[
    T: RowTarget, P: RowTarget, dtype: DType, //, known: Class
](
    y: T,
    passing: P,
    x: Source[dtype],
    forms: Forms[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Enqueues softmax of what is made of logits.

    Parameters:
        T: Where probabilities go, no memory of the logits.
        P: The same.
        dtype: Dtype of the logits.
        known: As of `Kernels.formed`.

    Args:
        y: Probabilities.
        passing: The same, if nobody will find all of them in the L2.
        x: Logits.
        forms: What is made of them.
        rows: Rows along the last axis, none of them empty.
        queue: Where kernels are launched.
    """
    comptime finish = Finish.PROBABILITIES
    comptime Formed[are: Class] = FormedSource[
        dtype, contiguous=True, forms_are=are
    ]
    var are = forms.are()
    comptime if dtype != DType.float64:
        # A number takes fewer registers than a factor for each row. Of float32 both have the same bits, and where any forms may come there are not kernels for both.
        comptime apart = size_of[dtype]() == 2 and known == Class.ANY
        comptime if known == Class.SCALED or apart:
            if are == Class.SCALED and units_fit[finish](
                y, Formed[Class.SCALED](x, forms.scaled()), rows, queue
            ):
                return
        comptime if not (
            known in (Class.SCALED, Class.CUT) or known.has_bias()
        ):
            comptime factors = Class.FACTORS if known == Class.ROWS else Class.MASKED_FACTORS
            if forms.are_masked_factors() and units_fit[finish](
                y, Formed[factors](x, forms.scaled()), rows, queue
            ):
                return
        comptime for scaled in [
            Class.SCALED,
            Class.CUT,
            Class.HIDDEN,
            Class.ROWS,
        ]:
            comptime if known.may_be(scaled):
                if are == scaled:
                    var source = Formed[scaled](x, forms.scaled())
                    comptime if scaled == Class.SCALED:
                        if grid_fits[finish](y, passing, source, rows, queue):
                            return
                    if teams_fit[finish](y, source, rows, queue):
                        return
        comptime if known.may_be(Class.MASKED):
            if are == Class.MASKED:
                var source = Formed[Class.MASKED](x, forms)
                comptime if Tuned.stages_masks and known.may_be(Class.BIASED):
                    if forms.are_biased():
                        comptime known_long = is_of_grid[dtype](rows.length)
                        comptime may_be_long = rows.length == 0 or known_long
                        comptime for long in [Class.LONG, Class.LONG_NARROW]:
                            comptime narrow = long == Class.LONG_NARROW
                            comptime if (
                                may_be_long
                                and known.may_be(long)
                                and (size_of[dtype]() == 2 or not narrow)
                            ):
                                if (
                                    is_of_grid[dtype](rows.n)
                                    and (forms.mask.kind == Kind.NARROW)
                                    == narrow
                                    and grid_fits[finish](
                                        y,
                                        passing,
                                        Formed[long](x, forms.scaled()),
                                        rows,
                                        queue,
                                    )
                                ):
                                    return
                        comptime if not known_long:
                            if masked_fits(
                                y,
                                Formed[Class.BIASED](x, forms.scaled()),
                                forms.sharing(),
                                rows,
                                queue,
                            ):
                                return
                comptime if dtype == DType.float32:
                    if teams_fit[finish](y, source, rows, queue):
                        return
                else:
                    computed[finish](y, source, rows, queue)
                    return
    streaming_computed[finish](y, Formed[Class.ANY](x, forms), rows, queue)
