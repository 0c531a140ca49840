"""Rows along an axis that is not the last: the lanes of a vector are the same element of neighbouring rows."""

from std.math import ceildiv

from ..online import MaxSum
from .lanes import fold_sum
from .operations import Operation, Place
from .panels import Panels
from .schedule import Bundles, Pairs, Room
from .sources import RowSource
from .targets import RowTarget


@fieldwise_init
struct StridedRows[S: RowSource, O: Operation, T: RowTarget](Bundles):
    """Rows whose elements are apart in memory, in panels of neighbours that are walked side by side.

    Parameters:
        S: What is read.
        O: What becomes of it.
        T: What is written.
    """

    comptime accum = Self.S.accum
    comptime lanes = Panels[Self.accum].lanes
    comptime reduces = Self.O.reduces
    comptime unroll = 8 if Self.O.has_max else 4
    """Elements of each row between two rescalings, or compensations, of a sum."""
    comptime Vector = SIMD[Self.accum, Self.lanes]
    comptime State = Self.O.State[Self.accum, Self.lanes]

    var source: Self.S
    var operation: Self.O
    var target: Self.T
    var panels: Panels[Self.accum]
    """Lanes beyond the end of a narrow one are of no row, and are not stored."""

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
        comptime if Self.O.reduces:
            var outer, inner, count = self.panels.place(bundle)
            var row = self.source.row(outer, inner)
            for vector in range(ceildiv(count, Int(Self.lanes))):
                part[unsafe_offset=vector] = MaxSum[Self.accum, Self.lanes]()
                comptime if not Self.O.has_max:
                    part[unsafe_offset=vector].m = 0
                comptime if Self.S.has_sink:
                    if start == 0:
                        var column = vector * Int(Self.lanes)
                        part[unsafe_offset=vector].add(
                            Array[Self.Vector, 1](
                                fill=row.load_sink[Self.accum, Self.lanes](
                                    column, count - column
                                )
                            )
                        )
            var stop = min(end, row.length(self.panels.rows.n))
            var i = start
            while i + Self.unroll <= stop:
                self._add[Self.unroll](row, i, count, part)
                i += Self.unroll
            while i < stop:
                self._add[1](row, i, count, part)
                i += 1

    @inline(.always)
    def _add[
        n: Int
    ](
        self,
        row: Self.S.Row,
        i: Int,
        count: Int,
        part: Pairs[Self.accum, Self.lanes],
    ):
        """Adds `n` elements of `count` rows, from `i` on, to their pairs."""
        for vector in range(ceildiv(count, Int(Self.lanes))):
            var column = vector * Int(Self.lanes)
            var values = Array[Self.Vector, n](fill=0)
            comptime for j in range(n):
                values[j] = row.load[Self.accum, Self.lanes](
                    i + j, column, count - column
                )
                comptime if Self.S.has_other:
                    values[j] = Self.O.term(
                        values[j],
                        row.load_other[Self.accum, Self.lanes](
                            i + j, column, count - column
                        ),
                    )
                row.prefetch[1](i + j + n, column)
            comptime if Self.O.has_max:
                part[unsafe_offset=vector].add(values)
            else:
                var sum = values[0]
                comptime for j in range(1, n):
                    sum += values[j]
                part[unsafe_offset=vector].d.add(sum)

    def write(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        total: Pairs[Self.accum, Self.lanes],
        room: Room[Self.accum],
    ):
        var outer, inner, count = self.panels.place(bundle)
        var first = outer * self.panels.rows.inner + inner
        var vectors = ceildiv(count, Int(Self.lanes))
        comptime if Self.O.by_row:
            if start == 0:
                for vector in range(vectors):
                    var column = vector * Int(Self.lanes)
                    self.operation.finish(
                        total[unsafe_offset=vector],
                        Place(first + column, count - column, start, end),
                    )
        else:
            var states = List[Self.State](unsafe_uninit_length=vectors)
            for vector in range(vectors):
                var column = vector * Int(Self.lanes)
                states[vector] = self.operation.state(
                    total[unsafe_offset=vector],
                    Place(first + column, count - column, start, end),
                )
            var row = self.source.row(outer, inner)
            var to = self.target.row(outer, inner)
            var i = start
            while i + Self.unroll <= end:
                self._write[Self.unroll](row, to, i, count, states)
                i += Self.unroll
            while i < end:
                self._write[1](row, to, i, count, states)
                i += 1
            for vector in range(vectors):
                var column = vector * Int(Self.lanes)
                self.operation.correct[Self.lanes](
                    states[vector],
                    Place(first + column, count - column, start, end),
                )

    @inline(.always)
    def _write[
        n: Int
    ](
        self,
        row: Self.S.Row,
        to: Self.T.Row,
        i: Int,
        count: Int,
        states: List[Self.State],
    ):
        """Writes `n` elements of `count` rows, from `i` on."""
        for vector in range(ceildiv(count, Int(Self.lanes))):
            var column = vector * Int(Self.lanes)
            ref state = states[vector]
            comptime for j in range(n):
                row.prefetch[1](i + j + n, column)
                to.prefetch[1](i + j + n, column)
                var x = row.load[Self.accum, Self.lanes](
                    i + j, column, count - column
                )
                var other = x
                comptime if Self.S.has_other:
                    other = row.load_other[Self.accum, Self.lanes](
                        i + j, column, count - column
                    )
                to.store(
                    i + j,
                    column,
                    count - column,
                    self.operation.result[Self.lanes](state, x, other),
                )
