"""The library of cross entropy."""

import maxsoftmax.direct as direct
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
    Pointers,
    run,
    TARGETS,
    targets_of,
    Text,
)
from maxsoftmax_native.xla import handle


struct CrossEntropy(Op):
    """Losses of logits and target classes."""

    comptime RESULTS = 2

    @staticmethod
    def wrong(call: Call, pointers: Pointers) -> Optional[Int]:
        return Here.wrong_target(
            targets_of(call, pointers, TARGETS),
            call.rows(),
            loss_options(call).ignored,
        )

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        var rows = call.rows()

        @inline(.always)
        def compute[contiguous: Bool]() raises {imm}:
            direct.cross_entropy[Here, contiguous, checked=True](
                pointers.target[DTYPE](0),
                pointers.target[accumulator[DTYPE]()](1),
                pointers.source[DTYPE](2),
                targets_of(call, pointers, 3),
                rows,
                loss_options(call),
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
    return count[CrossEntropy](call)


@export("maxsoftmax_run")
def run_op(
    call: Int,
    stream: Int,
    loss: Int,
    pairs: Int,
    x: Int,
    target: Int,
    scratch: Int,
) abi("C") -> Text:
    """Writes the loss of `x`, and the pairs of its rows."""
    return run[CrossEntropy](
        call, stream, scratch, Pointers(loss, pairs, x, target)
    )


@export("maxsoftmax_xla")
def run_for_xla(frame: Int) abi("C") -> Int:
    """Does the same for XLA; see `xla.mojo`."""
    return handle[CrossEntropy](frame)
