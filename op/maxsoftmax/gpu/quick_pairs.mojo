"""The pairs of rows in one read, for their logarithm: what log-sum-exp and cross entropy need of a long row.

Nothing is kept, so that a row may be of any length, and nothing is written, so that there is nothing for an exponential to
hide behind: three operations each. A thread has a maximum and sums of its own, which it rescales when the maximum grows.
"""

from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_idx,
    grid_dim,
    thread_idx,
)

from ..exponential import Scale, quick_exp
from ..rows import Source
from .cluster import Pair
from .overlap import follow
from .part import Part
from .team import greater, largest_lane, maximum, team_reduce, total
from .tile import write_pair

comptime BLOCK_SIZE = 256
"""Threads a block."""

comptime UNROLL = 4
"""Vectors that a thread has under way at a time."""

comptime Pairs = Pointer[Pair[], MutUntrackedOrigin]
"""Where pairs wait for those of the other blocks."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE)),
    `nvvm.minctasm`=SIMDLength(1024 // BLOCK_SIZE),
)
def quick_pairs_kernel[
    dtype: DType, alone: Bool
](
    pairs: Pairs,
    x: Source[dtype],
    rows: Int64,
    n: Int64,
    blocks: Int64,
    share: Int64,
):
    """Leaves the pair of each block's part of each of its rows, in the `Scale` of its maximum.

    Parameters:
        dtype: Dtype of the logits, of 4 bytes or 2.
        alone: Whether every block has all of a row, and leaves the row's (m, d).

    Args:
        pairs: Where the pairs go.
        x: Logits.
        rows: How many.
        n: Length of each.
        blocks: Blocks that share a row.
        share: Vectors of a row that a block takes.
    """
    comptime P = Part[dtype, BLOCK_SIZE]
    var maxima = unsafe_stack_allocation[
        BLOCK_SIZE // WARP_SIZE, Float32, address_space=AddressSpace.SHARED
    ]()
    var sums = unsafe_stack_allocation[
        BLOCK_SIZE // WARP_SIZE, Float32, address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var rank = Int(block_idx.x) % Int(blocks)
    follow()
    for row in range(
        Int(block_idx.x) // Int(blocks),
        Int(rows),
        Int(grid_dim.x) // Int(blocks),
    ):
        var part = P(
            x.unsafe_mut_cast[True](),
            x,
            row,
            Int(n),
            thread,
            rank,
            Int(share),
        )
        var edges = part.load_edges(x)
        var m = largest_lane(edges)
        var d = SIMD[DType.float32, P.width](0)
        d[0] = quick_exp(edges, _origin(m)).reduce_add()
        for i in range(0, part.rounds() + 1, UNROLL):
            var raw = Array[P.Raw, UNROLL](fill=P.Raw(neg_inf[dtype]()))
            comptime for j in range(UNROLL):
                if part.has(i + j):
                    raw[j] = part.load(i + j)
            var largest = raw[0]
            comptime for j in range(1, UNROLL):
                largest = maximum(largest, raw[j])
            var larger = maximum(m, largest_lane(largest).cast[DType.float32]())
            # After the first few vectors hardly ever.
            if not larger <= m:
                d *= _over(m, larger)
                m = larger
            comptime for j in range(UNROLL):
                d += quick_exp(raw[j].cast[DType.float32](), _origin(m))
        var all = team_reduce[BLOCK_SIZE, greater](maxima, thread, m)
        var sum = team_reduce[BLOCK_SIZE, total](
            sums, thread, d.reduce_add() * _over(m, all)
        )
        if thread == 0:
            var scale = Scale[size_of[dtype]() > 2](all)
            var pair = Pair(all, sum * scale.exp(scale.m))
            comptime if alone:
                write_pair[size_of[dtype]() > 2](
                    pairs.unsafe_bitcast[Float32](), row, pair
                )
            else:
                pairs[unsafe_offset=row * Int(blocks) + rank] = pair


@inline(.always)
def _origin(m: Float32) -> Float32:
    """Returns what exponentials are counted from: the maximum, or 0 if there is nothing yet but -inf.
    """
    return Float32(0) if m == neg_inf[DType.float32]() else m


@inline(.always)
def _over(m: Float32, larger: Float32) -> Float32:
    """Returns what a sum is to be multiplied by when its maximum grows."""
    if m == neg_inf[DType.float32]():
        return 0
    return quick_exp(SIMD[DType.float32, 1](m), larger)[0]
