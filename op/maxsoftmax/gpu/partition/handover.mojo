"""What the threads of a team tell each other so that sums do not depend on where rows begin; see `row`.

Each lane adds up a chain, from its first element to its last. What an edge adds to it is found by another lane, of the same warp, and handed over
before the sum (heads) or after it (tails). Where the first vector begins some elements further on, the last lanes of each thread have chains that
are the next thread's: chains are added one after the other, so that a single number a thread, the sum of these, is all that is to be handed on.
"""

from std.memory import unsafe_stack_allocation
from max.gpu import WARP_SIZE, lane_id
from max.gpu.primitives import warp
from max.gpu.sync import barrier, syncwarp

from ...io.rows import VECTOR_BYTES
from ...io.source import RowSource
from ...io.target import RowTarget
from ..hardware.tree_reduction import Shared
from .row import Part


struct Handover[
    S: RowSource,
    T: RowTarget,
    team: Int,
    width: Int,
    edged: Bool,
    block_size: Int,
](TrivialRegisterPassable):
    """Shared memory for what does not lie where it belongs.

    Parameters are as of `Part`; `block_size` is the threads of a block.
    """

    comptime P = Part[Self.S, Self.T, Self.team, Self.width, Self.edged]
    comptime Vector = SIMD[DType.float32, Self.width]
    comptime warps = Self.team // WARP_SIZE
    comptime groups = Self.block_size // Self.P.lanes

    var edges: Shared[Float32]
    """Head and tail, of each group of lanes that share a row: where others would read, too, racecheck would find a race, as
    the compiler has all of a block read what one thread asks for."""
    var sums: Shared[Float32]
    """A part of a sum for each warp."""

    @inline(.always)
    def __init__(out self):
        self.edges = unsafe_stack_allocation[
            2 * Self.width * Self.groups if Self.P.peeled else 1,
            Float32,
            alignment=VECTOR_BYTES,
            address_space=AddressSpace.SHARED,
        ]()
        self.sums = unsafe_stack_allocation[
            max(1, Self.warps), Float32, address_space=AddressSpace.SHARED
        ]()

    @inline(.always)
    def _of_group(self, thread: Int) -> Shared[Float32]:
        """Returns where a thread's group has its head, and after it its tail.
        """
        return self.edges.unsafe_offset(thread // Self.P.lanes * 2 * Self.width)

    @inline(.always)
    def give(self, thread: Int, terms: Self.P.Edges):
        """Hands over what this thread has of edges. All threads of a block call this, and `head` and `tail` after it, or none.

        Args:
            thread: Its index in the block.
            terms: What its elements add to their chains; 0 where it has none.
        """
        comptime for i in range(Self.P.of_edges):
            var edge = thread % Self.P.lanes + i * Self.P.lanes
            if edge < 2 * Self.width:
                self._of_group(thread)[unsafe_offset=edge] = terms[i]
        syncwarp()

    @inline(.always)
    def head(self, thread: Int) -> Self.Vector:
        """Returns what the head adds to this thread's chains."""
        if thread % Self.P.lanes == Self.P.lanes - 1:
            return self._of_group(thread).unsafe_load[
                width=Self.width, alignment=VECTOR_BYTES
            ]()
        return Self.Vector(0)

    @inline(.always)
    def tail(self, part: Self.P, thread: Int) -> Self.Vector:
        """Returns what the tail adds to them."""
        if thread % Self.P.lanes == part.tail_thread() % Self.P.lanes:
            return self._of_group(thread).unsafe_load[
                width=Self.width, alignment=VECTOR_BYTES
            ](Self.width)
        return Self.Vector(0)

    @inline(.always)
    def total(
        self, part: Self.P, thread: Int, uneven: Bool, chains: Self.Vector
    ) -> Float32:
        """Returns the sum of those chains that this thread has where the first vector begins with the first element. All
        threads of a block call this.

        Args:
            part: This thread's part of its row.
            thread: Its index in the block.
            uneven: Whether any row may have edges.
            chains: What this thread has.
        """
        # One after the other, as they may be of two threads.
        var sum = Float32(0)
        comptime if Self.P.peeled:
            # Of a small team's warp all may have to.
            if part.before() != 0 or (Self.team < WARP_SIZE and uneven):
                var own = Int32(Self.width) - part.before()
                comptime for i in range(1, Self.width):
                    if Int32(i) >= own:
                        sum += chains[i]
                var lane = Int(lane_id())
                var previous = (lane & ~(Self.P.lanes - 1)) | (
                    (lane - 1) & (Self.P.lanes - 1)
                )
                comptime if Self.warps > 1:
                    if lane == WARP_SIZE - 1:
                        self.sums[
                            unsafe_offset=(thread // WARP_SIZE + 1) % Self.warps
                        ] = sum
                    barrier()
                sum = warp.shuffle_idx(sum, UInt32(previous))
                comptime if Self.warps > 1:
                    if lane == 0:
                        sum = self.sums[unsafe_offset=thread // WARP_SIZE]
                comptime for i in range(Self.width):
                    if Int32(i) < own:
                        sum += chains[i]
                return sum
        comptime for i in range(Self.width):
            sum += chains[i]
        return sum
