"""The library of the gradient of tokens' logarithms."""

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


struct TokenLogProbsBackward(Op):
    """Gradients of logits."""

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        comptime accum = accumulator[DTYPE]()
        kernels.token_log_probs_backward[TARGET](
            pointers.target[DTYPE](0),
            pointers.source[DTYPE](1),
            pointers.source[accum](2),
            asked_of(call, pointers, 3),
            pointers.source[accum](4),
            pointers.source_if_any[accum](5),
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
    return count[TokenLogProbsBackward](call)


@export("maxsoftmax_run")
def run_op(
    call: Int,
    stream: Int,
    dx: Int,
    x: Int,
    sums: Int,
    tokens: Int,
    dlog_probs: Int,
    dentropy: Int,
    scratch: Int,
) abi("C") -> Text:
    """Writes the gradient of `x` to `dx`."""
    return run[TokenLogProbsBackward](
        call,
        stream,
        scratch,
        Pointers(dx, x, sums, tokens, dlog_probs, dentropy),
    )


@export("maxsoftmax_xla")
def run_for_xla(frame: Int) abi("C") -> Int:
    """Does the same for XLA; see `xla.mojo`."""
    return handle[TokenLogProbsBackward](frame)
