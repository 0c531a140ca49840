"""The (max, sum) pair: it merges in any grouping, and special values pass through it."""

from std.math import exp
from std.testing import TestSuite, assert_equal, assert_true
from std.utils.numerics import inf, isnan, nan, neg_inf

from maxsoftmax.online import MaxSum, Sum

comptime Pair = MaxSum[DType.float32, 1]


def pair(*values: Float32) -> Pair:
    var result = Pair()
    for value in values:
        result.add(Array[Float32, 1](fill=value))
    return result


def test_one_by_one_or_all_at_once() raises:
    var one_by_one = pair(1, 3, 2, -50)
    var at_once = Pair()
    var four: Array[Float32, 4] = [1, 3, 2, -50]
    at_once.add(four)
    assert_equal(one_by_one.m, 3)
    assert_equal(at_once.m, 3)
    var expected = Float32(1 + exp(Float64(-1)) + exp(Float64(-2)))
    assert_true(abs(one_by_one.d.value - expected) < 2e-7)
    assert_true(abs(at_once.d.value - expected) < 2e-7)


def test_merging_two_parts_is_adding_all() raises:
    var merged = pair(1, 3)
    merged.merge(pair(2, -50))
    assert_equal(merged.m, 3)
    assert_true(abs(merged.d.value - pair(1, 3, 2, -50).d.value) < 2e-7)


def test_nothing_is_the_identity() raises:
    var left = Pair()
    left.merge(pair(1, 3))
    var right = pair(1, 3)
    right.merge(Pair())
    assert_equal(left.m, 3)
    assert_equal(left.d.value, pair(1, 3).d.value)
    assert_equal(right.m, 3)
    assert_equal(right.d.value, pair(1, 3).d.value)


def test_lanes_collapse_to_their_row() raises:
    var lanes = MaxSum[DType.float32, 4]()
    lanes.add(
        Array[SIMD[DType.float32, 4], 1](
            fill=SIMD[DType.float32, 4](1, 3, 2, -50)
        )
    )
    assert_equal(lanes.collapse().m, 3)
    assert_true(
        abs(lanes.collapse().d.value - pair(1, 3, 2, -50).d.value) < 2e-7
    )


def test_minus_infinity_adds_nothing_and_alone_gives_nan() raises:
    var none = neg_inf[DType.float32]()
    assert_equal(pair(none, 2, none).d.value, 1)
    assert_equal(pair(none, 2).normalizer().probability(none), 0)
    var empty = pair(none, none)
    assert_equal(empty.d.value, 0)
    assert_true(isnan(empty.normalizer().probability(none)))
    empty.merge(pair(2))
    assert_equal(empty.d.value, 1)


def test_nan_and_infinity_poison() raises:
    for poison in [nan[DType.float32](), inf[DType.float32]()]:
        var merged = pair(1, 2)
        merged.merge(pair(poison))
        for p in [pair(poison, 1), pair(1, poison), pair(1, poison, 1), merged]:
            assert_true(isnan(p.normalizer().probability(Float32(1))))


def test_a_long_sum_loses_nothing() raises:
    var plain = Float32(0)
    var compensated = Sum[DType.float32, 1]()
    for _ in range(1 << 24):
        plain += 0.1
        compensated.add(0.1)
    var exact = Float64(Float32(0.1)) * (1 << 24)
    assert_true(abs(compensated.value.cast[DType.float64]() / exact - 1) < 1e-7)
    # What the compensation is for.
    assert_true(abs(plain.cast[DType.float64]() / exact - 1) > 1e-3)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
