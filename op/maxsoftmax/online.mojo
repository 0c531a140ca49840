"""The (max, sum) pair: the one piece of maths that every softmax kernel shares.

For logits x the pair holds m = max x and d = Σ exp(x - m). Two pairs of two parts of a row merge into the pair of the
whole row, in any grouping, which is what lets a row be reduced by lanes, threads, blocks or cores (Milakov and
Gimelshein 2018, arXiv 1805.02867).

Special values need no branches of their own: NaN and +inf turn d into NaN, -inf adds 0 to it, and a row of nothing but
-inf is left with m = -inf, for which `probability` computes -inf - -inf = NaN.
"""

from std.bit import log2_ceil
from std.utils.numerics import neg_inf

from .exponential import exp_nonpositive


def accumulator[dtype: DType]() -> DType:
    """Returns the dtype that softmax of `dtype` is computed in: float64 for itself, float32 for the rest.
    """
    return DType.float64 if dtype == DType.float64 else DType.float32


struct Sum[dtype: DType, width: SIMDLength](TrivialRegisterPassable):
    """A compensated sum (Kahan 1965), so that 2^24 terms lose no more than a few.

    Parameters:
        dtype: The accumulator's dtype.
        width: Number of independent sums, one a lane.
    """

    var value: SIMD[Self.dtype, Self.width]
    """The sum so far, rounded."""
    var excess: SIMD[Self.dtype, Self.width]
    """By how much `value` exceeds the sum, as far as is known."""

    @inline(.always)
    def __init__(out self, value: SIMD[Self.dtype, Self.width] = 0):
        self.value = value
        self.excess = 0

    @inline(.always)
    def add(mut self, x: SIMD[Self.dtype, Self.width]):
        """Adds `x`, carrying over what rounding drops."""
        var corrected = x - self.excess
        var total = self.value + corrected
        self.excess = (total - self.value) - corrected
        self.value = total

    @inline(.always)
    def scale(mut self, factor: SIMD[Self.dtype, Self.width]):
        """Multiplies the sum by `factor`."""
        self.value *= factor
        self.excess *= factor


struct MaxSum[dtype: DType, width: SIMDLength](TrivialRegisterPassable):
    """The pair (m, d), one of each in every lane.

    Parameters:
        dtype: The accumulator's dtype, float32 or float64.
        width: Number of independent pairs.
    """

    var m: SIMD[Self.dtype, Self.width]
    """The maximum so far; -inf where nothing, or only -inf, was added."""
    var d: Sum[Self.dtype, Self.width]
    """The sum of exp(x - m) so far."""

    @inline(.always)
    def __init__(out self):
        """The pair of no elements: the identity of `merge`."""
        self.m = neg_inf[Self.dtype]()
        self.d = Sum[Self.dtype, Self.width]()

    @inline(.always)
    def __init__(
        out self,
        m: SIMD[Self.dtype, Self.width],
        d: SIMD[Self.dtype, Self.width],
    ):
        self.m = m
        self.d = Sum(d)

    @inline(.always)
    def add[
        count: Int
    ](mut self, x: Array[SIMD[Self.dtype, Self.width], count]):
        """Adds `count` logits to every lane, rescaling d only once.

        Parameters:
            count: Logits a lane; few enough (8) that their plain sum is exact to a unit or two in the last place.

        Args:
            x: The logits.
        """
        # By halves: a chain of maxima would wait for itself.
        var largest = x.copy()
        comptime for level in range(log2_ceil(count)):
            comptime step = 1 << level
            comptime for i in range(0, count - step, 2 * step):
                largest[i] = max(largest[i], largest[i + step])
        var m = max(self.m, largest[0])
        var origin = _origin(m)
        var total = SIMD[Self.dtype, Self.width](0)
        comptime for i in range(count):
            total += exp_nonpositive(x[i] - origin)
        self.d.scale(exp_nonpositive(self.m - origin))
        self.d.add(total)
        self.m = m

    @inline(.always)
    def merge(mut self, other: Self):
        """Makes this the pair of both parts, lane by lane."""
        var m = max(self.m, other.m)
        var origin = _origin(m)
        var factor = exp_nonpositive(other.m - origin)
        self.d.scale(exp_nonpositive(self.m - origin))
        self.d.add(other.d.value * factor)
        self.d.add(-other.d.excess * factor)
        self.m = m

    @inline(.always)
    def collapse(self) -> MaxSum[Self.dtype, 1]:
        """Returns the pair of all lanes together."""
        var m = self.m.reduce_max()
        var factor = exp_nonpositive(self.m - _origin(m))
        return {m, ((self.d.value - self.d.excess) * factor).reduce_add()}

    @inline(.always)
    def normalizer(self) -> Normalizer[Self.dtype, Self.width]:
        """Returns what turns logits into probabilities, once the pair is that of whole rows.
        """
        return {self.m, 1 / self.d.value}


@fieldwise_init
struct Normalizer[dtype: DType, width: SIMDLength](TrivialRegisterPassable):
    """A finished pair, ready to turn logits into probabilities without dividing each.

    Parameters:
        dtype: The accumulator's dtype, float32 or float64.
        width: Number of rows, one a lane.
    """

    var m: SIMD[Self.dtype, Self.width]
    """The maximum."""
    var scale: SIMD[Self.dtype, Self.width]
    """The reciprocal of d."""

    @inline(.always)
    def probability[
        lanes: SIMDLength
    ](self, x: SIMD[Self.dtype, lanes]) -> SIMD[Self.dtype, lanes]:
        """Returns exp(x - m) / d.

        Parameters:
            lanes: As many as there are rows, or any number of logits of a single row.

        Args:
            x: Logits that were added to the pair.
        """
        comptime if Self.width == 1:
            return exp_nonpositive(x - self.m[0]) * self.scale[0]
        else:
            comptime assert lanes == Self.width
            return exp_nonpositive(x - rebind[type_of(x)](self.m)) * rebind[
                type_of(x)
            ](self.scale)


@inline(.always)
def _origin(m: SIMD) -> type_of(m):
    """Returns what to subtract from logits whose maximum is m: m, or 0 for -inf, where -inf - -inf would be NaN.
    """
    return m.eq(neg_inf[m.dtype]()).select(type_of(m)(0), m)
