"""The library of what there is one of for each row: pairs and logsumexp. Option 5 says which."""

import maxsoftmax.direct as direct
from maxsoftmax.math.online import accumulator
from maxsoftmax.queue import Queue
from here import Here
from maxsoftmax_native.border import (
    Call,
    count,
    DTYPE,
    Op,
    open,
    OPTIONS,
    Pointers,
    run,
    Text,
)
from maxsoftmax_native.xla import handle


comptime LOGSUMEXP = 1
"""The option for ln Σ exp x, of the dtype of the logits: (rows,)."""

comptime APART = 2
"""The option for all m and then all d, in accumulators: (2, rows). Otherwise they are pairs: (rows, 2)."""


struct Statistics(Op):
    """What rows of logits come to."""

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        var rows = call.rows()
        var what = call[OPTIONS]

        @inline(.always)
        def compute[contiguous: Bool]() raises {imm}:
            var x = pointers.source[DTYPE](1)
            if what == LOGSUMEXP:
                direct.logsumexp[Here, contiguous](
                    pointers.target[DTYPE](0), x, rows, queue
                )
            else:
                direct.max_sum[Here, contiguous](
                    pointers.target[accumulator[DTYPE]()](0),
                    x,
                    rows,
                    what == APART,
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
    return count[Statistics](call)


@export("maxsoftmax_run")
def run_op(
    call: Int, stream: Int, y: Int, x: Int, scratch: Int
) abi("C") -> Text:
    """Writes what the rows of `x` come to to `y`."""
    return run[Statistics](call, stream, scratch, Pointers(y, x))


@export("maxsoftmax_xla")
def run_for_xla(frame: Int) abi("C") -> Int:
    """Does the same for XLA; see `xla.mojo`."""
    return handle[Statistics](frame)
