"""Logits that are computed as they are read, of rows that nothing else holds: once for the sum, and again for
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

from ..ops.finish import Finish
from ..io.source import RowSource
from ..io.target import RowTarget
from ..math.online import MaxSum, accumulator
from ..queue import Queue
from ..io.rows import Rows
from .hardware.pdl import pdl_attributes, pdl_wait
from .hardware.tree_reduction import MAX_GRID
from .hardware.warp_reduction import pair_reduce
from .partition.row import vector_width, whole_vectors
from .tuning import Tuned


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def streaming_computed_kernel[
    S: RowSource,
    T: RowTarget,
    finish: Finish,
    block_size: Int,
    vectors: Int,
    width: Int,
    aligned: Bool,
](y: T, x: S, rows: Int64, n: Int64):
    """Writes the softmax of `rows` rows of `n` along the last axis, or its logarithm, a block for each.

    - `S`: What computes the logits.
    - `finish`: What of each row is written: an element for each of its own.
    - `block_size`: Threads a block, at least a warp.
    - `vectors`: Vectors that a thread keeps in registers.
    - `width`: Elements a vector.
    - `aligned`: Whether vectors can be read and written, and `n` is a multiple of one; otherwise the same elements are, with the same results.
    - `y`: Probabilities, or their logarithms.
    - `rows`: How many; block b takes row b and every gridDim-th after it.
    """
    comptime accum = accumulator[S.elements]()
    comptime Vector = SIMD[accum, width]
    comptime step = block_size * width
    var thread = Int(thread_idx.x)
    pdl_wait()
    for index in range(Int(block_idx.x), Int(rows), Int(grid_dim.x)):
        var row = x.line(index, Int(n))
        var target = y.line(index, Int(n))
        var length = row.length(Int(n))

        @inline(.always)
        def logits(i: Int) {imm} -> Vector:
            """Returns the logits from element `i` on, -inf where none take part.
            """
            var values = Vector(neg_inf[accum]())
            comptime if aligned:
                if i < length:
                    values = rebind[Vector](row.logits(i, row.load[width](i)))
            else:
                comptime if not S.Line.in_memory:
                    if i + width <= length:
                        return rebind[Vector](
                            row.logits(i, row.load_from_any[width](i))
                        )
                comptime for k in range(width):
                    if i + k < length:
                        values[k] = rebind[Scalar[accum]](
                            row.logits(i + k, row.load[1](i + k))
                        )
            return values

        var held = Array[Vector, vectors](fill=0)
        comptime for j in range(vectors):
            held[j] = logits(thread * width + j * step)
        var pair = MaxSum[accum, width]()
        pair.add(held)
        for i in range(thread * width + vectors * step, length, step):
            pair.add(Array[Vector, 1](fill=logits(i)))

        var whole = pair_reduce[block_size](thread, pair)
        comptime if S.has_sink:
            whole.add(
                Array[SIMD[accum, 1], 1](fill=x.sink[1](index, 0).cast[accum]())
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
            if x.is_masked():
                if empty:
                    values = nothing
            comptime if not aligned:
                if i + width > Int(n):
                    comptime for k in range(width):
                        if i + k < Int(n):
                            target.store[False](i + k, values[k])
                    return
            target.store[aligned](i, values)

        comptime for j in range(vectors):
            var i = thread * width + j * step
            if i < Int(n):
                store(i, held[j])
        for i in range(thread * width + vectors * step, Int(n), step):
            store(i, logits(i))


def streaming_computed[
    S: RowSource, T: RowTarget, //, finish: Finish
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Launches `streaming_computed_kernel`, whose parameters and arguments these are, with rows along the last axis.
    """

    @inline(.always)
    def launch[width: Int, aligned: Bool = True]() raises {imm}:
        queue.launch[
            streaming_computed_kernel[
                S, T, finish, Tuned.computed_block_size, 8, width, aligned
            ]
        ](
            y,
            x,
            Int64(rows.count()),
            Int64(rows.n),
            grid_dim=min(rows.count(), MAX_GRID),
            block_dim=Tuned.computed_block_size,
            attributes=pdl_attributes(),
        )

    comptime if S.elements != DType.float64:
        comptime width = vector_width[
            S.Line.elements, S.Line.in_memory, T.Line.stored
        ]()
        comptime if rows.length % width == 0:
            if whole_vectors[width](y, x, rows):
                launch[width]()
                return
        launch[width, aligned=False]()
    else:
        launch[1]()
