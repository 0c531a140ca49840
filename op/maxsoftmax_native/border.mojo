"""What all C functions share: contexts, calls, and errors as texts."""

from std.ffi import _Global, external_call
from std.memory import bitcast, unsafe_memcpy
from std.sys import get_defined_string, size_of
from max.gpu.host import DeviceContext

from maxsoftmax.kept import Kept
from maxsoftmax.math.loss import LossOptions, Reduction, Targets, no_class
from maxsoftmax.ops.token_log_probs import Asked
from maxsoftmax.queue import Queue
from maxsoftmax.io.rows import Rows, Source, Target

comptime TARGET = get_defined_string["TARGET"]()
"""What the library is for: "cpu" or "gpu"."""

comptime DTYPE = DType._from_str(get_defined_string["DTYPE"]()).value()
"""The dtype of the logits that the library takes."""

comptime OUT_DTYPE = DType._from_str(
    get_defined_string["OUT_DTYPE", get_defined_string["DTYPE"]()]()
).value()
"""The dtype of the results, where a library lets it differ: that of the logits unless told otherwise."""

comptime LIMIT = 4
"""Where a call says what it may use: on a CPU how many threads, 0 for all; on a GPU how many bytes of scratch memory, 0 if nobody says."""

comptime OPTIONS = 5
"""Where in a call the options of the op begin."""

comptime TARGETS = 3
"""Which pointer the targets of a loss are, wherever the host looks at them."""

comptime Text = Int
"""The address of an error text that the caller releases; 0 where there is none."""

comptime ALIGNED = 1 << 12
"""An address as good as any, while only memory is counted."""


struct Call(TrivialRegisterPassable):
    """What does not change from one tensor to the next."""

    var words: Source[DType.int64]

    @inline(.always)
    def __init__(out self, address: Int):
        self.words = Source[DType.int64](unsafe_from_address=address)

    @inline(.always)
    def __getitem__(self, i: Int) -> Int:
        """Returns an integer."""
        return Int(self.words[unsafe_offset=i])

    @inline(.always)
    def number(self, i: Int) -> Float64:
        """Returns a number that is there by its bits."""
        return bitcast[DType.float64](self.words[unsafe_offset=i])

    @inline(.always)
    def out_scale(self, i: Int) -> Float64:
        """Returns the number that results of float8 are multiplied by; of others nobody need have put one there.
        """
        comptime if size_of[OUT_DTYPE]() == 1:
            return self.number(i)
        else:
            return 1

    @inline(.always)
    def rows(self) -> Rows[]:
        """Returns how the memory is divided into rows."""
        return Rows(self[1], self[2], self[3])

    @inline(.always)
    def device(self) -> Pointer[Kept, MutUntrackedOrigin]:
        """Returns the device."""
        return {unsafe_from_address = self[0]}


@inline(.always)
def loss_options(call: Call) -> LossOptions:
    """Returns what the options of a loss say: the class to ignore, the label smoothing, the reduction.
    """
    return {
        call[OPTIONS],
        call.number(OPTIONS + 1),
        Reduction(call[OPTIONS + 2]),
        call[OPTIONS + 4] != 0,
        0,
    }


@inline(.always)
def targets_of(call: Call, pointers: Pointers, i: Int) -> Targets:
    """Returns the targets at the pointer `i` of a loss, whose last option says whether they have 64 bits.
    """
    return {pointers.source[DType.int32](i), call[OPTIONS + 3] != 0}


def sentence(call: Call, pointers: Pointers, name: String, row: Int) -> String:
    """Returns what is wrong with the target of a row, which the caller calls by a name.
    """
    return no_class(
        name,
        targets_of(call, pointers, TARGETS)[row],
        call.rows().n,
        loss_options(call).ignored,
    )


@inline(.always)
def asked_of(call: Call, pointers: Pointers, i: Int) -> Asked:
    """Returns what is asked of each row, of the tokens at the pointer `i`: how many, whether they have 64 bits, and the temperature.
    """
    var tokens = Targets(
        pointers.source[DType.int32](i), call[OPTIONS + 1] != 0
    )
    return {tokens, call[OPTIONS], call.number(OPTIONS + 2)}


trait Op:
    """An op behind the border."""

    comptime RESULTS: Int = 1
    """How many of its pointers are results, which come first."""

    @staticmethod
    def run(call: Call, pointers: Pointers, queue: Queue) raises:
        """Computes, or enqueues, or counts memory: whatever the queue does."""
        ...

    @staticmethod
    def wrong(call: Call, pointers: Pointers) -> Optional[Int]:
        """Returns the first row whose target is no class, if there is one and the op has targets, behind two results and the logits.
        """
        return None


struct Pointers(Movable):
    """The memory of a call, by its place among the arguments."""

    comptime MOST = 7
    """How many there are at most, scratch memory not counted."""

    var addresses: Array[Int, Self.MOST]

    @inline(.always)
    def __init__(out self, *addresses: Int):
        self.addresses = Array[Int, Self.MOST](fill=0)
        for i in range(len(addresses)):
            self.addresses[i] = addresses[i]

    @inline(.always)
    def source[dtype: DType](self, i: Int) -> Source[dtype]:
        """Returns where elements are read."""
        return Source[dtype](unsafe_from_address=self.addresses[i])

    @inline(.always)
    def source_if_any[dtype: DType](self, i: Int) -> Optional[Source[dtype]]:
        """Returns where elements are read, if they are anywhere."""
        if self.addresses[i] == 0:
            return None
        return self.source[dtype](i)

    @inline(.always)
    def target_if_any[dtype: DType](self, i: Int) -> Optional[Target[dtype]]:
        """Returns where elements are written, if they are anywhere."""
        if self.addresses[i] == 0:
            return None
        return self.target[dtype](i)

    @inline(.always)
    def target[dtype: DType](self, i: Int) -> Target[dtype]:
        """Returns where elements are written."""
        return Target[dtype](unsafe_from_address=self.addresses[i])


@inline(.always)
def run[
    O: Op, checked: Bool = False
](call: Int, stream: Int, scratch: Int, pointers: Pointers) -> Text:
    """Computes an op, and returns what went wrong.

    Parameters:
        O: The op.
        checked: Whether the caller has looked at targets.

    Args:
        call: Address of the call.
        stream: Handle of the caller's stream.
        scratch: Address of as many bytes as `count` said.
        pointers: The memory of the call.
    """
    var called = Call(call)
    try:
        comptime if TARGET == "cpu":
            var wrong = Optional[Int](None)
            comptime if not checked:
                wrong = O.wrong(called, pointers)
            if wrong:
                var row = wrong.value()
                return text(
                    "V",
                    sentence(called, pointers, String(t"target[{row}]"), row),
                )
            O.run(
                called,
                pointers,
                Queue(called.device()[].ctx, workers=called[LIMIT]),
            )
        else:
            var used = 0
            var told = called[LIMIT]
            O.run(
                called,
                pointers,
                Queue(
                    called.device(),
                    stream=stream,
                    memory=Target[DType.uint8](unsafe_from_address=scratch),
                    capacity=told if told > 0 else Int.MAX,
                    used=Pointer(to=used).unsafe_origin_cast[
                        MutUntrackedOrigin
                    ](),
                ),
            )
            # Until here it is written through the pointer.
            _ = used
    except e:
        return text("R", String(e))
    return 0


@inline(.always)
def count[O: Op](call: Int) -> Int:
    """Returns how many bytes of scratch memory a call needs, wherever its arguments lie; -1 where the call is wrong.

    Parameters:
        O: The op.

    Args:
        call: Address of the call.
    """
    comptime if TARGET == "cpu":
        return 0
    else:
        var called = Call(call)
        var most = 0
        # Kernels differ by whether memory is aligned, and whether it is the same, and so does what they leave to each other.
        for way in range(4):
            var shift, apart = divmod(way, 2)
            var used = 0
            var pointers = Pointers()
            for i in range(Pointers.MOST):
                pointers.addresses[i] = ALIGNED * (1 + apart * i) + 8 * shift
            try:
                O.run(
                    called,
                    pointers,
                    Queue.measuring(
                        called.device()[].ctx,
                        Pointer(to=used).unsafe_origin_cast[
                            MutUntrackedOrigin
                        ](),
                    ),
                )
            except:
                return -1
            most = max(most, used)
        return most


comptime DEVICES = 64
"""The CPU, and the GPUs whose contexts are found by their index."""


def _none() -> Array[Int, DEVICES]:
    return Array[Int, DEVICES](fill=0)


comptime _contexts = _Global["maxsoftmax_contexts", _none]
"""Addresses of contexts, that of the CPU first: one table for all libraries of the process."""


def opened(device: Int) -> Int:
    """Returns the address of the context of a device that somebody has opened, or 0.

    Args:
        device: As of `open`.
    """
    if device + 1 >= DEVICES:
        return 0
    try:
        return _contexts.get_or_create_ptr()[][device + 1]
    except:
        return 0


def open(device: Int, error: Int) -> Int:
    """Returns the address of a context, which lives as long as the process; 0 if it cannot be opened.

    Args:
        device: -1 for the CPU, or the index of a GPU.
        error: Where the address of an error text goes.
    """
    try:
        var context = DeviceContext(api="cpu") if device < 0 else DeviceContext(
            device
        )
        var kept = external_call["malloc", Pointer[Kept, MutUntrackedOrigin]](
            size_of[Kept]()
        )
        kept.unsafe_write(Kept(context))
        if device + 1 < DEVICES:
            _contexts.get_or_create_ptr()[][device + 1] = Int(kept)
        return Int(kept)
    except e:
        Target[DType.int64](unsafe_from_address=error)[] = Int64(
            text("R", String(e))
        )
        return 0


def text(status: StaticString, sentence: String) -> Text:
    """Returns an error text, in memory that C's free() releases."""
    var whole = String(status) + sentence
    var size = whole.byte_length()
    var kept = external_call["malloc", Target[DType.uint8]](size + 1)
    unsafe_memcpy(
        dest=kept,
        src=whole.unsafe_ptr().unsafe_origin_cast[ImmUntrackedOrigin](),
        count=size,
    )
    kept[unsafe_offset=size] = 0
    return Int(kept)
