"""What turns what is known of a unit's elements into results, once it is known what the row sums to."""

from std.utils.numerics import neg_inf

from ...math.exponential import Scale
from ...ops.finish import Finish
from ..hardware.pair import Pair
from .pair import end


@inline(.always)
def factors[
    exact: Bool,
    sums: Bool,
    //,
    finish: Finish,
    lowered: Bool,
    in_unit: Bool = lowered,
](
    m: Float32,
    scale: Scale[exact, sums=sums],
    of_row: Scale[exact, sums=sums],
    mut pair: Pair[],
    masked: Bool = False,
) -> Tuple[Float32, Float32]:
    """Returns what exponentials are multiplied by to be probabilities, or what is subtracted from x - m to be their logarithms; and what those in the
    unit's scale are multiplied by before, 1 if that is the same for all of the row or a part of the former.

    Parameters:
        exact: Of the scales.
        sums: Of the scales, too.
        finish: What is written.
        lowered: Whether the row's pair is lowered for the division, as of `end`: of exact exponentials that `UnitSum` keeps in place of logits.
        in_unit: Whether exponentials are in the unit's scale, not in the row's.

    Args:
        m: The unit's largest logit.
        scale: The unit's scale.
        of_row: The row's.
        pair: The row's pair, as of `end`.
        masked: As of `end`.
    """
    var rest = Float32(1)
    var factor = end[finish, exact, lowered, quick=True](pair, masked)[0]
    comptime if in_unit:
        comptime if lowered:
            rest = scale.over_lowered(of_row) * scale.quick_factor()
        else:
            rest = scale.over(of_row)
        if m == neg_inf[DType.float32]():
            rest = 0
        # Both together may be too small for a normal number: then one after the other.
        if rest * factor > 1e-30:
            factor *= rest
            rest = 1
    elif finish == Finish.PROBABILITIES:
        factor *= of_row.quick_factor()
    return factor, rest
