"""Logits that are computed as they are read, of columns that do not fit on the chip: once for the sum, and again for the
probabilities, in two launches.

It is `column_grid` with the loads and stores of `fused_tile`.
"""

from std.math import ceildiv
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from ..exponential import Scale
from ..logits import Logits
from ..results import Results
from .column_grid import Floats, READING, Running, UNROLL, merge_spans
from .column_part import COLUMN_THREADS
from .overlap import follow


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(COLUMN_THREADS)),
    `nvvm.minctasm`=SIMDLength(READING if width <= 4 else 2),
)
def fused_column_pairs_kernel[
    Fusion: InputFusion,
    in_dtype: DType,
    rank: Int,
    axis: Int,
    causal: Bool,
    exact: Bool,
    lanes: Int,
    width: Int,
](
    pairs: Floats,
    x: Logits[Fusion, in_dtype, rank, axis, causal],
    total: Int64,
    across: Int64,
    n: Int64,
    tiles: Int64,
    share: Int64,
):
    """First launch: the pairs of each block's span of its columns.

    Parameters:
        Fusion: What computes the logits.
        in_dtype: Dtype of the logits, of 4 bytes or 2.
        rank: Number of dimensions.
        axis: The axis.
        causal: Whether rows end at the diagonal.
        exact: Of the scale of the sums.
        lanes: Vectors of columns that a block takes, a power of two.
        width: Columns a vector, of which the last dimension is a multiple.

    Args:
        pairs: Where the pairs go.
        x: Logits.
        total: Vectors of columns, less than 2^31.
        across: Those of a position.
        n: Positions.
        tiles: Blocks that a span is shared by.
        share: Positions a span.
    """
    comptime Vector = SIMD[DType.float32, width]
    comptime deep = COLUMN_THREADS // lanes
    var thread = Int(thread_idx.x)
    var span = UInt32(block_idx.x) // UInt32(tiles)
    var index = (UInt32(block_idx.x) - span * UInt32(tiles)) * UInt32(
        lanes
    ) + UInt32(thread % lanes)
    var outer = index // UInt32(across)
    var row = x.row(Int(outer), Int(index - outer * UInt32(across)) * width)
    var start = Int(span) * Int(share)
    var end = min(Int(n), start + Int(share)) if index < UInt32(total) else 0
    var length = min(row.length, end)
    follow()
    var running = Running[exact, width]()
    for first in range(start + thread // lanes, length, UNROLL * deep):
        var logits = Array[Vector, UNROLL](fill=neg_inf[DType.float32]())
        comptime for j in range(UNROLL):
            if first + j * deep < length:
                logits[j] = row.load[width, width](first + j * deep).cast[
                    DType.float32
                ]()
        running.add(logits)
    running.leave[lanes](pairs, span, index, UInt32(total))


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(COLUMN_THREADS)),
    `nvvm.minctasm`=SIMDLength(READING if width <= 4 else 2),
)
def fused_column_quotients_kernel[
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
    exact: Bool,
    lanes: Int,
    width: Int,
](
    y: Results[Out, out_dtype, rank, axis, epilogue],
    x: Logits[Fusion, in_dtype, rank, axis, causal],
    sink: Logits[Sink, in_dtype, rank, axis, False],
    pairs: Floats,
    total: Int64,
    across: Int64,
    n: Int64,
    tiles: Int64,
    share: Int64,
    spans: Int64,
):
    """Second launch: each block merges the pairs of its columns, and writes its span of them.

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
        exact: Of the scale of the sums.
        lanes: Vectors of columns that a block takes, a power of two.
        width: Columns a vector, of which the last dimension is a multiple.

    Args:
        y: Probabilities.
        x: Logits.
        sink: The additional logits.
        pairs: What the first launch left.
        total: Vectors of columns, less than 2^31.
        across: Those of a position.
        n: Positions.
        tiles: Blocks that a span is shared by.
        share: Positions a span.
        spans: How many there are.
    """
    comptime Vector = SIMD[DType.float32, width]
    comptime deep = COLUMN_THREADS // lanes
    comptime none = Vector(neg_inf[DType.float32]())
    var thread = Int(thread_idx.x)
    # The last block's work is done first.
    var block = UInt32(grid_dim.x) - 1 - UInt32(block_idx.x)
    var span = block // UInt32(tiles)
    var index = (block - span * UInt32(tiles)) * UInt32(lanes) + UInt32(
        thread % lanes
    )
    var outer = index // UInt32(across)
    var inner = Int(index - outer * UInt32(across)) * width
    var row = x.row(Int(outer), inner)
    follow()
    var pair = merge_spans[exact, lanes, width](
        pairs, index, UInt32(total), Int(spans)
    )
    if index >= UInt32(total):
        return
    comptime if has_sink:
        var logits = (
            sink.row(Int(outer), inner)
            .load[width, width](0)
            .cast[DType.float32]()
        )
        pair = pair.joined[exact](logits)
    var scale = Scale[exact, width](pair.m)
    var factor = pair.reciprocal()
    if x.masked:
        # All exponentials are as good as 0, and nothing is left of them.
        factor = pair.m.eq(none).select(Vector(0), factor)
    var target = y.row(Int(outer), inner)
    var start = Int(span) * Int(share)
    var end = min(Int(n), start + Int(share))
    var length = min(row.length, end)
    var mine = start + thread // lanes
    for group in range(ceildiv(end - start, UNROLL * deep) - 1, -1, -1):
        var first = mine + group * UNROLL * deep
        var logits = Array[Vector, UNROLL](fill=none)
        comptime for j in range(UNROLL):
            if first + j * deep < length:
                logits[j] = row.load[width, width](first + j * deep).cast[
                    DType.float32
                ]()
        comptime for j in range(UNROLL):
            if first + j * deep < end:
                target.store[width](
                    first + j * deep,
                    (scale.exp(logits[j]) * factor).cast[out_dtype](),
                )
