"""What warps of a whole grid tell each other in the GPU's memory: what units of columns sum to.

It is the board of rows for strips of columns, a pair of each. A lane sees to the same columns of all that its warp leaves and looks for. Blocks that do nothing else
merge the units of a strip as they are left.
"""

from std.atomic import Atomic, Ordering
from std.math import ceildiv
from max.gpu import WARP_SIZE
from max.gpu.sync import barrier

from ...io.rows import Target
from ..partition.pair import merged
from .board import ASKED, Words, ask, bits_of, pairs_of, sleep
from .pair import Pair, empty_pair
from .tree_reduction import Shared

comptime _Bits = Atomic[UInt64, scope="device"]

comptime IDLE = 100
"""ns until a warp that waits for units looks again, so that others have the memory."""

comptime FEW = 4
"""Units of a warp that are merged at a time, if it has no more: 10000×2048 of bfloat16 take 36 µs, not 39 (H200)."""


struct ColumnBoard[of_lane: Int](TrivialRegisterPassable):
    """What warps tell each other, in the GPU's memory.

    Parameters:
        of_lane: Columns of a strip that a lane sees to, side by side.
    """

    comptime columns = Self.of_lane * WARP_SIZE
    """Columns of a strip."""
    comptime P = Pair[Self.of_lane]
    comptime Bits = SIMD[DType.uint64, Self.of_lane]

    var strips: Words
    """The pairs of strips."""
    var units: Words
    """Those of units."""
    var asked: Target[DType.uint32]
    """How often teams have asked for a unit."""
    var units_of_strip: UInt32
    """How many units a strip has."""

    @inline(.always)
    def __init__(out self, memory: Words, strips: Int, units: Int):
        """The board of so many strips of so many units, which `clear` has cleared.
        """
        self.strips = memory
        self.units = self.strips.unsafe_offset(strips * Self.columns)
        self.asked = memory.unsafe_offset(
            Self.size(strips, units) - ASKED
        ).unsafe_bitcast[UInt32]()
        self.units_of_strip = UInt32(units)

    @staticmethod
    def size(strips: Int, units: Int) -> Int:
        """Returns how many words of 8 bytes it has, a multiple of two."""
        return strips * (1 + units) * Self.columns + ASKED

    @inline(.always)
    def ask(self, thread: Int) -> UInt32:
        """Returns to the first thread of a team how often teams have asked before.

        Args:
            thread: This thread's index in its team.
        """
        return ask(self.asked, thread)

    @inline(.always)
    def seen(self, strip: UInt32, lane: Int) -> Self.Bits:
        """Returns to each lane the pairs of its columns of a strip, some of them 0 if they are not there yet.

        Args:
            strip: The strip.
            lane: This thread's index in its warp.
        """
        return self._load(self.strips, strip, lane)

    @inline(.always)
    def wait(self, strip: UInt32, var seen: Self.Bits, lane: Int) -> Self.P:
        """Returns to each lane the pairs of its columns of a strip, once they are there.

        Args:
            strip: The strip.
            seen: What `seen` returned.
            lane: This thread's index in its warp.
        """
        while seen.eq(0).reduce_or():
            sleep(64)
            seen = self.seen(strip, lane)
        return pairs_of(seen)

    @inline(.always)
    def leave(self, strip: UInt32, unit: UInt32, pair: Self.P, lane: Int):
        """Leaves the pairs of a unit.

        Args:
            strip: The strip.
            unit: Which of its units.
            pair: What that sums to, of this lane's columns.
            lane: This thread's index in its warp.
        """
        self._store(self.units, strip * self.units_of_strip + unit, pair, lane)

    @inline(.always)
    def merge[
        exact: Bool, warps: Int
    ](
        self,
        room: Shared[UInt64],
        strips: UInt32,
        block: UInt32,
        blocks: UInt32,
        warp_index: Int,
        lane: Int,
    ):
        """Merges the units of strips as they are left, each warp some of a strip. All threads of the block call this.

        Parameters:
            exact: Of the scale that the sums are in.
            warps: Warps a block.

        Args:
            room: Shared memory for a word of each column for each warp.
            strips: How many there are.
            block: The block's index among those that call this.
            blocks: How many do.
            warp_index: This warp's in the block.
            lane: This thread's index in its warp.
        """
        var share = ceildiv(self.units_of_strip, UInt32(warps))
        var first = min(UInt32(warp_index) * share, self.units_of_strip)
        var count = min(share, self.units_of_strip - first)
        var mine = room.unsafe_offset(lane * Self.of_lane)
        for strip in range(block, strips, blocks):
            mine.unsafe_store[alignment=8 * Self.of_lane](
                warp_index * Self.columns,
                bits_of(
                    self._merged_units[exact](
                        strip * self.units_of_strip + first, count, lane
                    )
                ),
            )
            barrier()
            if warp_index == 0:
                self._store(
                    self.strips,
                    strip,
                    Self.merged_warps[exact, warps](mine),
                    lane,
                )
            barrier()

    @staticmethod
    @inline(.always)
    def merged_warps[exact: Bool, warps: Int](words: Shared[UInt64]) -> Self.P:
        """Returns what the pairs that each warp of some has left in shared memory come to.

        Parameters:
            exact: Of the scale that the sums are in.
            warps: How many warps.

        Args:
            words: Where the first warp's are, of this lane's columns.
        """
        var pairs = Array[Self.P, warps](fill=empty_pair[Self.of_lane]())
        comptime for i in range(warps):
            pairs[i] = pairs_of(
                words.unsafe_load[
                    width=Self.of_lane, alignment=8 * Self.of_lane
                ](i * Self.columns)
            )
        return merged[exact](pairs)

    @inline(.always)
    def _merged_units[
        exact: Bool
    ](self, first: UInt32, count: UInt32, lane: Int) -> Self.P:
        """Merges some neighbouring units, once they are there.

        Parameters:
            exact: Of the scale that the sums are in.

        Args:
            first: Which is the first.
            count: How many there are.
            lane: This thread's index in its warp.
        """
        if count <= UInt32(FEW):
            return self._merged_some[exact, FEW](first, count, lane)
        # As many as there are registers for.
        comptime at_a_time = 16 // Self.of_lane
        var pair = empty_pair[Self.of_lane]()
        for start in range(UInt32(0), count, UInt32(at_a_time)):
            var both = Array[Self.P, 2](fill=pair)
            both[1] = self._merged_some[exact, at_a_time](
                first + start, count - start, lane
            )
            pair = merged[exact](both)
        return pair

    @inline(.always)
    def _merged_some[
        exact: Bool, at_a_time: Int
    ](self, first: UInt32, count: UInt32, lane: Int) -> Self.P:
        """Merges the first `at_a_time` of some units: parameters and arguments are as of `_merged_units`.
        """
        var bits = Array[Self.Bits, at_a_time](
            fill=bits_of(empty_pair[Self.of_lane]())
        )
        comptime for i in range(at_a_time):
            if UInt32(i) < count:
                bits[i] = 0
        while True:
            # All are asked for before any is looked at.
            comptime for i in range(at_a_time):
                if bits[i].eq(0).reduce_or():
                    bits[i] = self._load(self.units, first + UInt32(i), lane)
            var there = True
            comptime for i in range(at_a_time):
                there = there and not bits[i].eq(0).reduce_or()
            if there:
                break
            sleep(IDLE)
        var pairs = Array[Self.P, at_a_time](fill=empty_pair[Self.of_lane]())
        comptime for i in range(at_a_time):
            pairs[i] = pairs_of(bits[i])
        return merged[exact](pairs)

    @inline(.always)
    def _load(self, place: Words, index: UInt32, lane: Int) -> Self.Bits:
        """Returns the words of this lane's columns."""
        var bits = Self.Bits()
        comptime for i in range(Self.of_lane):
            bits[i] = _Bits.load[ordering=Ordering.RELAXED](
                place.unsafe_offset(
                    Int(index) * Self.columns + lane * Self.of_lane + i
                )
            )
        return bits

    @inline(.always)
    def _store(self, place: Words, index: UInt32, pair: Self.P, lane: Int):
        """Writes those of a pair, each of which whoever reads it has all of, or 0.
        """
        var bits = bits_of(pair)
        comptime for i in range(Self.of_lane):
            _Bits.store[ordering=Ordering.RELAXED](
                place.unsafe_offset(
                    Int(index) * Self.columns + lane * Self.of_lane + i
                ),
                bits[i],
            )
