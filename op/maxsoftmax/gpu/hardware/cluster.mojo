"""What the blocks of a cluster tell each other: a pair for each row, written into each other's shared memory.

Every block sends its pairs to all, and waits until all have sent theirs to it: one crossing of the cluster's network
a row, where a barrier takes two. The arrivals are counted by an mbarrier, in bytes. NVIDIA GPUs from sm_90 on.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import inlined_assembly
from max.gpu import WARP_SIZE, block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext

from ...math.exponential import Scale
from . import mbarrier
from .pair import Pair, empty_pair
from .team import greater, largest_of_lanes, maximum, total
from .tree_reduction import Shared
from .warp_reduction import lanes_reduce

comptime PORTABLE_BLOCKS = 8
"""Blocks a cluster at most, on every GPU that has clusters."""


def most_blocks() -> Int:
    """Returns how many blocks a cluster has at most on the GPU that is compiled for: MAX asks for more than every GPU has, of every kernel.
    """
    comptime gpu = DeviceContext.default_device_info
    return 16 if gpu.compute >= 9.0 and gpu.compute < 11.0 else PORTABLE_BLOCKS


def has_clusters() -> Bool:
    """Returns whether the GPU that is compiled for has clusters."""
    comptime gpu = DeviceContext.default_device_info
    return gpu.api == "cuda" and gpu.compute >= 9.0


struct Cluster[real: Bool, pairs: Int = 1, boxes: Int = 1](
    TrivialRegisterPassable
):
    """This block's place in its cluster, and the mailbox that the others write to.

    Every thread of every block makes one and calls `merge`, or `open`, `send` and `close`, once. With two mailboxes every thread calls `wait` once, and for each turn,
    counted from 0, `expect`, `send` and `close`: who sends to a mailbox again has heard in the other one from all that have read it, since only those read that send, the first
    warp of each block among them. A cluster may be a single block then, each of whose warps sends a pair.

    Parameters:
        real: Whether there is one; otherwise nothing is asked of the GPU.
        pairs: How many each block sends to each.
        boxes: How many mailboxes there are.
    """

    var index: Int
    """Of this cluster; of this block if there is none."""
    var rank: Int
    """Of this block."""
    var blocks: Int
    """How many there are in a cluster."""
    var mailbox: Shared[Float32]
    """Room for the pairs of each block. If it is the only one, who has read a pair after `close` may write there."""
    var arrivals: Shared[UInt64]
    """An mbarrier for each mailbox, which counts their bytes."""

    comptime room = 2 * PORTABLE_BLOCKS * Self.pairs
    """Numbers that a mailbox has room for."""

    @inline(.always)
    def __init__(out self):
        comptime if Self.real:
            self.index = Int(_special["%clusterid.x"]())
            self.rank = Int(_special["%cluster_ctarank"]())
            self.blocks = Int(_special["%cluster_nctarank"]())
        else:
            self.index = Int(block_idx.x)
            self.rank = 0
            self.blocks = 1
        self.mailbox = unsafe_stack_allocation[
            Self.boxes * Self.room if Self.real else 1,
            Float32,
            alignment=16,
            address_space=AddressSpace.SHARED,
        ]()
        self.arrivals = unsafe_stack_allocation[
            Self.boxes, UInt64, alignment=8, address_space=AddressSpace.SHARED
        ]()
        comptime if Self.real:
            if thread_idx.x == 0:
                var count = UInt32(1)
                if self._is_single():
                    count = UInt32(block_dim.x) // UInt32(WARP_SIZE)
                comptime for box in range(Self.boxes):
                    mbarrier.begin(self._arrivals(box), count)
                inlined_assembly[
                    "fence.mbarrier_init.release.cluster;",
                    NoneType,
                    constraints="~{memory}",
                ]()
            # Nobody may write to a block that has not started; `wait` waits.
            inlined_assembly[
                "barrier.cluster.arrive.relaxed.aligned;",
                NoneType,
                constraints="~{memory}",
            ]()

    @inline(.always)
    def open(self, expected: Int):
        """Waits until the others can be sent to, and says what is expected of them.

        Args:
            expected: How many pairs will be sent to this block.
        """
        self.wait()
        self.expect(expected)

    @inline(.always)
    def wait(self):
        """Waits until the others can be sent to."""
        inlined_assembly[
            "barrier.cluster.wait.acquire.aligned;",
            NoneType,
            constraints="~{memory}",
        ]()

    @inline(.always)
    def expect(self, expected: Int, turn: Int = 0):
        """Says what is expected of the others.

        Args:
            expected: How many pairs will be sent to this block.
            turn: In which turn.
        """
        if thread_idx.x == 0 and not self._is_single():
            inlined_assembly[
                "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
                NoneType,
                constraints="r,r,~{memory}",
            ](self._arrivals(turn), UInt32(8 * expected))

    @inline(.always)
    def _is_single(self) -> Bool:
        """Returns whether a block has nobody to send to but itself, which is not for instructions of clusters.
        """
        comptime if Self.boxes > 1:
            return self.blocks == 1
        else:
            return False

    @inline(.always)
    def _arrivals(self, turn: Int) -> UInt32:
        """Returns where what arrives in a turn is counted."""
        return UInt32(Int(self.arrivals)) + UInt32(8 * (turn % Self.boxes))

    @inline(.always)
    def _box(self, turn: Int) -> Shared[Float32]:
        """Returns the mailbox of a turn."""
        return self.mailbox.unsafe_offset(turn % Self.boxes * Self.room)

    @inline(.always)
    def send(self, block: Int, at: Int, a: Float32, b: Float32, turn: Int = 0):
        """Writes two numbers into the mailbox of a block, 8 bytes aligned.

        Args:
            block: Which, of this cluster; may be the own one.
            at: Index of the first in the mailbox.
            a: The first.
            b: The second.
            turn: In which turn.
        """
        if self._is_single():
            inlined_assembly[
                (
                    "st.shared.v2.f32 [$0], {$2, $3};"
                    " mbarrier.arrive.shared::cta.b64 _, [$1];"
                ),
                NoneType,
                constraints="r,r,f,f,~{memory}",
            ](
                UInt32(Int(self._box(turn))) + UInt32(4 * at),
                self._arrivals(turn),
                a,
                b,
            )
            return
        inlined_assembly[
            (
                "{ .reg .b32 slot, bar; mapa.shared::cluster.u32 slot, $0, $2;"
                " mapa.shared::cluster.u32 bar, $1, $2;"
                " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"
                " [slot], {$3, $4}, [bar]; }"
            ),
            NoneType,
            constraints="r,r,r,f,f,~{memory}",
        ](
            UInt32(Int(self._box(turn))) + UInt32(4 * at),
            self._arrivals(turn),
            UInt32(block),
            a,
            b,
        )

    @inline(.always)
    def close(self, turn: Int = 0):
        """Waits until all of the mailbox of a turn has been written."""
        mbarrier.wait(self._arrivals(turn), turn // Self.boxes)

    @inline(.always)
    def merged[
        exact: Bool, sums: Bool = False
    ](self, count: Int, lane: Int, turn: Int = 0) -> Pair[]:
        """Returns what all pairs of the mailbox come to, merged in their order: the same bits for every warp.

        Parameters:
            exact: Of the scale that the sums are in.
            sums: Of this scale, too.

        - `count`: How many there are.
        """
        comptime of_lane = ceildiv(PORTABLE_BLOCKS * Self.pairs, WARP_SIZE)
        var box = self._box(turn).unsafe_offset(2 * lane)
        var left = Int32(count - lane)

        @inline(.always)
        def pair(j: Int) {imm} -> Pair[]:
            """Returns one of this lane's."""
            if Int32(j * WARP_SIZE) >= left:
                return empty_pair()
            var both = box.unsafe_load[width=2, alignment=8](2 * j * WARP_SIZE)
            return Pair(both[0], both[1])

        # Without a loop, so that what is read of one pair does not wait for the one before.
        var theirs = Array[Pair[], of_lane](fill=empty_pair())
        comptime for j in range(of_lane):
            theirs[j] = pair(j)
        var m = theirs[0].m
        comptime for j in range(1, of_lane):
            m = maximum(m, theirs[j].m)
        m = largest_of_lanes[WARP_SIZE](m)
        var of_row = Scale[exact, sums=sums](m)
        var are_usual = True
        comptime for j in range(of_lane):
            are_usual = are_usual and of_row.is_usual(theirs[j].m)[0]
        var d = Float32(0)
        if are_usual:
            comptime for j in range(of_lane):
                d = theirs[j].d.fma(of_row.of_part_of_most(theirs[j].m), d)
        else:
            # Read again in a loop: all at once take registers from those who need them.
            for j in range(of_lane):
                d += pair(j).sum_over(of_row)
        return Pair(m, lanes_reduce[total](d))

    @inline(.always)
    def merge[exact: Bool](self, mine: Pair[]) -> Pair[]:
        """Returns the pair of the whole row, the same bits for every thread of the cluster.

        Parameters:
            exact: Of the scale that the sums are in.

        Args:
            mine: This block's pair, known to its every thread.

        Returns:
            The pair of all blocks.
        """
        var theirs = self._exchange(mine, empty_pair())
        var m = lanes_reduce[greater, PORTABLE_BLOCKS](theirs.m)
        var d = theirs.sum_over(Scale[exact](m))
        return Pair(m, lanes_reduce[total, PORTABLE_BLOCKS](d))

    @inline(.always)
    def sum(self, mine: Float32) -> Float32:
        """Returns the sum over the blocks, the same bits for every thread of the cluster.

        Args:
            mine: This block's summand, known to its every thread.

        Returns:
            The sum.
        """
        var theirs = self._exchange(Pair(mine, 0), Pair(0, 0))
        return lanes_reduce[total, PORTABLE_BLOCKS](theirs.m)

    @inline(.always)
    def _exchange(self, mine: Pair[], filler: Pair[]) -> Pair[]:
        """Sends `mine` to every block, and returns that of block i in the i-th of every eight lanes, `filler` where there
        is none: every eight lanes read all of them, so that every lane ends with the same.
        """
        comptime assert Self.pairs == 1
        var thread = Int(thread_idx.x)
        self.open(self.blocks)
        if thread < self.blocks:
            self.send(thread, 2 * self.rank, mine.m, mine.d)
        self.close()
        var block = thread % PORTABLE_BLOCKS
        if block >= self.blocks:
            return filler
        var slot = self.mailbox.unsafe_offset(2 * block)
        return Pair(slot[unsafe_offset=0], slot[unsafe_offset=1])


@inline(.always)
def _special[name: StaticString]() -> UInt32:
    """Returns a special register of 32 bits."""
    return inlined_assembly[
        "mov.u32 $0, " + name + ";",
        UInt32,
        constraints="=r",
        has_side_effect=False,
    ]()
