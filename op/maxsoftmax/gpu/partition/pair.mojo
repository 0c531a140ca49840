"""What is added up of rows, and what becomes of the pair of a whole row."""

from std.bit import log2_ceil
from std.utils.numerics import neg_inf

from ...io.rows import Target
from ...math.exponential import logarithm, Scale
from ...math.online import Sum
from ...ops.finish import Finish
from ..hardware.pair import Pair
from ..hardware.team import maximum


@inline(.always)
def add[
    width: SIMDLength, //, exact: Bool
](mut sum: Sum[DType.float32, width], terms: SIMD[DType.float32, width]):
    """Adds to a sum, with its compensation only where results are of more than 16 bits.
    """
    comptime if exact:
        sum.add_of_few(terms)
    else:
        sum.value += terms


@inline(.always)
def end[
    width: SIMDLength,
    //,
    finish: Finish,
    exact: Bool,
    lowered: Bool = False,
    quick: Bool = False,
](mut pair: Pair[width], masked: Bool) -> SIMD[DType.float32, width]:
    """Returns what exponentials of rows are to be multiplied by to be probabilities, 1 / d, or what is to be subtracted from
    logits less their maxima for logarithms, ln d.

    Parameters:
        width: How many rows.
        finish: Which of them.
        exact: Of the scale that d is in.
        lowered: Whether the exponentials are in the lowered unit.
        quick: As of `Pair.relative`.

    Args:
        pair: The pairs of whole rows. Where one is masked and there is nothing but -inf, its maximum becomes 0.
        masked: Whether that gives 0, or the logarithm -inf, and not NaN.
    """
    comptime Vector = SIMD[DType.float32, width]
    var factor: Vector
    comptime if finish == Finish.LOGARITHMS:
        factor = logarithm(pair.relative[exact, quick]())
    else:
        factor = pair.reciprocal[lowered]()
    if masked:
        # All exponentials are as good as 0, and nothing is left of them.
        var nothing = pair.m.eq(neg_inf[DType.float32]())
        factor = nothing.select(Vector(0), factor)
        pair.m = nothing.select(Vector(0), pair.m)
    return factor


@inline(.always)
def write_pair[
    width: SIMDLength, //, exact: Bool
](y: Target[DType.float32], row: Int, pair: Pair[width]):
    """Writes the pairs of `width` rows.

    Parameters:
        exact: Of the scale that the sums are in.

    - `y`: Where those of row 0 are.
    - `row`: The first of the rows.
    """
    var to = y.unsafe_offset(2 * row)
    var d = pair.relative[exact]()
    comptime for i in range(Int(width)):
        to[unsafe_offset=2 * i] = pair.m[i]
        to[unsafe_offset=2 * i + 1] = d[i]


@inline(.always)
def merged[
    width: SIMDLength, count: Int, //, exact: Bool
](pairs: Array[Pair[width], count]) -> Pair[width]:
    """Returns what pairs come to, in the order of a butterfly: the first half of them with the other, and so on.

    Parameters:
        width: How many rows.
        count: How many pairs, a power of two.
        exact: Of the scale that the sums are in.

    Args:
        pairs: The pairs.
    """
    var m = pairs[0].m
    comptime for j in range(1, count):
        m = maximum(m, pairs[j].m)
    var scale = Scale[exact, width](m)
    var sums = Array[SIMD[DType.float32, width], count](fill=0)
    comptime for j in range(count):
        sums[j] = pairs[j].sum_over(scale)
    comptime for level in reversed(range(log2_ceil(count))):
        comptime for j in range(1 << level):
            sums[j] += sums[j + (1 << level)]
    return Pair(m, sums[0])
