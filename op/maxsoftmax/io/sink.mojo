"""Logits with one more for each row, which takes part in the denominator only."""

from std.builtin.device_passable import DeviceTypeEncoder

from ..math.online import accumulator
from .rows import Positions
from .source import RowSource


@fieldwise_init
struct WithSink[Logits: RowSource, Sinks: RowSource](RowSource):
    """Logits, and one more for each row.

    Parameters:
        Logits: The logits.
        Sinks: The additional ones: a tensor whose axis has length 1.
    """

    comptime device_type: AnyType = Self
    comptime elements = Self.Logits.elements
    comptime is_causal = Self.Logits.is_causal
    comptime has_sink = True
    comptime Line = Self.Logits.Line
    comptime Column = Self.Logits.Column

    var logits: Self.Logits
    """The logits."""
    var sinks: Self.Sinks
    """The additional ones."""

    @inline(.always)
    def line(self, row: Int, n: Int) -> Self.Line:
        """Returns a row along the last axis."""
        return self.logits.line(row, n)

    @inline(.always)
    def column(self, at: Positions) -> Self.Column:
        """Returns some elements of a row and its neighbours."""
        return self.logits.column(at)

    @inline(.always)
    def is_masked(self) -> Bool:
        """Returns whether a row of nothing but -inf gives 0."""
        return self.logits.is_masked()

    @inline(.always)
    def sink[
        width: Int
    ](self, outer: Int, inner: Int) -> SIMD[
        accumulator[Self.Column.loaded](), width
    ]:
        """Returns the additional logits of `width` neighbouring rows."""
        return (
            self.sinks.column({outer, inner, 0, 1, 1, 1})
            .load[width](0)
            .cast[accumulator[Self.Column.loaded]()]()
        )

    @inline(.always)
    def in_vectors[width: Int](self) -> Bool:
        """Returns whether `width` neighbours can be had at a time."""
        return self.logits.in_vectors[width]()

    @inline(.always)
    def is_aligned[width: Int](self) -> Bool:
        """Returns whether `width` elements can be read at a time."""
        return self.logits.is_aligned[width]()

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Returns what the driver calls the type."""
        return "WithSink"
