"""The losses of cross entropy from logits and the pairs of their rows, and what they come to."""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import DeviceContext

from ..loss import Class, Loss
from ..online import Sum, accumulator
from ..rows import Rows, Source, Target
from .overlap import follow, overlapped
from .totals import BLOCK_SIZE, Parts, Total, totals_kernel
from .tree_reduction import plus, tree_reduce


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def losses_kernel[
    dtype: DType, index: DType, smoothing: Float64, team: Int
](
    losses: Target[accumulator[dtype]()],
    parts: Target[accumulator[dtype]()],
    pairs: Source[accumulator[dtype]()],
    x: Source[dtype],
    targets: Source[index],
    outer: Int64,
    n: Int64,
    inner: Int64,
    ignored: Int64,
):
    """Writes the loss of each row, and leaves what those of a block come to.

    Parameters:
        dtype: Dtype of the logits.
        index: Dtype of the targets.
        smoothing: Share of the target that is spread over all classes.
        team: Threads that share a row: 1, or the whole block where all of a contiguous row is needed.

    Args:
        losses: One a row.
        parts: As of `Total.leave`.
        pairs: (m, d) of each row.
        x: Logits.
        targets: Class of each row.
        outer: First dimension.
        n: Classes.
        inner: Last dimension.
        ignored: The class of rows that do not count.
    """
    comptime accum = accumulator[dtype]()
    comptime smooth = smoothing != 0
    var rows = Rows(Int(outer), Int(n), Int(inner))
    var thread = Int(thread_idx.x)
    var scratch = unsafe_stack_allocation[
        team,
        Sum[accum, 1],
        address_space=AddressSpace.SHARED,
    ]()
    var total = Total[accum]()
    follow()
    for row in range(
        (Int(block_idx.x) * BLOCK_SIZE + thread) // team,
        rows.count(),
        Int(grid_dim.x) * BLOCK_SIZE // team,
    ):
        var start = rows.start(row)
        var loss = Loss(
            pairs[unsafe_offset=2 * row], pairs[unsafe_offset=2 * row + 1]
        )
        var below = Scalar[accum](0)
        comptime if smooth:
            var sum = Sum[accum, 1]()
            for i in range(thread % team, Int(n), team):
                var logit = x[unsafe_offset=start + i * Int(inner)]
                sum.add(loss.m - logit.cast[accum]())
            comptime if team > 1:
                sum = tree_reduce[team, plus[accum]](scratch, thread, sum)
            below = sum.value / Scalar[accum](n)
        if thread % team == 0:
            var target = Class(
                targets[unsafe_offset=row].cast[DType.int64](), n, ignored
            )
            var logit = Scalar[accum](0)
            if target.is_class:
                logit = x[
                    unsafe_offset=start + Int(target.index) * Int(inner)
                ].cast[accum]()
            var value = loss.of[smoothing](target, logit, below)
            losses[unsafe_offset=row] = value
            total.add(value, not target.is_ignored)
    total.leave[BLOCK_SIZE](parts)


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
    """Enqueues the loss of every row, and what they come to.

    Parameters:
        dtype: Dtype of the logits.
        index: Dtype of the targets.
        smoothing: Share of the target that is spread over all classes.

    Args:
        losses: One a row; NaN where the target is no class, 0 where it is `ignored`.
        totals: The sum of all, and the mean of those that count.
        pairs: (m, d) of each row.
        x: Logits.
        targets: Class of each row.
        rows: Rows along any axis.
        ignored: The class of rows that do not count.
        ctx: The GPU and its stream.
    """
    comptime accum = accumulator[dtype]()

    @inline(.always)
    def launch[team: Int]() raises {imm}:
        var parts = Parts[accum](ceildiv(rows.count(), BLOCK_SIZE // team), ctx)
        ctx.enqueue_function[losses_kernel[dtype, index, smoothing, team]](
            losses,
            parts.pointer(),
            pairs,
            x,
            targets,
            Int64(rows.outer),
            Int64(rows.n),
            Int64(rows.inner),
            Int64(ignored),
            grid_dim=parts.blocks,
            block_dim=BLOCK_SIZE,
            attributes=overlapped(),
        )
        parts.add[True](totals, losses, ctx)

    comptime if smoothing != 0:
        if rows.inner == 1:
            launch[BLOCK_SIZE]()
            return
    launch[1]()
