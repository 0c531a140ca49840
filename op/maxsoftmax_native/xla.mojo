"""What XLA calls: a handler of its foreign function interface, `XLA_FFI_Error *handler(XLA_FFI_CallFrame *)`.

Results are the first pointers of an op, then arguments. What an op has not been asked for is an array without elements. If a GPU
needs scratch memory, that is one more result. The one attribute is an array: the length of a row, how far its elements are from each
other, and the options of the op. How many rows there are follows from the first argument, which has the shape of the logits.
"""

from std.ffi import external_call
from std.math import align_down, align_up
from std.memory import Pointer
from std.sys import CompilationTarget, size_of

from maxsoftmax.io.rows import Source, Target
from maxsoftmax_native.border import (
    Call,
    DTYPE,
    LIMIT,
    Op,
    OPTIONS,
    Pointers,
    TARGET,
    Text,
    opened,
    run,
    sentence,
    text,
)

comptime WORDS = 48
"""Words of a call at most."""

comptime OUT_OF_RANGE = 11
"""XLA's code of labels that are no classes. (Of invalid arguments, JAX makes one error or another.)"""

comptime INTERNAL = 13
"""XLA's code of other errors."""

comptime COMMAND_BUFFER_COMPATIBLE = Int32(1 if TARGET == "gpu" else 0)
"""The trait of handlers that only enqueue, on the stream that they are given: XLA records them in CUDA graphs."""

comptime PAGE = 2 << 20
"""Bytes of the larger pages of memory."""

comptime LARGE = 8 << 20
"""Bytes of a result on a CPU from which such pages are asked for."""

comptime MADV_HUGEPAGE = Int32(14)
"""What Linux calls that."""

comptime Function = def(Int) abi("C") thin -> Int
"""A function of XLA's: it takes the address of a struct and returns an error, or 0."""


struct Words(TrivialRegisterPassable):
    """A struct of XLA's `c_api.h`: 64 bits a field, but for a few that have half of these.

    The numbers below say where the fields are that are read or written, in version 0.3 of the interface.
    """

    comptime FRAME_EXTENSION = 1
    comptime FRAME_API = 2
    comptime FRAME_CONTEXT = 3
    comptime FRAME_ARGUMENT_COUNT = 7
    comptime FRAME_ARGUMENTS = 9
    comptime FRAME_RESULT_COUNT = 12
    comptime FRAME_RESULTS = 14
    comptime FRAME_ATTRIBUTES = 20

    comptime BUFFER_DATA = 3
    comptime BUFFER_RANK = 4
    comptime BUFFER_DIMS = 5

    comptime ARRAY_COUNT = 1
    comptime ARRAY_DATA = 2

    comptime EXTENSION_TYPE = 1
    comptime EXTENSION_METADATA = 3
    comptime METADATA_VERSION = 3
    comptime METADATA_TRAITS = 4

    comptime API_VERSION = 4
    comptime API_ERROR_CREATE = 6
    comptime API_STREAM_GET = 10
    comptime API_DEVICE_ORDINAL_GET = 23

    var memory: Target[DType.int64]

    @inline(.always)
    def __init__(out self, address: Int):
        self.memory = Target[DType.int64](unsafe_from_address=address)

    @inline(.always)
    def __getitem__(self, i: Int) -> Int:
        """Returns a field."""
        return Int(self.memory[unsafe_offset=i])

    @inline(.always)
    def at(self, i: Int) -> Self:
        """Returns the struct whose address a field is."""
        return Self(self[i])

    @inline(.always)
    def half(self, i: Int) -> Int32:
        """Returns half a field, of which each has two."""
        return self.memory.unsafe_bitcast[Int32]()[unsafe_offset=i]


def handle[O: Op](address: Int) -> Int:
    """Computes an op for XLA, and returns an error of XLA's, or 0.

    Parameters:
        O: The op.

    Args:
        address: Of the call frame.
    """
    var frame = Words(address)
    if frame[Words.FRAME_EXTENSION] != 0:
        var extension = frame.at(Words.FRAME_EXTENSION)
        if extension.half(2 * Words.EXTENSION_TYPE) == 1:
            _describe(
                extension.at(Words.EXTENSION_METADATA), frame[Words.FRAME_API]
            )
            return 0
    var api = frame.at(Words.FRAME_API)
    var device = -1
    var stream = 0
    comptime if TARGET == "gpu":
        if api[0] <= 8 * Words.API_DEVICE_ORDINAL_GET:
            return _error(
                api, text("R", "this version of XLA does not name its devices")
            )
        var error = _ask(api[Words.API_DEVICE_ORDINAL_GET], frame, device)
        if error == 0:
            error = _ask(api[Words.API_STREAM_GET], frame, stream)
        if error != 0:
            return error
    var context = opened(device)
    if context == 0:
        return _error(api, text("R", "XLA's device is not open"))

    var told = frame.at(Words.FRAME_ATTRIBUTES).at(0)
    var options = told.at(Words.ARRAY_DATA)
    var call = Array[Int, WORDS](fill=0)
    var logits = frame.at(Words.FRAME_ARGUMENTS).at(0)
    call[0] = context
    call[1] = _elements(logits) // (options[0] * options[1])
    call[2] = options[0]
    call[3] = options[1]
    for i in range(2, told[Words.ARRAY_COUNT]):
        call[OPTIONS + i - 2] = options[i]

    var results = frame.at(Words.FRAME_RESULTS)
    var arguments = frame.at(Words.FRAME_ARGUMENTS)
    var pointers = Pointers()
    for i in range(O.RESULTS):
        pointers.addresses[i] = _memory(results.at(i))
    for i in range(frame[Words.FRAME_ARGUMENT_COUNT]):
        pointers.addresses[O.RESULTS + i] = _memory(arguments.at(i))
    var scratch = 0
    var bytes = 1
    if frame[Words.FRAME_RESULT_COUNT] > O.RESULTS:
        scratch = results.at(O.RESULTS)[Words.BUFFER_DATA]
        bytes = _elements(results.at(O.RESULTS))
    comptime if TARGET == "gpu":
        # What was compiled for a GPU with another number of multiprocessors may have less than this one needs.
        call[LIMIT] = bytes
    comptime if TARGET == "cpu" and CompilationTarget.is_linux():
        _ask_for_large_pages(results.at(0))
    var wrong = _wrong_label[O](
        Call(Int(Pointer(to=call))), pointers, arguments
    )
    if wrong == 0:
        wrong = run[O, checked=True](
            Int(Pointer(to=call)), stream, scratch, pointers
        )
    # Until here it is read through its address.
    _ = call
    return 0 if wrong == 0 else _error(api, wrong)


def _wrong_label[
    O: Op
](call: Call, pointers: Pointers, arguments: Words) -> Text:
    """Returns the error of the first label that is no class, by its place among the labels, or 0.
    """
    var wrong = Optional[Int](None)
    comptime if TARGET == "cpu":
        wrong = O.wrong(call, pointers)
    if not wrong:
        return 0
    # Behind the logits.
    var labels = arguments.at(1)
    var places = String("")
    var rest = wrong.value()
    for i in reversed(range(labels[Words.BUFFER_RANK])):
        var size = labels.at(Words.BUFFER_DIMS)[i]
        var separator = ", " if places else ""
        places = String(t"{rest % size}{separator}{places}")
        rest //= size
    var name = String(t"labels[{places}]") if places else String("labels")
    return text("V", sentence(call, pointers, name, wrong.value()))


def _elements(buffer: Words) -> Int:
    """Returns how many elements an array has."""
    var count = 1
    for i in range(buffer[Words.BUFFER_RANK]):
        count *= buffer.at(Words.BUFFER_DIMS)[i]
    return count


@inline(.always)
def _memory(buffer: Words) -> Int:
    """Returns where an array is: nowhere, if it has no elements, as what an op has not been asked for.
    """
    return buffer[Words.BUFFER_DATA] if _elements(buffer) != 0 else 0


def _ask_for_large_pages(buffer: Words):
    """Has Linux find the memory of a large result in pages of 2 MB, where nothing has been written to it yet.

    XLA asks for new memory at every call, whose pages take longer than softmax does.
    """
    var bytes = _elements(buffer) * size_of[DTYPE]()
    if bytes < LARGE:
        return
    var begin = align_up(buffer[Words.BUFFER_DATA], PAGE)
    var end = align_down(buffer[Words.BUFFER_DATA] + bytes, PAGE)
    _ = external_call["madvise", Int32](begin, end - begin, MADV_HUGEPAGE)


def _describe(metadata: Words, api: Int):
    """Tells XLA which version of its interface the handler is for: XLA's own, or the oldest where XLA does not tell it.
    """
    var told = metadata.memory.unsafe_bitcast[Int32]()
    var minor = Int32(1)
    if api != 0:
        minor = Words(api).half(2 * Words.API_VERSION + 1)
    told[unsafe_offset=2 * Words.METADATA_VERSION] = 0
    told[unsafe_offset=2 * Words.METADATA_VERSION + 1] = minor
    told[unsafe_offset=2 * Words.METADATA_TRAITS] = COMMAND_BUFFER_COMPATIBLE


def _ask(function: Int, frame: Words, mut answer: Int) -> Int:
    """Asks XLA about a call, and returns an error, or 0."""
    # Its size, no extension, the call's context, and room for the answer, which may have 32 bits.
    var question = Array[Int, 4](fill=0)
    question[0] = 32
    question[2] = frame[Words.FRAME_CONTEXT]
    var error = _call(function, Int(Pointer(to=question)))
    answer = question[3]
    return error


def _error(api: Words, message: Text) -> Int:
    """Returns an error of XLA's, and releases its text."""
    var status = Source[DType.uint8](unsafe_from_address=message)[]
    # Its size, no extension, the sentence, which XLA copies, and a code.
    var failure = Array[Int, 4](fill=0)
    failure[0] = 32
    failure[2] = message + 1
    failure[3] = OUT_OF_RANGE if status == UInt8(ord("V")) else INTERNAL
    var error = _call(api[Words.API_ERROR_CREATE], Int(Pointer(to=failure)))
    # As above.
    _ = failure
    external_call["free", NoneType](
        Target[DType.uint8](unsafe_from_address=message)
    )
    return error


def _call(function: Int, struct_: Int) -> Int:
    """Calls a function of XLA's."""
    var address = function
    return Pointer(to=address).unsafe_bitcast[Function]()[](struct_)
