"""Cross entropy on the CPU, from logits and the pairs of their rows."""

from std.utils.numerics import nan

from ..math.exponential import Unit
from ..math.loss import (
    Class,
    Loss,
    LossOptions,
    Reduction,
    Smoothing,
    Targets,
    Upstream,
)
from ..math.online import MaxSum, Sum, accumulator
from ..queue import Queue
from ..io.rows import Rows, Source, Target
from .lanes import spread
from .memory import load, store
from .operations import Operation, Place
from .shares import share_tasks
from .sources import Memory
from .targets import ToMemory
from .walk import lanes_of, walk


def wrong_target(targets: Targets, rows: Rows, ignored: Int) -> Optional[Int]:
    """Returns the first row whose target is neither a class nor ignored, if there is one.
    """
    for row in range(rows.count()):
        var target = Class.of(targets, row, rows.n, ignored, False)
        if not (target.is_class or target.is_ignored):
            return row
    return None


def losses[
    dtype: DType, out: DType
](
    loss: Target[out],
    pairs: Target[accumulator[dtype]()],
    x: Source[dtype],
    targets: Targets,
    rows: Rows,
    options: LossOptions,
    queue: Queue,
) raises:
    """Writes the loss of every row, or what they come to, given the pairs of rows; NaN where the target is wrong.
    """
    comptime accum = accumulator[dtype]()
    var smoothing = Smoothing[accum](options, rows.n)
    var memory = List[Scalar[accum]](length=rows.count(), fill=0)
    var losses = memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    if options.smoothing != 0 and not rows.is_empty():
        # They wait where the losses will be.
        comptime for contiguous in [True, False]:
            if contiguous == (rows.inner == 1):
                walk[contiguous](
                    Memory[dtype, contiguous](x, x, rows),
                    _Distances[accum, lanes_of[dtype, contiguous]](
                        losses, pairs
                    ),
                    ToMemory[accum, contiguous](losses, rows),
                    rows,
                    queue,
                )

    @inline(.always)
    def write(row: Int) {imm}:
        var logits = x.unsafe_offset(rows.start(row))
        var target = Class.of(
            targets, row, rows.n, options.ignored, smoothing.is_shard
        )
        var pair = Loss(
            pairs[unsafe_offset=2 * row], pairs[unsafe_offset=2 * row + 1]
        )
        var below = losses[unsafe_offset=row]
        var logit = Scalar[accum](0)
        if target.index >= 0:
            logit = logits[unsafe_offset=Int(target.index) * rows.inner].cast[
                accum
            ]()
        losses[unsafe_offset=row] = pair.of(target, logit, below, smoothing)

    # A row is a few operations, however long it is.
    share_tasks(write, rows.count(), rows.count() * 16, queue)
    var count = Scalar[accum](0)
    if options.reduction == Reduction.MEAN or options.is_counted:
        count = _counted[accum](targets, rows.count(), options.ignored)
    if options.reduction == Reduction.NONE:
        for row in range(rows.count()):
            store(
                loss.unsafe_offset(row),
                SIMD[accum, 1](losses[unsafe_offset=row]),
                1,
            )
    else:
        var sum = Sum[accum, 1]()
        for row in range(rows.count()):
            sum.add(losses[unsafe_offset=row])
        var value = sum.value
        if options.reduction == Reduction.MEAN:
            value /= count
        store(loss, SIMD[accum, 1](value), 1)
    if options.is_counted:
        pairs[unsafe_offset=2 * rows.count()] = count
    _ = memory^


def _counted[
    accum: DType
](targets: Targets, rows: Int, ignored: Int) -> Scalar[accum]:
    """Returns how many rows count."""
    var count = 0
    for row in range(rows):
        if Int(targets[row]) != ignored:
            count += 1
    return Scalar[accum](count)


def gradients[
    dtype: DType, up: DType, contiguous: Bool
](
    dx: Target[dtype],
    x: Source[dtype],
    pairs: Source[accumulator[dtype]()],
    targets: Targets,
    dloss: Optional[Source[up]],
    rows: Rows,
    options: LossOptions,
    queue: Queue,
) raises:
    """Writes the gradient of every row's logits; NaN where the target is wrong, 0 where it is ignored.
    """
    comptime accum = accumulator[dtype]()
    var count = Scalar[accum](1)
    if options.reduction == Reduction.MEAN:
        if options.is_counted:
            count = pairs[unsafe_offset=2 * rows.count()]
        else:
            count = _counted[accum](targets, rows.count(), options.ignored)
    var smoothing = Smoothing[accum](options, rows.n)
    walk[contiguous](
        Memory[dtype, contiguous](x, x, rows),
        _LossGradient[dtype, up, lanes_of[dtype, contiguous]](
            dx,
            x,
            pairs,
            targets,
            Upstream[up, accum](
                dloss, Int(options.reduction == Reduction.NONE), pairs
            ),
            count,
            smoothing.share / Scalar[accum](smoothing.classes),
            smoothing.rest,
            rows,
            options.ignored,
            smoothing.is_shard,
        ),
        ToMemory[dtype, contiguous](dx, rows),
        rows,
        queue,
    )


@fieldwise_init
struct _Distances[dtype: DType, rows: SIMDLength](Operation):
    """The sum of m - x over each row.

    Parameters:
        dtype: The accumulator's dtype.
        rows: How many are side by side.
    """

    comptime accum = Self.dtype
    comptime lanes = Self.rows
    comptime has_max = False
    comptime by_row = True
    comptime State = Bool

    var sums: Target[Self.accum]
    """Where that of row 0 goes."""
    var pairs: Source[Self.accum]
    """The (m, d) of each row."""

    @inline(.always)
    def origin(self, place: Place) -> SIMD[Self.accum, Self.lanes]:
        var m = SIMD[Self.accum, Self.lanes](0)
        for lane in range(min(place.count, Int(Self.lanes))):
            m[lane] = self.pairs[unsafe_offset=2 * (place.row + lane)]
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
        return origin - x

    @inline(.always)
    def state(
        self, total: MaxSum[Self.accum, Self.lanes], place: Place
    ) -> Self.State:
        return True

    @inline(.always)
    def finish(self, total: MaxSum[Self.accum, Self.lanes], place: Place):
        for lane in range(min(place.count, Int(Self.lanes))):
            self.sums[unsafe_offset=place.row + lane] = total.d.value[lane]


@fieldwise_init
struct _LossState[accum: DType, rows: SIMDLength](TrivialRegisterPassable):
    """What the gradients of neighbouring rows are computed from.

    Parameters:
        accum: The accumulator's dtype.
        rows: How many rows.
    """

    var unit: Unit[Self.accum, Self.rows]
    """What exponentials are counted in."""
    var d: SIMD[Self.accum, Self.rows]
    """Their sum."""
    var scale: SIMD[Self.accum, Self.rows]
    """Gradients of the losses; NaN where the target is no class."""
    var counts: SIMD[DType.bool, Self.rows]
    """Whether a row has a gradient at all, whatever is in it."""
    var targets: SIMD[Self.accum, Self.rows]
    """The logits of the targets, which may be overwritten before their gradients are written."""

    @inline(.always)
    def gradient[
        n: SIMDLength, //
    ](self, x: SIMD[Self.accum, n], wanted: Scalar[Self.accum]) -> SIMD[
        Self.accum, n
    ]:
        """Returns the gradients of logits, of each of which `wanted` is the target's share.
        """
        comptime if Self.rows == 1:
            if not self.counts[0]:
                return 0
        var p = self.unit.exp(x) / spread[n](self.d)
        var result = (p - wanted) * spread[n](self.scale)
        comptime if Self.rows == 1:
            return result
        return spread[n](self.counts).select(result, type_of(x)(0))


@fieldwise_init
struct _LossGradient[dtype: DType, up: DType, rows: SIMDLength](Operation):
    """The gradient of the logits of losses: as if no class were wanted, and then of the one that is. Comparing each with it
    would take longer.

    Parameters:
        dtype: Dtype of the logits.
        up: Dtype of the gradients of losses that a caller handed over.
        rows: How many are side by side.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = Self.rows
    comptime reduces = False
    comptime State = _LossState[Self.accum, Self.lanes]

    var dx: Target[Self.dtype]
    var x: Source[Self.dtype]
    var pairs: Source[Self.accum]
    var targets: Targets
    var upstream: Upstream[Self.up, Self.accum]
    var counted: Scalar[Self.accum]
    """What gradients of losses are divided by."""
    var even: Scalar[Self.accum]
    """The share of the target that each class has."""
    var rest: Scalar[Self.accum]
    """What the target has beside."""
    var shape: Rows[]
    var ignored: Int
    var is_shard: Bool
    """Whether a target may be a class of another shard."""

    @inline(.always)
    def _target(self, lane: Int, place: Place) -> Tuple[Class, Optional[Int]]:
        """Returns the target of a row, and where its logit is, if that is at the place.
        """
        var row = place.row + lane
        var target = Class.of(
            self.targets, row, self.shape.n, self.ignored, self.is_shard
        )
        var i = Int(target.index)
        if i < 0 or i < place.start or i >= place.end:
            return target, None
        return target, Optional(place.first + lane + i * self.shape.inner)

    @inline(.always)
    def state(
        self, total: MaxSum[Self.accum, Self.lanes], place: Place
    ) -> Self.State:
        comptime Values = SIMD[Self.accum, Self.lanes]
        var m = Values(0)
        var d = Values(1)
        var scale = Values(nan[Self.accum]())
        var logits = Values(0)
        var counts = SIMD[DType.bool, Self.lanes](fill=False)
        for lane in range(min(place.count, Int(Self.lanes))):
            var row = place.row + lane
            var target, at = self._target(lane, place)
            m[lane] = self.pairs[unsafe_offset=2 * row]
            d[lane] = self.pairs[unsafe_offset=2 * row + 1]
            counts[lane] = not target.is_ignored
            if target.is_class:
                scale[lane] = self.upstream[row] / self.counted
            if at:
                logits[lane] = load[1](self.x.unsafe_offset(at.value()), 1)[0]
        var unit = Unit(m)
        return {unit, d * unit.exp(m), scale, counts, logits}

    @inline(.always)
    def result[
        n: SIMDLength, //
    ](
        self,
        state: Self.State,
        x: SIMD[Self.accum, n],
        other: SIMD[Self.accum, n],
    ) -> SIMD[Self.accum, n]:
        return state.gradient(x, self.even)

    @inline(.always)
    def correct(self, state: Self.State, place: Place):
        var values = state.gradient(state.targets, self.even + self.rest)
        for lane in range(min(place.count, Int(Self.lanes))):
            var _, at = self._target(lane, place)
            if at:
                store(
                    self.dx.unsafe_offset(at.value()),
                    SIMD[Self.accum, 1](values[lane]),
                    1,
                )
