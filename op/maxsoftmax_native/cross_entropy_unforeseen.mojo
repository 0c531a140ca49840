"""The library of what `cross_entropy_speculative` did not foresee, on a GPU."""

from maxsoftmax.gpu.speculative_gradient import unforeseen_gradients
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


struct CrossEntropyUnforeseen(Op):
    """Gradients of logits of rows whose losses have others than were foreseen.
    """

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        unforeseen_gradients(
            pointers.target[DTYPE](0),
            pointers.source[DTYPE](1),
            pointers.source[DType.float32](2),
            targets_of(call, pointers, 3),
            pointers.source[DTYPE](4),
            pointers.source[DType.uint32](6),
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
    return count[CrossEntropyUnforeseen](call)


@export("maxsoftmax_run")
def run_op(
    call: Int,
    stream: Int,
    dx: Int,
    x: Int,
    pairs: Int,
    target: Int,
    dloss: Int,
    ahead: Int,
    guesses: Int,
    scratch: Int,
) abi("C") -> Text:
    """Writes to `dx`, which is `ahead`, what is not there yet of the gradient of the loss of `x`.
    """
    return run[CrossEntropyUnforeseen](
        call,
        stream,
        scratch,
        Pointers(dx, x, pairs, target, dloss, ahead, guesses),
    )


@export("maxsoftmax_xla")
def run_for_xla(frame: Int) abi("C") -> Int:
    """Does the same for XLA; see `xla.mojo`."""
    return handle[CrossEntropyUnforeseen](frame)
