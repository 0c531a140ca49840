"""Rows along an axis that is not the last, in panels of neighbours that are walked side by side."""

from std.math import align_up, ceildiv
from std.runtime import parallelism_level
from std.sys import size_of

from ..rows import Rows

comptime WIDTH = 1024
"""Most rows a panel: memory is read in pieces of this length, and as many pairs stay in the first cache."""


struct Panels[accum: DType](TrivialRegisterPassable):
    """How rows whose elements are `inner` apart are divided into panels.

    Parameters:
        accum: Dtype of the arithmetic.
    """

    comptime lanes: SIMDLength = 64 // size_of[Self.accum]()
    """Rows that share a vector: as many as fill a cache line of accumulators."""

    var rows: Rows
    var width: Int
    """Rows a panel, a multiple of `lanes`. The last panel before the end of `inner` may be narrower."""

    def __init__(out self, rows: Rows, spans: Int = 1):
        """Panels no wider than leaves something to each core.

        Args:
            rows: The rows.
            spans: In how many parts each panel is shared out.
        """
        self.rows = rows
        var panels = ceildiv(parallelism_level(), rows.outer * spans)
        var width = ceildiv(rows.inner, panels)
        self.width = min(WIDTH, align_up(width, Int(Self.lanes)))

    @inline(.always)
    def count(self) -> Int:
        """Returns the number of panels."""
        return self.rows.outer * ceildiv(self.rows.inner, self.width)

    @inline(.always)
    def vectors(self) -> Int:
        """Returns how many vectors the rows of a panel fill."""
        return self.width // Int(Self.lanes)

    @inline(.always)
    def place(self, panel: Int) -> Tuple[Int, Int, Int]:
        """Returns the panel's first row, the offset of that row's first element, and the number of rows.
        """
        var outer, tile = divmod(panel, ceildiv(self.rows.inner, self.width))
        var column = tile * self.width
        return (
            outer * self.rows.inner + column,
            outer * self.rows.n * self.rows.inner + column,
            min(self.width, self.rows.inner - column),
        )
