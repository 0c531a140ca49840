"""Sparsemax, and its gradient: the probabilities that are nearest to a row's logits, most of them exactly 0 (Martins and
Astudillo 2016, arXiv 1602.02068).

y = max(z - t, 0), where z = x - max x, and t is the threshold that makes a row sum to 1. The excess f(t) = Σ max(z - t, 0) - 1
is convex and falls in straight pieces, whose slope is the number of elements above t. So Newton's steps from t = -1, where f
is not negative, never pass the threshold, and reach it once a step leaves the same elements above. If a step leaves a share
a of f and a share b of the slope, then a + b ≤ 1: f times the slope falls to a quarter at least, which for 2^20 float32 takes
about 30 steps at most. Logits of a language model take 4 to 7.

A step is of what elements exceed the current threshold by, not of the elements: towards the end these sum to 1, and what
rounding did to earlier steps is made up for.

Special values need no branches of their own: for NaN, +inf and a row of nothing but -inf some z is NaN, and so is the sum.

The bits of a row depend on its elements, its length and its dtype. Which chain of additions an element belongs to follows from
its index, and chains merge in a fixed order.
"""

from std.bit import log2_ceil, next_power_of_two
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.sys import simd_width_of
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.sync import barrier

from ..cpu.contiguous import READ_AHEAD, VECTORS, WRITE_AHEAD
from ..cpu.lanes import each, fold_max, fold_sum, larger
from ..cpu.memory import fetch, fetch_to_write, first_lanes, load, store
from ..cpu.panels import Panels
from ..cpu.schedule import SPAN, spans_of
from ..cpu.shares import Shares, parallel, share_rows, share_tasks, workers_for
from ..gpu.tree_reduction import MAX_GRID, Shared
from ..gpu.tree_reduction import larger as larger_of
from ..gpu.warp_reduction import block_reduce
from ..online import Sum, accumulator
from ..queue import Queue
from ..rows import Rows, Source, Target

comptime MOST_STEPS = 128
"""Steps after which the threshold stands, whatever it is: twice as many as f and its slope leave room for in float64."""


def sparsemax[
    dtype: DType, //, target: StaticString, contiguous: Bool = False
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Writes sparsemax of every row of `x`: max(x - max x - t, 0), t being what makes it sum to 1.

    Parameters:
        dtype: Dtype of both tensors: float32, bfloat16, float16 or float64.
        target: "cpu" or "gpu".
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: Probabilities; not in the memory of `x`.
        x: Logits.
        rows: How the memory is divided into rows.
        queue: Where to compute.
    """
    if rows.is_empty():
        return
    # Where a dimension of 1 is the last, rows are contiguous all the same, and have the same bits.
    if contiguous or rows.inner == 1:
        comptime if target == "cpu":
            _rows_on_cpu(_Logits(y, x, rows.n), rows, queue)
        else:
            _rows_on_gpu(y, x, rows, queue)
        return
    comptime if not contiguous:
        comptime if target == "cpu":
            _columns_on_cpu(y, x, rows, queue)
        else:
            _columns_on_gpu(y, x, rows, queue)


def sparsemax_backward[
    dtype: DType, //, target: StaticString, contiguous: Bool = False
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes the gradient of the logits of every row: dy less its mean over what is above 0 in `y`, and 0 elsewhere.

    Parameters:
        dtype: Dtype of all tensors.
        target: "cpu" or "gpu".
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        dx: Gradient of the logits; not in the memory of `y` or `dy`.
        y: What sparsemax returned.
        dy: The gradient of that.
        rows: How the memory is divided into rows.
        queue: Where to compute.
    """
    if rows.is_empty():
        return
    if contiguous or rows.inner == 1:
        comptime if target == "cpu":
            _rows_on_cpu(_Gradients(dx, y, dy, rows.n), rows, queue)
        else:
            _gradients_on_gpu[True](dx, y, dy, rows, queue)
        return
    comptime if not contiguous:
        comptime if target == "cpu":
            _gradient_columns_on_cpu(dx, y, dy, rows, queue)
        else:
            _gradients_on_gpu[False](dx, y, dy, rows, queue)


@inline(.always)
def positive[
    dtype: DType, width: SIMDLength, //
](values: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns the values that are above 0 or NaN, and 0 for the rest."""
    return values.le(0).select(SIMD[dtype, width](0), values)


struct Threshold[dtype: DType, rows: SIMDLength](TrivialRegisterPassable):
    """What is known of the thresholds of rows.

    Parameters:
        dtype: The accumulator's dtype.
        rows: Number of rows, one a lane.
    """

    comptime Values = SIMD[Self.dtype, Self.rows]

    var high: Self.Values
    """The threshold, rounded."""
    var low: Self.Values
    """What rounding took of it: of a row of 2^20 that are above it, it would take a percent of their sum."""
    var count: SIMD[DType.int64, Self.rows]
    """How many elements were above the last one."""
    var guess: SIMD[DType.int64, Self.rows]
    """How many there are if this is already the one that is looked for; -1 if nobody knows."""
    var stands: SIMD[DType.bool, Self.rows]
    """Whether this is the one that is looked for."""

    @inline(.always)
    def __init__(out self):
        """The lower bound, and no step yet."""
        self.high = -1
        self.low = 0
        self.count = Int64.MAX
        self.guess = -1
        self.stands = SIMD[DType.bool, Self.rows](fill=False)

    @inline(.always)
    def excess[
        width: SIMDLength, //
    ](self, z: SIMD[Self.dtype, width]) -> SIMD[Self.dtype, width]:
        """Returns by how much elements exceed the threshold.

        Parameters:
            width: As many as there are rows, or any number of elements of a single row.

        Args:
            z: Logits, less the maximum of their row.

        Returns:
            The difference, negative below it.
        """
        comptime if Self.rows == 1:
            return (z - self.high[0]) - self.low[0]
        else:
            return (z - rebind[type_of(z)](self.high)) - rebind[type_of(z)](
                self.low
            )

    @inline(.always)
    def step(mut self, sum: Self.Values, count: SIMD[DType.int64, Self.rows]):
        """Takes a step, where the threshold does not stand yet.

        Args:
            sum: Σ of what elements exceed the threshold by.
            count: How many do.
        """
        var step = (sum - 1) / count.cast[Self.dtype]()
        var high = self.high + step
        var low = self.low + ((self.high - high) + step)
        self.high = self.stands.select(self.high, high)
        self.low = self.stands.select(self.low, low)
        # The same elements are above it as before: this step only made up for rounding.
        self.stands |= count.ge(self.count) | count.eq(self.guess)
        self.count = count
        self.guess = -1

    @inline(.always)
    def go_on(mut self):
        """Makes the threshold of some elements of the rows, the largest among them, the first that is tried for all.

        It is not above that of all. If no others are above it, it is that.
        """
        self.guess = self.count
        self.count = Int64.MAX
        self.stands = SIMD[DType.bool, Self.rows](fill=False)


@fieldwise_init
struct Support[dtype: DType](TrivialRegisterPassable):
    """The elements of a part of a row that are above 0, or above its threshold.

    Parameters:
        dtype: The accumulator's dtype.
    """

    var sum: Scalar[Self.dtype]
    """What they sum to."""
    var count: Int64
    """How many they are."""


@inline(.always)
def merged[
    dtype: DType
](a: Support[dtype], b: Support[dtype]) -> Support[dtype]:
    """Returns the support of two parts of a row."""
    return {a.sum + b.sum, a.count + b.count}


@inline(.always)
def threshold_of[
    dtype: DType, width: SIMDLength, //
](z: SIMD[dtype, width]) -> Threshold[dtype, 1]:
    """Returns the threshold of a row of so many elements, less their maximum."""
    var threshold = Threshold[dtype, 1]()
    for _ in range(MOST_STEPS):
        var excess = threshold.excess(z)
        threshold.step(
            fold_sum[1](positive(excess)),
            Int64(Int(excess.gt(0).reduce_bit_count())),
        )
        if threshold.stands:
            break
    return threshold


@inline(.always)
def mean_of[dtype: DType, //](found: Support[dtype]) -> Scalar[dtype]:
    """Returns the mean over a support; anything where there is none."""
    return found.sum / found.count.cast[dtype]()


# Rows along the last axis on a CPU: the lanes of a vector are neighbours in one row, which is reduced span by span.


trait _SpannedRow(TrivialRegisterPassable):
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
struct _Logits[dtype: DType](_SpannedRow):
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
        var sums = SIMD[Self.accum, Self.group](0)
        var rest = SIMD[Self.accum, Self.width](0)
        var above = 0

        @inline(.always)
        def add[n: SIMDLength](i: Int, count: Int) {mut sums, mut rest, mut above, imm}:
            var z = load[n](self.x.unsafe_offset(i), count) - m
            var excess = threshold.excess(z)
            # Most groups have nothing above the threshold; NaN is not below it.
            if excess.le(0).reduce_and():
                return
            above += Int(excess.gt(0).reduce_bit_count())
            comptime if n == Self.group:
                sums += rebind[type_of(sums)](positive(excess))
            else:
                rest += rebind[type_of(rest)](positive(excess))

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
        @inline(.always)
        def turn[n: SIMDLength](i: Int, count: Int) {imm}:
            var z = load[n](self.x.unsafe_offset(i), count) - m
            store(self.y.unsafe_offset(i), positive(threshold.excess(z)), count)

        _ = each[Self.group, Self.width](turn, start, end, end)


@fieldwise_init
struct _Gradients[dtype: DType](_SpannedRow):
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
        def add[n: SIMDLength](i: Int, count: Int) {mut sums, mut rest, mut above, imm}:
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
                sums += rebind[type_of(sums)](_term(y, dy))
            else:
                rest += rebind[type_of(rest)](_term(y, dy))

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
            store(self.dx.unsafe_offset(i), _gradient(y, dy - mean), count)

        _ = each[Self.group, Self.width](turn, start, end, end)


@inline(.always)
def _term[
    dtype: DType, width: SIMDLength, //
](y: SIMD[dtype, width], dy: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns what elements add to the sum of gradients over the support; NaN for NaN, so that its row is.
    """
    return _gradient(y, dy + (y - y))


@inline(.always)
def _gradient[
    dtype: DType, width: SIMDLength, //
](y: SIMD[dtype, width], values: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns the values where `y` is above 0 or NaN, and 0 elsewhere."""
    return y.le(0).select(SIMD[dtype, width](0), values)


struct _Total[dtype: DType](TrivialRegisterPassable):
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


def _rows_on_cpu[R: _SpannedRow, //](first: R, rows: Rows, queue: Queue) raises:
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
            var large = row.largest(0, n)
            var m = fold_max[1](large)
            var threshold = threshold_of(large - m)
            threshold.go_on()
            var found = Support[R.accum](0, 0)
            for _ in range(R.steps):
                var total = _Total[R.accum]()
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

        share_tasks(look, spans, n, queue)
        var large = Group(neg_inf[R.accum]())
        for span in range(spans):
            large = larger(large_of[unsafe_offset=span], large)
        var m = fold_max[1](large)
        var threshold = threshold_of(large - m)
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
            var total = _Total[R.accum]()
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


# Rows along another axis on a CPU: the lanes of a vector are the same element of neighbouring rows.


comptime COPIED = 1 << 24
"""Bytes of neighbouring rows up to which they are copied to a core's own memory, where steps read them: apart by a power of
two, as they may lie, few of them stay in a cache."""

comptime PANEL = 4
"""Vectors of neighbouring rows at most that are copied together: memory is read in pieces of as many cache lines."""

comptime ROWS_AHEAD = 8
"""By how many elements of each row reads and writes are prefetched."""


@fieldwise_init
struct _Column[dtype: DType, accum: DType](TrivialRegisterPassable):
    """As many neighbouring rows as there are lanes, or fewer.

    Parameters:
        dtype: Their dtype.
        accum: The accumulator's.
    """

    comptime lanes = Panels[Self.accum].lanes
    comptime Values = SIMD[Self.accum, Self.lanes]

    var first: Source[Self.dtype]
    """The first element of the first row."""
    var step: Int
    """From an element to the next."""
    var count: Int
    """How many rows there are: lanes beyond have -inf."""
    var n: Int
    """How long they are."""

    @inline(.always)
    def at(self, i: Int) -> Self.Values:
        """Returns the element `i` of each."""
        return rebind[Self.Values](
            load[Self.lanes](
                self.first.unsafe_offset(i * self.step), self.count
            )
        )

    def threshold(self, m: Self.Values) -> Threshold[Self.accum, Self.lanes]:
        """Returns the threshold of each, given the maxima."""
        var threshold = Threshold[Self.accum, Self.lanes]()
        for _ in range(MOST_STEPS):
            var sums = Sum[Self.accum, Self.lanes]()
            var found = SIMD[DType.int64, Self.lanes](0)

            @inline(.always)
            def add[
                several: SIMDLength
            ](i: Int, some: Int) {mut sums, mut found, imm}:
                var sum = Self.Values(0)
                var above = SIMD[DType.int32, Self.lanes](0)
                comptime for j in range(Int(several)):
                    var excess = threshold.excess(self.at(i + j) - m)
                    sum += positive(excess)
                    above += excess.gt(0).cast[DType.int32]()
                sums.add(sum)
                found += above.cast[DType.int64]()

            _ = each[VECTORS, 1](add, 0, self.n, self.n)
            threshold.step(sums.value - sums.excess, found)
            if threshold.stands.reduce_and():
                break
        return threshold


@fieldwise_init
struct _Panel[dtype: DType, vectors: Int](TrivialRegisterPassable):
    """Neighbouring rows, walked side by side.

    Parameters:
        dtype: Their dtype.
        vectors: Vectors that they fill: a single one may be filled in part.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = Panels[Self.accum].lanes
    comptime Values = SIMD[Self.accum, Self.lanes]

    var first: Int
    """Where the first element of the first row is."""
    var inner: Int
    """From an element to the next."""
    var count: Int
    """How many rows there are, where there is a single vector."""
    var n: Int
    """How long they are."""

    @inline(.always)
    def _count(self) -> Int:
        """Returns how many rows are in each vector."""
        return Int(Self.lanes) if Self.vectors > 1 else self.count

    @inline(.always)
    def load[v: Int](self, x: Source[Self.dtype], i: Int) -> Self.Values:
        """Returns the element `i` of the rows of a vector, and announces one that comes later.
        """
        var at = x.unsafe_offset(self.first + i * self.inner + v * Int(Self.lanes))
        fetch[Int(Self.lanes)](at.unsafe_offset(ROWS_AHEAD * self.inner))
        return rebind[Self.Values](load[Self.lanes](at, self._count()))

    @inline(.always)
    def store[v: Int](self, y: Target[Self.dtype], i: Int, values: Self.Values):
        """Writes the element `i` of the rows of a vector, and announces one that comes later.
        """
        var at = y.unsafe_offset(self.first + i * self.inner + v * Int(Self.lanes))
        fetch_to_write[Int(Self.lanes)](
            at.unsafe_offset(ROWS_AHEAD * self.inner)
        )
        store(
            at,
            rebind[SIMD[accumulator[Self.dtype](), Self.lanes]](values),
            self._count(),
        )

    def sparsemax[
        is_copied: Bool
    ](
        self,
        y: Target[Self.dtype],
        x: Source[Self.dtype],
        room: Target[Self.accum],
    ):
        """Writes sparsemax of the rows.

        Parameters:
            is_copied: Whether they are copied to memory of the core's own.

        Args:
            y: Probabilities, all of them.
            x: Logits, all of them.
            room: That memory.
        """
        comptime size = Int(Self.lanes)
        var m = Array[Self.Values, Self.vectors](
            fill=Self.Values(neg_inf[Self.accum]())
        )
        for i in range(self.n):
            comptime for v in range(Self.vectors):
                var values = self.load[v](x, i)
                m[v] = larger(values, m[v])
                comptime if is_copied:
                    room.unsafe_offset((v * self.n + i) * size).unsafe_store(
                        values
                    )
        comptime State = Threshold[Self.accum, Self.lanes]
        var thresholds = Array[State, Self.vectors](fill=State())
        comptime for v in range(Self.vectors):
            comptime if is_copied:
                thresholds[v] = _Column[Self.accum, Self.accum](
                    room.unsafe_offset(v * self.n * size), size, size, self.n
                ).threshold(m[v])
            else:
                thresholds[v] = _Column[Self.dtype, Self.accum](
                    x.unsafe_offset(self.first + v * size),
                    self.inner,
                    self._count(),
                    self.n,
                ).threshold(m[v])
        for i in range(self.n):
            comptime for v in range(Self.vectors):
                var values: Self.Values
                comptime if is_copied:
                    values = room.unsafe_offset(
                        (v * self.n + i) * size
                    ).unsafe_load[width=Self.lanes]()
                else:
                    values = self.load[v](x, i)
                self.store[v](y, i, positive(thresholds[v].excess(values - m[v])))

    def gradient(
        self,
        dx: Target[Self.dtype],
        y: Source[Self.dtype],
        dy: Source[Self.dtype],
    ):
        """Writes the gradient of the logits of the rows.

        Args:
            dx: Gradients, all of them.
            y: What sparsemax returned.
            dy: The gradient of that.
        """
        comptime Sums = Sum[Self.accum, Self.lanes]
        comptime Counts = SIMD[DType.int64, Self.lanes]
        var sums = Array[Sums, Self.vectors](fill=Sums())
        var above = Array[Counts, Self.vectors](fill=Counts(0))

        @inline(.always)
        def add[
            several: SIMDLength
        ](start: Int, some: Int) {mut sums, mut above, imm}:
            comptime for v in range(Self.vectors):
                var sum = Self.Values(0)
                var found = SIMD[DType.int32, Self.lanes](0)
                comptime for j in range(Int(several)):
                    var results = self.load[v](y, start + j)
                    sum += _term(results, self.load[v](dy, start + j))
                    found += results.gt(0).cast[DType.int32]()
                sums[v].add(sum)
                above[v] += found.cast[DType.int64]()

        _ = each[VECTORS, 1](add, 0, self.n, self.n)
        var means = Array[Self.Values, Self.vectors](fill=0)
        comptime for v in range(Self.vectors):
            means[v] = (sums[v].value - sums[v].excess) / above[v].cast[
                Self.accum
            ]()
        for i in range(self.n):
            comptime for v in range(Self.vectors):
                var results = self.load[v](y, i)
                var given = self.load[v](dy, i)
                self.store[v](dx, i, _gradient(results, given - means[v]))


def _columns_on_cpu[
    dtype: DType, //
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Computes sparsemax along an axis that is not the last."""
    comptime accum = accumulator[dtype]()
    comptime lanes = Int(Panels[accum].lanes)
    var n = rows.n
    var panels = Panels[accum](rows, rows.inner, 1)
    panels.width = min(panels.width, PANEL * lanes)
    var is_copied = n * panels.width * size_of[accum]() <= COPIED

    @inline(.always)
    def work(shares: Shares) {imm}:
        var memory = List[Scalar[accum]](
            unsafe_uninit_length=n * panels.width if is_copied else 0
        )
        var room = memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
        for i in shares:
            var before, after, count = panels.place(i)
            var first = before * n * rows.inner + after
            if is_copied and count == PANEL * lanes:
                _Panel[dtype, PANEL](first, rows.inner, lanes, n).sparsemax[
                    True
                ](y, x, room)
                continue
            for column in range(0, count, lanes):
                var panel = _Panel[dtype, 1](
                    first + column, rows.inner, count - column, n
                )
                if is_copied:
                    panel.sparsemax[True](y, x, room)
                else:
                    panel.sparsemax[False](y, x, room)
        _ = memory^

    parallel(work, panels.count(), rows.count() * n, queue)


def _gradient_columns_on_cpu[
    dtype: DType, //
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Computes the gradient of sparsemax along an axis that is not the last."""
    comptime lanes = Int(Panels[accumulator[dtype]()].lanes)
    var n = rows.n
    var panels = Panels[accumulator[dtype]()](rows, rows.inner, 1)
    panels.width = min(panels.width, PANEL * lanes)

    @inline(.always)
    def of_panel(i: Int) {imm}:
        var before, after, count = panels.place(i)
        var first = before * n * rows.inner + after
        if count == PANEL * lanes:
            _Panel[dtype, PANEL](first, rows.inner, lanes, n).gradient(
                dx, y, dy
            )
            return
        for column in range(0, count, lanes):
            _Panel[dtype, 1](
                first + column, rows.inner, count - column, n
            ).gradient(dx, y, dy)

    share_tasks(of_panel, panels.count(), rows.count() * n, queue)


# Rows on a GPU: one block a row, or of rows along another axis one for as many neighbours as a warp has threads.


comptime SLOTS = 1 << 15
"""Bytes of shared memory for what is above -1 in rows that are read again for each step otherwise."""

comptime TOGETHER = 32
"""Most rows along an axis that is not the last that a block takes."""


@inline(.always)
def _vector[dtype: DType, contiguous: Bool]() -> Int:
    """Returns how many neighbours in a row a thread takes: 16 bytes of them, or one where they are not neighbours in memory.
    """
    return 16 // size_of[dtype]() if contiguous else 1


struct _Place[dtype: DType, contiguous: Bool](TrivialRegisterPassable):
    """Where on a GPU the elements of a row are that a thread takes.

    Parameters:
        dtype: Dtype of the tensors.
        contiguous: Whether rows are along the last axis.
    """

    comptime width = _vector[Self.dtype, Self.contiguous]()
    comptime Values = SIMD[Self.dtype, Self.width]

    var start: Int
    """Where the row begins."""
    var n: Int
    """How long it is; 0 if it is none."""
    var inner: Int
    """From one element to the next."""

    @inline(.always)
    def __init__(out self, start: Int, n: Int, inner: Int):
        self.start = start
        self.n = n
        self.inner = inner

    @inline(.always)
    def load(self, x: Source[Self.dtype], i: Int) -> Self.Values:
        """Returns the element `i` and its neighbours, -inf for those that there are not.
        """
        var values = Self.Values(neg_inf[Self.dtype]())
        comptime if Self.contiguous:
            var at = x.unsafe_offset(self.start + i)
            if i + Self.width <= self.n and Int(at) % 16 == 0:
                return at.unsafe_load[width=Self.width, alignment=16]()
            comptime for j in range(Self.width):
                if i + j < self.n:
                    values[j] = at[unsafe_offset=j]
        else:
            if i < self.n:
                values[0] = x[unsafe_offset=self.start + i * self.inner]
        return values

    @inline(.always)
    def store(self, y: Target[Self.dtype], i: Int, values: Self.Values):
        """Writes the element `i` and its neighbours, as far as there are such.
        """
        comptime if Self.contiguous:
            var at = y.unsafe_offset(self.start + i)
            if i + Self.width <= self.n and Int(at) % 16 == 0:
                at.unsafe_store[alignment=16](0, values)
                return
            comptime for j in range(Self.width):
                if i + j < self.n:
                    at[unsafe_offset=j] = values[j]
        else:
            if i < self.n:
                y[unsafe_offset=self.start + i * self.inner] = values[0]


@inline(.always)
def _meet[
    T: TrivialRegisterPassable,
    //,
    contiguous: Bool,
    threads: Int,
    combine: def(T, T) thin -> T,
](scratch: Shared[T], thread: Int, columns: Int, value: T) -> T:
    """Combines the values of the threads of a row, and hands the result to each, with the same bits.

    Parameters:
        T: Type of the values, whole words of 4 bytes.
        contiguous: Whether the row has a block of its own.
        threads: Threads a row, a power of two.
        combine: The operation, commutative.

    Args:
        scratch: Memory for a value a thread; free again when this returns.
        thread: This thread's index in the block.
        columns: Rows a block.
        value: This thread's value.

    Returns:
        The combined value of this thread's row.
    """
    comptime if contiguous:
        return block_reduce[threads, combine](scratch, thread, value)
    else:
        scratch[unsafe_offset=thread] = value
        barrier()
        comptime for level in reversed(range(log2_ceil(threads))):
            var half = (1 << level) * columns
            if thread < half:
                scratch[unsafe_offset=thread] = combine(
                    scratch[unsafe_offset=thread],
                    scratch[unsafe_offset=thread + half],
                )
            barrier()
        var result = scratch[unsafe_offset=thread % columns]
        # Nobody may write the next value before everybody has read this one.
        barrier()
        return result


@inline(.always)
def _most_threads[contiguous: Bool, threads: Int]() -> Int:
    """Returns the threads of a block, at most."""
    return threads if contiguous else threads * TOGETHER


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(_most_threads[contiguous, threads]())
    )
)
def sparsemax_kernel[
    dtype: DType, contiguous: Bool, threads: Int, held: Int
](
    y: Target[dtype],
    x: Source[dtype],
    outer: Int64,
    n: Int64,
    inner: Int64,
    columns: Int64,
):
    """Writes sparsemax along the middle axis of a row-major (outer, n, inner) tensor.

    Parameters:
        dtype: Dtype of both tensors.
        contiguous: Whether `inner` and `columns` are 1.
        threads: Threads a row, a power of two; of contiguous rows from 32.
        held: Vectors that a thread keeps in registers: as many as there are in rows of this length. 0 where rows are longer,
            of which only what is above -1 is kept, in shared memory if there is room.

    Args:
        y: Probabilities.
        x: Logits.
        outer: First dimension.
        n: Length of the rows.
        inner: Last dimension, and the distance between neighbours in a row.
        columns: Rows a block, a power of two up to `TOGETHER`.
    """
    comptime accum = accumulator[dtype]()
    comptime most = _most_threads[contiguous, threads]()
    comptime Place = _Place[dtype, contiguous]
    comptime width = Place.width
    comptime slots = 0 if held > 0 else SLOTS // (most * size_of[accum]())
    var maxima = unsafe_stack_allocation[
        most, Scalar[accum], address_space=AddressSpace.SHARED
    ]()
    var supports = unsafe_stack_allocation[
        most, Support[accum], address_space=AddressSpace.SHARED
    ]()
    var kept = unsafe_stack_allocation[
        max(1, slots * most), Scalar[accum], address_space=AddressSpace.SHARED
    ]()
    var standing = unsafe_stack_allocation[
        TOGETHER, Int32, address_space=AddressSpace.SHARED
    ]()
    var block = threads * Int(columns)
    var thread = Int(thread_idx.x)
    var first = thread // Int(columns) * width
    comptime step = threads * width
    var tiles = ceildiv(Int(inner), Int(columns))

    for tile in range(Int(block_idx.x), Int(outer) * tiles, Int(grid_dim.x)):
        var before, after = divmod(tile, tiles)
        var column = after * Int(columns) + thread % Int(columns)
        # Threads beyond the last column only keep the others company at the barriers.
        var place = Place(
            before * Int(n) * Int(inner) + column,
            Int(n) if column < Int(inner) else 0,
            Int(inner),
        )
        var values = Array[Place.Values, max(1, held)](
            fill=Place.Values(neg_inf[dtype]())
        )
        var m = neg_inf[accum]()
        comptime if held > 0:
            comptime for v in range(held):
                values[v] = place.load(x, first + v * step)
                m = max(m, values[v].cast[accum]().reduce_max())
        else:
            for i in range(first, place.n, step):
                m = max(m, place.load(x, i).cast[accum]().reduce_max())
        m = _meet[contiguous, threads, larger_of[accum]](
            maxima, thread, Int(columns), m
        )

        var threshold = Threshold[accum, 1]()
        var used = 0
        var is_kept = False
        for turn in range(MOST_STEPS):
            var chain = _Chain[accum]()
            comptime if held > 0:
                comptime for v in range(held):
                    chain.add(threshold.excess(values[v].cast[accum]() - m))
            else:
                if is_kept:
                    for slot in range(used):
                        chain.add(
                            threshold.excess(
                                kept[unsafe_offset=slot * block + thread]
                            )
                        )
                else:
                    for i in range(first, place.n, step):
                        var z = place.load(x, i).cast[accum]() - m
                        chain.add(threshold.excess(z))
                        if turn == 0:
                            comptime for j in range(width):
                                # NaN has its slot as well.
                                if not (z[j] <= -1):
                                    if used < slots:
                                        kept[
                                            unsafe_offset=used * block + thread
                                        ] = z[j]
                                    used += 1
                    if turn == 0:
                        # All of its threads know, or none: what else is in the block makes no difference to a row.
                        var lacking = _meet[contiguous, threads, merged[accum]](
                            supports,
                            thread,
                            Int(columns),
                            Support[accum](0, Int64(used > slots)),
                        )
                        is_kept = lacking.count == 0
            var found = _meet[contiguous, threads, merged[accum]](
                supports, thread, Int(columns), chain.found()
            )
            threshold.step(found.sum, found.count)
            comptime if contiguous:
                if threshold.stands:
                    break
            else:
                if thread < Int(columns):
                    standing[unsafe_offset=thread] = Int32(
                        Int(threshold.stands[0])
                    )
                barrier()
                var all = Int32(1)
                for other in range(Int(columns)):
                    all &= standing[unsafe_offset=other]
                if all == 1:
                    break

        comptime if held > 0:
            comptime for v in range(held):
                var z = values[v].cast[accum]() - m
                place.store(
                    y,
                    first + v * step,
                    positive(threshold.excess(z)).cast[dtype](),
                )
        else:
            for i in range(first, place.n, step):
                var z = place.load(x, i).cast[accum]() - m
                place.store(y, i, positive(threshold.excess(z)).cast[dtype]())


struct _Chain[dtype: DType](TrivialRegisterPassable):
    """The support among the elements of a thread, added one vector after the other.

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
    def add[width: SIMDLength, //](mut self, excess: SIMD[Self.dtype, width]):
        """Adds what is above 0 of some elements."""
        self.add(positive(excess), excess)

    @inline(.always)
    def add[
        width: SIMDLength, //
    ](
        mut self,
        terms: SIMD[Self.dtype, width],
        values: SIMD[Self.dtype, width],
    ):
        """Adds terms, and counts the values that are above 0."""
        self.sum.add(terms.reduce_add())
        comptime for j in range(Int(width)):
            self.count += Int64(Int(values[j] > 0))

    @inline(.always)
    def found(self) -> Support[Self.dtype]:
        """Returns the support of all of them."""
        return {self.sum.value - self.sum.excess, self.count}


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(_most_threads[contiguous, threads]())
    )
)
def sparsemax_backward_kernel[
    dtype: DType, contiguous: Bool, threads: Int
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    outer: Int64,
    n: Int64,
    inner: Int64,
    columns: Int64,
):
    """Writes the gradient of sparsemax along the middle axis of row-major (outer, n, inner) tensors.

    Parameters:
        dtype: Dtype of all tensors.
        contiguous: Whether `inner` and `columns` are 1.
        threads: Threads a row, a power of two; of contiguous rows from 32.

    Args:
        dx: Gradient of the logits.
        y: Results of the forward op.
        dy: Their gradient.
        outer: First dimension.
        n: Length of the rows.
        inner: Last dimension, and the distance between neighbours in a row.
        columns: Rows a block, a power of two up to `TOGETHER`.
    """
    comptime accum = accumulator[dtype]()
    comptime most = _most_threads[contiguous, threads]()
    comptime Place = _Place[dtype, contiguous]
    var supports = unsafe_stack_allocation[
        most, Support[accum], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var first = thread // Int(columns) * Place.width
    comptime step = threads * Place.width
    var tiles = ceildiv(Int(inner), Int(columns))

    for tile in range(Int(block_idx.x), Int(outer) * tiles, Int(grid_dim.x)):
        var before, after = divmod(tile, tiles)
        var column = after * Int(columns) + thread % Int(columns)
        var place = Place(
            before * Int(n) * Int(inner) + column,
            Int(n) if column < Int(inner) else 0,
            Int(inner),
        )
        var chain = _Chain[accum]()
        for i in range(first, place.n, step):
            var results = place.load(y, i).cast[accum]()
            # Beyond the end of the row there is -inf, which is not above 0.
            chain.add(_term(results, place.load(dy, i).cast[accum]()), results)
        var found = _meet[contiguous, threads, merged[accum]](
            supports, thread, Int(columns), chain.found()
        )
        var mean = mean_of(found)
        for i in range(first, place.n, step):
            var results = place.load(y, i).cast[accum]()
            var given = place.load(dy, i).cast[accum]()
            place.store(dx, i, _gradient(results, given - mean).cast[dtype]())


def _rows_on_gpu[
    dtype: DType, //
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Computes sparsemax along the last axis: threads and vectors by the length of the rows alone.
    """
    comptime width = _vector[dtype, True]()

    @inline(.always)
    def launch[threads: Int, held: Int]() raises {imm}:
        queue.launch[sparsemax_kernel[dtype, True, threads, held]](
            y,
            x,
            Int64(rows.count()),
            Int64(rows.n),
            Int64(1),
            Int64(1),
            grid_dim=min(rows.count(), MAX_GRID),
            block_dim=threads,
        )

    var vectors = ceildiv(rows.n, width)
    if vectors <= 32:
        launch[32, 1]()
    elif vectors <= 128:
        launch[32, 4]()
    elif vectors <= 512:
        launch[128, 4]()
    elif vectors <= 2048:
        launch[256, 8]()
    elif vectors <= 8192:
        launch[1024, 8]()
    else:
        launch[1024, 0]()


def _columns_on_gpu[
    dtype: DType, //
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Computes sparsemax along an axis that is not the last: threads a row by the length of the rows alone.
    """
    comptime registers = 128 // size_of[accumulator[dtype]()]()
    var columns = min(TOGETHER, next_power_of_two(rows.inner))

    @inline(.always)
    def launch[threads: Int, held: Int]() raises {imm}:
        queue.launch[sparsemax_kernel[dtype, False, threads, held]](
            y,
            x,
            Int64(rows.outer),
            Int64(rows.n),
            Int64(rows.inner),
            Int64(columns),
            grid_dim=min(rows.outer * ceildiv(rows.inner, columns), MAX_GRID),
            block_dim=threads * columns,
        )

    if rows.n <= 8 * registers:
        launch[8, registers]()
    elif rows.n <= 32 * registers:
        launch[32, registers]()
    else:
        launch[32, 0]()


def _gradients_on_gpu[
    dtype: DType, //, contiguous: Bool
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Computes the gradient of sparsemax: threads a row by the length of the rows alone.
    """
    var outer, inner, columns = rows.count(), 1, 1
    comptime if not contiguous:
        outer, inner = rows.outer, rows.inner
        columns = min(TOGETHER, next_power_of_two(rows.inner))

    @inline(.always)
    def launch[threads: Int]() raises {imm}:
        queue.launch[sparsemax_backward_kernel[dtype, contiguous, threads]](
            dx,
            y,
            dy,
            Int64(outer),
            Int64(rows.n),
            Int64(inner),
            Int64(columns),
            grid_dim=min(outer * ceildiv(inner, columns), MAX_GRID),
            block_dim=threads * columns,
        )

    comptime if not contiguous:
        if rows.n <= 256:
            launch[8]()
        else:
            launch[32]()
    else:
        if rows.n <= 512:
            launch[32]()
        elif rows.n <= 8192:
            launch[256]()
        else:
            launch[1024]()
