"""Exponentials for softmax: e^x in units of about e^m / 2^64, where m is the largest x.

The obvious e^(x - m) rounds x - m, an error that grows with |x - m|, and where many equal terms make up a sum they all
make the same one. Here the unit is chosen so that nothing is rounded before the reduction to [-ln 2 / 2, ln 2 / 2]: for a
small m it is a power of two, and only exponents are subtracted; for a large one it is e^m itself, where x - m is exact
unless x is so far below that e^x does not count. The 2^64 leaves room below: what underflows here is thousands of times
smaller than the smallest subnormal, and what does not is rounded to one only when it is divided by the sum.
"""

from std.math import exp2
from std.memory import bitcast
from std.sys import inlined_assembly, is_gpu, is_nvidia_gpu
from std.utils.numerics import neg_inf

from .roots import ROUNDER, exp2_by_roots, has_roots

comptime SMALL = 64
"""Up to which |m| the unit is a power of two. For a larger m, x - m is exact down to x = m / 2 (Sterbenz), and what is
below has e^x < e^-32 · e^m, so that its error, 2^-24 · |x - m| of that, is lost even in a sum of 2^24 of them."""

comptime ROOM = 32
"""Binary places by which a row's unit is lowered for the division, so that what the unit of a part is in terms of it
underflows only where every probability of the part is 0."""

comptime HEADROOM = 64
"""Binary places by which e^m exceeds the unit; the sum of 2^62 such terms is still finite in float32."""

comptime LOG2_E = Float32(1.4426950408889634)
"""The binary logarithm of e."""


struct Unit[dtype: DType, width: SIMDLength](TrivialRegisterPassable):
    """What exponentials of a row are counted in: e^offset · 2^exponent, within √2 of e^m / 2^64.

    Parameters:
        dtype: The accumulator's dtype, DType.float32 or DType.float64.
        width: Number of units, one a lane.
    """

    var offset: SIMD[Self.dtype, Self.width]
    """Is m if |m| > `SMALL`, and 0 if not."""
    var exponent: SIMD[Self.dtype, Self.width]
    """An integer: (m - offset) / ln 2, rounded, less `HEADROOM`."""

    @inline(.always)
    def __init__(out self, m: SIMD[Self.dtype, Self.width]):
        """The unit for a row whose largest element is `m`; any if it is -inf.
        """
        comptime log2_e = Scalar[Self.dtype](1.4426950408889634)
        comptime zero = SIMD[Self.dtype, Self.width](0)
        var small = abs(m).le(SMALL)
        self.offset = (small | m.eq(neg_inf[Self.dtype]())).select(zero, m)
        var binary = (
            m.fma(log2_e, _rounder[Self.dtype]()) - _rounder[Self.dtype]()
        )
        self.exponent = small.select(binary, zero) - HEADROOM

    @inline(.always)
    def exp[
        lanes: SIMDLength
    ](self, x: SIMD[Self.dtype, lanes]) -> SIMD[Self.dtype, lanes]:
        """Returns e^x in this unit.

        Parameters:
            lanes: As many as there are units, or any number for a single unit.

        Args:
            x: Values up to m, -inf or NaN.

        Returns:
            The value e^x / unit; NaN where x is NaN, or x and m are inf.
        """
        comptime if Self.width == 1:
            return _exp(x - self.offset[0], type_of(x)(self.exponent[0]))
        else:
            return _exp(
                x - rebind[type_of(x)](self.offset),
                rebind[type_of(x)](self.exponent),
            )

    @inline(.always)
    def lowered(self) -> Self:
        """Returns the unit divided by 2^`ROOM`."""
        var lower = self
        lower.exponent -= ROOM
        return lower

    @inline(.always)
    def over(self, larger: Self) -> SIMD[Self.dtype, Self.width]:
        """Returns this unit in terms of one that is not smaller, or lowered one that was not.
        """
        return _exp(
            self.offset - larger.offset, larger.exponent - self.exponent
        )


@inline(.always)
def _exp[
    dtype: DType, width: SIMDLength, //
](x: SIMD[dtype, width], exponent: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns e^x / 2^exponent, relative error below 1e-7 (float32) or 2.3e-16 (float64).

    Cody and Waite's reduction: x = k·ln 2 + r with |r| ≤ ln 2 / 2, then e^x = 2^k · e^r, where e^r is its Taylor
    series about 0. The integer k - exponent is read off the low bits of a sum instead of converted, so that NaN
    passes through without undefined conversions.

    Parameters:
        dtype: DType.float32 or DType.float64 only.
        width: Lanes.

    Args:
        x: Arguments, -inf or NaN, but not inf.
        exponent: Integers that leave a finite result.

    Returns:
        The value; 0 where it is below the smallest normal number; NaN where x is NaN.
    """
    comptime assert dtype == DType.float32 or dtype == DType.float64
    comptime single = dtype == DType.float32
    comptime if single and not is_gpu():
        return rebind[SIMD[dtype, width]](
            _exp_by_binary(
                rebind[SIMD[DType.float32, width]](x),
                rebind[SIMD[DType.float32, width]](exponent),
            )
        )
    comptime bits = DType.int32 if single else DType.int64
    comptime mantissa = 23 if single else 52
    comptime bias = 127 if single else 1023
    comptime log2_e = Scalar[dtype](1.4426950408889634)
    # ln 2 in two parts; the first has few enough bits that k times it is exact.
    comptime ln2_high = Scalar[dtype](0.693145751953125)
    comptime ln2_low = Scalar[dtype](1.428606820309417e-06)
    # The first omitted term is below half a unit in the last place.
    comptime degree = 7 if single else 13

    var rounder = _rounder[dtype]() - exponent
    var shifted = x.fma(log2_e, rounder)
    var k = shifted - rounder
    var r = k.fma(-ln2_low, k.fma(-ln2_high, x))
    comptime leading = Scalar[dtype](inverse_factorial(degree))
    var tail = SIMD[dtype, width](leading)
    comptime for i in reversed(range(2, degree)):
        comptime coefficient = Scalar[dtype](inverse_factorial(i))
        tail = tail.fma(r, SIMD[dtype, width](coefficient))
    var e_r = (r * r).fma(tail, r) + 1
    var power = bitcast[dtype](
        (bitcast[bits](shifted) << SIMD[bits, width](mantissa))
        + SIMD[bits, width](bias << mantissa)
    )
    var underflows = shifted.lt(_rounder[dtype]() - Scalar[dtype](bias - 1))
    return underflows.select(SIMD[dtype, width](0), e_r * power)


@inline(.always)
def _exp_by_binary[
    width: SIMDLength, //
](x: SIMD[DType.float32, width], exponent: SIMD[DType.float32, width]) -> SIMD[
    DType.float32, width
]:
    """Returns e^x / 2^exponent as `_exp` does, and as accurately, in four operations less.

    The reduction is that of x·log2 e to an integer and f in [-1/2, 1/2], so that the polynomial is one of 2^f; with roots, to sixteenths and f in
    [-1/32, 1/32].

    Parameters:
        width: Lanes.

    Args:
        x: Arguments, -inf or NaN, but not inf.
        exponent: Integers that leave a finite result.

    Returns:
        The value; 0 where it is below the smallest normal number; NaN where x is NaN.
    """
    # Without roots with the bias of an exponent, so that the low bits are one.
    comptime rounder = ROUNDER if has_roots() else _rounder[
        DType.float32
    ]() + 127
    var shifted, f = _binary(x, rounder - exponent)
    var value: SIMD[DType.float32, width]
    comptime if has_roots():
        value = exp2_by_roots(shifted, f)
    else:
        # Added to the exponent instead, the integer could turn a NaN into a number.
        value = _exp2(f) * bitcast[DType.float32](
            bitcast[DType.int32](shifted) << 23
        )
    return shifted.lt(rounder - 126).select(
        SIMD[DType.float32, width](0), value
    )


@inline(.always)
def _binary[
    width: SIMDLength, //
](
    x: SIMD[DType.float32, width], intercept: SIMD[DType.float32, width]
) -> Tuple[SIMD[DType.float32, width], SIMD[DType.float32, width]]:
    """Returns x·log2 e, rounded to an integer and added to `intercept`, and what is left of it.
    """
    comptime log2_e_high = Float32(1.4426950216293335)
    comptime log2_e_low = Float32(1.9259629911e-08)
    var shifted = x.fma(log2_e_high, intercept)
    var f = x.fma(log2_e_high, intercept - shifted)
    return shifted, x.fma(log2_e_low, f)


@inline(.always)
def _exp2[
    width: SIMDLength, //
](f: SIMD[DType.float32, width]) -> SIMD[DType.float32, width]:
    """Returns 2^f on [-1/2, 1/2], fitted to the least relative error (2e-9) with 2^0 = 1.
    """
    comptime V = SIMD[DType.float32, width]
    var p = V(1.5353361912145942e-04)
    p = p.fma(f, V(1.3398874414149717e-03))
    p = p.fma(f, V(9.6184373576614e-03))
    p = p.fma(f, V(5.550332471125794e-02))
    p = p.fma(f, V(2.4022647913628847e-01))
    p = p.fma(f, V(6.931472028550667e-01))
    return p.fma(f, V(1))


struct Scale[exact: Bool, width: SIMDLength = 1, sums: Bool = False](
    TrivialRegisterPassable
):
    """Exponentials in float32 in the fewest operations, for the kernels that have no time for more: e^x in a unit of
    about e^m / 2^`HEADROOM`, where m is the largest x.

    Parameters:
        exact: Whether to a relative error of 1e-7, in thirteen operations and in the unit `Unit(m)`; or to 2^-18, which
            is plenty for results of 16 bits, in two and in a unit of its own.
        width: Number of scales, one a lane.
        sums: Whether, where not exact, logits are sums of float32, and not numbers of 16 bits, maybe times a factor.
    """

    comptime Values = SIMD[DType.float32, Self.width]
    comptime least_steep = Float32(1 << (28 if Self.sums else 17))
    """The least maximum that is as of `steep`. No two numbers of 11 bits that are this large are less than 64 apart, and of 24 bits 32: what an intercept is rounded by
    is at most half of that."""

    var m: Self.Values
    """The maximum; 0 where there is nothing but -inf, whose exponentials are 0 in any unit."""
    var offset: Self.Values
    """What is subtracted from x, where exact."""
    var slope: Self.Values
    """Else what it is multiplied by: log2 e, or less where x is so large that the next smaller one's exponential is 0."""
    var intercept: Self.Values
    """What is added to the product."""
    var floor: Self.Values
    """Where exact, the smallest x - offset that makes a difference."""

    @inline(.always)
    def __init__(out self, m: Self.Values):
        """The scale of maximum `m`."""
        self.m = m.eq(neg_inf[DType.float32]()).select(Self.Values(0), m)
        var size = abs(self.m)
        comptime if Self.exact:
            var unit = Unit(self.m)
            self.offset = unit.offset
            self.slope = LOG2_E
            self.intercept = _rounder[DType.float32]() - unit.exponent
            # What is less than e^-131 of the largest is 0 as a result.
            self.floor = self.m - unit.offset - 131
        else:
            self.offset = 0
            # So that the reciprocal of the largest number is a normal one.
            comptime tiny = Float32(1.0 / (1 << 10))
            self.slope = size.lt(Self.least_steep).select(
                Self.Values(LOG2_E),
                _near_reciprocal(size * tiny) * (2 * Self.least_steep * tiny),
            )
            self.intercept = self._intercept(self.m, self.slope)
            self.floor = 0

    comptime parts = 3 if Self.exact else 2
    """Numbers that a scale is made of, but for the maximum."""

    @inline(.always)
    def __init__(
        out self, m: Self.Values, parts: Array[Self.Values, Self.parts]
    ):
        """The scale of maximum `m` as it was found before.

        Args:
            m: The maximum.
            parts: What `part` returned.
        """
        self.m = m.eq(neg_inf[DType.float32]()).select(Self.Values(0), m)
        self.offset = parts[0] if Self.exact else Self.Values(0)
        self.slope = Self.Values(LOG2_E) if Self.exact else parts[0]
        self.intercept = parts[1]
        self.floor = parts[Self.parts - 1] if Self.exact else Self.Values(0)

    @inline(.always)
    def part[i: Int](self) -> Self.Values:
        """Returns one of the numbers that it is made of."""
        comptime if i == 0:
            return self.offset if Self.exact else self.slope
        elif i == 1:
            return self.intercept
        else:
            return self.floor

    @inline(.always)
    def exp[
        lanes: SIMDLength, //
    ](self, x: SIMD[DType.float32, lanes]) -> SIMD[DType.float32, lanes]:
        """Returns e^x in the unit.

        Parameters:
            lanes: As many as there are scales, or any number for a single scale.

        Args:
            x: Values up to m, or -inf. NaN and inf give anything: a row's maximum tells that they are there.

        Returns:
            The value; less than 2^-124 where it is to be 0.
        """
        var intercept = _spread[lanes](self.intercept)
        comptime if not Self.exact:
            return exp2(x.fma(_spread[lanes](self.slope), intercept))
        var below = max(
            x - _spread[lanes](self.offset), _spread[lanes](self.floor)
        )
        var shifted, f = _binary(below, intercept)
        # The integer part is in the lowest bits of `shifted`, and goes to the exponent.
        return bitcast[DType.float32](
            bitcast[DType.int32](_exp2(f))
            + (bitcast[DType.int32](shifted) << 23)
        )

    @inline(.always)
    def quick(self, x: SIMD[DType.float32, _]) -> type_of(x):
        """Returns e^x · (1 + c·(m - x)) / `quick_factor`, c = 1.3e-8, in the unit: what `exp` does, where exact in seven operations less, six of them
        those of a polynomial, for which the GPU has an instruction with a relative error of 2^-22.

        Args:
            x: As of `exp`.
        """
        comptime if Self.exact:
            comptime lanes = x.length
            var intercept = _spread[lanes](self.intercept)
            var below = max(
                x - _spread[lanes](self.offset), _spread[lanes](self.floor)
            )
            var shifted = below.fma(LOG2_E, intercept)
            var f = below.fma(LOG2_E, intercept - shifted)
            return bitcast[DType.float32](
                bitcast[DType.int32](exp2(f))
                + (bitcast[DType.int32](shifted) << 23)
            )
        else:
            return self.exp(x)

    @inline(.always)
    def quick_factor(self) -> Self.Values:
        """Returns what results of `quick` are to be multiplied by to be in the unit.
        """
        comptime if Self.exact:
            # By what the rounded log2 e is too small, at the maximum.
            return (self.m - self.offset).fma(
                Self.Values(1.33497575e-8), Self.Values(1)
            )
        else:
            return 1

    @inline(.always)
    def over(self, larger: Self) -> Self.Values:
        """Returns this unit in terms of that of a maximum that is not smaller.
        """
        comptime if Self.exact:
            return Unit(self.m).over(Unit(larger.m))
        # Where slopes differ, one of the two is nothing beside the other.
        var factor = self.slope.eq(larger.slope).select(
            exp2(larger.intercept - self.intercept), Self.Values(0)
        )
        return self.m.eq(larger.m).select(Self.Values(1), factor)

    @inline(.always)
    def of_part(self, m: Self.Values) -> Self.Values:
        """Returns the unit of a maximum that is not larger in terms of this one: what `over` says, but where not exact in fewer operations than its scale takes, and where
        `steep` 0 instead of what is less than 2^-31.

        Args:
            m: The other maximum, of a part of the row; of -inf anything comes out.
        """
        comptime if Self.exact:
            return Scale[Self.exact, Self.width, Self.sums](m).over(self)
        var same = m.eq(self.m).select(Self.Values(1), Self.Values(0))
        return self.steep().select(same, self.of_part_of_most(m))

    @inline(.always)
    def steep(self) -> SIMD[DType.bool, Self.width]:
        """Returns whether the maximum is so large that of smaller ones nothing is left, where not exact; or NaN.
        """
        return ~abs(self.m).lt(Self.least_steep)

    @inline(.always)
    def is_usual(self, m: Self.Values) -> SIMD[DType.bool, Self.width]:
        """Returns whether `of_part_of_most` may be asked of a part: where maxima are not large, for results of more than 16 bits not above 64.

        Args:
            m: As of `of_part`.
        """
        comptime if not Self.exact:
            return ~self.steep()
        return abs(self.m).le(SMALL) & (
            m.ge(-SMALL) | m.eq(neg_inf[DType.float32]())
        )

    @inline(.always)
    def of_part_of_most(self, m: Self.Values) -> Self.Values:
        """Returns what `of_part` does, with the same bits in fewer operations, where `is_usual`; and 0 of -inf.

        Args:
            m: As of `of_part`.
        """
        comptime if Self.exact:
            # Both units are powers of two, whose exponents are in the lowest bits.
            comptime rounder = Self.Values(_rounder[DType.float32]())
            var row = self.m.fma(LOG2_E, rounder)
            # 0 where it is no normal number.
            var part = max(m.fma(LOG2_E, rounder), row - 127)
            var exponent = bitcast[DType.int32](part) - bitcast[DType.int32](
                row
            )
            return bitcast[DType.float32]((exponent + 127) << 23)
        return exp2(self.intercept - self._intercept(m, LOG2_E))

    @staticmethod
    @inline(.always)
    def _intercept(m: Self.Values, slope: Self.Values) -> Self.Values:
        """Returns what is added to products with a slope, where not exact. What is rounded off here is a factor common to all of the row.
        """
        return (-m).fma(slope, Self.Values(HEADROOM))

    @inline(.always)
    def over_lowered(self, larger: Self) -> Self.Values:
        """Returns this unit in terms of the lowered one of a maximum that is not smaller.
        """
        comptime assert Self.exact
        return Unit(self.m).over(Unit(larger.m).lowered())


struct QuickScale(TrivialRegisterPassable):
    """Exponentials in float32 of two operations: e^(x - m), where m is the largest x, times a factor that all of them share.

    The product x·log2 e is not rounded before a constant near m·log2 e is subtracted; what that constant differs by is the factor.
    The relative error is below 2^-22 + 2^-23 · |x - m|, and 2^-19 more where |m| is above 2^24: enough for a sum that only its
    logarithm is needed of.
    """

    var slope: Float32
    """What x is multiplied by: log2 e, or a power of two where m is so large that of the others nothing is left."""
    var intercept: Float32
    """What is added to the product."""

    @inline(.always)
    def __init__(out self, m: Float32):
        """The scale of maximum `m`; any if it is -inf."""
        # Numbers that are this large are 32 or more apart, and the exponent that is left of m at most as much.
        comptime large = Float32(1 << 29)
        comptime huge = bitcast[DType.float32](UInt32((127 + 100) << 23))
        comptime tiny = bitcast[DType.float32](UInt32((127 - 60) << 23))
        var size = abs(m)
        var slope = LOG2_E
        if not size < large and m != neg_inf[DType.float32]():
            slope = Float32(4) if size < huge else tiny
        self.slope = slope
        self.intercept = Float32(0) if m == neg_inf[DType.float32]() else -(
            m * slope
        )

    @inline(.always)
    def exponent[
        width: SIMDLength, //
    ](self, x: SIMD[DType.float32, width]) -> SIMD[DType.float32, width]:
        """Returns the binary logarithm of `exp`."""
        return x.fma(
            SIMD[DType.float32, width](self.slope),
            SIMD[DType.float32, width](self.intercept),
        )

    @inline(.always)
    def exp[
        width: SIMDLength, //
    ](self, x: SIMD[DType.float32, width]) -> SIMD[DType.float32, width]:
        """Returns e^(x - m) times the factor.

        Parameters:
            width: How many.

        Args:
            x: Values up to m, -inf or NaN. Where m is inf or NaN, NaN may come out.
        """
        return exp2(self.exponent(x))


@inline(.always)
def quick_exp[
    width: SIMDLength, //
](x: SIMD[DType.float32, width], m: Float32) -> SIMD[DType.float32, width]:
    """Returns e^(x - m) in three operations, relative error below 2^-22 + 2^-23 · |x - m|: enough for a sum that only its
    logarithm is needed of.

    Parameters:
        width: How many.

    Args:
        x: Values up to m, -inf or NaN.
        m: A finite number; with another one, or NaN, NaN may come out.
    """
    return exp2((x - m) * LOG2_E)


@inline(.always)
def quotient[
    width: SIMDLength, //
](a: SIMD[DType.float32, width], b: SIMD[DType.float32, width]) -> SIMD[
    DType.float32, width
]:
    """Returns a / b, where there are several to two units in the last place.

    A division rounded correctly is a function call on NVIDIA GPUs: some in a row spill what a thread has in registers.
    (One does good: the assembler does not look across it for exponentials that it could keep.)
    """
    comptime if is_nvidia_gpu() and width > 1:
        var result = SIMD[DType.float32, width]()
        comptime for i in range(Int(width)):
            result[i] = inlined_assembly[
                "div.full.f32 $0, $1, $2;",
                Float32,
                constraints="=f,f,f",
                has_side_effect=False,
            ](a[i], b[i])
        return result
    else:
        return a / b


@inline(.always)
def _near_reciprocal[
    width: SIMDLength, //
](x: SIMD[DType.float32, width]) -> SIMD[DType.float32, width]:
    """Returns 1 / x to a unit in the last place, of numbers up to 2^126: in one operation, where a division takes ten, and a branch.
    """
    comptime if is_nvidia_gpu():
        var result = x
        comptime for i in range(Int(width)):
            result[i] = inlined_assembly[
                "rcp.approx.ftz.f32 $0, $1;",
                Float32,
                constraints="=f,f",
                has_side_effect=False,
            ](x[i])
        return result
    else:
        return 1 / x


@inline(.always)
def _spread[
    width: SIMDLength, //, lanes: SIMDLength
](values: SIMD[DType.float32, width]) -> SIMD[DType.float32, lanes]:
    """Returns one value in each of `lanes` lanes, or as many as there are lanes as they are.
    """
    comptime if width == 1:
        return values[0]
    else:
        return rebind[SIMD[DType.float32, lanes]](values)


@inline(.always)
def _rounder[dtype: DType]() -> Scalar[dtype]:
    """Returns 1.5 · 2^mantissa: adding it leaves the integer part of a sum in its lowest bits.
    """
    return Scalar[dtype](1.5) * Scalar[dtype](
        1 << 23 if dtype == DType.float32 else 1 << 52
    )


@inline(.always)
def logarithm[
    dtype: DType, width: SIMDLength, //
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns ln x to two units in the last place; 0 for 1.

    2^k · f with f from 1/√2 to √2, whose logarithm is 2 artanh((f - 1) / (f + 1)).

    Parameters:
        dtype: DType.float32 or DType.float64 only.
        width: Lanes.

    Args:
        x: Normal numbers, or NaN.

    Returns:
        The value; NaN where x is NaN.
    """
    comptime assert dtype == DType.float32 or dtype == DType.float64
    comptime single = dtype == DType.float32
    comptime bits = DType.int32 if single else DType.int64
    comptime mantissa = 23 if single else 52
    comptime V = SIMD[dtype, width]
    comptime I = SIMD[bits, width]
    # The first has few enough bits that k times it is exact.
    comptime ln2_high = Scalar[dtype](0.693145751953125)
    comptime ln2_low = Scalar[dtype](1.428606820309417e-06)
    # The first omitted term is below half a unit in the last place: z^2 is at most 0.0295.
    comptime terms = 5 if single else 11
    var one = bitcast[bits](V(1))
    # The bits of √½, rounded down, come out with the exponent of 1.
    comptime half_root = 0x3F3504F3 if single else 0x3FE6A09E667F3BCC
    var all = bitcast[bits](x) + (one - I(half_root))
    var k = (all >> I(mantissa)) - (one >> I(mantissa))
    var f = bitcast[dtype]((all & I((1 << mantissa) - 1)) + I(half_root))
    var z = (f - 1) / (f + 1)
    var square = z * z
    var tail = V(0)
    comptime for i in reversed(range(1, terms)):
        tail = tail.fma(square, V(Scalar[dtype](2) / Scalar[dtype](2 * i + 1)))
    var exponent = k.cast[dtype]()
    var small = (tail * square).fma(z, exponent * ln2_low) + 2 * z
    return x.eq(x).select(exponent.fma(ln2_high, small), x)


def inverse_factorial(k: Int) -> Float64:
    """Returns 1 / k!, for use at compile time."""
    var product = Float64(1)
    for i in range(2, k + 1):
        product *= Float64(i)
    return 1 / product
