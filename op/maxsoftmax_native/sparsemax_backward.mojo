"""The library of the gradient of sparsemax."""

import maxsoftmax.ops.sparsemax as kernels
from maxsoftmax.queue import Queue
from maxsoftmax_native.border import (
    Call,
    count,
    DTYPE,
    Op,
    open,
    Pointers,
    run,
    TARGET,
    Text,
)
from maxsoftmax_native.xla import handle


struct SparsemaxBackward(Op):
    """Gradients of logits."""

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        kernels.sparsemax_backward[TARGET](
            pointers.target[DTYPE](0),
            pointers.source[DTYPE](1),
            pointers.source[DTYPE](2),
            call.rows(),
            queue,
        )


@export("maxsoftmax_open")
def open_device(device: Int, error: Int) abi("C") -> Int:
    """Opens a device; see the package."""
    return open(device, error)


@export("maxsoftmax_scratch")
def scratch_bytes(call: Int) abi("C") -> Int:
    """Counts scratch memory; see the package."""
    return count[SparsemaxBackward](call)


@export("maxsoftmax_run")
def run_op(
    call: Int, stream: Int, dx: Int, y: Int, dy: Int, scratch: Int
) abi("C") -> Text:
    """Writes the gradient of the logits of sparsemax to `dx`."""
    return run[SparsemaxBackward](call, stream, scratch, Pointers(dx, y, dy))


@export("maxsoftmax_xla")
def run_for_xla(frame: Int) abi("C") -> Int:
    """Does the same for XLA; see `xla.mojo`."""
    return handle[SparsemaxBackward](frame)
