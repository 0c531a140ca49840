"""What the warps of a block that share a unit of columns tell each other, in shared memory: what their parts of it sum to."""

from std.sys import inlined_assembly, is_nvidia_gpu
from max.gpu import WARP_SIZE

from ...io.rows import VECTOR_BYTES
from ..partition.deal import Deal
from ..partition.tile import Tile
from . import mbarrier
from .board import bits_of
from .column_board import ColumnBoard
from .pair import Pair
from .tree_reduction import Shared


struct Meeting[tile: Tile](TrivialRegisterPassable):
    """Where the warps of a team leave what their parts of a unit sum to, and one of them finds it, another one each time.

    There is room for one unit: before the next one is left, all meet to hear a number, and the warp that finds the unit comes there when it has read it. There are two places for
    numbers: a warp may still read one while the next is told.

    Parameters:
        tile: A team's columns.
    """

    comptime D = Deal[Self.tile]
    comptime warps = Self.tile.threads // WARP_SIZE
    """Warps a team."""
    comptime columns = Self.tile.columns()
    comptime _of_unit = Self.warps * Self.columns
    """Words of a unit."""
    comptime room = Self._of_unit + 2 * (VECTOR_BYTES // 8)
    """Words of a team: a unit, two numbers, an mbarrier, and one up to a multiple of two."""

    var words: Shared[UInt64]
    """The pairs of a team's warps, and what follows them."""
    var team: Int
    """The team's index in its block."""

    @inline(.always)
    def __init__(out self, room: Shared[UInt64], team: Int, thread: Int):
        """The place of a team. A barrier has to follow.

        Args:
            room: Shared memory for all teams.
            team: The team's index in its block.
            thread: This thread's index in its team.
        """
        self.words = room.unsafe_offset(team * Self.room)
        self.team = team
        if thread == 0:
            mbarrier.begin(self._left(), UInt32(Self.tile.threads))

    @inline(.always)
    def leave(
        self, turn: Int, pair: Pair[Self.tile.width], warp_index: Int, lane: Int
    ) -> Bool:
        """Leaves what this warp's part of a unit sums to, and returns whether this warp is to take it, which alone waits until all of the team have left theirs.
        All warps of the team call this.

        Args:
            turn: How many units this warp has left before.
            pair: The sums of this thread's columns.
            warp_index: This warp's index in its team.
            lane: This thread's index in its warp.
        """
        var bits = bits_of(pair)
        var mine = self.words.unsafe_offset(warp_index * Self.columns)
        comptime if Self.tile.is_dealt():
            comptime for c in range(Self.D.columns):
                mine[unsafe_offset=Self.D.column(lane, c)] = bits[
                    c * Self.D.chains
                ]
        else:
            if lane < Self.tile.lanes:
                mine.unsafe_store[alignment=VECTOR_BYTES](
                    Self.D.column(lane, 0), bits
                )
        # Each lane for itself: that is no slower than one for all, and a race checker follows it.
        mbarrier.arrive(self._left())
        var takes = turn % Self.warps == warp_index
        if takes:
            mbarrier.wait(self._left(), turn)
        return takes

    @inline(.always)
    def told(self, turn: Int, number: UInt32, thread: Int) -> UInt32:
        """Returns the number of the team's first thread to all of the team, which call this between one unit and the next.

        Args:
            turn: As of `leave`, of the unit before.
            number: The number.
            thread: This thread's index in its team.
        """
        var place = self.words.unsafe_offset(Self._of_unit + turn % 2)
        if thread == 0:
            place[] = UInt64(number)
        self._meet()
        return UInt32(place[])

    @inline(.always)
    def _left(self) -> UInt32:
        """Returns where an mbarrier counts who has left a part of a unit."""
        return UInt32(Int(self.words.unsafe_offset(Self._of_unit + 2)))

    @inline(.always)
    def _meet(self):
        """Waits for all of the team."""
        comptime if is_nvidia_gpu():
            # The first barrier is that of all of the block.
            inlined_assembly[
                "bar.sync $0, $1;", NoneType, constraints="r,n,~{memory}"
            ](UInt32(self.team + 1), UInt32(Self.warps * WARP_SIZE))

    @inline(.always)
    def take[of_lane: Int, exact: Bool](self, lane: Int) -> Pair[of_lane]:
        """Returns to each lane what its columns of a unit sum to, once all have left theirs.

        Parameters:
            of_lane: Columns a lane.
            exact: Of the scale that the sums are in.

        Args:
            lane: This thread's index in its warp.
        """
        return ColumnBoard[of_lane].merged_warps[exact, Self.warps](
            self.words.unsafe_offset(lane * of_lane)
        )
