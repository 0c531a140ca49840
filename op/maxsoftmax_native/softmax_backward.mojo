"""The library of the gradient of softmax."""

import maxsoftmax.direct as direct
from maxsoftmax.queue import Queue
from here import Here
from maxsoftmax_native.border import (
    Call,
    count,
    DTYPE,
    Op,
    open,
    Pointers,
    run,
    Text,
)
from maxsoftmax_native.xla import handle


struct SoftmaxBackward(Op):
    """Gradients of logits."""

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        var rows = call.rows()

        @inline(.always)
        def compute[contiguous: Bool]() raises {imm}:
            direct.softmax_backward[Here, contiguous, log=False](
                pointers.target[DTYPE](0),
                pointers.source[DTYPE](1),
                pointers.source[DTYPE](2),
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
    return count[SoftmaxBackward](call)


@export("maxsoftmax_run")
def run_op(
    call: Int, stream: Int, dx: Int, y: Int, dy: Int, scratch: Int
) abi("C") -> Text:
    """Writes the gradient of the logits of softmax to `dx`."""
    return run[SoftmaxBackward](call, stream, scratch, Pointers(dx, y, dy))


@export("maxsoftmax_xla")
def run_for_xla(frame: Int) abi("C") -> Int:
    """Does the same for XLA; see `xla.mojo`."""
    return handle[SoftmaxBackward](frame)
