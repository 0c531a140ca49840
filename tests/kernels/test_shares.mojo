"""Tests of how work is shared out to the cores of a CPU."""

from std.atomic import Atomic
from std.testing import TestSuite, assert_equal
from max.gpu.host import DeviceContext

from maxsoftmax.cpu.shares import NUMBERS, Shares, share_tasks
from maxsoftmax.cpu.tuning import GRAIN


def test_every_task_is_done_once() raises:
    var ctx = DeviceContext(api="cpu")
    for count in [0, 1, 2, 3, 15, 16, 17, 100, 4099]:
        for elements in [0, 1, GRAIN, GRAIN + 1, 2 * GRAIN, 300 * GRAIN]:
            var done = List[Int64](length=count + 1, fill=0)
            var at = done.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()

            @inline(.always)
            def task(i: Int) {imm}:
                _ = Atomic.fetch_add(at.unsafe_offset(i), 1)

            share_tasks(task, count, elements, ctx)
            for i in range(count):
                assert_equal(done[i], 1)
            assert_equal(done[count], 0)


def shares_of(
    count: Int, shares: Int, workers: Int, taken: List[Int64]
) -> Shares:
    return {
        count,
        shares,
        workers,
        taken.unsafe_ptr()
        .unsafe_mut_cast[True]()
        .unsafe_origin_cast[MutUntrackedOrigin](),
    }


def test_a_core_goes_through_neighbours_then_takes_what_others_leave() raises:
    var taken = List[Int64](length=2 * NUMBERS, fill=0)
    var shares = shares_of(10, 4, 2, taken)
    var seen = List[Int]()
    for i in shares.of(0):
        seen.append(i)
        if i == 2:
            # Another core takes the second share, and the third.
            shares.taken[] += 1
            shares.taken[unsafe_offset=NUMBERS] += 1
    assert_equal(seen, [0, 1, 2, 8, 9])
    _ = taken^


def test_the_last_core_begins_with_its_own() raises:
    var taken = List[Int64](length=3 * NUMBERS, fill=0)
    var seen = List[Int]()
    for i in shares_of(7, 7, 3, taken).of(2):
        seen.append(i)
    assert_equal(seen, [4, 5, 6, 0, 1, 2, 3])
    _ = taken^


def test_more_tasks_than_any_memory_holds() raises:
    var taken: List[Int64] = [(1 << 40) - 1]
    var last = shares_of(1 << 60, 1 << 40, 1, taken)
    assert_equal(last.__next__(), (1 << 60) - (1 << 20))
    assert_equal(last.end, 1 << 60)
    _ = taken^


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
