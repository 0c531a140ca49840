"""The (max, sum) pair: the one piece of maths that every softmax kernel shares.

For logits x the pair holds m = max x and d = Σ e^x, counted in the `Unit` of m. Two pairs of two parts of a row
merge into the pair of the whole row, in any grouping, which is what lets a row be reduced by lanes, threads, blocks
or cores (Milakov and Gimelshein 2018, arXiv 1805.02867).

Special values need no branches of their own: NaN and +inf turn d into NaN, -inf adds 0 to it, and a row of nothing but
-inf is left with d = 0, over which `probability` divides 0.
"""

from std.bit import log2_ceil
from std.sys import is_gpu
from std.utils.numerics import neg_inf

from .exponential import Unit, logarithm


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
    """By how much `value` exceeds the sum, as far as is known: by `add` less than a unit in its last place, by `add_of_few` what all
    additions have dropped."""

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
    def add_of_few(mut self, x: SIMD[Self.dtype, Self.width]):
        """Adds one of at most some thousand terms. To add 0 changes nothing, not even what is carried, so that terms that are not there
        may be added or left out.
        """
        var total = self.value + x
        self.excess += (total - self.value) - x
        self.value = total

    @inline(.always)
    def add(mut self, other: Self):
        """Adds another sum."""
        self.add(other.value)
        self.add(-other.excess)

    @inline(.always)
    def collapse(self) -> Sum[Self.dtype, 1]:
        """Returns the sum of all lanes."""
        comptime if Self.width == 1:
            return rebind[Sum[Self.dtype, 1]](self)
        else:
            comptime half = Self.width // 2
            var low = Sum[Self.dtype, half](self.value.slice[half]())
            low.excess = self.excess.slice[half]()
            var high = Sum[Self.dtype, half](
                self.value.slice[half, offset=half]()
            )
            high.excess = self.excess.slice[half, offset=half]()
            low.add(high)
            return low.collapse()

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
    """The sum of e^x so far, in `Unit(m)`."""

    @inline(.always)
    def __init__(out self):
        """The pair of no elements. Merging it changes nothing but, at times, how d is split into value and excess.
        """
        self.m = neg_inf[Self.dtype]()
        self.d = Sum[Self.dtype, Self.width]()

    @inline(.always)
    def __init__(
        out self,
        m: SIMD[Self.dtype, Self.width],
        d: Sum[Self.dtype, Self.width],
    ):
        """The pair of a maximum and a sum that were found before."""
        self.m = m
        self.d = d

    @inline(.always)
    def add[
        count: Int
    ](mut self, x: Array[SIMD[Self.dtype, Self.width], count]):
        """Adds `count` logits to every lane, rescaling d only once.

        Parameters:
            count: Logits a lane.

        Args:
            x: The logits.
        """
        # By halves: a chain of maxima would wait for itself.
        var largest = x.copy()
        comptime for level in range(log2_ceil(count)):
            comptime step = 1 << level
            comptime for i in range(0, count - step, 2 * step):
                largest[i] = max(largest[i], largest[i + step])
        var unit = self._raise(largest[0])
        # Four terms summed by halves round twice, which the accuracy can bear; longer sums are compensated.
        comptime for i in range(0, count, 4):
            comptime rest = count - i
            var terms = unit.exp(x[i])
            comptime if rest >= 2:
                terms += unit.exp(x[i + 1])
            comptime if rest == 3:
                terms += unit.exp(x[i + 2])
            comptime if rest >= 4:
                terms += unit.exp(x[i + 2]) + unit.exp(x[i + 3])
            self.d.add(terms)

    @inline(.always)
    def merge(mut self, other: Self):
        """Makes this the pair of both parts, lane by lane."""
        var unit = self._raise(other.m)
        var theirs = other.d
        theirs.scale(other._over(unit))
        self.d.add(theirs)

    @inline(.always)
    def collapse(self) -> MaxSum[Self.dtype, 1]:
        """Returns the pair of all lanes together."""
        var m = self.m.reduce_max()
        return {m, self.collapse(m)}

    @inline(.always)
    def collapse(self, m: Scalar[Self.dtype]) -> Sum[Self.dtype, 1]:
        """Returns the sum of all lanes in the unit of `m`, which is not smaller than any of theirs.
        """
        var d = self.d
        d.scale(self._over(Unit(SIMD[Self.dtype, Self.width](m))))
        return d.collapse()

    @inline(.always)
    def normalizer(self) -> Normalizer[Self.dtype, Self.width]:
        """Returns what turns logits into probabilities, once the pair is that of whole rows.
        """
        return {Unit(self.m), self.d.value}

    @inline(.always)
    def relative(self) -> SIMD[Self.dtype, Self.width]:
        """Returns Σ e^(x - m): from 1 up, 0 for nothing but -inf, NaN if anything is NaN or inf.
        """
        var nothing = self.m.eq(neg_inf[Self.dtype]())
        var unit = Unit(nothing.select(type_of(self.m)(0), self.m))
        return nothing.select(
            type_of(self.m)(0), self.d.value / unit.exp(self.m)
        )

    @inline(.always)
    def logarithms(self) -> Logarithms[Self.dtype, Self.width]:
        """Returns what turns logits into logarithms of probabilities, once the pair is that of whole rows.
        """
        return {self.m, logarithm(self.relative())}

    @inline(.always)
    def _raise(
        mut self, m: SIMD[Self.dtype, Self.width]
    ) -> Unit[Self.dtype, Self.width]:
        """Raises the maximum to at least `m` and returns the unit that d is in from then on.
        """
        var larger = max(self.m, m)
        var unit = Unit(larger)
        self.d.scale(self._over(unit))
        self.m = larger
        return unit

    @inline(.always)
    def _over(
        self, unit: Unit[Self.dtype, Self.width]
    ) -> SIMD[Self.dtype, Self.width]:
        """Returns what d is to be multiplied by to be in `unit`, which is not smaller than its own.
        """
        # The unit of nothing is no smaller than any other, but there is nothing to multiply.
        var nothing = self.m.eq(neg_inf[Self.dtype]())
        return nothing.select(
            SIMD[Self.dtype, Self.width](0), Unit(self.m).over(unit)
        )


struct Normalizer[dtype: DType, width: SIMDLength](TrivialRegisterPassable):
    """A finished pair, ready to turn logits into probabilities.

    Parameters:
        dtype: The accumulator's dtype, DType.float32 or DType.float64.
        width: Number of rows, one a lane.
    """

    var unit: Unit[Self.dtype, Self.width]
    """What d is counted in."""
    var d: SIMD[Self.dtype, Self.width]
    """The sum of e^x."""
    var reciprocal: SIMD[Self.dtype, Self.width]
    """The reciprocal of d."""

    @inline(.always)
    def __init__(
        out self,
        unit: Unit[Self.dtype, Self.width],
        d: SIMD[Self.dtype, Self.width],
    ):
        self.unit = unit
        self.d = d
        self.reciprocal = 1 / d

    @inline(.always)
    def probability[
        lanes: SIMDLength
    ](self, x: SIMD[Self.dtype, lanes]) -> SIMD[Self.dtype, lanes]:
        """Returns e^x / d.

        Parameters:
            lanes: As many as there are rows, or any number of logits of a single row.

        Args:
            x: Logits that were added to the pair.

        Returns:
            Probabilities; exactly 1 where e^x is all there is.
        """
        return self.divide(self.unit.exp(x))

    @inline(.always)
    def divide[
        lanes: SIMDLength
    ](self, e_x: SIMD[Self.dtype, lanes]) -> SIMD[Self.dtype, lanes]:
        """Returns `e_x` / d.

        Parameters:
            lanes: As many as there are rows, or any number for a single row.

        Args:
            e_x: Exponentials in `unit`.

        Returns:
            Probabilities.
        """
        var d: type_of(e_x)
        var reciprocal: type_of(e_x)
        comptime if Self.width == 1:
            d = self.d[0]
            reciprocal = self.reciprocal[0]
        else:
            d = rebind[type_of(e_x)](self.d)
            reciprocal = rebind[type_of(e_x)](self.reciprocal)
        comptime if is_gpu():
            # Markstein's correction rounds the quotient as a division would, for two operations instead of ten.
            var quotient = e_x * reciprocal
            return quotient.fma(-d, e_x).fma(reciprocal, quotient)
        # On a CPU, what the reciprocal was rounded by is known once a row: one operation. If it is subnormal, some CPUs take 150 cycles
        # for each product with it.
        var rest = reciprocal.fma(-d, 1) * reciprocal
        comptime normal = Scalar[Self.dtype](2) ** (
            -126 if Self.dtype == DType.float32 else -1022
        )
        rest = abs(rest).lt(normal).select(type_of(rest)(0), rest)
        return e_x.fma(reciprocal, e_x * rest)


@fieldwise_init
struct Logarithms[dtype: DType, width: SIMDLength](TrivialRegisterPassable):
    """A finished pair, ready to turn logits into logarithms of probabilities.

    Parameters:
        dtype: The accumulator's dtype, DType.float32 or DType.float64.
        width: Number of rows, one a lane.
    """

    var m: SIMD[Self.dtype, Self.width]
    """The maximum."""
    var log_d: SIMD[Self.dtype, Self.width]
    """The logarithm of Σ e^(x - m)."""

    @inline(.always)
    def probability[
        lanes: SIMDLength
    ](self, x: SIMD[Self.dtype, lanes]) -> SIMD[Self.dtype, lanes]:
        """Returns ln of the probability of `x`.

        Parameters:
            lanes: As many as there are rows, or any number of logits of a single row.

        Args:
            x: Logits that were added to the pair.

        Returns:
            (x - m) - ln d; -inf where x is -inf and the row has anything else.
        """
        comptime if Self.width == 1:
            return (x - self.m[0]) - self.log_d[0]
        else:
            return (x - rebind[type_of(x)](self.m)) - rebind[type_of(x)](
                self.log_d
            )
