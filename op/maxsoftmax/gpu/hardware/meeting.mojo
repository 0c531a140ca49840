"""What the warps of a block that share a unit of columns tell each other, in shared memory: what their parts of it sum to."""

from std.memory import unsafe_stack_allocation
from std.sys import inlined_assembly, is_nvidia_gpu
from std.utils.numerics import neg_inf
from max.gpu import thread_idx
from max.gpu.primitives import warp
from max.gpu.sync import barrier, syncwarp

from ...io.rows import VECTOR_BYTES
from ..partition.deal import Deal
from ..partition.pair import merged
from .cluster import Pair
from .column_board import bits_of, pairs_of
from .tree_reduction import Shared


struct Meeting[teams: Int, warps: Int, lanes: Int, width: Int, dealt: Bool](
    TrivialRegisterPassable
):
    """Where the warps of a team leave what their parts of a unit sum to, and the last of them finds it.

    There is room for two units: a team may begin the next one before all that was left of this one has been merged, but no other.

    Parameters:
        teams: Teams a block.
        warps: Warps a team.
        lanes: As of `Deal`.
        width: The same.
        dealt: The same.
    """

    comptime D = Deal[Self.lanes, Self.width, Self.dealt]
    comptime columns = Self.lanes * Self.width
    comptime room = Self.warps * Self.columns
    """Words of a unit."""

    var words: Shared[UInt64]
    """The pairs of a team's warps."""
    var counts: Shared[UInt32]
    """How many have left theirs."""

    @inline(.always)
    def __init__(out self, room: Shared[UInt64], team: Int):
        """The place of a team. All threads of the block call this.

        Args:
            room: Shared memory for two units of each team.
            team: The team's index in its block.
        """
        self.words = room.unsafe_offset(team * 2 * Self.room)
        var all = unsafe_stack_allocation[
            Self.teams * 2, UInt32, address_space=AddressSpace.SHARED
        ]()
        if thread_idx.x < Self.teams * 2:
            all[unsafe_offset=Int(thread_idx.x)] = 0
        self.counts = all.unsafe_offset(team * 2)
        barrier()

    @inline(.always)
    def leave(
        self, odd: Int, pair: Pair[Self.width], warp_index: Int, lane: Int
    ) -> Bool:
        """Leaves what this warp's part of a unit sums to, and returns whether it is the last of its team to do so.

        Args:
            odd: Which of the two places.
            pair: The sums of this thread's columns.
            warp_index: This warp's index in its team.
            lane: This thread's index in its warp.
        """
        var bits = bits_of(pair)
        var mine = self.words.unsafe_offset(
            odd * Self.room + warp_index * Self.columns
        )
        comptime if Self.dealt:
            comptime for c in range(Self.D.columns):
                mine[unsafe_offset=Self.D.column(lane, c)] = bits[
                    c * Self.D.chains
                ]
        else:
            if lane < Self.lanes:
                mine.unsafe_store[alignment=VECTOR_BYTES](
                    Self.D.column(lane, 0), bits
                )
        syncwarp()
        var before = UInt32(0)
        if lane == 0:
            before = _count(self.counts.unsafe_offset(odd))
        before = warp.shuffle_idx(before, 0)
        syncwarp()
        return Int(before) % Self.warps == Self.warps - 1

    @inline(.always)
    def take[
        of_lane: Int, exact: Bool
    ](self, odd: Int, lane: Int) -> Pair[of_lane]:
        """Returns to each lane what its columns of a unit sum to, once all have left theirs.

        Parameters:
            of_lane: Columns a lane.
            exact: Of the scale that the sums are in.

        Args:
            odd: Which of the two places.
            lane: This thread's index in its warp.
        """
        var pairs = Array[Pair[of_lane], Self.warps](
            fill=Pair[of_lane](neg_inf[DType.float32](), 0)
        )
        comptime for i in range(Self.warps):
            pairs[i] = pairs_of(
                self.words.unsafe_load[width=of_lane, alignment=8 * of_lane](
                    odd * Self.room + i * Self.columns + lane * of_lane
                )
            )
        return merged[exact](pairs)


@inline(.always)
def _count(count: Shared[UInt32]) -> UInt32:
    """Adds 1 after all that this thread has written or seen, and returns what was there before.
    """
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            "atom.acq_rel.cta.shared::cta.add.u32 $0, [$1], 1;",
            UInt32,
            constraints="=r,r,~{memory}",
        ](UInt32(Int(count)))
    else:
        return 0
