"""The library of the KL divergence of two tensors' rows."""

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


struct KlDivergence(Op):
    """The divergence of each row; the temperature is the option."""

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        comptime accum = accumulator[DTYPE]()
        kernels.kl_divergence[TARGET](
            pointers.target[accum](0),
            pointers.target[accum](1),
            pointers.source[DTYPE](2),
            pointers.source[DTYPE](3),
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
    return count[KlDivergence](call)


@export("maxsoftmax_run")
def run_op(
    call: Int, stream: Int, kl: Int, sums: Int, p: Int, q: Int, scratch: Int
) abi("C") -> Text:
    """Writes the divergences, and what the gradient needs."""
    return run[KlDivergence](call, stream, scratch, Pointers(kl, sums, p, q))
