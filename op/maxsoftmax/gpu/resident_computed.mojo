"""Logits that are computed as they are read, of rows that fit on the chip: each is computed once, and nothing of it is in
memory.

It is `resident` with other loads: a team of threads, or the blocks of a cluster, keeps what it computed until the sum is known,
in registers and, of longer rows, in shared memory.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    thread_idx,
)
from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from ..math.exponential import Scale, logarithm, quick_exp
from ..ops.finish import Finish
from ..io.logits import Logits
from ..math.online import Sum
from ..io.results import Results
from .hardware.cluster import Cluster, Pair
from .hardware.pdl import pdl_wait
from .hardware.slots import Slots
from .hardware.team import greater, largest_lane, maximum, team_reduce, total
from .resident import GROUP, add, in_unit


def kept_dtype[in_dtype: DType]() -> DType:
    """Returns what is kept in shared memory: of logits of 16 bits themselves, of others the exponentials.
    """
    return DType.float32 if size_of[in_dtype]() > 2 else in_dtype


def _resident(vectors: Int, width: Int, slotted: Bool) -> Int:
    """Returns how many threads a multiprocessor is to hold, which bounds the registers of each.

    Left alone, the assembler has more loads under way in half as many threads, of 8 vectors: 1.5 times as long at 8192
    columns of float32.

    Args:
        vectors: Vectors that a thread keeps in registers.
        width: Elements a vector.
        slotted: Whether it keeps others elsewhere.
    """
    if slotted:
        return 768
    return 1280 if vectors * max(width, 4) <= 16 else 1024


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size)),
    `nvvm.minctasm`=SIMDLength(
        _resident(vectors, width, slotted) // block_size
    ),
)
def resident_computed_kernel[
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
    finish: Finish,
    block_size: Int,
    team: Int,
    vectors: Int,
    clustered: Bool,
    slotted: Bool,
    width: Int,
](
    y: Results[Out, out_dtype, rank, axis, epilogue],
    x: Logits[Fusion, in_dtype, rank, axis, causal],
    sink: Logits[Sink, in_dtype, rank, axis, False],
    rows: Int64,
    n: Int64,
    share: Int64,
):
    """Writes the softmax of `rows` rows of `n` along the last axis, or its logarithm, a team of threads for each.

    Parameters:
        Fusion: What computes the logits.
        Sink: What computes the sinks.
        Out: What takes the probabilities.
        in_dtype: Dtype of the logits, of 4 bytes or 2.
        out_dtype: Dtype of the probabilities.
        rank: Number of dimensions.
        axis: The last axis.
        causal: Whether rows end at the diagonal.
        epilogue: Whether something takes the probabilities.
        has_sink: Whether there is one more logit a row, in the denominator only.
        finish: What of each row is written: an element for each of its own.
        block_size: Threads a block.
        team: Threads of a block that share a row: less than a warp, a warp, or the whole block.
        vectors: Vectors that a thread keeps in registers.
        clustered: Whether the blocks of a cluster share a row.
        slotted: Whether what exceeds the registers is kept in shared memory; otherwise `team * vectors` are no fewer
            than the team's share.
        width: Elements a vector, of which `n` is a multiple.

    Args:
        y: Probabilities, or their logarithms.
        x: Logits.
        sink: The additional logits.
        rows: How many.
        n: Length of each.
        share: Elements of a row that a block takes, whole vectors.
    """
    comptime exact = size_of[in_dtype]() > 2 or has_sink
    # Results of 16 bits need no better exponentials, but logits of 32 bits each their difference from the maximum.
    comptime quick = exact and size_of[out_dtype]() <= 2
    comptime Vector = SIMD[DType.float32, width]
    comptime teams = block_size // team
    comptime warps = max(1, team // WARP_SIZE)
    comptime step = team * width
    comptime Kept = Slots[kept_dtype[in_dtype](), team, width]
    # What is needed again is kept in place of the logits.
    comptime exponentials = finish == Finish.PROBABILITIES
    comptime keeps = exponentials and Kept.dtype == DType.float32
    var maxima = unsafe_stack_allocation[
        warps, Float32, address_space=AddressSpace.SHARED
    ]()
    var sums = unsafe_stack_allocation[
        warps, Float32, address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var cluster = Cluster[clustered]()
    var index = cluster.index * teams + thread // team
    var start = cluster.rank * Int(share)
    var first = start + thread % team * width
    var row = x.row(index, 0)
    var end = min(Int(n), start + Int(share))
    comptime if teams > 1:
        if index >= Int(rows):
            # Its threads only keep the others company at the barriers.
            end = 0
    var length = min(row.length, end)

    @inline(.always)
    def load(i: Int) {imm} -> Vector:
        """Returns the thread's vector `i`, -inf where it has none."""
        if first + i * step < length:
            return row.load[width, width](first + i * step).cast[
                DType.float32
            ]()
        return Vector(neg_inf[DType.float32]())

    pdl_wait()
    var held = Array[Vector, vectors](fill=0)
    comptime for j in range(vectors):
        held[j] = load(j)
    var largest = held[0]
    comptime for j in range(1, vectors):
        largest = maximum(largest, held[j])
    # In the last, some of the team may have nothing to take.
    var rounds = ceildiv(max(0, length - start), step)
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
    var m = team_reduce[team, greater](maxima, thread, largest_lane(largest))
    var scale = Scale[exact](m)
    # Few terms are summed plainly; one running sum of all would round equal ones the same way each time.
    var sum = Sum[DType.float32, width]()

    @inline(.always)
    def exponential(logits: Vector) {imm} -> Vector:
        comptime if quick:
            return quick_exp(logits, scale.m)
        else:
            return scale.exp(logits)

    comptime for i in range(0, vectors, GROUP):
        var terms = Vector(0)
        comptime for j in range(i, min(i + GROUP, vectors)):
            # The same way for all of a team: rows may be much shorter than what it has room for.
            if start + j * step < length:
                var e = exponential(held[j])
                comptime if exponentials:
                    held[j] = e
                terms += e
            elif exponentials:
                held[j] = 0
        add[exact](sum, terms)
    comptime if slotted:
        for i in range(vectors, rounds):
            var e = exponential(slots.take(i - vectors).cast[DType.float32]())
            comptime if keeps:
                slots.keep(i - vectors, e.cast[Kept.dtype]())
            add[exact](sum, e)
    var d = team_reduce[team, total](sums, thread, sum.collapse().value)

    # What the exponentials are to be multiplied by to be in the unit that the sum is in, or the lowered one.
    var rest = Float32(1)
    var pair = Pair(m, d)
    comptime if clustered or has_sink or not exponentials:
        pair = Pair(m, in_unit[quick](d, scale))
        comptime if clustered:
            pair = cluster.merge[exact](pair)
        comptime if has_sink:
            var logit = neg_inf[DType.float32]()
            if index < Int(rows):
                logit = sink.row(index, 0).load[1](0)[0].cast[DType.float32]()
            pair = pair.joined[exact](logit)
        var of_row = Scale[exact](pair.m)
        comptime if exact:
            rest = in_unit[quick](scale.over_lowered(of_row), scale)
        else:
            rest = scale.over(of_row)
        if m == neg_inf[DType.float32]():
            rest = 0
    var factor: Float32
    comptime if exponentials:
        factor = pair.reciprocal[exact and (clustered or has_sink)]()
    else:
        factor = logarithm(pair.relative[exact]())
    if x.masked:
        if pair.m == neg_inf[DType.float32]():
            # All exponentials are as good as 0, and nothing is left of them.
            factor = 0
            pair.m = 0
    var target = y.row(index, 0)

    @inline(.always)
    def store(i: Int, values: Vector) {imm}:
        """Writes what becomes of the thread's exponentials, or logits, `i`."""
        if first + i * step < end:
            var result: Vector
            comptime if exponentials:
                result = values * rest * factor
            else:
                result = (values - pair.m) - factor
            target.store[width](first + i * step, result)

    comptime for j in range(vectors):
        store(j, held[j])
    comptime if slotted:
        for i in range(vectors, rounds):
            var kept = slots.take(i - vectors).cast[DType.float32]()
            comptime if keeps or not exponentials:
                store(i, kept)
            else:
                store(i, exponential(kept))
        for i in range(max(vectors, rounds), ceildiv(end - start, step)):
            store(i, 0 if exponentials else neg_inf[DType.float32]())
