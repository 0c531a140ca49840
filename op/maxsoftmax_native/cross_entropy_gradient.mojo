"""The library of the gradient of cross entropy that comes with the pairs of rows, for losses that are one number."""

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


struct CrossEntropyGradient(Op):
    """Gradients of logits, and pairs."""

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
            direct.cross_entropy_gradient[Here, contiguous](
                pointers.target[DTYPE](0),
                pointers.target[accumulator[DTYPE]()](1),
                pointers.source[DTYPE](2),
                targets_of(call, pointers, 3),
                rows,
                loss_options(call).ignored,
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
    return count[CrossEntropyGradient](call)


@export("maxsoftmax_run")
def run_op(
    call: Int,
    stream: Int,
    dx: Int,
    pairs: Int,
    x: Int,
    target: Int,
    scratch: Int,
) abi("C") -> Text:
    """Writes the gradient of the loss of each row of `x` to `dx`, which may be `x`, and the pairs.
    """
    return run[CrossEntropyGradient](
        call, stream, scratch, Pointers(dx, pairs, x, target)
    )
