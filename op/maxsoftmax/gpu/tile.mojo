"""The fast kernel of rows that fit on the chip: one read and one write an element.

A team of threads (a few lanes of a warp, a block, or the blocks of a cluster) asks for all of its row at once and keeps it
while maximum and sum are found: the first vectors of each thread in registers, the rest in shared memory, in slots that
no other thread looks at. Small teams, so that a multiprocessor has several rows at different stages: one is read while
another is summed and a third written. Float32 keeps the exponentials in place of the logits; types of 16 bits compute
them twice, which is cheaper than twice the registers.
"""

from std.math import ceildiv
from std.memory import bitcast, unsafe_stack_allocation
from std.sys import inlined_assembly, is_nvidia_gpu, size_of
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import DeviceContext, Dim, FuncAttribute
from max.gpu.memory import external_memory

from ..exponential import Scale
from ..online import Sum
from ..rows import Rows, Source, Target
from .cluster import Cluster, Pair
from .part import Part
from .stripe import VECTOR_BYTES
from .team import greater, largest_lane, maximum, team_reduce, total
from .tree_reduction import MAX_GRID, Shared


comptime GROUP = 4
"""Vectors in registers whose exponentials are summed before they are added to the others."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size)),
    `nvvm.minctasm`=SIMDLength(resident),
)
def tile_kernel[
    dtype: DType,
    block_size: Int,
    team: Int,
    vectors: Int,
    resident: Int,
    slotted: Bool,
    clustered: Bool,
    width: Int,
](y: Target[dtype], x: Source[dtype], rows: Int64, n: Int64):
    """Writes the softmax of `rows` rows of `n` contiguous elements.

    Parameters:
        dtype: Dtype of both tensors, of 4 bytes or 2.
        block_size: Threads a block.
        team: Threads of a block that share a row: less than a warp, a warp, or the whole block.
        vectors: Vectors of 16 bytes that a thread holds in registers.
        resident: Blocks a multiprocessor is to hold, which bounds the registers.
        slotted: Whether there are slots in shared memory for more.
        clustered: Whether the blocks of a cluster share a row.
        width: Elements a vector: as many as have 16 bytes, or 1.

    Args:
        y: Probabilities; may be the same memory as `x`.
        x: Logits.
        rows: How many.
        n: Length of each.
    """
    comptime P = Part[dtype, team, width]
    comptime exact = size_of[dtype]() > 2
    comptime Vector = SIMD[DType.float32, P.width]
    comptime teams = block_size // team
    comptime warps = max(1, team // WARP_SIZE)
    var maxima = unsafe_stack_allocation[
        warps, Float32, address_space=AddressSpace.SHARED
    ]()
    var sums = unsafe_stack_allocation[
        warps, Float32, address_space=AddressSpace.SHARED
    ]()
    var slots = external_memory[
        Scalar[dtype],
        address_space=AddressSpace.SHARED,
        alignment=VECTOR_BYTES,
    ]()
    var thread = Int(thread_idx.x)
    var lane = thread % team
    var cluster = Cluster[clustered]()
    var step = Int(grid_dim.x) // cluster.blocks * teams
    var first = Int(block_idx.x) // cluster.blocks * teams
    # Every team of a block goes through as many rounds, because of the barriers; some have no row in the last.
    for round in range(ceildiv(Int(rows) - first, step)):
        var row = first + round * step + thread // team
        var part = P(y, x, row, Int(n), lane, cluster.rank, cluster.blocks)
        if row >= Int(rows):
            part.clear()

        var raw = Array[P.Raw, vectors](fill=P.Raw(neg_inf[dtype]()))
        comptime for i in range(vectors):
            if part.has(i):
                raw[i] = part.load(i)
        comptime if slotted:
            for i in range(vectors, part.rounds()):
                if part.has(i):
                    _stage(slots, part, i - vectors, i)
        var edges = part.load_edges(x)

        var largest = raw[0]
        comptime for i in range(1, vectors):
            largest = maximum(largest, raw[i])
        comptime if slotted:
            _wait()
            for i in range(vectors, part.rounds()):
                if part.has(i):
                    largest = maximum(largest, _take(slots, part, i - vectors))
        var m = team_reduce[team, greater](
            maxima,
            thread,
            maximum(
                largest_lane(largest).cast[DType.float32](),
                largest_lane(edges),
            ) if width
            > 1 else largest_lane(largest).cast[DType.float32](),
        )
        var scale = Scale[exact](m)

        # Few terms are summed plainly; one running sum of all would round equal ones the same way each time.
        var sum = Sum[DType.float32, P.width]()
        comptime for i in range(0, vectors, GROUP):
            var terms = Vector(0)
            comptime for j in range(i, min(i + GROUP, vectors)):
                comptime if exact:
                    var e = scale.exp(raw[j].cast[DType.float32]())
                    raw[j] = e.cast[dtype]()
                    terms += e
                else:
                    raw[j] = _again(raw[j])
                    terms += scale.exp(raw[j].cast[DType.float32]())
            _add[exact](sum, terms)
        comptime if slotted:
            for i in range(vectors, part.rounds()):
                if part.has(i):
                    var e = scale.exp(
                        _take(slots, part, i - vectors).cast[DType.float32]()
                    )
                    comptime if exact:
                        _keep(slots, part, i - vectors, e.cast[dtype]())
                    _add[exact](sum, e)
        var pair = Pair(
            m,
            team_reduce[team, total](
                sums,
                thread,
                sum.collapse().value
                + (scale.exp(edges).reduce_add() if width > 1 else 0),
            ),
        )

        # What this block's exponentials are to be multiplied by to be in the row's unit.
        var rest = Float32(1)
        comptime if clustered:
            pair = cluster.merge[exact](round, pair)
            var of_row = Scale[exact](pair.m)
            comptime if exact:
                # In a part of nothing but -inf, all is 0.
                var nothing = m.eq(neg_inf[DType.float32]())
                rest = Float32(0) if nothing else scale.over(of_row)
            else:
                # What is computed anew can as well be in that unit.
                scale = of_row
        var factor = pair.reciprocal()

        comptime for i in range(vectors):
            if part.has(i):
                comptime if exact:
                    # One factor after the other: both together may be too small for a normal number.
                    part.store(
                        i, raw[i] * factor.cast[dtype]() * rest.cast[dtype]()
                    )
                else:
                    var e = scale.exp(_again(raw[i]).cast[DType.float32]())
                    part.store(i, (e * factor).cast[dtype]())
        comptime if slotted:
            for i in range(vectors, part.rounds()):
                if part.has(i):
                    var held = _take(slots, part, i - vectors)
                    comptime if exact:
                        part.store(
                            i, held * factor.cast[dtype]() * rest.cast[dtype]()
                        )
                    else:
                        var e = scale.exp(held.cast[DType.float32]())
                        part.store(i, (e * factor).cast[dtype]())
        comptime if width > 1:
            part.store_edges(y, scale.exp(edges) * factor * rest)


def tile[
    dtype: DType,
    block_size: Int,
    team: Int,
    vectors: Int,
    resident: Int,
    slotted: Bool = False,
    width: Int = VECTOR_BYTES // size_of[dtype](),
](y: Target[dtype], x: Source[dtype], rows: Rows, ctx: DeviceContext) raises:
    """Launches `tile_kernel` with a team for each row, within a block.

    Parameters:
        dtype: Dtype of both tensors.
        block_size: Threads a block.
        team: Threads that share a row.
        vectors: Vectors that a thread holds in registers.
        resident: Blocks a multiprocessor is to hold.
        slotted: Whether a row may be longer than `team * vectors` vectors.
        width: Elements a vector: as many as have 16 bytes, or 1.

    Args:
        y: Probabilities.
        x: Logits.
        rows: Rows along the last axis.
        ctx: The GPU and its stream.
    """
    comptime kernel = tile_kernel[
        dtype, block_size, team, vectors, resident, slotted, False, width
    ]
    var blocks = min(ceildiv(rows.count(), block_size // team), MAX_GRID)
    comptime if slotted:
        var bytes = _slot_bytes[dtype](rows.n, team, vectors)
        ctx.enqueue_function[kernel](
            y,
            x,
            Int64(rows.count()),
            Int64(rows.n),
            grid_dim=blocks,
            block_dim=block_size,
            shared_mem_bytes=bytes,
            func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                UInt32(bytes)
            ),
        )
    else:
        ctx.enqueue_function[kernel](
            y,
            x,
            Int64(rows.count()),
            Int64(rows.n),
            grid_dim=blocks,
            block_dim=block_size,
        )


def tile_cluster[
    dtype: DType, block_size: Int, vectors: Int, resident: Int
](
    y: Target[dtype],
    x: Source[dtype],
    rows: Rows,
    blocks: Int,
    ctx: DeviceContext,
) raises:
    """Launches `tile_kernel` with a cluster for each row.

    Parameters:
        dtype: Dtype of both tensors.
        block_size: Threads a block.
        vectors: Vectors that a thread holds in registers.
        resident: Blocks a multiprocessor is to hold.

    Args:
        y: Probabilities.
        x: Logits.
        rows: Rows along the last axis.
        blocks: Blocks that share a row, at most `MOST_BLOCKS`.
        ctx: The GPU and its stream.
    """
    comptime kernel = tile_kernel[
        dtype,
        block_size,
        block_size,
        vectors,
        resident,
        True,
        True,
        VECTOR_BYTES // size_of[dtype](),
    ]
    var bytes = _slot_bytes[dtype](ceildiv(rows.n, blocks), block_size, vectors)
    ctx.enqueue_function[kernel](
        y,
        x,
        Int64(rows.count()),
        Int64(rows.n),
        grid_dim=min(rows.count(), MAX_GRID // blocks) * blocks,
        block_dim=block_size,
        shared_mem_bytes=bytes,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(bytes)
        ),
        cluster_dim=Dim(blocks, 1, 1),
    )


def _slot_bytes[dtype: DType](n: Int, team: Int, vectors: Int) -> Int:
    """Returns the shared memory for what of `n` elements exceeds the registers of a team.
    """
    comptime width = VECTOR_BYTES // size_of[dtype]()
    var rounds = ceildiv(ceildiv(n, width), team)
    return max(0, rounds - vectors) * team * VECTOR_BYTES


@inline(.always)
def _add[
    width: SIMDLength, //, exact: Bool
](mut sum: Sum[DType.float32, width], terms: SIMD[DType.float32, width]):
    """Adds to a sum, with its compensation only where results are of more than 16 bits.
    """
    comptime if exact:
        sum.add(terms)
    else:
        sum.value += terms


@inline(.always)
def _stage[
    dtype: DType, team: Int, width: Int, //
](
    slots: Shared[Scalar[dtype]],
    part: Part[dtype, team, width],
    slot: Int,
    i: Int,
):
    """Has this thread's vector `i` brought into its `slot`, not waiting for it.
    """
    var at = part.place(slot)
    comptime if is_nvidia_gpu():
        inlined_assembly[
            "cp.async.cg.shared.global [$0], [$1], 16;",
            NoneType,
            constraints="r,l,~{memory}",
        ](
            UInt32(Int(slots.unsafe_offset(at))),
            UInt64(Int(part.source.unsafe_offset(part.place(i)))),
        )
    else:
        slots.unsafe_store[alignment=VECTOR_BYTES](at, part.load(i))


@inline(.always)
def _take[
    dtype: DType, team: Int, width: Int, //
](
    slots: Shared[Scalar[dtype]], part: Part[dtype, team, width], slot: Int
) -> Part[dtype, team, width].Raw:
    """Returns what is in a slot of this thread."""
    return slots.unsafe_load[width=part.width, alignment=VECTOR_BYTES](
        part.place(slot)
    )


@inline(.always)
def _keep[
    dtype: DType, team: Int, width: Int, //
](
    slots: Shared[Scalar[dtype]],
    part: Part[dtype, team, width],
    slot: Int,
    values: Part[dtype, team, width].Raw,
):
    """Puts `values` into a slot of this thread."""
    slots.unsafe_store[alignment=VECTOR_BYTES](part.place(slot), values)


@inline(.always)
def _wait():
    """Waits for all vectors that this thread has had brought to its slots."""
    comptime if is_nvidia_gpu():
        inlined_assembly[
            "cp.async.wait_all;", NoneType, constraints="~{memory}"
        ]()


@inline(.always)
def _again[
    dtype: DType, width: SIMDLength, //
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns `x` so that the compiler does not see that it is: what is computed of it anew is not kept instead, in
    twice the registers.
    """
    comptime words = width * size_of[dtype]() // 4
    comptime if is_nvidia_gpu() and words > 0:
        var bits = bitcast[DType.uint32, words](x)
        comptime for i in range(words):
            bits[i] = inlined_assembly[
                "mov.b32 $0, $1;", UInt32, constraints="=r,r"
            ](bits[i])
        return bitcast[dtype, width](bits)
    else:
        return x
