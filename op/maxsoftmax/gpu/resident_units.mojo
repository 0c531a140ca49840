"""The fast kernel of rows that take the blocks of a cluster: one read and one write an element, a unit of the row for each warp.

A unit is what 32 lanes hold in registers, and it has a maximum and a sum of its own, found without a word to anybody else: a warp computes
exponentials while what others have asked for is still under way. Then each warp tells the pair of its unit to every block of the cluster, and
merges all of them in the order of the row. So it makes no difference to a row's bits how many blocks share it, and how many warps a block has.

Units begin between two multiples of 16 bytes where rows do; see `granules`.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_dim,
    thread_idx,
)
from max.gpu.host import Dim

from ..io.rows import Rows, VECTOR_BYTES
from ..io.source import RowSource
from ..io.target import RowTarget
from ..math.exponential import Scale
from ..ops.finish import Finish
from ..queue import Queue
from .hardware.cluster import Cluster, PORTABLE_BLOCKS
from .hardware.hidden import hidden
from .hardware.packed import Packed
from .hardware.pdl import pdl_attributes, pdl_wait
from .partition.ends import Ends
from .partition.granules import WORDS, Words
from .partition.row import again, reads_vectors
from .partition.unit import Unit, unit_elements
from .partition.unit_result import factors
from .partition.unit_sum import multiplied, UnitSum

comptime MAX_UNITS = 128
"""Units of a row at most: of each a block has a pair in its shared memory."""


struct Again(Equatable, TrivialRegisterPassable):
    """How exponentials that no register is left for are had again, once it is known what a row sums to.
    """

    var value: Int

    comptime OF_ROW = Self(0)
    """Of the logits, in the row's scale."""
    comptime SHORTENED = Self(1)
    """Of the logits, with the bits that `PACKED` ones have."""
    comptime PACKED = Self(2)
    """They were kept in three bytes each: of half as many exponentials, and half as many more registers. Few rows are faster."""

    @inline(.always)
    def __init__(out self, value: Int):
        self.value = value


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(max_threads))
)
def resident_units_kernel[
    S: RowSource,
    T: RowTarget,
    finish: Finish,
    rounds: Int,
    max_threads: Int,
    edged: Bool,
    again_as: Again,
](y: T, x: S, n: Int64, units: Int64, zero: UInt32):
    """Writes softmax of rows along the last axis, or its logarithm, a cluster a row.

    Parameters:
        S: Where logits come from: memory, of 4 bytes or 2, maybe with a factor and a mask of bools.
        T: Where results go.
        finish: What of each element is written.
        rounds: Vectors of a unit that each lane takes: a row's bits follow from it.
        max_threads: Threads a block at most, which bounds the registers.
        edged: Whether rows may begin or end between two multiples of 16 bytes: with or without it results are the same.
        again_as: How the exponentials of 16-bit logits are had again for results of as many bits.

    Args:
        y: Results; may be the memory of the logits.
        x: Logits.
        n: Length of each row.
        units: How many units that is: no more than there are warps in a cluster.
        zero: What nobody but the caller knows to be 0.
    """
    comptime F = DType.float32
    comptime dtype = S.Line.elements
    comptime U = Unit[dtype, rounds]
    comptime width = U.width
    comptime Vector = SIMD[F, width]
    comptime Takes = SIMD[DType.uint8, width]
    comptime exact = size_of[dtype]() > 2 or size_of[T.Line.stored]() > 2
    # Exponentials are kept in place of the logits, unless that takes twice the registers.
    comptime keeps = finish == Finish.PROBABILITIES and dtype == F
    comptime packs = again_as == Again.PACKED
    comptime in_unit = keeps or packs or again_as == Again.SHORTENED
    comptime scaled = S.Line.scaled
    # Float32 is multiplied in place, before all else; 16 bits keep their dtype, and are multiplied as exponentials are computed.
    comptime in_place = scaled and dtype == F
    comptime late = scaled and not in_place
    # 8192×50257 of bfloat16 times a factor take 430 µs, and 445 where the L2 is told (H200).
    comptime told = not (late and edged)
    var thread = Int(thread_idx.x)
    var lane = thread % WARP_SIZE
    var cluster = Cluster[True, MAX_UNITS // PORTABLE_BLOCKS]()
    var row = cluster.index
    var unit = (
        cluster.rank * (Int(block_dim.x) // WARP_SIZE) + thread // WARP_SIZE
    )
    var u = U(U.G(x.address(row, Int(n)), 0, Int(n)), unit, lane)
    pdl_wait()

    var raw = Array[U.Values, rounds](fill=U.Values(u.filler))
    u.ask[told=told](raw)
    # After that, as its factor may have to be read, too.
    var line = x.line(row, Int(n))
    # Times the factor, fillers are -inf.
    u.filler = line.with_sign(u.filler)
    var factor = line.factor()
    var signed_factor = line.with_sign(factor)

    @inline(.always)
    def ready(elements: U.Values, by: Float32) {imm} -> U.Values:
        """Returns elements times a number, or of 16 bits times its sign."""
        comptime if in_place:
            return rebind[U.Values](multiplied[True](elements, by))
        elif scaled:
            var sign = UInt32(0x80008000) if by < 0 else 0
            return bitcast[dtype, width](
                bitcast[DType.uint32, WORDS](elements) ^ Words(sign)
            )
        else:
            return elements

    @inline(.always)
    def ready_granule(elements: U.Values, there: Bool) {imm} -> U.Values:
        return ready(elements, signed_factor if there else 1)

    var after = u.edges[edged, told](raw)
    var distance = u.distance()
    comptime if S.Line.hidden:
        if line.hides():

            @inline(.always)
            def hiding(elements: U.Values, takes: Takes) {imm} -> U.Values:
                return hidden(elements, takes, u.filler)

            u.beside[edged](
                line.onwards(distance), raw, after, UInt8(1), hiding
            )
    after = ready(after, signed_factor)
    comptime if scaled:
        u.make(raw, ready_granule)
    var ends = Ends[dtype, rounds, max_threads]()
    comptime if edged:
        ends.keep(u, raw, after)
    var sum = UnitSum[dtype, rounds, exact, keeps, edged, packs, late](
        u, raw, after, lane, zero, factor
    )
    var m = sum.m
    var scale = sum.scale

    @inline(.always)
    def exponentials(values: U.Values) {imm} -> Vector:
        """Returns e^x in the unit's scale."""
        return rebind[Vector](
            scale.quick(multiplied[late and exact](values, factor))
        )

    @inline(.always)
    def unknown(values: U.Values) {imm} -> U.Values:
        """Returns logits so that the compiler does not see that they are the same: what is computed of them again is not kept instead.
        """
        comptime if keeps:
            return values
        else:
            return again(values)

    cluster.open(Int(units))
    if unit < Int(units) and lane < cluster.blocks:
        cluster.send(lane, 2 * unit, m, sum.d)
    cluster.close()
    var pair = cluster.merged[exact](Int(units), lane)

    # What exponentials are to be multiplied by to be in the row's scale, and then to be probabilities.
    var of_row = Scale[exact](pair.m)
    comptime if late and not exact:
        of_row.slope *= factor
    var last, rest = factors[finish, keeps, in_unit](
        m, scale, of_row, pair, x.is_masked()
    )

    @inline(.always)
    def finished(logits: U.Values, e: Vector, rest: Float32) {imm} -> Vector:
        """Returns results of logits, or of exponentials in the unit's scale."""
        comptime if finish == Finish.LOGARITHMS:
            var z = rebind[Vector](multiplied[late](logits, factor))
            return (z - pair.m) - last
        elif in_unit:
            return e * rest * last
        else:
            var z = multiplied[late and exact](logits, factor)
            return rebind[Vector](of_row.quick(z)) * last

    @inline(.always)
    def results(j: Int, rest: Float32) {imm} -> Vector:
        """Returns those of the lane's granule j."""
        comptime if keeps:
            return finished(raw[j], rebind[Vector](raw[j]), rest)
        elif packs:
            return finished(raw[j], sum.packed[j].values(), rest)
        elif in_unit:
            return finished(
                raw[j],
                Packed[width].shortened(exponentials(unknown(raw[j]))),
                rest,
            )
        else:
            return finished(unknown(raw[j]), 0, rest)

    @inline(.always)
    def plain(j: Int) {imm} -> SIMD[F, width]:
        return results(j, 1)

    @inline(.always)
    def any(j: Int) {imm} -> SIMD[F, width]:
        return results(j, rest)

    @inline(.always)
    def some(j: Int) {imm} -> SIMD[F, width]:
        var logits = ends.of(u, j)
        var e = exponentials(logits)
        comptime if in_unit and not keeps:
            e = Packed[width].shortened(e)
        return finished(logits, e, rest)

    u.store[edged](
        y.line(row, Int(n)).onwards(distance),
        rest == 1,
        plain,
        any,
        some,
    )


def resident_units[
    S: RowSource,
    T: RowTarget,
    //,
    finish: Finish,
    rounds: Int,
    max_threads: Int,
    again_as: Again,
    blocks: Int,
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Launches `resident_units_kernel` with a cluster for each row.

    Parameters:
        S: Where logits come from.
        T: Where results go.
        finish: What of each element is written.
        rounds: Vectors of a unit that each lane takes.
        max_threads: Threads a block at most.
        again_as: How exponentials are had again.
        blocks: Blocks a cluster.

    Args:
        y: Results.
        x: Logits.
        rows: Rows along the last axis, of at most as many units as warps of so many such blocks.
        queue: Where kernels are launched.
    """
    comptime dtype = S.elements
    comptime width = VECTOR_BYTES // size_of[dtype]()
    var units = ceildiv(rows.n, unit_elements[dtype](rounds))
    var whole = reads_vectors[width](x, rows)
    comptime for edged in [False, True]:
        # Parts of units and a factor took some registers more than 80, or 96, before `Ends` kept those.
        comptime spills = edged and S.Line.signed and 512 < max_threads < 1024
        comptime threads = max_threads - 128 if spills else max_threads
        if whole != edged:
            queue.launch[
                resident_units_kernel[
                    S, T, finish, rounds, threads, edged, again_as
                ]
            ](
                y,
                x,
                Int64(rows.n),
                Int64(units),
                UInt32(0),
                grid_dim=rows.count() * blocks,
                block_dim=ceildiv(units, blocks) * WARP_SIZE,
                cluster_dim=Dim(blocks, 1, 1),
                attributes=pdl_attributes(),
            )
