"""The tokens' logarithms and the entropy on a GPU: what rows sum to, and a thread for each token."""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
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
from ...io.rows import Rows, Source, Target
from ...math.exponential import Unit, logarithm
from ...math.loss import Targets
from ...math.online import MaxSum, Sum, accumulator
from ...queue import Queue
from .moments import EntropySums
from .row import Asked, FAR, SUMS, log_prob

comptime BLOCK_SIZE = 256
"""Threads a block."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def sums_kernel[
    dtype: DType
](
    sums: Target[accumulator[dtype]()],
    x: Source[dtype],
    outer: Int64,
    n: Int64,
    inner: Int64,
    columns: Int64,
    factor: Scalar[accumulator[dtype]()],
):
    """Writes (m, d, h) of rows along any axis, of any dtype: as `fallback` walks them.

    - `sums`: (m, d, h) of each row.
    - `outer`: First dimension.
    - `n`: Length of the rows.
    - `inner`: Last dimension.
    - `columns`: Rows a block takes at a time, a power of two up to `BLOCK_SIZE`.
    - `factor`: What logits are multiplied by.
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
        var row = x.unsafe_offset(before * Int(n) * Int(inner) + after)

        @inline(.always)
        def load(i: Int) {imm} -> Scalar[accum]:
            return row[unsafe_offset=i * Int(inner)].cast[accum]() * factor

        var most = neg_inf[accum]()
        for i in range(start, end, step):
            most = max(most, load(i))
        var m = tree_reduce[BLOCK_SIZE, larger[accum]](
            maxima, thread, most, Int(columns)
        )
        var unit = Unit(m)
        var d = Sum[accum, 1]()
        var s = Sum[accum, 1]()
        for i in range(start, end, step):
            var z = load(i)
            var e_z = unit.exp(z)
            d.add(e_z)
            s.add(e_z * min(m - z, Scalar[accum](-FAR)))
        d = tree_reduce[BLOCK_SIZE, plus[accum]](
            scratch, thread, d, Int(columns)
        )
        s = tree_reduce[BLOCK_SIZE, plus[accum]](
            scratch, thread, s, Int(columns)
        )
        if start == 0 and taken:
            var to = sums.unsafe_offset(SUMS * (before * Int(inner) + after))
            var relative = MaxSum[accum, 1](m, d).relative()
            to[unsafe_offset=0] = m
            to[unsafe_offset=1] = relative
            to[unsafe_offset=2] = logarithm(relative) + s.value / d.value


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def log_probs_kernel[
    dtype: DType
](
    log_probs: Target[accumulator[dtype]()],
    entropy: Target[accumulator[dtype]()],
    has_entropy: Int64,
    sums: Source[accumulator[dtype]()],
    x: Source[dtype],
    tokens: Targets,
    each: Int64,
    outer: Int64,
    n: Int64,
    inner: Int64,
    factor: Scalar[accumulator[dtype]()],
):
    """Writes the logarithms of the probabilities of all tokens, a thread a token, and the entropy of each row, if it is wanted.

    - `log_probs`: One a token.
    - `entropy`: One a row.
    - `has_entropy`: Whether it is wanted.
    - `sums`: (m, d, h) of each row.
    - `tokens`: The tokens of row 0, then those of row 1 and so on.
    - `each`: How many of a row.
    - `outer`: First dimension.
    - `n`: Length of the rows.
    - `inner`: Last dimension.
    - `factor`: What logits are multiplied by.
    """
    var rows = Rows(Int(outer), Int(n), Int(inner))
    var count = rows.count()
    pdl_wait()
    for i in range(
        Int(block_idx.x) * BLOCK_SIZE + Int(thread_idx.x),
        max(count * Int(each), count),
        Int(grid_dim.x) * BLOCK_SIZE,
    ):
        if i < count * Int(each):
            log_probs[unsafe_offset=i] = log_prob(
                x, rows, i // Int(each), tokens[i], factor, sums
            )
        if has_entropy != 0 and i < count:
            entropy[unsafe_offset=i] = sums[unsafe_offset=SUMS * i + 2]


def log_probs_on_gpu[
    dtype: DType, contiguous: Bool
](
    log_probs: Target[accumulator[dtype]()],
    entropy: Optional[Target[accumulator[dtype]()]],
    sums: Target[accumulator[dtype]()],
    x: Source[dtype],
    asked: Asked,
    rows: Rows,
    queue: Queue,
) raises:
    """Enqueues what `direct.token_log_probs` does."""
    comptime accum = accumulator[dtype]()
    var factor = asked.factor[accum]()
    comptime if contiguous and dtype != DType.float64:
        if rows.n > 0:
            streaming_pairs[EntropySums[dtype]](
                rebind[Target[DType.float32]](sums),
                x,
                rows,
                queue,
                rebind[Float32](factor),
            )
    if rows.n == 0 or not contiguous or dtype == DType.float64:
        var columns = columns_of_block[dtype](BLOCK_SIZE, rows)
        queue.launch[sums_kernel[dtype]](
            sums,
            x,
            Int64(rows.outer),
            Int64(rows.n),
            Int64(rows.inner),
            Int64(columns),
            factor,
            grid_dim=min(rows.outer * ceildiv(rows.inner, columns), MAX_GRID),
            block_dim=BLOCK_SIZE,
            attributes=pdl_attributes(),
        )
    var threads = rows.count() * max(1, asked.each)
    queue.launch[log_probs_kernel[dtype]](
        log_probs,
        entropy.value() if entropy else sums,
        Int64(Bool(entropy)),
        sums,
        x,
        asked.tokens,
        Int64(asked.each),
        Int64(rows.outer),
        Int64(rows.n),
        Int64(rows.inner),
        factor,
        grid_dim=min(ceildiv(threads, BLOCK_SIZE), MAX_GRID),
        block_dim=BLOCK_SIZE,
        attributes=pdl_attributes(),
    )
