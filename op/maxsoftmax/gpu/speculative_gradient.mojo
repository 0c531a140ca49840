"""The gradient of cross entropy in the read that its loss takes: of rows that a cluster holds, before anybody has asked for it.

What the gradient of each row's loss will be, nobody knows then. Training has the same one step after step: 1 of a sum, 1 / rows of a mean.
So a forward pass takes what two backward passes in a row had, and leaves, of each row, what it took. A backward pass computes those rows that
were to have another, in most steps none: logits are read once and gradients written once, where two passes read the logits twice.

The bits are those of `losses` and `gradients`: the row is summed by their units, merged in their order, and the gradient is their formula.
"""

from std.math import ceildiv
from std.memory import bitcast, unsafe_stack_allocation
from std.sys import size_of
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_dim,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import Dim
from max.gpu.primitives import warp

from ..io.rows import Rows, Source, Target, VECTOR_BYTES
from ..io.widening import widened
from ..math.loss import (
    Class,
    LossOptions,
    Smoothing,
    Targets,
    Upstream,
)
from ..math.online import accumulator
from ..queue import Queue
from .cross_entropy import losses_of_pairs
from .cross_entropy_backward import (
    ELEMENTS,
    ROUNDS,
    RowGradient,
    part_of_gradient,
)
from .hardware.cluster import Cluster, PORTABLE_BLOCKS
from .hardware.pdl import pdl_attributes, pdl_wait
from .hardware.team import greater, team_reduce
from .partition.granules import Granule
from .partition.row import again
from .partition.unit import Unit, unit_elements
from .resident_units import MAX_UNITS
from .streaming_operations import Exponentials
from .totals import BLOCK_SIZE

comptime LEAST = 57344
"""Elements that rows are longer than: shorter ones have their pairs from other kernels."""

comptime MAX_THREADS = 512
"""Threads a block at most, two of which a multiprocessor is to hold."""

comptime NONE = UInt32(0x7FC0_0BE7)
"""The bits of what is no gradient of a loss: nothing was computed ahead for the row."""


struct Expected(TrivialRegisterPassable):
    """The gradient of losses that the last backward pass had, and whether the one before had the same: 8 bytes, read and written at once.
    """

    var bits: UInt32
    """Of the number."""
    var is_steady: Bool
    """Whether two in a row had it."""

    @inline(.always)
    def __init__(out self, address: Int64):
        """What is remembered at an address; nothing if there is 0, or the address is.
        """
        var word = UInt64(0)
        if address != 0:
            word = Target[DType.uint64](unsafe_from_address=Int(address))[]
        self.bits = UInt32(word & 0xFFFF_FFFF)
        self.is_steady = word >> 32 != 0

    @inline(.always)
    def guess(self) -> UInt32:
        """Returns the bits of what the next one will have, or `NONE`."""
        return self.bits if self.is_steady else NONE

    @inline(.always)
    def remember(self, address: Int64, value: Float32):
        """Writes what a backward pass had after these, if there is an address.
        """
        if address == 0:
            return
        var bits = bitcast[DType.uint32](value)
        # Of 0 nothing is to be had, and no number is equal to NaN.
        var is_steady = bits == self.bits and value == value and value != 0
        Target[DType.uint64](unsafe_from_address=Int(address))[] = (
            UInt64(bits) | UInt64(Int(is_steady)) << 32
        )


def is_held[dtype: DType](rows: Rows) -> Bool:
    """Returns whether a cluster holds a row by the units of `losses`, whose pairs those are then.
    """
    comptime width = VECTOR_BYTES // size_of[dtype]()
    comptime S = Exponentials[dtype, True]
    return (
        rows.inner == 1
        and rows.n % width == 0
        and rows.n > LEAST
        and rows.n <= MAX_UNITS * unit_elements[dtype](S.tuned.rounds)
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(MAX_THREADS)),
    `nvvm.minctasm`=SIMDLength(2),
)
def speculative_kernel[
    dtype: DType
](
    dx: Target[dtype],
    pairs: Target[DType.float32],
    guesses: Target[DType.uint32],
    expected: Int64,
    x: Source[dtype],
    targets: Targets,
    n: Int64,
    units: Int64,
    ignored: Int64,
    smoothing: Smoothing[DType.float32],
):
    """Writes the pair of each row, and the gradient of its logits if that of its loss is foreseen, a cluster a row, a unit a warp.

    Parameters:
        dtype: Dtype of the logits, of 4 bytes or 2.

    Args:
        dx: Gradients; not the memory of `x`.
        pairs: (m, d) of each row.
        guesses: The bits of the gradient of each row's loss, for which `dx` was written, or `NONE`.
        expected: Address of what is foreseen, which others may write meanwhile, or 0.
        x: Logits: whole vectors, at multiples of 16 bytes.
        targets: Class of each row.
        n: Classes.
        units: How many units these are: no more than there are warps in a cluster.
        ignored: The class of rows that do not count.
        smoothing: No share of the target is spread over all classes.
    """
    comptime F = DType.float32
    comptime S = Exponentials[dtype, True]
    comptime U = Unit[dtype, S.tuned.rounds]
    comptime width = U.width
    var thread = Int(thread_idx.x)
    var lane = thread % WARP_SIZE
    # And one number more: all blocks of a row are to foresee the same.
    var cluster = Cluster[True, MAX_UNITS // PORTABLE_BLOCKS + 1]()
    var row = cluster.index
    var unit = (
        cluster.rank * (Int(block_dim.x) // WARP_SIZE) + thread // WARP_SIZE
    )
    var u = U(U.G(x, row, Int(n)), unit, lane)
    pdl_wait()
    var raw = Array[U.Values, S.tuned.rounds](fill=U.Values(u.filler))
    u.ask[told=False](raw)
    var target = Class(targets[row], n, ignored, False)
    # How far the target is from the lane's first element.
    var ahead = target.index - Int64(u.first * width)
    comptime round = Int64(WARP_SIZE * width)
    var has_target = (
        target.index >= 0
        and ahead >= 0
        and ahead % round < Int64(width)
        and ahead < Int64(S.tuned.rounds) * round
    )
    var logit = Float32(0)
    if has_target:
        logit = x[unsafe_offset=row * Int(n) + Int(target.index)].cast[F]()
    var guess = NONE
    if cluster.rank == 0:
        guess = Expected(expected).guess()

    var sums = S(1)
    comptime for k in range(0, S.tuned.rounds, S.tuned.unroll):
        var group = Array[Granule[dtype], S.tuned.unroll](
            fill=Granule[dtype](S.filler())
        )
        comptime for j in range(S.tuned.unroll):
            group[j] = rebind[Granule[dtype]](raw[k + j])
        sums.add(group, group)
    var mine = sums.of_unit(0, lane)

    cluster.open(Int(units) + 1)
    if lane < cluster.blocks:
        if unit < Int(units):
            cluster.send(lane, 2 * unit, mine.m, mine.d)
        if unit == 0:
            cluster.send(lane, 2 * MAX_UNITS, bitcast[F](guess), 0)
    cluster.close()
    guess = bitcast[DType.uint32](cluster.mailbox[unsafe_offset=2 * MAX_UNITS])
    var whole = S.merged_by_warp[MAX_UNITS](cluster.mailbox, Int(units), lane)
    if unit == 0 and lane == 0:
        S.write(pairs, row, whole)
        guesses[unsafe_offset=row] = guess
    if guess == NONE:
        return

    var gradient = RowGradient[S.exact](
        whole.m,
        whole.relative[S.exact](),
        target,
        bitcast[F](guess),
        smoothing,
    )
    var to = dx.unsafe_offset(row * Int(n) + u.first * width)
    comptime for j in range(S.tuned.rounds):
        if u.has[False](j):
            var results = SIMD[dtype, width](0)
            if not target.is_ignored:
                results = gradient.of(
                    widened(again(raw[j])), gradient.even
                ).cast[dtype]()
            to.unsafe_store[alignment=VECTOR_BYTES](U.place(j), results)
    if has_target:
        dx[unsafe_offset=row * Int(n) + Int(target.index)] = gradient.of(
            SIMD[F, 1](logit), gradient.even + gradient.aim
        )[0].cast[dtype]()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE)),
    `nvvm.minctasm`=SIMDLength(3),
)
def unforeseen_kernel[
    dtype: DType, up: DType
](
    dx: Target[dtype],
    x: Source[dtype],
    pairs: Source[DType.float32],
    guesses: Source[DType.uint32],
    expected: Int64,
    targets: Targets,
    upstream: Upstream[up, DType.float32],
    rows: Int64,
    n: Int64,
    ignored: Int64,
    smoothing: Smoothing[DType.float32],
):
    """Writes the gradient of the logits of those rows whose loss has another than was foreseen, and remembers which it was.

    Parameters:
        dtype: Dtype of the logits, of 4 bytes or 2.
        up: Dtype of the gradients of losses.

    Args:
        dx: Gradients, as `speculative_kernel` left them.
        x: Logits.
        pairs: (m, d) of each row.
        guesses: For which gradient of its loss that of each row was written.
        expected: Address where it is remembered what was the case, or 0.
        targets: Class of each row.
        upstream: Gradient of each row's loss.
        rows: How many.
        n: Classes.
        ignored: The class of rows that do not count.
        smoothing: No share of the target is spread over all classes.
    """
    var lane = Int(thread_idx.x) % WARP_SIZE
    pdl_wait()
    if block_idx.x == 0 and block_idx.y == 0:
        _remember(expected, upstream, Int(rows))
    # Every warp looks at as many rows as it has lanes, all at once.
    for first in range(
        Int(block_idx.x), Int(rows), Int(grid_dim.x) * WARP_SIZE
    ):
        var row = first + lane * Int(grid_dim.x)
        var is_open = False
        if row < Int(rows):
            var guess = guesses[unsafe_offset=row]
            # A row that does not count has no gradient, whatever was foreseen.
            is_open = guess == NONE or (
                guess != bitcast[DType.uint32](upstream[row])
                and targets[row] != ignored
            )
        var open = warp.vote[DType.uint32](is_open)
        for i in range(WARP_SIZE):
            if open >> UInt32(i) & 1 != 0:
                var it = first + i * Int(grid_dim.x)
                part_of_gradient[BLOCK_SIZE, ROUNDS](
                    dx,
                    x,
                    pairs,
                    targets,
                    upstream[it],
                    it,
                    n,
                    ignored,
                    smoothing,
                )


@inline(.always)
def _remember[
    up: DType
](expected: Int64, upstream: Upstream[up, DType.float32], rows: Int,):
    """Has a block remember the largest of the gradients of losses: rows that a caller leaves out have 0.
    """
    var scratch = unsafe_stack_allocation[
        BLOCK_SIZE // WARP_SIZE, Float32, address_space=AddressSpace.SHARED
    ]()
    var thread = Int(thread_idx.x)
    var largest = Float32(0)
    for row in range(thread, rows, BLOCK_SIZE):
        largest = greater(largest, upstream[row])
    largest = team_reduce[BLOCK_SIZE, greater](scratch, thread, largest)
    if thread == 0:
        Expected(expected).remember(expected, largest)


def losses_and_gradients[
    dtype: DType
](
    loss: Target[dtype],
    pairs: Target[DType.float32],
    dx: Target[dtype],
    guesses: Target[DType.uint32],
    x: Source[dtype],
    targets: Targets,
    rows: Rows,
    options: LossOptions,
    queue: Queue,
) raises:
    """Enqueues the losses of rows, and gradients of their logits where those of losses are foreseen.

    Parameters:
        dtype: Dtype of the logits, of 4 bytes or 2.

    Args:
        loss: One a row.
        pairs: (m, d) of each row, as of `losses`.
        dx: Gradients, for `unforeseen_gradients`; not the memory of `x`.
        guesses: For which gradient of its loss that of each row was written.
        x: Logits, at a multiple of 16 bytes.
        targets: Class of each row.
        rows: Rows along the last axis, for which `is_held`.
        options: What the caller chose: no reduction, no smoothing.
        queue: Where kernels are launched.
    """
    comptime S = Exponentials[dtype, True]
    if not is_held[dtype](rows):
        raise Error("rows of this length have no gradients ahead")
    var units = ceildiv(rows.n, unit_elements[dtype](S.tuned.rounds))
    queue.launch[speculative_kernel[dtype]](
        dx,
        pairs,
        guesses,
        Int64(queue.expected(rows.count() * rows.n)),
        x,
        targets,
        Int64(rows.n),
        Int64(units),
        Int64(options.ignored),
        Smoothing[DType.float32](options, rows.n),
        grid_dim=rows.count() * PORTABLE_BLOCKS,
        block_dim=ceildiv(units, PORTABLE_BLOCKS) * WARP_SIZE,
        cluster_dim=Dim(PORTABLE_BLOCKS, 1, 1),
        attributes=pdl_attributes(),
    )
    losses_of_pairs(
        loss,
        pairs.unsafe_bitcast[Scalar[accumulator[dtype]()]](),
        x,
        targets,
        rows,
        options,
        queue,
    )


def unforeseen_gradients[
    dtype: DType, up: DType
](
    dx: Target[dtype],
    x: Source[dtype],
    pairs: Source[DType.float32],
    targets: Targets,
    dloss: Source[up],
    guesses: Source[DType.uint32],
    rows: Rows,
    options: LossOptions,
    queue: Queue,
) raises:
    """Enqueues the gradients that `losses_and_gradients` did not foresee.

    Parameters:
        dtype: Dtype of the logits, of 4 bytes or 2.
        up: Dtype of the gradients of losses.

    Args:
        dx: Gradients, as that left them.
        x: Logits.
        pairs: (m, d) of each row.
        targets: Class of each row.
        dloss: Gradient of each row's loss.
        guesses: What that wrote.
        rows: Rows along the last axis.
        options: As of that.
        queue: Where kernels are launched.
    """
    comptime F = DType.float32
    var parts = ceildiv(rows.n, BLOCK_SIZE * ELEMENTS * ROUNDS)
    queue.launch[unforeseen_kernel[dtype, up]](
        dx,
        x,
        pairs,
        guesses,
        Int64(queue.expected(rows.count() * rows.n)),
        targets,
        Upstream[up, F](Optional(dloss), 1, pairs),
        Int64(rows.count()),
        Int64(rows.n),
        Int64(options.ignored),
        Smoothing[F](options, rows.n),
        # As many blocks as there are at a time: most have nothing to do but look.
        grid_dim=Dim(
            min(rows.count(), max(1, 6 * queue.sm_count() // parts)), parts, 1
        ),
        block_dim=BLOCK_SIZE,
        attributes=pdl_attributes(),
    )
