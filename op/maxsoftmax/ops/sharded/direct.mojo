"""What a device computes of its shard, and of what all devices sent, on memory."""

from std.math import ceildiv

from ...gpu.hardware.pdl import pdl_attributes
from ...gpu.totals import MAX_PARTS, Parts
from ...io.rounding import rounded
from ...io.rows import Rows, Source, Target
from ...math.loss import LossOptions, Reduction, Targets, log_of_sum
from ...math.online import Sum, accumulator
from ...queue import Queue
from .cpu import second_on_cpu, sums_on_cpu
from .gpu import (
    BLOCK_SIZE,
    FEW,
    losses_kernel,
    pairs_kernel,
    row_blocks,
    second_on_gpu,
    sums_on_gpu,
    targets_kernel,
)
from .rows import Message, own_target, whole_pair


def own_targets[
    target: StaticString
](
    own: Target[DType.int64],
    header: Target[DType.int64],
    targets: Targets,
    rows: Rows,
    start: Int,
    classes: Int,
    ignored: Int,
    chosen: Int,
    queue: Queue,
) raises:
    """Writes targets as the kernels of a shard take them, and the header of the message that its device sends.

    Parameters:
        target: "cpu" or "gpu".

    Args:
        own: (rows,), counted from the shard's first class: -1 of rows that do not count, -2 of what is no class, and the shard's
            length of classes of other shards.
        header: As of `Message`.
        targets: (rows,), counted over all shards.
        rows: The shard's.
        start: The first class of the shard.
        classes: How many there are in all shards.
        ignored: The target of rows that do not count.
        chosen: Any number that all devices have to have in common.
        queue: Where to compute.
    """
    comptime if target == "gpu":
        queue.launch[targets_kernel](
            own,
            header,
            targets,
            Int64(rows.count()),
            Int64(rows.n),
            Int64(start),
            Int64(classes),
            Int64(ignored),
            Int64(chosen),
            grid_dim=row_blocks(rows),
            block_dim=BLOCK_SIZE,
            attributes=pdl_attributes(),
        )
    else:
        header[unsafe_offset=0] = Int64(rows.n)
        header[unsafe_offset=1] = Int64(start)
        header[unsafe_offset=2] = Int64(classes)
        header[unsafe_offset=3] = Int64(chosen)
        for row in range(rows.count()):
            own[unsafe_offset=row] = own_target(
                targets[row], start, rows.n, classes, ignored
            )


def losses_of_rows[
    dtype: DType, //, target: StaticString
](
    losses: Target[dtype],
    pairs: Target[accumulator[dtype]()],
    gathered: Source[accumulator[dtype]()],
    devices: Int,
    step: Int,
    targets: Targets,
    rows: Rows,
    options: LossOptions,
    queue: Queue,
) raises:
    """Writes the losses of whole rows, or what they come to, and what their gradient needs.

    Parameters:
        dtype: Dtype of the logits.
        target: "cpu" or "gpu".

    Args:
        losses: One a row where there is no reduction, else one.
        pairs: (rows, 2), and behind them how many rows count.
        gathered: What devices sent: as of `Message`.
        devices: How many.
        step: Numbers from one device's message to the next.
        targets: (rows,), counted over all shards.
        rows: The shard's.
        options: What the caller chooses.
        queue: Where to compute.
    """
    comptime accum = accumulator[dtype]()
    comptime if target == "gpu":

        @inline(.always)
        def launch[
            block_size: Int
        ](parts: Target[accum], blocks: Int) raises {imm}:
            queue.launch[losses_kernel[dtype, block_size]](
                losses,
                parts,
                pairs,
                gathered,
                Int64(devices),
                Int64(step),
                targets,
                Int64(rows.count()),
                Int64(options.ignored),
                options.smoothing,
                Int64(options.reduction.value),
                grid_dim=blocks,
                block_dim=block_size,
                attributes=pdl_attributes(),
            )

        if rows.count() <= FEW:
            launch[MAX_PARTS](pairs, 1)
            return
        var parts = Parts[accum](ceildiv(rows.count(), BLOCK_SIZE), queue)
        launch[BLOCK_SIZE](parts.pointer(), parts.blocks)
        parts.add(losses, options, pairs.unsafe_offset(2 * rows.count()), queue)
    else:
        var message = Message[accum](gathered, devices, step, rows.count())
        var sum = Sum[accum, 1]()
        var count = Scalar[accum](0)
        for row in range(rows.count()):
            var m, d = whole_pair(message.pair(row), devices, step)
            pairs[unsafe_offset=2 * row] = m
            pairs[unsafe_offset=2 * row + 1] = d
            var loss = message.loss(row, targets[row], options, m, d)
            if options.reduction == Reduction.NONE:
                losses[unsafe_offset=row] = rounded[dtype](loss)
            sum.add(loss)
            if Int(targets[row]) != options.ignored:
                count += 1
        if options.reduction == Reduction.SUM:
            losses[] = rounded[dtype](sum.value)
        elif options.reduction == Reduction.MEAN:
            losses[] = rounded[dtype](sum.value / count)
        pairs[unsafe_offset=2 * rows.count()] = count


def pairs_of_rows[
    dtype: DType, //, target: StaticString
](
    sums: Target[dtype],
    pairs: Target[accumulator[dtype]()],
    gathered: Source[accumulator[dtype]()],
    devices: Int,
    rows: Rows,
    queue: Queue,
) raises:
    """Writes the pairs of whole rows, and ln Σ exp of each.

    Parameters:
        dtype: Dtype of the logits.
        target: "cpu" or "gpu".

    Args:
        sums: (rows,).
        pairs: (rows, 2).
        gathered: (devices, rows, 2), the pairs of all shards.
        devices: How many.
        rows: The shard's.
        queue: Where to compute.
    """
    comptime if target == "gpu":
        queue.launch[pairs_kernel[dtype]](
            sums,
            pairs,
            gathered,
            Int64(devices),
            Int64(rows.count()),
            grid_dim=row_blocks(rows),
            block_dim=BLOCK_SIZE,
            attributes=pdl_attributes(),
        )
    else:
        for row in range(rows.count()):
            var m, d = whole_pair(
                gathered.unsafe_offset(2 * row), devices, 2 * rows.count()
            )
            pairs[unsafe_offset=2 * row] = m
            pairs[unsafe_offset=2 * row + 1] = d
            sums[unsafe_offset=row] = rounded[dtype](log_of_sum(m, d))


def second_pass[
    dtype: DType, //, target: StaticString, what: Int, contiguous: Bool
](
    result: Target[dtype],
    x: Source[dtype],
    other: Source[dtype],
    numbers: Source[accumulator[dtype]()],
    devices: Int,
    rows: Rows,
    queue: Queue,
) raises:
    """Writes what each element of a shard turns into, given what all devices sent.

    Parameters:
        dtype: Dtype of the tensors.
        target: "cpu" or "gpu".
        what: One of `Second`.
        contiguous: Whether `rows.inner` is 1.

    Args:
        result: Of the shard.
        x: Its logits, or what they became.
        other: The gradients of that, if the gradient of logits is wanted; else any memory.
        numbers: (devices, rows, 2), the pairs of all shards, or for gradients (devices, rows), what `sums_of_shard` wrote of each.
        devices: How many.
        rows: The shard's.
        queue: Where to compute.
    """
    if rows.is_empty():
        return
    comptime if target == "gpu":
        second_on_gpu[dtype, what, contiguous](
            result, x, other, numbers, devices, rows, queue
        )
    else:
        second_on_cpu[dtype, what, contiguous](
            result, x, other, numbers, devices, rows, queue
        )


def sums_of_shard[
    dtype: DType, //, target: StaticString, log: Bool, contiguous: Bool
](
    sums: Target[accumulator[dtype]()],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes Σ y·dy of each row of a shard, or of logarithms Σ dy.

    Parameters:
        dtype: Dtype of the tensors.
        target: "cpu" or "gpu".
        log: Whether results are logarithms of probabilities.
        contiguous: Whether `rows.inner` is 1.

    Args:
        sums: (rows,).
        y: Results.
        dy: Their gradients.
        rows: The shard's.
        queue: Where to compute.
    """
    if rows.count() == 0:
        return
    comptime if target == "gpu":
        sums_on_gpu[dtype, log, contiguous](sums, y, dy, rows, queue)
    else:
        sums_on_cpu[dtype, log, contiguous](sums, y, dy, rows, queue)
