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
from ..ops.finish import Finish
from .dispatch import auto
from .distances import Distances, MOST, NUMBERS, sum_below
from .hardware.pdl import pdl_wait, pdl_attributes
from .streaming import streaming_pairs
from .totals import BLOCK_SIZE, MAX_PARTS, Parts, Total
from .hardware.tree_reduction import plus, tree_reduce
from .tuning import Tuned

comptime LEAST = 4096
"""Elements of a row from which on a sum for label smoothing is found beside the pair, in one read: of 8192 columns in 0.51 to 0.59 of the time of two,
of 128256 in 0.36 to 0.45, of 1024 in 1.26 to 1.42."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def losses_kernel[
    dtype: DType, out: DType, block_size: Int, team: Int
](
    losses: Target[out],
    parts: Target[accumulator[dtype]()],
    pairs: Target[accumulator[dtype]()],
    sums: Source[accumulator[dtype]()],
    is_summed: Int64,
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
        out: Dtype of the losses.
        block_size: Threads a block: `MAX_PARTS` of a single one.
        team: Threads that share a row: 1, or the whole block where all of a contiguous row is needed.

    Args:
        losses: One a row where there is no reduction; else one, from a single block.
        parts: As of `Total.leave`, from several.
        pairs: (m, d) of each row, written here where there are sums.
        sums: What `Distances` wrote of each row.
        is_summed: Whether it did.
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
        var below = Scalar[accum](0)
        if is_summed != 0:
            var of_row = sums.unsafe_offset(NUMBERS * row)
            pairs[unsafe_offset=2 * row] = of_row[unsafe_offset=0]
            pairs[unsafe_offset=2 * row + 1] = of_row[unsafe_offset=1]
            below = sum_below(of_row, Int(n))
        var loss = Loss(
            pairs[unsafe_offset=2 * row], pairs[unsafe_offset=2 * row + 1]
        )
        if is_summed == 0 and smoothing.share != 0:
            var sum = Sum[accum, 1]()
            for i in range(thread % team, Int(n), team):
                var logit = x[unsafe_offset=start + i * Int(inner)]
                sum.add(loss.m - logit.cast[accum]())
            comptime if team > 1:
                sum = tree_reduce[team, plus[accum]](scratch, thread, sum)
            below = sum.value
        if thread % team == 0:
            var target = Class(targets[row], n, ignored, smoothing.is_shard)
            var logit = Scalar[accum](0)
            if target.index >= 0:
                logit = x[
                    unsafe_offset=start + Int(target.index) * Int(inner)
                ].cast[accum]()
            var value = loss.of(target, logit, below, smoothing)
            if Int(reduction) == Reduction.NONE.value:
                losses[unsafe_offset=row] = value.cast[out]()
            total.add(value, not target.is_ignored)
    comptime if block_size == MAX_PARTS:
        var all = total.collected[MAX_PARTS]()
        if thread == 0:
            all.write(losses, reduction, counted, is_counted)
    else:
        total.leave[BLOCK_SIZE](parts)


def losses[
    dtype: DType, out: DType, //, contiguous: Bool, smoothed: Bool
](
    loss: Target[out],
    pairs: Target[accumulator[dtype]()],
    x: Source[dtype],
    targets: Targets,
    rows: Rows,
    options: LossOptions,
    queue: Queue,
) raises:
    """Enqueues the pair of every row, and the loss, or what they come to.

    Parameters:
        dtype: Dtype of the logits.
        out: Dtype of the losses.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.
        smoothed: Whether options may ask for label smoothing.

    Args:
        loss: One a row, or one; NaN where the target is no class, 0 where it is ignored.
        pairs: Where (m, d) of each row go; behind them how many rows count, if the options say so.
        x: Logits.
        targets: Class of each row.
        rows: Rows along any axis.
        options: What the caller chose.
        queue: Where kernels are launched.
    """
    comptime at_once = smoothed and contiguous and dtype != DType.float64
    if at_once and options.smoothing != 0 and LEAST <= rows.n <= MOST:
        comptime if at_once:
            var sums = queue.scratch[DType.float32](NUMBERS * rows.count())
            streaming_pairs[Distances[dtype]](sums.pointer, x, rows, queue)
            _losses(
                loss,
                pairs,
                sums.pointer.unsafe_bitcast[Scalar[accumulator[dtype]()]](),
                True,
                x,
                targets,
                rows,
                options,
                queue,
            )
            _ = sums^
        return
    if rows.count() != 0:
        auto[dtype, Finish.PAIR, contiguous](
            pairs.unsafe_bitcast[Scalar[dtype]](), x, rows, queue
        )
    losses_of_pairs(loss, pairs, x, targets, rows, options, queue)


def losses_of_pairs[
    dtype: DType, out: DType, //
](
    loss: Target[out],
    pairs: Target[accumulator[dtype]()],
    x: Source[dtype],
    targets: Targets,
    rows: Rows,
    options: LossOptions,
    queue: Queue,
) raises:
    """Enqueues the losses of rows whose pairs are there: arguments are as of `losses`.
    """
    _losses(loss, pairs, pairs, False, x, targets, rows, options, queue)


def _losses[
    dtype: DType, out: DType, //
](
    loss: Target[out],
    pairs: Target[accumulator[dtype]()],
    sums: Source[accumulator[dtype]()],
    is_summed: Bool,
    x: Source[dtype],
    targets: Targets,
    rows: Rows,
    options: LossOptions,
    queue: Queue,
) raises:
    """Enqueues the losses, as of `losses_kernel`, and what they come to."""
    comptime accum = accumulator[dtype]()
    if rows.count() == 0 and options.reduction == Reduction.NONE:
        return
    var counted = pairs.unsafe_offset(2 * rows.count())

    @inline(.always)
    def launch[
        block_size: Int, team: Int
    ](parts: Target[accum], blocks: Int) raises {imm}:
        queue.launch[losses_kernel[dtype, out, block_size, team]](
            loss,
            parts,
            pairs,
            sums,
            Int64(is_summed),
            x,
            targets,
            Int64(rows.outer),
            Int64(rows.n),
            Int64(rows.inner),
            Int64(options.ignored),
            Smoothing[accum](options, rows.n),
            Int64(options.reduction.value),
            counted,
            Int64(options.is_counted),
            grid_dim=blocks,
            block_dim=block_size,
            attributes=pdl_attributes(),
        )

    var by_block = options.smoothing != 0 and rows.inner == 1 and not is_summed
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
