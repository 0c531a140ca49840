"""A span of a row whose exponentials are counted in the unit of the span's own maximum."""

from ..math.exponential import ROOM, Unit
from ..math.online import MaxSum, Normalizer


struct Portion[dtype: DType, whole: Bool](TrivialRegisterPassable):
    """What turns the exponentials of one span into probabilities.

    Parameters:
        dtype: The accumulator's dtype.
        whole: Whether it is known at compile time that the span is all of its row.
    """

    var unit: Unit[Self.dtype, 1]
    """What the span's exponentials are counted in."""
    var factor: Scalar[Self.dtype]
    """That unit in terms of the one that the row's sum is counted in."""
    var row: Normalizer[Self.dtype, 1]
    """What divides by the row's sum."""

    @inline(.always)
    def __init__(
        out self, part: MaxSum[Self.dtype, 1], total: MaxSum[Self.dtype, 1]
    ):
        """The portion that has the pair `part` in a row that has the pair `total`.
        """
        comptime if Self.whole:
            self.unit = Unit(total.m)
            self.factor = 1
            self.row = Normalizer(self.unit, total.d.value)
            return
        comptime room = Scalar[Self.dtype](1 << ROOM)
        self.unit = Unit(part.m)
        var lower = Unit(total.m).lowered()
        self.factor = room
        # That of nothing but -inf may be anything that is finite: it is multiplied by 0, or by NaN.
        if part.m < total.m and part.m > Scalar[Self.dtype].MIN:
            self.factor = self.unit.over(lower)
        self.row = Normalizer(lower, total.d.value * room)

    @inline(.always)
    def probability[
        lanes: SIMDLength, //
    ](self, e_x: SIMD[Self.dtype, lanes]) -> SIMD[Self.dtype, lanes]:
        """Returns e^x / d.

        Parameters:
            lanes: Any number.

        Args:
            e_x: Exponentials in `unit`.

        Returns:
            Probabilities; exactly 1 where e^x is all there is.
        """
        comptime if Self.whole:
            return self.row.divide(e_x)
        else:
            return self.row.divide(e_x * self.factor)
