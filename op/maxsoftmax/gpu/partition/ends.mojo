"""What of a unit lies in granules that it has only a part of, kept in shared memory until results of it are written."""

from std.memory import AddressSpace, unsafe_stack_allocation
from max.gpu import thread_idx, WARP_SIZE

from ...io.rows import VECTOR_BYTES
from ..hardware.tree_reduction import Shared
from .unit import Unit


struct Ends[dtype: DType, rounds: Int, max_threads: Int](
    TrivialRegisterPassable
):
    """The places of a lane: registers would be every lane's, and a trip to memory at the end is one that nobody else's work hides.

    Parameters:
        dtype: As of `Unit`.
        rounds: As of `Unit`.
        max_threads: Threads of a block at most.
    """

    comptime U = Unit[Self.dtype, Self.rounds]
    comptime EACH = 3
    """Granules of a warp: that which begins before its unit, the one after its last, and the one that the row ends in."""

    var first: Shared[Scalar[Self.dtype]]
    """Those of the lane's warp."""

    @inline(.always)
    def __init__(out self):
        """Nothing is kept yet."""
        comptime warps = Self.max_threads // WARP_SIZE
        var all = unsafe_stack_allocation[
            warps * Self.EACH * Self.U.width,
            Scalar[Self.dtype],
            alignment=VECTOR_BYTES,
            address_space=AddressSpace.SHARED,
        ]()
        self.first = all.unsafe_offset(
            Int(thread_idx.x) // WARP_SIZE * Self.EACH * Self.U.width
        )

    @inline(.always)
    def keep(
        self,
        u: Self.U,
        raw: Array[Self.U.Values, Self.rounds],
        after: Self.U.Values,
    ):
        """Keeps those that the lane has.

        Args:
            u: What of the unit is this lane's.
            raw: Its granules.
            after: What `Unit.edges` returned, or became of it.
        """
        if u.shared:
            self._put(0, raw[0])
            self._put(1, after)
        if not u.whole:
            var tail_round = u.tail_round()
            comptime for j in range(Self.rounds):
                if j == tail_round:
                    self._put(2, raw[j])

    @inline(.always)
    def of(self, u: Self.U, j: Int) -> Self.U.Values:
        """Returns the lane's granule j, one of those that were kept."""
        var which = 2
        if j == Self.rounds:
            which = 1
        elif j == 0 and u.shared:
            which = 0
        return self.first.unsafe_load[
            width=Self.U.width, alignment=VECTOR_BYTES
        ](which * Self.U.width)

    @inline(.always)
    def _put(self, which: Int, values: Self.U.Values):
        self.first.unsafe_store[alignment=VECTOR_BYTES](
            which * Self.U.width, values
        )
