"""What one thread takes of neighbouring rows along an axis that is not the last, and how the threads of a row meet.

Seen as (outer, n, inner), the tensor has outer × inner rows, which this file calls columns, of n positions that are
`inner` apart. Columns are taken by the vector. A block is a matrix of threads: `lanes` neighbouring vectors of columns
wide, so that every position is read in pieces as long as that, and as deep as it has threads for; those of a lane take
its positions in turn. Columns are counted through all of the tensor, so that a small `inner` leaves no lane idle.
"""

from std.math import ceildiv
from std.memory import bitcast, unsafe_stack_allocation
from std.sys import size_of
from std.utils.static_tuple import StaticTuple
from max.gpu import WARP_SIZE, thread_idx
from max.gpu.sync import barrier

from ...ops.finish import Finish
from ...io.rows import Positions, Target
from ...io.source import RowSource
from ...io.target import RowTarget
from ..hardware.cluster import Pair
from ..hardware.team import maximum
from ..hardware.tree_reduction import Shared
from ..hardware.warp_reduction import lanes_reduce
from .deal import COLUMN_THREADS, Deal, Sources, Targets


struct StridedPart[lanes: Int, width: Int, counted: Bool, dealt: Bool](
    TrivialRegisterPassable
):
    """The vectors of one thread: every `deep`-th position of the block's share of some columns.

    Parameters:
        lanes: Vectors of columns that a block takes, a power of two.
        width: Columns a vector.
        counted: Whether its bounds are counts of 32 bits, which is best where a vector's address is a multiple of its
            index away; otherwise they are positions, as computed logits are asked for by them.
        dealt: As of `Deal`, of what is in memory and `counted`; otherwise `inner` is a multiple of `width`. Where there are more
            columns in a block than are left, the last is taken again.
    """

    comptime D = Deal[Self.lanes, Self.width, Self.dealt]
    comptime deep = COLUMN_THREADS // Self.lanes
    """Chains of a column."""

    var outer: StaticTuple[Int, Self.D.columns]
    """Place of each column before the axis."""
    var inner: StaticTuple[Int, Self.D.columns]
    """Place of each after it."""
    var is_there: Bool
    """Whether the tensor has any of them."""
    var n: Int
    """Positions of the tensor."""
    var stride: Int
    """Elements from one position to the next."""
    var start: Int
    """The block's first position."""
    var first: Int
    """This thread's first."""
    var end: Int
    """The one after the block's last; no more than `start` where the columns are beyond the last."""
    var count: Int32
    """Positions of the block; none where the columns are beyond the last."""
    var ahead: Int32
    """How many of them are not before this thread's first."""

    @inline(.always)
    def __init__(
        out self,
        tile: UInt32,
        columns: Int64,
        inner: Int64,
        n: Int64,
        thread: Int,
        rank: UInt32,
        share: Int64,
    ):
        """A thread's part of some columns.

        - `tile`: Which columns: those of `lanes` vectors.
        - `columns`: How many there are in the tensor, less than 2^31.
        - `inner`: How many there are in a position.
        - `n`: Positions.
        - `rank`: The block's, among those that share the positions.
        - `share`: Positions that each of them takes, as long as there are any; less than 2^31.
        """
        var all = UInt32(columns)
        var apart = UInt32(inner)
        var block = Int(rank)
        self.outer = StaticTuple[Int, Self.D.columns]()
        self.inner = StaticTuple[Int, Self.D.columns]()
        self.is_there = True
        comptime for c in range(Self.D.columns):
            var column = tile * UInt32(Self.lanes * Self.width) + UInt32(
                Self.D.column(thread, c)
            )
            comptime if c == 0:
                self.is_there = column < all
            comptime if Self.dealt:
                column = min(column, all - 1)
            var outer = column // apart
            self.outer[c] = Int(outer)
            self.inner[c] = Int(column - outer * apart)
        var mine = Self.D.chain(thread)
        self.n = Int(n)
        self.stride = Int(apart)
        self.start = block * Int(share)
        self.first = self.start + mine
        self.end = min(Int(n), self.start + Int(share)) if self.is_there else 0
        self.count = Int32(
            max(0, min(Int(share), Int(n) - self.start))
        ) if self.is_there else Int32(0)
        self.ahead = self.count - Int32(mine)

    @inline(.always)
    def positions(self, c: Int) -> Positions:
        """Returns the positions of its `c`-th column."""
        return {
            self.outer[c],
            self.inner[c],
            self.first,
            Self.deep,
            self.n,
            self.stride,
        }

    @inline(.always)
    def source[
        S: RowSource, //
    ](self, x: S) -> Sources[S.Column, Self.lanes, Self.width, Self.dealt]:
        """Returns where this thread reads."""
        var columns = StaticTuple[S.Column, Self.D.columns]()
        comptime for c in range(Self.D.columns):
            columns[c] = x.column(self.positions(c))
        return {columns, self.stride}

    @inline(.always)
    def target[
        T: RowTarget, //
    ](self, y: T) -> Targets[T.Column, Self.lanes, Self.width, Self.dealt]:
        """Returns where this thread writes."""
        var columns = StaticTuple[T.Column, Self.D.columns]()
        comptime for c in range(Self.D.columns):
            columns[c] = y.column(self.positions(c))
        return {columns, self.stride}

    @inline(.always)
    def sinks[S: RowSource, //](self, x: S) -> SIMD[DType.float32, Self.width]:
        """Returns the additional logits of its columns."""
        comptime F = DType.float32
        comptime if Self.dealt:
            var logits = SIMD[F, Self.width]()
            comptime for c in range(Self.D.columns):
                var logit = x.sink[1](self.outer[c], self.inner[c]).cast[F]()
                comptime for p in range(Self.D.chains):
                    logits[c * Self.D.chains + p] = logit[0]
            return logits
        else:
            return x.sink[Self.width](self.outer[0], self.inner[0]).cast[F]()

    @inline(.always)
    def write[
        exact: Bool
    ](self, y: Target[DType.float32], pair: Pair[Self.width]):
        """Writes the pairs of its columns.

        Parameters:
            exact: Of the scale that the sums are in.

        - `y`: Where those of the first column are.
        """
        comptime values = Self.width // Self.D.columns
        var d = pair.relative[exact]()
        comptime for k in range(Self.width):
            comptime c = k // values
            comptime if not Self.dealt or k % values == 0:
                var column = self.outer[c] * self.stride + self.inner[c]
                comptime if not Self.dealt:
                    column += k
                y[unsafe_offset=2 * column] = pair.m[k]
                y[unsafe_offset=2 * column + 1] = d[k]

    @inline(.always)
    def leads(self) -> Bool:
        """Returns whether this thread has the first chains of its columns, which somebody else has as well where these are beyond the last.
        """
        return self.is_there and self.first == self.start

    @inline(.always)
    def has_all(self, i: Int) -> Bool:
        """Returns whether all of its chains have a vector `i`."""
        return self.left(i) >= Int32(Self.D.chains)

    @inline(.always)
    def left(self, i: Int) -> Int32:
        """Returns how many of its chains have a vector `i`, or more."""
        return self.ahead - Int32(i * Self.deep)

    @inline(.always)
    def before(self, length: Int) -> Self:
        """Returns the part of it that is before position `length`."""
        var part = self
        part.end = min(self.end, length)
        part.count = min(self.count, Int32(max(0, length - self.start)))
        part.ahead = self.ahead + (part.count - self.count)
        return part

    @inline(.always)
    def full_rounds(self) -> Int:
        """Returns how many vectors every thread of the lane has; some may have one more.
        """
        return self._length() // Self.deep

    @inline(.always)
    def rounds(self) -> Int:
        """Returns how many vectors the lane's first thread has: the others have as many or one less.
        """
        return ceildiv(self._length(), Self.deep)

    @inline(.always)
    def has(self, i: Int) -> Bool:
        """Returns whether this thread has a vector `i`."""
        comptime if Self.counted:
            return Int32(i * Self.deep) < self.ahead
        else:
            return self.first + i * Self.deep < self.end

    @inline(.always)
    def _length(self) -> Int:
        """Returns how many positions the block has."""
        comptime if Self.counted:
            return Int(self.count)
        else:
            return max(0, self.end - self.start)


struct Scratch[lanes: Int, width: Int, dealt: Bool](TrivialRegisterPassable):
    """Shared memory in which the threads of each lane combine a value a column.

    - `lanes`: Vectors of columns that the block takes.
    - `width`: Columns a vector.
    """

    comptime D = Deal[Self.lanes, Self.width, Self.dealt]
    comptime rows = COLUMN_THREADS // max(Self.lanes, WARP_SIZE)
    """Threads a lane that are left when those of a warp have combined theirs."""
    comptime columns = Self.lanes * Self.width
    comptime stride = Self.columns + 4
    """From one row to the next: in other banks."""
    comptime Values = SIMD[DType.float32, Self.width]

    var first: Shared[Float32]
    """The first row."""

    @inline(.always)
    def __init__(out self):
        self.first = unsafe_stack_allocation[
            scratch_bytes(Self.lanes, Self.width) // 4,
            Float32,
            alignment=16,
            address_space=AddressSpace.SHARED,
        ]()
        comptime if Self.rows > 1:
            if thread_idx.x == 0:
                self.first[unsafe_offset=Self.columns] = 0

    @inline(.always)
    def secret(self) -> UInt32:
        """Returns 0, which was put between the rows; if there are several, the compiler knows neither that nor how
        to learn it before they are done.
        """
        comptime if Self.rows > 1:
            return bitcast[DType.uint32](self.first[unsafe_offset=Self.columns])
        else:
            return 0

    @inline(.always)
    def take(self, row: Int, thread: Int) -> Self.Values:
        """Returns what is in a row for this thread's columns."""
        return self.D.load(self.first.unsafe_offset(row * Self.stride), thread)

    @inline(.always)
    def gather[
        dtype: DType, //, largest: Bool
    ](self, thread: Int, value: SIMD[dtype, Self.width]) -> Self.Values:
        """Combines the values of the threads of a lane in each warp, and has them all in the rows.

        Parameters:
            largest: Whether they are combined to the largest, or to the sum.

        Returns:
            The combined value of those that are in this warp.
        """
        var wide = Self.D.of_chains[
            combine_columns[largest, dtype, Self.width]
        ](value).cast[DType.float32]()
        comptime if Self.rows > 1:
            # Threads of a warp that have its columns.
            comptime some = min(
                WARP_SIZE, Self.D.of_warp if Self.dealt else Self.lanes
            )
            if some == WARP_SIZE or thread % WARP_SIZE < some:
                self.D.store(
                    self.first.unsafe_offset(
                        thread // max(Self.lanes, WARP_SIZE) * Self.stride
                    ),
                    thread,
                    wide,
                )
            barrier()
        return wide

    @inline(.always)
    def column[largest: Bool](self, column: Int, thread: Int) -> Float32:
        """Combines what `gather` has left of a column; as many neighbouring threads as there are rows call this for
        the same one.

        Parameters:
            largest: As for `gather`.

        - `column`: Which of the block's.

        Returns:
            The combined value of the column.
        """
        return lanes_reduce[
            combine_columns[largest, DType.float32, 1], Self.rows
        ](self.first[unsafe_offset=thread % Self.rows * Self.stride + column])

    @inline(.always)
    def reduce[
        dtype: DType, //, largest: Bool
    ](self, thread: Int, value: SIMD[dtype, Self.width]) -> Self.Values:
        """Combines the values of the threads of each lane and hands the result to each, with the same bits; it is left
        in the first row as well if there are eight.

        Every thread of the block must call this, once.

        Parameters:
            largest: Whether they are combined to the largest, NaN if any is, or to the sum.

        Returns:
            The combined value of the lane.
        """
        var result = self.gather[largest](thread, value)
        comptime if Self.rows > 4:
            comptime all = Self.columns * Self.rows
            comptime for start in range(0, all, COLUMN_THREADS):
                if start + thread < all:
                    var column = (start + thread) // Self.rows
                    var combined = self.column[largest](column, thread)
                    if thread % Self.rows == 0:
                        self.first[unsafe_offset=column] = combined
            barrier()
            return self.take(0, thread)
        elif Self.rows > 1:
            # In the same order by every thread.
            result = self.take(0, thread)
            comptime for row in range(1, Self.rows):
                result = combine_columns[largest, DType.float32, Self.width](
                    result, self.take(row, thread)
                )
        return result


def scratch_bytes(lanes: Int, width: Int) -> Int:
    """Returns the bytes of a `Scratch`, for use at compile time."""
    return COLUMN_THREADS // max(lanes, WARP_SIZE) * (lanes * width + 4) * 4


@inline(.always)
def combine_columns[
    largest: Bool, dtype: DType, width: SIMDLength
](a: SIMD[dtype, width], b: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns the larger of two values of each column, NaN if either is, or their sum.
    """
    comptime if largest:
        return maximum(a, b)
    else:
        return a + b


def is_exact[S: RowSource, T: RowTarget, finish: Finish]() -> Bool:
    """Returns whether exponentials are of the accuracy of float32, for use at compile time: where logits or results are not of 16 bits, or
    sinks may be beside logits that are computed.
    """
    comptime wide = finish != Finish.PAIR and size_of[T.Column.stored]() > 2
    return size_of[S.elements]() > 2 or wide or (S.has_sink and not S.in_memory)
