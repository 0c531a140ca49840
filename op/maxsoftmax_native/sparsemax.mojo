"""The library of sparsemax."""

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


struct Sparsemax(Op):
    """The nearest probabilities to logits."""

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        kernels.sparsemax[TARGET](
            pointers.target[DTYPE](0),
            pointers.source[DTYPE](1),
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
    return count[Sparsemax](call)


@export("maxsoftmax_run")
def run_op(
    call: Int, stream: Int, y: Int, x: Int, scratch: Int
) abi("C") -> Text:
    """Writes sparsemax of `x` to `y`."""
    return run[Sparsemax](call, stream, scratch, Pointers(y, x))


@export("maxsoftmax_xla")
def run_for_xla(frame: Int) abi("C") -> Int:
    """Does the same for XLA; see `xla.mojo`."""
    return handle[Sparsemax](frame)
