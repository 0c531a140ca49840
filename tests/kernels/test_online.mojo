"""The (max, sum) pair: it merges in any grouping, and special values pass through it."""

from std.math import exp
from std.testing import TestSuite, assert_equal, assert_true
from std.utils.numerics import inf, isnan, nan, neg_inf

from maxsoftmax.math.online import MaxSum, Sum

comptime Pair = MaxSum[DType.float32, 1]


def pair(*values: Float32) -> Pair:
    var result = Pair()
    for value in values:
        result.add(Array[Float32, 1](fill=value))
    return result


def check_same(a: Pair, b: Pair) raises:
    assert_equal(a.m, b.m)
    assert_true(
        abs(a.d.value - b.d.value) <= 2e-7 * b.d.value,
        String(t"{a.d.value}, not {b.d.value}"),
    )


def test_probabilities() raises:
    var normalizer = pair(1, 3, 2, -50).normalizer()
    var d = 1 + exp(Float64(-1)) + exp(Float64(-2))
    for x in [Float32(1), 3, 2, -50]:
        var expected = exp(x.cast[DType.float64]() - 3) / d
        var p = normalizer.probability(x).cast[DType.float64]()
        assert_true(abs(p / expected - 1) < 2e-7, String(p))


def test_one_by_one_or_all_at_once() raises:
    var four: Array[Float32, 4] = [1, 3, 2, -50]
    var at_once = Pair()
    at_once.add(four)
    check_same(at_once, pair(1, 3, 2, -50))


def test_merging_two_parts_is_adding_all() raises:
    for offset in [Float32(0), -40, -70, 62, 500, -1e10]:
        var merged = pair(offset + 1, offset + 3)
        merged.merge(pair(offset + 2, offset - 50))
        check_same(
            merged, pair(offset + 1, offset + 3, offset + 2, offset - 50)
        )


def test_nothing_is_the_identity() raises:
    for x in [Float32(3), -80, 80, -3e38, 3e38]:
        var left = Pair()
        left.merge(pair(x))
        check_same(left, pair(x))
        var right = pair(x)
        right.merge(Pair())
        check_same(right, pair(x))


def test_lanes_collapse_to_their_row() raises:
    var lanes = MaxSum[DType.float32, 4]()
    lanes.add(
        Array[SIMD[DType.float32, 4], 1](
            fill=SIMD[DType.float32, 4](1, 3, 2, -50)
        )
    )
    check_same(lanes.collapse(), pair(1, 3, 2, -50))


def test_results_too_small_for_a_normal_number() raises:
    var normalizer = pair(0, -100, -103.9, -104.5).normalizer()
    assert_equal(normalizer.probability(Float32(-100)), 3.783506e-44)
    assert_equal(normalizer.probability(Float32(-103.2)), 1.4012985e-45)
    assert_equal(normalizer.probability(Float32(-104.5)), 0)


def test_sums_collapse_without_loss() raises:
    var lanes = Sum(
        SIMD[DType.float32, 8](1, 6e-8, 6e-8, 6e-8, 6e-8, 6e-8, 6e-8, 6e-8)
    )
    assert_true(abs(lanes.collapse().value - (1 + 4.2e-7)) < 1.2e-7)


def test_a_row_of_one_is_exactly_one() raises:
    for i in range(-1000, 1000):
        var x = Float32(i) * 0.137
        assert_equal(pair(x).normalizer().probability(x), 1)


def test_minus_infinity_adds_nothing_and_alone_gives_nan() raises:
    var none = neg_inf[DType.float32]()
    check_same(pair(none, 2, none), pair(2))
    assert_equal(pair(none, 2).normalizer().probability(none), 0)
    var empty = pair(none, none)
    assert_equal(empty.d.value, 0)
    assert_true(isnan(empty.normalizer().probability(none)))
    empty.merge(pair(2))
    check_same(empty, pair(2))


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
