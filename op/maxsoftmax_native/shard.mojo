"""The library of softmax and its relatives of rows that are split over devices. Option 5 says which step of one a call is."""

import maxsoftmax.ops.sharded as sharded
from maxsoftmax.math.online import accumulator
from maxsoftmax.ops.sharded import Second
from maxsoftmax.queue import Queue
from maxsoftmax_native.border import (
    Call,
    count,
    DTYPE,
    Op,
    open,
    OPTIONS,
    Pointers,
    run,
    TARGET,
    Text,
)

comptime SUMS = Second.OF_LOGARITHMS + 1
"""After the numbers of `Second`, results, of logits, any memory and the pairs of all shards, or gradients, of results, theirs and the sums
of all shards: sums of y·dy of the shard, and of dy with the next number, of results and their gradients."""

comptime PAIRS = SUMS + 2
"""Logarithms of Σ exp, and pairs of whole rows; of the pairs of all shards."""


struct Shard(Op):
    """A step of a softmax of rows that are split, or of its gradient."""

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        comptime accum = accumulator[DTYPE]()
        var rows = call.rows()
        var what = call[OPTIONS]
        var devices = call[OPTIONS + 1]
        if what == PAIRS:
            sharded.pairs_of_rows[TARGET](
                pointers.target[DTYPE](0),
                pointers.target[accum](1),
                pointers.source[accum](2),
                devices,
                rows,
                queue,
            )
            return

        @inline(.always)
        def compute[contiguous: Bool]() raises {imm}:
            comptime for log in [False, True]:
                if what == SUMS + Int(log):
                    sharded.sums_of_shard[TARGET, log, contiguous](
                        pointers.target[accum](0),
                        pointers.source[DTYPE](1),
                        pointers.source[DTYPE](2),
                        rows,
                        queue,
                    )
            comptime for second in range(SUMS):
                if what == second:
                    sharded.second_pass[TARGET, second, contiguous](
                        pointers.target[DTYPE](0),
                        pointers.source[DTYPE](1),
                        pointers.source[DTYPE](2),
                        pointers.source[accum](3),
                        devices,
                        rows,
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
    return count[Shard](call)


@export("maxsoftmax_run")
def run_op(
    call: Int,
    stream: Int,
    first: Int,
    second: Int,
    third: Int,
    fourth: Int,
    scratch: Int,
) abi("C") -> Text:
    """Computes what the call says, with pointers in the order in which it says so: results first.
    """
    return run[Shard](
        call, stream, scratch, Pointers(first, second, third, fourth)
    )
