"""Rows along the last axis: the lanes of a vector are neighbours in one row."""

from std.math import ceildiv
from std.sys import simd_width_of, size_of
from std.utils.numerics import neg_inf

from ..exponential import Unit
from ..finish import Finish
from ..online import MaxSum, Sum, accumulator
from ..rows import Rows, Source, Target
from .lanes import collapse, fold_max, fold_sum, larger
from .memory import (
    fetch,
    fetch_to_write,
    load,
    load_plain,
    store,
    store_plain,
    write_pairs,
)
from .portion import Portion
from .schedule import SPAN, Bundles, Pairs, Room

comptime VECTORS = 4
"""Vectors that are under way at a time, written as one so that their instructions take turns: each waits for the one
before it, and a core looks ahead no further than a few exponentials. 16384 float32 in the cache take 7.2 us, two vectors
at a time 8.2, one 11.0."""

comptime TOGETHER = 16
"""Rows at most that are reduced together, each step of all before the next of any: where a row waits for its lanes
to be folded, another goes on. 131072×64 float32 take 3.0 ms, one row at a time 3.5."""

comptime BLOCK = 2048
"""Elements at most of such rows, read twice and written twice: half of a core's first cache."""

comptime READ_AHEAD = 16384
"""Bytes by which reads are announced ahead: while one span is computed, memory delivers the next. 8192×1024 float32 in
2.7 ms, unannounced 3.6."""

comptime WRITE_AHEAD = 4096
"""The same for writes."""

comptime KEPT = 1 << 19
"""Bytes of a row's exponentials up to which they are stored and read again, and not computed again: they have to stay in
a core's second cache. One row in the cache, 50240 float32: 21 us, computed again 32."""


@fieldwise_init
struct ContiguousRows[dtype: DType, finish: Finish](Bundles):
    """Rows whose elements are neighbours in memory; short ones in bundles.

    A span is read for its maximum, and again, from the first cache, for its exponentials in the unit of that maximum.
    These wait for the sum of the whole row in `y` if they are no wider, or else in the core's own memory, or if there is
    none are computed again.

    Parameters:
        dtype: Dtype of the tensors.
        finish: What of each row is written.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes: SIMDLength = 1
    comptime reduces = True
    comptime width = simd_width_of[Self.accum]()
    comptime step = VECTORS * Self.width
    comptime Vector = SIMD[Self.accum, Self.width]

    var y: Target[Self.dtype]
    var x: Source[Self.dtype]
    var rows: Rows

    def count(self) -> Int:
        return ceildiv(self.rows.count(), self.pairs())

    def length(self) -> Int:
        return self.rows.n

    def pairs(self) -> Int:
        return max(1, min(TOGETHER, BLOCK // max(1, self.rows.n)))

    def room(self) -> Int:
        comptime if Self.dtype == Self.accum:
            return 0
        return self.pairs() * self.rows.n if self._stays() else 0

    def reduce(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        room: Room[Self.accum],
    ):
        var first, rows = self._rows(bundle)
        for i in range(rows):
            var m = self._max((first + i) * self.rows.n + start, end - start)
            part[unsafe_offset=i].m = rebind[SIMD[Self.accum, Self.lanes]](m)
        var sums = Array[Sum[Self.accum, Self.width], TOGETHER](
            fill=Sum[Self.accum, Self.width]()
        )
        for i in range(rows):
            var at = (first + i) * self.rows.n + start
            var unit = Unit(rebind[Scalar[Self.accum]](part[unsafe_offset=i].m))
            var kept = self._kept(at, i * self.rows.n + start, room)
            if kept:
                sums[i] = self._sum[True, True](at, end - start, unit, kept)
            elif self._is_announced():
                sums[i] = self._sum[False, True](at, end - start, unit, None)
            else:
                sums[i] = self._sum[False, False](at, end - start, unit, None)
        for i in range(rows):
            var d = collapse(sums[i])
            part[unsafe_offset=i].d = rebind[Sum[Self.accum, Self.lanes]](d)

    def write(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        total: Pairs[Self.accum, Self.lanes],
        room: Room[Self.accum],
    ):
        var first, rows = self._rows(bundle)
        for i in range(rows):
            var at = (first + i) * self.rows.n + start
            var row = total.unsafe_offset(i)
            comptime if Self.finish == Finish.PAIR:
                if start == 0:
                    write_pairs(self.y, self.x, self.rows, first + i, 1, row[])
            elif Self.finish == Finish.LOGARITHMS:
                var pair = rebind[MaxSum[Self.accum, 1]](row[])
                self._write_logarithms(at, end - start, pair)
            else:
                var kept = self._kept(at, i * self.rows.n + start, room)
                comptime for whole in [True, False]:
                    if whole == (self.rows.n <= SPAN):
                        var portion = Portion[Self.accum, whole](
                            rebind[MaxSum[Self.accum, 1]](
                                part[unsafe_offset=i]
                            ),
                            rebind[MaxSum[Self.accum, 1]](row[]),
                        )
                        if kept:
                            self._write[True](at, end - start, portion, kept)
                        else:
                            self._write[False](at, end - start, portion, None)

    @inline(.always)
    def _rows(self, bundle: Int) -> Tuple[Int, Int]:
        """Returns the bundle's first row, and how many it has."""
        var first = bundle * self.pairs()
        return first, min(self.pairs(), self.rows.count() - first)

    @inline(.always)
    def _stays(self) -> Bool:
        """Returns whether the exponentials of a row are wanted again and stay in a core's cache.
        """
        comptime if Self.finish != Finish.PROBABILITIES:
            return False
        return self.rows.n * size_of[Self.accum]() <= KEPT

    @inline(.always)
    def _is_announced(self) -> Bool:
        """Returns whether logarithms are announced while the exponentials are summed already, so that memory is at work
        in both passes: 8192×1024 float32 take 2.3 ms, announced as they are written 2.7. Rows of several spans take longer.
        """
        comptime if Self.finish != Finish.LOGARITHMS:
            return False
        return self.rows.n <= SPAN

    @inline(.always)
    def _kept(
        self, at: Int, start: Int, room: Room[Self.accum]
    ) -> Room[Self.accum]:
        """Returns where the exponentials of the logits from `at` on, elements from `start` on of their row, wait between
        the passes, if anywhere.
        """
        if not self._stays():
            return None
        comptime if Self.dtype == Self.accum:
            return self.y.unsafe_offset(at).unsafe_bitcast[Scalar[Self.accum]]()
        if room:
            return room.value().unsafe_offset(start)
        return None

    @inline(.always)
    def _max(self, at: Int, count: Int) -> Scalar[Self.accum]:
        """Returns the maximum of `count` logits from `at` on, of those that are not NaN.
        """
        var x = self.x.unsafe_offset(at)
        var m = SIMD[Self.accum, Self.step](neg_inf[Self.accum]())
        var i = 0
        while i + Self.step <= count:
            m = larger(load[Self.step](x.unsafe_offset(i), Self.step), m)
            i += Self.step
        var rest = fold_max[Self.width](m)
        while i < count:
            rest = larger(load[Self.width](x.unsafe_offset(i), count - i), rest)
            i += Self.width
        return fold_max[1](rest)

    @inline(.always)
    def _sum[
        keeps: Bool, announces: Bool
    ](
        self,
        at: Int,
        count: Int,
        unit: Unit[Self.accum, 1],
        kept: Room[Self.accum],
    ) -> Sum[Self.accum, Self.width]:
        """Returns the sums of e^x over `count` logits from `at` on; writes the exponentials to `kept` if it `keeps` them, and
        `announces` what will be written to `y`.
        """
        var x = self.x.unsafe_offset(at)
        var y = self.y.unsafe_offset(at)
        var d = Sum[Self.accum, Self.width]()
        var i = 0
        while i + Self.step <= count:
            var e_x = unit.exp(load[Self.step](x.unsafe_offset(i), Self.step))
            fetch[Self.step, READ_AHEAD](x.unsafe_offset(i))
            comptime if keeps:
                store_plain(kept.value().unsafe_offset(i), e_x, Self.step)
            comptime if announces:
                fetch_to_write[Self.step, WRITE_AHEAD](y.unsafe_offset(i))
            d.add(fold_sum[Self.width](e_x))
            i += Self.step
        while i < count:
            var e_x = unit.exp(load[Self.width](x.unsafe_offset(i), count - i))
            comptime if keeps:
                store_plain(kept.value().unsafe_offset(i), e_x, count - i)
            d.add(e_x)
            i += Self.width
        return d

    @inline(.always)
    def _write[
        keeps: Bool
    ](
        self,
        at: Int,
        count: Int,
        portion: Portion[Self.accum, _],
        kept: Room[Self.accum],
    ):
        """Writes `count` probabilities from `at` on."""
        var x = self.x.unsafe_offset(at)
        var y = self.y.unsafe_offset(at)

        @inline(.always)
        def probability[
            lanes: SIMDLength
        ](i: Int) {imm} -> SIMD[Self.accum, lanes]:
            comptime if keeps:
                return portion.probability(
                    load_plain[lanes](kept.value().unsafe_offset(i), count - i)
                )
            else:
                return portion.probability(
                    portion.unit.exp(load[lanes](x.unsafe_offset(i), count - i))
                )

        var i = 0
        while i + Self.step <= count:
            comptime if not keeps:
                fetch[Self.step, READ_AHEAD](x.unsafe_offset(i))
                fetch_to_write[Self.step, WRITE_AHEAD](y.unsafe_offset(i))
            store(y.unsafe_offset(i), probability[Self.step](i), Self.step)
            i += Self.step
        while i < count:
            store(y.unsafe_offset(i), probability[Self.width](i), count - i)
            i += Self.width

    @inline(.always)
    def _write_logarithms(
        self, at: Int, count: Int, total: MaxSum[Self.accum, 1]
    ):
        """Writes the logarithms of `count` probabilities from `at` on."""
        var row = total.logarithms()
        var x = self.x.unsafe_offset(at)
        var y = self.y.unsafe_offset(at)
        var i = 0
        while i + Self.step <= count:
            fetch[Self.step, READ_AHEAD](x.unsafe_offset(i))
            fetch_to_write[Self.step, WRITE_AHEAD](y.unsafe_offset(i))
            var logits = load[Self.step](x.unsafe_offset(i), Self.step)
            store(y.unsafe_offset(i), row.probability(logits), Self.step)
            i += Self.step
        while i < count:
            var logits = load[Self.width](x.unsafe_offset(i), count - i)
            store(y.unsafe_offset(i), row.probability(logits), count - i)
            i += Self.width
