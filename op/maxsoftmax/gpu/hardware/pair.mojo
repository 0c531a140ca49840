"""What a part of a row sums to: the pair of a maximum and a sum."""

from std.utils.numerics import inf, nan, neg_inf

from ...math.exponential import ROOM, Scale, quotient
from .team import maximum


struct Pair[width: SIMDLength = 1](TrivialRegisterPassable):
    """The maximum of a part of a row, and the sum of its exponentials in the `Scale` of the maximum.

    Parameters:
        width: Number of rows, one a lane.
    """

    comptime Values = SIMD[DType.float32, Self.width]

    var m: Self.Values
    """The maximum."""
    var d: Self.Values
    """The sum."""

    @inline(.always)
    def __init__(out self, m: Self.Values, d: Self.Values):
        self.m = m
        self.d = d

    @inline(.always)
    def reciprocal[lowered: Bool = False](self) -> Self.Values:
        """Returns 1 / d; NaN if m is not finite, as then is all of the row.

        Parameters:
            lowered: Whether for exponentials in the lowered unit.
        """
        var result = quotient(Self.Values(1), self.d)
        comptime if Self.width > 1:
            # Newton's step makes up for what the quotient lacks.
            result = result.fma(result.fma(-self.d, Self.Values(1)), result)
        comptime if lowered:
            result /= Float32(1 << ROOM)
        return (
            abs(self.m)
            .lt(inf[DType.float32]())
            .select(result, Self.Values(nan[DType.float32]()))
        )

    @inline(.always)
    def relative[exact: Bool, quick: Bool = False](self) -> Self.Values:
        """Returns Σ e^(x - m): from 1 up, 0 for nothing but -inf; NaN if m is not finite otherwise.

        Parameters:
            exact: Of the scale that d is in.
            quick: Whether d is a sum of what the scale's `quick` returned, times its `quick_factor`.
        """
        var nothing = self.m.eq(neg_inf[DType.float32]())
        var scale = Scale[exact, Self.width](self.m)
        # What the largest element has added to d: where the others count for nothing, the logarithm is to be 0.
        var largest: Self.Values
        comptime if quick:
            largest = scale.quick(scale.m) * scale.quick_factor()
        else:
            largest = scale.exp(scale.m)
        # Of several rows a quotient is rounded less well: that of two equal numbers may not be 1.
        var sum = self.d.eq(largest).select(
            Self.Values(1), quotient(self.d, largest)
        )
        return nothing.select(
            Self.Values(0),
            abs(self.m)
            .lt(inf[DType.float32]())
            .select(sum, Self.Values(nan[DType.float32]())),
        )

    @inline(.always)
    def sum_over[
        exact: Bool, sums: Bool = False
    ](self, larger: Scale[exact, Self.width, sums]) -> Self.Values:
        """Returns the sum in the scale of a maximum that is not smaller.

        Parameters:
            exact: Of both scales.
            sums: Of both, too.
        """
        # A part of nothing but -inf adds nothing, whatever its sum says.
        var nothing = self.m.eq(neg_inf[DType.float32]())
        return nothing.select(Self.Values(0), self.d * larger.of_part(self.m))

    @inline(.always)
    def joined[exact: Bool](self, logits: Self.Values) -> Self:
        """Returns the pair with one more element, in the scale of what is then the maximum.

        Parameters:
            exact: Of the scale that d is in.
        """
        var m = maximum(self.m, logits)
        var larger = Scale[exact, Self.width](m)
        return {m, self.sum_over(larger) + larger.exp(logits)}


@inline(.always)
def empty_pair[width: SIMDLength = 1]() -> Pair[width]:
    """Returns the pairs of no elements.

    Parameters:
        width: How many.
    """
    return {neg_inf[DType.float32](), 0}
