"""The library of softmax of scaled, masked and divided logits, with a sink, maybe in another dtype:
`-D OUT_DTYPE=float8_e4m3fn`.
"""

from std.utils import IndexList

from maxsoftmax.ops.forms import (
    AXIS,
    Forms,
    Kind,
    Operand,
    RANK,
)
from maxsoftmax.io.results import into_memory
from maxsoftmax.io.rows import Rows
from maxsoftmax.math.online import accumulator
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


comptime KINDS = OPTIONS + 2
"""Where in a call the kinds of scale, mask, temperature and sink are."""

comptime MASK = 1
"""Which of them is the mask."""

comptime NUMBERS = KINDS + 4
"""Where they themselves are, if they are numbers."""

comptime SHAPE = NUMBERS + 4
"""Where the shape of the logits is, and behind it the strides of each of the four."""

comptime OUT_SCALE = SHAPE + 5 * RANK
"""Where that is what results of float8 are multiplied by."""

comptime CODES = [DType.float32, DType.bfloat16, DType.float16, DType.float64]
"""The dtypes of tensors, whose codes in a call are their places here, from 1 on."""

comptime BOOL = 5
"""The code of a tensor of bools."""

comptime NUMBER = 6
"""The code of a number."""


def _kind(code: Int, is_mask: Bool) raises -> Kind:
    """Returns what an operand is; only a mask may be of bools."""
    if code == 0:
        return Kind.NOTHING
    if code == NUMBER:
        return Kind.NUMBER
    if code == BOOL and is_mask:
        return Kind.BOOL
    comptime for i in range(4):
        if code == i + 1:
            comptime if CODES[i] == accumulator[DTYPE]():
                return Kind.WIDE
            comptime if CODES[i] == DTYPE:
                return Kind.NARROW
    raise Error(t"operands of the code {code} have to be converted first")


struct FormedSoftmax(Op):
    """Probabilities of logits as attention has them."""

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        @inline(.always)
        def six(place: Int) {imm} -> IndexList[RANK]:
            var result = IndexList[RANK]()
            comptime for i in range(RANK):
                result[i] = call[place + i]
            return result

        @inline(.always)
        def operand(i: Int) raises {imm} -> Operand[DTYPE]:
            return {
                _kind(call[KINDS + i], i == MASK),
                pointers.source[DType.uint8](2 + i),
                call.number(NUMBERS + i).cast[accumulator[DTYPE]()](),
                six(SHAPE + (i + 1) * RANK),
            }

        var forms = Forms[DTYPE](
            six(SHAPE),
            call[OPTIONS] != 0,
            Forms[DTYPE].from_end(six(SHAPE)),
            call[OPTIONS + 1] != 0,
            operand(0),
            operand(1),
            operand(2),
            operand(3),
        )

        @inline(.always)
        def compute[contiguous: Bool]() raises {imm}:
            var rows = Rows.of[AXIS](forms.shape)
            Here.formed[contiguous](
                into_memory(
                    pointers.target[OUT_DTYPE](0),
                    rows,
                    call.out_scale(OUT_SCALE),
                ),
                pointers.source[DTYPE](1),
                forms,
                rows,
                queue,
            )

        if forms.is_empty():
            return
        if forms.shape[AXIS + 1] == 1:
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
    return count[FormedSoftmax](call)


@export("maxsoftmax_run")
def run_op(
    call: Int,
    stream: Int,
    y: Int,
    x: Int,
    scale: Int,
    mask: Int,
    temperature: Int,
    sink: Int,
    scratch: Int,
) abi("C") -> Text:
    """Writes softmax of what is made of `x` to `y`."""
    return run[FormedSoftmax](
        call, stream, scratch, Pointers(y, x, scale, mask, temperature, sink)
    )
