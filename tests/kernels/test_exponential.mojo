"""The exponential against the standard library's in float64, over the floats it is made for."""

from std.math import exp
from std.memory import bitcast
from std.testing import TestSuite, assert_equal, assert_true
from std.utils.numerics import isnan, nan, neg_inf

from maxsoftmax.exponential import exp_nonpositive

comptime WIDTH = 16
comptime FLOATS = 0x42AEAC08
"""The bits of 87.336, and so how many float32 there are from 0 to there."""


def largest_error[stride: Int]() -> Float64:
    """Returns the largest relative error over every stride-th float32 from -0 to -87.336.
    """
    var worst = SIMD[DType.float64, WIDTH](0)
    for i in range(0, FLOATS - WIDTH * stride, WIDTH * stride):
        var bits = SIMD[DType.uint32, WIDTH](0)
        comptime for j in range(WIDTH):
            bits[j] = UInt32(0x80000000 + i + j * stride)
        var x = bitcast[DType.float32](bits)
        var reference = exp(x.cast[DType.float64]())
        var error = abs(
            exp_nonpositive(x).cast[DType.float64]() / reference - 1
        )
        worst = max(worst, error)
    return worst.reduce_max()


def test_relative_error_of_float32() raises:
    var worst = largest_error[1021]()
    assert_true(worst < 1e-7, String(worst))
    # A test that measured nothing would see no rounding at all.
    assert_true(worst > 1e-8, String(worst))


def test_float64_satisfies_its_functional_equation() raises:
    # exp(2x) = exp(x)² holds to a few roundings, without trusting another exponential.
    var worst = Float64(0)
    for i in range(1, 300_000):
        var x = -Float64(i) / 1000
        var square = exp_nonpositive(x) * exp_nonpositive(x)
        worst = max(worst, abs(exp_nonpositive(2 * x) / square - 1))
    assert_true(worst < 1e-15, String(worst))
    var e = exp_nonpositive(Float64(-1))
    assert_true(abs(e - 0.36787944117144233) < 1e-16, String(e))


def check_special_values[dtype: DType]() raises:
    assert_equal(exp_nonpositive(Scalar[dtype](0)), 1)
    assert_equal(exp_nonpositive(Scalar[dtype](-0.0)), 1)
    assert_equal(exp_nonpositive(neg_inf[dtype]()), 0)
    assert_equal(exp_nonpositive(Scalar[dtype].MIN_FINITE), 0)
    assert_equal(exp_nonpositive(Scalar[dtype](-1e-30)), 1)
    assert_true(isnan(exp_nonpositive(nan[dtype]())))


def test_special_values() raises:
    check_special_values[DType.float32]()
    check_special_values[DType.float64]()


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
