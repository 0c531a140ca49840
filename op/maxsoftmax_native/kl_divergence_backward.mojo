"""The library of the gradient of the KL divergence."""

import maxsoftmax.ops.kl_divergence as kernels
from maxsoftmax.math.online import accumulator
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


struct KlDivergenceBackward(Op):
    """Gradients of logits; the options are the temperature, and whether they are those of p.
    """

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        comptime accum = accumulator[DTYPE]()
        kernels.kl_divergence_backward[TARGET](
            pointers.target[DTYPE](0),
            pointers.source[DTYPE](1),
            pointers.source[DTYPE](2),
            pointers.source[accum](3),
            pointers.source_if_any[accum](4),
            call[OPTIONS + 1] != 0,
            call.number(OPTIONS),
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
    return count[KlDivergenceBackward](call)


@export("maxsoftmax_run")
def run_op(
    call: Int,
    stream: Int,
    dx: Int,
    p: Int,
    q: Int,
    sums: Int,
    dkl: Int,
    scratch: Int,
) abi("C") -> Text:
    """Writes the gradient of the logits of p or q to `dx`."""
    return run[KlDivergenceBackward](
        call, stream, scratch, Pointers(dx, p, q, sums, dkl)
    )
