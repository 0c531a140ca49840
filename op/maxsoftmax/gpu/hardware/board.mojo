"""What warps of a whole grid tell each other in the GPU's memory: what units of rows sum to.

A warp waits for what others leave there, so that all blocks have to be on the GPU at once: launches are cooperative. Nobody waits for ever. Where units are dealt out
in turn, a warp leaves all of its own before it waits. Where they are asked for, they are given out in the order of rows. Whoever waits for a row has left all that it
was given of that row and of those before, and all of that row has been given out, or will be: either the one that waits was given a unit behind the row, or it has left that, too, and
all that warps hold while they wait is no less than a row.

All of it is numbers that are read and written whole. Of a pair, 0 says that it is not there yet.
"""

from std.atomic import Atomic, Ordering
from std.bit import next_power_of_two
from std.math import align_up, ceildiv
from std.memory import bitcast
from std.sys import inlined_assembly, is_nvidia_gpu
from max.gpu import WARP_SIZE, block_idx, lane_id, thread_idx
from max.gpu.host.launch_attribute import (
    LaunchAttribute,
    LaunchAttributeID,
    LaunchAttributeValue,
)
from max.gpu.primitives import warp
from max.gpu.sync import syncwarp

from ...io.rows import Target, VECTOR_BYTES
from ...math.exponential import Scale
from ...queue import Queue
from .pair import Pair, empty_pair
from .pdl import pdl_attributes, pdl_wait_last
from .team import largest_of_lanes, maximum, total
from .warp_reduction import lanes_reduce

comptime GROUP = 160
"""Units whose pairs are merged before those of others, by whoever leaves the last of them: a row's bits follow from it."""

comptime LONG_GROUP = 2 * GROUP
"""The same of rows that the grid holds only a part of."""

comptime _CLEAR_SIZE = 256
"""Threads of a block that clears memory."""

comptime ASKED = 2
"""Words of 8 bytes for one number, as all are a multiple of two."""

comptime _Count = Atomic[UInt32, scope="device"]
comptime _Bits = Atomic[UInt64, scope="device"]

comptime Words = Target[DType.uint64]
"""The GPU's memory."""


def clear_kernel(memory: Words, count: Int64):
    """Writes zeros, two a thread."""
    var i = 2 * (Int(block_idx.x) * _CLEAR_SIZE + Int(thread_idx.x))
    pdl_wait_last()
    if i < Int(count):
        memory.unsafe_store[alignment=VECTOR_BYTES](i, SIMD[DType.uint64, 2](0))


def most_units(group: Int) -> Int:
    """Returns how many units the longest row has, if so many are a group: a lane looks at one group.
    """
    return group * WARP_SIZE


def clear(memory: Words, count: Int, queue: Queue) raises:
    """Enqueues what makes memory a board.

    Args:
        memory: Where it is.
        count: How many words it has, as its `size` says.
        queue: Where the kernel is launched.
    """
    queue.launch[clear_kernel](
        memory,
        Int64(count),
        grid_dim=ceildiv(count, 2 * _CLEAR_SIZE),
        block_dim=_CLEAR_SIZE,
        attributes=pdl_attributes(),
    )


def cooperative() -> List[LaunchAttribute]:
    """Returns the attributes of a launch of a kernel that uses a board: all blocks are on the GPU at once, or none.
    """
    var attributes = pdl_attributes()
    attributes.append(
        LaunchAttribute(
            LaunchAttributeID.COOPERATIVE, LaunchAttributeValue(True)
        )
    )
    return attributes^


@inline(.always)
def ask(asked: Target[DType.uint32], thread: Int) -> UInt32:
    """Returns to the first thread how often others have asked before.

    Args:
        asked: Where it is counted.
        thread: This thread's index among those that ask together, the first of which is the first lane of its warp.
    """
    var before = UInt32(0)
    if thread == 0:
        # An address of the lane's own: else the assembler has one lane add for all that are there, and all wait for its answer at once.
        var place = asked.unsafe_offset(Int(lane_id()))
        before = _Count.fetch_add[ordering=Ordering.RELAXED](place, 1)
    return before


struct Board[group: Int](TrivialRegisterPassable):
    """What warps tell each other, in the GPU's memory.

    - `group`: Units whose pairs are merged before those of others.
    """

    var groups: Words
    """The pairs of groups of units."""
    var units: Words
    """The pairs of units."""
    var counts: Target[DType.uint32]
    """How many units of each group have been left."""
    var asked: Target[DType.uint32]
    """How often warps have asked for a unit."""
    var units_of_row: UInt32
    """How many units a row has."""
    var groups_of_row: UInt32
    """How many groups."""
    var readers: UInt32
    """`groups_of_row`, rounded up to a power of two: so many neighbouring lanes look at a row's groups."""

    @inline(.always)
    def __init__(out self, memory: Words, rows: Int, units: Int):
        """The board of so many rows of so many units, which `clear` has cleared.
        """
        var groups = ceildiv(units, Self.group)
        self.groups = memory
        self.units = self.groups.unsafe_offset(rows * groups)
        self.counts = self.units.unsafe_offset(rows * units).unsafe_bitcast[
            UInt32
        ]()
        self.asked = memory.unsafe_offset(
            Self.size(rows, units) - ASKED
        ).unsafe_bitcast[UInt32]()
        self.units_of_row = UInt32(units)
        self.groups_of_row = UInt32(groups)
        self.readers = UInt32(next_power_of_two(groups))

    @staticmethod
    def size(rows: Int, units: Int) -> Int:
        """Returns how many words of 8 bytes it has, a multiple of two."""
        var groups = ceildiv(units, Self.group)
        var counts = ceildiv(rows * groups, 2)
        return align_up(rows * (groups + units) + counts, 2) + ASKED

    @inline(.always)
    def row(self, id: UInt32) -> UInt32:
        """Returns which row a unit is of, counted through all of them."""
        return id // self.units_of_row

    @inline(.always)
    def seen(self, row: UInt32, lane: Int) -> UInt64:
        """Returns to each of `readers` neighbouring lanes the pair of one of a row's groups, 0 if it is not there yet.

        Args:
            row: The row.
            lane: This thread's index in its warp.
        """
        var bits = bits_of(empty_pair())
        var index = UInt32(lane) & (self.readers - 1)
        if index < self.groups_of_row:
            bits = _Bits.load[ordering=Ordering.RELAXED](
                self.groups.unsafe_offset(Int(row * self.groups_of_row + index))
            )
        return bits

    @inline(.always)
    def there(self, row: UInt32, var seen: UInt64, lane: Int) -> UInt64:
        """Returns what `seen` returns of a row, once all of its groups' pairs are there.

        Args:
            row: The row.
            seen: What `seen` returned.
            lane: This thread's index in its warp.
        """
        while seen == 0:
            sleep(64)
            seen = self.seen(row, lane)
        # The first lane may ask for a unit next, and must not while others still wait.
        syncwarp()
        return seen

    @inline(.always)
    def merged[exact: Bool, sums: Bool = False](self, there: UInt64) -> Pair[]:
        """Returns a row's pair.

        Parameters:
            exact: Of the scale that the sums are in.
            sums: Of this scale, too.

        Args:
            there: What the function of this name returned.
        """
        var pair = pairs_of(there)
        var m = largest_of_lanes[WARP_SIZE](pair.m)
        # As `lanes_reduce` does, which would add zeros first.
        var d = pair.sum_over(Scale[exact, sums=sums](m))
        var apart = self.readers // 2
        while apart > 0:
            d += warp.shuffle_xor(d, apart)
            apart //= 2
        return Pair(m, d)

    @inline(.always)
    def wait[
        exact: Bool, sums: Bool = False
    ](self, row: UInt32, lane: Int) -> Pair[]:
        """Returns a row's pair, once all of its groups' are there.

        Parameters:
            exact: Of the scale that the sums are in.
            sums: Of this scale, too.

        Args:
            row: The row.
            lane: This thread's index in its warp.
        """
        return self.merged[exact, sums](
            self.there(row, self.seen(row, lane), lane)
        )

    @inline(.always)
    def ask(self, lane: Int) -> UInt32:
        """Returns to the first lane how often warps have asked before.

        Args:
            lane: This thread's index in its warp.
        """
        return ask(self.asked, lane)

    @inline(.always)
    def leave(self, id: UInt32, pair: Pair[], lane: Int) -> UInt32:
        """Leaves a unit's pair, and returns to the first lane how many of its group have been left before.

        Args:
            id: The unit.
            pair: What it sums to.
            lane: This thread's index in its warp.
        """
        var before = UInt32(0)
        if lane == 0:
            _leave(self.units.unsafe_offset(Int(id)), pair)
            before = _Count.fetch_add[ordering=Ordering.RELAXED](
                self.counts.unsafe_offset(Int(self._group(id))), 1
            )
        return before

    @inline(.always)
    def largest(self, id: UInt32) -> Float32:
        """Returns the largest logit of a unit of a row that is there."""
        return pairs_of(
            _Bits.load[ordering=Ordering.RELAXED](
                self.units.unsafe_offset(Int(id))
            )
        ).m

    @inline(.always)
    def merge[
        exact: Bool, sums: Bool = False
    ](self, id: UInt32, before: UInt32, lane: Int):
        """Merges the units of a group, if nobody has yet to leave one.

        Parameters:
            exact: Of the scale that the sums are in.
            sums: Of this scale, too.

        Args:
            id: The unit that this warp left.
            before: What `leave` returned.
            lane: This thread's index in its warp.
        """
        var row = self.row(id)
        var index = self._group(id)
        var first = (index - row * self.groups_of_row) * UInt32(Self.group)
        var count = min(self.units_of_row - first, UInt32(Self.group))
        if warp.shuffle_idx(before, 0) != count - 1:
            return
        first += row * self.units_of_row
        comptime of_lane = Self.group // WARP_SIZE
        var bits = Array[UInt64, of_lane](fill=bits_of(empty_pair()))
        var there = False
        # What is not there is on its way. All are asked for before any is looked at: one row of 400001 float32 takes 5.9 µs, not 6.5 (H100).
        while not there:
            there = True
            comptime for j in range(of_lane):
                var i = UInt32(lane + j * WARP_SIZE)
                if i < count:
                    bits[j] = _Bits.load[ordering=Ordering.RELAXED](
                        self.units.unsafe_offset(Int(first + i))
                    )
            comptime for j in range(of_lane):
                there = there and bits[j] != 0
        var pairs = Array[Pair[], of_lane](fill=pairs_of(bits[0]))
        comptime for j in range(1, of_lane):
            pairs[j] = pairs_of(bits[j])
        var pair = _merged[exact, sums](pairs)
        if lane == 0:
            _leave(self.groups.unsafe_offset(Int(index)), pair)

    @inline(.always)
    def _group(self, id: UInt32) -> UInt32:
        """Returns which group a unit is of, counted through all rows."""
        var row = self.row(id)
        return row * self.groups_of_row + (
            id - row * self.units_of_row
        ) // UInt32(Self.group)


@inline(.always)
def bits_of[
    width: SIMDLength, //
](pair: Pair[width]) -> SIMD[DType.uint64, width]:
    """Returns the numbers that pairs are."""
    var bits = SIMD[DType.uint64, width]()
    comptime for i in range(Int(width)):
        bits[i] = bitcast[DType.uint64, 1](
            SIMD[DType.float32, 2](pair.m[i], pair.d[i])
        )[0]
    return bits


@inline(.always)
def pairs_of[
    width: SIMDLength, //
](bits: SIMD[DType.uint64, width]) -> Pair[width]:
    """Returns the pairs that numbers are."""
    var pair = Pair[width](0, 0)
    comptime for i in range(Int(width)):
        var both = bitcast[DType.float32, 2](bits[i])
        pair.m[i] = both[0]
        pair.d[i] = both[1]
    return pair


@inline(.always)
def _leave(place: Words, pair: Pair[]):
    """Writes a pair, which whoever reads it has all of, or 0."""
    _Bits.store[ordering=Ordering.RELAXED](place, bits_of(pair))


@inline(.always)
def _merged[
    count: Int, //, exact: Bool, sums: Bool
](pairs: Array[Pair[], count]) -> Pair[]:
    """Returns what the pairs of all lanes come to.

    Parameters:
        count: Pairs a lane.
        exact: Of the scale that the sums are in.
        sums: Of this scale, too.
    """
    var m = pairs[0].m
    comptime for j in range(1, count):
        m = maximum(m, pairs[j].m)
    m = largest_of_lanes[WARP_SIZE](m)
    var of_all = Scale[exact, sums=sums](m)
    var d = pairs[0].sum_over(of_all)
    comptime for j in range(1, count):
        d += pairs[j].sum_over(of_all)
    return Pair(m, lanes_reduce[total](d))


@inline(.always)
def sleep(ns: UInt32):
    """Lets others go first, for about so many ns."""
    comptime if is_nvidia_gpu():
        inlined_assembly[
            "nanosleep.u32 $0;", NoneType, constraints="r,~{memory}"
        ](ns)
