"""The fast backward kernel along an axis that is not the last, for what fits on the chip: two reads and one write an element.

It is `resident_strided` with two inputs and a single sum, as `resident_backward` is `resident`.
"""

from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from max.gpu.host import Dim
from max.gpu.sync import barrier

from ..io.memory import MemorySource, MemoryTarget
from ..io.rows import Rows, VECTOR_BYTES
from ..math.gradient import Gradient
from ..math.online import Sum
from ..queue import Queue
from .hardware.cluster import Cluster, PORTABLE_BLOCKS
from .hardware.pdl import pdl_wait, pdl_attributes
from .hardware.slots import Slots, wait_after
from .hardware.team import largest_lane, maximum, total
from .hardware.warp_reduction import lanes_reduce
from .partition.row import anew
from .partition.deal import COLUMN_THREADS
from .partition.strided import Scratch, scratch_bytes, StridedPart
from .resident import add
from .resident_strided import GROUP


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(COLUMN_THREADS)),
    `nvvm.minctasm`=SIMDLength(min_blocks_per_sm),
)
def resident_strided_backward_kernel[
    dtype: DType,
    log: Bool,
    lanes: Int,
    vectors: Int,
    min_blocks_per_sm: Int,
    slotted: Bool,
    clustered: Bool,
    width: Int,
    dealt: Bool,
](
    dx: MemoryTarget[dtype],
    y: MemorySource[dtype],
    dy: MemorySource[dtype],
    columns: Int64,
    inner: Int64,
    n: Int64,
    share: Int64,
    zero: UInt32,
):
    """Writes the gradient along the middle axis of row-major (outer, n, inner) tensors.

    Parameters:
        dtype: Dtype of all tensors, of 4 bytes or 2.
        log: Whether y are logarithms of probabilities.
        lanes: Vectors of columns that a block takes, a power of two; up to 32 if clustered.
        vectors: Vectors of each input that a thread holds in registers.
        min_blocks_per_sm: Blocks a multiprocessor is to hold, which bounds the registers.
        slotted: Whether there are slots in shared memory for more.
        clustered: Whether the blocks of a cluster share the positions.
        width: Columns a vector: as many as have 16 bytes.
        dealt: As of `StridedPart`.

    Args:
        dx: Gradient of the logits.
        y: Results of the forward op.
        dy: Their gradient.
        columns: How many there are, less than 2^31.
        inner: Those of a position.
        n: Positions.
        share: Positions that a block takes.
        zero: As for `anew`.
    """
    comptime exact = size_of[dtype]() > 2
    comptime F = DType.float32
    comptime G = Gradient[log, exact, F, width]
    comptime Raw = SIMD[dtype, width]
    # With slots, one more vector in registers: of the last round, which not all threads have.
    comptime held = vectors + 1 if slotted else vectors
    var scratch = Scratch[lanes, width, dealt]()
    var thread = Int(thread_idx.x)
    var cluster = Cluster[clustered, max(1, lanes * width // 2)]()
    var part = StridedPart[lanes, width, True, dealt](
        UInt32(cluster.index),
        UInt32(columns),
        UInt32(inner),
        Int(n),
        thread,
        cluster.rank,
        Int(share),
    )
    var of_y = part.source(y)
    var of_dy = part.source(dy)
    # The rounds from `vectors` to this one are in slots: results in the even ones, gradients in the odd ones.
    var last = max(vectors, part.full_rounds())

    pdl_wait()
    var slots = Slots[dtype, COLUMN_THREADS, width]()
    comptime if slotted:
        for i in range(vectors, last):
            of_y.fetch(slots, 2 * (i - vectors), i)
            of_dy.fetch(slots, 2 * (i - vectors) + 1, i)
    var results = Array[Raw, held](fill=Raw(0))
    var gradients = Array[Raw, held](fill=Raw(0))
    comptime for j in range(held):
        var i = j if j < vectors else last
        if part.has(i):
            results[j] = of_y.load(i, part.left(i), results[j])
            gradients[j] = of_dy.load(i, part.left(i), gradients[j])

    var sum = Sum[F, width]()
    add_terms[log](sum, results, gradients)
    comptime if slotted:
        var seen = sum.value
        comptime if log:
            # The sum knows nothing of the results.
            comptime for j in range(held):
                seen = maximum(seen, results[j].cast[F]())
        wait_after(largest_lane(seen))
        for i in range(vectors, last):
            add[exact](
                sum,
                G.term(
                    slots.take(2 * (i - vectors)).cast[F](),
                    slots.take(2 * (i - vectors) + 1).cast[F](),
                ),
            )
    var dot: SIMD[F, width]
    comptime if clustered:
        _ = scratch.gather[False](thread, sum.value)
        dot = sum_columns(
            rebind[Cluster[True, lanes * width // 2]](cluster), scratch, thread
        )
    else:
        dot = scratch.reduce[False](thread, sum.value)
    var gradient = G(dot)

    var target = part.target(dx)
    target.forget()
    comptime for j in range(held):
        var i = j if j < vectors else last
        if part.has(i):
            comptime if not exact or log:
                # Widened, or with their exponentials, they would be kept in twice the registers.
                results[j] = anew(results[j], zero)
                gradients[j] = anew(gradients[j], zero)
            target.store(
                i,
                gradient.of(results[j].cast[F](), gradients[j].cast[F]()).cast[
                    dtype
                ](),
                part.left(i),
            )
    comptime if slotted:
        for i in range(vectors, last):
            target.store(
                i,
                gradient.of(
                    slots.take(2 * (i - vectors)).cast[F](),
                    slots.take(2 * (i - vectors) + 1).cast[F](),
                ).cast[dtype](),
            )


def resident_strided_backward[
    dtype: DType,
    //,
    log: Bool,
    lanes: Int,
    vectors: Int,
    min_blocks_per_sm: Int,
    width: Int,
    dealt: Bool,
    slotted: Bool = False,
    clustered: Bool = False,
](
    dx: MemoryTarget[dtype],
    y: MemorySource[dtype],
    dy: MemorySource[dtype],
    rows: Rows,
    queue: Queue,
    blocks: Int = 1,
) raises:
    """Launches `resident_strided_backward_kernel` with a block, or a cluster, for every `lanes` vectors of columns.

    Parameters:
        dtype: Dtype of all tensors.
        log: Whether y are logarithms of probabilities.
        lanes: Vectors of columns that a block or a cluster takes.
        vectors: Vectors of each input that a thread holds in registers.
        min_blocks_per_sm: Blocks a multiprocessor is to hold.
        width: Columns a vector, as for the kernel.
        dealt: Whether they are dealt.
        slotted: Whether there may be more positions than registers for them.
        clustered: Whether the blocks of a cluster share the positions.

    Args:
        dx: Gradient of the logits.
        y: Results of the forward op.
        dy: Their gradient.
        rows: Rows along any axis; unless columns are dealt, all tensors can be had in vectors of `width`, and `rows.inner` is a multiple
            of it.
        queue: Where kernels are launched.
        blocks: Blocks a cluster, at most `PORTABLE_BLOCKS`; 1 if there is none.
    """
    comptime deep = COLUMN_THREADS // lanes
    var share = ceildiv(rows.n, blocks)
    var bytes = 0
    comptime if slotted:
        # The last round is always in registers.
        bytes = max(0, share // deep - vectors) * _SLOTS_BYTES
    var together: Optional[Dim] = None
    comptime if clustered:
        together = Dim(blocks, 1, 1)
    queue.launch[
        resident_strided_backward_kernel[
            dtype,
            log,
            lanes,
            vectors,
            min_blocks_per_sm,
            slotted,
            clustered,
            width,
            dealt,
        ]
    ](
        dx,
        y,
        dy,
        Int64(rows.count()),
        Int64(rows.inner),
        Int64(rows.n),
        Int64(share),
        UInt32(0),
        grid_dim=ceildiv(rows.count(), lanes * width) * blocks,
        block_dim=COLUMN_THREADS,
        shared_mem_bytes=bytes,
        cluster_dim=together,
        attributes=pdl_attributes(),
    )


comptime _SLOTS_BYTES = 2 * COLUMN_THREADS * VECTOR_BYTES
"""Shared memory for one vector of each input of each thread of a block."""


def strided_backward_room(
    lanes: Int, vectors: Int, min_blocks_per_sm: Int, width: Int, shared: Int
) -> Int:
    """Returns how many positions fit in a block with slots, for use at compile time.

    Args:
        lanes: Vectors of columns that it takes.
        vectors: Vectors of each input that a thread holds in registers.
        min_blocks_per_sm: Blocks a multiprocessor is to hold.
        width: Columns a vector.
        shared: Bytes of shared memory of a multiprocessor.
    """
    # With a cluster's mailbox, 1 KiB that the driver keeps, and what alignment takes.
    var static = (
        scratch_bytes(lanes, width) + PORTABLE_BLOCKS * lanes * width * 4 + 1280
    )
    var slots = max(0, shared // min_blocks_per_sm - static) // _SLOTS_BYTES
    # The last round is always in registers.
    return (vectors + slots + 1) * (COLUMN_THREADS // lanes) - 1


@inline(.always)
def add_terms[
    dtype: DType, width: Int, count: Int, //, log: Bool
](
    mut sum: Sum[DType.float32, width],
    results: Array[SIMD[dtype, width], count],
    gradients: Array[SIMD[dtype, width], count],
):
    """Adds the terms of vectors in registers: a few plainly, since one running sum of all would round equal ones the same way
    each time.

    Parameters:
        dtype: Dtype of the vectors.
        width: Columns a vector.
        count: How many vectors.
        log: Whether results are logarithms of probabilities.

    Args:
        sum: What they are added to.
        results: Results of the forward op.
        gradients: Their gradients.
    """
    comptime F = DType.float32
    comptime for i in range(0, count, GROUP):
        var terms = SIMD[F, width](0)
        comptime for j in range(i, min(i + GROUP, count)):
            var y = results[j].cast[F]()
            var dy = gradients[j].cast[F]()
            comptime if size_of[dtype]() > 2 and not log:
                # Left to an assembler, some kernels would round the product, and others would not. Of 16 bits it is exact.
                terms = y.fma(dy, terms)
            else:
                terms += Gradient[log, False].term(y, dy)
        add[size_of[dtype]() > 2](sum, terms)


@inline(.always)
def sum_columns[
    lanes: Int, width: Int, dealt: Bool, //
](
    cluster: Cluster[True, lanes * width // 2],
    scratch: Scratch[lanes, width, dealt],
    thread: Int,
) -> SIMD[DType.float32, width]:
    """Returns the sums of whole rows, the same bits for every thread of a lane in all of the cluster.

    Eight threads have two columns: each combines the block's eight sums, sends both to another block, and then
    combines what eight blocks have sent.

    Parameters:
        lanes: Vectors of columns that the cluster takes.
        width: Columns a vector.
        dealt: As of `Deal`.

    Args:
        cluster: This block's.
        scratch: With the sums of each warp.
        thread: This thread's index in the block.

    Returns:
        The sums of all blocks.
    """
    comptime pairs = lanes * width // 2
    comptime all = pairs * PORTABLE_BLOCKS
    comptime assert Scratch[lanes, width, dealt].rows == PORTABLE_BLOCKS
    var block = thread % PORTABLE_BLOCKS
    cluster.open()
    comptime for start in range(0, all, COLUMN_THREADS):
        if start + thread < all:
            var pair = (start + thread) // PORTABLE_BLOCKS
            var a = scratch.column[False](2 * pair, thread)
            var b = scratch.column[False](2 * pair + 1, thread)
            if block < cluster.blocks:
                cluster.send(block, 2 * (cluster.rank * pairs + pair), a, b)
    cluster.close()
    comptime for start in range(0, all, COLUMN_THREADS):
        if start + thread < all:
            var pair = (start + thread) // PORTABLE_BLOCKS
            comptime for j in range(2):
                var theirs = Float32(0)
                if block < cluster.blocks:
                    theirs = cluster.mailbox[
                        unsafe_offset=2 * (block * pairs + pair) + j
                    ]
                var sum = lanes_reduce[total, PORTABLE_BLOCKS](theirs)
                # The thread that has read the first row writes to it.
                if block == 0:
                    scratch.first[unsafe_offset=2 * pair + j] = sum
    barrier()
    return scratch.take(0, thread)
