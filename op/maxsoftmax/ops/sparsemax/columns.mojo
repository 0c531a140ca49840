"""Sparsemax of rows along another axis on a CPU: the lanes of a vector are the same element of neighbouring rows.
"""

from std.sys import size_of
from std.utils.numerics import neg_inf

from ...cpu.lanes import each, larger
from ...cpu.memory import fetch, fetch_to_write, load, store
from ...cpu.panels import Panels
from ...cpu.shares import Shares, parallel, share_tasks
from ...cpu.tuning import VECTORS
from ...math.online import Sum, accumulator
from ...queue import Queue
from ...io.rows import Rows, Source, Target
from .threshold import MOST_STEPS, Threshold, gradient_where, positive, term

comptime COPIED = 1 << 24
"""Bytes of neighbouring rows up to which they are copied to a core's own memory, where steps read them: apart by a power of
two, as they may lie, few of them stay in a cache."""

comptime PANEL = 4
"""Vectors of neighbouring rows at most that are copied together: memory is read in pieces of as many cache lines."""

comptime ROWS_AHEAD = 8
"""By how many elements of each row reads and writes are prefetched."""


@fieldwise_init
struct Column[dtype: DType, accum: DType](TrivialRegisterPassable):
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
struct Panel[dtype: DType, vectors: Int](TrivialRegisterPassable):
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
        var at = x.unsafe_offset(
            self.first + i * self.inner + v * Int(Self.lanes)
        )
        fetch[Int(Self.lanes)](at.unsafe_offset(ROWS_AHEAD * self.inner))
        return rebind[Self.Values](load[Self.lanes](at, self._count()))

    @inline(.always)
    def store[v: Int](self, y: Target[Self.dtype], i: Int, values: Self.Values):
        """Writes the element `i` of the rows of a vector, and announces one that comes later.
        """
        var at = y.unsafe_offset(
            self.first + i * self.inner + v * Int(Self.lanes)
        )
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
                thresholds[v] = Column[Self.accum, Self.accum](
                    room.unsafe_offset(v * self.n * size), size, size, self.n
                ).threshold(m[v])
            else:
                thresholds[v] = Column[Self.dtype, Self.accum](
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
                self.store[v](
                    y, i, positive(thresholds[v].excess(values - m[v]))
                )

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
                    sum += term(results, self.load[v](dy, start + j))
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
                self.store[v](dx, i, gradient_where(results, given - means[v]))


def columns_on_cpu[
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
                Panel[dtype, PANEL](first, rows.inner, lanes, n).sparsemax[
                    True
                ](y, x, room)
                continue
            for column in range(0, count, lanes):
                var panel = Panel[dtype, 1](
                    first + column, rows.inner, count - column, n
                )
                if is_copied:
                    panel.sparsemax[True](y, x, room)
                else:
                    panel.sparsemax[False](y, x, room)
        _ = memory^

    parallel(work, panels.count(), rows.count() * n, queue)


def gradient_columns_on_cpu[
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
            Panel[dtype, PANEL](first, rows.inner, lanes, n).gradient(dx, y, dy)
            return
        for column in range(0, count, lanes):
            Panel[dtype, 1](
                first + column, rows.inner, count - column, n
            ).gradient(dx, y, dy)

    share_tasks(of_panel, panels.count(), rows.count() * n, queue)
