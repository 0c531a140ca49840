"""The gradient of the divergence on a GPU: one read of both tensors, and one write."""

from std.math import ceildiv
from std.sys import size_of
from std.utils.numerics import nan
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
from ...gpu.partition.row import LossPart, product
from ...io.memory import MemoryTarget
from ...io.rows import Rows, Source, Target
from ...math.exponential import Scale, Unit
from ...math.online import accumulator
from ...queue import Queue
from .gpu import BLOCK_SIZE, lie_alike
from .row import SUMS, Terms

comptime TAKEN = ELEMENTS // 2
"""Elements of each tensor that a thread has under way at a time."""


@inline(.always)
def _inverse(d: Float32, scale: Scale[True]) -> Float32:
    """Returns what exponentials in a scale are to be multiplied by to be probabilities: NaN of nothing but -inf, whose exponentials are not
    quite 0.

    Args:
        d: Σ e^(z - m).
        scale: That of the maximum.
    """
    return 1 / (d * scale.exp(scale.m)) if d != 0 else nan[DType.float32]()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE)),
    `nvvm.minctasm`=SIMDLength(3),
)
def rows_kernel[
    dtype: DType, of_p: Bool
](
    dx: Target[dtype],
    p: Source[dtype],
    q: Source[dtype],
    sums: Source[DType.float32],
    dkl: Source[DType.float32],
    has_dkl: Int64,
    rows: Int64,
    n: Int64,
    factor: Float32,
):
    """Writes gradients of contiguous rows, a block for each part of a row.

    Parameters:
        dtype: Dtype of the logits, of 4 bytes or 2.
        of_p: Whether gradients are those of p.

    - `dx`: Gradients.
    - `p`: Logits of p.
    - `q`: Those of q, which lie alike.
    - `sums`: What there is of each row.
    - `dkl`: The gradient of each row's divergence.
    - `has_dkl`: Whether there are any; else each is 1.
    - `n`: Their length.
    - `factor`: What logits are multiplied by.
    """
    comptime F = DType.float32
    comptime P = LossPart[dtype, BLOCK_SIZE]
    comptime vectors = TAKEN // P.width
    pdl_wait()
    for row in range(Int(block_idx.x), Int(rows), Int(grid_dim.x)):
        var part = P.of_share(
            MemoryTarget(dx),
            P.S(p),
            row,
            Int(n),
            Int(thread_idx.x),
            Int(block_idx.y),
            BLOCK_SIZE * vectors * ROUNDS,
        )
        var second = part
        second.source = part.source.onwards(
            (Int(q) - Int(p)) // size_of[dtype]()
        )
        var edges = part.load_edges(0)
        var other_edges = second.load_edges(0)
        var terms = Terms[F].of(sums, dkl, has_dkl != 0, row, factor)
        var of_row = sums.unsafe_offset(SUMS * row)
        var scale_p = Scale[True](of_row[unsafe_offset=0])
        var scale_q = Scale[True](of_row[unsafe_offset=2])
        var inverse_p = _inverse(of_row[unsafe_offset=1], scale_p)
        var inverse_q = _inverse(of_row[unsafe_offset=3], scale_q)

        @inline(.always)
        def gradient[
            width: SIMDLength
        ](x: SIMD[F, width], other: SIMD[F, width]) {imm} -> SIMD[F, width]:
            # Rounded, whether by the vector or alone at the edges of a row, which are told apart by its address.
            comptime V = SIMD[F, width]
            var z_p = product(x, V(factor))
            var z_q = product(other, V(factor))
            var p = product(scale_p.exp(z_p), V(inverse_p))
            comptime if of_p:
                return terms.gradient[True](p, p, z_p - z_q)
            else:
                var q = product(scale_q.exp(z_q), V(inverse_q))
                return terms.gradient[False](p, q, p)

        comptime for aligned in [True, False]:
            if part.aligned == aligned:
                for i in range(0, part.rounds() + 1, vectors):
                    var mine = Array[P.Raw, vectors](fill=P.Raw(0))
                    var theirs = Array[P.Raw, vectors](fill=P.Raw(0))
                    comptime for j in range(vectors):
                        if part.has(i + j):
                            mine[j] = part.load(i + j)
                            theirs[j] = second.load(i + j)
                    comptime for j in range(vectors):
                        if part.has(i + j):
                            part.store[aligned](
                                i + j,
                                gradient(
                                    mine[j].cast[F](), theirs[j].cast[F]()
                                ),
                            )
        part.store_edges(gradient(edges, other_edges))


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def columns_kernel[
    dtype: DType, of_p: Bool
](
    dx: Target[dtype],
    p: Source[dtype],
    q: Source[dtype],
    sums: Source[accumulator[dtype]()],
    dkl: Source[accumulator[dtype]()],
    has_dkl: Int64,
    outer: Int64,
    n: Int64,
    inner: Int64,
    factor: Scalar[accumulator[dtype]()],
):
    """Writes gradients of rows along any axis, of any dtype: a thread a part of a row, so that those of neighbouring rows read
    neighbours.

    - `of_p`: Whether gradients are those of p.

    Args:
        dx: Gradients.
        p: Logits of p.
        q: Logits of q.
        sums: What there is of each row.
        dkl: The gradient of each row's divergence.
        has_dkl: Whether there are any; else each is 1.
        outer: First dimension.
        n: Length of the rows.
        inner: Last dimension.
        factor: What logits are multiplied by.
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
        var terms = Terms[accum].of(sums, dkl, has_dkl != 0, row, factor)
        var of_row = sums.unsafe_offset(SUMS * row)
        var unit_p = Unit(of_row[unsafe_offset=0])
        var unit_q = Unit(of_row[unsafe_offset=2])
        var d_p = of_row[unsafe_offset=1] * unit_p.exp(of_row[unsafe_offset=0])
        var d_q = of_row[unsafe_offset=3] * unit_q.exp(of_row[unsafe_offset=2])
        for first in range(
            Int(block_idx.y) * ELEMENTS, rows.n, Int(grid_dim.y) * ELEMENTS
        ):
            for i in range(first, min(first + ELEMENTS, rows.n)):
                var at = start + i * rows.inner
                var z_p = p[unsafe_offset=at].cast[accum]() * factor
                var z_q = q[unsafe_offset=at].cast[accum]() * factor
                dx[unsafe_offset=at] = terms.gradient[of_p](
                    unit_p.exp(z_p) / d_p,
                    unit_q.exp(z_q) / d_q,
                    z_p - z_q,
                ).cast[dtype]()


def gradients_on_gpu[
    dtype: DType, contiguous: Bool
](
    dx: Target[dtype],
    p: Source[dtype],
    q: Source[dtype],
    sums: Source[accumulator[dtype]()],
    dkl: Optional[Source[accumulator[dtype]()]],
    of_p: Bool,
    factor: Scalar[accumulator[dtype]()],
    rows: Rows,
    queue: Queue,
) raises:
    """Enqueues what `direct.kl_divergence_backward` does."""
    comptime for of_first in [False, True]:
        if of_p == of_first:
            _launch[dtype, contiguous, of_first](
                dx, p, q, sums, dkl, factor, rows, queue
            )


def _launch[
    dtype: DType, contiguous: Bool, of_p: Bool
](
    dx: Target[dtype],
    p: Source[dtype],
    q: Source[dtype],
    sums: Source[accumulator[dtype]()],
    dkl: Optional[Source[accumulator[dtype]()]],
    factor: Scalar[accumulator[dtype]()],
    rows: Rows,
    queue: Queue,
) raises:
    """Enqueues the gradient of one of them."""
    comptime share = BLOCK_SIZE * TAKEN * ROUNDS
    var upstream = dkl.value() if dkl else sums
    comptime if contiguous and dtype != DType.float64:
        if rows.n <= MAX_GRID_Y * share and lie_alike(p, q):
            queue.launch[rows_kernel[dtype, of_p]](
                dx,
                p,
                q,
                rebind[Source[DType.float32]](sums),
                rebind[Source[DType.float32]](upstream),
                Int64(Bool(dkl)),
                Int64(rows.count()),
                Int64(rows.n),
                rebind[Float32](factor),
                grid_dim=Dim(
                    min(rows.count(), MAX_GRID), ceildiv(rows.n, share), 1
                ),
                block_dim=BLOCK_SIZE,
                attributes=pdl_attributes(),
            )
            return
    queue.launch[columns_kernel[dtype, of_p]](
        dx,
        p,
        q,
        sums,
        upstream,
        Int64(Bool(dkl)),
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
