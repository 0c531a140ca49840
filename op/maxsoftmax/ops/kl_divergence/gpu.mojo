"""The divergence on a GPU: what rows of both tensors sum to in one read."""

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

from ...gpu.fallback import columns_of_block
from ...gpu.hardware.pdl import pdl_attributes, pdl_wait
from ...gpu.hardware.tree_reduction import MAX_GRID, larger, plus, tree_reduce
from ...gpu.streaming import streaming_pairs
from ...io.rows import Rows, Source, Target, VECTOR_BYTES
from ...math.exponential import Unit
from ...math.online import MaxSum, Sum, accumulator
from ...queue import Queue
from .row import SUMS, divergence
from .sums import DivergenceSums

comptime BLOCK_SIZE = 256
"""Threads a block."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def sums_kernel[
    dtype: DType
](
    sums: Target[accumulator[dtype]()],
    p: Source[dtype],
    q: Source[dtype],
    outer: Int64,
    n: Int64,
    inner: Int64,
    columns: Int64,
    factor: Scalar[accumulator[dtype]()],
):
    """Writes the five numbers of rows along any axis, of any dtype: as `fallback` walks them.

    Args:
        sums: Those of each row.
        p: Logits of p.
        q: Logits of q.
        outer: First dimension.
        n: Length of the rows.
        inner: Last dimension.
        columns: Rows a block takes at a time, a power of two up to `BLOCK_SIZE`.
        factor: What logits are multiplied by.
    """
    comptime accum = accumulator[dtype]()
    var maxima = unsafe_stack_allocation[
        BLOCK_SIZE, Scalar[accum], address_space=AddressSpace.SHARED
    ]()
    var scratch = unsafe_stack_allocation[
        BLOCK_SIZE, Sum[accum, 1], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var start = thread // Int(columns)
    var step = BLOCK_SIZE // Int(columns)
    var tiles = ceildiv(Int(inner), Int(columns))
    pdl_wait()
    for tile in range(Int(block_idx.x), Int(outer) * tiles, Int(grid_dim.x)):
        var before = tile // tiles
        var after = tile % tiles * Int(columns) + thread % Int(columns)
        # Threads beyond the last column only keep the others company at the barriers.
        var taken = after < Int(inner)
        var end = Int(n) if taken else 0
        var first = before * Int(n) * Int(inner) + after

        @inline(.always)
        def load(x: Source[dtype], i: Int) {imm} -> Scalar[accum]:
            var at = first + i * Int(inner)
            return x[unsafe_offset=at].cast[accum]() * factor

        @inline(.always)
        def largest(x: Source[dtype]) {imm} -> Scalar[accum]:
            var most = neg_inf[accum]()
            for i in range(start, end, step):
                most = max(most, load(x, i))
            return tree_reduce[BLOCK_SIZE, larger[accum]](
                maxima, thread, most, Int(columns)
            )

        @inline(.always)
        def sum(of: Sum[accum, 1]) {imm} -> Sum[accum, 1]:
            return tree_reduce[BLOCK_SIZE, plus[accum]](
                scratch, thread, of, Int(columns)
            )

        var m_p = largest(p)
        var m_q = largest(q)
        var d_p = Sum[accum, 1]()
        var d_q = Sum[accum, 1]()
        var s = Sum[accum, 1]()
        for i in range(start, end, step):
            var z_p = load(p, i)
            var z_q = load(q, i)
            var e_p = Unit(m_p).exp(z_p)
            d_p.add(e_p)
            d_q.add(Unit(m_q).exp(z_q))
            # Nothing times infinity is not wanted here.
            if e_p != 0:
                s.add(e_p * (z_p - z_q))
        d_p = sum(d_p)
        d_q = sum(d_q)
        s = sum(s)
        if start == 0 and taken:
            var to = sums.unsafe_offset(SUMS * (before * Int(inner) + after))
            to[unsafe_offset=0] = m_p
            to[unsafe_offset=1] = MaxSum[accum, 1](m_p, d_p).relative()
            to[unsafe_offset=2] = m_q
            to[unsafe_offset=3] = MaxSum[accum, 1](m_q, d_q).relative()
            to[unsafe_offset=4] = divergence(to, s.value / d_p.value)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def divergences_kernel[
    accum: DType
](kl: Target[accum], sums: Source[accum], rows: Int64):
    """Writes the divergences by themselves, a thread each.

    Parameters:
        accum: Dtype of both.

    - `kl`: One a row.
    - `sums`: What there is of each row.
    """
    pdl_wait()
    for row in range(
        Int(block_idx.x) * BLOCK_SIZE + Int(thread_idx.x),
        Int(rows),
        Int(grid_dim.x) * BLOCK_SIZE,
    ):
        kl[unsafe_offset=row] = sums[unsafe_offset=SUMS * row + 4]


def lie_alike[dtype: DType, //](p: Source[dtype], q: Source[dtype]) -> Bool:
    """Returns whether rows of both begin at the same places between two multiples of 16 bytes.
    """
    return (Int(p) - Int(q)) % VECTOR_BYTES == 0


def divergences_on_gpu[
    dtype: DType, contiguous: Bool
](
    kl: Target[accumulator[dtype]()],
    sums: Target[accumulator[dtype]()],
    p: Source[dtype],
    q: Source[dtype],
    factor: Scalar[accumulator[dtype]()],
    rows: Rows,
    queue: Queue,
) raises:
    """Enqueues what `direct.kl_divergence` does."""
    comptime accum = accumulator[dtype]()
    var is_taken = False
    comptime if contiguous and dtype != DType.float64:
        is_taken = rows.n > 0 and lie_alike(p, q)
        if is_taken:
            streaming_pairs[DivergenceSums[dtype]](
                rebind[Target[DType.float32]](sums),
                p,
                rows,
                queue,
                rebind[Float32](factor),
                q,
            )
    if not is_taken:
        var columns = columns_of_block[dtype](BLOCK_SIZE, rows)
        queue.launch[sums_kernel[dtype]](
            sums,
            p,
            q,
            Int64(rows.outer),
            Int64(rows.n),
            Int64(rows.inner),
            Int64(columns),
            factor,
            grid_dim=min(rows.outer * ceildiv(rows.inner, columns), MAX_GRID),
            block_dim=BLOCK_SIZE,
            attributes=pdl_attributes(),
        )
    queue.launch[divergences_kernel[accum]](
        kl,
        sums,
        Int64(rows.count()),
        grid_dim=min(ceildiv(rows.count(), BLOCK_SIZE), MAX_GRID),
        block_dim=BLOCK_SIZE,
        attributes=pdl_attributes(),
    )
