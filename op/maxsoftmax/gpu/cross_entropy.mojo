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

from ..math.loss import Class, Loss, LossOptions, Reduction, Smoothing, Targets
from ..math.online import Sum, accumulator
from ..queue import Queue
from ..io.rows import Rows, Source, Target
from .hardware.pdl import pdl_wait, pdl_attributes
from .totals import BLOCK_SIZE, MAX_PARTS, Parts, Total
from .hardware.tree_reduction import plus, tree_reduce
from .tuning import Tuned


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def losses_kernel[
    dtype: DType, block_size: Int, team: Int
](
    losses: Target[dtype],
    parts: Target[accumulator[dtype]()],
    pairs: Source[accumulator[dtype]()],
    x: Source[dtype],
    targets: Targets,
    outer: Int64,
    n: Int64,
    inner: Int64,
    ignored: Int64,
    smoothing: Smoothing[accumulator[dtype]()],
    reduction: Int64,
    counted: Target[accumulator[dtype]()],
    is_counted: Int64,
):
    """Writes the loss of each row, or leaves what those of a block come to, or of a single block writes that.

    Parameters:
        dtype: Dtype of the logits.
        block_size: Threads a block: `MAX_PARTS` of a single one.
        team: Threads that share a row: 1, or the whole block where all of a contiguous row is needed.

    Args:
        losses: One a row where there is no reduction; else one, from a single block.
        parts: As of `Total.leave`, from several.
        pairs: (m, d) of each row.
        x: Logits.
        targets: Class of each row.
        outer: First dimension.
        n: Classes.
        inner: Last dimension.
        ignored: The class of rows that do not count.
        smoothing: Share of the target that is spread over all classes.
        reduction: What becomes of the losses.
        counted: Where a single block writes how many rows count, if that is wanted.
        is_counted: Whether it is.
    """
    comptime accum = accumulator[dtype]()
    var rows = Rows(Int(outer), Int(n), Int(inner))
    var thread = Int(thread_idx.x)
    var scratch = unsafe_stack_allocation[
        team,
        Sum[accum, 1],
        address_space=AddressSpace.SHARED,
    ]()
    var total = Total[accum]()
    pdl_wait()
    for row in range(
        (Int(block_idx.x) * block_size + thread) // team,
        rows.count(),
        Int(grid_dim.x) * block_size // team,
    ):
        var start = rows.start(row)
        var loss = Loss(
            pairs[unsafe_offset=2 * row], pairs[unsafe_offset=2 * row + 1]
        )
        var below = Scalar[accum](0)
        if smoothing.share != 0:
            var sum = Sum[accum, 1]()
            for i in range(thread % team, Int(n), team):
                var logit = x[unsafe_offset=start + i * Int(inner)]
                sum.add(loss.m - logit.cast[accum]())
            comptime if team > 1:
                sum = tree_reduce[team, plus[accum]](scratch, thread, sum)
            below = sum.value / Scalar[accum](n)
        if thread % team == 0:
            var target = Class(targets[row], n, ignored)
            var logit = Scalar[accum](0)
            if target.is_class:
                logit = x[
                    unsafe_offset=start + Int(target.index) * Int(inner)
                ].cast[accum]()
            var value = loss.of(target, logit, below, smoothing)
            if Int(reduction) == Reduction.NONE.value:
                losses[unsafe_offset=row] = value.cast[dtype]()
            total.add(value, not target.is_ignored)
    comptime if block_size == MAX_PARTS:
        var all = total.collected[MAX_PARTS]()
        if thread == 0:
            all.write(losses, reduction, counted, is_counted)
    else:
        total.leave[BLOCK_SIZE](parts)


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
    """Enqueues the loss of every row, or what they come to.

    Parameters:
        dtype: Dtype of the logits.

    Args:
        loss: One a row, or one; NaN where the target is no class, 0 where it is ignored.
        pairs: (m, d) of each row; behind them goes how many rows count, if the options say so.
        x: Logits.
        targets: Class of each row.
        rows: Rows along any axis.
        options: What the caller chose.
        queue: Where kernels are launched.
    """
    comptime accum = accumulator[dtype]()
    if rows.count() == 0 and options.reduction == Reduction.NONE:
        return
    var counted = pairs.unsafe_offset(2 * rows.count())

    @inline(.always)
    def launch[
        block_size: Int, team: Int
    ](parts: Target[accum], blocks: Int) raises {imm}:
        queue.launch[losses_kernel[dtype, block_size, team]](
            loss,
            parts,
            pairs,
            x,
            targets,
            Int64(rows.outer),
            Int64(rows.n),
            Int64(rows.inner),
            Int64(options.ignored),
            Smoothing[accum](options.smoothing),
            Int64(options.reduction.value),
            counted,
            Int64(options.is_counted),
            grid_dim=blocks,
            block_dim=block_size,
            attributes=pdl_attributes(),
        )

    var by_block = options.smoothing != 0 and rows.inner == 1
    if rows.count() <= Tuned.few_losses and not by_block:
        launch[MAX_PARTS, 1](counted, 1)
        return
    var parts = Parts[accum](
        rows.count() if by_block else ceildiv(rows.count(), BLOCK_SIZE), queue
    )
    if by_block:
        launch[BLOCK_SIZE, BLOCK_SIZE](parts.pointer(), parts.blocks)
    else:
        launch[BLOCK_SIZE, 1](parts.pointer(), parts.blocks)
    if options.is_counted or not (options.reduction == Reduction.NONE):
        parts.add(loss, options, counted, queue)
