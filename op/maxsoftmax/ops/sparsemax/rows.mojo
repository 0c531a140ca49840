"""Sparsemax of rows along the last axis on a CPU: the lanes of a vector are neighbours in one row, which is reduced span by
span.
"""

from std.sys import simd_width_of
from std.utils.numerics import neg_inf

from ...cpu.lanes import each, fold_max, fold_sum, larger
from ...cpu.memory import fetch, fetch_to_write, load, store
from ...cpu.schedule import spans_of
from ...cpu.shares import share_rows, share_tasks, workers_for
from ...cpu.tuning import READ_AHEAD, SPAN, VECTORS, WRITE_AHEAD
from ...math.online import Sum, accumulator
from ...queue import Queue
from ...io.rows import Rows, Source, Target
from .threshold import (
    MOST_STEPS,
    Support,
    Threshold,
    gradient_where,
    mean_of,
    positive,
    term,
    threshold_of,
)


trait SpannedRow(TrivialRegisterPassable):
    """A row of what sparsemax or its gradient reads and writes."""

    comptime accum: DType
    """Dtype of the arithmetic."""
    comptime group: SIMDLength
    """How many elements are under way at a time."""
    comptime steps: Int
    """How often its support is looked for, at most."""

    def at(self, row: Int) -> Self:
        """Returns another row, given the first."""
        ...

    def largest(self, start: Int, end: Int) -> SIMD[Self.accum, Self.group]:
        """Returns large elements of a part of the row, each of them once, with the maximum of what is not NaN among them.
        """
        ...

    def support(
        self,
        m: Scalar[Self.accum],
        threshold: Threshold[Self.accum, 1],
        start: Int,
        end: Int,
    ) -> Support[Self.accum]:
        """Returns the support in one span."""
        ...

    def write(
        self,
        m: Scalar[Self.accum],
        threshold: Threshold[Self.accum, 1],
        found: Support[Self.accum],
        start: Int,
        end: Int,
    ):
        """Writes a part of the results, given the last support of the row."""
        ...


@fieldwise_init
struct LogitsRow[dtype: DType](SpannedRow):
    """Logits, and their sparsemax."""

    comptime accum = accumulator[Self.dtype]()
    comptime steps = MOST_STEPS
    comptime width = simd_width_of[Self.accum]()
    comptime group: SIMDLength = VECTORS * Self.width

    var y: Target[Self.dtype]
    var x: Source[Self.dtype]
    var n: Int

    @inline(.always)
    def at(self, row: Int) -> Self:
        var first = row * self.n
        return {
            self.y.unsafe_offset(first),
            self.x.unsafe_offset(first),
            self.n,
        }

    @inline(.always)
    def largest(self, start: Int, end: Int) -> SIMD[Self.accum, Self.group]:
        comptime Group = SIMD[Self.accum, Self.group]
        comptime Vector = SIMD[Self.accum, Self.width]
        var most = Group(neg_inf[Self.accum]())
        var rest = Vector(neg_inf[Self.accum]())

        @inline(.always)
        def raise_to[
            n: SIMDLength
        ](i: Int, count: Int) {mut most, mut rest, imm}:
            var at = self.x.unsafe_offset(i)
            var values = load[n](at, count)
            comptime if n == Self.group:
                fetch[Self.group, READ_AHEAD](at)
                fetch_to_write[Self.group, WRITE_AHEAD](self.y.unsafe_offset(i))
                most = larger(rebind[Group](values), most)
            else:
                rest = larger(rebind[Vector](values), rest)

        _ = each[Self.group, Self.width](raise_to, start, end, end)
        var first = larger(rest, most.slice[Self.width]())
        return most.insert(first)

    @inline(.always)
    def support(
        self,
        m: Scalar[Self.accum],
        threshold: Threshold[Self.accum, 1],
        start: Int,
        end: Int,
    ) -> Support[Self.accum]:
        # Of many alike in few lanes each addition would round to the same side.
        var sums = Sum[Self.accum, Self.group]()
        var rest = SIMD[Self.accum, Self.width](0)
        var above = 0

        @inline(.always)
        def add[
            n: SIMDLength
        ](i: Int, count: Int) {mut sums, mut rest, mut above, imm}:
            var z = load[n](self.x.unsafe_offset(i), count) - m
            var excess = threshold.excess(z)
            # Most groups have nothing above the threshold; NaN is not below it.
            if excess.le(0).reduce_and():
                return
            above += Int(excess.gt(0).reduce_bit_count())
            comptime if n == Self.group:
                sums.add_of_few(
                    rebind[SIMD[Self.accum, Self.group]](positive(excess))
                )
            else:
                rest += rebind[type_of(rest)](positive(excess))

        _ = each[Self.group, Self.width](add, start, end, end)
        var of_groups = fold_sum[Self.width](sums.value - sums.excess)
        return {fold_sum[1](of_groups + rest), Int64(above)}

    @inline(.always)
    def write(
        self,
        m: Scalar[Self.accum],
        threshold: Threshold[Self.accum, 1],
        found: Support[Self.accum],
        start: Int,
        end: Int,
    ):
        @inline(.always)
        def turn[n: SIMDLength](i: Int, count: Int) {imm}:
            var z = load[n](self.x.unsafe_offset(i), count) - m
            store(self.y.unsafe_offset(i), positive(threshold.excess(z)), count)

        _ = each[Self.group, Self.width](turn, start, end, end)


@fieldwise_init
struct GradientsRow[dtype: DType](SpannedRow):
    """Probabilities, their gradient, and that of the logits."""

    comptime accum = accumulator[Self.dtype]()
    comptime steps = 1
    comptime width = simd_width_of[Self.accum]()
    comptime group: SIMDLength = VECTORS * Self.width

    var dx: Target[Self.dtype]
    var y: Source[Self.dtype]
    var dy: Source[Self.dtype]
    var n: Int

    @inline(.always)
    def at(self, row: Int) -> Self:
        var first = row * self.n
        return {
            self.dx.unsafe_offset(first),
            self.y.unsafe_offset(first),
            self.dy.unsafe_offset(first),
            self.n,
        }

    @inline(.always)
    def largest(self, start: Int, end: Int) -> SIMD[Self.accum, Self.group]:
        return 0

    @inline(.always)
    def support(
        self,
        m: Scalar[Self.accum],
        threshold: Threshold[Self.accum, 1],
        start: Int,
        end: Int,
    ) -> Support[Self.accum]:
        var sums = SIMD[Self.accum, Self.group](0)
        var rest = SIMD[Self.accum, Self.width](0)
        var above = 0

        @inline(.always)
        def add[
            n: SIMDLength
        ](i: Int, count: Int) {mut sums, mut rest, mut above, imm}:
            var y = load[n](self.y.unsafe_offset(i), count)
            comptime if n == Self.group:
                fetch[Self.group, READ_AHEAD](self.y.unsafe_offset(i))
                fetch[Self.group, READ_AHEAD](self.dy.unsafe_offset(i))
                fetch_to_write[Self.group, WRITE_AHEAD](
                    self.dx.unsafe_offset(i)
                )
            if y.le(0).reduce_and():
                return
            var dy = load[n](self.dy.unsafe_offset(i), count)
            above += Int(y.gt(0).reduce_bit_count())
            comptime if n == Self.group:
                sums += rebind[type_of(sums)](term(y, dy))
            else:
                rest += rebind[type_of(rest)](term(y, dy))

        _ = each[Self.group, Self.width](add, start, end, end)
        return {fold_sum[1](fold_sum[Self.width](sums) + rest), Int64(above)}

    @inline(.always)
    def write(
        self,
        m: Scalar[Self.accum],
        threshold: Threshold[Self.accum, 1],
        found: Support[Self.accum],
        start: Int,
        end: Int,
    ):
        var mean = mean_of(found)

        @inline(.always)
        def turn[n: SIMDLength](i: Int, count: Int) {imm}:
            var y = load[n](self.y.unsafe_offset(i), count)
            var dy = load[n](self.dy.unsafe_offset(i), count)
            store(self.dx.unsafe_offset(i), gradient_where(y, dy - mean), count)

        _ = each[Self.group, Self.width](turn, start, end, end)


struct Total[dtype: DType](TrivialRegisterPassable):
    """The support of a row, of which parts are added in their order.

    Parameters:
        dtype: The accumulator's dtype.
    """

    var sum: Sum[Self.dtype, 1]
    var count: Int64

    @inline(.always)
    def __init__(out self):
        self.sum = Sum[Self.dtype, 1]()
        self.count = 0

    @inline(.always)
    def add(mut self, part: Support[Self.dtype]):
        """Adds the next part."""
        self.sum.add(part.sum)
        self.count += part.count

    @inline(.always)
    def found(self) -> Support[Self.dtype]:
        """Returns the support of all parts."""
        return {self.sum.value - self.sum.excess, self.count}


def rows_on_cpu[R: SpannedRow, //](first: R, rows: Rows, queue: Queue) raises:
    """Computes rows along the last axis, each on one core if there are enough of them, else each on all.

    Parameters:
        R: What is read and written.

    Args:
        first: The first row.
        rows: How many there are, and how long.
        queue: The CPU to run on.
    """
    var n = rows.n
    var spans = spans_of(n)
    var workers = workers_for(rows.count() * n, queue)
    if spans == 1 or workers == 1 or rows.count() >= 4 * workers:

        @inline(.always)
        def whole(i: Int) {imm}:
            var row = first.at(i)
            var m = Scalar[R.accum](0)
            var threshold = Threshold[R.accum, 1]()
            comptime if R.steps > 1:
                var large = row.largest(0, n)
                m = fold_max[1](large)
                threshold = threshold_of(large - m)
                threshold.go_on()
            var found = Support[R.accum](0, 0)
            for _ in range(R.steps):
                var total = Total[R.accum]()
                for start in range(0, n, SPAN):
                    total.add(
                        row.support(m, threshold, start, min(start + SPAN, n))
                    )
                found = total.found()
                threshold.step(found.sum, found.count)
                if threshold.stands:
                    break
            row.write(m, threshold, found, 0, n)

        share_rows(whole, rows, queue)
        return

    comptime Group = SIMD[R.accum, R.group]
    var memory = List[Support[R.accum]](length=spans, fill={0, 0})
    var parts = memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var of_spans = List[Group](length=spans, fill=Group(0))
    var large_of = of_spans.unsafe_ptr().unsafe_origin_cast[
        MutUntrackedOrigin
    ]()
    for i in range(rows.count()):
        var row = first.at(i)

        @inline(.always)
        def look(span: Int) {imm}:
            var start = span * SPAN
            large_of[unsafe_offset=span] = row.largest(
                start, min(start + SPAN, n)
            )

        var m = Scalar[R.accum](0)
        var threshold = Threshold[R.accum, 1]()
        comptime if R.steps > 1:
            share_tasks(look, spans, n, queue)
            var large = Group(neg_inf[R.accum]())
            for span in range(spans):
                large = larger(large_of[unsafe_offset=span], large)
            m = fold_max[1](large)
            threshold = threshold_of(large - m)
            threshold.go_on()
        var found = Support[R.accum](0, 0)
        for _ in range(R.steps):
            var current = threshold

            @inline(.always)
            def gather(span: Int) {imm}:
                var start = span * SPAN
                parts[unsafe_offset=span] = row.support(
                    m, current, start, min(start + SPAN, n)
                )

            share_tasks(gather, spans, n, queue)
            var total = Total[R.accum]()
            for span in range(spans):
                total.add(parts[unsafe_offset=span])
            found = total.found()
            threshold.step(found.sum, found.count)
            if threshold.stands:
                break
        var last = threshold
        var support = found

        @inline(.always)
        def write(span: Int) {imm}:
            var start = span * SPAN
            row.write(m, last, support, start, min(start + SPAN, n))

        share_tasks(write, spans, n, queue)
    _ = memory^
    _ = of_spans^
