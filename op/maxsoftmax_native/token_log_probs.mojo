"""The library of the logarithms of tokens' probabilities."""

import maxsoftmax.ops.token_log_probs as kernels
from maxsoftmax.math.online import accumulator
from maxsoftmax.queue import Queue
from maxsoftmax_native.border import (
    asked_of,
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


struct TokenLogProbs(Op):
    """The logarithms of tokens' probabilities, and the entropy."""

    comptime RESULTS = 3

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        comptime accum = accumulator[DTYPE]()
        kernels.token_log_probs[TARGET](
            pointers.target[accum](0),
            pointers.target_if_any[accum](1),
            pointers.target[accum](2),
            pointers.source[DTYPE](3),
            asked_of(call, pointers, 4),
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
    return count[TokenLogProbs](call)


@export("maxsoftmax_run")
def run_op(
    call: Int,
    stream: Int,
    log_probs: Int,
    entropy: Int,
    sums: Int,
    x: Int,
    tokens: Int,
    scratch: Int,
) abi("C") -> Text:
    """Writes the logarithms, the entropy if it is to go anywhere, and what the gradient needs.
    """
    return run[TokenLogProbs](
        call,
        stream,
        scratch,
        Pointers(log_probs, entropy, sums, x, tokens),
    )


@export("maxsoftmax_xla")
def run_for_xla(frame: Int) abi("C") -> Int:
    """Does the same for XLA; see `xla.mojo`."""
    return handle[TokenLogProbs](frame)
