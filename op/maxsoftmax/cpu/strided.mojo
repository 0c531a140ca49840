"""Rows along an axis that is not the last: the lanes of a vector are the same element of neighbouring rows."""

from std.bit import log2_ceil
from std.math import ceildiv

from ..math.online import MaxSum
from .lanes import each
from .operations import Operation, Place
from .panels import Panels
from .schedule import Bundles, Pairs, Room
from .sources import RowSource
from .targets import RowTarget
from .tuning import WIDTH


@fieldwise_init
struct StridedRows[S: RowSource, O: Operation, T: RowTarget](Bundles):
    """Rows whose elements are apart in memory, in panels of neighbours that are walked side by side.

    Parameters:
        S: What is read.
        O: What becomes of it.
        T: What is written.
    """

    comptime accum = Self.O.accum
    comptime lanes = Self.O.lanes
    comptime reduces = Self.O.reduces
    comptime unroll = 8 if Self.O.has_max else 4
    """Elements of each row between two rescalings, or compensations, of its sum: of two tensors there are twice as many."""

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
        var outer, inner, count = self.panels.place(bundle)
        var row = self.source.row(outer, inner)
        comptime Vector = SIMD[Self.accum, Self.lanes]
        for vector in range(ceildiv(count, Int(Self.lanes))):
            var pair = MaxSum[Self.accum, Self.lanes]()
            comptime if not Self.O.has_max:
                pair.m = self.operation.origin(
                    self._place(bundle, vector, start, end)
                )
            comptime if Self.S.has_sink:
                if start == 0:
                    var column = vector * Int(Self.lanes)
                    var sinks = row.load_sink[Self.accum, Self.lanes](
                        column, count - column
                    )
                    pair.add(Array[Vector, 1](fill=sinks))
            part[unsafe_offset=vector] = pair

        @inline(.always)
        def add[n: SIMDLength](i: Int, some: Int) {imm}:
            for vector in range(ceildiv(count, Int(Self.lanes))):
                var column = vector * Int(Self.lanes)
                ref pair = part[unsafe_offset=vector]
                var values = Array[Vector, Int(n)](fill=0)
                comptime for j in range(Int(n)):
                    values[j] = row.load[Self.accum, Self.lanes](
                        i + j, column, count - column
                    )
                    comptime if not Self.O.has_max:
                        var other = row.load_other[Self.accum, Self.lanes](
                            i + j, column, count - column
                        )
                        values[j] = self.operation.term(
                            values[j], other, pair.m
                        )
                    row.prefetch[1](i + j + Int(n), column)
                comptime if Self.O.has_max:
                    pair.add(values)
                else:
                    # By halves: terms that are summed one by one wait for each other.
                    comptime for level in range(log2_ceil(Int(n))):
                        comptime apart = 1 << level
                        comptime for j in range(0, Int(n), 2 * apart):
                            values[j] += values[j + apart]
                    pair.d.add(values[0])

        var stop = min(end, row.length(self.panels.rows.n))
        _ = each[Self.unroll, 1](add, start, stop, stop)

    @inline(.always)
    def _place(self, bundle: Int, vector: Int, start: Int, end: Int) -> Place:
        """Returns what is in a vector of a panel's rows, and beyond."""
        var outer, inner, count = self.panels.place(bundle)
        var column = vector * Int(Self.lanes)
        var rows = self.panels.rows
        return {
            outer * rows.inner + inner + column,
            count - column,
            outer * rows.n * rows.inner + inner + column,
            start,
            end,
        }

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
        var vectors = ceildiv(count, Int(Self.lanes))
        comptime if Self.O.by_row:
            if start == 0:
                for vector in range(vectors):
                    self.operation.finish(
                        total[unsafe_offset=vector],
                        self._place(bundle, vector, start, end),
                    )
        else:
            var row = self.source.row(outer, inner)
            var to = self.target.row(outer, inner)
            var memory = Array[Self.O.State, WIDTH // Int(Self.lanes)](
                uninitialized=True
            )
            var states = memory.unsafe_ptr()
            for vector in range(vectors):
                states[unsafe_offset=vector] = self.operation.state(
                    total[unsafe_offset=vector],
                    self._place(bundle, vector, start, end),
                )

            @inline(.always)
            def turn[n: SIMDLength](i: Int, some: Int) {imm}:
                for vector in range(vectors):
                    var column = vector * Int(Self.lanes)
                    var state = states[unsafe_offset=vector]
                    comptime for j in range(Int(n)):
                        row.prefetch[1](i + j + Int(n), column)
                        to.prefetch[1](i + j + Int(n), column)
                        var x = row.load[Self.accum, Self.lanes](
                            i + j, column, count - column
                        )
                        var other = row.load_other[Self.accum, Self.lanes](
                            i + j, column, count - column
                        )
                        var results = self.operation.result(state, x, other)
                        to.put[True](i + j, column, count - column, results)

            _ = each[Self.unroll, 1](turn, start, end, end)
            for vector in range(vectors):
                self.operation.correct(
                    states[unsafe_offset=vector],
                    self._place(bundle, vector, start, end),
                )
            _ = memory^
