"""Tests of how much of what MAX fuses into an op can be read at a time."""

from std.testing import TestSuite, assert_equal
from std.utils import IndexList

from maxsoftmax.io.fusion import alignment
from maxsoftmax.io.rows import Source


@fieldwise_init
struct Fused[second: DType](TrivialRegisterPassable):
    """Two tensors, as MAX hands them over."""

    var a: Source[DType.float32]
    var a_shape: IndexList[2]
    var a_strides: IndexList[2]
    var b: Source[Self.second]
    var b_shape: IndexList[2]
    var b_strides: IndexList[2]


@fieldwise_init
struct Other(TrivialRegisterPassable):
    """Something else."""

    var number: Float32


comptime PLACE = 1 << 20


def of[
    second: DType = DType.float32
](
    n: Int,
    second_strides: IndexList[2],
    place: Int = PLACE,
    first_stride: Int = 0,
) -> Int:
    """Returns the alignment of a row-major tensor of 5 rows of `n`, and another one beside it.
    """
    var shape = IndexList[2](5, n)
    return alignment(
        Fused[second](
            Source[DType.float32](unsafe_from_address=place),
            shape,
            {first_stride if first_stride else n, 1},
            Source[second](unsafe_from_address=PLACE),
            shape,
            second_strides,
        ),
        shape,
    )


def test_tensors_that_lie_as_the_ops_own_are_read_at_a_time() raises:
    for n in [64, 67, 1001]:
        assert_equal(of(n, {n, 1}), 16)


def test_what_is_the_same_along_the_last_axis_is_read_alone() raises:
    assert_equal(of(67, {1, 0}), 16)
    assert_equal(of(67, {0, 0}), 16)
    assert_equal(of(67, {1, 5}), 16)


def test_what_is_the_same_in_all_rows_is_not_where_the_ops_own_is() raises:
    assert_equal(of(67, {0, 1}), 1)
    assert_equal(of(68, {0, 1}), 4)
    assert_equal(of(128, {0, 1}), 16)


def test_bools_are_read_one_by_one() raises:
    assert_equal(of[DType.bool](67, {0, 1}), 16)


def test_slices_are_as_far_apart_as_the_tensor_they_are_of() raises:
    assert_equal(of(64, {64, 1}, first_stride=67), 1)
    assert_equal(of(64, {64, 1}, first_stride=66), 2)
    assert_equal(of(64, {64, 1}, place=PLACE + 4), 1)
    assert_equal(of(64, {64, 1}, place=PLACE + 32), 4)


def test_of_one_row_no_distance_counts() raises:
    var shape = IndexList[2](1, 67)
    var x = Source[DType.float32](unsafe_from_address=PLACE)
    var fused = Fused[DType.float32](x, shape, {67, 1}, x, shape, {0, 1})
    assert_equal(alignment(fused, shape), 16)


def test_where_nothing_is_seen_whole_vectors_are_taken_for_aligned() raises:
    for pair in [(67, 1), (68, 4), (1024, 128)]:
        assert_equal(alignment(Other(0), IndexList[2](5, pair[0])), pair[1])


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
