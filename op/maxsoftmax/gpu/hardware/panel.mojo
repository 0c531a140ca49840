"""What lies side by side in memory, brought into a block's shared memory and back 16 bytes at a time, wherever it begins."""

from std.sys import size_of
from max.gpu import thread_idx
from max.gpu.sync import barrier

from ...io.rows import Source, Target, VECTOR_BYTES
from .slots import fetch_vector, wait_for_vectors
from .tree_reduction import Shared


@inline(.always)
def shift[dtype: DType, //](place: Source[dtype]) -> Int:
    """Returns how many elements a place is after a multiple of 16 bytes."""
    return Int(UInt64(Int(place)) % VECTOR_BYTES) // size_of[dtype]()


@inline(.always)
def fetch[
    dtype: DType, //, threads: Int
](to: Shared[Scalar[dtype]], source: Source[dtype], count: Int32):
    """Has the block bring elements and wait for all of them: parameters and arguments are as of `ask`.
    """
    ask[threads](to, source, count)
    wait_for_vectors()
    barrier()


@inline(.always)
def ask[
    dtype: DType, //, threads: Int
](to: Shared[Scalar[dtype]], source: Source[dtype], count: Int32):
    """Has the block bring `count` elements to where multiples of 16 bytes are what they are at the source.

    Parameters:
        dtype: Dtype of the elements.
        threads: Threads of the block.

    Args:
        to: Where the first goes.
        source: Where it is.
        count: How many they are.
    """
    comptime whole = Int32(VECTOR_BYTES // size_of[dtype]())
    var head = min(count, (whole - Int32(shift(source))) % whole)
    var vectors = (count - head) // whole
    var thread = Int32(thread_idx.x)
    for i in range(thread, vectors, Int32(threads)):
        var at = Int(head + i * whole)
        fetch_vector(to.unsafe_offset(at), source.unsafe_offset(at))
    if thread < head:
        to[unsafe_offset=Int(thread)] = source[unsafe_offset=Int(thread)]
    var last = Int(head + vectors * whole + thread)
    if last < Int(count):
        to[unsafe_offset=last] = source[unsafe_offset=last]


@inline(.always)
def write[
    dtype: DType, //, threads: Int
](to: Target[dtype], panel: Shared[Scalar[dtype]], count: Int32):
    """Has the block write `count` elements, 16 bytes at a time if they begin as far after a multiple of that here as there.

    Parameters:
        dtype: Dtype of the elements.
        threads: Threads of the block.

    Args:
        to: Where the first goes.
        panel: Where it is.
        count: How many they are.
    """
    comptime whole = Int32(VECTOR_BYTES // size_of[dtype]())
    var thread = Int32(thread_idx.x)
    if (Int(to) - Int(panel)) % VECTOR_BYTES != 0:
        for i in range(thread, count, Int32(threads)):
            to[unsafe_offset=Int(i)] = panel[unsafe_offset=Int(i)]
        return
    var head = min(count, (whole - Int32(shift(to))) % whole)
    var vectors = (count - head) // whole
    for i in range(thread, vectors, Int32(threads)):
        var at = Int(head + i * whole)
        to.unsafe_store[alignment=VECTOR_BYTES](
            at,
            panel.unsafe_load[width=Int(whole), alignment=VECTOR_BYTES](at),
        )
    if thread < head:
        to[unsafe_offset=Int(thread)] = panel[unsafe_offset=Int(thread)]
    var last = Int(head + vectors * whole + thread)
    if last < Int(count):
        to[unsafe_offset=last] = panel[unsafe_offset=last]
