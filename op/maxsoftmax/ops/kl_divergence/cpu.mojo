"""The divergence and its gradient on a CPU: by the walk that softmax takes."""

from std.sys import size_of

from ...cpu.lanes import spread
from ...cpu.operations import Operation, Place, Statistics
from ...cpu.shares import workers_for
from ...cpu.sources import Memory
from ...cpu.targets import ToMemory
from ...cpu.walk import lanes_of, walk
from ...io.rows import Rows, Source, Target
from ...math.exponential import Unit
from ...math.online import MaxSum, accumulator
from ...queue import Queue
from ..scaled import Scaled
from .row import SUMS, Terms, divergence

comptime CACHED = 1 << 20
"""Bytes of both tensors for each thread that are read again while a cache has them."""


@fieldwise_init
struct _Divergence[dtype: DType, rows: SIMDLength](Operation):
    """The divergence of each row, given both pairs.

    Parameters:
        dtype: Dtype of the logits.
        rows: How many are side by side.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = Self.rows
    comptime has_max = False
    comptime by_row = True
    comptime State = Bool

    var kl: Target[Self.accum]
    var sums: Target[Self.accum]

    @inline(.always)
    def origin(self, place: Place) -> SIMD[Self.accum, Self.lanes]:
        var m = SIMD[Self.accum, Self.lanes](0)
        for lane in range(min(place.count, Int(Self.lanes))):
            m[lane] = self.sums[unsafe_offset=SUMS * (place.row + lane)]
        return m

    @inline(.always)
    def term[
        n: SIMDLength, //
    ](
        self,
        x: SIMD[Self.accum, n],
        other: SIMD[Self.accum, n],
        origin: SIMD[Self.accum, n],
    ) -> SIMD[Self.accum, n]:
        var e_x = Unit(origin).exp(x)
        # Nothing times infinity is not wanted here.
        return e_x.eq(0).select(type_of(x)(0), e_x * (x - other))

    @inline(.always)
    def state(
        self, total: MaxSum[Self.accum, Self.lanes], place: Place
    ) -> Self.State:
        return True

    @inline(.always)
    def finish(self, total: MaxSum[Self.accum, Self.lanes], place: Place):
        var units = Unit(total.m).exp(total.m)
        for lane in range(min(place.count, Int(Self.lanes))):
            var sums = self.sums.unsafe_offset(SUMS * (place.row + lane))
            var mean = total.d.value[lane] / (
                units[lane] * sums[unsafe_offset=1]
            )
            var kl = divergence(sums, mean)
            sums[unsafe_offset=4] = kl
            self.kl[unsafe_offset=place.row + lane] = kl


def divergences_on_cpu[
    dtype: DType, contiguous: Bool
](
    kl: Target[accumulator[dtype]()],
    sums: Target[accumulator[dtype]()],
    p: Source[dtype],
    q: Source[dtype],
    factor: Scalar[accumulator[dtype]()],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes what `direct.kl_divergence` does."""
    comptime accum = accumulator[dtype]()
    comptime lanes = lanes_of[dtype, contiguous]
    var size = rows.n * rows.inner
    var workers = workers_for(2 * rows.outer * size, queue)
    var bytes = max(1, 2 * size * size_of[dtype]())
    var step = max(1, CACHED * max(1, workers) // bytes)
    for first in range(0, rows.outer, step):
        var some = Rows(min(step, rows.outer - first), rows.n, rows.inner)
        var of_some = sums.unsafe_offset(SUMS * first * rows.inner)
        # Nothing is written there: operations write what there is one of for each row.
        var nowhere = ToMemory[accum, contiguous](of_some, some)
        for second in range(2):
            var x = (q if second == 1 else p).unsafe_offset(first * size)
            walk[contiguous](
                Scaled(Memory[dtype, contiguous](x, x, some), factor),
                Statistics[dtype, lanes](
                    of_some.unsafe_offset(2 * second), SUMS, 1, x, some
                ),
                nowhere,
                some,
                queue,
            )
        var both = Memory[dtype, contiguous, True](
            p.unsafe_offset(first * size), q.unsafe_offset(first * size), some
        )
        walk[contiguous](
            Scaled(both, factor),
            _Divergence[dtype, lanes](
                kl.unsafe_offset(first * rows.inner), of_some
            ),
            nowhere,
            some,
            queue,
        )


@fieldwise_init
struct _Rows[accum: DType, rows: SIMDLength](TrivialRegisterPassable):
    """What the gradients of neighbouring rows are computed from.

    Parameters:
        accum: The accumulator's dtype.
        rows: How many rows.
    """

    var p: Unit[Self.accum, Self.rows]
    """What exponentials of p are counted in."""
    var q: Unit[Self.accum, Self.rows]
    """The same of q."""
    var d_p: SIMD[Self.accum, Self.rows]
    """The sum of p's."""
    var d_q: SIMD[Self.accum, Self.rows]
    """The sum of q's."""
    var terms: Terms[Self.accum, Self.rows]
    """What gradients have in common."""


@fieldwise_init
struct _Gradient[dtype: DType, rows: SIMDLength, of_p: Bool](Operation):
    """The gradient of the logits of p, or of q.

    Parameters:
        dtype: Dtype of the logits.
        rows: How many are side by side.
        of_p: Whether of p.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = Self.rows
    comptime reduces = False
    comptime State = _Rows[Self.accum, Self.lanes]

    var sums: Source[Self.accum]
    var dkl: Source[Self.accum]
    var has_dkl: Bool
    var factor: Scalar[Self.accum]

    @inline(.always)
    def state(
        self, total: MaxSum[Self.accum, Self.lanes], place: Place
    ) -> Self.State:
        comptime Values = SIMD[Self.accum, Self.lanes]
        var m_p = Values(0)
        var m_q = Values(0)
        var d_p = Values(1)
        var d_q = Values(1)
        var terms = Terms(Values(0), Values(0))
        for lane in range(min(place.count, Int(Self.lanes))):
            var row = place.row + lane
            var of_row = self.sums.unsafe_offset(SUMS * row)
            m_p[lane] = of_row[unsafe_offset=0]
            d_p[lane] = of_row[unsafe_offset=1]
            m_q[lane] = of_row[unsafe_offset=2]
            d_q[lane] = of_row[unsafe_offset=3]
            var one = Terms[Self.accum].of(
                self.sums, self.dkl, self.has_dkl, row, self.factor
            )
            terms.scale[lane] = one.scale
            terms.shift[lane] = one.shift
        var p = Unit(m_p)
        var q = Unit(m_q)
        return {p, q, d_p * p.exp(m_p), d_q * q.exp(m_q), terms}

    @inline(.always)
    def result[
        n: SIMDLength, //
    ](
        self,
        state: Self.State,
        x: SIMD[Self.accum, n],
        other: SIMD[Self.accum, n],
    ) -> SIMD[Self.accum, n]:
        var p = state.p.exp(x) / spread[n](state.d_p)
        comptime if Self.of_p:
            return state.terms.gradient[True](p, p, x - other)
        else:
            var q = state.q.exp(other) / spread[n](state.d_q)
            return state.terms.gradient[False](p, q, p)


def gradients_on_cpu[
    dtype: DType, contiguous: Bool
](
    dx: Target[dtype],
    p: Source[dtype],
    q: Source[dtype],
    sums: Source[accumulator[dtype]()],
    dkl: Optional[Source[accumulator[dtype]()]],
    of_p: Bool,
    factor: Scalar[accumulator[dtype]()],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes what `direct.kl_divergence_backward` does."""
    comptime lanes = lanes_of[dtype, contiguous]
    var source = Scaled(Memory[dtype, contiguous, True](p, q, rows), factor)
    var target = ToMemory[dtype, contiguous](dx, rows)
    comptime for of_first in [False, True]:
        if of_p == of_first:
            walk[contiguous](
                source,
                _Gradient[dtype, lanes, of_first](
                    sums, dkl.value() if dkl else sums, Bool(dkl), factor
                ),
                target,
                rows,
                queue,
            )
