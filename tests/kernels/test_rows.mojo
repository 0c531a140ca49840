"""Tests of how memory is divided into rows."""

from std.testing import TestSuite, assert_raises
from std.utils import IndexList

from maxsoftmax.io.rows import check_row_major


def test_row_major_memory_is_taken() raises:
    check_row_major(IndexList[3](2, 3, 4), IndexList[3](12, 4, 1))
    # Along a dimension of one element nobody steps.
    check_row_major(IndexList[3](2, 1, 4), IndexList[3](4, 99, 1))
    check_row_major(IndexList[1](5), IndexList[1](1))


def test_other_memory_is_refused() raises:
    with assert_raises(contains="contiguous"):
        check_row_major(IndexList[2](3, 4), IndexList[2](8, 1))
    with assert_raises(contains="contiguous"):
        check_row_major(IndexList[2](3, 4), IndexList[2](1, 3))
    with assert_raises(contains="contiguous"):
        check_row_major(IndexList[1](5), IndexList[1](2))


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
