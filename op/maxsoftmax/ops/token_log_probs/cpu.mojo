"""The tokens' logarithms, the entropy and their gradient on a CPU: by the walk that softmax takes."""

from ...cpu.lanes import spread
from ...cpu.memory import load, store
from ...cpu.operations import Operation, Place, Statistics
from ...cpu.shares import share_tasks
from ...cpu.sources import Memory
from ...cpu.targets import ToMemory
from ...cpu.walk import lanes_of, walk
from ...io.rows import Rows, Source, Target
from ...math.exponential import Unit, logarithm
from ...math.online import MaxSum, accumulator
from ...queue import Queue
from ..scaled import Scaled
from .row import Asked, SUMS, Terms, log_prob, of_token, terms_of


@fieldwise_init
struct _Entropy[dtype: DType, rows: SIMDLength](Operation):
    """The entropy of each row, given its pair.

    Parameters:
        dtype: Dtype of the logits.
        rows: How many are side by side.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = Self.rows
    comptime has_max = False
    comptime by_row = True
    comptime State = Bool

    var sums: Target[Self.accum]
    """(m, d, h) of each row, of which h is written."""

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
        return e_x.eq(0).select(type_of(x)(0), e_x * (origin - x))

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
            var d = sums[unsafe_offset=1]
            var distance = total.d.value[lane] / (units[lane] * d)
            sums[unsafe_offset=2] = logarithm(d) + distance


def log_probs_on_cpu[
    dtype: DType, contiguous: Bool
](
    log_probs: Target[accumulator[dtype]()],
    entropy: Optional[Target[accumulator[dtype]()]],
    sums: Target[accumulator[dtype]()],
    x: Source[dtype],
    asked: Asked,
    rows: Rows,
    queue: Queue,
) raises:
    """Writes what `direct.token_log_probs` does."""
    comptime accum = accumulator[dtype]()
    comptime lanes = lanes_of[dtype, contiguous]
    var factor = asked.factor[accum]()
    var source = Scaled(Memory[dtype, contiguous](x, x, rows), factor)
    # Nothing is written there: operations write what there is one of for each row.
    var target = ToMemory[accum, contiguous](sums, rows)
    var pairs = Statistics[dtype, lanes](sums, SUMS, 1, x, rows)
    walk[contiguous](source, pairs, target, rows, queue)
    if entropy:
        walk[contiguous](
            source, _Entropy[dtype, lanes](sums), target, rows, queue
        )

    @inline(.always)
    def write(row: Int) {imm}:
        for i in range(row * asked.each, (row + 1) * asked.each):
            log_probs[unsafe_offset=i] = log_prob(
                x, rows, row, asked.tokens[i], factor, sums
            )
        var h = SUMS * row + 2
        if entropy:
            entropy.value()[unsafe_offset=row] = sums[unsafe_offset=h]
        else:
            # Results are the same at every call, those that nobody asked for, too.
            sums[unsafe_offset=h] = 0

    # A logarithm takes as long as some elements.
    var cost = rows.count() * (asked.each + 1) * 16
    share_tasks(write, rows.count(), cost, queue)


@fieldwise_init
struct _Rows[accum: DType, rows: SIMDLength](TrivialRegisterPassable):
    """What the gradients of neighbouring rows are computed from.

    Parameters:
        accum: The accumulator's dtype.
        rows: How many rows.
    """

    var unit: Unit[Self.accum, Self.rows]
    """What exponentials are counted in."""
    var d: SIMD[Self.accum, Self.rows]
    """Their sum."""
    var terms: Terms[Self.accum, Self.rows]
    """What gradients have in common."""

    @inline(.always)
    def gradient[
        n: SIMDLength, //
    ](self, z: SIMD[Self.accum, n]) -> SIMD[Self.accum, n]:
        """Returns the gradients of logits that are of no token."""
        return self.terms.gradient(self.unit.exp(z) / spread[n](self.d), z)


@fieldwise_init
struct _Gradient[dtype: DType, rows: SIMDLength](Operation):
    """The gradient of logits, as if no token had been asked for, and then of those that were.

    Parameters:
        dtype: Dtype of the logits.
        rows: How many are side by side.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = Self.rows
    comptime reduces = False
    comptime State = _Rows[Self.accum, Self.lanes]

    var dx: Target[Self.dtype]
    var x: Source[Self.dtype]
    var sums: Source[Self.accum]
    var asked: Asked
    var dlog_probs: Source[Self.accum]
    var dentropy: Source[Self.accum]
    var has_entropy: Bool
    var shape: Rows[]

    @inline(.always)
    def state(
        self, total: MaxSum[Self.accum, Self.lanes], place: Place
    ) -> Self.State:
        comptime Values = SIMD[Self.accum, Self.lanes]
        var m = Values(0)
        var d = Values(1)
        var even = Values(0)
        var slope = Values(0)
        for lane in range(min(place.count, Int(Self.lanes))):
            var row = place.row + lane
            d[lane] = self.sums[unsafe_offset=SUMS * row + 1]
            var terms = terms_of(
                self.asked.tokens,
                self.asked.each,
                row,
                self.shape.n,
                self.asked.factor[Self.accum](),
                self.sums,
                self.dlog_probs,
                self.dentropy,
                self.has_entropy,
            )
            m[lane] = terms.m
            even[lane] = terms.even
            slope[lane] = terms.slope
        var unit = Unit(m)
        return {unit, d * unit.exp(m), Terms(m, even, slope)}

    @inline(.always)
    def result[
        n: SIMDLength, //
    ](
        self,
        state: Self.State,
        x: SIMD[Self.accum, n],
        other: SIMD[Self.accum, n],
    ) -> SIMD[Self.accum, n]:
        return state.gradient(x)

    @inline(.always)
    def correct(self, state: Self.State, place: Place):
        var factor = self.asked.factor[Self.accum]()
        var each = self.asked.each
        for lane in range(min(place.count, Int(Self.lanes))):
            var row = place.row + lane
            for i in range(row * each, (row + 1) * each):
                var token = Int(self.asked.tokens[i])
                if token < place.start or token >= place.end:
                    continue
                var at = place.first + lane + token * self.shape.inner
                var logit = load[1](self.x.unsafe_offset(at), 1)[0] * factor
                var all = state.gradient(SIMD[Self.accum, Self.lanes](logit))
                var more = of_token(
                    self.asked.tokens, each, i, factor, self.dlog_probs
                )
                store(
                    self.dx.unsafe_offset(at),
                    SIMD[Self.accum, 1](all[lane] + more),
                    1,
                )


def gradients_on_cpu[
    dtype: DType, contiguous: Bool
](
    dx: Target[dtype],
    x: Source[dtype],
    sums: Source[accumulator[dtype]()],
    asked: Asked,
    dlog_probs: Source[accumulator[dtype]()],
    dentropy: Optional[Source[accumulator[dtype]()]],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes what `direct.token_log_probs_backward` does."""
    comptime accum = accumulator[dtype]()
    walk[contiguous](
        Scaled(Memory[dtype, contiguous](x, x, rows), asked.factor[accum]()),
        _Gradient[dtype, lanes_of[dtype, contiguous]](
            dx,
            x,
            sums,
            asked,
            dlog_probs,
            dentropy.value() if dentropy else dlog_probs,
            Bool(dentropy),
            rows,
        ),
        ToMemory[dtype, contiguous](dx, rows),
        rows,
        queue,
    )
