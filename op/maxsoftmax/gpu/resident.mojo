"""The fast kernel of rows that fit on the chip: one read and one write an element.

A team of threads (a few lanes of a warp, a block, or the blocks of a cluster) asks for all of its row at once and keeps it
while maximum and sum are found: the first vectors of each thread in registers, the rest in shared memory, in slots that
no other thread looks at. Small teams, so that a multiprocessor has several rows at different stages: one is read while
another is summed and a third written. Float32 keeps the exponentials in place of the logits; types of 16 bits compute
them twice, which is cheaper than twice the registers.
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
from max.gpu.host import Dim

from ..math.exponential import Scale, logarithm, quick_exp
from ..ops.finish import Finish
from ..math.online import Sum
from ..queue import Queue
from ..io.rows import Rows, Source, Target
from .hardware.cluster import Cluster, Pair
from .hardware.pdl import pdl_wait, pdl_wait_with, pdl_attributes
from .partition.row import LINE_BYTES, Part, again
from .hardware.slots import Slots, wait_after
from .partition.stripe import VECTOR_BYTES
from .hardware.team import greater, largest_lane, maximum, team_reduce, total


comptime GROUP = 4
"""Vectors in registers whose exponentials are summed before they are added to the others."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size)),
    `nvvm.minctasm`=SIMDLength(min_blocks_per_sm),
)
def resident_kernel[
    dtype: DType,
    finish: Finish,
    block_size: Int,
    team: Int,
    vectors: Int,
    min_blocks_per_sm: Int,
    slotted: Bool,
    clustered: Bool,
    width: Int,
](y: Target[dtype], x: Source[dtype], rows: Int64, n: Int64, share: Int64):
    """Writes the softmax of `rows` rows of `n` contiguous elements.

    Parameters:
        dtype: Dtype of both tensors, of 4 bytes or 2.
        finish: What of each row is written.
        block_size: Threads a block.
        team: Threads of a block that share a row: less than a warp, a warp, or the whole block.
        vectors: Vectors of 16 bytes that a thread holds in registers.
        min_blocks_per_sm: Blocks a multiprocessor is to hold, which bounds the registers.
        slotted: Whether there are slots in shared memory for more.
        clustered: Whether the blocks of a cluster share a row.
        width: Elements a vector: as many as have 16 bytes, or 1.

    Args:
        y: Probabilities, or what else is written; may be the same memory as `x`.
        x: Logits.
        rows: How many.
        n: Length of each.
        share: Vectors of a row that a block takes.
    """
    comptime P = Part[dtype, team, width]
    comptime exact = size_of[dtype]() > 2
    # What is needed again is kept in place of the logits.
    comptime keeps = exact and finish == Finish.PROBABILITIES
    # Nothing else is read or written meanwhile that exponentials could hide behind: at 50257 columns of float32 the
    # exact ones kept reading at 0.76 of its rate.
    comptime quick = exact and finish == Finish.PAIR
    comptime Vector = SIMD[DType.float32, P.width]
    comptime teams = block_size // team
    comptime warps = max(1, team // WARP_SIZE)
    # With slots, one more vector in registers: of the last round, which not all threads have.
    comptime held = vectors + 1 if slotted else vectors
    var maxima = unsafe_stack_allocation[
        warps, Float32, address_space=AddressSpace.SHARED
    ]()
    var sums = unsafe_stack_allocation[
        warps, Float32, address_space=AddressSpace.SHARED
    ]()
    var slots = Slots[dtype, team, P.width]()
    var thread = Int(thread_idx.x)
    var lane = thread % team
    var cluster = Cluster[clustered]()
    var row = cluster.index * teams + thread // team
    var part = P(y, x, row, Int(n), lane, cluster.rank, Int(share))
    comptime if teams > 1:
        if row >= Int(rows):
            # Its threads only keep the others company at the barriers.
            part.clear()
    var last = max(vectors, part.rounds())

    comptime if clustered:
        # Several waves of long rows hide it: 256×128256 bfloat16 took 38.6 µs with the other, 37.6 with this.
        pdl_wait()
    else:
        pdl_wait_with(Int(part.source) | Int(part.ahead) << 56)
    comptime if slotted:
        for i in range(vectors, last):
            slots.stage(i - vectors, part, i)
    var raw = Array[P.Raw, held](fill=P.Raw(neg_inf[dtype]()))
    comptime for j in range(held):
        var i = j if j < vectors else last
        if part.has(i):
            raw[j] = part.load(i)
    var edges = part.load_edges(x)

    var largest = raw[0]
    comptime for j in range(1, held):
        largest = maximum(largest, raw[j])
    comptime if slotted:
        wait_after(largest_lane(largest))
        for i in range(vectors, last):
            largest = maximum(largest, slots.take(i - vectors))
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
    comptime for i in range(0, held, GROUP):
        var terms = Vector(0)
        comptime for j in range(i, min(i + GROUP, held)):
            comptime if exact:
                var logits = raw[j].cast[DType.float32]()
                comptime if quick:
                    terms += quick_exp(logits, scale.m)
                else:
                    var e = scale.exp(logits)
                    comptime if keeps:
                        raw[j] = e.cast[dtype]()
                    terms += e
            else:
                raw[j] = again(raw[j])
                terms += scale.exp(raw[j].cast[DType.float32]())
        add[exact](sum, terms)
    comptime if slotted:
        for i in range(vectors, last):
            var e = scale.exp(slots.take(i - vectors).cast[DType.float32]())
            comptime if keeps:
                slots.keep(i - vectors, e.cast[dtype]())
            add[exact](sum, e)
    var pair = Pair(
        m,
        team_reduce[team, total](
            sums,
            thread,
            in_unit[quick](sum.collapse().value, scale)
            + (scale.exp(edges).reduce_add() if width > 1 else 0),
        ),
    )

    # What this block's exponentials are to be multiplied by to be in the row's unit, or the lowered one.
    var rest = Float32(1)
    comptime if clustered:
        pair = cluster.merge[exact](pair)
        var of_row = Scale[exact](pair.m)
        comptime if exact:
            # In a part of nothing but -inf, all is 0.
            var nothing = m.eq(neg_inf[DType.float32]())
            rest = Float32(0) if nothing else scale.over_lowered(of_row)
        else:
            # What is computed anew can as well be in that unit.
            scale = of_row
    comptime if finish == Finish.PAIR:
        if lane == 0 and cluster.rank == 0 and row < Int(rows):
            write_pair[exact](y, row, pair)
        return
    var factor = pair.reciprocal[exact and clustered]()
    comptime if finish == Finish.LOGARITHMS:
        factor = logarithm(pair.relative[exact]())

    @inline(.always)
    def finished[
        width: SIMDLength
    ](kept: SIMD[dtype, width]) {imm} -> SIMD[dtype, width]:
        comptime if finish == Finish.LOGARITHMS:
            return ((kept.cast[DType.float32]() - pair.m) - factor).cast[
                dtype
            ]()
        elif exact:
            # One factor after the other: both together may be too small for a normal number.
            return kept * rest.cast[dtype]() * factor.cast[dtype]()
        else:
            var e = scale.exp(kept.cast[DType.float32]())
            return (e * factor).cast[dtype]()

    comptime for aligned in [True, False]:
        if part.aligned == aligned:
            comptime for j in range(held):
                var i = j if j < vectors else last
                if part.has(i):
                    comptime if exact:
                        part.store[aligned](i, finished(raw[j]))
                    else:
                        part.store[aligned](i, finished(again(raw[j])))
            comptime if slotted:
                for i in range(vectors, last):
                    part.store[aligned](i, finished(slots.take(i - vectors)))
    comptime if width > 1:
        comptime if finish == Finish.LOGARITHMS:
            part.store_edges(y, (edges - pair.m) - factor)
        else:
            part.store_edges(y, scale.exp(edges) * rest * factor)


@inline(.always)
def in_unit[
    exact: Bool, //, quick: Bool
](sum: Float32, scale: Scale[exact]) -> Float32:
    """Returns a sum in the unit of `scale`, where `quick` exponentials are in that of its maximum.

    Parameters:
        exact: Of the scale.
        quick: Whether it is not in that unit already.

    Args:
        sum: Of exponentials.
        scale: The scale.
    """
    comptime if quick:
        return sum * scale.exp(scale.m)
    else:
        return sum


@inline(.always)
def write_pair[
    dtype: DType, width: SIMDLength, //, exact: Bool
](y: Target[dtype], row: Int, pair: Pair[width]):
    """Writes the pairs of `width` rows.

    Parameters:
        dtype: Of the logits.
        width: How many.
        exact: Of the scale that the sums are in.

    Args:
        y: Where those of row 0 are, in float32 whatever its type says.
        row: The first of the rows.
        pair: What to write.
    """
    var to = y.unsafe_bitcast[Float32]().unsafe_offset(2 * row)
    var d = pair.relative[exact]()
    comptime for i in range(Int(width)):
        to[unsafe_offset=2 * i] = pair.m[i]
        to[unsafe_offset=2 * i + 1] = d[i]


def resident[
    dtype: DType,
    finish: Finish,
    block_size: Int,
    team: Int,
    vectors: Int,
    min_blocks_per_sm: Int,
    slotted: Bool = False,
    width: Int = VECTOR_BYTES // size_of[dtype](),
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Launches `resident_kernel` with a team for each row, within a block.

    Parameters:
        dtype: Dtype of both tensors.
        finish: What of each row is written.
        block_size: Threads a block.
        team: Threads that share a row.
        vectors: Vectors that a thread holds in registers.
        min_blocks_per_sm: Blocks a multiprocessor is to hold.
        slotted: Whether a row may be longer than `team * vectors` vectors.
        width: Elements a vector: as many as have 16 bytes, or 1.

    Args:
        y: Probabilities.
        x: Logits.
        rows: Rows along the last axis.
        queue: Where kernels are launched.
    """
    comptime kernel = resident_kernel[
        dtype,
        finish,
        block_size,
        team,
        vectors,
        min_blocks_per_sm,
        slotted,
        False,
        width,
    ]
    var blocks = ceildiv(rows.count(), block_size // team)
    comptime if slotted:
        var bytes = _slot_bytes(rows.n // width, team, vectors)
        queue.launch[kernel](
            y,
            x,
            Int64(rows.count()),
            Int64(rows.n),
            Int64(rows.n),
            grid_dim=blocks,
            block_dim=block_size,
            shared_mem_bytes=bytes,
            attributes=pdl_attributes(),
        )
    else:
        queue.launch[kernel](
            y,
            x,
            Int64(rows.count()),
            Int64(rows.n),
            Int64(rows.n),
            grid_dim=blocks,
            block_dim=block_size,
            attributes=pdl_attributes(),
        )


def resident_cluster[
    dtype: DType,
    finish: Finish,
    block_size: Int,
    vectors: Int,
    min_blocks_per_sm: Int,
](
    y: Target[dtype],
    x: Source[dtype],
    rows: Rows,
    blocks: Int,
    queue: Queue,
) raises:
    """Launches `resident_kernel` with a cluster for each row.

    Parameters:
        dtype: Dtype of both tensors.
        finish: What of each row is written.
        block_size: Threads a block.
        vectors: Vectors that a thread holds in registers.
        min_blocks_per_sm: Blocks a multiprocessor is to hold.

    Args:
        y: Probabilities.
        x: Logits.
        rows: Rows along the last axis.
        blocks: Blocks that share a row, at most `PORTABLE_BLOCKS`.
        queue: Where kernels are launched.
    """
    comptime kernel = resident_kernel[
        dtype,
        finish,
        block_size,
        block_size,
        vectors,
        min_blocks_per_sm,
        True,
        True,
        VECTOR_BYTES // size_of[dtype](),
    ]
    comptime line = LINE_BYTES // size_of[dtype]()
    comptime in_line = LINE_BYTES // VECTOR_BYTES
    var share = ceildiv(rows.n, line * blocks) * in_line
    var bytes = _slot_bytes(share, block_size, vectors)
    queue.launch[kernel](
        y,
        x,
        Int64(rows.count()),
        Int64(rows.n),
        Int64(share),
        grid_dim=rows.count() * blocks,
        block_dim=block_size,
        shared_mem_bytes=bytes,
        cluster_dim=Dim(blocks, 1, 1),
        attributes=pdl_attributes(),
    )


def _slot_bytes(share: Int, team: Int, vectors: Int) -> Int:
    """Returns the shared memory for what of `share` vectors exceeds the registers of a team.
    """
    return max(0, share // team - vectors) * team * VECTOR_BYTES


@inline(.always)
def add[
    width: SIMDLength, //, exact: Bool
](mut sum: Sum[DType.float32, width], terms: SIMD[DType.float32, width]):
    """Adds to a sum, with its compensation only where results are of more than 16 bits.
    """
    comptime if exact:
        sum.add(terms)
    else:
        sum.value += terms
