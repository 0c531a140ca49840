"""The fast kernel along an axis that is not the last, for what fits on the chip: one read and one write an element.

It is `tile` turned: the vectors of a thread are `inner` apart, and the lanes of a vector are rows of their own, each
with its own maximum and sum. See `column_part` for who takes what.
"""

from std.math import ceildiv
from std.sys import size_of
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from max.gpu.host import Dim
from max.gpu.sync import barrier

from ..exponential import Scale, logarithm
from ..finish import Finish
from ..online import Sum
from ..queue import Queue
from ..rows import Rows, Source, Target
from .cluster import Cluster, PORTABLE_BLOCKS, Pair
from .column_part import (
    COLUMN_THREADS,
    ColumnPart,
    Scratch,
    scratch_bytes,
)
from .overlap import follow, overlapped
from .part import again, anew
from .slots import Slots, wait_after
from .stripe import VECTOR_BYTES
from .team import greater, largest_lane, maximum, total
from .tile import GROUP, add, write_pair
from .warp_reduction import lanes_reduce


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(COLUMN_THREADS)),
    `nvvm.minctasm`=SIMDLength(resident),
)
def column_tile_kernel[
    dtype: DType,
    finish: Finish,
    lanes: Int,
    vectors: Int,
    resident: Int,
    slotted: Bool,
    clustered: Bool,
    width: Int,
](
    y: Target[dtype],
    x: Source[dtype],
    all: Int64,
    across: Int64,
    n: Int64,
    share: Int64,
):
    """Writes the softmax along the middle axis of a row-major (outer, n, inner) tensor.

    Parameters:
        dtype: Dtype of both tensors, of 4 bytes or 2.
        finish: What of each row is written.
        lanes: Vectors of columns that a block takes, a power of two; up to 32 if clustered.
        vectors: Vectors that a thread holds in registers.
        resident: Blocks a multiprocessor is to hold, which bounds the registers.
        slotted: Whether there are slots in shared memory for more.
        clustered: Whether the blocks of a cluster share the positions.
        width: Columns a vector: as many as have 16 bytes, or 1 if not slotted.

    Args:
        y: Probabilities; may be the same memory as `x`.
        x: Logits.
        all: Vectors of columns: outer · inner / width, less than 2^31.
        across: Those of a position: inner / width.
        n: Positions.
        share: Positions that a block takes.
    """
    comptime P = ColumnPart[dtype, lanes, width]
    comptime exact = size_of[dtype]() > 2
    # What is needed again is kept in place of the logits.
    comptime keeps = exact and finish == Finish.PROBABILITIES
    comptime Vector = SIMD[DType.float32, width]
    comptime S = Scale[exact, width]
    # With slots, one more vector in registers: of the last round, which not all threads have.
    comptime held = vectors + 1 if slotted else vectors
    # Shuffles move words of 4 bytes.
    comptime compared = dtype if P.bytes >= 4 else DType.float32
    var maxima = Scratch[lanes, width]()
    var sums = Scratch[lanes, width]()
    var thread = Int(thread_idx.x)
    var cluster = Cluster[clustered, lanes * width]()
    var part = P(
        y,
        x,
        UInt32(cluster.index * lanes + thread % lanes),
        UInt32(all),
        UInt32(across),
        Int(n),
        thread,
        cluster.rank,
        Int(share),
    )
    var last = max(vectors, part.rounds())

    follow()
    var slots = Slots[dtype, COLUMN_THREADS, width]()
    comptime if slotted:
        for i in range(vectors, last):
            slots.fetch(i - vectors, part.at(i))
    var raw = Array[P.Raw, held](fill=P.Raw(neg_inf[dtype]()))
    comptime for j in range(held):
        var i = j if j < vectors else last
        if part.has(i):
            raw[j] = part.load(i)

    var largest = raw[0]
    comptime for j in range(1, held):
        largest = maximum(largest, raw[j])
    comptime if slotted:
        wait_after(largest_lane(largest))
        for i in range(vectors, last):
            largest = maximum(largest, slots.take(i - vectors))
    var m = maxima.reduce[True](thread, largest.cast[compared]())
    var scale = S(m)

    # Few terms are summed plainly; one running sum of all would round equal ones the same way each time.
    var sum = Sum[DType.float32, width]()
    comptime for i in range(0, held, GROUP):
        var terms = Vector(0)
        comptime for j in range(i, min(i + GROUP, held)):
            comptime if exact:
                var e = scale.exp(raw[j].cast[DType.float32]())
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
    var pair: Pair[width]

    # What this block's exponentials are to be multiplied by to be in the rows' unit, or the lowered one.
    var rest = Vector(1)
    comptime if not clustered:
        pair = Pair(m, sums.reduce[False](thread, sum.value))
    else:
        _ = sums.gather[False](thread, sum.value)
        pair = merge_columns[exact](
            rebind[Cluster[True, lanes * width]](cluster), maxima, sums, thread
        )
        var of_row = S(pair.m)
        comptime if exact:
            # In a part of nothing but -inf, all is 0.
            rest = m.eq(neg_inf[DType.float32]()).select(
                Vector(0), scale.over_lowered(of_row)
            )
        else:
            # What is computed anew can as well be in that unit.
            scale = of_row
    comptime if finish == Finish.PAIR:
        if thread < lanes and cluster.rank == 0:
            var index = cluster.index * lanes + thread
            if index < Int(all):
                write_pair[exact](y, index * width, pair)
        return
    var factor = pair.reciprocal[exact and clustered]()
    comptime if finish == Finish.LOGARITHMS:
        factor = logarithm(pair.relative[exact]())
    var zero = sums.secret()

    part.forget()
    comptime for j in range(held):
        var i = j if j < vectors else last
        if part.has(i):
            part.store(
                i,
                _finished[finish, clustered](
                    raw[j], pair.m, scale, factor, rest, zero
                ),
            )
    comptime if slotted:
        for i in range(vectors, last):
            part.store(
                i,
                _finished[finish, clustered](
                    slots.take(i - vectors), pair.m, scale, factor, rest, zero
                ),
            )


def column_tile[
    dtype: DType,
    finish: Finish,
    lanes: Int,
    vectors: Int,
    resident: Int,
    slotted: Bool = False,
    width: Int = VECTOR_BYTES // size_of[dtype](),
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Launches `column_tile_kernel` with a block for every `lanes` vectors of columns.

    Parameters:
        dtype: Dtype of both tensors.
        finish: What of each row is written.
        lanes: Vectors of columns that a block takes.
        vectors: Vectors that a thread holds in registers.
        resident: Blocks a multiprocessor is to hold.
        slotted: Whether there may be more positions than registers for them.
        width: Columns a vector: as many as have 16 bytes, or 1.

    Args:
        y: Probabilities.
        x: Logits.
        rows: Rows along any axis; if `width` is not 1, all vectors are aligned, and `rows.inner` is a multiple of it.
        queue: Where kernels are launched.
    """
    comptime kernel = column_tile_kernel[
        dtype, finish, lanes, vectors, resident, slotted, False, width
    ]
    var across = rows.inner // width
    var total = rows.outer * across
    var bytes = 0
    comptime if slotted:
        bytes = _slot_bytes[lanes](rows.n, vectors)
    queue.launch[kernel](
        y,
        x,
        Int64(total),
        Int64(across),
        Int64(rows.n),
        Int64(rows.n),
        grid_dim=ceildiv(total, lanes),
        block_dim=COLUMN_THREADS,
        shared_mem_bytes=bytes,
        attributes=overlapped(),
    )


def column_tile_cluster[
    dtype: DType,
    finish: Finish,
    lanes: Int,
    vectors: Int,
    resident: Int,
    slotted: Bool = True,
    width: Int = VECTOR_BYTES // size_of[dtype](),
](
    y: Target[dtype],
    x: Source[dtype],
    rows: Rows,
    blocks: Int,
    queue: Queue,
) raises:
    """Launches `column_tile_kernel` with a cluster for every `lanes` vectors of columns.

    Parameters:
        dtype: Dtype of both tensors.
        finish: What of each row is written.
        lanes: Vectors of columns that a cluster takes.
        vectors: Vectors that a thread holds in registers.
        resident: Blocks a multiprocessor is to hold.
        slotted: Whether there may be more positions than registers for them.
        width: Columns a vector: as many as have 16 bytes, or 1.

    Args:
        y: Probabilities.
        x: Logits.
        rows: Rows as for `column_tile`.
        blocks: Blocks a cluster, at most `PORTABLE_BLOCKS`.
        queue: Where kernels are launched.
    """
    comptime kernel = column_tile_kernel[
        dtype, finish, lanes, vectors, resident, slotted, True, width
    ]
    var across = rows.inner // width
    var total = rows.outer * across
    var share = ceildiv(rows.n, blocks)
    var bytes = 0
    comptime if slotted:
        bytes = _slot_bytes[lanes](share, vectors)
    queue.launch[kernel](
        y,
        x,
        Int64(total),
        Int64(across),
        Int64(rows.n),
        Int64(share),
        grid_dim=ceildiv(total, lanes) * blocks,
        block_dim=COLUMN_THREADS,
        shared_mem_bytes=bytes,
        cluster_dim=Dim(blocks, 1, 1),
        attributes=overlapped(),
    )


def column_room[
    dtype: DType
](lanes: Int, vectors: Int, resident: Int, clustered: Bool, shared: Int) -> Int:
    """Returns how many positions fit in a block with slots, for use at compile time.

    Parameters:
        dtype: Dtype of the tensors.

    Args:
        lanes: Vectors of columns that it takes.
        vectors: Vectors that a thread holds in registers.
        resident: Blocks a multiprocessor is to hold.
        clustered: Whether it is one of a cluster.
        shared: Bytes of shared memory of a multiprocessor.
    """
    var width = VECTOR_BYTES // size_of[dtype]()
    var left = bytes_left(lanes, width, resident, clustered, shared)
    var slots = left // (COLUMN_THREADS * VECTOR_BYTES)
    # The last round is always in registers.
    return (vectors + slots + 1) * (COLUMN_THREADS // lanes) - 1


def bytes_left(
    lanes: Int, width: Int, resident: Int, clustered: Bool, shared: Int
) -> Int:
    """Returns how many bytes of shared memory a block of columns has for its slots, for use at compile time.

    Args:
        lanes: Vectors of columns that it takes.
        width: Columns a vector.
        resident: Blocks a multiprocessor is to hold.
        clustered: Whether it is one of a cluster.
        shared: Bytes of shared memory of a multiprocessor.
    """
    var static = 2 * scratch_bytes(lanes, width)
    if clustered:
        static += 2 * PORTABLE_BLOCKS * lanes * width * 4
    # The driver keeps 1 KiB of each block's, and alignment takes its part.
    return max(0, shared // resident - static - 1280)


def _slot_bytes[lanes: Int](share: Int, vectors: Int) -> Int:
    """Returns the shared memory for what of `share` positions exceeds the registers.
    """
    var slots = max(0, share // (COLUMN_THREADS // lanes) - vectors)
    return slots * COLUMN_THREADS * VECTOR_BYTES


@inline(.always)
def merge_columns[
    lanes: Int, width: Int, //, exact: Bool
](
    cluster: Cluster[True, lanes * width],
    maxima: Scratch[lanes, width],
    sums: Scratch[lanes, width],
    thread: Int,
) -> Pair[width]:
    """Returns the pairs of whole rows, the same bits for every thread of a lane in all of the cluster.

    Eight threads have a column: each combines the block's eight sums, sends the pair to another block, and then
    combines what eight blocks have sent.

    Parameters:
        lanes: Vectors of columns that the cluster takes.
        width: Columns a vector.
        exact: Of the scale that the sums are in.

    Args:
        cluster: This block's.
        maxima: With the columns' maxima in its first row.
        sums: With the sums of each warp.
        thread: This thread's index in the block.

    Returns:
        The pairs of all blocks.
    """
    comptime columns = lanes * width
    comptime all = columns * PORTABLE_BLOCKS
    comptime assert Scratch[lanes, width].rows == PORTABLE_BLOCKS
    var block = thread % PORTABLE_BLOCKS
    cluster.open()
    comptime for start in range(0, all, COLUMN_THREADS):
        if start + thread < all:
            var column = (start + thread) // PORTABLE_BLOCKS
            var d = sums.column[False](column, thread)
            if block < cluster.blocks:
                cluster.send(
                    block,
                    2 * (cluster.rank * columns + column),
                    maxima.first[unsafe_offset=column],
                    d,
                )
    cluster.close()
    comptime for start in range(0, all, COLUMN_THREADS):
        if start + thread < all:
            var column = (start + thread) // PORTABLE_BLOCKS
            var theirs = Pair[1](neg_inf[DType.float32](), 0)
            if block < cluster.blocks:
                var slot = cluster.mailbox.unsafe_offset(
                    2 * (block * columns + column)
                )
                theirs = Pair[1](slot[unsafe_offset=0], slot[unsafe_offset=1])
            var m = lanes_reduce[greater, PORTABLE_BLOCKS](theirs.m)
            var d = lanes_reduce[total, PORTABLE_BLOCKS](
                theirs.sum_over(Scale[exact](m))
            )
            # Nobody else has looked at this column's sums.
            if block == 0:
                sums.first[unsafe_offset=column] = m
            if block == 1:
                sums.first[unsafe_offset=sums.stride + column] = d
    barrier()
    return Pair(sums.take(0, thread), sums.take(1, thread))


@inline(.always)
def _finished[
    dtype: DType,
    width: SIMDLength,
    exact: Bool,
    //,
    finish: Finish,
    clustered: Bool,
](
    kept: SIMD[dtype, width],
    m: SIMD[DType.float32, width],
    scale: Scale[exact, width],
    factor: SIMD[DType.float32, width],
    rest: SIMD[DType.float32, width],
    zero: UInt32,
) -> SIMD[dtype, width]:
    """Returns the results of what was kept: exponentials where exact and probabilities are wanted, else logits.

    Parameters:
        dtype: Dtype of the tensors.
        width: Columns a vector.
        exact: Of the scale.
        finish: Probabilities or their logarithms.
        clustered: Whether `rest` may be other than 1.

    Args:
        kept: What a register or a slot holds.
        m: Maxima of the columns.
        scale: Of the columns.
        factor: 1 / d of the columns, or ln d.
        rest: What the block's exponentials are to be multiplied by to be in the columns' lowered units.
        zero: As for `anew`.
    """
    comptime if finish == Finish.LOGARITHMS:
        return ((kept.cast[DType.float32]() - m) - factor).cast[dtype]()
    elif exact:
        # One factor after the other: both together may be too small for a normal number.
        var e = kept * rest.cast[dtype]() if clustered else kept
        return e * factor.cast[dtype]()
    else:
        var e = scale.exp(anew(kept, zero).cast[DType.float32]())
        return (e * factor).cast[dtype]()
