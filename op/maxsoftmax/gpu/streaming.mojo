"""Rows that do not fit on the chip: read once for what they sum to, and again for what is written of them, in two launches.

A row is summed in units: a unit is what 32 lanes read without a word to anybody else. Its length follows from the length of the row
alone, units are counted from the first element, and they are merged in one order. So it does not matter how many rows
there are, and who computes which unit: the bits are the same.

The second launch goes through a row backwards, so that what was read last, and is still in the last cache, is read first.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_idx,
    thread_idx,
)
from max.gpu.sync import barrier

from ..ops.finish import Finish
from ..queue import Queue
from ..io.memory import MemorySource, MemoryTarget
from ..io.rows import Rows, Source, Target
from ..io.widening import widened
from .hardware.pair import Pair
from .hardware.pdl import pdl_wait, pdl_attributes
from .partition.granules import Granule, Granules, caught_up
from .partition.row import MemoryPart
from .streaming_operations import LANES, Sums, Written
from .tuning import Tuned

comptime Wholes[S: Sums] = Pointer[S.Whole, MutUntrackedOrigin]
"""What the units of all rows sum to, between the launches."""

comptime _NUMBERS[S: Sums]: Int = size_of[S.Whole]() // size_of[Float32]()
"""How many numbers there are in what a unit sums to."""


struct Units(TrivialRegisterPassable):
    """How a row is divided."""

    var rounds: Int
    """Vectors of a unit that each lane takes."""
    var count: Int
    """How many units there are."""

    @inline(.always)
    def __init__(out self, rounds: Int, count: Int):
        self.rounds = rounds
        self.count = count

    @staticmethod
    def of[S: Sums](n: Int) -> Self:
        """Returns the units of a row.

        Parameters:
            S: What is summed.

        Args:
            n: Length of the row.
        """
        comptime least = Granules[S.dtype].width * LANES
        var rounds = S.tuned.rounds
        while n > least * rounds * S.tuned.max_units:
            rounds *= 2
        return {rounds, ceildiv(n, least * rounds)}


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(S.tuned.block_size)
    ),
    `nvvm.minctasm`=SIMDLength(S.tuned.threads_per_sm // S.tuned.block_size),
)
def units_kernel[
    S: Sums, alone: Bool
](
    pairs: Wholes[S],
    x: Source[S.dtype],
    other: Source[S.dtype],
    n: Int64,
    rounds: Int64,
    units: Int64,
    blocks: Int64,
    factor: Float32,
):
    """First launch: what the units of each row sum to.

    Parameters:
        S: What is summed.
        alone: Whether every block has all of a row, and leaves what is written of it.

    Args:
        pairs: One a unit; one a row from a block alone.
        x: The first input.
        other: The second, if the sum is of two.
        n: Length of each.
        rounds: As of `Units`.
        units: How many units a row has.
        blocks: Blocks that share a row.
        factor: What the elements are multiplied by, where the sums are of such.
    """
    comptime G = Granules[S.dtype]
    comptime warps = S.tuned.block_size // LANES
    var kept = unsafe_stack_allocation[
        S.tuned.max_units if alone else 1,
        S.Whole,
        address_space=AddressSpace.SHARED,
    ]()
    var thread = Int(thread_idx.x)
    var lane = thread % LANES
    var row, rank = _row_and_rank(blocks)
    var a = G(x, row, Int(n))
    var b = G(other, row, Int(n)) if S.inputs == 2 else a
    pdl_wait()

    @inline(.always)
    def leave(unit: Int, pair: S.Whole) {imm}:
        if lane == 0:
            comptime if alone:
                kept[unsafe_offset=unit] = pair
            else:
                pairs[unsafe_offset=row * Int(units) + unit] = pair

    comptime for shifted in [False, True]:
        if (a.shift != 0) == shifted:
            _units[S, shifted](
                leave,
                a,
                b,
                rank * warps + thread // LANES,
                Int(blocks) * warps,
                Int(units),
                Int(rounds),
                lane,
                factor,
            )
    comptime if alone:
        barrier()
        var whole = _merged[S](kept, Int(units), thread)
        if thread == 0:
            S.write(pairs.unsafe_bitcast[Float32](), row, whole)


@inline(.always)
def _row_and_rank(blocks: Int64) -> Tuple[Int, Int]:
    """Returns which row this block shares with others, and which of these it is.

    Args:
        blocks: How many share a row.
    """
    var row = UInt32(block_idx.x) // UInt32(blocks)
    return Int(row), Int(UInt32(block_idx.x) - row * UInt32(blocks))


@inline(.always)
def _units[
    S: Sums,
    shifted: Bool,
    Leave: def(unit: Int, pair: S.Whole) -> None,
](
    leave: Leave,
    a: Granules[S.dtype],
    b: Granules[S.dtype],
    first: Int,
    step: Int,
    units: Int,
    rounds: Int,
    lane: Int,
    factor: Float32,
):
    """Sums units, one after the other.

    Parameters:
        S: What is summed.
        shifted: Whether granules begin before the row.
        Leave: Takes what a unit sums to, which its first lane has.

    Args:
        leave: Takes it.
        a: Granules of the first input.
        b: Those of the second, shifted alike.
        first: The first unit.
        step: From one to the next.
        units: How many a row has.
        rounds: As of `Units`.
        lane: This thread's index in the unit.
        factor: As of `units_kernel`.
    """
    # And the one after them, of which the first lane has a part.
    comptime Read = Array[Granule[S.dtype], S.tuned.unroll + 1]
    comptime Taken = Array[Granule[S.dtype], S.tuned.unroll]
    var behind = a.behind(lane)

    @inline(.always)
    def load(from_: Granules[S.dtype], at: Int) {imm} -> Read:
        """Returns what the lane reads in `S.tuned.unroll` rounds from the row's round `at` on.
        """
        var x = Read(fill=Granule[S.dtype](S.filler()))
        var i = at * LANES + lane
        if (at + S.tuned.unroll + 1) * LANES <= Int(a.count):
            comptime for j in range(S.tuned.unroll):
                x[j] = from_.whole(i + j * LANES)
            comptime if shifted:
                if lane == 0:
                    x[S.tuned.unroll] = from_.whole(i + S.tuned.unroll * LANES)
        else:
            comptime for j in range(S.tuned.unroll):
                x[j] = from_.load(i + j * LANES, S.filler())
            comptime if shifted:
                if lane == 0:
                    x[S.tuned.unroll] = from_.load(
                        i + S.tuned.unroll * LANES, S.filler()
                    )
        return x^

    @inline(.always)
    def taken(x: Read) {imm} -> Taken:
        """Returns what the lane takes of what it has read."""
        var result = Taken(fill=Granule[S.dtype](S.filler()))
        comptime for j in range(S.tuned.unroll):
            result[j] = x[j]
            comptime if shifted:
                result[j] = caught_up(x[j], x[j + 1], behind)
        return result^

    var unit = first
    var at = unit * rounds
    var sums = S(factor)
    var x = Read(fill=Granule[S.dtype](S.filler()))
    comptime if S.tuned.ahead:
        if unit < units:
            x = load(a, at)
    while unit < units:
        var following = unit
        var next = at + S.tuned.unroll
        # Beyond the row there is nothing for any lane.
        if next >= (unit + 1) * rounds or next * LANES > Int(a.count):
            following += step
            next = following * rounds
        var x_next = Read(fill=Granule[S.dtype](S.filler()))
        comptime if S.tuned.ahead:
            # Under way while what is there is added.
            if following < units:
                x_next = load(a, next)
        else:
            x = load(a, at)
        var mine = taken(x)
        comptime if S.inputs == 2:
            sums.add(mine, taken(load(b, at)))
        else:
            sums.add(mine, mine)
        x = x_next^
        if following != unit:
            leave(unit, sums.of_unit(a.shift, lane))
            sums = S(factor)
        unit, at = following, next


@inline(.always)
def _merged[
    space: AddressSpace, //, S: Sums
](
    pairs: Pointer[S.Whole, MutUntrackedOrigin, address_space=space],
    units: Int,
    thread: Int,
) -> S.Whole:
    """Returns what a row sums to, to every thread of a block.

    Parameters:
        space: Where the pairs are.
        S: What is summed.

    Args:
        pairs: Those of the row's units.
        units: How many there are.
        thread: This thread's index in its block.
    """
    comptime most = S.tuned.max_units // S.tuned.block_size
    var scratch = unsafe_stack_allocation[
        _NUMBERS[S] * S.tuned.block_size // WARP_SIZE,
        Float32,
        address_space=AddressSpace.SHARED,
    ]()
    var count = max(0, ceildiv(units - thread, S.tuned.block_size))
    # All of them are under way at once.
    var mine = Array[S.Whole, most](fill=S.nothing())
    comptime for j in range(most):
        if j < count:
            mine[j] = pairs[unsafe_offset=thread + j * S.tuned.block_size]
    return S.merged(mine, count, scratch, thread)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(S.tuned.block_size)
    ),
    `nvvm.minctasm`=SIMDLength(1024 // S.tuned.block_size),
)
def merge_kernel[
    S: Sums
](result: Target[DType.float32], pairs: Wholes[S], units: Int64):
    """Second launch where nothing else is written: what each row sums to, a block for each.

    Parameters:
        S: What was summed.

    Args:
        result: What `S.write` writes of each row.
        pairs: One a unit.
        units: How many units a row has.
    """
    var thread = Int(thread_idx.x)
    var row = Int(block_idx.x)
    pdl_wait()
    var whole = _merged[S](
        pairs.unsafe_offset(row * Int(units)), Int(units), thread
    )
    if thread == 0:
        S.write(result, row, whole)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(S.tuned.block_size)
    ),
    `nvvm.minctasm`=SIMDLength(1024 // S.tuned.block_size),
)
def write_kernel[
    S: Sums, finish: Finish
](
    y: Target[S.dtype],
    x: Source[S.dtype],
    other: Source[S.dtype],
    pairs: Wholes[S],
    n: Int64,
    units: Int64,
    blocks: Int64,
    share: Int64,
):
    """Second launch: each block merges the units of a row, and writes its part of it.

    Parameters:
        S: What was summed: a pair.
        finish: What is written of each element.

    Args:
        y: Results.
        x: The first input.
        other: The second, if there are two, aligned as `x` is.
        pairs: One a unit.
        n: Length of each.
        units: How many units a row has.
        blocks: Blocks that share a row.
        share: Vectors of a row that a block takes.
    """
    comptime P = MemoryPart[S.dtype, S.tuned.block_size]
    comptime F = DType.float32
    var thread = Int(thread_idx.x)
    var row, rank = _row_and_rank(blocks)
    pdl_wait()
    var written = Written[finish, S.exact](
        rebind[Pair[]](
            _merged[S](
                pairs.unsafe_offset(row * Int(units)), Int(units), thread
            )
        )
    )
    var part = P.of_share(
        MemoryTarget(y),
        MemorySource(x),
        row,
        Int(n),
        thread,
        rank,
        Int(share),
    )
    var second = part
    second.source = part.source.onwards(
        (Int(other) - Int(x)) // size_of[S.dtype]()
    )
    comptime for aligned in [True, False]:
        if part.aligned == aligned:
            for group in range(part.rounds() // S.tuned.unroll, -1, -1):
                var mine = Array[Granule[S.dtype], S.tuned.unroll](
                    fill=Granule[S.dtype](0)
                )
                var theirs = mine.copy()
                comptime for j in range(S.tuned.unroll):
                    var i = group * S.tuned.unroll + j
                    if part.has(i):
                        mine[j] = part.load(i)
                        comptime if S.inputs == 2:
                            theirs[j] = second.load(i)
                comptime for j in range(S.tuned.unroll):
                    var i = group * S.tuned.unroll + j
                    if part.has(i):
                        part.store[aligned](
                            i,
                            written.of(widened(mine[j]), widened(theirs[j])),
                        )
    part.store_edges(written.of(part.load_edges(0), second.load_edges(0)))


def streaming[
    S: Sums, finish: Finish
](
    y: Target[S.dtype],
    x: Source[S.dtype],
    other: Source[S.dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Launches the two kernels.

    Parameters:
        S: What is summed.
        finish: What is written of each element.

    Args:
        y: Results; may be the memory of an input, as each thread has read what it writes to.
        x: The first input.
        other: The second, if there are two, aligned as `x` is.
        rows: Rows along the last axis.
        queue: Where kernels are launched.
    """
    comptime width = Granules[S.dtype].width
    var units = Units.of[S](rows.n)
    var memory = queue.scratch[DType.float32](
        _NUMBERS[S] * rows.count() * units.count
    )
    var pairs = memory.pointer.unsafe_bitcast[S.Whole]()
    var share = max(1, _held[S](queue) // rows.count())
    _launch_units[S](pairs, x, other, rows, units, share, 1, queue)
    var blocks = min(
        share, ceildiv(rows.n, width * S.tuned.block_size * S.tuned.unroll)
    )
    queue.launch[write_kernel[S, finish]](
        y,
        x,
        other,
        pairs,
        Int64(rows.n),
        Int64(units.count),
        Int64(blocks),
        Int64(ceildiv(rows.n, width * blocks)),
        grid_dim=rows.count() * blocks,
        block_dim=S.tuned.block_size,
        attributes=pdl_attributes(),
    )
    _ = memory^


def streaming_pairs[
    S: Sums
](
    result: Target[DType.float32],
    x: Source[S.dtype],
    rows: Rows,
    queue: Queue,
    factor: Float32 = 1,
    other: Optional[Source[S.dtype]] = None,
) raises:
    """Launches the kernels of what rows sum to: one where there are rows enough for all blocks, else two.

    Parameters:
        S: What is summed.

    Args:
        result: What `S.write` writes of each row: of pairs (m, d).
        x: The input, or the first of two.
        rows: Rows along the last axis.
        queue: Where kernels are launched.
        factor: As of `units_kernel`.
        other: The second input, if there are two, aligned as `x` is.
    """
    var second = other.or_else(x)
    var units = Units.of[S](rows.n)
    if _fill[S](rows.count(), queue):
        queue.launch[units_kernel[S, True]](
            result.unsafe_bitcast[S.Whole](),
            x,
            second,
            Int64(rows.n),
            Int64(units.rounds),
            Int64(units.count),
            Int64(1),
            factor,
            grid_dim=rows.count(),
            block_dim=S.tuned.block_size,
            attributes=pdl_attributes(),
        )
        return
    var memory = queue.scratch[DType.float32](
        _NUMBERS[S] * rows.count() * units.count
    )
    var pairs = memory.pointer.unsafe_bitcast[S.Whole]()
    _launch_units[S](
        pairs,
        x,
        second,
        rows,
        units,
        ceildiv(Tuned.waves * _held[S](queue), rows.count()),
        factor,
        queue,
    )
    queue.launch[merge_kernel[S]](
        result,
        pairs,
        Int64(units.count),
        grid_dim=rows.count(),
        block_dim=S.tuned.block_size,
        attributes=pdl_attributes(),
    )
    _ = memory^


def _launch_units[
    S: Sums
](
    pairs: Wholes[S],
    x: Source[S.dtype],
    other: Source[S.dtype],
    rows: Rows,
    units: Units,
    most: Int,
    factor: Float32,
    queue: Queue,
) raises:
    """Enqueues the first launch, with as many blocks a row as it has work for.

    Parameters:
        S: What is summed.

    Args:
        pairs: Where those of the units go.
        x: The first input.
        other: The second, if there are two, aligned as `x` is.
        rows: Rows along the last axis.
        units: How each is divided.
        most: Blocks a row at most.
        factor: As of `units_kernel`.
        queue: Where the kernel is launched.
    """
    var blocks = min(most, ceildiv(units.count, S.tuned.block_size // LANES))
    queue.launch[units_kernel[S, False]](
        pairs,
        x,
        other,
        Int64(rows.n),
        Int64(units.rounds),
        Int64(units.count),
        Int64(blocks),
        factor,
        grid_dim=rows.count() * blocks,
        block_dim=S.tuned.block_size,
        attributes=pdl_attributes(),
    )


def _fill[S: Sums](rows: Int, queue: Queue) raises -> Bool:
    """Returns whether a block for each row leaves little of the GPU idle at the end.
    """
    return Tuned.fill(
        rows,
        queue.sm_count() * (S.tuned.threads_per_sm // S.tuned.block_size),
    )


def _held[S: Sums](queue: Queue) raises -> Int:
    """Returns how many blocks there are to be at a time: as many as are 1024 threads for each SM.
    """
    return queue.sm_count() * (1024 // S.tuned.block_size)
