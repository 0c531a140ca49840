"""Shards on a GPU: maps with what rows need merged on the way, and sums."""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import Dim

from ...gpu.fallback import columns_of_block
from ...gpu.hardware.pdl import pdl_attributes, pdl_wait
from ...gpu.hardware.tree_reduction import MAX_GRID, plus, tree_reduce
from ...gpu.totals import MAX_PARTS, Total
from ...io.rounding import rounded
from ...io.rows import Rows, Source, Target, VECTOR_BYTES
from ...math.gradient import Gradient
from ...math.loss import LossOptions, Reduction, Targets, log_of_sum
from ...math.online import Sum, accumulator
from ...queue import Queue
from .rows import Finished, Message, Second, own_target, whole_pair

comptime BLOCK_SIZE = 256
"""Threads a block."""

comptime MAX_GRID_Y = 65535
"""Most blocks that a grid has along its other dimension."""

comptime ROUNDS = 4
"""Vectors that a thread of the second pass has under way."""

comptime UNIT_ROUNDS = 8
"""Vectors that a thread adds up of a row's unit."""

comptime FEW = 4096
"""Rows up to which one block adds up the losses."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def targets_kernel(
    own: Target[DType.int64],
    header: Target[DType.int64],
    targets: Targets,
    rows: Int64,
    n: Int64,
    start: Int64,
    classes: Int64,
    ignored: Int64,
    chosen: Int64,
):
    """Writes targets as the kernels of a shard take them, and the header of a message. Arguments are as of `direct.own_targets`.
    """
    var first = Int(block_idx.x) * BLOCK_SIZE + Int(thread_idx.x)
    pdl_wait()
    if first == 0:
        header[unsafe_offset=0] = n
        header[unsafe_offset=1] = start
        header[unsafe_offset=2] = classes
        header[unsafe_offset=3] = chosen
    for row in range(first, Int(rows), Int(grid_dim.x) * BLOCK_SIZE):
        own[unsafe_offset=row] = own_target(
            targets[row], Int(start), Int(n), Int(classes), Int(ignored)
        )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def losses_kernel[
    dtype: DType, block_size: Int
](
    losses: Target[dtype],
    parts: Target[accumulator[dtype]()],
    pairs: Target[accumulator[dtype]()],
    gathered: Source[accumulator[dtype]()],
    devices: Int64,
    step: Int64,
    targets: Targets,
    rows: Int64,
    ignored: Int64,
    smoothing: Float64,
    reduction: Int64,
):
    """Writes the pair of each whole row and its loss, or leaves what losses come to.

    - `block_size`: Threads a block: `MAX_PARTS` of a single one.
    - `losses`: As of `direct.losses_of_rows`.
    - `parts`: Where each of several blocks leaves what its losses come to.
    - `pairs`: (m, d) of each row, and behind them how many rows count.
    - `gathered`: What devices sent.
    - `devices`: How many.
    - `step`: Numbers from one device's message to the next.
    - `targets`: Class of each row, counted over all devices.
    - `ignored`: The class of rows that do not count.
    - `smoothing`: The share of a target that is spread over all classes.
    - `reduction`: What becomes of the losses.
    """
    comptime accum = accumulator[dtype]()
    var message = Message[accum](gathered, Int(devices), Int(step), Int(rows))
    var options = LossOptions(
        Int(ignored), smoothing, Reduction(Int(reduction)), True, 0
    )
    var thread = Int(thread_idx.x)
    var total = Total[accum]()
    pdl_wait()
    for row in range(
        Int(block_idx.x) * block_size + thread,
        Int(rows),
        Int(grid_dim.x) * block_size,
    ):
        var m, d = whole_pair(message.pair(row), message.devices, message.step)
        pairs[unsafe_offset=2 * row] = m
        pairs[unsafe_offset=2 * row + 1] = d
        var target = targets[row]
        var loss = message.loss(row, target, options, m, d)
        if options.reduction == Reduction.NONE:
            losses[unsafe_offset=row] = rounded[dtype](loss)
        total.add(loss, target != ignored)
    comptime if block_size == MAX_PARTS:
        var all = total.collected[MAX_PARTS]()
        if thread == 0:
            all.write(losses, reduction, pairs.unsafe_offset(2 * Int(rows)), 1)
    else:
        total.leave[block_size](parts)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def pairs_kernel[
    dtype: DType
](
    sums: Target[dtype],
    pairs: Target[accumulator[dtype]()],
    gathered: Source[accumulator[dtype]()],
    devices: Int64,
    rows: Int64,
):
    """Writes the pair of each whole row, and ln Σ exp of it. Arguments are as of `direct.pairs_of_rows`.
    """
    pdl_wait()
    for row in range(
        Int(block_idx.x) * BLOCK_SIZE + Int(thread_idx.x),
        Int(rows),
        Int(grid_dim.x) * BLOCK_SIZE,
    ):
        var m, d = whole_pair(
            gathered.unsafe_offset(2 * row), Int(devices), 2 * Int(rows)
        )
        pairs[unsafe_offset=2 * row] = m
        pairs[unsafe_offset=2 * row + 1] = d
        sums[unsafe_offset=row] = rounded[dtype](log_of_sum(m, d))


@inline(.always)
def _vector[
    dtype: DType, //, width: Int, aligned: Bool
](x: Source[dtype], count: Int) -> SIMD[dtype, width]:
    """Returns the first `count` of a vector, at least one, and 0 for the rest. All of one that is aligned are there.
    """
    comptime if aligned:
        return x.unsafe_load[width=width, alignment=VECTOR_BYTES]()
    else:
        var found = SIMD[dtype, width](0)
        comptime for i in range(width):
            if i < count:
                found[i] = x[unsafe_offset=i]
        return found


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def second_kernel[
    dtype: DType, what: Int, aligned: Bool
](
    result: Target[dtype],
    x: Source[dtype],
    other: Source[dtype],
    numbers: Source[accumulator[dtype]()],
    devices: Int64,
    rows: Int64,
    n: Int64,
):
    """Writes the second pass over contiguous rows: each block a part of a row.

    - `what`: One of `Second`.
    - `aligned`: Whether vectors of all tensors are, and rows are made of them.
    - `result`: As of `direct.second_pass`.
    - `x`: Logits, or results.
    - `other`: The gradients of results, if these are.
    - `numbers`: What devices sent.
    - `devices`: How many.
    """
    comptime accum = accumulator[dtype]()
    # Elements of a vector that is not aligned lie apart, so that neighbours are read together.
    comptime width = VECTOR_BYTES // size_of[dtype]() if aligned else 1
    comptime rounds = ROUNDS if aligned else 2 * ROUNDS
    comptime span = BLOCK_SIZE * width * rounds
    pdl_wait()
    for row in range(Int(block_idx.x), Int(rows), Int(grid_dim.x)):
        var finished = Finished[what, accum, 1].of(
            numbers, row, 1, Int(rows), Int(devices)
        )
        var start = row * Int(n)
        for first in range(
            Int(block_idx.y) * span, Int(n), Int(grid_dim.y) * span
        ):
            var xs = Array[SIMD[dtype, width], rounds](
                fill=SIMD[dtype, width](0)
            )
            var others = Array[SIMD[dtype, width], rounds](
                fill=SIMD[dtype, width](0)
            )
            comptime for j in range(rounds):
                var i = first + (j * BLOCK_SIZE + Int(thread_idx.x)) * width
                if i < Int(n):
                    xs[j] = _vector[width, aligned](
                        x.unsafe_offset(start + i), 1
                    )
                    comptime if what > Second.LOGARITHMS:
                        others[j] = _vector[width, aligned](
                            other.unsafe_offset(start + i), 1
                        )
            comptime for j in range(rounds):
                var i = first + (j * BLOCK_SIZE + Int(thread_idx.x)) * width
                if i < Int(n):
                    var y = rounded[dtype](
                        finished.result(
                            xs[j].cast[accum](), others[j].cast[accum]()
                        )
                    )
                    result.unsafe_offset(start + i).unsafe_store[
                        alignment=width * size_of[dtype]()
                    ](y)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def second_columns_kernel[
    dtype: DType, what: Int
](
    result: Target[dtype],
    x: Source[dtype],
    other: Source[dtype],
    numbers: Source[accumulator[dtype]()],
    devices: Int64,
    outer: Int64,
    n: Int64,
    inner: Int64,
):
    """Writes the second pass over rows along any axis: each thread a part of a row, so that those of neighbouring rows read
    neighbours.

    - `what`: One of `Second`.

    Args:
        result: As of `direct.second_pass`.
        x: Logits, or results.
        other: The gradients of results, if these are.
        numbers: What devices sent.
        devices: How many.
        outer: First dimension.
        n: Length of the rows.
        inner: Last dimension.
    """
    comptime accum = accumulator[dtype]()
    comptime count = 2 * ROUNDS
    var rows = Rows(Int(outer), Int(n), Int(inner))
    pdl_wait()
    for row in range(
        Int(block_idx.x) * BLOCK_SIZE + Int(thread_idx.x),
        rows.count(),
        Int(grid_dim.x) * BLOCK_SIZE,
    ):
        var finished = Finished[what, accum, 1].of(
            numbers, row, 1, rows.count(), Int(devices)
        )
        var start = rows.start(row)
        for first in range(
            Int(block_idx.y) * count, rows.n, Int(grid_dim.y) * count
        ):
            var xs = SIMD[dtype, count](0)
            var others = SIMD[dtype, count](0)
            comptime for i in range(count):
                if first + i < rows.n:
                    var at = start + (first + i) * rows.inner
                    xs[i] = x[unsafe_offset=at]
                    comptime if what > Second.LOGARITHMS:
                        others[i] = other[unsafe_offset=at]
            var found = rounded[dtype](
                finished.result(xs.cast[accum](), others.cast[accum]())
            )
            comptime for i in range(count):
                if first + i < rows.n:
                    result[
                        unsafe_offset=start + (first + i) * rows.inner
                    ] = found[i]


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def units_kernel[
    dtype: DType, log: Bool, aligned: Bool
](
    sums: Target[accumulator[dtype]()],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Int64,
    n: Int64,
    units: Int64,
):
    """Writes the sum of each unit of contiguous rows, whose order of additions follows from its place in the row alone.

    - `log`: Whether results are logarithms of probabilities.
    - `aligned`: Whether vectors of both tensors are, and rows are made of them.
    - `sums`: (rows, units).
    - `dy`: Their gradients.
    - `units`: How many a row has.
    """
    comptime accum = accumulator[dtype]()
    comptime exact = size_of[dtype]() > 2
    comptime width = VECTOR_BYTES // size_of[dtype]()
    var scratch = unsafe_stack_allocation[
        BLOCK_SIZE, Sum[accum, 1], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    pdl_wait()
    for at in range(Int(block_idx.x), Int(rows) * Int(units), Int(grid_dim.x)):
        var row, unit = divmod(at, Int(units))
        var chains = SIMD[accum, width](0)
        comptime for j in range(UNIT_ROUNDS):
            var i = ((unit * UNIT_ROUNDS + j) * BLOCK_SIZE + thread) * width
            if i < Int(n):
                var place = row * Int(n) + i
                chains += Gradient[log, exact, accum].term(
                    _vector[width, aligned](
                        y.unsafe_offset(place), Int(n) - i
                    ).cast[accum](),
                    _vector[width, aligned](
                        dy.unsafe_offset(place), Int(n) - i
                    ).cast[accum](),
                )
        var sum = tree_reduce[BLOCK_SIZE, plus[accum]](
            scratch, thread, Sum[accum, 1](chains.reduce_add())
        )
        if thread == 0:
            sums[unsafe_offset=at] = sum.value


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def merge_kernel[
    accum: DType
](sums: Target[accum], parts: Source[accum], rows: Int64, units: Int64):
    """Writes the sum of each row's units.

    Parameters:
        accum: Dtype of the sums.

    - `sums`: (rows,).
    - `parts`: (rows, units).
    - `units`: How many a row has.
    """
    pdl_wait()
    for row in range(
        Int(block_idx.x) * BLOCK_SIZE + Int(thread_idx.x),
        Int(rows),
        Int(grid_dim.x) * BLOCK_SIZE,
    ):
        var sum = Sum[accum, 1]()
        for unit in range(Int(units)):
            sum.add(parts[unsafe_offset=row * Int(units) + unit])
        sums[unsafe_offset=row] = sum.value


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def sums_kernel[
    dtype: DType, log: Bool
](
    sums: Target[accumulator[dtype]()],
    y: Source[dtype],
    dy: Source[dtype],
    outer: Int64,
    n: Int64,
    inner: Int64,
    columns: Int64,
):
    """Writes the sum of each row along any axis, as `fallback` walks them.

    - `log`: Whether results are logarithms of probabilities.
    - `sums`: One a row.
    - `dy`: Their gradients.
    - `outer`: First dimension.
    - `n`: Length of the rows.
    - `inner`: Last dimension.
    - `columns`: Rows a block takes at a time, a power of two up to `BLOCK_SIZE`.
    """
    comptime accum = accumulator[dtype]()
    comptime exact = size_of[dtype]() > 2
    var scratch = unsafe_stack_allocation[
        BLOCK_SIZE, Sum[accum, 1], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var tiles = ceildiv(Int(inner), Int(columns))
    pdl_wait()
    for tile in range(Int(block_idx.x), Int(outer) * tiles, Int(grid_dim.x)):
        var before, among = divmod(tile, tiles)
        var after = among * Int(columns) + thread % Int(columns)
        # Threads beyond the last column only keep the others company at the barriers.
        var taken = after < Int(inner)
        var start = before * Int(n) * Int(inner) + after
        var sum = Sum[accum, 1]()
        for i in range(
            thread // Int(columns),
            Int(n) if taken else 0,
            BLOCK_SIZE // Int(columns),
        ):
            var at = start + i * Int(inner)
            sum.add(
                Gradient[log, exact, accum].term(
                    y[unsafe_offset=at].cast[accum](),
                    dy[unsafe_offset=at].cast[accum](),
                )
            )
        sum = tree_reduce[BLOCK_SIZE, plus[accum]](
            scratch, thread, sum, Int(columns)
        )
        if thread < Int(columns) and taken:
            sums[unsafe_offset=before * Int(inner) + after] = sum.value


def second_on_gpu[
    dtype: DType, what: Int, contiguous: Bool
](
    result: Target[dtype],
    x: Source[dtype],
    other: Source[dtype],
    numbers: Source[accumulator[dtype]()],
    devices: Int,
    rows: Rows,
    queue: Queue,
) raises:
    """Enqueues what `direct.second_pass` does."""
    comptime if contiguous:
        var others = Int(other) if what > Second.LOGARITHMS else 0
        var addresses = Int(result) | Int(x) | others
        var in_vectors = (
            addresses % VECTOR_BYTES == 0
            and rows.n * size_of[dtype]() % VECTOR_BYTES == 0
        )
        comptime for aligned in [True, False]:
            if aligned == in_vectors:
                comptime width = (
                    VECTOR_BYTES // size_of[dtype]() if aligned else 2
                )
                queue.launch[second_kernel[dtype, what, aligned]](
                    result,
                    x,
                    other,
                    numbers,
                    Int64(devices),
                    Int64(rows.count()),
                    Int64(rows.n),
                    grid_dim=Dim(
                        min(rows.count(), MAX_GRID),
                        min(
                            ceildiv(rows.n, BLOCK_SIZE * width * ROUNDS),
                            MAX_GRID_Y,
                        ),
                        1,
                    ),
                    block_dim=BLOCK_SIZE,
                    attributes=pdl_attributes(),
                )
    else:
        queue.launch[second_columns_kernel[dtype, what]](
            result,
            x,
            other,
            numbers,
            Int64(devices),
            Int64(rows.outer),
            Int64(rows.n),
            Int64(rows.inner),
            grid_dim=Dim(
                row_blocks(rows),
                min(ceildiv(rows.n, 2 * ROUNDS), MAX_GRID_Y),
                1,
            ),
            block_dim=BLOCK_SIZE,
            attributes=pdl_attributes(),
        )


def sums_on_gpu[
    dtype: DType, log: Bool, contiguous: Bool
](
    sums: Target[accumulator[dtype]()],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Enqueues what `direct.sums_of_shard` does."""
    comptime accum = accumulator[dtype]()
    comptime if contiguous:
        comptime width = VECTOR_BYTES // size_of[dtype]()
        var units = max(1, ceildiv(rows.n, BLOCK_SIZE * width * UNIT_ROUNDS))
        var memory = queue.scratch[accum](rows.count() * units)
        var in_vectors = (Int(y) | Int(dy)) % VECTOR_BYTES == 0 and (
            rows.n % width == 0
        )
        comptime for aligned in [True, False]:
            if aligned == in_vectors:
                queue.launch[units_kernel[dtype, log, aligned]](
                    memory.pointer,
                    y,
                    dy,
                    Int64(rows.count()),
                    Int64(rows.n),
                    Int64(units),
                    grid_dim=min(rows.count() * units, MAX_GRID),
                    block_dim=BLOCK_SIZE,
                    attributes=pdl_attributes(),
                )
        queue.launch[merge_kernel[accum]](
            sums,
            memory.pointer,
            Int64(rows.count()),
            Int64(units),
            grid_dim=row_blocks(rows),
            block_dim=BLOCK_SIZE,
            attributes=pdl_attributes(),
        )
        _ = memory^
    else:
        var columns = columns_of_block[dtype](BLOCK_SIZE, rows)
        queue.launch[sums_kernel[dtype, log]](
            sums,
            y,
            dy,
            Int64(rows.outer),
            Int64(rows.n),
            Int64(rows.inner),
            Int64(columns),
            grid_dim=min(rows.outer * ceildiv(rows.inner, columns), MAX_GRID),
            block_dim=BLOCK_SIZE,
            attributes=pdl_attributes(),
        )


def row_blocks(rows: Rows) -> Int:
    """Returns how many blocks have a thread for each row."""
    return max(1, min(ceildiv(rows.count(), BLOCK_SIZE), MAX_GRID))
