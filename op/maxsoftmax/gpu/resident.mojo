"""The fast kernel of rows that fit on the chip: one read and one write an element.

A team of threads (a few lanes of a warp, a block, or the blocks of a cluster) asks for all of its row at once and keeps it
while maximum and sum are found: the first vectors of each thread in registers, the rest in shared memory, in slots that
no other thread looks at. Small teams, so that a multiprocessor has several rows at different stages: one is read while
another is summed and a third written. Float32 keeps the exponentials in place of the logits; types of 16 bits compute
them twice, which is cheaper than twice the registers.

A gradient has two inputs, results and their gradients, and a sum that needs no maximum.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    thread_idx,
)
from max.gpu.host import Dim

from ..math.gradient import Gradient
from ..math.exponential import Scale, quick_exp
from ..ops.finish import Finish
from ..math.online import Sum
from ..queue import Queue
from ..io.rows import Rows, Source, VECTOR_BYTES, nowhere
from ..io.source import RowSource
from ..io.target import RowTarget
from ..io.widening import widened
from .hardware.cluster import Cluster
from .hardware.pair import Pair
from .hardware.pdl import pdl_wait, pdl_wait_with, pdl_attributes
from .partition.handover import Handover
from .partition.pair import add, end, write_pair
from .partition.row import LINE_BYTES, Part, again, anew, product
from .hardware.slots import Slots, kept_dtype, wait_after
from .hardware.team import greater, largest_lane, maximum, team_reduce, total
from .tuning import Team, Tuned


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(t.block_size)),
    `nvvm.minctasm`=SIMDLength(t.blocks),
)
def resident_kernel[
    S: RowSource,
    T: RowTarget,
    finish: Finish,
    t: Team,
    width: Int,
    edged: Bool,
    aligned: Bool,
](
    y: T,
    x: S,
    other: Source[S.elements],
    rows: Int64,
    n: Int64,
    share: Int64,
    zero: UInt32,
):
    """Writes the softmax of `rows` rows of `n` elements along the last axis, or what else `finish` says.

    - `S`: Where logits come from: of 4 bytes or 2.
    - `t`: How a row is held.
    - `width`: Elements a vector.
    - `edged`: Whether rows may begin or end between two vectors; of computed logits `n` is else a multiple of `width`.
    - `aligned`: Whether vectors of computed logits are read at a time.
    - `y`: Probabilities, or what else is written; may be the same memory as that of `x` or `other`.
    - `x`: Logits, or results whose logits' gradient is wanted.
    - `other`: The gradients of results, aligned as `x` is; else not looked at.
    - `share`: Vectors of a row that a block takes.
    - `zero`: As for `anew`.
    """
    comptime F = DType.float32
    comptime team = t.team
    comptime vectors = t.vectors
    comptime slotted = t.is_slotted()
    comptime clustered = t.is_cluster()
    comptime P = Part[S, T, team, width, edged]
    comptime Vector = SIMD[F, width]
    comptime stored = T.Line.stored
    comptime in_memory = S.Line.in_memory and (S.Line.elements == S.Line.held)
    comptime scaled = S.Line.scaled
    comptime exponentials = finish == Finish.PROBABILITIES
    comptime gradient = finish.is_gradient()
    comptime inputs = finish.inputs()
    # Exponentials of a relative error of 1e-7, in thirteen operations; others are for differences between numbers of 16 bits,
    # and results of as many.
    comptime exact = size_of[S.elements]() > 2 or size_of[stored]() > 2 or (
        S.has_sink and not scaled
    )
    # Differences that are exact, and exponentials in three operations. Of pairs nothing else is read or written meanwhile
    # that exponentials could hide behind: at 50257 columns of float32 the exact ones kept reading at 0.76 of its rate.
    comptime quick = exact and (finish == Finish.PAIR or size_of[stored]() <= 2)
    # Sums of results of 16 bits are as exact as they have to be.
    comptime compensated = exact and (
        finish == Finish.PAIR or size_of[stored]() > 2
    )
    # What is needed again is kept in place of the logits, unless that takes twice the registers.
    comptime keeps = exponentials and S.Line.held == F
    comptime Kept = Slots[kept_dtype[S.elements](), team, width]
    comptime keeps_slots = exponentials and Kept.dtype == F
    comptime merged = clustered or S.has_sink
    # Computed anew after a branch, those of edges would be found before it, and rows without edges would wait for them.
    comptime keeps_edges = exponentials and (keeps or not merged)
    comptime skips = not in_memory
    # What sums are counted in is that of the scale.
    comptime in_scale = quick and (merged or not exponentials)
    comptime teams = t.block_size // team
    comptime warps = max(1, team // WARP_SIZE)
    # With slots, one more vector in registers: of the last round, which not all threads have.
    comptime held = vectors + 1 if slotted else vectors
    comptime nothing = neg_inf[F]()
    # What changes neither a sum nor a maximum.
    comptime filler = P.Raw(0) if gradient else P.Raw(neg_inf[S.Line.held]())
    comptime G = Gradient[finish == Finish.GRADIENT_OF_LOGARITHMS, exact]
    var maxima = unsafe_stack_allocation[
        warps, Float32, address_space=AddressSpace.SHARED
    ]()
    var sums = unsafe_stack_allocation[
        warps, Float32, address_space=AddressSpace.SHARED
    ]()
    var handover = Handover[S, T, team, width, edged, t.block_size]()
    var uneven = P.uneven(x, Int(n))
    var slots = Kept()
    var thread = Int(thread_idx.x)
    var lane = thread % team
    var cluster = Cluster[clustered]()
    var row = cluster.index * teams + thread // team
    var there = row
    comptime if teams > 1 and not S.in_memory:
        # What is made of a row may have to be read to know where it is.
        there = min(row, Int(rows) - 1)
    comptime if S.reads_ahead:
        pdl_wait()
    var part = P.of_share(
        y, x, row, Int(n), lane, cluster.rank, Int(share)
    ) if clustered else P(y, x, there, Int(n), lane, 0, Int(n))
    comptime if teams > 1:
        if row >= Int(rows):
            # Its threads only keep the others company at the barriers.
            part.clear()
    var last = max(vectors, part.rounds())
    # Rounds of slots that are read.
    var stop = last
    comptime if S.is_causal:
        stop = min(last, max(vectors, part.rounds_read()))

    var upstream = part
    comptime if gradient:
        upstream.source = part.source.onwards(
            (Int(other) - Int(x.line(0, 0).address(0))) // size_of[S.elements]()
        )

    comptime if S.reads_ahead:
        pass
    elif clustered or not in_memory or gradient:
        # Several waves of long rows hide it: 256×128256 bfloat16 took 38.6 µs with the other, 37.6 with this.
        pdl_wait()
    else:
        pdl_wait_with(Int(part.source.address(0)) | Int(part.ahead) << 56)
    comptime if T.has_pairs:
        if row < Int(rows):
            part.target.begin()
    var edges = P.Edges(nothing)
    var other_edges = P.Edges(0)
    var asked = P.AskedEdges(0)
    var other_asked = P.AskedEdges(0)
    comptime if P.peeled and gradient:
        # First of all, as heads are added first.
        if P.branchless or uneven:
            asked = part.ask_edges()
            other_asked = upstream.ask_edges()
    comptime if slotted and in_memory:
        for i in range(vectors, stop):
            var slot = inputs * (i - vectors)
            if gradient or part.reads(i):
                slots.fetch(
                    slot,
                    rebind[Source[Kept.dtype]](part.source.address(P.place(i))),
                )
            comptime if gradient:
                slots.fetch(
                    slot + 1,
                    rebind[Source[Kept.dtype]](
                        upstream.source.address(P.place(i))
                    ),
                )
    var raw = Array[P.Raw, held](fill=filler)
    var others = Array[P.Raw, held](fill=filler)
    comptime for j in range(held):
        var i = j if j < vectors else last
        if part.reads(i):
            raw[j] = part.load[aligned](i)
            comptime if gradient:
                others[j] = upstream.load(i)
    comptime if P.peeled and not gradient:
        if P.branchless or uneven:
            edges = part.load_edges()

    comptime if S.Line.hidden:
        var places = Array[Int, held](fill=last)
        comptime for j in range(vectors):
            places[j] = j
        part.hide(places, raw)
    elif scaled:
        comptime if S.Line.signed:
            if part.source.is_negative():
                comptime for j in range(held):
                    if part.reads(j if j < vectors else last):
                        raw[j] = -raw[j]
        if not part.whole:
            comptime for j in range(held):
                var i = j if j < vectors else last
                if part.is_cut(i):
                    raw[j] = part.source.limited(P.place(i), raw[j])
    elif S.Line.transformed:
        comptime for j in range(held):
            var i = j if j < vectors else last
            if part.reads(i):
                raw[j] = rebind[P.Raw](part.logits(i, raw[j]))
    var largest = raw[0]
    comptime for j in range(1, held):
        largest = maximum(largest, raw[j])
    comptime if slotted and in_memory and not gradient:
        wait_after(largest_lane(largest))
        comptime step = Tuned.masked_slots if S.Line.hidden else 1
        for i in range(vectors, stop, step):
            comptime if S.Line.hidden:
                var values = Array[P.Raw, step](fill=filler)
                var places = Array[Int, step](fill=i)
                comptime for j in range(step):
                    places[j] += j
                    if i + j < stop and part.reads(i + j):
                        values[j] = rebind[P.Raw](slots.take(i + j - vectors))
                part.hide(places, values)
                comptime for j in range(step):
                    if i + j < stop:
                        largest = maximum(largest, values[j])
                        slots.keep(
                            i + j - vectors, rebind[Kept.Values](values[j])
                        )
                continue
            var found = rebind[P.Raw](slots.take(i - vectors))
            comptime if S.Line.transformed:
                if part.reads(i):
                    found = rebind[P.Raw](part.logits(i, found))
                else:
                    found = P.Raw(neg_inf[S.Line.held]())
                slots.keep(i - vectors, rebind[Kept.Values](found))
            elif scaled:
                comptime if S.Line.signed:
                    if part.source.is_negative():
                        found = -found
                        slots.keep(i - vectors, rebind[Kept.Values](found))
                if not part.whole and part.is_cut(i):
                    found = part.source.limited(P.place(i), found)
                    slots.keep(i - vectors, rebind[Kept.Values](found))
            largest = maximum(largest, found)
    elif slotted and not gradient:
        for i in range(vectors, stop, vectors):
            # As many at a time as there are registers for, all under way at once.
            var next = Array[P.Raw, vectors](fill=P.Raw(neg_inf[S.Line.held]()))
            comptime for j in range(vectors):
                if i + j < stop and part.reads(i + j):
                    next[j] = part.load[aligned](i + j)
            comptime for j in range(vectors):
                if i + j < stop:
                    largest = maximum(largest, next[j])
                    slots.keep(i + j - vectors, next[j].cast[Kept.dtype]())
    var m = Float32(0)
    comptime if not gradient:
        var mine = largest_lane(largest).cast[F]()
        comptime if P.peeled:
            mine = maximum(mine, largest_lane(edges))
        m = team_reduce[team, greater](maxima, thread, mine)
    comptime if scaled:
        m *= part.source.factor()
    var scale = Scale[exact](m)
    comptime if scaled and not exact:
        scale.slope *= part.source.factor()

    @inline(.always)
    def logits[
        lanes: SIMDLength, dtype: DType
    ](kept: SIMD[dtype, lanes]) {imm} -> SIMD[F, lanes]:
        """Returns the logits of elements, or elements whose factor is in the slope.
        """
        comptime if scaled and exact:
            return widened(kept) * part.source.factor()
        else:
            return widened(kept)

    @inline(.always)
    def exponential[
        lanes: SIMDLength
    ](z: SIMD[F, lanes]) {imm} -> SIMD[F, lanes]:
        comptime if quick:
            return quick_exp(z, scale.m)
        else:
            return scale.exp(z)

    @inline(.always)
    def term[
        lanes: SIMDLength, dtype: DType
    ](x: SIMD[dtype, lanes], other: SIMD[dtype, lanes]) {imm} -> SIMD[F, lanes]:
        """Returns what elements add to the sum."""
        comptime if finish == Finish.GRADIENT_OF_LOGARITHMS:
            return widened(other)
        elif gradient:
            return product(widened(x), widened(other))
        else:
            return exponential(logits(x))

    # In the order of the elements, whatever lane has them.
    var sum = Sum[F, width]()
    comptime if P.peeled:
        if uneven:
            comptime if gradient:
                edges = P.edges_of(asked)
                other_edges = P.edges_of(other_asked)
            var terms = term(edges, other_edges)
            handover.give(thread, terms)
            comptime if keeps_edges:
                edges = terms
            add[compensated](sum, handover.head(thread))
    comptime for j in range(held):
        comptime if j == vectors:
            comptime if gradient:
                var seen = sum.value
                comptime if finish == Finish.GRADIENT_OF_LOGARITHMS:
                    # The sum knows nothing of the results.
                    comptime for k in range(held):
                        seen = maximum(seen, raw[k].cast[F]())
                wait_after(largest_lane(seen))
            for i in range(vectors, stop):
                var slot = inputs * (i - vectors)
                # The last one of an input is that of the other, or itself.
                var e = term(slots.take(slot), slots.take(slot + inputs - 1))
                comptime if keeps_slots:
                    slots.keep(slot, e.cast[Kept.dtype]())
                add[compensated](sum, e)
        var at = j if j < vectors else last
        # The same way for all of a team: rows may be much shorter than what it has room for.
        if not skips or Int32(at * team) < part.read:
            comptime if S.Line.held != F and not gradient:
                raw[j] = again(raw[j])
            var e = term(raw[j], others[j])
            comptime if keeps:
                raw[j] = rebind[P.Raw](e)
            add[compensated](sum, e)
        elif keeps:
            comptime if keeps:
                raw[j] = rebind[P.Raw](Vector(0))
    comptime if P.peeled:
        if uneven:
            add[compensated](sum, handover.tail(part, thread))
    var d = handover.total(part, thread, uneven, sum.value - sum.excess)
    comptime if in_scale:
        d = in_unit[quick](d, scale)
    var pair = Pair(m, team_reduce[team, total](sums, thread, d))
    comptime if gradient and clustered:
        pair.d = cluster.sum(pair.d)

    # What exponentials are to be multiplied by to be in the row's unit, or, where they are kept, in the lowered one.
    var rest = Float32(1)
    comptime if clustered and not gradient:
        pair = cluster.merge[exact](pair)
    comptime if S.has_sink:
        var sink = nothing
        if row < Int(rows):
            sink = x.sink[1](row, 0)[0].cast[F]()
        pair = pair.joined[exact](sink)
    comptime lowered = exact and keeps and merged
    comptime if merged:
        var of_row = Scale[exact](pair.m)
        comptime if lowered:
            # In a part of nothing but -inf, all is 0.
            rest = Float32(0) if m == nothing else in_unit[quick](
                scale.over_lowered(of_row), scale
            )
        elif keeps:
            rest = Float32(0) if m == nothing else in_unit[quick](
                scale.over(of_row), scale
            )
        else:
            # What is computed anew can as well be in that unit.
            scale = of_row
            comptime if scaled and not exact:
                scale.slope *= part.source.factor()
            comptime if in_scale:
                rest = in_unit[quick](Float32(1), scale)
    comptime if finish == Finish.PAIR or T.has_pairs:
        if lane == 0 and cluster.rank == 0 and row < Int(rows):
            write_pair[exact](y.pairs[F](), row, pair)
    comptime if finish == Finish.PAIR:
        return
    var shared = G(pair.d)
    var factor = end[finish, exact, lowered](pair, x.is_masked())

    @inline(.always)
    def finished[
        lanes: SIMDLength, dtype: DType, //, kept: Bool
    ](values: SIMD[dtype, lanes], theirs: SIMD[dtype, lanes]) {imm} -> SIMD[
        F, lanes
    ]:
        """Returns what becomes of elements, or of exponentials that were `kept`.
        """
        comptime if gradient:
            return shared.of(widened(values), widened(theirs))
        elif finish == Finish.LOGARITHMS:
            return (logits(values) - pair.m) - factor
        else:
            var e: SIMD[F, lanes]
            comptime if kept:
                e = widened(values)
            else:
                e = exponential(logits(values))
            comptime if exact or keeps:
                # One factor after the other: both together may be too small for a normal number.
                return e * rest * factor
            else:
                return e * factor

    comptime for stores_aligned in [True, False]:
        if part.aligned == stores_aligned:
            comptime for j in range(held):
                var i = j if j < vectors else last
                if part.has(i):
                    comptime if gradient and (
                        S.Line.held != F
                        or finish == Finish.GRADIENT_OF_LOGARITHMS
                    ):
                        # Widened, or with their exponentials, they would be kept in twice the registers.
                        raw[j] = anew(raw[j], zero)
                        others[j] = anew(others[j], zero)
                    elif S.Line.held != F:
                        raw[j] = again(raw[j])
                    part.store[stores_aligned](
                        i, finished[keeps](raw[j], others[j])
                    )
            comptime if slotted:
                for i in range(vectors, stop):
                    var slot = inputs * (i - vectors)
                    part.store[stores_aligned](
                        i,
                        finished[keeps_slots](
                            slots.take(slot), slots.take(slot + inputs - 1)
                        ),
                    )
                comptime if S.is_causal:
                    # Of what takes no part.
                    var masked = finished[exponentials](
                        Vector(0 if exponentials else nothing), Vector(0)
                    )
                    for i in range(stop, last):
                        part.store[stores_aligned](i, masked)
    comptime if P.peeled:
        if P.branchless or uneven:
            comptime if gradient:
                edges = P.edges_of(asked)
                other_edges = P.edges_of(other_asked)
            part.store_edges(finished[keeps_edges](edges, other_edges))


@inline(.always)
def in_unit[
    exact: Bool, //, quick: Bool
](sum: Float32, scale: Scale[exact]) -> Float32:
    """Returns a sum in the unit of `scale`, where `quick` exponentials are in that of its maximum.

    Parameters:
        exact: Of the scale.
        quick: Whether it is not in that unit already.

    Args:
        sum: Of exponentials.
        scale: The scale.
    """
    comptime if quick:
        return sum * scale.exp(scale.m)
    else:
        return sum


def resident[
    S: RowSource,
    T: RowTarget,
    //,
    finish: Finish,
    t: Team,
    width: Int = VECTOR_BYTES // size_of[S.elements](),
    edged: Bool = True,
    aligned: Bool = True,
](
    y: T,
    x: S,
    rows: Rows,
    queue: Queue,
    other: Source[S.elements] = nowhere[S.elements](),
    blocks: Int = 1,
) raises:
    """Launches `resident_kernel`, whose parameters and arguments these are, with a team or a cluster for each row along the last axis.
    With or without `edged`, results of rows that need none are the same.

    - `rows`: Rows along the last axis, for which there is room.
    - `blocks`: Blocks a cluster, at most `PORTABLE_BLOCKS`; 1 if there is none.
    """
    var share = rows.n
    var in_slots = rows.n // width
    var cluster: Optional[Dim] = None
    comptime if t.is_cluster():
        # A line's length or a multiple, so that neighbours write to one in common at most.
        comptime in_line = LINE_BYTES // VECTOR_BYTES
        share = ceildiv(rows.n, in_line * width * blocks) * in_line
        in_slots = share
        cluster = Dim(blocks, 1, 1)
    var bytes = 0
    comptime if t.is_slotted():
        # What of the vectors exceeds the registers of a team.
        bytes = (
            finish.inputs()
            * max(0, in_slots // t.team - t.vectors)
            * t.team
            * width
            * size_of[kept_dtype[S.elements]()]()
        )
    queue.launch[
        resident_kernel[S, T, finish, t.kernel(), width, edged, aligned]
    ](
        y,
        x,
        other,
        Int64(rows.count()),
        Int64(rows.n),
        Int64(share),
        UInt32(0),
        grid_dim=ceildiv(rows.count(), t.block_size // t.team) * blocks,
        block_dim=t.block_size,
        shared_mem_bytes=bytes,
        cluster_dim=cluster,
        attributes=pdl_attributes(),
    )
