"""The fast kernel of rows beside a mask of floats: one read and one write an element, and the mask is read once for several rows.

A warp holds a unit of a row, as in `resident_units`, and what of the mask is beside it in shared memory. Rows that have the same mask, as those of all heads, and all
queries where only keys are masked, are taken by one cluster one after the other: read again for each row, from the L2, the mask would be a third of what
multiprocessors can move. While a row is computed, the next one is on its way to shared memory. Logits are float32 from the first, and exponentials take their place.

Of rows that begin between two multiples of 16 bytes a cluster takes those that begin alike.

Of other ways none was faster at all lengths (H200, one mask for all rows, µs; a copy takes 511 and, of bfloat16, 256), when the first line was what now takes 527,
515 and 263:

| | 16384×16384 | 2048×128256 | 16384×16384 bfloat16 |
|---|---|---|---|
| as here, then | 544 | 536 | 275 |
| units that do not begin with a line of shared memory | 559, 597 | 558, 599 | 275, 276 |
| up to 16 rows for a cluster | 566 | 561 | 281 |
| 4 warps a block | 570 | 557 | 273 |
| the next row on its way to the L2 | 664 | 675 | 364 |
| the same, units of 16 vectors a lane | 771 | 757 | 366 |
| units of 16 vectors a lane, nothing on its way | 594 | 677 | 401 |
| a mask that is read for each row, by `resident_units` | 572 | 829 | – |

Those with 16 rows or 4 warps were measured when units did not begin with a line, and are to be compared with 559, 558 and 275.

Rows of 16 bits do not wait for memory, but for what follows from a row's pairs, which takes as long for them as for float32: of 354 µs that 2048×128256 took, merging
pairs took a quarter, until each warp had all of its pairs read at once, and no division for each; now it takes 297. Of other ways none was faster (before that):

| bfloat16 | 16384×16384 | 8192×50256 | 2048×128256 | 1024×262144 | 8192×50257 |
|---|---|---|---|---|---|
| as then | 265 | 509 | 354 | 399 | 757 |
| two rows on their way, one after the other, as many bytes as one of float32 | 298 | 555 | 380 | 481 | 694 |
| a row is written when the next one has been summed up, 512 threads with registers for two | 297 | 603 | 403 | – | 830 |

Odd rows of bfloat16 may be shifted on their way, so that lanes hold the same elements of each row: three words of shared memory are read for four elements, and results are shuffled
before they are written. On an H200 8192×50257 takes 642 µs then, and 672 as here, 2048×128257 401 and 444; but 16384×16383 373 and 333, 65536×3001 300 and 285, 65536×1023 105
and 85. A quarter of a profiler's samples is at the wait for other blocks' pairs even then.
"""

from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_dim,
    thread_idx,
)
from max.gpu.host import Dim
from max.gpu.memory import external_memory

from ..io.rows import Rows
from ..io.source import RowSource, SourceLine
from ..io.target import RowTarget
from ..math.exponential import Scale
from ..ops.finish import Finish
from ..ops.forms import Sharing
from ..queue import Queue
from .hardware.cluster import Cluster, PORTABLE_BLOCKS
from .hardware.pair import Pair
from .hardware.pdl import pdl_attributes, pdl_wait
from .hardware.slots import fetch_vector, wait_for_vectors
from .hardware.tree_reduction import Shared
from .partition.granules import Granules
from .partition.row import LINE_BYTES, reads_vectors
from .partition.turns import arranged, gains, ROOMY, Turns
from .partition.unit import Unit, unit_elements
from .partition.unit_result import factors
from .partition.unit_sum import multiplied, UnitSum

comptime F = DType.float32
comptime WIDTH = Granules[F].width
"""Elements that a lane takes at a time, of 16 bits, too."""

comptime MAX_UNITS = 192
"""Units of a row at most."""

comptime LEAST_MASKED = 256
"""Elements that rows have more than: warps have too little to do for shorter ones."""

comptime ROUNDS = [4, 8, 8, 16]
"""Vectors of a unit that each lane takes, of longer and longer rows: of the longest, units and masks of 12 warps fill the shared memory of a block."""

comptime ALONE = 2
"""How many of these are of rows that are a single unit."""

comptime WARPS_ALONE = 4
"""Warps of a block whose rows are single units, each with rows of its own."""

comptime MOST_ROWS = 8
"""Rows that a cluster takes at most: the mask is then a seventeenth of what is moved."""

comptime MOST_ALONE = 4
"""The same, of rows that a warp takes alone: 16×1024×1024 float32 take 36.0 µs, and by `MOST_ROWS` 39.0 (H200)."""


@fieldwise_init
struct _Masked[Line: SourceLine](TrivialRegisterPassable):
    """A row that lies in shared memory, and its mask beside it.

    Parameters:
        Line: The row in memory, which has a factor, and another one for the mask.
    """

    var line: Self.Line
    """The row in memory, from a lane's first granule on."""
    var elements: Shared[Scalar[Self.Line.elements]]
    """The same in shared memory."""
    var mask: Shared[Float32]
    """What is beside that."""

    @inline(.always)
    def logits(self, i: Int) -> SIMD[F, WIDTH]:
        """Returns the logits of the granule that begins with element `i`."""
        var elements = self.elements.unsafe_load[
            width=WIDTH, alignment=WIDTH * size_of[Self.Line.elements]()
        ](i)
        var mask = self.mask.unsafe_load[
            width=WIDTH, alignment=WIDTH * size_of[F]()
        ](i)
        var z = multiplied[True](
            elements, self.line.with_sign(self.line.factor())
        )
        return mask.fma(SIMD[F, WIDTH](self.line.bias_factor()), z)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(max_threads))
)
def resident_masked_kernel[
    S: RowSource,
    T: RowTarget,
    rounds: Int,
    max_threads: Int,
    alone: Bool,
    edged: Bool,
](
    y: T,
    x: S,
    n: Int64,
    units: Int64,
    turns: Turns,
    rows: Int64,
    clusters: Int64,
    zero: UInt32,
):
    """Writes softmax of rows along the last axis.

    Parameters:
        S: Where logits come from: memory, of 4 bytes or 2, with a mask of floats.
        T: Where results go.
        rounds: Vectors of a unit that each lane takes: a row's bits follow from it.
        max_threads: Threads a block at most, which bounds the registers.
        alone: Whether a row is a single unit: then a warp is what is called a cluster here.
        edged: Whether rows may begin or end between two vectors: with or without it results are the same.

    Args:
        y: Results; may be the memory of the logits.
        x: Logits.
        n: Length of each row.
        units: How many units that is: no more than there are warps in a cluster.
        turns: Which rows a cluster takes.
        rows: How many rows there are.
        clusters: How many clusters take them.
        zero: What nobody but the caller knows to be 0.
    """
    comptime exact = size_of[S.Line.elements]() > 2 or size_of[
        T.Line.stored
    ]() > 2
    comptime U = Unit[F, rounds]
    comptime Sum = UnitSum[F, rounds, exact, keeps=True, edged=edged, sums=True]
    comptime Line = _Masked[S.Line]
    var thread = Int(thread_idx.x)
    var lane = thread % WARP_SIZE
    var warp = thread // WARP_SIZE
    var warps = Int(block_dim.x) // WARP_SIZE
    var cluster = Cluster[
        not alone, MAX_UNITS // PORTABLE_BLOCKS, boxes=1 if alone else 2
    ]()
    var index = cluster.index
    var unit = cluster.rank * warps + warp
    comptime if alone:
        index = index * warps + warp
        unit = 0
    var first, step, count = turns.of(index)
    # Warps without a unit do not read the mailboxes either.
    if index >= Int(clusters) or unit >= Int(units):
        count = 0
    var place = Int(x.address(Int(first), Int(n))) // size_of[S.Line.elements]()
    var u = U(
        Granules[F](Int(UInt64(place) % UInt64(WIDTH)), Int(n)), unit, lane
    )
    var distance = u.distance()
    var room = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=LINE_BYTES
    ]().unsafe_offset(warp * _room[S.Line.elements](rounds))
    var mask = room.unsafe_bitcast[Float32]().unsafe_offset(lane * WIDTH)
    var elements = (
        room.unsafe_offset(size_of[F]() * _places[S.Line.elements](rounds))
        .unsafe_bitcast[Scalar[S.Line.elements]]()
        .unsafe_offset(lane * WIDTH)
    )
    pdl_wait()

    @inline(.always)
    def fetch(row: UInt32) {imm}:
        """Has a row brought to shared memory."""
        var source = x.address(Int(row), Int(n)).unsafe_offset(distance)
        comptime size = size_of[S.Line.elements]()

        @inline(.always)
        def fetch_elements[count: Int](at: Int) {imm}:
            fetch_vector[count * size](
                elements.unsafe_offset(at), source.unsafe_offset(at)
            )

        @inline(.always)
        def fetch_some(j: Int) {imm}:
            """Brings what of a granule is the row's, since memory may end with it.
            """
            comptime together = 4 // size
            var end = u.of_row(j)[1]
            if end == Int32(WIDTH):
                fetch_elements[WIDTH](u.place(j))
                return
            comptime for v in range(0, WIDTH - together + 1, together):
                var at = u.place(j) + v
                if Int32(v + together) <= end:
                    fetch_elements[together](at)
                elif Int32(v) < end:
                    # One of 2 bytes, fewer than there are copies of.
                    if Int(row) + 1 < Int(rows):
                        fetch_elements[together](at)
                    else:
                        elements[unsafe_offset=at] = source[unsafe_offset=at]

        comptime for all in [True, False]:
            if u.whole == all:
                comptime for j in range(rounds):
                    if u.has[all](j):
                        fetch_elements[WIDTH](u.place(j))
        comptime if edged:
            if not u.whole:
                var tail_round = u.tail_round()
                if tail_round < rounds:
                    fetch_some(tail_round)
            if u.shared:
                fetch_some(rounds)

    if count > 0:
        fetch(first)
        _fetch_mask[edged](
            u, x.line(Int(first), Int(n)).onwards(distance), mask
        )
    comptime if not alone:
        cluster.wait()
    var row = first
    for i in range(count):
        var turn = Int(i)
        var line = Line(
            x.line(Int(row), Int(n)).onwards(distance), elements, mask
        )
        var raw = Array[U.Values, rounds](uninitialized=True)

        @inline(.always)
        def make[all: Bool](mut raw: Array[U.Values, rounds]) {imm}:
            comptime for j in range(rounds):
                raw[j] = U.Values(u.filler)
                if u.has[all](j):
                    raw[j] = line.logits(u.place(j))

        wait_for_vectors()
        # Not all fillers first, which whole units would only overwrite.
        if u.whole:
            make[True](raw)
        else:
            make[False](raw)
        var after = U.Values(u.filler)
        comptime if edged:
            after = _edges(u, line, raw)
        if i + 1 < count:
            fetch(row + step)
        var sum = Sum(u, raw, after, lane, zero)
        var m = sum.m
        var scale = sum.scale
        var pair = Pair(m, sum.d)
        comptime if not alone:
            cluster.expect(Int(units), turn)
            if lane < cluster.blocks:
                cluster.send(lane, 2 * unit, m, sum.d, turn)
            cluster.close(turn)
            pair = cluster.merged[exact, sums=True](Int(units), lane, turn)
        var last, rest = factors[Finish.PROBABILITIES, exact, True](
            m, scale, Scale[exact, sums=True](pair.m), pair, x.is_masked()
        )

        @inline(.always)
        def plain(j: Int) {imm} -> SIMD[F, WIDTH]:
            return rebind[SIMD[F, WIDTH]](raw[j]) * last

        @inline(.always)
        def any(j: Int) {imm} -> SIMD[F, WIDTH]:
            return rebind[SIMD[F, WIDTH]](raw[j]) * rest * last

        @inline(.always)
        def some(j: Int) {imm} -> SIMD[F, WIDTH]:
            var e = scale.quick(after)
            comptime for k in range(rounds):
                if j == k:
                    e = raw[k]
            return rebind[SIMD[F, WIDTH]](e) * rest * last

        u.store[edged](
            y.line(Int(row), Int(n)).onwards(distance),
            rest == 1,
            plain,
            any,
            some,
        )
        row += step


@inline(.always)
def _edges[
    rounds: Int, Line: SourceLine, //
](
    u: Unit[F, rounds],
    line: _Masked[Line],
    mut raw: Array[Unit[F, rounds].Values, rounds],
) -> Unit[F, rounds].Values:
    """Makes logits of granules of which only a part is the unit's, and returns those after the last.

    Parameters:
        rounds: Vectors of a unit that each lane takes.
        Line: The row in memory.

    Args:
        u: What of the row is this lane's.
        line: The row.
        raw: Logits of the others.
    """
    comptime Values = Unit[F, rounds].Values

    @inline(.always)
    def part(all: Values, begin: Int32, end: Int32) {imm} -> Values:
        """Returns fillers instead of what is before `begin`, or not before `end`.
        """
        var values = all
        comptime for v in range(WIDTH):
            if not begin <= Int32(v) < end:
                values[v] = u.filler
        return values

    @inline(.always)
    def granule(j: Int) {imm} -> Values:
        return rebind[Values](line.logits(u.place(j)))

    var after = Values(u.filler)
    if not u.whole:
        var tail_round = u.tail_round()
        if tail_round < rounds:
            var tail = part(granule(tail_round), 0, u.g.tail)
            comptime for j in range(rounds):
                if j == tail_round:
                    raw[j] = tail
    if u.shared:
        raw[0] = part(raw[0], u.g.shift, Int32(WIDTH))
        after = part(granule(rounds), 0, min(u.g.shift, u.of_row(rounds)[1]))
    return after


def _longest[line: Int]() -> Int:
    """Returns the longest row of as many vectors a lane as `ROUNDS` has in this place, in elements.
    """
    comptime rounds = ROUNDS[line]
    return unit_elements[F](rounds) * (1 if line < ALONE else MAX_UNITS)


@inline(.always)
def _places[dtype: DType](rounds: Int) -> Int:
    """Returns how many elements a warp has room for, of a row of `dtype` and of its mask: those of its unit, and a granule after it, up to where a line begins.
    """
    return unit_elements[F](rounds) + LINE_BYTES // size_of[dtype]()


def _room[dtype: DType](rounds: Int) -> Int:
    """Returns how many bytes of shared memory that is."""
    return (size_of[F]() + size_of[dtype]()) * _places[dtype](rounds)


@inline(.always)
def _fetch_mask[
    rounds: Int, Line: SourceLine, //, edged: Bool
](u: Unit[F, rounds], line: Line, mask: Shared[Float32]):
    """Has a mask brought to shared memory.

    Parameters:
        rounds: Vectors of a unit that each lane takes.
        Line: The row that it is beside.
        edged: As of `resident_masked_kernel`.

    Args:
        u: What of the row is this lane's.
        line: The row from the lane's first granule on.
        mask: Where what is beside that goes.
    """
    comptime U = Unit[F, rounds]

    @inline(.always)
    def by[of: DType]() {imm}:
        """Brings one of dtype `of`, by way of registers."""
        var raw = Array[U.Values, rounds](fill=U.Values(0))
        var after = U.Values(0)

        @inline(.always)
        def beside(
            elements: U.Values, mask: SIMD[of, U.width]
        ) {imm} -> U.Values:
            return mask.cast[F]()

        u.beside[edged](line, raw, after, Scalar[of](0), beside)
        comptime for j in range(rounds):
            mask.unsafe_store[alignment=16](u.place(j), raw[j])
        comptime if edged:
            if u.shared:
                mask.unsafe_store[alignment=16](u.place(rounds), after)

    comptime if Line.elements != F:
        if line.adds_narrow():
            by[Line.elements]()
            return
    if u.whole and u.g.shift == 0 and line.is_mask_aligned[F, WIDTH]():
        comptime for j in range(rounds):
            fetch_vector(
                mask.unsafe_offset(u.place(j)),
                line.mask_address[F](u.place(j)),
            )
    else:
        by[F]()


def is_of_grid[dtype: DType](n: Int) -> Bool:
    """Returns whether rows of length `n` beside a mask of floats are for the whole GPU: long ones, and of float32 shorter ones that are whole vectors.

    512×262144 float32 takes 290 µs instead of 355 by clusters, 32×262144 26.4 instead of 35.2, 4×262144 8.2 instead of 8.4. Of odd ones 512×262143 would take 358 instead of 417, but 4×262143
    14.1 instead of 10.3; of bfloat16 512×200000 154 instead of 180, 1024×262144 361 instead of 368, but 4×262144 6.6 instead of 5.8, and 1×200000 8.9 instead of 5.0 (H200).

    Parameters:
        dtype: Dtype of the logits.

    Args:
        n: Length of each row.
    """
    comptime longest = len(ROUNDS) - 1
    comptime most = _longest[longest]()
    comptime most_of_whole = _longest[longest - 1]()
    return n > most or (
        size_of[dtype]() > 2 and n > most_of_whole and n % WIDTH == 0
    )


def masked_fits[
    S: RowSource, T: RowTarget, //
](y: T, x: S, sharing: Sharing, rows: Rows, queue: Queue) raises -> Bool:
    """Enqueues softmax of rows beside a mask of floats, if a cluster's warps hold a unit of a row each, and returns whether they do.

    Parameters:
        S: As of `resident_masked_kernel`.
        T: Where results go.

    Args:
        y: Results.
        x: Logits.
        sharing: Which rows have the same mask.
        rows: Rows along the last axis, none of them empty.
        queue: Where kernels are launched.
    """
    comptime for line in range(len(ROUNDS)):
        comptime rounds = ROUNDS[line]
        comptime alone = line < ALONE
        comptime before = LEAST_MASKED if line == 0 else _longest[
            max(0, line - 1)
        ]()
        comptime up_to = _longest[line]()
        comptime may = rows.length == 0 or before < rows.length <= up_to
        comptime if may:
            if before < rows.n <= up_to:
                _launch[rounds, alone](y, x, sharing, rows, queue)
                return True
    return False


def _launch[
    S: RowSource, T: RowTarget, //, rounds: Int, alone: Bool
](y: T, x: S, sharing: Sharing, rows: Rows, queue: Queue) raises:
    """Launches `resident_masked_kernel`: parameters and arguments are as of `masked_fits` and the kernel.
    """
    comptime room = _room[S.Line.elements](rounds)
    comptime most = 512 if rounds > 8 else 768
    var units = ceildiv(rows.n, unit_elements[F](rounds))
    var whole = reads_vectors[WIDTH](x, rows)
    comptime for edged in [False, True]:
        comptime may_be_roomy = edged and rounds == 8
        if whole != edged:
            comptime if alone:
                comptime threads = ROOMY if may_be_roomy else most
                _launch_arranged[rounds, threads, alone, edged](
                    y, x, sharing, rows, units, 1, WARPS_ALONE, queue
                )
            else:
                var full = arranged[room, most](units)
                comptime if may_be_roomy:
                    var roomy = arranged[room, ROOMY](units)
                    if gains(full, roomy, rows.count() * units, queue):
                        _launch_arranged[rounds, ROOMY, alone, edged](
                            y,
                            x,
                            sharing,
                            rows,
                            units,
                            roomy.blocks,
                            roomy.warps,
                            queue,
                        )
                        return
                _launch_arranged[rounds, most, alone, edged](
                    y, x, sharing, rows, units, full.blocks, full.warps, queue
                )


def _launch_arranged[
    S: RowSource,
    T: RowTarget,
    //,
    rounds: Int,
    max_threads: Int,
    alone: Bool,
    edged: Bool,
](
    y: T,
    x: S,
    sharing: Sharing,
    rows: Rows,
    units: Int,
    blocks: Int,
    warps: Int,
    queue: Queue,
) raises:
    """Launches `resident_masked_kernel` with so many blocks a row: parameters and arguments are as of `masked_fits` and the kernel.

    - `units`: Units of a row.
    - `blocks`: Blocks that share a row.
    - `warps`: Warps of each of them.
    """
    # Rows that are at work at a time.
    var rows_at_work = max(
        1, queue.sm_count() * max_threads // WARP_SIZE // units
    )
    var each = ceildiv(rows.count(), rows_at_work)
    comptime most = MOST_ALONE if alone else MOST_ROWS
    var turns = Turns(
        sharing, rows.n, WIDTH, ceildiv(each, ceildiv(each, most))
    )
    var clusters = rows.count() // sharing.count * Int(turns.clusters)
    queue.launch[
        resident_masked_kernel[S, T, rounds, max_threads, alone, edged]
    ](
        y,
        x,
        Int64(rows.n),
        Int64(units),
        turns,
        Int64(rows.count()),
        Int64(clusters),
        UInt32(0),
        grid_dim=ceildiv(clusters, warps) if alone else clusters * blocks,
        block_dim=warps * WARP_SIZE,
        cluster_dim=Dim(blocks, 1, 1),
        shared_mem_bytes=warps * _room[S.Line.elements](rounds),
        attributes=pdl_attributes(),
    )
