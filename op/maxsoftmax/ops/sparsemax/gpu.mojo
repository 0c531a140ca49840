"""Sparsemax on a GPU: one block a row, or of rows along another axis one for as many neighbours as a warp has threads.
"""

from std.bit import next_power_of_two
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.sync import barrier

from ...gpu.hardware.tree_reduction import MAX_GRID, larger
from ...math.online import accumulator
from ...queue import Queue
from ...io.rows import Rows, Source, Target
from .team import (
    TOGETHER,
    Chain,
    RowPlace,
    meet,
    meeting,
    most_threads,
    vector_of,
)
from .threshold import (
    MOST_STEPS,
    Support,
    Threshold,
    gradient_where,
    mean_of,
    merged,
    positive,
    term,
)

comptime SLOTS = 1 << 15
"""Bytes of shared memory for what is above -1 in rows that are read again for each step otherwise; half of it for rows along
another axis, whose threads meet in the rest of the 48 KB that every block may have."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(most_threads[contiguous, threads]())
    ),
    `nvvm.minctasm`=SIMDLength(
        max(1, 512 // most_threads[contiguous, threads]())
    ),
)
def sparsemax_kernel[
    dtype: DType, contiguous: Bool, threads: Int, held: Int
](
    y: Target[dtype],
    x: Source[dtype],
    outer: Int64,
    n: Int64,
    inner: Int64,
    columns: Int64,
):
    """Writes sparsemax along the middle axis of a row-major (outer, n, inner) tensor.

    Parameters:
        dtype: Dtype of both tensors.
        contiguous: Whether `inner` and `columns` are 1.
        threads: Threads a row, a power of two; of contiguous rows from 32.
        held: Vectors that a thread keeps in registers: as many as there are in rows of this length. 0 where rows are longer,
            of which only what is above -1 is kept, in shared memory if there is room.

    - `y`: Probabilities.
    - `outer`: First dimension.
    - `n`: Length of the rows.
    - `inner`: Last dimension, and the distance between neighbours in a row.
    - `columns`: Rows a block, a power of two up to `TOGETHER`.
    """
    comptime accum = accumulator[dtype]()
    comptime most = most_threads[contiguous, threads]()
    comptime Place = RowPlace[dtype, contiguous]
    comptime width = Place.width
    comptime places = meeting[contiguous, threads]()
    comptime room = SLOTS if contiguous else SLOTS // 2
    comptime slots = 0 if held > 0 else room // (most * size_of[accum]())
    var maxima = unsafe_stack_allocation[
        places, Scalar[accum], address_space=AddressSpace.SHARED
    ]()
    var supports = unsafe_stack_allocation[
        places, Support[accum], address_space=AddressSpace.SHARED
    ]()
    var kept = unsafe_stack_allocation[
        max(1, slots * most), Scalar[accum], address_space=AddressSpace.SHARED
    ]()
    var standing = unsafe_stack_allocation[
        TOGETHER, Int32, address_space=AddressSpace.SHARED
    ]()
    var block = threads * Int(columns)
    var thread = Int(thread_idx.x)
    var first = thread // Int(columns) * width
    comptime step = threads * width
    var tiles = ceildiv(Int(inner), Int(columns))

    for tile in range(Int(block_idx.x), Int(outer) * tiles, Int(grid_dim.x)):
        var before, after = divmod(tile, tiles)
        var column = after * Int(columns) + thread % Int(columns)
        # Threads beyond the last column only keep the others company at the barriers.
        var place = Place(
            before * Int(n) * Int(inner) + column,
            Int(n) if column < Int(inner) else 0,
            Int(inner),
        )
        var z = Array[SIMD[accum, width], max(1, held)](
            fill=SIMD[accum, width](neg_inf[accum]())
        )
        var m = neg_inf[accum]()
        comptime if held > 0:
            comptime for v in range(held):
                z[v] = place.load(x, first + v * step).cast[accum]()
                m = max(m, z[v].reduce_max())
        else:
            for i in range(first, place.n, step):
                m = max(m, place.load(x, i).cast[accum]().reduce_max())
        m = meet[contiguous, threads, larger[accum]](
            maxima, thread, Int(columns), m
        )
        comptime for v in range(held):
            z[v] -= m

        var threshold = Threshold[accum, 1]()
        var used = 0
        var is_kept = False
        for turn in range(MOST_STEPS):
            var chain = Chain[accum]()
            comptime if held > 0:
                comptime for v in range(held):
                    chain.add(threshold.excess(z[v]))
            else:
                if is_kept:
                    for slot in range(used):
                        chain.add(
                            threshold.excess(
                                kept[unsafe_offset=slot * block + thread]
                            )
                        )
                else:
                    for i in range(first, place.n, step):
                        var values = place.load(x, i).cast[accum]() - m
                        chain.add(threshold.excess(values))
                        if turn == 0:
                            comptime for j in range(width):
                                # NaN has its slot as well.
                                if not (values[j] <= -1):
                                    if used < slots:
                                        kept[
                                            unsafe_offset=used * block + thread
                                        ] = values[j]
                                    used += 1
                    if turn == 0:
                        # All of its threads know, or none: what else is in the block makes no difference to a row.
                        var lacking = meet[contiguous, threads, merged[accum]](
                            supports,
                            thread,
                            Int(columns),
                            Support[accum](0, Int64(used > slots)),
                        )
                        is_kept = lacking.count == 0
            var found = meet[contiguous, threads, merged[accum]](
                supports, thread, Int(columns), chain.found()
            )
            threshold.step(found.sum, found.count)
            comptime if contiguous:
                if threshold.stands:
                    break
            else:
                if thread < Int(columns):
                    standing[unsafe_offset=thread] = Int32(
                        Int(threshold.stands[0])
                    )
                barrier()
                var all = Int32(1)
                for other in range(Int(columns)):
                    all &= standing[unsafe_offset=other]
                if all == 1:
                    break

        comptime if held > 0:
            comptime for v in range(held):
                place.store(
                    y,
                    first + v * step,
                    positive(threshold.excess(z[v])).cast[dtype](),
                )
        else:
            for i in range(first, place.n, step):
                var values = place.load(x, i).cast[accum]() - m
                place.store(
                    y, i, positive(threshold.excess(values)).cast[dtype]()
                )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(most_threads[contiguous, threads]())
    )
)
def sparsemax_backward_kernel[
    dtype: DType, contiguous: Bool, threads: Int
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    outer: Int64,
    n: Int64,
    inner: Int64,
    columns: Int64,
):
    """Writes the gradient of sparsemax along the middle axis of row-major (outer, n, inner) tensors.

    Parameters:
        dtype: Dtype of all tensors.
        contiguous: Whether `inner` and `columns` are 1.
        threads: Threads a row, a power of two; of contiguous rows from 32.

    Args:
        dx: Gradient of the logits.
        y: Results of the forward op.
        dy: Their gradient.
        outer: First dimension.
        n: Length of the rows.
        inner: Last dimension, and the distance between neighbours in a row.
        columns: Rows a block, a power of two up to `TOGETHER`.
    """
    comptime accum = accumulator[dtype]()
    comptime places = meeting[contiguous, threads]()
    comptime Place = RowPlace[dtype, contiguous]
    var supports = unsafe_stack_allocation[
        places, Support[accum], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var first = thread // Int(columns) * Place.width
    comptime step = threads * Place.width
    var tiles = ceildiv(Int(inner), Int(columns))

    for tile in range(Int(block_idx.x), Int(outer) * tiles, Int(grid_dim.x)):
        var before, after = divmod(tile, tiles)
        var column = after * Int(columns) + thread % Int(columns)
        var place = Place(
            before * Int(n) * Int(inner) + column,
            Int(n) if column < Int(inner) else 0,
            Int(inner),
        )
        var chain = Chain[accum]()
        for i in range(first, place.n, step):
            var results = place.load(y, i).cast[accum]()
            # Beyond the end of the row there is -inf, which is not above 0.
            chain.add(term(results, place.load(dy, i).cast[accum]()), results)
        var found = meet[contiguous, threads, merged[accum]](
            supports, thread, Int(columns), chain.found()
        )
        var mean = mean_of(found)
        for i in range(first, place.n, step):
            var results = place.load(y, i).cast[accum]()
            var given = place.load(dy, i).cast[accum]()
            place.store(
                dx, i, gradient_where(results, given - mean).cast[dtype]()
            )


def rows_on_gpu[
    dtype: DType, //
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Computes sparsemax along the last axis: threads and vectors by the length of the rows alone.

    Parameters:
        dtype: Dtype of both tensors.

    - `y`: Probabilities, not in the memory of `x`.
    - `rows`: Rows along the last axis.
    """
    comptime width = vector_of[dtype, True]()
    comptime wide = size_of[accumulator[dtype]()]() // 4

    @inline(.always)
    def launch[threads: Int, elements: Int]() raises {imm}:
        queue.launch[sparsemax_kernel[dtype, True, threads, elements // width]](
            y,
            x,
            Int64(rows.count()),
            Int64(rows.n),
            Int64(1),
            Int64(1),
            grid_dim=min(rows.count(), MAX_GRID),
            block_dim=threads,
        )

    var n = rows.n * wide
    if rows.n <= 32 * width:
        launch[32, width]()
    elif n <= 32 * 16:
        launch[32, 16 // wide]()
    elif n <= 128 * 16:
        launch[128, 16 // wide]()
    elif n <= 256 * 32:
        launch[256, 32 // wide]()
    elif n <= 512 * 32:
        launch[512, 32 // wide]()
    elif n <= 1024 * 32:
        launch[1024, 32 // wide]()
    else:
        launch[1024, 0]()


def columns_on_gpu[
    dtype: DType, //
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Computes sparsemax along an axis that is not the last: threads a row by the length of the rows alone.

    Parameters:
        dtype: Dtype of both tensors.

    - `y`: Probabilities, not in the memory of `x`.
    - `rows`: Rows along any axis.
    """
    var columns = min(TOGETHER, next_power_of_two(rows.inner))

    @inline(.always)
    def launch[threads: Int, held: Int]() raises {imm}:
        queue.launch[sparsemax_kernel[dtype, False, threads, held]](
            y,
            x,
            Int64(rows.outer),
            Int64(rows.n),
            Int64(rows.inner),
            Int64(columns),
            grid_dim=min(rows.outer * ceildiv(rows.inner, columns), MAX_GRID),
            block_dim=threads * columns,
        )

    comptime held = 32 // size_of[accumulator[dtype]()]()
    if rows.n <= 8 * 2 * held:
        launch[8, 2 * held]()
    elif rows.n <= 32 * held:
        launch[32, held]()
    else:
        launch[32, 0]()


def gradients_on_gpu[
    dtype: DType, //, contiguous: Bool
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Computes the gradient of sparsemax: threads a row by the length of the rows alone.

    Parameters:
        dtype: Dtype of all tensors.
        contiguous: Whether rows are along the last axis.

    - `dx`: Gradient of the logits.
    - `y`: Results of the forward op.
    - `dy`: Their gradient.
    - `rows`: How the memory is divided into rows.
    """
    var outer, inner, columns = rows.count(), 1, 1
    comptime if not contiguous:
        outer, inner = rows.outer, rows.inner
        columns = min(TOGETHER, next_power_of_two(rows.inner))

    @inline(.always)
    def launch[threads: Int]() raises {imm}:
        queue.launch[sparsemax_backward_kernel[dtype, contiguous, threads]](
            dx,
            y,
            dy,
            Int64(outer),
            Int64(rows.n),
            Int64(inner),
            Int64(columns),
            grid_dim=min(outer * ceildiv(inner, columns), MAX_GRID),
            block_dim=threads * columns,
        )

    comptime if not contiguous:
        if rows.n <= 256:
            launch[8]()
        else:
            launch[32]()
    else:
        if rows.n <= 512:
            launch[32]()
        elif rows.n <= 8192:
            launch[256]()
        else:
            launch[1024]()
