"""Rows along any axis but the last: the tree kernel, turned.

Neighbouring threads take neighbouring rows, so that their accesses coalesce although each row's own elements are
`inner` apart. A block is a matrix of threads: as many columns as rows it takes, and the threads of a
column share its row and meet in a shared-memory tree. Like `tree`, it reads each element three times, or computes it twice; the two inputs of a
gradient are read twice.
"""

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

from ..math.exponential import Unit
from ..math.gradient import Gradient
from ..ops.finish import Finish
from ..io.source import RowSource
from ..io.target import RowTarget
from ..math.online import MaxSum, Sum, accumulator
from ..queue import Queue
from ..io.memory import MemorySource
from ..io.rows import Positions, Rows, Source, nowhere
from .hardware.pdl import pdl_wait, pdl_attributes
from .hardware.team import maximum
from .hardware.tree_reduction import (
    MAX_GRID,
    larger,
    plus,
    tree_reduce,
)

comptime COLUMNS_BLOCK_SIZE = 512
"""Threads a block where nothing else is asked for."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(block_size))
)
def fallback_kernel[
    S: RowSource, T: RowTarget, finish: Finish, block_size: Int
](
    y: T,
    x: S,
    other: Source[S.elements],
    outer: Int64,
    n: Int64,
    inner: Int64,
    columns: Int64,
):
    """Writes the softmax along the middle axis of a row-major (outer, n, inner) tensor.

    - `block_size`: Threads a block, a power of two.

    Args:
        y: Results; of logits in memory maybe the same memory as `x`.
        x: Logits, or results whose logits' gradient is wanted.
        other: The gradients of results; else not looked at.
        outer: First dimension.
        n: Length of the rows.
        inner: Last dimension, and the distance between neighbours in a row.
        columns: Rows a block takes at a time, a power of two up to `block_size`.
    """
    comptime accum = accumulator[S.elements]()
    var maxima = unsafe_stack_allocation[
        block_size, Scalar[accum], address_space=AddressSpace.SHARED
    ]()
    var sums = unsafe_stack_allocation[
        block_size, Sum[accum, 1], address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var start = thread // Int(columns)
    var step = block_size // Int(columns)
    var tiles = ceildiv(Int(inner), Int(columns))

    pdl_wait()
    for tile in range(Int(block_idx.x), Int(outer) * tiles, Int(grid_dim.x)):
        var before = tile // tiles
        var after = tile % tiles * Int(columns) + thread % Int(columns)
        # Threads beyond the last column only keep the others company at the barriers.
        var taken = after < Int(inner)
        var at = Positions(
            before, after if taken else 0, 0, 1, Int(n), Int(inner)
        )
        var source = x.column(at)
        var end = Int(n) if taken else 0
        var target = y.column(at)
        comptime if finish.is_gradient():
            comptime G = Gradient[
                finish == Finish.GRADIENT_OF_LOGARITHMS, True, accum
            ]
            var upstream = rebind[S](MemorySource(other)).column(at)
            var dot = Sum[accum, 1]()
            for i in range(start, end, step):
                dot.add(
                    G.term(
                        source.load[1](i).cast[accum](),
                        upstream.load[1](i).cast[accum](),
                    )
                )
            var shared = G(
                tree_reduce[block_size, plus[accum]](
                    sums, thread, dot, Int(columns)
                ).value
            )
            for i in range(start, end, step):
                target.store(
                    i,
                    shared.of(
                        source.load[1](i).cast[accum](),
                        upstream.load[1](i).cast[accum](),
                    ),
                )
            continue
        var length = end
        comptime if S.is_causal:
            length = min(end, source.length(Int(n)))
        var pair = MaxSum[accum, 1]()
        # Only of pairs somebody asks whether there is a NaN beside infinities: elsewhere it is in the sum.
        comptime largest = maximum[
            dtype=accum, width=1
        ] if finish == Finish.PAIR else larger[accum]
        comptime if S.in_memory:
            for i in range(start, length, step):
                pair.m = largest(
                    pair.m, source.logits(source.load[1](i)).cast[accum]()
                )
        else:
            # Computed once more they may cost more than the exponentials here.
            for i in range(start, length, step):
                pair.add(
                    Array[SIMD[accum, 1], 1](
                        fill=source.load[1](i).cast[accum]()
                    )
                )
        var m = tree_reduce[block_size, largest](
            maxima, thread, pair.m, Int(columns)
        )
        var d = Sum[accum, 1]()
        comptime if S.in_memory:
            var unit = Unit(m)
            for i in range(start, length, step):
                d.add(unit.exp(source.logits(source.load[1](i)).cast[accum]()))
        else:
            d = pair.collapse(m)
        pair = MaxSum[accum, 1](
            m,
            tree_reduce[block_size, plus[accum]](sums, thread, d, Int(columns)),
        )
        comptime if S.has_sink:
            if taken:
                pair.add(
                    Array[SIMD[accum, 1], 1](
                        fill=x.sink[1](before, after).cast[accum]()
                    )
                )
        comptime if finish == Finish.PAIR:
            if start == 0 and taken:
                var to = y.pairs[accum]().unsafe_offset(
                    2 * (before * Int(inner) + after)
                )
                to[unsafe_offset=0] = pair.m
                to[unsafe_offset=1] = pair.relative()
            continue

        # One of the two is used.
        var normalizer = pair.normalizer()
        var logarithms = pair.logarithms()
        comptime nothing = neg_inf[
            accum
        ]() if finish == Finish.LOGARITHMS else Scalar[accum](0)
        var empty = Bool(pair.m == neg_inf[accum]() and pair.d.value == 0)
        for i in range(start, end, step):
            var logit = SIMD[accum, 1](neg_inf[accum]())
            if not S.is_causal or i < length:
                logit = source.logits(source.load[1](i)).cast[accum]()
            var value: SIMD[accum, 1]
            comptime if finish == Finish.LOGARITHMS:
                value = logarithms.probability(logit)
            else:
                value = normalizer.probability(logit)
            if x.is_masked():
                if empty:
                    value = nothing
            target.store(i, value)


def columns_of_block[dtype: DType](block_size: Int, rows: Rows) -> Int:
    """Returns how many neighbouring rows a block takes: pieces of 64 bytes or more, however few there are, as a row's bits follow from it.

    Parameters:
        dtype: Of the logits.

    - `rows`: Rows along any axis.
    """
    return 1 if rows.inner == 1 else min(
        8 if dtype == DType.float64 else 32, block_size
    )


def fallback[
    S: RowSource,
    T: RowTarget,
    //,
    finish: Finish,
    block_size: Int = 256 if finish.is_gradient() else COLUMNS_BLOCK_SIZE,
](
    y: T,
    x: S,
    rows: Rows,
    queue: Queue,
    other: Source[S.elements] = nowhere[S.elements](),
) raises:
    """Launches `fallback_kernel`, whose parameters and arguments these are, a block for every few neighbouring rows along any axis.
    """
    var width = columns_of_block[S.elements](block_size, rows)
    queue.launch[fallback_kernel[S, T, finish, block_size]](
        y,
        x,
        other,
        Int64(rows.outer),
        Int64(rows.n),
        Int64(rows.inner),
        Int64(width),
        grid_dim=min(rows.outer * ceildiv(rows.inner, width), MAX_GRID),
        block_dim=block_size,
        attributes=pdl_attributes(),
    )
