"""Rows along an axis that is not the last, in panels of neighbours that are walked side by side."""

from std.math import align_up, ceildiv
from std.runtime import parallelism_level
from std.sys import size_of

from ..io.rows import Rows
from .tuning import WIDTH


struct Panels[accum: DType](TrivialRegisterPassable):
    """How rows whose elements are `inner` apart are divided into panels.

    Parameters:
        accum: Dtype of the arithmetic.
    """

    comptime lanes: SIMDLength = 64 // size_of[Self.accum]()
    """Rows that share a vector: as many as fill a cache line of accumulators."""

    var rows: Rows[]
    var line: Int
    """Rows that are neighbours: no panel reaches beyond so many."""
    var width: Int
    """Rows a panel, a multiple of `lanes`. The last panel of a line may be narrower."""

    def __init__(out self, rows: Rows, line: Int, spans: Int):
        """Panels no wider than leaves something to each core.

        Args:
            rows: The rows.
            line: How many of them are neighbours, a divisor of `rows.inner`.
            spans: In how many parts each panel is shared out.
        """
        self.rows = rows
        self.line = line
        var lines = rows.count() // line
        var panels = ceildiv(parallelism_level(), lines * spans)
        self.width = min(
            WIDTH, align_up(ceildiv(line, panels), Int(Self.lanes))
        )

    @inline(.always)
    def count(self) -> Int:
        """Returns the number of panels."""
        return self.rows.count() // self.line * ceildiv(self.line, self.width)

    @inline(.always)
    def vectors(self) -> Int:
        """Returns how many vectors the rows of a panel fill."""
        return self.width // Int(Self.lanes)

    @inline(.always)
    def place(self, panel: Int) -> Tuple[Int, Int, Int]:
        """Returns the places of the panel's first row before and after the axis, and the number of rows.
        """
        var line, tile = divmod(panel, ceildiv(self.line, self.width))
        var column = tile * self.width
        var outer, inner = divmod(line * self.line + column, self.rows.inner)
        return outer, inner, min(self.width, self.line - column)
