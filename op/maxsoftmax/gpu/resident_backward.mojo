"""The fast backward kernel of rows that fit on the chip: two reads and one write an element.

It is `resident` with two inputs and a single sum: a team asks for all of its row's results and gradients at once, keeps them in
registers and slots while their product is summed, and writes.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    thread_idx,
)
from max.gpu.host import Dim

from ..math.gradient import Gradient
from ..math.online import Sum
from ..queue import Queue
from ..io.memory import MemorySource, MemoryTarget
from ..io.rows import Rows, Source, Target, VECTOR_BYTES
from .hardware.cluster import Cluster
from .hardware.pdl import pdl_wait, pdl_attributes
from .partition.handover import Handover
from .partition.row import LINE_BYTES, MemoryPart, anew, product
from .hardware.slots import Slots, wait_after
from .hardware.team import largest_lane, maximum, team_reduce, total
from .resident import add


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size)),
    `nvvm.minctasm`=SIMDLength(min_blocks_per_sm),
)
def resident_backward_kernel[
    dtype: DType,
    log: Bool,
    block_size: Int,
    team: Int,
    vectors: Int,
    min_blocks_per_sm: Int,
    slotted: Bool,
    clustered: Bool,
    width: Int,
    edged: Bool,
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Int64,
    n: Int64,
    share: Int64,
    zero: UInt32,
):
    """Writes the gradient of `rows` rows of `n` contiguous elements.

    Parameters:
        dtype: Dtype of all tensors, of 4 bytes or 2.
        log: Whether y are logarithms of probabilities.
        block_size: Threads a block.
        team: Threads of a block that share a row: less than a warp, a warp, or the whole block.
        vectors: Vectors of 16 bytes of each input that a thread holds in registers.
        min_blocks_per_sm: Blocks a multiprocessor is to hold, which bounds the registers.
        slotted: Whether there are slots in shared memory for more.
        clustered: Whether the blocks of a cluster share a row.
        width: Elements a vector: as many as have 16 bytes, or 1.
        edged: Whether rows may begin or end between two vectors.

    Args:
        dx: Gradient of the logits; may be the same memory as `y` or `dy`.
        y: Results of the forward op.
        dy: Their gradient, aligned as `y` is.
        rows: How many.
        n: Length of each.
        share: Vectors of a row that a block takes.
        zero: As for `anew`.
    """
    comptime P = MemoryPart[dtype, team, width, edged]
    comptime G = Gradient[log, size_of[dtype]() > 2]
    comptime teams = block_size // team
    comptime warps = max(1, team // WARP_SIZE)
    # With slots, one more vector in registers: of the last round, which not all threads have.
    comptime held = vectors + 1 if slotted else vectors
    var sums = unsafe_stack_allocation[
        warps, Float32, address_space=AddressSpace.SHARED
    ]()
    var handover = Handover[
        MemorySource[dtype],
        MemoryTarget[dtype],
        team,
        width,
        edged,
        block_size,
    ]()
    var source = MemorySource(y)
    var uneven = P.uneven(source, Int(n))
    # Results in the even ones, gradients in the odd ones.
    var slots = Slots[dtype, team, P.width]()
    var thread = Int(thread_idx.x)
    var lane = thread % team
    var cluster = Cluster[clustered]()
    var row = cluster.index * teams + thread // team
    var part = P.of_share(
        MemoryTarget(dx), source, row, Int(n), lane, cluster.rank, Int(share)
    ) if clustered else P(
        MemoryTarget(dx), source, row, Int(n), lane, 0, Int(n)
    )
    comptime if teams > 1:
        if row >= Int(rows):
            # Its threads only keep the others company at the barriers.
            part.clear()
    var last = max(vectors, part.rounds())
    var upstream = part
    upstream.source = part.source.onwards(
        (Int(dy) - Int(y)) // size_of[dtype]()
    )

    pdl_wait()
    # First of all, as heads are added first.
    var result_edges = P.Edges(0)
    var gradient_edges = P.Edges(0)
    comptime if P.peeled:
        if P.branchless or uneven:
            result_edges = part.load_edges(0)
            gradient_edges = upstream.load_edges(0)
    comptime if slotted:
        for i in range(vectors, last):
            var slot = 2 * (i - vectors)
            slots.fetch(slot, part.source.address(P.place(i)))
            slots.fetch(slot + 1, upstream.source.address(P.place(i)))
    var results = Array[P.Raw, held](fill=P.Raw(0))
    var gradients = Array[P.Raw, held](fill=P.Raw(0))
    comptime for j in range(held):
        var i = j if j < vectors else last
        if part.has(i):
            results[j] = part.load(i)
            gradients[j] = upstream.load(i)

    @inline(.always)
    def term[
        lanes: SIMDLength, of: DType
    ](result: SIMD[of, lanes], gradient: SIMD[of, lanes]) {imm} -> SIMD[
        DType.float32, lanes
    ]:
        comptime if log:
            return gradient.cast[DType.float32]()
        else:
            return product(
                result.cast[DType.float32](), gradient.cast[DType.float32]()
            )

    # In the order of the elements, whatever lane has them.
    comptime exact = size_of[dtype]() > 2
    var sum = Sum[DType.float32, width]()
    comptime if P.peeled:
        if uneven:
            handover.give(thread, term(result_edges, gradient_edges))
            add[exact](sum, handover.head(thread))
    comptime for j in range(held):
        comptime if j == vectors:
            var seen = sum.value
            comptime if log:
                # The sum knows nothing of the results.
                comptime for k in range(held):
                    seen = maximum(seen, results[k].cast[DType.float32]())
            wait_after(largest_lane(seen))
            for i in range(vectors, last):
                var slot = 2 * (i - vectors)
                add[exact](sum, term(slots.take(slot), slots.take(slot + 1)))
        add[exact](sum, term(results[j], gradients[j]))
    comptime if P.peeled:
        if uneven:
            add[exact](sum, handover.tail(part, thread))
    var dot = team_reduce[team, total](
        sums,
        thread,
        handover.total(part, thread, uneven, sum.value - sum.excess),
    )
    comptime if clustered:
        dot = cluster.sum(dot)
    var gradient = G(dot)

    comptime for aligned in [True, False]:
        if part.aligned == aligned:
            comptime for j in range(held):
                var i = j if j < vectors else last
                if part.has(i):
                    comptime if size_of[dtype]() == 2 or log:
                        # Widened, or with their exponentials, they would be kept in twice the registers.
                        results[j] = anew(results[j], zero)
                        gradients[j] = anew(gradients[j], zero)
                    part.store[aligned](
                        i,
                        gradient.of(
                            results[j].cast[DType.float32](),
                            gradients[j].cast[DType.float32](),
                        ),
                    )
            comptime if slotted:
                for i in range(vectors, last):
                    part.store[aligned](
                        i,
                        gradient.of(
                            slots.take(2 * (i - vectors)).cast[DType.float32](),
                            slots.take(2 * (i - vectors) + 1).cast[
                                DType.float32
                            ](),
                        ),
                    )
    comptime if P.peeled:
        if P.branchless or uneven:
            part.store_edges(gradient.of(result_edges, gradient_edges))


def resident_backward[
    dtype: DType,
    log: Bool,
    block_size: Int,
    team: Int,
    vectors: Int,
    min_blocks_per_sm: Int,
    width: Int = VECTOR_BYTES // size_of[dtype](),
    edged: Bool = True,
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Launches `resident_backward_kernel` with a team for each row, within a block.

    Parameters:
        dtype: Dtype of all tensors.
        log: Whether y are logarithms of probabilities.
        block_size: Threads a block.
        team: Threads that share a row, of at most `team * vectors` vectors.
        vectors: Vectors of each input that a thread holds in registers.
        min_blocks_per_sm: Blocks a multiprocessor is to hold.
        width: Elements a vector: as many as have 16 bytes, or 1.
        edged: Whether rows may begin or end between two vectors: with or without it results are the same.

    Args:
        dx: Gradient of the logits.
        y: Results of the forward op.
        dy: Their gradient.
        rows: Rows along the last axis.
        queue: Where kernels are launched.
    """
    queue.launch[
        resident_backward_kernel[
            dtype,
            log,
            block_size,
            team,
            vectors,
            min_blocks_per_sm,
            False,
            False,
            width,
            edged,
        ]
    ](
        dx,
        y,
        dy,
        Int64(rows.count()),
        Int64(rows.n),
        Int64(rows.n),
        UInt32(0),
        grid_dim=ceildiv(rows.count(), block_size // team),
        block_dim=block_size,
        attributes=pdl_attributes(),
    )


def resident_backward_cluster[
    dtype: DType,
    log: Bool,
    block_size: Int,
    vectors: Int,
    min_blocks_per_sm: Int,
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    blocks: Int,
    queue: Queue,
) raises:
    """Launches `resident_backward_kernel` with a cluster for each row.

    Parameters:
        dtype: Dtype of all tensors.
        log: Whether y are logarithms of probabilities.
        block_size: Threads a block.
        vectors: Vectors of each input that a thread holds in registers.
        min_blocks_per_sm: Blocks a multiprocessor is to hold.

    Args:
        dx: Gradient of the logits.
        y: Results of the forward op.
        dy: Their gradient.
        rows: Rows along the last axis.
        blocks: Blocks that share a row, at most `PORTABLE_BLOCKS`.
        queue: Where kernels are launched.
    """
    comptime kernel = resident_backward_kernel[
        dtype,
        log,
        block_size,
        block_size,
        vectors,
        min_blocks_per_sm,
        True,
        True,
        VECTOR_BYTES // size_of[dtype](),
        True,
    ]
    comptime line = LINE_BYTES // size_of[dtype]()
    comptime in_line = LINE_BYTES // VECTOR_BYTES
    var share = ceildiv(rows.n, line * blocks) * in_line
    var bytes = (
        max(0, share // block_size - vectors) * block_size * 2 * VECTOR_BYTES
    )
    queue.launch[kernel](
        dx,
        y,
        dy,
        Int64(rows.count()),
        Int64(rows.n),
        Int64(share),
        UInt32(0),
        grid_dim=rows.count() * blocks,
        block_dim=block_size,
        shared_mem_bytes=bytes,
        cluster_dim=Dim(blocks, 1, 1),
        attributes=pdl_attributes(),
    )
