"""Which thread reads which elements of columns, by the vector or one by one.

Where memory can be read by the vector of neighbouring columns, a thread has the vectors of a few positions, a chain of terms for each
of their columns. Where it cannot, as `inner` or an address is no multiple of a vector, the elements of a warp are dealt to its threads so that neighbours
still read what lies side by side: what a thread has as a vector are then a few chains of one column, or of a few. Chains have the same
elements in the same order, and are added up in the same order, and so a column's bits are the same.
"""

from std.bit import log2_ceil
from std.utils.static_tuple import StaticTuple
from max.gpu import WARP_SIZE

from ...io.rows import unseen
from ...io.source import SourceColumn
from ...io.target import TargetColumn
from ..hardware.slots import Slots
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


@fieldwise_init
struct Targets[Column: TargetColumn, lanes: Int, width: Int, dealt: Bool](
    TrivialRegisterPassable
):
    """Where a thread writes its vectors.

    - `Column`: Where it writes.
    - `dealt`: As of `Deal`; then that is memory.
    """

    comptime D = Deal[Self.lanes, Self.width, Self.dealt]

    var columns: StaticTuple[Self.Column, Self.D.columns]
    """From the first position of each."""
    var stride: Int
    """Elements from one position to the next."""

    @inline(.always)
    def store[
        accum: DType, //
    ](self, i: Int, values: SIMD[accum, Self.width], limit: Int32 = Int32.MAX,):
        """Writes vector `i`, rounded, of dealt values those of fewer chains than `limit`.
        """
        comptime if Self.dealt:
            var results = self.columns[0].results(values)
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
    def forget(mut self):
        """Hides from the compiler that distances are what they were."""
        comptime for c in range(Self.D.columns):
            var column = self.columns[c]
            column.forget()
            self.columns[c] = column
