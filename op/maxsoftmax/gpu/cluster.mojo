"""What the blocks of a cluster tell each other: one pair each, written into each other's shared memory.

Every block sends its pair to all, and waits until all have sent theirs to it: one crossing of the cluster's network
a row, where a barrier takes two. The arrivals are counted by an mbarrier, in bytes. NVIDIA GPUs from sm_90 on.
"""

from std.memory import unsafe_stack_allocation
from std.sys import inlined_assembly
from std.utils.numerics import inf, nan, neg_inf
from max.gpu import thread_idx

from ..exponential import Scale
from .team import greater, total
from .tree_reduction import Shared
from .warp_reduction import lanes_reduce

comptime MOST_BLOCKS = 8
"""Blocks a cluster at most, on every GPU that has clusters."""


struct Pair(TrivialRegisterPassable):
    """The maximum of a part of a row, and the sum of its exponentials in the `Scale` of the maximum.
    """

    var m: Float32
    var d: Float32

    @inline(.always)
    def __init__(out self, m: Float32, d: Float32):
        self.m = m
        self.d = d

    @inline(.always)
    def reciprocal(self) -> Float32:
        """Returns 1 / d; NaN if m is not finite, as then is all of the row."""
        return (
            1 / self.d if abs(self.m)
            < inf[DType.float32]() else nan[DType.float32]()
        )

    @inline(.always)
    def sum_over[exact: Bool](self, larger: Scale[exact]) -> Float32:
        """Returns the sum in the scale of a maximum that is not smaller.

        Parameters:
            exact: Of both scales.
        """
        # A part of nothing but -inf adds nothing, whatever its sum says.
        var nothing = self.m.eq(neg_inf[DType.float32]())
        return Float32(0) if nothing else self.d * Scale[exact](self.m).over(
            larger
        )


struct Cluster[real: Bool](TrivialRegisterPassable):
    """This block's place in its cluster, and the mailbox that the others write to.

    Every thread of every block makes one and calls `merge` as often as all others.

    Parameters:
        real: Whether there is one; otherwise nothing is asked of the GPU.
    """

    var rank: Int
    """Of this block."""
    var blocks: Int
    """How many there are."""
    var mailbox: Shared[Float32]
    """Two boxes of a pair from each block, used in turn: nobody is two rows ahead of anybody."""
    var arrivals: Shared[UInt64]
    """An mbarrier for each box."""

    @inline(.always)
    def __init__(out self):
        comptime if Self.real:
            self.rank = Int(_special["%cluster_ctarank"]())
            self.blocks = Int(_special["%cluster_nctarank"]())
        else:
            self.rank = 0
            self.blocks = 1
        comptime boxes = 2 if Self.real else 1
        self.mailbox = unsafe_stack_allocation[
            boxes * MOST_BLOCKS * 2,
            Float32,
            alignment=16,
            address_space=AddressSpace.SHARED,
        ]()
        self.arrivals = unsafe_stack_allocation[
            boxes, UInt64, alignment=8, address_space=AddressSpace.SHARED
        ]()
        comptime if Self.real:
            if thread_idx.x == 0:
                comptime for box in range(2):
                    inlined_assembly[
                        "mbarrier.init.shared::cta.b64 [$0], 1;",
                        NoneType,
                        constraints="r,~{memory}",
                    ](self._arrivals(box))
                inlined_assembly[
                    "fence.mbarrier_init.release.cluster;",
                    NoneType,
                    constraints="~{memory}",
                ]()
            # Nobody may write to a block that has not started; `merge` waits.
            inlined_assembly[
                "barrier.cluster.arrive.release.aligned;",
                NoneType,
                constraints="~{memory}",
            ]()

    @inline(.always)
    def merge[exact: Bool](self, round: Int, mine: Pair) -> Pair:
        """Returns the pair of the whole row, the same bits for every thread of the cluster.

        Parameters:
            exact: Of the scale that the sums are in.

        Args:
            round: How many rows this cluster has merged before.
            mine: This block's pair, known to its every thread.

        Returns:
            The pair of all blocks.
        """
        var box = round % 2
        var thread = Int(thread_idx.x)
        if round == 0:
            inlined_assembly[
                "barrier.cluster.wait.acquire.aligned;",
                NoneType,
                constraints="~{memory}",
            ]()
        if thread == 0:
            inlined_assembly[
                "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
                NoneType,
                constraints="r,r,~{memory}",
            ](self._arrivals(box), UInt32(self.blocks * 8))
        if thread < self.blocks:
            inlined_assembly[
                (
                    "{ .reg .b32 slot, bar; mapa.shared::cluster.u32 slot, $0,"
                    " $2; mapa.shared::cluster.u32 bar, $1, $2;"
                    " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"
                    " [slot], {$3, $4}, [bar]; }"
                ),
                NoneType,
                constraints="r,r,r,f,f,~{memory}",
            ](
                self._mailbox(box) + UInt32(8 * self.rank),
                self._arrivals(box),
                UInt32(thread),
                mine.m,
                mine.d,
            )
        inlined_assembly[
            (
                "{ .reg .pred done; again:"
                " mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;"
                " @!done bra again; }"
            ),
            NoneType,
            constraints="r,r,~{memory}",
        ](self._arrivals(box), UInt32(round // 2 % 2))

        # Each group of eight lanes reads all of them, so that every lane ends with the same.
        var block = thread % MOST_BLOCKS
        var theirs = Pair(neg_inf[DType.float32](), 0)
        if block < self.blocks:
            var slot = self.mailbox.unsafe_offset(
                (box * MOST_BLOCKS + block) * 2
            )
            theirs = Pair(slot[unsafe_offset=0], slot[unsafe_offset=1])
        var m = lanes_reduce[greater, MOST_BLOCKS](theirs.m)
        var d = theirs.sum_over(Scale[exact](m))
        return Pair(m, lanes_reduce[total, MOST_BLOCKS](d))

    @inline(.always)
    def _mailbox(self, box: Int) -> UInt32:
        return UInt32(Int(self.mailbox)) + UInt32(box * MOST_BLOCKS * 8)

    @inline(.always)
    def _arrivals(self, box: Int) -> UInt32:
        return UInt32(Int(self.arrivals)) + UInt32(box * 8)


@inline(.always)
def _special[name: StaticString]() -> UInt32:
    """Returns a special register of 32 bits."""
    return inlined_assembly[
        "mov.u32 $0, " + name + ";",
        UInt32,
        constraints="=r",
        has_side_effect=False,
    ]()
