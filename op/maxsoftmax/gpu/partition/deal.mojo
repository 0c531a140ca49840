"""Which thread reads which elements of columns, by the vector or one by one.

Where memory can be read by the vector of neighbouring columns, a thread has the vectors of a few positions, a chain of terms for each
of their columns. Where it cannot, as `inner` or an address is no multiple of a vector, the elements of a warp are dealt to its threads so that neighbours
still read what lies side by side: what a thread has as a vector are then a few chains of one column, or of a few. Chains have the same
elements in the same order, and are added up in the same order, and so a column's bits are the same.
"""

from std.bit import log2_ceil
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.utils.static_tuple import StaticTuple
from max.gpu import WARP_SIZE, thread_idx
from max.gpu.primitives import warp
from max.gpu.sync import syncwarp

from ...io.rows import VECTOR_BYTES, unseen
from ...io.source import SourceColumn
from ...io.target import TargetColumn
from ..hardware.slots import Slots
from ..hardware.tree_reduction import Shared
from ..hardware.warp_reduction import lanes_reduce

comptime COLUMN_THREADS = 256
"""Threads a block."""


struct Deal[lanes: Int, width: Int, dealt: Bool]:
    """Which columns and positions the values of a thread's vectors are of.

    Value k is of column `k // chains` and chain `k % chains` of those that the thread has.

    Parameters:
        lanes: Vectors of columns that a block takes, a power of two.
        width: Columns a vector.
        dealt: Whether the elements of a warp are dealt to its threads one by one.
    """

    comptime of_warp = min(Self.lanes, WARP_SIZE) * Self.width
    """Columns of a warp."""
    comptime columns = max(1, Self.of_warp // WARP_SIZE) if Self.dealt else 1
    """Columns that a thread has to look for: of a vector, the first."""
    comptime chains = Self.width // Self.columns if Self.dealt else 1
    """Chains that a thread has of each of its columns."""

    @staticmethod
    @inline(.always)
    def column(thread: Int, c: Int) -> Int:
        """Returns which of the block's columns the thread's `c`-th is."""
        comptime if Self.dealt:
            var first = 0
            comptime if Self.lanes > WARP_SIZE:
                first = (
                    thread % Self.lanes // WARP_SIZE * (WARP_SIZE * Self.width)
                )
            return first + c * WARP_SIZE + thread % min(WARP_SIZE, Self.of_warp)
        else:
            return thread % Self.lanes * Self.width

    @staticmethod
    @inline(.always)
    def chain(thread: Int) -> Int:
        """Returns which of a column's chains the thread's first is."""
        comptime if Self.dealt and Self.lanes < WARP_SIZE:
            var first = thread // WARP_SIZE * (WARP_SIZE // Self.lanes)
            comptime if Self.of_warp < WARP_SIZE:
                first += thread % WARP_SIZE // Self.of_warp * Self.chains
            return first
        else:
            return thread // Self.lanes

    @staticmethod
    @inline(.always)
    def store[
        space: AddressSpace, //
    ](
        to: Pointer[Float32, MutUntrackedOrigin, address_space=space],
        thread: Int,
        values: SIMD[DType.float32, Self.width],
    ):
        """Stores a value for each of a thread's columns, among those of its block.
        """
        comptime if Self.chains > 1:
            comptime for c in range(Self.columns):
                to[unsafe_offset=Self.column(thread, c)] = values[
                    c * Self.chains
                ]
        else:
            to.unsafe_store[alignment=min(16, 4 * Self.width)](
                thread % Self.lanes * Self.width, values
            )

    @staticmethod
    @inline(.always)
    def load[
        space: AddressSpace, //
    ](
        source: Pointer[Float32, MutUntrackedOrigin, address_space=space],
        thread: Int,
    ) -> SIMD[DType.float32, Self.width]:
        """Returns what `store` has put there, for each value of a thread's vector.
        """
        comptime if Self.chains > 1:
            var values = SIMD[DType.float32, Self.width]()
            comptime for c in range(Self.columns):
                var value = source[unsafe_offset=Self.column(thread, c)]
                comptime for p in range(Self.chains):
                    values[c * Self.chains + p] = value
            return values
        else:
            return source.unsafe_load[
                width=Self.width, alignment=min(16, 4 * Self.width)
            ](thread % Self.lanes * Self.width)

    @staticmethod
    @inline(.always)
    def of_chains[
        dtype: DType,
        //,
        combine: def(
            SIMD[dtype, Self.width], SIMD[dtype, Self.width]
        ) thin -> SIMD[dtype, Self.width],
    ](value: SIMD[dtype, Self.width]) -> SIMD[dtype, Self.width]:
        """Combines the chains of a warp, those of a vector as those that are dealt.
        """
        var result = value
        comptime if not Self.dealt:
            comptime if Self.lanes < WARP_SIZE:
                result = lanes_reduce[combine, WARP_SIZE, Self.lanes](value)
        else:
            comptime if Self.of_warp < WARP_SIZE:
                result = lanes_reduce[combine, WARP_SIZE, Self.of_warp](value)
            comptime for i in reversed(range(log2_ceil(Self.chains))):
                var other = result
                comptime for k in range(Self.width):
                    other[k] = result[k ^ (1 << i)]
                result = combine(result, other)
        return result


@fieldwise_init
struct Sources[Column: SourceColumn, lanes: Int, width: Int, dealt: Bool](
    TrivialRegisterPassable
):
    """Where a thread reads its vectors.

    - `Column`: What is read.
    - `dealt`: As of `Deal`; then what is read is in memory.
    """

    comptime D = Deal[Self.lanes, Self.width, Self.dealt]

    var columns: StaticTuple[Self.Column, Self.D.columns]
    """From the first position of each."""
    var stride: Int
    """Elements from one position to the next."""

    @inline(.always)
    def load(self, i: Int) -> SIMD[Self.Column.loaded, Self.width]:
        """Returns vector `i`."""
        comptime if Self.dealt:
            return self.load(
                i, Int32(Self.width), SIMD[Self.Column.loaded, Self.width]()
            )
        else:
            return self.columns[0].load[Self.width](i)

    @inline(.always)
    def load(
        self,
        i: Int,
        limit: Int32,
        others: SIMD[Self.Column.loaded, Self.width],
    ) -> SIMD[Self.Column.loaded, Self.width]:
        """Returns what there is of vector `i`.

        Args:
            i: Which vector; there is some of it.
            limit: How many chains of dealt ones have it.
            others: What the rest are.
        """
        comptime if Self.dealt:
            var values = others
            var at = unseen(i)
            comptime for c in range(Self.D.columns):
                var first = self.columns[c].address(at)
                comptime for p in range(Self.D.chains):
                    if Int32(p) < limit:
                        values[c * Self.D.chains + p] = first[
                            unsafe_offset=p * self.stride
                        ]
            return values
        else:
            return self.columns[0].load[Self.width](i)

    @inline(.always)
    def fetch(
        self,
        slots: Slots[Self.Column.loaded, COLUMN_THREADS, Self.width],
        slot: Int,
        i: Int,
    ):
        """Has vector `i` brought into a slot: without waiting for it, unless it is dealt.
        """
        comptime if Self.dealt:
            # Copies of 4 bytes, asked for one by one, were no faster.
            slots.keep(slot, self.load(i))
        else:
            slots.fetch(slot, self.columns[0].address(i))

    @inline(.always)
    def logits(
        self, elements: SIMD[Self.Column.loaded, Self.width]
    ) -> SIMD[DType.float32, Self.width]:
        """Returns the logits of what `load` returned."""
        return self.columns[0].logits(elements).cast[DType.float32]()

    @inline(.always)
    def length(self, n: Int) -> Int:
        """Returns how many of `n` positions take part."""
        return self.columns[0].length(n)


struct Targets[Column: TargetColumn, lanes: Int, width: Int, dealt: Bool](
    TrivialRegisterPassable
):
    """Where a thread writes its vectors.

    What is dealt to a warp lies side by side, a piece of each of its positions, but seldom begins at a multiple of 16 bytes. Stores that straddle such
    multiples are slow: 64×500×4095 of float32 took 646 µs, without its stores 244 (H100). So a warp puts results down in
    shared memory, each piece turned so that what is at a multiple of 16 bytes in the tensor is at one there too, and writes them from there in whole vectors, and
    what is left at both ends by the element.

    - `Column`: Where it writes.
    - `dealt`: As of `Deal`; then that is memory.
    """

    comptime D = Deal[Self.lanes, Self.width, Self.dealt]
    comptime stored = Self.Column.stored
    comptime whole = VECTOR_BYTES // size_of[Self.stored]()
    """Elements of a vector that is written."""
    comptime pieces = WARP_SIZE * Self.width // Self.D.of_warp
    """Positions of a warp."""
    comptime values = WARP_SIZE * Self.width
    """Elements that it puts down at a time."""
    comptime in_pieces = (
        Self.dealt
        and size_of[Self.stored]() == 4
        and Self.lanes < WARP_SIZE
        and Self.D.of_warp >= 64
    )
    """Whether pieces are written in whole vectors, where a warp's columns lie side by side. Of shorter ones, and of 16 bits, that is slower:
    64×500×4095 of bfloat16 took 331 µs instead of 306, and by more lanes 4096×16×513 of float32 103 instead of 92 (H100)."""

    var columns: StaticTuple[Self.Column, Self.D.columns]
    """From the first position of each."""
    var stride: Int
    """Elements from one position to the next."""
    var before: Int32
    """Elements from a multiple of 16 bytes to the warp's first piece, the same for all vectors; -1, if all is written by the element."""
    var room: Shared[Scalar[Self.stored]]
    """Shared memory for as many values as a warp has, if it writes pieces."""

    @inline(.always)
    def __init__(
        out self,
        columns: StaticTuple[Self.Column, Self.D.columns],
        stride: Int,
    ):
        """Where a thread writes, of dealt values by the element."""
        self.columns = columns
        self.stride = stride
        self.before = -1
        self.room = {unsafe_from_address = VECTOR_BYTES}

    @inline(.always)
    def through(mut self, room: Shared[Scalar[Self.stored]]):
        """Has pieces written through shared memory, if the warp's columns lie side by side. All threads of a warp call this, if
        `in_pieces`, or none.

        - `room`: Room for as many values as a warp has.
        """
        comptime size = size_of[Self.stored]()
        var lane = Int(thread_idx.x) % WARP_SIZE
        var first = UInt64(Int(self.columns[0].address(0)) - lane * size)
        var apart = first != warp.shuffle_idx(first, 0)
        comptime for c in range(1, Self.D.columns):
            var place = Int(self.columns[c].address(0)) - lane * size
            apart |= UInt64(place - c * WARP_SIZE * size) != first
        # A bit for each lane.
        comptime Ballot = DType.uint64 if WARP_SIZE > 32 else DType.uint32
        if warp.vote[Ballot](apart) == 0:
            self.before = Int32(first // UInt64(size) % UInt64(Self.whole))
        self.room = room

    @inline(.always)
    def through_own_room(mut self):
        """Has pieces written through static shared memory of their own."""
        comptime if Self.in_pieces:
            self.through(
                unsafe_stack_allocation[
                    COLUMN_THREADS * Self.width,
                    Scalar[Self.stored],
                    alignment=VECTOR_BYTES,
                    address_space=AddressSpace.SHARED,
                ]().unsafe_offset(Int(thread_idx.x) // WARP_SIZE * Self.values)
            )

    @inline(.always)
    def store[
        accum: DType, //
    ](self, i: Int, values: SIMD[accum, Self.width], limit: Int32 = Int32.MAX):
        """Writes vector `i`, rounded, of dealt values those of fewer chains than `limit`. All of a warp that writes pieces call this, or none.
        """
        comptime if Self.dealt:
            var results = self.columns[0].results(values)
            comptime if Self.in_pieces:
                if self.before >= 0:
                    self._store_pieces(i, results, limit)
                    return
            var at = unseen(i)
            comptime for c in range(Self.D.columns):
                var first = self.columns[c].address(at)
                comptime for p in range(Self.D.chains):
                    if Int32(p) < limit:
                        first[unsafe_offset=p * self.stride] = results[
                            c * Self.D.chains + p
                        ]
        else:
            self.columns[0].store(i, values)

    @inline(.always)
    def _store_pieces(
        self,
        i: Int,
        results: SIMD[Self.stored, Self.width],
        limit: Int32,
    ):
        """Writes the warp's pieces of vector `i`."""
        comptime of_piece = Self.D.of_warp
        var lane = Int(thread_idx.x) % WARP_SIZE
        var first = self.columns[0].address(i).unsafe_offset(-lane)
        syncwarp()
        comptime for c in range(Self.D.columns):
            comptime for p in range(Self.D.chains):
                var place = (c * WARP_SIZE + lane + self._turned(p)) % of_piece
                self.room[unsafe_offset=p * of_piece + place] = results[
                    c * Self.D.chains + p
                ]
        syncwarp()
        comptime for start in range(0, Self.values // Self.whole, WARP_SIZE):
            var vector = start + lane
            var p = vector * Self.whole // of_piece
            var turned = self._turned(p)
            var place = vector * Self.whole % of_piece
            if Int32(p) < limit and (place > 0 or turned == 0):
                first.unsafe_store[alignment=VECTOR_BYTES](
                    p * self.stride + place - turned,
                    self.room.unsafe_load[
                        width=Self.whole, alignment=VECTOR_BYTES
                    ](vector * Self.whole),
                )
        comptime for start in range(0, Self.pieces * Self.whole, WARP_SIZE):
            var p = (start + lane) // Self.whole
            var place = lane % Self.whole
            var turned = self._turned(p)
            if Int32(p) < limit and p < Self.pieces and turned > 0:
                first[
                    unsafe_offset=p * self.stride + (place - turned) % of_piece
                ] = self.room[unsafe_offset=p * of_piece + place]

    @inline(.always)
    def _turned(self, p: Int) -> Int:
        """Returns how many elements piece `p` is after a multiple of 16 bytes.
        """
        return (Int(self.before) + p * self.stride) % Self.whole

    @inline(.always)
    def forget(mut self):
        """Hides from the compiler that distances are what they were."""
        comptime for c in range(Self.D.columns):
            var column = self.columns[c]
            column.forget()
            self.columns[c] = column
