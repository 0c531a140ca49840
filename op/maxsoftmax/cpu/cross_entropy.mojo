"""Cross entropy on the CPU, from logits and the pairs of their rows."""

from std.math import ceildiv
from std.sys import simd_width_of
from max.gpu.host import DeviceContext

from ..loss import Class, Loss
from ..online import Sum, accumulator
from ..rows import Rows, Source, Target
from .contiguous import READ_AHEAD, VECTORS, WRITE_AHEAD
from .cross_entropy_strided import distances, strided_gradients
from .memory import fetch, fetch_to_write, load, rounded, store
from .shares import share_rows


def losses[
    dtype: DType, index: DType, smoothing: Float64
](
    losses: Target[accumulator[dtype]()],
    totals: Target[accumulator[dtype]()],
    pairs: Source[accumulator[dtype]()],
    x: Source[dtype],
    targets: Source[index],
    rows: Rows,
    ignored: Int,
    ctx: DeviceContext,
) raises:
    """Writes the loss of every row, and what they come to.

    Parameters:
        dtype: Dtype of the logits.
        index: Dtype of the targets.
        smoothing: Share of the target that is spread over all classes.

    Args:
        losses: One a row; 0 where the target is `ignored`.
        totals: The sum of all, and the mean of those that count.
        pairs: (m, d) of each row.
        x: Logits.
        targets: Class of each row.
        rows: Rows along any axis.
        ignored: The class of rows that do not count.
        ctx: The CPU to run on.

    Raises:
        Error: If a target is neither a class nor `ignored`.
    """
    comptime accum = accumulator[dtype]()
    for row in range(rows.count()):
        var target = Class.of(targets, row, rows.n, ignored)
        if not (target.is_class or target.is_ignored):
            raise Error(
                t"target[{row}] is {targets[unsafe_offset=row]}, which is"
                t" neither a class from 0 to {rows.n - 1} nor ignore_index"
                t" {ignored}"
            )

    comptime if smoothing != 0:
        if rows.inner != 1:
            # They wait where the losses will be.
            distances(losses, pairs, x, rows, ctx)

    @inline(.always)
    def write(row: Int) {imm}:
        var logits = x.unsafe_offset(rows.start(row))
        var target = Class.of(targets, row, rows.n, ignored)
        var loss = Loss(
            pairs[unsafe_offset=2 * row], pairs[unsafe_offset=2 * row + 1]
        )
        var below = Scalar[accum](0)
        comptime if smoothing != 0:
            if rows.inner == 1:
                below = _distance(logits, rows.n, loss.m)
            else:
                below = losses[unsafe_offset=row]
        var logit = Scalar[accum](0)
        if target.is_class:
            logit = logits[unsafe_offset=Int(target.index) * rows.inner].cast[
                accum
            ]()
        losses[unsafe_offset=row] = loss.of[smoothing](
            target, logit, below / Scalar[accum](rows.n)
        )

    share_rows(write, rows, ctx)
    var sum = Sum[accum, 1]()
    for row in range(rows.count()):
        sum.add(losses[unsafe_offset=row])
    totals[unsafe_offset=0] = sum.value
    totals[unsafe_offset=1] = sum.value / _counted[accum](
        targets, rows.count(), ignored
    )


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
    accum: DType, index: DType
](targets: Source[index], rows: Int, ignored: Int) -> Scalar[accum]:
    """Returns how many rows count."""
    var count = 0
    for row in range(rows):
        if Int(targets[unsafe_offset=row]) != ignored:
            count += 1
    return Scalar[accum](count)


def gradients[
    dtype: DType, index: DType, smoothing: Float64, reduction: StaticString
](
    dx: Target[dtype],
    x: Source[dtype],
    pairs: Source[accumulator[dtype]()],
    targets: Source[index],
    dloss: Source[accumulator[dtype]()],
    rows: Rows,
    ignored: Int,
    ctx: DeviceContext,
) raises:
    """Writes the gradient of every row's logits.

    Parameters:
        dtype: Dtype of the logits.
        index: Dtype of the targets.
        smoothing: Share of the target that is spread over all classes.
        reduction: "none", "sum" or "mean": what became of the losses.

    Args:
        dx: Gradients; may be the same memory as `x`. NaN where the target is no class, 0 where it is `ignored`.
        x: Logits.
        pairs: (m, d) of each row.
        targets: Class of each row.
        dloss: Gradient of each row's loss, or of what became of all.
        rows: Rows along any axis.
        ignored: The class of rows that do not count.
        ctx: The CPU to run on.
    """
    comptime accum = accumulator[dtype]()
    comptime step = 1 if reduction == "none" else 0
    var count = Scalar[accum](1)
    comptime if reduction == "mean":
        count = _counted[accum](targets, rows.count(), ignored)
    if rows.inner != 1:
        strided_gradients[dtype, index, smoothing](
            dx, x, pairs, targets, dloss, step, count, rows, ignored, ctx
        )
        return

    @inline(.always)
    def write(row: Int) {imm}:
        var scale = dloss[unsafe_offset=row * step] / count
        var start = rows.start(row)
        var target = Class.of(targets, row, rows.n, ignored)
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
                loss.gradient[smoothing](target, scale, logits, False, n),
                rows.n - i,
            )
        if target.is_class:
            var at = start + Int(target.index)
            dx[unsafe_offset=at] = rounded[dtype](
                loss.gradient[smoothing](target, scale, wanted, True, n)
            )

    share_rows(write, rows, ctx)
