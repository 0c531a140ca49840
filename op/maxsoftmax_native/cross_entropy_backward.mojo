"""The library of the gradient of cross entropy."""

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
    targets_of,
    Text,
)
from maxsoftmax_native.xla import handle


struct CrossEntropyBackward(Op):
    """Gradients of logits."""

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        var rows = call.rows()

        @inline(.always)
        def compute[contiguous: Bool]() raises {imm}:
            direct.cross_entropy_backward[Here, contiguous](
                pointers.target[DTYPE](0),
                pointers.source[DTYPE](1),
                pointers.source[accumulator[DTYPE]()](2),
                targets_of(call, pointers, 3),
                pointers.source_if_any[DTYPE](4),
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
    return count[CrossEntropyBackward](call)


@export("maxsoftmax_run")
def run_op(
    call: Int,
    stream: Int,
    dx: Int,
    x: Int,
    pairs: Int,
    target: Int,
    dloss: Int,
    scratch: Int,
) abi("C") -> Text:
    """Writes the gradient of the loss of `x` to `dx`, which may be `x`."""
    return run[CrossEntropyBackward](
        call, stream, scratch, Pointers(dx, x, pairs, target, dloss)
    )


@export("maxsoftmax_xla")
def run_for_xla(frame: Int) abi("C") -> Int:
    """Does the same for XLA; see `xla.mojo`."""
    return handle[CrossEntropyBackward](frame)
