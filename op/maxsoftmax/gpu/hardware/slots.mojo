"""Shared memory in which every thread keeps vectors of its own: registers that can be filled from afar.

Copies into it are asked for and then land by themselves. No other thread looks at a thread's slots, so that no
barrier is needed but the thread's own wait.
"""

from std.memory import bitcast
from std.sys import inlined_assembly, is_nvidia_gpu, size_of
from max.gpu import thread_idx
from max.gpu.memory import external_memory

from ...io.eviction import GONE_LAST, has_policies
from ...io.rows import Source, VECTOR_BYTES
from .tree_reduction import Shared


@inline(.always)
def fetch_vector[
    dtype: DType, //, bytes: Int = VECTOR_BYTES
](to: Shared[Scalar[dtype]], source: Source[dtype]):
    """Has some bytes brought to a place in shared memory, not waiting for them, and tells the L2 what is to become of them.

    Parameters:
        dtype: What they are.
        bytes: How many: 16, 8 or 4, aligned.

    Args:
        to: Where they go.
        source: Where they are.
    """
    comptime if is_nvidia_gpu():
        # Of fewer bytes none goes past the L1.
        comptime past_l1 = "cg" if bytes == VECTOR_BYTES else "ca"
        comptime copy = "cp.async." + past_l1 + ".shared.global"
        comptime size = String(bytes)
        comptime if has_policies():
            inlined_assembly[
                copy + ".L2::cache_hint [$0], [$1], " + size + ", $2;",
                NoneType,
                constraints="r,l,l,~{memory}",
            ](UInt32(Int(to)), UInt64(Int(source)), GONE_LAST)
        else:
            inlined_assembly[
                copy + " [$0], [$1], " + size + ";",
                NoneType,
                constraints="r,l,~{memory}",
            ](UInt32(Int(to)), UInt64(Int(source)))
    else:
        comptime width = bytes // size_of[dtype]()
        to.unsafe_store[alignment=bytes](
            source.unsafe_load[width=width, alignment=bytes]()
        )


struct Slots[dtype: DType, team: Int, width: Int](TrivialRegisterPassable):
    """The slots of one thread, in the block's dynamic shared memory.

    - `team`: Threads of a block that share a row.
    - `width`: Elements a vector; 16 bytes of them, if they are to be fetched.
    """

    comptime Values = SIMD[Self.dtype, Self.width]
    comptime bytes = Self.width * size_of[Self.dtype]()
    comptime alignment = min(VECTOR_BYTES, Self.bytes)

    var first: Shared[Scalar[Self.dtype]]
    """The thread's first slot."""

    @inline(.always)
    def __init__(out self):
        self.first = external_memory[
            Scalar[Self.dtype],
            address_space=AddressSpace.SHARED,
            alignment=VECTOR_BYTES,
        ]().unsafe_offset(Int(thread_idx.x) * Self.width)

    @staticmethod
    @inline(.always)
    def place(slot: Int) -> Int:
        """Returns how many elements after a thread's first slot another one is.
        """
        return slot * Self.team * Self.width

    @inline(.always)
    def fetch(self, slot: Int, source: Source[Self.dtype]):
        """Has the vector at `source` brought into a slot, not waiting for it.
        """
        var at = Self.place(slot)
        fetch_vector(self.first.unsafe_offset(at), source)

    @inline(.always)
    def take(self, slot: Int) -> Self.Values:
        """Returns what is in a slot."""
        return self.first.unsafe_load[
            width=Self.width, alignment=Self.alignment
        ](Self.place(slot))

    @inline(.always)
    def keep(self, slot: Int, values: Self.Values):
        """Puts `values` into a slot."""
        self.first.unsafe_store[alignment=Self.alignment](
            Self.place(slot), values
        )


@inline(.always)
def wait_after(maximum: Scalar):
    """Waits until all that this thread has staged has landed, once it knows `maximum`.

    Without that the assembler has the loads into registers wait as well, to save registers: 8192 rows of 50257 took 1.1
    times as long.

    Args:
        maximum: Of several elements, thus not the signalling NaN that it is said to be waiting for.
    """
    comptime if is_nvidia_gpu():
        inlined_assembly[
            (
                "{ .reg .pred there; setp.ne.b32 there, $0, 0x7fa00000;"
                " @there cp.async.wait_all; }"
            ),
            NoneType,
            constraints="r,~{memory}",
        ](bitcast[DType.uint32](maximum.cast[DType.float32]()))


def kept_dtype[elements: DType]() -> DType:
    """Returns what is kept in shared memory: of logits of 16 bits themselves, of others float32, in the end exponentials.
    """
    return elements if size_of[elements]() == 2 else DType.float32


@inline(.always)
def wait_for_vectors():
    """Waits until all that this thread has had fetched has landed."""
    comptime if is_nvidia_gpu():
        inlined_assembly[
            "cp.async.wait_all;", NoneType, constraints="~{memory}"
        ]()
