"""How the threads that have a column meet: in registers of a warp, and in shared memory between warps.
"""

from std.memory import bitcast, unsafe_stack_allocation
from max.gpu import WARP_SIZE, thread_idx
from max.gpu.sync import barrier

from ...math.exponential import Scale
from ..hardware.team import maximum
from ..hardware.tree_reduction import Shared
from ..hardware.warp_reduction import values_reduce
from .deal import Deal
from .granules import slanted, straightened
from .tile import COLUMN_THREADS, Tile


@inline(.always)
def put_straight[
    tile: Tile
](values: SIMD[DType.float32, tile.width], skew: Int32, thread: Int) -> SIMD[
    DType.float32, tile.width
]:
    """Returns values of a thread's columns as of vectors that are not skewed. All of a warp call this.

    Parameters:
        tile: The block's columns.

    Args:
        values: What this thread has.
        skew: As of its part.
        thread: The thread.
    """
    comptime if tile.is_skewed():
        return straightened[tile.lanes](values, skew, thread % tile.lanes)
    else:
        return values


@inline(.always)
def put_askew[
    tile: Tile
](values: SIMD[DType.float32, tile.width], skew: Int32, thread: Int) -> SIMD[
    DType.float32, tile.width
]:
    """Undoes `put_straight`, but for columns that no thread of a tile has at all positions.
    """
    comptime if tile.is_skewed():
        return slanted[tile.lanes](values, skew, thread % tile.lanes)
    else:
        return values


struct Scratch[tile: Tile](TrivialRegisterPassable):
    """Shared memory in which the threads of each lane combine a value a column.

    Parameters:
        tile: The block's columns.
    """

    comptime D = Deal[Self.tile]
    comptime lanes = Self.tile.lanes
    comptime width = Self.tile.width
    comptime threads = Self.tile.threads
    comptime rows = Self.threads // max(Self.lanes, WARP_SIZE)
    """Threads a lane that are left when those of a warp have combined theirs."""
    comptime columns = Self.tile.columns()
    comptime stride = Self.columns + 4
    """From one row to the next: in other banks."""
    comptime Values = SIMD[DType.float32, Self.width]

    var first: Shared[Float32]
    """The first row."""
    var skew: Int32
    """As of the thread's part."""

    @inline(.always)
    def __init__(out self, skew: Int32):
        """Room for them.

        Args:
            skew: As of the thread's part.
        """
        self.first = unsafe_stack_allocation[
            scratch_bytes(Self.tile) // 4,
            Float32,
            alignment=16,
            address_space=AddressSpace.SHARED,
        ]()
        self.skew = skew
        comptime if Self.rows > 1:
            if thread_idx.x == 0:
                self.first[unsafe_offset=Self.columns] = 0

    @inline(.always)
    def __init__(out self, first: Shared[Float32], skew: Int32):
        """Room that has been used.

        Args:
            first: The first row.
            skew: As of the thread's part.
        """
        self.first = first
        self.skew = skew

    @inline(.always)
    def straight(self, thread: Int, values: Self.Values) -> Self.Values:
        """Returns what `reduce` has returned, of skewed columns to each thread as if they were not.
        """
        comptime if Self.tile.is_skewed():
            return self.D.load(self.first, thread)
        else:
            return values

    @inline(.always)
    def skewed(
        self, skew: Int32, thread: Int, values: Self.Values
    ) -> Self.Values:
        """Returns what `reduce` has returned with a skew of 0, to each thread with its own.
        """
        comptime if Self.tile.is_skewed():
            return Self(self.first, skew).take(0, thread)
        else:
            return values

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
        comptime if Self.tile.is_skewed():
            var values = Self.Values()
            var at = row * Self.stride + Self.D.column(thread, 0)
            comptime for k in range(Self.width):
                values[k] = self.first[
                    unsafe_offset=max(0, at + k - Int(self.skew))
                ]
            return values
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
        comptime F = DType.float32
        var wide: Self.Values
        comptime if Self.tile.is_skewed():
            wide = Self.D.of_chains[combine_columns[largest, F, Self.width]](
                put_straight[Self.tile](value.cast[F](), self.skew, thread)
            )
        else:
            wide = Self.D.of_chains[
                combine_columns[largest, dtype, Self.width]
            ](value).cast[F]()
        comptime if Self.rows > 1:
            # Threads of a warp that have its columns.
            comptime some = min(
                WARP_SIZE,
                Self.D.of_warp if Self.tile.is_dealt() else Self.lanes,
            )
            if some == WARP_SIZE or thread % WARP_SIZE < some:
                self.D.store(
                    self.first.unsafe_offset(
                        Self._row(thread // max(Self.lanes, WARP_SIZE))
                        * Self.stride
                    ),
                    thread,
                    wide,
                )
            barrier()
        return wide

    @staticmethod
    @inline(.always)
    def _row(index: Int) -> Int:
        """Returns the row of a warp, or of several that share a lane: of more threads than `COLUMN_THREADS`, neighbours are as far apart as can be, as `column` combines
        those first, which one warp of so many threads would have held.
        """
        comptime times = max(1, Self.threads // COLUMN_THREADS)
        return index // times + index % times * (Self.rows // times)

    @inline(.always)
    def column[largest: Bool](self, column: Int) -> Float32:
        """Returns what `gather` has left of a column, combined.

        Parameters:
            largest: As for `gather`.

        - `column`: Which of the block's.
        """
        var values = Array[Float32, Self.rows](fill=0)
        comptime for row in range(Self.rows):
            values[row] = self.first[unsafe_offset=row * Self.stride + column]
        return values_reduce[combine_columns[largest, DType.float32, 1]](values)

    comptime has_ends = Self.rows > 4
    """Whether one thread combines a column, and can leave what is found once for all: it has its rows to itself until all have met at a barrier."""

    @inline(.always)
    def leave[exact: Bool](self, row: Int, column: Int, scale: Scale[exact]):
        """Leaves a column's scale in its rows from one on.

        Parameters:
            exact: Of the scale.

        Args:
            row: The first of the rows.
            column: Which of the block's.
            scale: The scale.
        """
        comptime for i in range(Scale[exact].parts):
            self.first[
                unsafe_offset=(row + i) * Self.stride + column
            ] = scale.part[i]()[0]

    @inline(.always)
    def scale[
        exact: Bool
    ](self, row: Int, thread: Int, m: Self.Values) -> Scale[exact, Self.width]:
        """Returns the scales that have been left for a thread's columns.

        Parameters:
            exact: Of the scales.

        Args:
            row: The first of the rows.
            thread: The thread.
            m: Their maxima.
        """
        comptime S = Scale[exact, Self.width]
        var parts = Array[Self.Values, S.parts](fill=Self.Values(0))
        comptime for i in range(S.parts):
            parts[i] = self.take(row + i, thread)
        return S(m, parts)

    @inline(.always)
    def scale_of_largest[
        dtype: DType, //, exact: Bool
    ](self, thread: Int, value: SIMD[dtype, Self.width]) -> Tuple[
        Self.Values, Scale[exact, Self.width]
    ]:
        """Does what `reduce` does for the largest, and returns the scales of them as well.

        Parameters:
            exact: Of the scales.

        Args:
            thread: This thread.
            value: As of `reduce`.
        """
        comptime if Self.has_ends:
            _ = self.gather[True](thread, value)
            comptime for start in range(0, Self.columns, Self.threads):
                var column = start + thread
                if column < Self.columns:
                    var m = self.column[True](column)
                    self.first[unsafe_offset=column] = m
                    self.leave(1, column, Scale[exact](m))
            barrier()
            var m = self.take(0, thread)
            return m, self.scale[exact](1, thread, m)
        else:
            var m = self.reduce[True](thread, value)
            return m, Scale[exact, Self.width](m)

    @inline(.always)
    def reduce[
        dtype: DType, //, largest: Bool
    ](self, thread: Int, value: SIMD[dtype, Self.width]) -> Self.Values:
        """Combines the values of the threads of each lane and hands the result to each, with the same bits; it is left
        in the first row as well if there are more than four.

        Every thread of the block must call this, once.

        Parameters:
            largest: Whether they are combined to the largest, NaN if any is, or to the sum.

        Returns:
            The combined value of the lane.
        """
        var result = self.gather[largest](thread, value)
        comptime if Self.has_ends:
            # Fewer instructions than by several threads a column.
            comptime for start in range(0, Self.columns, Self.threads):
                if start + thread < Self.columns:
                    self.first[unsafe_offset=start + thread] = self.column[
                        largest
                    ](start + thread)
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


def scratch_bytes(tile: Tile) -> Int:
    """Returns the bytes of a `Scratch`, for use at compile time."""
    return tile.threads // max(tile.lanes, WARP_SIZE) * (tile.columns() + 4) * 4


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
