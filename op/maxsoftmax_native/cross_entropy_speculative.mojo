"""The library of cross entropy whose gradient is computed ahead, on a GPU."""

from maxsoftmax.gpu.speculative_gradient import losses_and_gradients
from maxsoftmax.queue import Queue
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


struct CrossEntropySpeculative(Op):
    """Losses of logits and target classes, and gradients of logits where those of losses are foreseen.
    """

    comptime RESULTS = 4

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        losses_and_gradients(
            pointers.target[DTYPE](0),
            pointers.target[DType.float32](1),
            pointers.target[DTYPE](2),
            pointers.target[DType.uint32](3),
            pointers.source[DTYPE](4),
            targets_of(call, pointers, 5),
            call.rows(),
            loss_options(call),
            queue,
        )


@export("maxsoftmax_open")
def open_device(device: Int, error: Int) abi("C") -> Int:
    """Opens a device; see the package."""
    return open(device, error)


@export("maxsoftmax_scratch")
def scratch_bytes(call: Int) abi("C") -> Int:
    """Counts scratch memory; see the package."""
    return count[CrossEntropySpeculative](call)


@export("maxsoftmax_run")
def run_op(
    call: Int,
    stream: Int,
    loss: Int,
    pairs: Int,
    dx: Int,
    guesses: Int,
    x: Int,
    target: Int,
    scratch: Int,
) abi("C") -> Text:
    """Writes the loss of each row of `x`, the pairs of rows, and what of the gradient is foreseen.
    """
    return run[CrossEntropySpeculative](
        call, stream, scratch, Pointers(loss, pairs, dx, guesses, x, target)
    )


@export("maxsoftmax_xla")
def run_for_xla(frame: Int) abi("C") -> Int:
    """Does the same for XLA; see `xla.mojo`."""
    return handle[CrossEntropySpeculative](frame)
