"""The exponential of arguments that are never positive, the only ones a softmax needs."""

from std.memory import bitcast


@inline(.always)
def exp_nonpositive[
    dtype: DType, width: SIMDLength, //
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns e^x for x ≤ 0, relative error below 1e-7 (float32) or 2.3e-16 (float64).

    Cody and Waite's reduction: x = k·ln 2 + r with |r| ≤ ln 2 / 2, then e^x = 2^k · e^r, where e^r is its Taylor
    series about 0. The integer k is read off the low mantissa bits of a sum instead of converted, so that NaN passes
    through without undefined conversions.

    Parameters:
        dtype: DType.float32 or DType.float64 only.
        width: Lanes.

    Args:
        x: Arguments, each ≤ 0, -inf or NaN.

    Returns:
        The value e^x; 0 where e^x is below the smallest normal number (-inf included); NaN where x is NaN.
    """
    comptime assert dtype == DType.float32 or dtype == DType.float64
    comptime single = dtype == DType.float32
    comptime bits = DType.int32 if single else DType.int64
    comptime mantissa = 23 if single else 52
    comptime bias = 127 if single else 1023
    # Adding 1.5 · 2^mantissa leaves the sum's integer part in its lowest bits.
    comptime rounder = Scalar[dtype](1.5) * Scalar[dtype](1 << mantissa)
    comptime log2_e = Scalar[dtype](1.4426950408889634)
    # ln 2 in two parts; the first has few enough bits that k times it is exact.
    comptime ln2_high = Scalar[dtype](0.693145751953125)
    comptime ln2_low = Scalar[dtype](1.428606820309417e-06)
    # ln(smallest normal number), rounded towards zero.
    comptime lowest = Scalar[dtype](-87.33654 if single else -708.3964185322641)
    # The first omitted term is below half a unit in the last place.
    comptime degree = 7 if single else 13

    var shifted = x.fma(log2_e, rounder)
    var k = shifted - rounder
    var r = k.fma(-ln2_low, k.fma(-ln2_high, x))
    comptime leading = Scalar[dtype](inverse_factorial(degree))
    var tail = SIMD[dtype, width](leading)
    comptime for i in reversed(range(2, degree)):
        comptime coefficient = Scalar[dtype](inverse_factorial(i))
        tail = tail.fma(r, SIMD[dtype, width](coefficient))
    var e_r = (r * r).fma(tail, r) + 1
    var two_k = bitcast[dtype](
        (bitcast[bits](shifted) << SIMD[bits, width](mantissa))
        + SIMD[bits, width](bias << mantissa)
    )
    return x.lt(lowest).select(SIMD[dtype, width](0), e_r * two_k)


def inverse_factorial(k: Int) -> Float64:
    """Returns 1 / k!, for use at compile time."""
    var product = Float64(1)
    for i in range(2, k + 1):
        product *= Float64(i)
    return 1 / product
