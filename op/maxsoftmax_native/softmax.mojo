"""The library of softmax, by `auto`, maybe in another dtype, `-D OUT_DTYPE=float8_e4m3fn`, or by a rung:
`-D ALGORITHM=online -D BLOCK_SIZE=512 -D UNROLL=4`.
"""

from std.sys import get_defined_int, get_defined_string, is_defined

import maxsoftmax.direct as direct
from maxsoftmax.queue import Queue
from here import Here
from maxsoftmax_native.border import (
    Call,
    count,
    DTYPE,
    Op,
    open,
    OPTIONS,
    OUT_DTYPE,
    Pointers,
    run,
    Text,
)
from maxsoftmax_native.xla import handle


struct Softmax(Op):
    """Probabilities of logits."""

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        var rows = call.rows()

        @inline(.always)
        def compute[contiguous: Bool]() raises {imm}:
            direct.softmax[
                Here,
                contiguous,
                algorithm=get_defined_string["ALGORITHM", "auto"](),
                block_size=get_defined_int["BLOCK_SIZE", 128](),
                unroll=get_defined_int["UNROLL", 4](),
            ](
                pointers.target[OUT_DTYPE](0),
                pointers.source[DTYPE](1),
                rows,
                queue,
                call.out_scale(OPTIONS),
            )

        if rows.inner == 1:
            compute[True]()
        else:
            comptime if is_defined["CONFIGURATION"]():
                raise Error("what is searched is rows along the last axis")
            else:
                compute[False]()


@export("maxsoftmax_open")
def open_device(device: Int, error: Int) abi("C") -> Int:
    """Opens a device; see the package."""
    return open(device, error)


@export("maxsoftmax_scratch")
def scratch_bytes(call: Int) abi("C") -> Int:
    """Counts scratch memory; see the package."""
    return count[Softmax](call)


@export("maxsoftmax_run")
def run_op(
    call: Int, stream: Int, y: Int, x: Int, scratch: Int
) abi("C") -> Text:
    """Writes softmax of `x` to `y`."""
    return run[Softmax](call, stream, scratch, Pointers(y, x))


@export("maxsoftmax_xla")
def run_for_xla(frame: Int) abi("C") -> Int:
    """Does the same for XLA; see `xla.mojo`."""
    return handle[Softmax](frame)
