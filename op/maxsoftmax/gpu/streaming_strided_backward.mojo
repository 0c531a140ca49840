"""The fast backward kernels along an axis that is not the last, for what does not fit on the chip: each element is read twice,
and written once, in two launches.

It is `streaming_strided` with two inputs and a single sum. Positions are summed in units whose length follows from that of the row
alone, a block for each unit of a few vectors of columns, so that it makes no difference to a row's sum how many others there are.
The second launch goes through everything backwards, so that what was read last, and is still in the last cache, is read first.
"""

from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)

from ..io.memory import MemorySource, MemoryTarget
from ..io.rows import Rows
from ..math.gradient import Gradient
from ..math.online import Sum
from ..queue import Queue
from .hardware.pdl import pdl_wait, pdl_attributes
from .partition.row import again
from .partition.deal import COLUMN_THREADS, Deal
from .partition.strided import Scratch, StridedPart
from .resident import add
from .resident_strided import GROUP
from .streaming_strided import (
    Floats,
    Units,
    span_length,
    unit_length,
)
from .tuning import Tuned


comptime UNROLL = 4
"""Vectors of each input that a thread has under way at a time."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(COLUMN_THREADS)),
    `nvvm.minctasm`=SIMDLength(Tuned.strip_readers),
)
def strided_sums_kernel[
    dtype: DType, log: Bool, lanes: Int, width: Int, dealt: Bool
](
    sums: Floats,
    y: MemorySource[dtype],
    dy: MemorySource[dtype],
    columns: Int64,
    inner: Int64,
    n: Int64,
    tiles: Int64,
    length: Int64,
    units: Int64,
):
    """First launch: what each block's unit of its columns sums to.

    Parameters:
        dtype: Dtype of the tensors, of 4 bytes or 2.
        log: Whether y are logarithms of probabilities, which are not looked at then.
        lanes: Vectors of columns that a block takes, a power of two.
        width: Columns a vector.
        dealt: As of `StridedPart`.

    Args:
        sums: Where they go: for each unit those of all columns.
        y: Results of the forward op.
        dy: Their gradient.
        columns: How many there are, less than 2^31.
        inner: Those of a position.
        n: Positions.
        tiles: Blocks that a unit is shared by.
        length: Positions of a unit.
        units: How many units there are.
    """
    comptime Raw = SIMD[dtype, width]
    var thread = Int(thread_idx.x)
    var unit = UInt32(block_idx.x) // UInt32(tiles)
    var tile = UInt32(block_idx.x) - unit * UInt32(tiles)
    var part = StridedPart[lanes, width, True, dealt](
        tile,
        UInt32(columns),
        UInt32(inner),
        Int(n),
        thread,
        Int(unit),
        Int(length),
    )
    var of_y = part.source(y)
    var of_dy = part.source(dy)
    pdl_wait()
    var sum = Sum[DType.float32, width]()
    var i = 0
    while part.has(i):
        var results = Array[Raw, UNROLL](fill=Raw(0))
        var gradients = Array[Raw, UNROLL](fill=Raw(0))
        comptime for j in range(UNROLL):
            if part.has(i + j):
                var left = part.left(i + j)
                comptime if not log:
                    results[j] = of_y.load(i + j, left, results[j])
                gradients[j] = of_dy.load(i + j, left, gradients[j])
        add_terms[log](sum, results, gradients)
        i += UNROLL
    var whole = Scratch[lanes, width, dealt]().reduce[False](thread, sum.value)
    comptime D = Deal[lanes, width, dealt]
    if D.chain(thread) == 0:
        var layout = Units(Int(units), Int(tiles), lanes * width)
        D.store(
            sums.unsafe_offset(layout.place(Int(unit), Int(tile))),
            thread,
            whole,
        )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(COLUMN_THREADS)),
    `nvvm.minctasm`=SIMDLength(Tuned.strip_readers),
)
def strided_gradients_kernel[
    dtype: DType, log: Bool, lanes: Int, width: Int, dealt: Bool
](
    dx: MemoryTarget[dtype],
    y: MemorySource[dtype],
    dy: MemorySource[dtype],
    sums: Floats,
    columns: Int64,
    inner: Int64,
    n: Int64,
    tiles: Int64,
    share: Int64,
    units: Int64,
):
    """Second launch: each block merges the sums of its columns, and writes its span of them.

    Parameters:
        dtype: Dtype of the tensors, of 4 bytes or 2.
        log: Whether y are logarithms of probabilities.
        lanes: Vectors of columns that a block takes, a power of two.
        width: Columns a vector.
        dealt: As of `StridedPart`.

    Args:
        dx: Gradient of the logits.
        y: Results of the forward op.
        dy: Their gradient.
        sums: What the first launch left.
        columns: How many there are, less than 2^31.
        inner: Those of a position.
        n: Positions.
        tiles: Blocks that a span is shared by.
        share: Positions a span.
        units: How many there are.
    """
    comptime exact = size_of[dtype]() > 2
    comptime F = DType.float32
    comptime Raw = SIMD[dtype, width]
    var thread = Int(thread_idx.x)
    # The last block's work is done first.
    var block = UInt32(grid_dim.x) - 1 - UInt32(block_idx.x)
    var span = block // UInt32(tiles)
    var tile = block - span * UInt32(tiles)
    var part = StridedPart[lanes, width, True, dealt](
        tile,
        UInt32(columns),
        UInt32(inner),
        Int(n),
        thread,
        Int(span),
        Int(share),
    )
    var of_y = part.source(y)
    var of_dy = part.source(dy)
    var target = part.target(dx)
    pdl_wait()
    var of_units = Units(Int(units), Int(tiles), lanes * width).part[
        lanes, width, dealt
    ](thread, Int(tile))
    var parts = of_units.source(MemorySource(sums))
    var sum = Sum[F, width]()
    var i = 0
    while of_units.has(i):
        add[exact](sum, parts.load(i, of_units.left(i), SIMD[F, width](0)))
        i += 1
    var gradient = Gradient[log, exact, F, width](
        Scratch[lanes, width, dealt]().reduce[False](thread, sum.value)
    )

    for group in range(ceildiv(part.rounds(), UNROLL) - 1, -1, -1):
        var results = Array[Raw, UNROLL](fill=Raw(0))
        var gradients = Array[Raw, UNROLL](fill=Raw(0))
        comptime for j in range(UNROLL):
            var at = group * UNROLL + j
            if part.has(at):
                var left = part.left(at)
                results[j] = of_y.load(at, left, results[j])
                gradients[j] = of_dy.load(at, left, gradients[j])
        comptime for j in range(UNROLL):
            var at = group * UNROLL + j
            if part.has(at):
                target.store(
                    at,
                    gradient.of(
                        again(results[j]).cast[F](),
                        again(gradients[j]).cast[F](),
                    ).cast[dtype](),
                    part.left(at),
                )


def streaming_strided_backward[
    dtype: DType, //, log: Bool, lanes: Int, width: Int, dealt: Bool
](
    dx: MemoryTarget[dtype],
    y: MemorySource[dtype],
    dy: MemorySource[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Launches the two kernels.

    Parameters:
        dtype: Dtype of the tensors, of 4 bytes or 2.
        log: Whether y are logarithms of probabilities.
        lanes: Vectors of columns that a block takes, a power of two.
        width: Columns a vector: a power of two.
        dealt: Whether they are dealt.

    Args:
        dx: Gradient of the logits, not in the memory of `y` or `dy`.
        y: Results of the forward op.
        dy: Their gradient.
        rows: Rows along any axis; unless columns are dealt, all tensors can be had in vectors of `width`, and `rows.inner` is a multiple
            of it.
        queue: Where kernels are launched.
    """
    var tiles = ceildiv(rows.count(), lanes * width)
    var length = unit_length(rows.n)
    var units = ceildiv(rows.n, length)
    var memory = queue.scratch[DType.float32](
        Units(units, tiles, lanes * width).size()
    )
    var sums = memory.pointer
    queue.launch[strided_sums_kernel[dtype, log, lanes, width, dealt]](
        sums,
        y,
        dy,
        Int64(rows.count()),
        Int64(rows.inner),
        Int64(rows.n),
        Int64(tiles),
        Int64(length),
        Int64(units),
        grid_dim=tiles * units,
        block_dim=COLUMN_THREADS,
        attributes=pdl_attributes(),
    )
    var share = span_length[lanes](rows.n, tiles, queue.sm_count())
    queue.launch[strided_gradients_kernel[dtype, log, lanes, width, dealt]](
        dx,
        y,
        dy,
        sums,
        Int64(rows.count()),
        Int64(rows.inner),
        Int64(rows.n),
        Int64(tiles),
        Int64(share),
        Int64(units),
        grid_dim=tiles * ceildiv(rows.n, share),
        block_dim=COLUMN_THREADS,
        attributes=pdl_attributes(),
    )
    _ = memory^


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
