"""The gradient of tokens' logarithms and of the entropy on a GPU: one read and one write of the logits, and then its tokens."""

from std.math import ceildiv
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import Dim

from ...gpu.cross_entropy_backward import ELEMENTS, MAX_GRID_Y, ROUNDS
from ...gpu.hardware.pdl import pdl_attributes, pdl_wait
from ...gpu.hardware.tree_reduction import MAX_GRID
from ...gpu.partition.row import LossPart
from ...io.memory import MemoryTarget
from ...io.rows import Rows, Source, Target
from ...math.exponential import Scale, Unit
from ...math.loss import Targets
from ...math.online import accumulator
from ...queue import Queue
from .gpu import BLOCK_SIZE
from .row import Asked, SUMS, Terms, of_token, terms_of

comptime KEPT = 4
"""How many numbers there are of a row between the launches: those of `Terms`, and what exponentials are divided by."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def terms_kernel[
    accum: DType
](
    kept: Target[accum],
    sums: Source[accum],
    tokens: Targets,
    each: Int64,
    dlog_probs: Source[accum],
    dentropy: Source[accum],
    has_entropy: Int64,
    rows: Int64,
    n: Int64,
    factor: Scalar[accum],
):
    """First launch: what the gradients of each row share, a thread a row.

    Parameters:
        accum: Dtype of all.

    Args:
        kept: `KEPT` numbers of each row.
        sums: (m, d, h) of each row.
        tokens: The tokens of row 0, then those of row 1 and so on.
        each: How many of a row.
        dlog_probs: The gradients of the tokens' logarithms.
        dentropy: The gradient of each row's entropy.
        has_entropy: Whether there is one.
        rows: How many rows.
        n: Their length.
        factor: What logits are multiplied by.
    """
    pdl_wait()
    for row in range(
        Int(block_idx.x) * BLOCK_SIZE + Int(thread_idx.x),
        Int(rows),
        Int(grid_dim.x) * BLOCK_SIZE,
    ):
        var terms = terms_of(
            tokens,
            Int(each),
            row,
            Int(n),
            factor,
            sums,
            dlog_probs,
            dentropy,
            has_entropy != 0,
        )
        var to = kept.unsafe_offset(KEPT * row)
        to[unsafe_offset=0] = terms.m
        to[unsafe_offset=1] = terms.even
        to[unsafe_offset=2] = terms.slope
        to[unsafe_offset=3] = sums[unsafe_offset=SUMS * row + 1]


@inline(.always)
def _terms[accum: DType, //](kept: Source[accum], row: Int) -> Terms[accum]:
    """Returns what `terms_kernel` left of a row."""
    var of_row = kept.unsafe_offset(KEPT * row)
    return {
        of_row[unsafe_offset=0],
        of_row[unsafe_offset=1],
        of_row[unsafe_offset=2],
    }


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE)),
    `nvvm.minctasm`=SIMDLength(3),
)
def rows_kernel[
    dtype: DType
](
    dx: Target[dtype],
    x: Source[dtype],
    kept: Source[DType.float32],
    rows: Int64,
    n: Int64,
    factor: Float32,
):
    """Second launch for contiguous rows: the gradient, as if there were no tokens, a block for each part of a row.

    Parameters:
        dtype: Dtype of the logits, of 4 bytes or 2.

    - `dx`: Gradients.
    - `kept`: What `terms_kernel` left.
    - `n`: Their length.
    - `factor`: What logits are multiplied by.
    """
    comptime P = LossPart[dtype, BLOCK_SIZE]
    comptime vectors = ELEMENTS // P.width
    pdl_wait()
    for row in range(Int(block_idx.x), Int(rows), Int(grid_dim.x)):
        var part = P.of_share(
            MemoryTarget(dx),
            P.S(x),
            row,
            Int(n),
            Int(thread_idx.x),
            Int(block_idx.y),
            BLOCK_SIZE * vectors * ROUNDS,
        )
        var edges = part.ask_edges()
        var raw = part.ask[vectors](0)
        var terms = _terms(kept, row)
        var scale = Scale[True](terms.m)
        var d = kept[unsafe_offset=KEPT * row + 3]
        var inverse = 1 / (d * scale.exp(scale.m))

        @inline(.always)
        def gradient[
            width: SIMDLength
        ](logits: SIMD[DType.float32, width]) {imm} -> SIMD[
            DType.float32, width
        ]:
            var z = logits * factor
            return terms.gradient(scale.exp(z) * inverse, z)

        @inline(.always)
        def result(
            logits: SIMD[DType.float32, P.width]
        ) {imm} -> SIMD[DType.float32, P.width]:
            return gradient(logits)

        part.rewrite(raw^, result)
        part.store_edges(gradient(P.edges_of(edges)))


@inline(.always)
def _gradient[
    accum: DType, //
](kept: Source[accum], row: Int, z: Scalar[accum]) -> Scalar[accum]:
    """Returns the gradient of a logit that is of no token, for rows that `rows_kernel` does not take.
    """
    var terms = _terms(kept, row)
    var unit = Unit(terms.m)
    var p = unit.exp(z) / (
        kept[unsafe_offset=KEPT * row + 3] * unit.exp(terms.m)
    )
    return terms.gradient(p, z)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def columns_kernel[
    dtype: DType
](
    dx: Target[dtype],
    x: Source[dtype],
    kept: Source[accumulator[dtype]()],
    outer: Int64,
    n: Int64,
    inner: Int64,
    factor: Scalar[accumulator[dtype]()],
):
    """Second launch for rows along any axis, of any dtype: a thread a part of a row, so that those of neighbouring rows read
    neighbours.

    - `dx`: Gradients.
    - `kept`: What `terms_kernel` left.
    - `outer`: First dimension.
    - `n`: Length of the rows.
    - `inner`: Last dimension.
    - `factor`: What logits are multiplied by.
    """
    comptime accum = accumulator[dtype]()
    var rows = Rows(Int(outer), Int(n), Int(inner))
    pdl_wait()
    for row in range(
        Int(block_idx.x) * BLOCK_SIZE + Int(thread_idx.x),
        rows.count(),
        Int(grid_dim.x) * BLOCK_SIZE,
    ):
        var start = rows.start(row)
        for first in range(
            Int(block_idx.y) * ELEMENTS, rows.n, Int(grid_dim.y) * ELEMENTS
        ):
            for i in range(first, min(first + ELEMENTS, rows.n)):
                var at = start + i * rows.inner
                var z = x[unsafe_offset=at].cast[accum]() * factor
                dx[unsafe_offset=at] = _gradient(kept, row, z).cast[dtype]()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def tokens_kernel[
    dtype: DType
](
    dx: Target[dtype],
    x: Source[dtype],
    kept: Source[accumulator[dtype]()],
    tokens: Targets,
    each: Int64,
    dlog_probs: Source[accumulator[dtype]()],
    outer: Int64,
    n: Int64,
    inner: Int64,
    factor: Scalar[accumulator[dtype]()],
):
    """Third launch: the gradients of the logits of tokens, a thread a token; of one that is there twice either writes the same.

    - `dx`: Gradients.
    - `kept`: What `terms_kernel` left.
    - `tokens`: The tokens of row 0, then those of row 1 and so on.
    - `each`: How many of a row.
    - `dlog_probs`: The gradients of the tokens' logarithms.
    - `outer`: First dimension.
    - `n`: Length of the rows.
    - `inner`: Last dimension.
    - `factor`: What logits are multiplied by.
    """
    comptime accum = accumulator[dtype]()
    var rows = Rows(Int(outer), Int(n), Int(inner))
    pdl_wait()
    for i in range(
        Int(block_idx.x) * BLOCK_SIZE + Int(thread_idx.x),
        rows.count() * Int(each),
        Int(grid_dim.x) * BLOCK_SIZE,
    ):
        var token = tokens[i]
        if token >= 0 and token < n:
            var row = i // Int(each)
            var at = rows.start(row) + Int(token) * rows.inner
            var z = x[unsafe_offset=at].cast[accum]() * factor
            var more = of_token(tokens, Int(each), i, factor, dlog_probs)
            dx[unsafe_offset=at] = (_gradient(kept, row, z) + more).cast[
                dtype
            ]()


def gradients_on_gpu[
    dtype: DType, contiguous: Bool
](
    dx: Target[dtype],
    x: Source[dtype],
    sums: Source[accumulator[dtype]()],
    asked: Asked,
    dlog_probs: Source[accumulator[dtype]()],
    dentropy: Optional[Source[accumulator[dtype]()]],
    rows: Rows,
    queue: Queue,
) raises:
    """Enqueues what `direct.token_log_probs_backward` does."""
    comptime accum = accumulator[dtype]()
    var factor = asked.factor[accum]()
    var kept = queue.scratch[accum](KEPT * rows.count())
    queue.launch[terms_kernel[accum]](
        kept.pointer,
        sums,
        asked.tokens,
        Int64(asked.each),
        dlog_probs,
        dentropy.value() if dentropy else dlog_probs,
        Int64(Bool(dentropy)),
        Int64(rows.count()),
        Int64(rows.n),
        factor,
        grid_dim=min(ceildiv(rows.count(), BLOCK_SIZE), MAX_GRID),
        block_dim=BLOCK_SIZE,
        attributes=pdl_attributes(),
    )
    comptime share = BLOCK_SIZE * ELEMENTS * ROUNDS
    var is_taken = False
    comptime if contiguous and dtype != DType.float64:
        is_taken = rows.n <= MAX_GRID_Y * share
        if is_taken:
            queue.launch[rows_kernel[dtype]](
                dx,
                x,
                rebind[Source[DType.float32]](kept.pointer),
                Int64(rows.count()),
                Int64(rows.n),
                rebind[Float32](factor),
                grid_dim=Dim(
                    min(rows.count(), MAX_GRID), ceildiv(rows.n, share), 1
                ),
                block_dim=BLOCK_SIZE,
                attributes=pdl_attributes(),
            )
    if not is_taken:
        queue.launch[columns_kernel[dtype]](
            dx,
            x,
            kept.pointer,
            Int64(rows.outer),
            Int64(rows.n),
            Int64(rows.inner),
            factor,
            grid_dim=Dim(
                min(ceildiv(rows.count(), BLOCK_SIZE), MAX_GRID),
                min(ceildiv(rows.n, ELEMENTS), MAX_GRID_Y),
                1,
            ),
            block_dim=BLOCK_SIZE,
            attributes=pdl_attributes(),
        )
    if asked.each > 0:
        queue.launch[tokens_kernel[dtype]](
            dx,
            x,
            kept.pointer,
            asked.tokens,
            Int64(asked.each),
            dlog_probs,
            Int64(rows.outer),
            Int64(rows.n),
            Int64(rows.inner),
            factor,
            grid_dim=min(
                ceildiv(rows.count() * asked.each, BLOCK_SIZE), MAX_GRID
            ),
            block_dim=BLOCK_SIZE,
            attributes=pdl_attributes(),
        )
    # Not before: what is freed may be somebody else's by the time it is read.
    _ = kept^
