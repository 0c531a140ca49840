"""The library of losses of rows that are split over devices. Option 10 says which step of one a call is."""

import maxsoftmax.direct as direct
import maxsoftmax.ops.sharded as sharded
from maxsoftmax.math.online import accumulator
from maxsoftmax.queue import Queue
from here import Here
from maxsoftmax_native.border import (
    Call,
    count,
    DTYPE,
    loss_options,
    Op,
    open,
    OPTIONS,
    Pointers,
    run,
    TARGET,
    targets_of,
    Text,
)

comptime WHAT = OPTIONS + 5
"""Where the option is that says what is computed: one of these."""

comptime TARGETS = 0
"""Targets of the shard, and the header of its message; of the targets of whole rows."""

comptime TERMS = 1
"""Terms of losses, and pairs; of logits and the shard's targets."""

comptime LOSSES = 2
"""Losses, and pairs of whole rows; of all messages, and the targets of whole rows."""

comptime GRADIENT = 3
"""The gradient of logits; of these, pairs of whole rows, the shard's targets, and the gradient of losses."""


struct ShardLoss(Op):
    """A step of the cross entropy of rows that are split, or of its gradient.
    """

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        comptime accum = accumulator[DTYPE]()
        var rows = call.rows()
        var what = call[WHAT]
        var options = loss_options(call)
        if what == TARGETS:
            sharded.own_targets[TARGET](
                pointers.target[DType.int64](0),
                pointers.target[DType.int64](1),
                targets_of(call, pointers, 2),
                rows,
                call[WHAT + 2],
                call[WHAT + 1],
                options.ignored,
                call[WHAT + 3],
                queue,
            )
            return
        if what == LOSSES:
            sharded.losses_of_rows[TARGET](
                pointers.target[DTYPE](0),
                pointers.target[accum](1),
                pointers.source[accum](2),
                call[WHAT + 2],
                call[WHAT + 3],
                targets_of(call, pointers, 3),
                rows,
                options,
                queue,
            )
            return
        options.classes = max(call[WHAT + 1], 1)

        @inline(.always)
        def compute[contiguous: Bool]() raises {imm}:
            if what == TERMS:
                direct.cross_entropy[Here, contiguous](
                    pointers.target[accum](0),
                    pointers.target[accum](1),
                    pointers.source[DTYPE](2),
                    targets_of(call, pointers, 3),
                    rows,
                    options,
                    queue,
                )
            else:
                direct.cross_entropy_backward[Here, contiguous](
                    pointers.target[DTYPE](0),
                    pointers.source[DTYPE](1),
                    pointers.source[accum](2),
                    targets_of(call, pointers, 3),
                    pointers.source_if_any[DTYPE](4),
                    rows,
                    options,
                    queue,
                )

        if rows.inner == 1:
            compute[True]()
        else:
            compute[False]()


@export("maxsoftmax_open")
def open_device(device: Int, error: Int) abi("C") -> Int:
    """Opens a device; see the package."""
    return open(device, error)


@export("maxsoftmax_scratch")
def scratch_bytes(call: Int) abi("C") -> Int:
    """Counts scratch memory; see the package."""
    return count[ShardLoss](call)


@export("maxsoftmax_run")
def run_op(
    call: Int,
    stream: Int,
    first: Int,
    second: Int,
    third: Int,
    fourth: Int,
    fifth: Int,
    scratch: Int,
) abi("C") -> Text:
    """Computes what the call says, with pointers in the order in which it says so: results first.
    """
    return run[ShardLoss](
        call, stream, scratch, Pointers(first, second, third, fourth, fifth)
    )
