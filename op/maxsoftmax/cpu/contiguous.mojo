"""Rows along the last axis: the lanes of a vector are neighbours in one row."""

from std.math import align_up, ceildiv
from std.sys import simd_width_of, size_of
from std.utils.numerics import neg_inf

from ..math.exponential import Unit
from ..math.online import MaxSum, Sum
from ..io.rows import Rows
from .dividing import Beside, Dividing, Nothing
from .largest import Largest
from .lanes import collapse, each, each_from, fold_max, fold_sum, larger
from .memory import first_lanes, LINE, load_plain, store_plain
from .operations import Operation, Place
from .portion import Portion
from .schedule import Bundles, Pairs, Reduced, Room
from .sources import RowSource
from .targets import RowTarget
from .tuning import (
    BLOCK,
    BLOCK_STREAMED,
    KEPT,
    KEPT_IN_RESULTS,
    READ_AHEAD,
    SPAN,
    TOGETHER,
    VECTORS,
    WRITE_AHEAD,
)


@fieldwise_init
struct ContiguousRows[S: RowSource, O: Operation, T: RowTarget](Bundles):
    """Rows whose elements are neighbours in memory; short ones in bundles.

    For a pair a span is read for its maximum, and again, from the first cache, for its exponentials in the unit of that
    maximum. What divides these by the sum of the whole row finds them in the target if they are no wider, or else in the
    core's own memory, or if there is none computes them again. Results that are streamed are written a step at a time
    beside the sums of the next rows.

    Parameters:
        S: What is read.
        O: What becomes of it.
        T: What is written.
    """

    comptime accum = Self.O.accum
    comptime lanes: SIMDLength = 1
    comptime reduces = Self.O.reduces
    comptime width = simd_width_of[Self.accum]()
    comptime step = VECTORS * Self.width
    comptime Sums = Sum[Self.accum, Self.width]
    comptime Pair = MaxSum[Self.O.accum, Self.O.lanes]
    comptime streams = Self.T.streams
    comptime overlapping = Self.streams and Self.O.divides
    """Whether exponentials that are kept are divided beside the next row's."""
    comptime rooms = 2 if Self.overlapping and Self.S.is_computed else 1
    """What is computed waits where exponentials will: that of the next rows not where those of others still are."""
    comptime waits = Self.T.holds == Self.accum and not Self.streams
    """Whether exponentials wait for their sum where the results go."""

    var source: Self.S
    var operation: Self.O
    var target: Self.T
    var rows: Rows[]

    def count(self) -> Int:
        return ceildiv(self.rows.count(), self.pairs())

    def length(self) -> Int:
        return self.rows.n

    def pairs(self) -> Int:
        comptime most = BLOCK_STREAMED if Self.streams else BLOCK
        return max(1, min(TOGETHER, most // max(1, self.rows.n)))

    def room(self) -> Int:
        comptime if Self.waits:
            return 0
        return self.pairs() * self._apart() if self._stays() else 0

    def overlaps(self) -> Bool:
        comptime if Self.overlapping:
            return self._stays()
        return False

    def write_beside(
        self,
        written: Reduced[Self.accum, 1],
        start: Int,
        end: Int,
        joins: Bool,
        next: Optional[Reduced[Self.accum, 1]],
    ) -> Bool:
        comptime if Self.overlapping:
            comptime for whole in [True, False]:
                if whole == (self.rows.n <= SPAN):
                    return self._divide_beside[whole](
                        written, start, end, joins, next
                    )
        return False

    def reduce(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, 1],
        room: Room[Self.accum],
    ):
        var first, rows = self._rows(bundle)
        comptime if not Self.O.has_max:
            for i in range(rows):
                part[unsafe_offset=i] = self._sum_of_terms(
                    self._place(first + i, start, end)
                )
        else:
            comptime waiting = SPAN if Self.S.is_computed else 1
            var logits = Array[Scalar[Self.accum], waiting](uninitialized=True)

            @inline(.always)
            def kept_of(i: Int) {mut logits, imm} -> Room[Self.accum]:
                var kept = self._kept(first + i, i, room)
                comptime if Self.S.is_computed:
                    # A row whose exponentials do not stay is alone.
                    if not kept:
                        kept = (
                            logits.unsafe_ptr()
                            .unsafe_origin_cast[MutUntrackedOrigin]()
                            .unsafe_offset(-start)
                        )
                return kept

            for i in range(rows):
                part[unsafe_offset=i].m = self._max(
                    first + i, start, end, kept_of(i)
                )
            var sums = Array[Self.Sums, TOGETHER](uninitialized=True)
            var nothing = Nothing()
            for i in range(rows):
                var m = part[unsafe_offset=i].m
                var kept = kept_of(i)
                var more = Bool(kept) or self._is_prefetched()
                comptime for flag in [True, False]:
                    comptime if flag or not Self.S.is_computed:
                        if flag == more:
                            sums[i] = self._sum[flag](
                                first + i, start, end, Unit(m), kept, nothing
                            )
            _ = logits^
            self._end(first, rows, start, sums, part)

    def reduce_one_ahead(
        self,
        bundle: Int,
        first: Int,
        end: Int,
        part: Pairs[Self.accum, 1],
        room: Room[Self.accum],
    ) -> Bool:
        comptime if Self.O.has_max and not Self.S.is_computed:
            # A row of several spans is alone.
            if self.rows.n > SPAN:
                var kept = self._kept(bundle, 0, room)
                comptime for keeps in [True, False]:
                    if keeps == Bool(kept):
                        self._reduce_one_ahead[keeps](
                            bundle, first, end, part, kept
                        )
                return True
        return False

    def write(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, 1],
        total: Pairs[Self.accum, 1],
        room: Room[Self.accum],
    ):
        var first, rows = self._rows(bundle)
        for i in range(rows):
            var row = rebind[Self.Pair](total[unsafe_offset=i])
            var place = self._place(first + i, start, end)
            comptime if Self.O.by_row:
                if start == 0:
                    self.operation.finish(row, place)
            elif Self.O.divides:
                var kept = self._kept(first + i, i, room)
                comptime for whole in [True, False]:
                    if whole == (self.rows.n <= SPAN):
                        var portion = self._portion[whole](
                            part[unsafe_offset=i], row
                        )
                        # Those that are kept are written by `write_beside` if they overlap, and a row of one span is kept.
                        comptime for keeps in [True, False]:
                            comptime if (
                                keeps and not Self.overlapping
                            ) or not (keeps or whole):
                                if keeps == Bool(kept):
                                    self._divide[keeps](place, portion, kept)
            elif Self.S.is_computed:
                var kept = self._kept(first + i, i, room)
                comptime for keeps in [True, False]:
                    if keeps == Bool(kept):
                        self._write[keeps](place, row, kept)
            else:
                self._write[False](place, row, None)

    @inline(.always)
    def _reduce_one_ahead[
        keeps: Bool
    ](
        self,
        row: Int,
        first: Int,
        end: Int,
        part: Pairs[Self.accum, 1],
        kept: Room[Self.accum],
    ):
        """Reduces spans of a row, of each the maximum beside the exponentials of the one before, so that memory is at work all the time.
        """
        var n = self.rows.n
        var x = self.source.row(row, 0)
        var m = self._max(row, first * SPAN, min((first + 1) * SPAN, n), None)
        for span in range(first, end):
            var start = span * SPAN
            var stop = min(start + SPAN, n)
            var next = stop if span + 1 < end else n
            var largest = Largest[
                Self.S.Row, Self.accum, Self.step, Self.width
            ](x, next, min(next + SPAN, n))
            var of_span = part.unsafe_offset(span - first)
            of_span[].m = m
            var sums = Array[Self.Sums, TOGETHER](uninitialized=True)
            sums[0] = self._sum[keeps](row, start, stop, Unit(m), kept, largest)
            self._end(row, 1, start, sums, of_span)
            m = largest.finish()

    @inline(.always)
    def _end(
        self,
        first: Int,
        rows: Int,
        start: Int,
        sums: Array[Self.Sums, TOGETHER],
        part: Pairs[Self.accum, 1],
    ):
        """Completes the pairs of a span, given the sums of its lanes, of the first span with the additional logit's.
        """
        for i in range(rows):
            var d = collapse(sums[i])
            comptime if Self.S.has_sink:
                if start == 0:
                    var unit = Unit(part[unsafe_offset=i].m)
                    var row = self.source.row(first + i, 0)
                    d.add(unit.exp(row.load_sink[Self.accum, 1](0, 1)))
            part[unsafe_offset=i].d = d

    @inline(.always)
    def _rows(self, bundle: Int) -> Tuple[Int, Int]:
        """Returns the bundle's first row, and how many it has."""
        var first = bundle * self.pairs()
        return first, min(self.pairs(), self.rows.count() - first)

    @inline(.always)
    def _place(self, row: Int, start: Int, end: Int) -> Place:
        """Returns a part of a row."""
        return {row, 1, row * self.rows.n, start, end}

    @inline(.always)
    def _stays(self) -> Bool:
        """Returns whether what is known of a row's elements is wanted again and stays in a core's cache: exponentials, to be
        divided, or what was computed, to be summed.
        """
        comptime if not (Self.O.divides or Self.S.is_computed):
            return False
        comptime most = KEPT_IN_RESULTS if Self.waits else KEPT
        return self.rows.n * size_of[Self.accum]() <= most

    @inline(.always)
    def _is_prefetched(self) -> Bool:
        """Returns whether results are prefetched while exponentials are summed already, so that memory is at work in both
        passes: 8192×1024 float32 take 2.3 ms, prefetched as they are written 2.7. Rows of several spans take longer.
        """
        comptime if Self.O.divides or Self.O.by_row or Self.streams:
            return False
        return self.rows.n <= SPAN

    @inline(.always)
    def _apart(self) -> Int:
        """Returns how far apart rows are in a core's own memory, where each begins with a line.
        """
        return align_up(self.rows.n, LINE // size_of[Self.accum]())

    @inline(.always)
    def _kept(
        self, row: Int, i: Int, room: Room[Self.accum]
    ) -> Room[Self.accum]:
        """Returns where the exponentials of a row, the bundle's row `i`, or what was computed of it, wait between the passes, if
        anywhere.
        """
        if not self._stays():
            return None
        comptime if Self.waits:
            return self.target.row(row, 0).memory[Self.accum]()
        if room:
            return room.value().unsafe_offset(i * self._apart())
        return None

    @inline(.always)
    def _stop(self, row: Self.S.Row, end: Int) -> Int:
        """Returns where in a span that ends at `end` the last element is that takes part, and 1.
        """
        comptime if Self.S.is_computed:
            return min(end, row.length(self.rows.n))
        return end

    @inline(.always)
    def _max(
        self, row: Int, start: Int, end: Int, kept: Room[Self.accum]
    ) -> Scalar[Self.accum]:
        """Returns the maximum of a span, of what is not NaN; what is computed waits where its exponentials will.
        """
        var x = self.source.row(row, 0)
        var most = SIMD[Self.accum, Self.step](neg_inf[Self.accum]())
        var rest = SIMD[Self.accum, Self.width](neg_inf[Self.accum]())

        @inline(.always)
        def raise_to[
            n: SIMDLength
        ](i: Int, count: Int) {mut most, mut rest, imm}:
            var values = x.load[Self.accum, n](i, 0, count)
            comptime if Self.S.is_computed:
                if kept:
                    store_plain(kept.value().unsafe_offset(i), values, count)
            comptime if n == Self.step:
                most = larger(rebind[type_of(most)](values), most)
            else:
                rest = larger(rebind[type_of(rest)](values), rest)

        _ = each[Self.step, Self.width](
            raise_to, start, self._stop(x, end), end
        )
        var m = fold_max[1](larger(rest, fold_max[Self.width](most)))
        comptime if Self.S.has_sink:
            if start == 0:
                m = larger(x.load_sink[Self.accum, 1](0, 1), m)
        return m

    @inline(.always)
    def _sum[
        B: Beside, //, more: Bool
    ](
        self,
        row: Int,
        start: Int,
        end: Int,
        unit: Unit[Self.accum, 1],
        kept: Room[Self.accum],
        mut beside: B,
    ) -> Self.Sums:
        """Returns the sums of e^x over a span; writes the exponentials to `kept`, or prefetches results, if there is `more`
        to do.
        """
        comptime keeps = more and (Self.O.divides or Self.S.is_computed)
        var x = self.source.row(row, 0)
        var y = self.target.row(row, 0)
        var d = Self.Sums()
        # Added a step later, when nothing waits for it.
        var last = SIMD[Self.accum, Self.width](0)

        @inline(.always)
        def add[
            n: SIMDLength
        ](i: Int, count: Int) {mut d, mut last, mut beside, imm}:
            d.add(last)
            beside.step()
            var values: SIMD[Self.accum, n]
            comptime if keeps and Self.S.is_computed:
                var at = kept.value().unsafe_offset(i)
                values = load_plain[n](at, count, neg_inf[Self.accum]())
            else:
                values = x.load[Self.accum, n](i, 0, count)
            var e_x = unit.exp(values)
            comptime if n == Self.step and not B.reads_ahead:
                x.prefetch[Self.step, READ_AHEAD](i, 0)
            comptime if keeps and Self.O.divides:
                store_plain(kept.value().unsafe_offset(i), e_x, count)
            elif more and not keeps and n == Self.step:
                y.prefetch[Self.step, WRITE_AHEAD](i, 0)
            last = fold_sum[Self.width](e_x)

        _ = each[Self.step, Self.width](add, start, self._stop(x, end), end)
        d.add(last)
        return d

    @inline(.always)
    def _sum_of_terms(self, place: Place) -> MaxSum[Self.accum, 1]:
        """Returns the sum of the operation's terms over a span, as a pair."""
        var x = self.source.row(place.row, 0)
        var origin = self.operation.origin(place)[0]
        var sums = Self.Sums()

        @inline(.always)
        def add[n: SIMDLength](i: Int, count: Int) {mut sums, imm}:
            comptime Values = SIMD[Self.accum, n]
            var values = x.load[Self.accum, n](i, 0, count)
            var other = x.load_other[Self.accum, n](i, 0, count)
            var terms = self.operation.term(values, other, Values(origin))
            comptime if n == Self.step:
                x.prefetch[Self.step, READ_AHEAD](i, 0)
            else:
                terms = first_lanes[n](count).select(terms, Values(0))
            sums.add(fold_sum[Self.width](terms))

        _ = each[Self.step, Self.width](add, place.start, place.end, place.end)
        return {origin, collapse(sums)}

    @inline(.always)
    def _portion[
        whole: Bool
    ](self, part: MaxSum[Self.accum, 1], total: Self.Pair) -> Portion[
        Self.accum, whole
    ]:
        """Returns what divides a span that has the pair `part`."""
        var divided = self.operation.dividing(total)
        return {part, rebind[MaxSum[Self.accum, 1]](divided)}

    @inline(.always)
    def _divide_beside[
        whole: Bool
    ](
        self,
        written: Reduced[Self.accum, 1],
        start: Int,
        end: Int,
        joins: Bool,
        next: Optional[Reduced[Self.accum, 1]],
    ) -> Bool:
        """Does what `write_beside` does with rows that are of one span, if `whole`.
        """
        var pair = start // SPAN * self.pairs()
        var first, rows = self._rows(written.bundle)
        var now = next.or_else(written)
        var follows = Bool(next) and now.bundle == written.bundle + 1
        var first_now, rows_now = self._rows(now.bundle)
        if not next:
            rows_now = 0
        var part = now.parts.unsafe_offset(pair)
        for i in range(rows_now):
            var kept = self._kept(first_now + i, i, now.room)
            part[unsafe_offset=i].m = self._max(first_now + i, start, end, kept)
        var sums = Array[Self.Sums, TOGETHER](uninitialized=True)
        var waits = joins
        # The one that is reduced lies behind, and only the last bundle may have fewer rows: `rows_now` is not more than `rows`.
        for i in range(rows):
            var dividing = Dividing[Self.T, Self.accum, whole, Self.step](
                self.target.row(first + i, 0),
                self._portion[whole](
                    written.parts[unsafe_offset=pair + i],
                    rebind[Self.Pair](written.total[unsafe_offset=i]),
                ),
                self._kept(first + i, i, written.room).value(),
                written.open,
                start,
                self._stop(self.source.row(first + i, 0), end),
                end,
                follows or i + 1 < rows or end < self.rows.n,
            )
            waits = dividing.begin(waits)
            if i < rows_now:
                sums[i] = self._sum[True](
                    first_now + i,
                    start,
                    end,
                    Unit(part[unsafe_offset=i].m),
                    self._kept(first_now + i, i, now.room),
                    dividing,
                )
            dividing.finish()
        self._end(first_now, rows_now, start, sums, part)
        return waits

    @inline(.always)
    def _divide[
        keeps: Bool
    ](
        self,
        place: Place,
        portion: Portion[Self.accum, _],
        kept: Room[Self.accum],
    ):
        """Writes the probabilities of a span, of exponentials that were kept or are computed again.
        """
        var x = self.source.row(place.row, 0)
        var y = self.target.row(place.row, 0)
        var stop = self._stop(x, place.end)

        @inline(.always)
        def divide[n: SIMDLength](i: Int, count: Int) {imm}:
            var e_x: SIMD[Self.accum, n]
            comptime if keeps:
                # Beyond the row's end nothing may have been kept.
                var some = min(count, stop - i) if Self.S.is_computed else count
                e_x = load_plain[n](kept.value().unsafe_offset(i), some)
            else:
                e_x = portion.unit.exp(x.load[Self.accum, n](i, 0, count))
                comptime if n == Self.step:
                    x.prefetch[Self.step, READ_AHEAD](i, 0)
                    y.prefetch[Self.step, WRITE_AHEAD](i, 0)
            var p = portion.probability(e_x)
            y.put[n == Self.step](i, 0, count, p)

        @inline(.always)
        def divide_nothing[n: SIMDLength](i: Int, count: Int) {imm}:
            var e_x = SIMD[Self.accum, n](0)
            y.store(i, 0, count, portion.probability(e_x))

        var i = each_from[Self.step, Self.width](
            divide, place.start, y.line_from(place.start), stop, place.end
        )
        comptime if Self.S.is_computed:
            _ = each[Self.step, Self.width](
                divide_nothing, max(i, place.start), place.end, place.end
            )

    @inline(.always)
    def _write[
        keeps: Bool
    ](self, place: Place, total: Self.Pair, kept: Room[Self.accum]):
        """Writes what the elements of a span turn into, of what was kept of them or is read again.
        """
        var x = self.source.row(place.row, 0)
        var y = self.target.row(place.row, 0)
        var state = self.operation.state(total, place)
        var stop = self._stop(x, place.end)

        @inline(.always)
        def turn[n: SIMDLength](i: Int, count: Int) {imm}:
            var values: SIMD[Self.accum, n]
            comptime if keeps:
                values = load_plain[n](
                    kept.value().unsafe_offset(i),
                    min(count, stop - i),
                    neg_inf[Self.accum](),
                )
            else:
                values = x.load[Self.accum, n](i, 0, count)
            var other = x.load_other[Self.accum, n](i, 0, count)
            comptime if n == Self.step:
                x.prefetch[Self.step, READ_AHEAD](i, 0)
                y.prefetch[Self.step, WRITE_AHEAD](i, 0)
            var results = self.operation.result(state, values, other)
            y.put[n == Self.step](i, 0, count, results)

        @inline(.always)
        def turn_nothing[n: SIMDLength](i: Int, count: Int) {imm}:
            var values = SIMD[Self.accum, n](neg_inf[Self.accum]())
            y.store(i, 0, count, self.operation.result(state, values, values))

        var i = each_from[Self.step, Self.width](
            turn,
            place.start,
            y.line_from(place.start),
            stop,
            place.end,
        )
        comptime if Self.S.is_computed:
            _ = each[Self.step, Self.width](
                turn_nothing, max(i, place.start), place.end, place.end
            )
        self.operation.correct(state, place)
