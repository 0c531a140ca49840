"""How many columns a block takes, and in which way; `deal` says what that is for each thread."""

from std.math import ceildiv

from ...io.rows import Rows

comptime COLUMN_THREADS = 256
"""Threads a block."""


@fieldwise_init
struct Way(Equatable, TrivialRegisterPassable):
    """How a block's threads take columns."""

    var value: Int

    comptime VECTORS = Self(0)
    """By the vector of neighbouring columns, where all vectors are aligned."""
    comptime DEALT = Self(1)
    """One by one, whatever is aligned."""
    comptime SKEWED = Self(2)
    """By the granule, of tensors that begin with one. Of a block's granules of a position the first and the last are written by other blocks."""


struct Tile(TrivialRegisterPassable):
    """The columns of a block."""

    var lanes: Int
    """Vectors of columns, a power of two."""
    var width: Int
    """Columns a vector."""
    var way: Way
    """How they are taken."""
    var threads: Int
    """Threads of the block."""

    def __init__(
        out self,
        lanes: Int,
        width: Int,
        way: Way = Way.VECTORS,
        threads: Int = COLUMN_THREADS,
    ):
        """Columns that a block takes."""
        self.lanes = lanes
        self.width = width
        self.way = way
        self.threads = threads

    def is_dealt(self) -> Bool:
        """Returns whether they are taken one by one."""
        return self.way == Way.DEALT

    def is_skewed(self) -> Bool:
        """Returns whether they are taken by the granule."""
        return self.way == Way.SKEWED

    def skewed(self, times: Int) -> Self:
        """Returns `times` as many columns for as many more threads, taken by the granule.
        """
        return {
            times * self.lanes,
            self.width,
            Way.SKEWED,
            times * self.threads,
        }

    def straight(self) -> Self:
        """Returns as many columns, taken by the vector if these are taken by the granule.
        """
        var result = self
        if self.is_skewed():
            result.way = Way.VECTORS
        return result

    def deep(self) -> Int:
        """Returns how many chains a column has."""
        return self.threads // self.lanes

    def columns(self) -> Int:
        """Returns how many columns are read."""
        return self.lanes * self.width

    @inline(.always)
    def tiles(self, inner: UInt32) -> UInt32:
        """Returns how many blocks take the columns of a position, of skewed ones.

        Args:
            inner: How many columns it has.
        """
        return ceildiv(self.granules(inner), UInt32(self.lanes - 2))

    @inline(.always)
    def granules(self, inner: UInt32) -> UInt32:
        """Returns in how many granules the columns of a position lie at most, wherever they begin.

        Args:
            inner: How many columns it has.
        """
        return (inner + UInt32(self.width) - 2) // UInt32(self.width) + 1

    def fills(self, inner: Int) -> Bool:
        """Returns whether skewed columns leave few threads idle: 2000×300×60 of bfloat16, nine granules of fourteen, takes 109 µs, and dealt 86 (H100).

        Args:
            inner: Columns of a position.
        """
        var columns = UInt32(inner)
        var all = self.tiles(columns) * UInt32(self.lanes - 2)
        return 4 * self.granules(columns) > 3 * all

    @inline(.always)
    def count(self, rows: Rows) -> Int:
        """Returns how many blocks take the columns of a tensor.

        Args:
            rows: The columns, as rows along the axis.
        """
        if self.is_skewed():
            return rows.outer * Int(self.tiles(UInt32(rows.inner)))
        return ceildiv(rows.count(), self.columns())
