"""Exponentials in units, against the standard library's in float64."""

from std.math import exp, exp2
from std.memory import bitcast
from std.testing import TestSuite, assert_equal, assert_true
from std.utils.numerics import inf, isnan, nan, neg_inf

from maxsoftmax.math.exponential import HEADROOM, QuickScale, Scale, Unit

comptime WIDTH = 16
comptime ROOM = Float64(1 << (HEADROOM // 2)) * Float64(1 << (HEADROOM // 2))
"""What e^0 is in the unit of a row whose maximum is 0."""

comptime FLOATS = 0x42AEAC08
"""The bits of 87.336, and so how many float32 there are from 0 to there."""


def test_relative_error_over_the_range_of_float32() raises:
    comptime stride = 1021
    var unit = Unit(Float32(0))
    var worst = SIMD[DType.float64, WIDTH](0)
    for i in range(0, FLOATS - WIDTH * stride, WIDTH * stride):
        var bits = SIMD[DType.uint32, WIDTH](0)
        comptime for j in range(WIDTH):
            bits[j] = UInt32(0x80000000 + i + j * stride)
        var x = bitcast[DType.float32](bits)
        var reference = exp(x.cast[DType.float64]())
        var e_x = unit.exp(x).cast[DType.float64]() / ROOM
        var error = abs(e_x / reference - 1)
        worst = max(worst, error)
    assert_true(worst.reduce_max() < 1e-7, String(worst))
    # A test that measured nothing would see no rounding at all.
    assert_true(worst.reduce_max() > 1e-8, String(worst))


def test_the_error_does_not_grow_with_the_distance() raises:
    var worst = Float64(0)
    for i in range(400):
        var m = Float32(i - 200) * 0.317
        var unit = Unit(m)
        for j in range(400):
            var x = m - Float32(j) * 0.173
            var ratio = (
                unit.exp(x).cast[DType.float64]()
                / unit.exp(m).cast[DType.float64]()
            )
            var reference = exp(
                x.cast[DType.float64]() - m.cast[DType.float64]()
            )
            worst = max(worst, abs(ratio / reference - 1))
    assert_true(worst < 2e-7, String(worst))


def test_quick_exponentials_of_maxima_of_any_size() raises:
    var worst = Float64(0)
    for power in range(-126, 128):
        for sign in [Float32(-1), 1]:
            var m = sign * bitcast[DType.float32](UInt32((power + 127) << 23))
            m *= 1.7
            var scale = QuickScale(m)
            var common = scale.exponent(m).cast[DType.float64]()
            for j in range(200):
                # Numbers far from the maximum, and its next neighbours, which may be far as well.
                var x = m - Float32(j) * 0.0731
                if j >= 150:
                    x = bitcast[DType.float32](
                        bitcast[DType.uint32](m)
                        + UInt32(j - 150) * UInt32(1 if m < 0 else -1)
                    )
                var distance = x.cast[DType.float64]() - m.cast[DType.float64]()
                # By float64: the GPU's `exp2` is not this one.
                var found = exp2(
                    max(scale.exponent(x).cast[DType.float64]() - common, -1000)
                )
                # What is less than 2^-40 of the largest is lost in any sum.
                var error = abs(found - exp(distance))
                if exp(distance) > 1e-12:
                    error /= exp(distance) * (1 - distance / 2)
                worst = max(worst, error)
            assert_equal(
                scale.exponent(neg_inf[DType.float32]()),
                neg_inf[DType.float32](),
            )
    assert_true(worst < 2.4e-6, String(worst))
    assert_true(worst > 1e-8, String(worst))
    # Nothing yet but -inf.
    var nothing = QuickScale(neg_inf[DType.float32]())
    assert_equal(
        nothing.exponent(neg_inf[DType.float32]()), neg_inf[DType.float32]()
    )
    assert_equal(nothing.exponent(Float32(0)), 0)
    var not_a_number = QuickScale(nan[DType.float32]())
    assert_true(isnan(not_a_number.exponent(Float32(1))))
    var infinite = QuickScale(inf[DType.float32]())
    assert_true(isnan(infinite.exponent(inf[DType.float32]())))


def test_the_largest_is_about_one_in_its_unit() raises:
    for m in [Float32(0), -1, 1, 63.9, 64, -64, 64.1, -88, 1e10, -3e38, 3e38]:
        var largest = Unit(m).exp(m) / Float32(ROOM)
        assert_true(largest > 0.707 and largest < 1.4143, String(m))
        assert_equal(Unit(m).exp(neg_inf[DType.float32]()), 0)


def test_units_convert_into_larger_ones() raises:
    for small in [Float32(-200), -65, -64, -3, 0, 50, 64, 64.5, 70]:
        for step in [Float32(0), 0.4, 1, 5, 40]:
            var larger = Unit(small + step)
            var direct = larger.exp(small)
            var converted = Unit(small).exp(small) * Unit(small).over(larger)
            assert_true(
                abs(converted / direct - 1) < 3e-7,
                String(t"{small} + {step}: {converted} and {direct}"),
            )


def test_a_part_s_unit_is_what_its_own_scale_says() raises:
    comptime for sums in [False, True]:
        comptime S = Scale[False, sums=sums]
        for power in range(-20, 128):
            for sign in [Float32(-1), 1]:
                var m = sign * bitcast[DType.float32](
                    UInt32((power + 127) << 23)
                )
                var row = S(m)
                # The same, its next neighbour, some that are less, and the largest of the other sign.
                var next = bitcast[DType.float32](
                    bitcast[DType.uint32](m) + UInt32(1 if m < 0 else -1)
                )
                # A CPU's `exp2` does not get to 0.
                comptime least = Float32(1.1754944e-38)
                for part in [m, next, m - 0.7, m - 30, min(m, -3e38), -abs(m)]:
                    var found = max(row.of_part(part), least)
                    var scale = max(S(part).over(row), least)
                    assert_equal(found, scale, String(t"{m} {part}"))
                    if not row.steep()[0]:
                        assert_equal(
                            max(row.of_part_of_most(part), least), found
                        )
                if not row.steep()[0]:
                    assert_true(
                        row.of_part_of_most(neg_inf[DType.float32]()) <= least
                    )
                # Of smaller ones next to nothing is left, however large they are.
                assert_true(row.of_part(next) <= least or abs(m) < 1 << 29)


def test_a_part_s_unit_is_found_faster_where_both_are_powers_of_two() raises:
    comptime S = Scale[True]
    for i in range(-640, 641, 7):
        var row = S(Float32(i) / 10)
        for j in range(-640, i + 1):
            var part = Float32(j) / 10
            assert_true(row.is_usual(part)[0])
            assert_equal(
                row.of_part_of_most(part),
                row.of_part(part),
                String(t"{row.m} {part}"),
            )
        assert_true(row.is_usual(neg_inf[DType.float32]())[0])
        assert_equal(row.of_part_of_most(neg_inf[DType.float32]()), 0)
        assert_true(not row.is_usual(-64.1)[0])
    for m in [Float32(64.1), inf[DType.float32](), nan[DType.float32]()]:
        assert_true(not S(m).is_usual(0)[0])


def test_lowered_units_have_room_for_those_whose_results_are_subnormal() raises:
    for step in [Float32(0), 1, 40, 87, 90, 100, 104]:
        for large in [Float32(-100), 0, 19, 64, 65]:
            var small = large - step
            var row = Unit(large)
            var rest = Unit(small).over(row.lowered())
            var e = Unit(small).exp(small) * rest / (1 << 32)
            assert_true(rest > 1e-37, String(t"{large} - {step}"))
            # Both are normal numbers, and only in float64 is their quotient one.
            var ratio = (
                e.cast[DType.float64]() / row.exp(large).cast[DType.float64]()
            )
            assert_true(
                abs(ratio / exp(-step.cast[DType.float64]()) - 1) < 4e-7,
                String(t"{large} - {step}: {ratio}"),
            )


def test_float64_satisfies_its_functional_equation() raises:
    # exp(2x) = exp(x)² holds to a few roundings, without trusting another exponential.
    var unit = Unit(Float64(0))
    var worst = Float64(0)
    for i in range(1, 300_000):
        var x = -Float64(i) / 1000
        var square = unit.exp(x) / ROOM * unit.exp(x) / ROOM
        worst = max(worst, abs(unit.exp(2 * x) / ROOM / square - 1))
    assert_true(worst < 1e-15, String(worst))
    var e = unit.exp(Float64(-1)) / ROOM
    assert_true(abs(e - 0.36787944117144233) < 1e-16, String(e))


def check_special_values[dtype: DType]() raises:
    var unit = Unit(Scalar[dtype](0))
    var one = ROOM.cast[dtype]()
    assert_equal(unit.exp(Scalar[dtype](0)), one)
    assert_equal(unit.exp(Scalar[dtype](-0.0)), one)
    assert_equal(unit.exp(Scalar[dtype](-1e-30)), one)
    assert_equal(unit.exp(neg_inf[dtype]()), 0)
    assert_equal(unit.exp(Scalar[dtype].MIN_FINITE), 0)
    assert_true(isnan(unit.exp(nan[dtype]())))
    var infinite = Unit(inf[dtype]())
    assert_true(isnan(infinite.exp(inf[dtype]())))
    assert_equal(infinite.exp(Scalar[dtype](1)), 0)


def test_special_values() raises:
    check_special_values[DType.float32]()
    check_special_values[DType.float64]()


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
