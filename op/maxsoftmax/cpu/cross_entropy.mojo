"""Cross entropy on the CPU, from logits and the pairs of their rows."""

from std.math import ceildiv
from std.sys import simd_width_of

from ..loss import (
    Class,
    Loss,
    LossOptions,
    Reduction,
    Smoothing,
    Targets,
    Upstream,
)
from ..online import Sum, accumulator
from ..queue import Queue
from ..rows import Rows, Source, Target
from .contiguous import READ_AHEAD, VECTORS, WRITE_AHEAD
from .cross_entropy_strided import distances, strided_gradients
from .memory import fetch, fetch_to_write, load, store
from .shares import share_rows, share_tasks


def wrong_target(
    targets: Targets, rows: Rows, ignored: Int
) -> Optional[String]:
    """Returns what is wrong with the first target that is neither a class nor ignored, if there is one.
    """
    for row in range(rows.count()):
        var target = Class.of(targets, row, rows.n, ignored)
        if not (target.is_class or target.is_ignored):
            return String(
                t"target[{row}] is {targets[row]}, which is neither a class"
                t" from 0 to {rows.n - 1} nor ignore_index {ignored}"
            )
    return None


def losses[
    dtype: DType
](
    loss: Target[dtype],
    pairs: Target[accumulator[dtype]()],
    x: Source[dtype],
    targets: Targets,
    rows: Rows,
    options: LossOptions,
    queue: Queue,
) raises:
    """Writes the loss of every row, or what they come to.

    Parameters:
        dtype: Dtype of the logits.

    Args:
        loss: One a row, or one; 0 where the target is ignored.
        pairs: (m, d) of each row; behind them goes how many rows count, if the options say so.
        x: Logits.
        targets: Class of each row.
        rows: Rows along any axis.
        options: What the caller chose.
        queue: The CPU to run on.

    Raises:
        Error: If a target is neither a class nor ignored.
    """
    comptime accum = accumulator[dtype]()
    var wrong = wrong_target(targets, rows, options.ignored)
    if wrong:
        raise Error(wrong.value())
    var smoothing = Smoothing[accum](options.smoothing)
    var memory = List[Scalar[accum]](unsafe_uninit_length=rows.count())
    var losses = memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    if options.smoothing != 0 and rows.inner != 1:
        # They wait where the losses will be.
        distances(losses, pairs, x, rows, queue)

    @inline(.always)
    def write(row: Int) {imm}:
        var logits = x.unsafe_offset(rows.start(row))
        var target = Class.of(targets, row, rows.n, options.ignored)
        var pair = Loss(
            pairs[unsafe_offset=2 * row], pairs[unsafe_offset=2 * row + 1]
        )
        var below = Scalar[accum](0)
        if smoothing.share != 0:
            if rows.inner == 1:
                below = _distance(logits, rows.n, pair.m)
            else:
                below = losses[unsafe_offset=row]
        var logit = Scalar[accum](0)
        if target.is_class:
            logit = logits[unsafe_offset=Int(target.index) * rows.inner].cast[
                accum
            ]()
        losses[unsafe_offset=row] = pair.of(
            target, logit, below / Scalar[accum](rows.n), smoothing
        )

    # Without smoothing a row is a few operations, however long it is.
    var each = rows.n if options.smoothing != 0 else 16
    share_tasks(write, rows.count(), rows.count() * each, queue)
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
            value /= _counted[accum](targets, rows.count(), options.ignored)
        store(loss, SIMD[accum, 1](value), 1)
    if options.is_counted:
        pairs[unsafe_offset=2 * rows.count()] = _counted[accum](
            targets, rows.count(), options.ignored
        )
    _ = memory^


def _distance[
    dtype: DType, //
](x: Source[dtype], n: Int, m: Scalar[accumulator[dtype]()]) -> Scalar[
    accumulator[dtype]()
]:
    """Returns the sum of m - x over the row of `n` that starts at `x`."""
    comptime accum = accumulator[dtype]()
    comptime width = simd_width_of[accum]()
    var sums = Sum[accum, width]()
    var i = 0
    while i + width <= n:
        sums.add(m - load[width](x.unsafe_offset(i), width))
        i += width
    var sum = sums.collapse()
    while i < n:
        sum.add(m - x[unsafe_offset=i].cast[accum]())
        i += 1
    return sum.value


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
    dtype: DType, up: DType
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
    """Writes the gradient of every row's logits.

    Parameters:
        dtype: Dtype of the logits.
        up: Dtype of the gradients of losses.

    Args:
        dx: Gradients; may be the same memory as `x`. NaN where the target is no class, 0 where it is ignored.
        x: Logits.
        pairs: (m, d) of each row.
        targets: Class of each row.
        dloss: Gradient of each row's loss, or of what became of all; nowhere if it is 1.
        rows: Rows along any axis.
        options: What the caller chose.
        queue: The CPU to run on.
    """
    comptime accum = accumulator[dtype]()
    var upstream = Upstream[up, accum](
        dloss, Int(options.reduction == Reduction.NONE), pairs
    )
    var smoothing = Smoothing[accum](options.smoothing)
    var count = Scalar[accum](1)
    if options.reduction == Reduction.MEAN:
        count = _counted[accum](targets, rows.count(), options.ignored)
    if rows.inner != 1:
        strided_gradients(
            dx,
            x,
            pairs,
            targets,
            upstream,
            count,
            smoothing,
            rows,
            options.ignored,
            queue,
        )
        return

    @inline(.always)
    def write(row: Int) {imm}:
        var scale = upstream[row] / count
        var start = rows.start(row)
        var target = Class.of(targets, row, rows.n, options.ignored)
        var loss = Loss(
            pairs[unsafe_offset=2 * row], pairs[unsafe_offset=2 * row + 1]
        )
        var n = Int64(rows.n)
        # As if no class were wanted, and then the one that is: comparing each with it would take longer.
        var wanted = Scalar[accum](0)
        if target.is_class:
            wanted = x[unsafe_offset=start + Int(target.index)].cast[accum]()
        comptime width = VECTORS * simd_width_of[accum]()
        for i in range(0, rows.n, width):
            var at = start + i
            var logits = load[width](x.unsafe_offset(at), rows.n - i)
            fetch[width, READ_AHEAD](x.unsafe_offset(at))
            fetch_to_write[width, WRITE_AHEAD](dx.unsafe_offset(at))
            store(
                dx.unsafe_offset(at),
                loss.gradient(target, scale, logits, False, n, smoothing),
                rows.n - i,
            )
        if target.is_class:
            store(
                dx.unsafe_offset(start + Int(target.index)),
                loss.gradient(target, scale, wanted, True, n, smoothing),
                1,
            )

    share_rows(write, rows, queue)
