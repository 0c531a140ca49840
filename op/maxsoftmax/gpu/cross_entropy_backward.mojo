"""The gradient of cross entropy, from logits and the pairs of their rows: one read and one write."""

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
from max.gpu.host import DeviceContext, Dim

from ..exponential import Scale
from ..loss import Class, Loss
from ..online import accumulator
from ..rows import Rows, Source, Target
from .overlap import follow, overlapped
from .part import Part
from .totals import BLOCK_SIZE, Parts, counts_kernel
from .tree_reduction import MAX_GRID

comptime ELEMENTS = 16
"""Elements that a thread has under way at a time."""

comptime MAX_GRID_Y = 65535
"""Most blocks that a grid has along its other dimension."""

comptime ROUNDS = 8
"""How many times that it takes at most: what it has to know of the row takes as long as one of them."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE)),
    `nvvm.minctasm`=SIMDLength(3),
)
def gradients_kernel[
    dtype: DType, index: DType, smoothing: Float64, team: Int
](
    dx: Target[dtype],
    x: Source[dtype],
    pairs: Source[DType.float32],
    targets: Source[index],
    scales: Source[DType.float32],
    step: Int64,
    rows: Int64,
    n: Int64,
    ignored: Int64,
):
    """Writes the gradient of the logits of contiguous rows, a team of threads for each part of a row.

    Parameters:
        dtype: Dtype of the logits, of 4 bytes or 2.
        index: Dtype of the targets.
        smoothing: Share of the target that is spread over all classes.
        team: Threads that share a part, of up to `ROUNDS` times `ELEMENTS` each.

    Args:
        dx: Gradients; may be the same memory as `x`.
        x: Logits.
        pairs: (m, d) of each row.
        targets: Class of each row.
        scales: Gradient of each row's loss.
        step: From one of them to the next: 1, or 0 if all are the same.
        rows: How many.
        n: Classes.
        ignored: The class of rows that do not count.
    """
    comptime P = Part[dtype, team]
    comptime vectors = ELEMENTS // P.width
    comptime exact = size_of[dtype]() > 2
    var thread = Int(thread_idx.x)
    comptime teams = BLOCK_SIZE // team
    # Which part is said by the other dimension of the grid: a division would take as long as a vector.
    follow()
    for row in range(
        Int(block_idx.x) * teams + thread // team,
        Int(rows),
        Int(grid_dim.x) * teams,
    ):
        var part = P(
            dx,
            x,
            row,
            Int(n),
            thread % team,
            Int(block_idx.y),
            team * vectors * ROUNDS,
        )
        var edges = part.load_edges(x, 0)
        var target = Class(
            targets[unsafe_offset=row].cast[DType.int64](), n, ignored
        )
        var scale = scales[unsafe_offset=row * Int(step)]
        if target.is_ignored:
            scale = 0
        elif not target.is_class:
            scale = nan[DType.float32]()
        var unit = Scale[exact](pairs[unsafe_offset=2 * row])
        var factor = 1 / (pairs[unsafe_offset=2 * row + 1] * unit.exp(unit.m))
        var even = Float32(smoothing) / Float32(n)
        var aim = Float32(1 - smoothing)

        @inline(.always)
        def gradient[
            width: SIMDLength
        ](logits: SIMD[DType.float32, width], wanted: Float32) {imm} -> SIMD[
            DType.float32, width
        ]:
            return (unit.exp(logits) * factor - wanted) * scale

        # The target's own gradient is written after those of its vector, by the same thread.
        comptime round = team * P.width
        var place = Int64(
            (Int(part.source) - Int(x)) // size_of[dtype]() - row * Int(n)
        )
        var ahead = target.index - place
        var has_target = (
            target.is_class
            and ahead >= 0
            and ahead % Int64(round) < Int64(P.width)
            and ahead < Int64(ROUNDS * vectors * round)
            and part.has(Int(ahead) // round)
        )
        var logit = Float32(0)
        if has_target:
            logit = x[unsafe_offset=row * Int(n) + Int(target.index)].cast[
                DType.float32
            ]()

        comptime for aligned in [True, False]:
            if part.aligned == aligned:
                for i in range(0, part.rounds() + 1, vectors):
                    var raw = Array[P.Raw, vectors](fill=P.Raw(0))
                    comptime for j in range(vectors):
                        if part.has(i + j):
                            raw[j] = part.load(i + j)
                    comptime for j in range(vectors):
                        if part.has(i + j):
                            # A row that does not count has no gradient, whatever is in it.
                            if target.is_ignored:
                                part.store[aligned](i + j, P.Raw(0))
                            else:
                                part.store[aligned](
                                    i + j,
                                    gradient(
                                        raw[j].cast[DType.float32](), even
                                    ).cast[dtype](),
                                )
        if has_target:
            dx[unsafe_offset=row * Int(n) + Int(target.index)] = gradient(
                SIMD[DType.float32, 1](logit), even + aim
            )[0].cast[dtype]()
        var results = P.Edges(0)
        if not target.is_ignored:
            comptime for i in range(2):
                var is_target = part.edges[i] == Int64(row) * n + target.index
                results[i] = gradient(
                    SIMD[DType.float32, 1](edges[i]),
                    even + aim if is_target else even,
                )[0]
        part.store_edges(dx, results)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def column_gradients_kernel[
    dtype: DType, index: DType, smoothing: Float64
](
    dx: Target[dtype],
    x: Source[dtype],
    pairs: Source[accumulator[dtype]()],
    targets: Source[index],
    scales: Source[accumulator[dtype]()],
    step: Int64,
    outer: Int64,
    n: Int64,
    inner: Int64,
    ignored: Int64,
):
    """Writes the gradient of the logits of rows along any axis, of any dtype: a thread a part of a row, so that those of
    neighbouring rows read neighbours.

    Parameters:
        dtype: Dtype of the logits.
        index: Dtype of the targets.
        smoothing: Share of the target that is spread over all classes.

    Args:
        dx: Gradients; may be the same memory as `x`.
        x: Logits.
        pairs: (m, d) of each row.
        targets: Class of each row.
        scales: Gradient of each row's loss.
        step: From one of them to the next: 1, or 0 if all are the same.
        outer: First dimension.
        n: Classes.
        inner: Last dimension.
        ignored: The class of rows that do not count.
    """
    comptime accum = accumulator[dtype]()
    var rows = Rows(Int(outer), Int(n), Int(inner))
    follow()
    for row in range(
        Int(block_idx.x) * BLOCK_SIZE + Int(thread_idx.x),
        rows.count(),
        Int(grid_dim.x) * BLOCK_SIZE,
    ):
        var target = Class(
            targets[unsafe_offset=row].cast[DType.int64](), n, ignored
        )
        var loss = Loss(
            pairs[unsafe_offset=2 * row], pairs[unsafe_offset=2 * row + 1]
        )
        var scale = scales[unsafe_offset=row * Int(step)]
        var start = rows.start(row)
        for first in range(
            Int(block_idx.y) * ELEMENTS, rows.n, Int(grid_dim.y) * ELEMENTS
        ):
            var logits = SIMD[dtype, ELEMENTS](0)
            comptime for i in range(ELEMENTS):
                if first + i < rows.n:
                    logits[i] = x[
                        unsafe_offset=start + (first + i) * rows.inner
                    ]
            comptime for i in range(ELEMENTS):
                if first + i < rows.n:
                    dx[
                        unsafe_offset=start + (first + i) * rows.inner
                    ] = loss.gradient[smoothing](
                        target,
                        scale,
                        logits[i].cast[accum](),
                        Int64(first + i) == target.index,
                        n,
                    ).cast[
                        dtype
                    ]()


def gradients[
    dtype: DType,
    index: DType,
    smoothing: Float64,
    reduction: StaticString,
    contiguous: Bool,
](
    dx: Target[dtype],
    x: Source[dtype],
    pairs: Source[accumulator[dtype]()],
    targets: Source[index],
    dloss: Source[accumulator[dtype]()],
    rows: Rows,
    ignored: Int,
    ctx: DeviceContext,
) raises:
    """Enqueues the gradient of every row's logits.

    Parameters:
        dtype: Dtype of the logits.
        index: Dtype of the targets.
        smoothing: Share of the target that is spread over all classes.
        reduction: "none", "sum" or "mean": what became of the losses.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        dx: Gradients; may be the same memory as `x`. NaN where the target is no class, 0 where it is `ignored`.
        x: Logits.
        pairs: (m, d) of each row.
        targets: Class of each row.
        dloss: Gradient of each row's loss, or of what became of all.
        rows: Rows along any axis.
        ignored: The class of rows that do not count.
        ctx: The GPU and its stream.
    """
    comptime accum = accumulator[dtype]()
    comptime step = 1 if reduction == "none" else 0
    var scales = dloss
    var memory = ctx.enqueue_create_buffer[accum](
        2 if reduction == "mean" else 0
    )
    comptime if reduction == "mean":
        var share = memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
        var parts = Parts[accum](ceildiv(rows.count(), BLOCK_SIZE), ctx)
        ctx.enqueue_function[counts_kernel[accum, index]](
            parts.pointer(),
            targets,
            Int64(rows.count()),
            Int64(ignored),
            grid_dim=parts.blocks,
            block_dim=BLOCK_SIZE,
            attributes=overlapped(),
        )
        parts.add[False](share, dloss, ctx)
        scales = share.unsafe_offset(1)

    comptime if contiguous and dtype != DType.float64:

        @inline(.always)
        def launch[team: Int]() raises {imm}:
            var parts = max(1, ceildiv(rows.n, team * ELEMENTS * ROUNDS))
            ctx.enqueue_function[
                gradients_kernel[dtype, index, smoothing, team]
            ](
                dx,
                x,
                rebind[Source[DType.float32]](pairs),
                targets,
                rebind[Source[DType.float32]](scales),
                Int64(step),
                Int64(rows.count()),
                Int64(rows.n),
                Int64(ignored),
                grid_dim=Dim(
                    min(ceildiv(rows.count(), BLOCK_SIZE // team), MAX_GRID),
                    parts,
                    1,
                ),
                block_dim=BLOCK_SIZE,
                attributes=overlapped(),
            )

        # A team as small as the row lets it be; an edge of an unaligned row needs a lane an element.
        if rows.n <= 8 * ELEMENTS * ROUNDS // 2:
            launch[8]()
        elif rows.n <= 32 * ELEMENTS * ROUNDS // 2:
            launch[32]()
        elif rows.n <= 128 * ELEMENTS * ROUNDS // 2:
            launch[128]()
        else:
            launch[BLOCK_SIZE]()
    else:
        ctx.enqueue_function[column_gradients_kernel[dtype, index, smoothing]](
            dx,
            x,
            pairs,
            targets,
            scales,
            Int64(step),
            Int64(rows.outer),
            Int64(rows.n),
            Int64(rows.inner),
            Int64(ignored),
            grid_dim=Dim(
                min(ceildiv(rows.count(), BLOCK_SIZE), MAX_GRID),
                min(ceildiv(rows.n, ELEMENTS), MAX_GRID_Y),
                1,
            ),
            block_dim=BLOCK_SIZE,
            attributes=overlapped(),
        )
    # Not before: what is freed may be somebody else's by the time it is read.
    _ = memory^
