"""Logits that are computed as they are read, of columns that fit on the chip: each is computed once, and nothing of it is in
memory.

It is `column_tile` with the loads and stores of `fused_tile`. See `column_part` for what columns are, and who takes what.
"""

from std.math import ceildiv
from std.sys import size_of
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from ..exponential import Scale
from ..logits import Logits
from ..online import Sum
from ..results import Results
from .cluster import Cluster, Pair
from .column_part import COLUMN_THREADS, Scratch
from .column_tile import bytes_left, merge_columns
from .fused_tile import kept_dtype
from .overlap import follow
from .slots import Slots
from .team import maximum
from .tile import GROUP, add


def _resident[dtype: DType](vectors: Int, slotted: Bool) -> Int:
    """Returns how many blocks a multiprocessor is to hold, which bounds the registers and the slots of each.

    H200, 16×1024×1024 scaled along axis 1: float32 48 µs by three, 54 by two; bfloat16 38 and 30.
    """
    if not slotted:
        # By the element, the addresses are as many as the elements.
        return 4 if vectors <= 8 else 3
    return 3 if size_of[dtype]() > 2 else 2


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(COLUMN_THREADS)),
    `nvvm.minctasm`=SIMDLength(_resident[in_dtype](vectors, slotted)),
)
def fused_column_tile_kernel[
    Fusion: InputFusion,
    Sink: InputFusion,
    Out: OutputFusion,
    in_dtype: DType,
    out_dtype: DType,
    rank: Int,
    axis: Int,
    causal: Bool,
    epilogue: Bool,
    has_sink: Bool,
    lanes: Int,
    vectors: Int,
    slotted: Bool,
    clustered: Bool,
    width: Int,
](
    y: Results[Out, out_dtype, rank, axis, epilogue],
    x: Logits[Fusion, in_dtype, rank, axis, causal],
    sink: Logits[Sink, in_dtype, rank, axis, False],
    all: Int64,
    across: Int64,
    n: Int64,
    share: Int64,
):
    """Writes the softmax along an axis that is not the last.

    Parameters:
        Fusion: What computes the logits.
        Sink: What computes the sinks.
        Out: What takes the probabilities.
        in_dtype: Dtype of the logits, of 4 bytes or 2.
        out_dtype: Dtype of the probabilities.
        rank: Number of dimensions.
        axis: The axis.
        causal: Whether rows end at the diagonal.
        epilogue: Whether something takes the probabilities.
        has_sink: Whether there is one more logit a row, in the denominator only.
        lanes: Vectors of columns that a block takes, a power of two; up to 32 if clustered.
        vectors: Vectors that a thread keeps in registers.
        slotted: Whether what exceeds the registers is kept in shared memory; otherwise the block's share is no more than
            they hold.
        clustered: Whether the blocks of a cluster share the positions.
        width: Columns a vector, of which the last dimension is a multiple.

    Args:
        y: Probabilities.
        x: Logits.
        sink: The additional logits.
        all: Vectors of columns, less than 2^31.
        across: Those of a position.
        n: Positions.
        share: Positions that a block takes.
    """
    comptime exact = size_of[in_dtype]() > 2 or has_sink
    comptime S = Scale[exact, width]
    comptime Vector = SIMD[DType.float32, width]
    comptime deep = COLUMN_THREADS // lanes
    comptime Kept = Slots[kept_dtype[in_dtype](), COLUMN_THREADS, width]
    comptime keeps = Kept.dtype == DType.float32
    comptime none = Vector(neg_inf[DType.float32]())
    var maxima = Scratch[lanes, width]()
    var sums = Scratch[lanes, width]()
    var thread = Int(thread_idx.x)
    var cluster = Cluster[clustered, lanes * width]()
    var index = UInt32(cluster.index * lanes + thread % lanes)
    var outer = index // UInt32(across)
    var inner = Int(index - outer * UInt32(across)) * width
    var row = x.row(Int(outer), inner)
    var start = cluster.rank * Int(share)
    var first = start + thread // lanes
    # Lanes beyond the last column only keep the others company at the barriers.
    var end = min(Int(n), start + Int(share)) if index < UInt32(all) else 0
    var length = min(row.length, end)

    @inline(.always)
    def load(i: Int) {imm} -> Vector:
        """Returns the thread's vector `i`, -inf where it has none."""
        if first + i * deep < length:
            return row.load[width, width](first + i * deep).cast[
                DType.float32
            ]()
        return none

    follow()
    var held = Array[Vector, vectors](fill=0)
    comptime for j in range(vectors):
        held[j] = load(j)
    var largest = held[0]
    comptime for j in range(1, vectors):
        largest = maximum(largest, held[j])
    # In the last, some threads of the lane may have nothing to take.
    var rounds = ceildiv(max(0, length - start), deep)
    var slots = Kept()
    comptime if slotted:
        for i in range(vectors, rounds, vectors):
            # As many at a time as there are registers for, all under way at once.
            var next = Array[Vector, vectors](fill=0)
            comptime for j in range(vectors):
                next[j] = load(i + j)
            comptime for j in range(vectors):
                if i + j < rounds:
                    largest = maximum(largest, next[j])
                    slots.keep(i + j - vectors, next[j].cast[Kept.dtype]())
    var m = maxima.reduce[True](thread, largest)
    var scale = S(m)

    # Few terms are summed plainly; one running sum of all would round equal ones the same way each time.
    var sum = Sum[DType.float32, width]()
    comptime for i in range(0, vectors, GROUP):
        var terms = Vector(0)
        comptime for j in range(i, min(i + GROUP, vectors)):
            held[j] = scale.exp(held[j])
            terms += held[j]
        add[exact](sum, terms)
    comptime if slotted:
        for i in range(vectors, rounds):
            var e = scale.exp(slots.take(i - vectors).cast[DType.float32]())
            comptime if keeps:
                slots.keep(i - vectors, e.cast[Kept.dtype]())
            add[exact](sum, e)

    # What the exponentials are to be multiplied by to be in the unit that the sum is in, or the lowered one.
    var rest = Vector(1)
    var pair: Pair[width]
    comptime if clustered:
        _ = sums.gather[False](thread, sum.value)
        pair = merge_columns[exact](
            rebind[Cluster[True, lanes * width]](cluster), maxima, sums, thread
        )
    else:
        pair = Pair(m, sums.reduce[False](thread, sum.value))
    comptime if has_sink:
        var logits = none
        if index < UInt32(all):
            logits = (
                sink.row(Int(outer), inner)
                .load[width, width](0)
                .cast[DType.float32]()
            )
        pair = pair.joined[exact](logits)
    comptime if clustered or has_sink:
        var of_row = S(pair.m)
        comptime if exact:
            rest = scale.over_lowered(of_row)
        else:
            rest = scale.over(of_row)
        # In a part of nothing but -inf, all is 0.
        rest = m.eq(none).select(Vector(0), rest)
    var factor = pair.reciprocal[exact and (clustered or has_sink)]()
    if x.masked:
        # All exponentials are as good as 0, and nothing is left of them.
        factor = pair.m.eq(none).select(Vector(0), factor)
    var target = y.row(Int(outer), inner)

    @inline(.always)
    def store(i: Int, exponentials: Vector) {imm}:
        if first + i * deep < end:
            target.store[width](
                first + i * deep,
                (exponentials * rest * factor).cast[out_dtype](),
            )

    comptime for j in range(vectors):
        store(j, held[j])
    comptime if slotted:
        for i in range(vectors, rounds):
            var kept = slots.take(i - vectors).cast[DType.float32]()
            comptime if keeps:
                store(i, kept)
            else:
                store(i, scale.exp(kept))
        for i in range(max(vectors, rounds), ceildiv(end - start, deep)):
            store(i, 0)


def fused_column_room[
    dtype: DType
](lanes: Int, vectors: Int, width: Int, clustered: Bool, shared: Int) -> Int:
    """Returns how many positions fit in a block with slots, for use at compile time.

    Parameters:
        dtype: Dtype of the logits.

    Args:
        lanes: Vectors of columns that it takes.
        vectors: Vectors that a thread keeps in registers.
        width: Columns a vector.
        clustered: Whether it is one of a cluster.
        shared: Bytes of shared memory of a multiprocessor.
    """
    var left = bytes_left(
        lanes, width, _resident[dtype](vectors, True), clustered, shared
    )
    var slots = left // fused_slot_bytes[dtype](width)
    return (vectors + slots) * (COLUMN_THREADS // lanes)


def fused_slot_bytes[dtype: DType](width: Int) -> Int:
    """Returns the shared memory for one vector of each thread of a block."""
    return COLUMN_THREADS * width * size_of[kept_dtype[dtype]()]()
