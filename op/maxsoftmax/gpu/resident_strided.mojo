"""The fast kernel along an axis that is not the last, for what fits on the chip: one read and one write an element.

It is `resident` turned: the vectors of a thread are `inner` apart, and the lanes of a vector are rows of their own, each
with its own maximum and sum. See `partition/strided` for who takes what. Logits in memory are kept as they are, and those that
exceed the registers are copied into slots asynchronously; logits that are computed as they are read are computed once, and
kept widened in registers, narrow in slots. Of a gradient there are two inputs, and a sum that needs no maximum.
"""

from std.math import align_up, ceildiv
from std.sys import size_of
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, WARP_SIZE, thread_idx
from max.gpu.host import DeviceContext, Dim
from max.gpu.primitives import warp
from max.gpu.sync import barrier

from ..math.exponential import Scale
from ..math.gradient import Gradient
from ..ops.finish import Finish
from ..io.source import RowSource
from ..io.target import RowTarget
from ..math.online import Sum
from ..queue import Queue
from ..io.memory import MemorySource
from ..io.rows import Rows, Source
from ..io.widening import widened
from .hardware.cluster import Cluster, PORTABLE_BLOCKS, has_clusters
from .hardware.pair import Pair
from .partition.scratch import Scratch, scratch_bytes
from .partition.strided import is_exact, StridedPart
from .partition.tile import Tile
from .hardware.pdl import pdl_wait, pdl_attributes
from .partition.row import again, anew
from .hardware.slots import Slots, kept_dtype, wait_after
from .hardware.team import greater, largest_lane, maximum, total
from .partition.pair import add, end
from .hardware.warp_reduction import values_reduce
from .tuning import HAS_ROOM, Strip

comptime GROUP = 4
"""Vectors in registers whose exponentials are summed before they are added to the others."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(tile.threads)),
    `nvvm.minctasm`=SIMDLength(t.blocks),
)
def resident_strided_kernel[
    S: RowSource, T: RowTarget, finish: Finish, t: Strip, tile: Tile
](
    y: T,
    x: S,
    other: Source[S.elements],
    columns: Int64,
    inner: Int64,
    n: Int64,
    share: Int64,
    zero: UInt32,
):
    """Writes the softmax along the middle axis of a row-major (outer, n, inner) tensor.

    - `S`: Where logits come from, of 4 bytes or 2.
    - `t`: How columns are held, at most 32 vectors of them by a cluster.
    - `tile`: The block's columns: of logits in memory vectors of 16 bytes, or of one column if not slotted.

    Args:
        y: Results; may be the same memory as `x`.
        x: Logits, or results whose logits' gradient is wanted.
        other: The gradients of results; else not looked at.
        columns: How many there are, less than 2^31.
        inner: Those of a position.
        n: Positions.
        share: Positions that a block takes.
        zero: As for `anew`.
    """
    resident_columns[finish, t, tile](
        y, x, other, columns, inner, n, share, zero
    )


@inline(.always)
def resident_columns[
    S: RowSource,
    T: RowTarget,
    //,
    finish: Finish,
    t: Strip,
    tile: Tile,
    of_block: Bool = False,
](
    y: T,
    x: S,
    other: Source[S.elements],
    columns: Int64,
    inner: Int64,
    n: Int64,
    share: Int64,
    zero: UInt32,
):
    """Writes what `resident_strided_kernel` is to write, whose parameters and arguments these are.

    - `of_block`: Whether the tensor is this block's alone, and has no more columns than it takes.
    """
    comptime lanes = tile.lanes
    comptime width = tile.width
    comptime vectors = t.vectors
    comptime slotted = t.slotted
    comptime clustered = t.is_cluster()
    comptime gradient = finish.is_gradient()
    comptime log = finish == Finish.GRADIENT_OF_LOGARITHMS
    comptime inputs = finish.inputs()
    comptime F = DType.float32
    comptime loaded = S.Column.loaded
    comptime Raw = SIMD[loaded, width]
    comptime Vector = SIMD[DType.float32, width]
    comptime Kept = Slots[kept_dtype[S.elements](), tile.threads, width]
    comptime exact = is_exact[S, T, finish]()
    comptime Unit = Scale[exact, width]
    # What is needed again is kept in place of the logits, where there is room for it.
    comptime exponentials = finish == Finish.PROBABILITIES
    comptime in_registers = exponentials and loaded == DType.float32
    comptime in_slots = exponentials and Kept.dtype == DType.float32
    comptime copied = slotted and S.in_memory
    # With copies, one more vector in registers: of the last round, which not all threads have.
    comptime held = vectors + 1 if copied else vectors
    # Shuffles move words of 4 bytes.
    comptime compared = loaded if width * size_of[
        loaded
    ]() >= 4 else DType.float32
    comptime none = Vector(neg_inf[F]())
    # What changes neither a sum nor a maximum.
    comptime filler = Raw(0) if gradient else Raw(neg_inf[loaded]())
    # A cluster exchanges pairs of numbers: of one column, or the sums of two.
    comptime numbers = max(1, lanes * width // 2) if gradient else (
        lanes * width
    )
    comptime G = Gradient[log, exact, F, width]
    var thread = Int(thread_idx.x)
    var cluster = Cluster[clustered, numbers]()
    var index = UInt32(0) if of_block else UInt32(cluster.index)
    var part = StridedPart[tile, S.in_memory](
        index,
        columns,
        inner,
        n,
        thread,
        UInt32(cluster.rank),
        share,
    )
    var maxima = Scratch[tile](part.skew)
    var sums = maxima
    comptime if not gradient:
        sums = Scratch[tile](part.skew)
    var source = part.source(x)
    var upstream = source
    comptime if gradient:
        upstream = part.source(rebind[S](MemorySource(other)))
    var read = part
    comptime if S.is_causal:
        read = part.before(source.length(Int(n)))
    # The rounds from `vectors` to this one are in slots.
    var last = max(vectors, read.full_rounds() if copied else read.rounds())

    pdl_wait()
    var slots = Kept()
    comptime if copied:
        for i in range(vectors, last):
            var to = rebind[Slots[loaded, tile.threads, width]](slots)
            source.fetch(to, inputs * (i - vectors), i)
            comptime if gradient:
                upstream.fetch(to, inputs * (i - vectors) + 1, i)
    var raw = Array[Raw, held](fill=filler)
    var others = Array[Raw, held](fill=filler)
    comptime for j in range(held):
        var i = j if j < vectors else last
        if read.has(i):
            raw[j] = source.load(i, read.left(i), raw[j])
            comptime if gradient:
                others[j] = upstream.load(i, read.left(i), others[j])

    var largest = raw[0]
    comptime for j in range(1, held):
        largest = maximum(largest, raw[j])
    comptime if copied and not gradient:
        wait_after(largest_lane(largest))
        for i in range(vectors, last):
            largest = maximum(largest, slots.take(i - vectors).cast[loaded]())
    elif slotted and not gradient:
        for i in range(vectors, last, vectors):
            # As many at a time as there are registers for, all under way at once.
            var next = Array[Raw, vectors](fill=Raw(neg_inf[loaded]()))
            # Where each had a branch of its own, the assembler waited for one after the other: 64×1000×4096 float32 took 853 µs, now 733 (H200).
            if read.has(i + vectors - 1):
                comptime for j in range(vectors):
                    next[j] = source.load(i + j)
            else:
                comptime for j in range(vectors):
                    if read.has(i + j):
                        next[j] = source.load(i + j)
            comptime for j in range(vectors):
                if i + j < last:
                    largest = maximum(largest, next[j])
                    slots.keep(i + j - vectors, next[j].cast[Kept.dtype]())
    var m = Vector(0)
    var scale = Unit(m)
    comptime if not gradient:
        comptime if S.Column.scaled:
            m, scale = maxima.scale_of_largest[exact](
                thread, source.logits(largest)
            )
        else:
            m, scale = maxima.scale_of_largest[exact](
                thread, largest.cast[compared]()
            )

    @inline(.always)
    def with_factor(scale: Unit) {imm} -> Unit:
        """Returns a scale for elements: a factor of them is best in its slope.
        """
        var result = scale
        comptime if S.Column.scaled and not exact:
            result.slope *= source.columns[0].factor()
        return result

    @inline(.always)
    def exponentials_of[
        dtype: DType
    ](scale: Unit, kept: SIMD[dtype, width]) {imm} -> Vector:
        """Returns the exponentials of what a register or a slot holds."""
        comptime if S.Column.scaled and exact:
            return scale.exp(source.logits(rebind[SIMD[loaded, width]](kept)))
        else:
            return scale.exp(widened(kept))

    scale = with_factor(scale)

    # Few terms are summed plainly; one running sum of all would round equal ones the same way each time.
    var sum = Sum[DType.float32, width]()
    comptime for i in range(0, held, GROUP):
        var terms = Vector(0)
        comptime for j in range(i, min(i + GROUP, held)):
            comptime if gradient:
                terms = G.plus_term(terms, widened(raw[j]), widened(others[j]))
            else:
                comptime if loaded != F:
                    raw[j] = again(raw[j])
                var e = exponentials_of(scale, raw[j])
                comptime if in_registers:
                    raw[j] = e.cast[loaded]()
                terms += e
        add[exact](sum, terms)
    comptime if slotted:
        comptime if gradient:
            var seen = sum.value
            comptime if log:
                # The sum knows nothing of the results.
                comptime for j in range(held):
                    seen = maximum(seen, raw[j].cast[F]())
            wait_after(largest_lane(seen))
        for i in range(vectors, last):
            var slot = inputs * (i - vectors)
            var kept = slots.take(slot)
            comptime if gradient:
                add[exact](
                    sum,
                    G.term(widened(kept), widened(slots.take(slot + 1))),
                )
            else:
                var e = exponentials_of(scale, kept)
                comptime if in_slots:
                    slots.keep(slot, e.cast[Kept.dtype]())
                add[exact](sum, e)
    # What the block's exponentials are to be multiplied by to be in the unit of the pair, or the lowered one.
    comptime rescaled = clustered or S.has_sink
    comptime lowered = exact and rescaled and in_registers
    # A sink, and what follows from a pair, are one thread's work for all. It asks for a sink when it needs it: asked for at the start, without a sink,
    # 16×1024×1024 of bfloat16 take 27 µs instead of 25, 64×500×4096 140 instead of 134 (H200).
    comptime once = maxima.has_ends and not (gradient or finish == Finish.PAIR)

    @inline(.always)
    def leave(column: Int, pair: Pair[1]) {imm}:
        """Joins a column's sink to the pair of its elements, and leaves in the rows of its sums what its results are made with.
        """
        var whole = pair
        comptime if S.has_sink:
            whole = pair.joined[exact](part.sink(x, index, columns, column))
        var ended = whole
        comptime rows = Scratch[tile].stride
        var place = sums.first.unsafe_offset(column)
        place[] = end[finish, exact, lowered](ended, x.is_masked())
        place[unsafe_offset=rows] = ended.m
        comptime if rescaled and in_registers:
            var mine = maxima.first[unsafe_offset=column]
            place[unsafe_offset=2 * rows] = rest_of[exact](mine, whole.m)
        elif rescaled:
            sums.leave(2, column, Scale[exact](whole.m))

    var pair = Pair(m, Vector(0))
    comptime if clustered:
        _ = sums.gather[False](thread, sum.value)
        exchange[not gradient](cluster, maxima, sums, thread)
        comptime for start in range(0, numbers, tile.threads):
            var i = start + thread
            if i < numbers:
                var two = received[exact, not gradient](cluster, i)
                # Nobody else has looked at these columns' sums, but for a gradient's.
                comptime if once:
                    leave(i, two)
                elif gradient:
                    # Only this thread reads this place of the mailbox. Neighbours have read the sums before they sent, but racecheck does not learn that from an mbarrier.
                    cluster.mailbox[unsafe_offset=2 * i] = two.m
                    cluster.mailbox[unsafe_offset=2 * i + 1] = two.d
                else:
                    sums.first[unsafe_offset=i] = two.m
                    sums.first[unsafe_offset=sums.stride + i] = two.d
        barrier()
        comptime if gradient:
            # Its sum is all.
            pair.d = Scratch[tile](cluster.mailbox, part.skew).take(0, thread)
        elif not once:
            pair = Pair(sums.take(0, thread), sums.take(1, thread))
    elif once:
        _ = sums.gather[False](thread, sum.value)
        comptime for start in range(0, sums.columns, tile.threads):
            var column = start + thread
            if column < sums.columns:
                leave(
                    column,
                    Pair[1](
                        maxima.first[unsafe_offset=column],
                        sums.column[False](column),
                    ),
                )
        barrier()
    else:
        pair.d = sums.reduce[False](thread, sum.value)
    comptime if S.has_sink and not once:
        var logits = none
        if part.is_there:
            logits = part.sinks(x)
        pair = pair.joined[exact](logits)
    comptime if finish == Finish.PAIR:
        if part.leads() and cluster.rank == 0:
            part.write[exact](y.pairs[DType.float32](), pair)
        return

    var rest = Vector(1)
    var factor = Vector(0)
    comptime if once:
        factor = sums.take(0, thread)
        pair.m = sums.take(1, thread)
        comptime if rescaled and in_registers:
            rest = sums.take(2, thread)
        elif rescaled:
            scale = with_factor(sums.scale[exact](2, thread, pair.m))
    else:
        comptime if rescaled and in_registers:
            rest = rest_of[exact](m, pair.m)
        elif rescaled:
            # What is computed anew can as well be in that unit.
            scale = with_factor(Unit(pair.m))
        factor = end[finish, exact, lowered](pair, x.is_masked())
    var shared = G(pair.d)
    var secret = zero
    comptime if not gradient:
        secret = sums.secret()

    @inline(.always)
    def finished[
        dtype: DType, //, exponential: Bool
    ](kept: SIMD[dtype, width], theirs: SIMD[dtype, width]) {imm} -> Vector:
        """Returns the results of what a register or a slot holds: exponentials, or else inputs.
        """
        var result: Vector
        comptime if gradient:
            result = shared.of(widened(kept), widened(theirs))
        elif finish == Finish.LOGARITHMS:
            result = (widened(kept) - pair.m) - factor
        else:
            var e: Vector
            comptime if exponential:
                e = widened(kept)
            else:
                e = exponentials_of(scale, kept)
            # One factor after the other: both together may be too small for a normal number.
            result = e * rest * factor
        return result

    comptime if of_block:
        # A column may be taken by several threads, and none of them is to read what another has written in its place.
        barrier()
    var target = part.target(y)
    target.forget()
    comptime for j in range(held):
        var i = j if j < vectors else last
        if part.has(i):
            # Widened, or with their exponentials, they would be kept in twice the registers.
            comptime if gradient and (loaded != F or log):
                raw[j] = anew(raw[j], secret)
                others[j] = anew(others[j], secret)
            elif exponentials and not in_registers and S.in_memory:
                raw[j] = anew(raw[j], secret)
            target.store(
                i, finished[in_registers](raw[j], others[j]), part.left(i)
            )
    comptime if slotted:
        for i in range(vectors, last):
            if copied or part.has(i):
                var slot = inputs * (i - vectors)
                target.store(
                    i,
                    finished[in_slots](
                        slots.take(slot), slots.take(slot + inputs - 1)
                    ),
                )
    comptime if slotted and S.is_causal:
        # Of what takes no part.
        for i in range(last, part.rounds()):
            if part.has(i):
                target.store(
                    i,
                    finished[exponentials](
                        Vector(0) if exponentials else none, none
                    ),
                )


def resident_strided[
    S: RowSource,
    T: RowTarget,
    //,
    finish: Finish,
    t: Strip,
    tile: Tile,
](
    y: T, x: S, other: Source[S.elements], rows: Rows, queue: Queue, room: Int
) raises:
    """Launches `resident_strided_kernel`, whose parameters and arguments these are, with a block or a cluster for every tile of columns.

    - `rows`: Rows along any axis; unless columns are dealt, `x` and `y` can be had in vectors, and `rows.inner` is a multiple of one, or columns are
      skewed.
    - `room`: Positions that a block has room for.
    """
    comptime deep = tile.deep()
    var blocks = t.cluster_blocks(rows.n, room)
    var share = ceildiv(rows.n, blocks)
    var bytes = 0
    comptime if t.slotted:
        # The last round of copied ones is always in registers.
        var rounds = ceildiv(share, deep) - (1 if S.in_memory else 0)
        bytes = (
            max(0, rounds - t.vectors) * _slot_bytes[S](tile) * finish.inputs()
        )
    var cluster: Optional[Dim] = None
    comptime if t.is_cluster():
        cluster = Dim(blocks, 1, 1)
    queue.launch[resident_strided_kernel[S, T, finish, t.kernel(), tile]](
        y,
        x,
        other,
        Int64(rows.count()),
        Int64(rows.inner),
        Int64(rows.n),
        Int64(share),
        UInt32(0),
        grid_dim=tile.count(rows) * blocks,
        block_dim=tile.threads,
        shared_mem_bytes=bytes,
        cluster_dim=cluster,
        attributes=pdl_attributes(),
    )


def resident_room[S: RowSource, finish: Finish](t: Strip, tile: Tile) -> Int:
    """Returns how many positions fit in a block, for use at compile time.

    Args:
        t: How columns are held.
        tile: A block's columns.
    """
    if t.up_to != HAS_ROOM and not t.slotted:
        return t.up_to
    comptime gpu = DeviceContext.default_device_info
    # Maxima and sums, or sums.
    var kinds = 3 - finish.inputs()
    var static = kinds * scratch_bytes(tile)
    if has_clusters():
        static += kinds * PORTABLE_BLOCKS * tile.columns() * 4
    # The driver keeps 1 KiB of each block's, and alignment takes its part.
    var left = max(
        0, gpu.shared_memory_per_multiprocessor // t.blocks - static - 1280
    )
    var rounds = t.vectors + left // (finish.inputs() * _slot_bytes[S](tile))
    var deep = tile.deep()
    # The last round of copied ones is always in registers.
    var room = (rounds + 1 if S.in_memory else rounds) * deep
    return room if t.up_to == HAS_ROOM else min(room, t.up_to)


def _slot_bytes[S: RowSource](tile: Tile) -> Int:
    """Returns the shared memory for one vector of each thread of a block."""
    return tile.threads * tile.width * size_of[kept_dtype[S.elements]()]()


@inline(.always)
def rest_of[
    width: SIMDLength, //, exact: Bool
](m: SIMD[DType.float32, width], of_row: SIMD[DType.float32, width]) -> SIMD[
    DType.float32, width
]:
    """Returns what a block's exponentials are to be multiplied by to be in the unit of their rows, lowered if they are exact.

    Parameters:
        width: How many rows.
        exact: Of the scale that the exponentials are in.

    Args:
        m: The block's maxima.
        of_row: Those of whole rows.
    """
    comptime Vector = SIMD[DType.float32, width]
    var scale = Scale[exact, width](m)
    var larger = Scale[exact, width](of_row)
    var rest: Vector
    comptime if exact:
        rest = scale.over_lowered(larger)
    else:
        rest = scale.over(larger)
    # In a part of nothing but -inf, all is 0.
    return m.eq(neg_inf[DType.float32]()).select(Vector(0), rest)


@inline(.always)
def exchange[
    real: Bool, numbers: Int, tile: Tile, //, of_pairs: Bool
](
    cluster: Cluster[real, numbers],
    maxima: Scratch[tile],
    sums: Scratch[tile],
    thread: Int,
):
    """Sends each block of the cluster what this one has of each column, and waits for what all have sent.

    A thread has a column: it combines what the warps have left, and of sums every other thread sends its neighbour's as well.

    Parameters:
        real: As of `Cluster`.
        numbers: Twos of numbers that each block sends to each.
        tile: The block's columns.
        of_pairs: Whether there are maxima.

    - `cluster`: This block's.
    - `maxima`: With the columns' maxima in its first row.
    - `sums`: With the sums of each warp.
    """
    cluster.open(cluster.blocks * numbers)
    comptime columns = numbers if of_pairs else 2 * numbers
    comptime for start in range(0, columns, tile.threads):
        var i = start + thread
        # Whole warps, for the shuffle.
        if i < align_up(columns, WARP_SIZE):
            var column = min(i, columns - 1)
            var a = sums.column[False](column)
            var b = a
            comptime if of_pairs:
                a = maxima.first[unsafe_offset=column]
            else:
                b = warp.shuffle_xor(a, 1)
                i = i // 2 if i % 2 == 0 else numbers
            if i < numbers:
                for block in range(cluster.blocks):
                    cluster.send(block, 2 * (cluster.rank * numbers + i), a, b)
    cluster.close()


@inline(.always)
def received[
    real: Bool, numbers: Int, //, exact: Bool, of_pairs: Bool
](cluster: Cluster[real, numbers], i: Int) -> Pair[1]:
    """Returns what all blocks have sent come to: the pair of a row, or the sums of two in its place. All blocks of the cluster have the same bits.

    Parameters:
        real: As of `Cluster`.
        numbers: Twos of numbers that each block sends to each.
        exact: Of the scale that the sums are in.
        of_pairs: Whether there are maxima.

    Args:
        cluster: This block's.
        i: Which two of the numbers.
    """
    comptime Numbers = Array[Float32, PORTABLE_BLOCKS]
    var a = Numbers(fill=neg_inf[DType.float32]() if of_pairs else 0)
    var b = Numbers(fill=0)
    comptime for block in range(PORTABLE_BLOCKS):
        if block < cluster.blocks:
            var slot = cluster.mailbox.unsafe_offset(2 * (block * numbers + i))
            a[block] = slot[unsafe_offset=0]
            b[block] = slot[unsafe_offset=1]
    comptime if not of_pairs:
        return Pair[1](values_reduce[total](a), values_reduce[total](b))
    var m = values_reduce[greater](a)
    var scale = Scale[exact](m)
    comptime for block in range(PORTABLE_BLOCKS):
        if block < cluster.blocks:
            b[block] = Pair[1](a[block], b[block]).sum_over(scale)
    return Pair[1](m, values_reduce[total](b))
