"""What one thread takes of neighbouring rows along an axis that is not the last.

Seen as (outer, n, inner), the tensor has outer × inner rows, which this file calls columns, of n positions that are
`inner` apart. Columns are taken by the vector. A block is a matrix of threads: `lanes` neighbouring vectors of columns
wide, so that every position is read in pieces as long as that, and as deep as it has threads for; those of a lane take
its positions in turn. Columns are counted through all of the tensor, so that a small `inner` leaves no lane idle; skewed ones
through a position. `scratch` says how the threads of a column meet.
"""

from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ...ops.finish import Finish
from ...io.rows import Positions, Target
from ...io.source import RowSource
from ...io.target import RowTarget
from ..hardware.pair import Pair
from .deal import Deal, Sources, Targets
from .tile import Tile


struct StridedPart[tile: Tile, counted: Bool](TrivialRegisterPassable):
    """The vectors of one thread: every `deep`-th position of the block's share of some columns.

    Parameters:
        tile: The block's columns. Where dealt ones, which are in memory and `counted`, are more than are left, the last is taken again.
        counted: Whether its bounds are counts of 32 bits, which is best where a vector's address is a multiple of its
            index away; otherwise they are positions, as computed logits are asked for by them.
    """

    comptime width = Self.tile.width
    comptime D = Deal[Self.tile]
    comptime deep = Self.tile.deep()
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
    var skew: Int32
    """Columns of its granules that are before where vectors would begin: the same at all of its positions."""
    var is_written: Bool
    """Whether its granule is written by this block."""
    var cut: Int32
    """Its vector that reaches beyond the tensor, of granules; -1, if none does."""

    @inline(.always)
    def __init__(
        out self,
        index: UInt32,
        columns: Int64,
        inner: Int64,
        n: Int64,
        thread: Int,
        rank: UInt32,
        share: Int64,
    ):
        """A thread's part of some columns.

        - `index`: Which tile.
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
        self.skew = 0
        self.is_written = True
        self.cut = -1
        var mine = Self.D.chain(thread)
        self.n = Int(n)
        self.stride = Int(apart)
        self.start = block * Int(share)
        self.first = self.start + mine
        comptime if Self.tile.is_skewed():
            # Neighbouring threads have neighbouring granules, the first the last but one of the block before.
            var lane = UInt32(thread % Self.tile.lanes)
            var outer = index // Self.tile.tiles(apart)
            var granule = Self._first_granule(index, outer, apart) + lane
            var place = (outer * UInt32(n) + UInt32(self.first)) * apart
            self.skew = Int32(place % UInt32(Self.width))
            self.outer[0] = Int(outer)
            self.inner[0] = Int(
                (Int32(granule) - 1) * Int32(Self.width) - self.skew
            )
            self.is_there = granule > 0 and self.inner[0] < self.stride
            var left = Int32(n) - 1 - Int32(self.first)
            if (
                self.inner[0] + Self.width > self.stride
                and outer + 1 == all // apart
                and left % Int32(Self.deep) == 0
            ):
                self.cut = left // Int32(Self.deep)
            self.is_written = UInt32(0) < lane < UInt32(Self.tile.lanes - 1)
        comptime for c in range(0 if Self.tile.is_skewed() else Self.D.columns):
            var column = index * UInt32(Self.tile.columns()) + UInt32(
                Self.D.column(thread, c)
            )
            comptime if c == 0:
                self.is_there = column < all
            comptime if Self.tile.is_dealt():
                column = min(column, all - 1)
            self.outer[c], self.inner[c] = Self._place(column, apart)
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
    def source[S: RowSource, //](self, x: S) -> Sources[S.Column, Self.tile]:
        """Returns where this thread reads."""
        var columns = StaticTuple[S.Column, Self.D.columns]()
        comptime for c in range(Self.D.columns):
            columns[c] = x.column(self.positions(c))
        return {
            columns,
            self.stride,
            self.cut,
            Int32(self.stride - self.inner[0]),
        }

    @inline(.always)
    def target[T: RowTarget, //](self, y: T) -> Targets[T.Column, Self.tile]:
        """Returns where this thread writes."""
        var columns = StaticTuple[T.Column, Self.D.columns]()
        comptime for c in range(Self.D.columns):
            columns[c] = y.column(self.positions(c))
        var first, end = self.written()
        return {columns, self.stride, first, end}

    @inline(.always)
    def written(self) -> Tuple[Int32, Int32]:
        """Returns which of its vector's columns this thread writes, the first and the one after the last.
        """
        comptime if Self.tile.is_skewed():
            if self.is_written:
                var at = Int32(self.inner[0])
                return (
                    max(Int32(0), -at),
                    min(Int32(Self.width), Int32(self.stride) - at),
                )
            return Int32(0), Int32(0)
        else:
            return Int32(0), Int32(Self.width)

    @inline(.always)
    def sinks[S: RowSource, //](self, x: S) -> SIMD[DType.float32, Self.width]:
        """Returns the additional logits of its columns."""
        comptime F = DType.float32
        comptime if Self.tile.is_skewed():
            var logits = SIMD[F, Self.width]()
            comptime for k in range(Self.width):
                var column = max(0, min(self.inner[0] + k, self.stride - 1))
                logits[k] = x.sink[1](self.outer[0], column).cast[F]()[0]
            return logits
        comptime if Self.tile.is_dealt():
            var logits = SIMD[F, Self.width]()
            comptime for c in range(Self.D.columns):
                var logit = x.sink[1](self.outer[c], self.inner[c]).cast[F]()
                comptime for p in range(Self.D.chains):
                    logits[c * Self.D.chains + p] = logit[0]
            return logits
        else:
            return x.sink[Self.width](self.outer[0], self.inner[0]).cast[F]()

    @inline(.always)
    def sink[
        S: RowSource, //
    ](self, x: S, index: UInt32, columns: Int64, column: Int) -> Float32:
        """Returns the additional logit of a column of the block, any where the tensor does not have it.

        - `index`, `columns`: As for a thread's part.
        - `column`: Which of the block's, counted as if none was skewed.
        """
        var apart = UInt32(self.stride)
        var outer: Int
        var inner: Int
        comptime if Self.tile.is_skewed():
            outer = self.outer[0]
            var granule = Self._first_granule(index, UInt32(outer), apart)
            inner = (Int(granule) - 1) * Self.width + column
            inner = max(0, min(inner, self.stride - 1))
        else:
            var of_tensor = min(
                index * UInt32(Self.tile.columns()) + UInt32(column),
                UInt32(columns) - 1,
            )
            outer, inner = Self._place(of_tensor, apart)
        return x.sink[1](outer, inner).cast[DType.float32]()[0]

    @staticmethod
    @inline(.always)
    def _first_granule(index: UInt32, outer: UInt32, apart: UInt32) -> UInt32:
        """Returns which granule of its position the first of a skewed tile is, counted from the one before the position's first.

        - `index`: Which tile.
        - `outer`: Its place before the axis.
        - `apart`: How many columns a position has.
        """
        return (index - outer * Self.tile.tiles(apart)) * UInt32(
            Self.tile.lanes - 2
        )

    @staticmethod
    @inline(.always)
    def _place(column: UInt32, apart: UInt32) -> Tuple[Int, Int]:
        """Returns the places of a column of the tensor before the axis and after it.
        """
        var outer = column // apart
        return Int(outer), Int(column - outer * apart)

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
        var first, end = self.written()
        comptime for k in range(Self.width):
            comptime c = k // values
            comptime if not Self.tile.is_dealt() or k % values == 0:
                var column = self.outer[c] * self.stride + self.inner[c]
                comptime if not Self.tile.is_dealt():
                    column += k
                if not Self.tile.is_skewed() or first <= Int32(k) < end:
                    y[unsafe_offset=2 * column] = pair.m[k]
                    y[unsafe_offset=2 * column + 1] = d[k]

    @inline(.always)
    def leads(self) -> Bool:
        """Returns whether this thread has the first chains of its columns, which somebody else has as well where these are beyond the last.
        """
        return self.is_there and self.first == self.start

    @inline(.always)
    def has_all(self, i: Int) -> Bool:
        """Returns whether all of its chains have a vector `i`, and all of it is in the tensor.
        """
        var is_whole = self.left(i) >= Int32(Self.D.chains)
        comptime if Self.tile.is_skewed():
            return is_whole and (self.cut < 0 or Int32(i) < self.cut)
        else:
            return is_whole

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
        """Returns how many vectors every thread of the lane has before its last, which some may not have.
        """
        return (self._length() - 1) // Self.deep

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


def is_exact[S: RowSource, T: RowTarget, finish: Finish]() -> Bool:
    """Returns whether exponentials are of the accuracy of float32, for use at compile time: where logits or results are not of 16 bits, or
    sinks may be beside logits that are computed.
    """
    comptime wide = finish != Finish.PAIR and size_of[T.Column.stored]() > 2
    return size_of[S.elements]() > 2 or wide or (S.has_sink and not S.in_memory)
