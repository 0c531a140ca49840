"""Rows along any other axis: the lanes of a vector are the same element of neighbouring rows."""

from std.math import ceildiv

from ..finish import Finish
from ..online import MaxSum, accumulator
from ..rows import Rows, Source, Target
from .memory import fetch, fetch_to_write, load, store, write_pairs
from .panels import Panels
from .schedule import Bundles, Pairs, Room

comptime UNROLL = 8
"""Elements of each row between two rescalings of d."""


@fieldwise_init
struct StridedRows[dtype: DType, finish: Finish](Bundles):
    """Rows whose elements are `inner` apart, in bundles of neighbours that are walked side by side.

    Parameters:
        dtype: Dtype of the tensors.
        finish: What of each row is written.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = Panels[Self.accum].lanes

    var y: Target[Self.dtype]
    var x: Source[Self.dtype]
    var panels: Panels[Self.accum]
    """Lanes beyond the end of a narrow one hold -inf and are not stored."""

    def count(self) -> Int:
        return self.panels.count()

    def length(self) -> Int:
        return self.panels.rows.n

    def pairs(self) -> Int:
        return self.panels.vectors()

    def room(self) -> Int:
        return 0

    def reduce(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        room: Room[Self.accum],
    ):
        var _, offset, count = self.panels.place(bundle)
        var x = self.x.unsafe_offset(offset)
        for pair in range(ceildiv(count, Int(Self.lanes))):
            part[unsafe_offset=pair] = MaxSum[Self.accum, Self.lanes]()
        var i = start
        while i + UNROLL <= end:
            self._add[UNROLL](
                x.unsafe_offset(i * self.panels.rows.inner), count, part
            )
            i += UNROLL
        while i < end:
            self._add[1](
                x.unsafe_offset(i * self.panels.rows.inner), count, part
            )
            i += 1

    @inline(.always)
    def _add[
        n: Int
    ](
        self,
        x: Source[Self.dtype],
        count: Int,
        part: Pairs[Self.accum, Self.lanes],
    ):
        """Adds the next `n` elements of `count` rows, from `x` on, to their pairs.
        """
        comptime Vector = SIMD[Self.accum, Self.lanes]
        for pair in range(ceildiv(count, Int(Self.lanes))):
            var column = pair * Int(Self.lanes)
            var logits = Array[Vector, n](fill=0)
            comptime for j in range(n):
                var at = x.unsafe_offset(j * self.panels.rows.inner + column)
                logits[j] = load[Self.lanes](at, count - column)
                fetch[1](at.unsafe_offset(n * self.panels.rows.inner))
            part[unsafe_offset=pair].add(logits)

    def write(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        total: Pairs[Self.accum, Self.lanes],
        room: Room[Self.accum],
    ):
        var row, offset, count = self.panels.place(bundle)
        comptime if Self.finish == Finish.PAIR:
            if start == 0:
                self._write_pairs(row, count, total)
            return
        var i = start
        while i + UNROLL <= end:
            self._write[UNROLL](
                offset + i * self.panels.rows.inner, count, total
            )
            i += UNROLL
        while i < end:
            self._write[1](offset + i * self.panels.rows.inner, count, total)
            i += 1

    @inline(.always)
    def _write[
        n: Int
    ](self, offset: Int, count: Int, total: Pairs[Self.accum, Self.lanes],):
        """Writes the next `n` probabilities of `count` rows, from `offset` on.
        """
        for pair in range(ceildiv(count, Int(Self.lanes))):
            var column = pair * Int(Self.lanes)
            comptime if Self.finish == Finish.LOGARITHMS:
                var rows = total[unsafe_offset=pair].logarithms()
                comptime for j in range(n):
                    var at = offset + j * self.panels.rows.inner + column
                    var logits = self._next[n](at, count - column)
                    store(
                        self.y.unsafe_offset(at),
                        rows.probability(logits),
                        count - column,
                    )
                continue
            var rows = total[unsafe_offset=pair].normalizer()
            comptime for j in range(n):
                var at = offset + j * self.panels.rows.inner + column
                var logits = self._next[n](at, count - column)
                store(
                    self.y.unsafe_offset(at),
                    rows.probability(logits),
                    count - column,
                )

    @inline(.always)
    def _next[
        n: Int
    ](self, at: Int, count: Int) -> SIMD[Self.accum, Self.lanes]:
        """Loads the logits at `at`, and announces those `n` positions behind them.
        """
        fetch[1](self.x.unsafe_offset(at + n * self.panels.rows.inner))
        fetch_to_write[1](self.y.unsafe_offset(at + n * self.panels.rows.inner))
        return load[Self.lanes](self.x.unsafe_offset(at), count)

    def _write_pairs(
        self, row: Int, count: Int, total: Pairs[Self.accum, Self.lanes]
    ):
        """Writes the pairs of `count` rows from `row` on."""
        for pair in range(ceildiv(count, Int(Self.lanes))):
            var column = pair * Int(Self.lanes)
            write_pairs(
                self.y,
                self.x,
                self.panels.rows,
                row + column,
                count - column,
                total[unsafe_offset=pair],
            )
