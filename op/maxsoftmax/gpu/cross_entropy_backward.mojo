"""The gradient of cross entropy, from logits and the pairs of their rows: one read and one write."""

from std.math import ceildiv
from std.sys import size_of
from std.utils.numerics import nan
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import Dim

from ..math.exponential import Scale
from ..math.loss import (
    Class,
    Loss,
    LossOptions,
    Reduction,
    Smoothing,
    Targets,
    Upstream,
)
from ..math.online import accumulator
from ..queue import Queue, Scratch
from ..io.memory import MemoryTarget
from ..io.rows import Rows, Source, Target
from .hardware.pdl import pdl_wait, pdl_attributes
from .partition.row import LossPart
from .totals import BLOCK_SIZE, Parts, counts_kernel
from .hardware.tree_reduction import MAX_GRID
from .tuning import Tuned

comptime ELEMENTS = Tuned.loss_elements
"""Elements that a thread takes at a time, with as many under way."""

comptime MAX_GRID_Y = 65535
"""Most blocks that a grid has along its other dimension."""

comptime ROUNDS = Tuned.loss_rounds
"""How many times that it takes at most: what it has to know of the row takes as long as one of them."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE)),
    `nvvm.minctasm`=SIMDLength(3),
)
def gradients_kernel[
    dtype: DType, team: Int, rounds: Int, up: DType
](
    dx: Target[dtype],
    x: Source[dtype],
    pairs: Source[DType.float32],
    targets: Targets,
    upstream: Upstream[up, DType.float32],
    rows: Int64,
    n: Int64,
    ignored: Int64,
    smoothing: Smoothing[DType.float32],
):
    """Writes the gradient of the logits of contiguous rows, a team of threads for each part of a row.

    Parameters:
        dtype: Dtype of the logits, of 4 bytes or 2.
        team: Threads that share a part, of up to `rounds` times `ELEMENTS` each.
        rounds: How many times that they take them at most.
        up: Dtype of the upstream gradient that a caller handed over.

    Args:
        dx: Gradients; may be the same memory as `x`.
        x: Logits.
        pairs: (m, d) of each row.
        targets: Class of each row.
        upstream: Gradient of each row's loss.
        rows: How many.
        n: Classes.
        ignored: The class of rows that do not count.
        smoothing: Share of the target that is spread over all classes.
    """
    comptime teams = BLOCK_SIZE // team
    # Which part is said by the other dimension of the grid: a division would take as long as a vector.
    pdl_wait()
    for row in range(
        Int(block_idx.x) * teams + Int(thread_idx.x) // team,
        Int(rows),
        Int(grid_dim.x) * teams,
    ):
        part_of_gradient[team, rounds](
            dx,
            x,
            pairs,
            targets,
            upstream[row],
            row,
            n,
            ignored,
            smoothing,
        )


struct RowGradient[exact: Bool](TrivialRegisterPassable):
    """What the gradients of a row's logits are made of.

    Parameters:
        exact: Whether logits have more than 16 bits.
    """

    var unit: Scale[Self.exact]
    """Of the exponentials."""
    var factor: Float32
    """What makes them probabilities."""
    var scale: Float32
    """The gradient of the row's loss; 0 where it does not count, NaN where its target is no class."""
    var even: Float32
    """What is wanted of every class."""
    var aim: Float32
    """What is wanted of the target beside."""

    @inline(.always)
    def __init__(
        out self,
        m: Float32,
        d: Float32,
        target: Class,
        upstream: Float32,
        smoothing: Smoothing[DType.float32],
    ):
        """That of a row whose pair is (m, d)."""
        self.scale = upstream
        if target.is_ignored:
            self.scale = 0
        elif not target.is_class:
            self.scale = nan[DType.float32]()
        self.unit = Scale[Self.exact](m)
        # A row of nothing but -inf has no probabilities, and its exponentials are not quite 0.
        self.factor = (
            1 / (d * self.unit.exp(self.unit.m)) if d
            != 0 else nan[DType.float32]()
        )
        self.even = smoothing.share / Float32(smoothing.classes)
        self.aim = smoothing.rest

    @inline(.always)
    def of[
        width: SIMDLength
    ](self, logits: SIMD[DType.float32, width], wanted: Float32) -> SIMD[
        DType.float32, width
    ]:
        """Returns the gradients of logits, of which so much is wanted."""
        return (self.unit.exp(logits) * self.factor - wanted) * self.scale


@inline(.always)
def part_of_gradient[
    dtype: DType, //, team: Int, rounds: Int
](
    dx: Target[dtype],
    x: Source[dtype],
    pairs: Source[DType.float32],
    targets: Targets,
    upstream: Float32,
    row: Int,
    n: Int64,
    ignored: Int64,
    smoothing: Smoothing[DType.float32],
):
    """Writes the gradient of a part of a row's logits, the one that the grid's other dimension says, by a team of threads.

    Parameters:
        dtype: Dtype of the logits.
        team: As of `gradients_kernel`.
        rounds: As there.

    Args:
        dx: As there.
        x: As there.
        pairs: As there.
        targets: As there.
        upstream: Gradient of the row's loss.
        row: Which row.
        n: Classes.
        ignored: The class of rows that do not count.
        smoothing: Share of the target that is spread over all classes.
    """
    comptime P = LossPart[dtype, team]
    comptime vectors = ELEMENTS // P.width
    var part = P.of_share(
        MemoryTarget(dx),
        P.S(x),
        row,
        Int(n),
        Int(thread_idx.x) % team,
        Int(block_idx.y),
        team * vectors * rounds,
    )
    var asked_edges = part.ask_edges()

    # On their way while the row's target and pair are: with those that follow asked for as early, 32768×4096 of float32 take 263 µs (296), of bfloat16
    # 172 (179), 8192×50257 851 (858) and 466 (499) (H200).
    var raw = part.ask[vectors](0)
    var target = Class(targets[row], n, ignored, smoothing.is_shard)
    var gradient = RowGradient[size_of[dtype]() > 2](
        pairs[unsafe_offset=2 * row],
        pairs[unsafe_offset=2 * row + 1],
        target,
        upstream,
        smoothing,
    )

    # The target's own gradient is written after those of its vector, by the same thread.
    comptime round = team * P.width
    var place = Int64(
        (Int(part.source.first) - Int(x)) // size_of[dtype]() - row * Int(n)
    )
    var ahead = target.index - place
    var has_target = (
        target.index >= 0
        and ahead >= 0
        and ahead % Int64(round) < Int64(P.width)
        and ahead < Int64(rounds * vectors * round)
        and part.has(Int(ahead) // round)
    )
    # Widened when it is needed, as a warp would wait for it here.
    var logit = Scalar[dtype](0)
    if has_target:
        logit = x[unsafe_offset=row * Int(n) + Int(target.index)]

    @inline(.always)
    def result(
        logits: SIMD[DType.float32, P.width]
    ) {imm} -> SIMD[DType.float32, P.width]:
        # A row that does not count has no gradient, whatever is in it.
        if target.is_ignored:
            return 0
        return gradient.of(logits, gradient.even)

    part.rewrite(raw^, result)
    if has_target:
        dx[unsafe_offset=row * Int(n) + Int(target.index)] = gradient.of(
            logit.cast[DType.float32](), gradient.even + gradient.aim
        )[0].cast[dtype]()
    var edges = P.edges_of(asked_edges)
    var results = P.Edges(0)
    if not target.is_ignored:
        comptime for i in range(P.of_edges):
            var is_target = place + Int64(part.edge_place(i)) == target.index
            results[i] = gradient.of(
                SIMD[DType.float32, 1](edges[i]),
                gradient.even + gradient.aim if is_target else gradient.even,
            )[0]
    part.store_edges(results)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def column_gradients_kernel[
    dtype: DType, up: DType
](
    dx: Target[dtype],
    x: Source[dtype],
    pairs: Source[accumulator[dtype]()],
    targets: Targets,
    upstream: Upstream[up, accumulator[dtype]()],
    outer: Int64,
    n: Int64,
    inner: Int64,
    ignored: Int64,
    smoothing: Smoothing[accumulator[dtype]()],
):
    """Writes the gradient of the logits of rows along any axis, of any dtype: a thread a part of a row, so that those of
    neighbouring rows read neighbours.

    Parameters:
        dtype: Dtype of the logits.
        up: Dtype of the upstream gradient that a caller handed over.

    Args:
        dx: Gradients; may be the same memory as `x`.
        x: Logits.
        pairs: (m, d) of each row.
        targets: Class of each row.
        upstream: Gradient of each row's loss.
        outer: First dimension.
        n: Classes.
        inner: Last dimension.
        ignored: The class of rows that do not count.
        smoothing: Share of the target that is spread over all classes.
    """
    comptime accum = accumulator[dtype]()
    var rows = Rows(Int(outer), Int(n), Int(inner))
    pdl_wait()
    for row in range(
        Int(block_idx.x) * BLOCK_SIZE + Int(thread_idx.x),
        rows.count(),
        Int(grid_dim.x) * BLOCK_SIZE,
    ):
        var target = Class(targets[row], n, ignored, smoothing.is_shard)
        var loss = Loss(
            pairs[unsafe_offset=2 * row], pairs[unsafe_offset=2 * row + 1]
        )
        var scale = upstream[row]
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
                    ] = loss.gradient(
                        target,
                        scale,
                        logits[i].cast[accum](),
                        Int64(first + i) == target.index,
                        smoothing,
                    ).cast[
                        dtype
                    ]()


def gradients[
    dtype: DType, up: DType, contiguous: Bool
](
    dx: Target[dtype],
    x: Source[dtype],
    pairs: Source[accumulator[dtype]()],
    targets: Targets,
    dloss: Optional[Source[up]],
    rows: Rows,
    options: LossOptions,
    queue: Queue,
) raises:
    """Enqueues the gradient of every row's logits.

    Parameters:
        dtype: Dtype of the logits.
        up: Dtype of the gradients of losses.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        dx: Gradients; may be the same memory as `x`. NaN where the target is no class, 0 where it is ignored.
        x: Logits.
        pairs: (m, d) of each row, and how many rows count, if the options say so.
        targets: Class of each row.
        dloss: Gradient of each row's loss, or of what became of all; nowhere if it is 1.
        rows: Rows along any axis.
        options: What the caller chose.
        queue: Where kernels are launched.
    """
    comptime accum = accumulator[dtype]()
    var each = options.reduction == Reduction.NONE
    var upstream = Upstream[up, accum](dloss, Int(each), pairs)
    var memory: Optional[Scratch[accum]] = None
    var counts: Optional[Parts[accum]] = None
    if options.reduction == Reduction.MEAN and options.is_counted:
        upstream = upstream.divided(pairs.unsafe_offset(2 * rows.count()))
    elif options.reduction == Reduction.MEAN:
        var parts = Parts[accum](ceildiv(rows.count(), BLOCK_SIZE), queue)
        var share = queue.scratch[accum](1)
        queue.launch[counts_kernel[accum]](
            parts.pointer(),
            targets,
            Int64(rows.count()),
            Int64(options.ignored),
            grid_dim=parts.blocks,
            block_dim=BLOCK_SIZE,
            attributes=pdl_attributes(),
        )
        parts.divide(share.pointer, upstream, queue)
        upstream = Upstream[up, accum](computed=share.pointer)
        memory = share^
        counts = parts^

    @inline(.always)
    def by_column() raises {imm}:
        queue.launch[column_gradients_kernel[dtype, up]](
            dx,
            x,
            pairs,
            targets,
            upstream,
            Int64(rows.outer),
            Int64(rows.n),
            Int64(rows.inner),
            Int64(options.ignored),
            Smoothing[accum](options, rows.n),
            grid_dim=Dim(
                min(ceildiv(rows.count(), BLOCK_SIZE), MAX_GRID),
                min(ceildiv(rows.n, ELEMENTS), MAX_GRID_Y),
                1,
            ),
            block_dim=BLOCK_SIZE,
            attributes=pdl_attributes(),
        )

    comptime if contiguous and dtype != DType.float64:
        comptime wide = size_of[dtype]() > 2
        var are_many = rows.count() >= Tuned.many_losses

        @inline(.always)
        def launch[team: Int, rounds: Int = ROUNDS]() raises {imm}:
            queue.launch[gradients_kernel[dtype, team, rounds, up]](
                dx,
                x,
                rebind[Source[DType.float32]](pairs),
                targets,
                rebind[Upstream[up, DType.float32]](upstream),
                Int64(rows.count()),
                Int64(rows.n),
                Int64(options.ignored),
                Smoothing[DType.float32](options, rows.n),
                grid_dim=Dim(
                    min(ceildiv(rows.count(), BLOCK_SIZE // team), MAX_GRID),
                    max(1, ceildiv(rows.n, team * ELEMENTS * rounds)),
                    1,
                ),
                block_dim=BLOCK_SIZE,
                attributes=pdl_attributes(),
            )

        # A team as small as the row lets it be.
        if rows.n > MAX_GRID_Y * BLOCK_SIZE * ELEMENTS * ROUNDS:
            by_column()
        elif rows.n <= 8 * ELEMENTS * ROUNDS // 2:
            launch[8]()
        elif rows.n <= WARP_SIZE * ELEMENTS * (
            Tuned.loss_team_rounds(wide) if are_many else ROUNDS // 2
        ):
            launch[WARP_SIZE]()
        elif rows.n <= 128 * ELEMENTS * ROUNDS // 2:
            launch[128]()
        elif not are_many:
            launch[BLOCK_SIZE]()
        else:
            launch[BLOCK_SIZE, Tuned.loss_rounds_of_many(wide)]()
    else:
        by_column()
    # Not before: what is freed may be somebody else's by the time it is read.
    _ = memory^
    _ = counts^
