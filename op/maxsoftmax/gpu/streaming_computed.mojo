"""Logits that are computed as they are read, of rows that do not fit on the chip: once for the sum, and again for
probabilities or their logarithms.
"""

from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from ..ops.finish import Finish
from ..io.logits import Logits
from ..math.online import MaxSum, accumulator
from ..io.results import Results
from .hardware.pdl import pdl_wait
from .hardware.warp_reduction import pair_reduce


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def streaming_computed_kernel[
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
    vectors: Int,
    width: Int,
](
    y: Results[Out, out_dtype, rank, axis, epilogue],
    x: Logits[Fusion, in_dtype, rank, axis, causal],
    sink: Logits[Sink, in_dtype, rank, axis, False],
    rows: Int64,
    n: Int64,
):
    """Writes the softmax of `rows` rows of `n` along the last axis, or its logarithm, a block for each.

    Parameters:
        Fusion: What computes the logits.
        Sink: What computes the sinks.
        Out: What takes the probabilities.
        in_dtype: Dtype of the logits.
        out_dtype: Dtype of the probabilities.
        rank: Number of dimensions.
        axis: The last axis.
        causal: Whether rows end at the diagonal.
        epilogue: Whether something takes the probabilities.
        has_sink: Whether there is one more logit a row, in the denominator only.
        finish: What of each row is written: an element for each of its own.
        block_size: Threads a block, at least a warp.
        vectors: Vectors that a thread keeps in registers.
        width: Elements a vector, of which `n` is a multiple.

    Args:
        y: Probabilities, or their logarithms.
        x: Logits.
        sink: The additional logits.
        rows: How many; block b takes row b and every gridDim-th after it.
        n: Length of each.
    """
    comptime accum = accumulator[in_dtype]()
    comptime Vector = SIMD[accum, width]
    comptime step = block_size * width
    var thread = Int(thread_idx.x)
    pdl_wait()
    for index in range(Int(block_idx.x), Int(rows), Int(grid_dim.x)):
        var row = x.row(index, 0)
        var target = y.row(index, 0)
        var held = Array[Vector, vectors](fill=Vector(neg_inf[accum]()))
        comptime for j in range(vectors):
            var i = thread * width + j * step
            if i < row.length:
                held[j] = row.load[width, width](i)
        var pair = MaxSum[accum, width]()
        pair.add(held)
        for i in range(thread * width + vectors * step, row.length, step):
            pair.add(Array[Vector, 1](fill=row.load[width, width](i)))

        var whole = pair_reduce[block_size](thread, pair)
        comptime if has_sink:
            whole.add(
                Array[SIMD[accum, 1], 1](fill=sink.row(index, 0).load[1](0))
            )
        # One of the two is used.
        var normalizer = whole.normalizer()
        var logarithms = whole.logarithms()
        comptime nothing = neg_inf[
            accum
        ]() if finish == Finish.LOGARITHMS else Scalar[accum](0)
        var empty = Bool(whole.m == neg_inf[accum]() and whole.d.value == 0)

        @inline(.always)
        def store(i: Int, logits: Vector) {imm}:
            var values: Vector
            comptime if finish == Finish.LOGARITHMS:
                values = logarithms.probability(logits)
            else:
                values = normalizer.probability(logits)
            if x.masked:
                if empty:
                    values = nothing
            target.store[width](i, values)

        comptime for j in range(vectors):
            var i = thread * width + j * step
            if i < Int(n):
                store(i, held[j])
        for i in range(thread * width + vectors * step, Int(n), step):
            var logits = Vector(neg_inf[accum]())
            if i < row.length:
                logits = row.load[width, width](i)
            store(i, logits)
