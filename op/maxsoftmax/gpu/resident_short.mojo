"""The fast kernel of short rows that are no whole vectors, and of some that are: one read and one write an element, 16 bytes at a time. Of gradients there are two inputs.

Rows that lie side by side are brought into shared memory together, wherever in it they begin. There a few lanes, or a single one, take each row: the
fewer, the fewer instructions a row takes, which is what short rows of 16 bits wait for. Results take the place of logits, where they are as wide and begin alike, and are written as these were read.

Shares of 4.2 TB/s, a copy's rate, on an H200, of 6.7e7 elements, and before that, by the element or by vectors with edges:

| columns | 5 | 10 | 17 | 25 | 33 | 50 | 65 | 100 | 101 | 127 |
|---|---|---|---|---|---|---|---|---|---|---|
| float32 | 0.71 | 0.95 | 0.99 | 0.98 | 1.00 | 0.98 | 0.94 | – | 0.98 | 0.97 |
| before | 0.51 | 0.50 | 0.43 | 0.63 | 0.52 | 0.77 | 0.91 | – | 0.76 | 0.89 |
| bfloat16 | 0.46 | 0.67 | 0.71 | 0.85 | 0.71 | 0.89 | 0.51 | 0.88 | 0.82 | 0.60 |
| before | 0.25 | 0.25 | 0.21 | 0.31 | 0.21 | 0.31 | 0.20 | 0.31 | 0.32 | 0.40 |

Gradients, which read two tensors, as shares of that:

| columns | 5 | 10 | 17 | 20 | 33 | 50 | 65 | 100 | 101 | 127 |
|---|---|---|---|---|---|---|---|---|---|---|
| float32 | 0.99 | 1.02 | 1.01 | 1.00 | – | – | – | – | – | – |
| before | 0.76 | 0.76 | 0.64 | 0.76 | 1.05 | 1.03 | 1.01 | 1.04 | 1.04 | 1.04 |
| bfloat16 | 0.59 | 0.81 | 0.69 | 0.80 | 0.65 | 0.84 | 0.52 | 0.84 | 0.82 | 0.60 |
| before | 0.38 | 0.38 | 0.32 | 0.38 | 0.31 | 0.47 | 0.31 | 0.47 | 0.48 | 0.60 |

Rows of 65 and 127 columns of 16 bits begin in the same few banks of shared memory, and wait for each other. Few rows take longer than by many lanes: 64×10 of
float32 1.5 µs (0.9), 1000×33 2.3 (1.3), 100000×10 4.6 (4.4); gradients of 1000×10 1.5 (1.0), of 1000×100 of bfloat16 2.8 (1.1).
"""

from std.math import align_up, ceildiv
from std.sys import size_of
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.memory import external_memory
from max.gpu.sync import barrier

from ..io.rounding import rounded
from ..io.rows import (
    Positions,
    Rows,
    Source,
    Target,
    VECTOR_BYTES,
    nowhere,
)
from ..io.source import RowSource
from ..io.target import RowTarget
from ..io.widening import widened
from ..math.exponential import Scale
from ..math.gradient import Gradient
from ..math.online import Sum
from ..ops.finish import Finish
from ..queue import Queue
from .hardware.pair import Pair
from .hardware.panel import ask, fetch, shift, write
from .hardware.pdl import pdl_attributes, pdl_wait
from .hardware.team import greater, largest_lane, maximum, total
from .hardware.tree_reduction import Shared
from .hardware.warp_reduction import lanes_reduce
from .partition.pair import add, end
from .partition.row import product

comptime BLOCK_SIZE = 128
"""Threads a block."""

comptime TOGETHER = 4
"""Elements of a lane that are looked at or left out together."""

comptime LONGEST = 128
"""Elements of the longest row."""


@fieldwise_init
struct Share(TrivialRegisterPassable):
    """How many lanes take a row."""

    var lanes: Int
    """How many, a power of two."""
    var most: Int
    """Elements that each of them has at most, a multiple of `TOGETHER`."""

    def up_to(self) -> Int:
        """Returns the length of the longest row."""
        return self.lanes * self.most


def shares() -> List[Share]:
    """Returns the shares of rows, of which the first one that holds a row takes it.

    With more lanes of fewer elements float32 is as fast, and bfloat16 of 31 columns makes 0.80 of a copy's rate (0.95), of 100 0.67 (0.83).
    """
    return [Share(1, 8), Share(1, 16), Share(1, 32), Share(2, 32), Share(4, 32)]


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def resident_short_kernel[
    S: RowSource, stored: DType, finish: Finish, share: Share
](
    y: Target[stored],
    x: S,
    other: Source[S.Line.elements],
    rows: Int64,
    n: Int64,
    beside: Int64,
    apart: Int64,
):
    """Writes softmax of rows along the last axis, or its logarithm, or the gradient of either.

    Parameters:
        S: Where logits come from: memory, of 4 bytes or 2, maybe with a factor that is the same for all.
        stored: Dtype of the results.
        finish: What of each element is written.
        share: How many lanes take a row.

    Args:
        y: Results; may be the memory of the logits, or of `other`.
        x: Logits, or results whose logits' gradient is wanted.
        other: The gradients of results, aligned as `x` is; else not looked at.
        rows: How many rows there are.
        n: Length of each, at most `LONGEST`.
        beside: How many bytes after the logits `other` is kept.
        apart: How many bytes after the logits results are kept: 0 if they take their place.
    """
    comptime F = DType.float32
    comptime dtype = S.Line.elements
    comptime Vector = SIMD[F, TOGETHER]
    comptime Raw = SIMD[dtype, TOGETHER]
    comptime lanes = share.lanes
    comptime vectors = share.most // TOGETHER
    comptime exact = size_of[dtype]() > 2 or size_of[stored]() > 2
    comptime scaled = S.Line.scaled
    comptime of_block = BLOCK_SIZE // lanes
    comptime step = TOGETHER * lanes
    comptime gradient = finish.is_gradient()
    comptime G = Gradient[finish == Finish.GRADIENT_OF_LOGARITHMS, exact]
    comptime Elements = Array[Raw, vectors]
    var room = external_memory[
        Scalar[dtype],
        address_space=AddressSpace.SHARED,
        alignment=VECTOR_BYTES,
    ]()
    var thread = Int(thread_idx.x)
    var lane = Int32(thread % lanes)
    var first = Int(block_idx.x) * of_block
    var together = Int32(min(of_block, Int(rows) - first))
    # What a block has is counted in 32 bits.
    var length = Int32(n)
    var start = first * Int(n)
    var count = together * length
    var source = x.address(0, Int(n)).unsafe_offset(start)
    var logits = room.unsafe_offset(shift(source))
    pdl_wait()
    comptime if gradient:
        ask[BLOCK_SIZE](
            _after(logits, beside), other.unsafe_offset(start), count
        )
    fetch[BLOCK_SIZE](logits, source, count)
    var row = Int32(thread // lanes)
    var begin = Int(row * length + lane)
    var left = length - lane

    @inline(.always)
    def elements[
        filler: Scalar[dtype]
    ](panel: Shared[Scalar[dtype]]) {imm} -> Elements:
        """Returns those of this lane, fillers where there are none."""
        var mine = panel.unsafe_offset(begin)
        var values = Elements(fill=Raw(filler))
        comptime for j in range(vectors):
            # The same way for all.
            if Int32(j * step) < length:
                if Int32((j + 1) * step) <= length:
                    comptime for k in range(TOGETHER):
                        values[j][k] = mine[unsafe_offset=j * step + k * lanes]
                else:
                    comptime for k in range(TOGETHER):
                        if Int32(j * step + k * lanes) < left:
                            values[j][k] = mine[
                                unsafe_offset=j * step + k * lanes
                            ]
        return values^

    var raw: Elements
    var others = Elements(fill=Raw(0))
    var m = Float32(0)
    comptime if gradient:
        raw = elements[Scalar[dtype](0)](logits)
        others = elements[Scalar[dtype](0)](_after(logits, beside))
    else:
        raw = elements[neg_inf[dtype]()](logits)
        var largest = raw[0]
        comptime for j in range(1, vectors):
            largest = maximum(largest, raw[j])
        m = lanes_reduce[greater, lanes](largest_lane(largest).cast[F]())
    var factor = x.line(0, Int(n)).factor()
    comptime if scaled:
        m *= factor
    var scale = Scale[exact](m)

    @inline(.always)
    def scaled_logits(j: Int) {imm} -> Vector:
        var z = widened(raw[j])
        comptime if scaled:
            z *= factor
        return z

    var kept = Array[Vector, vectors](fill=0)
    var sum = Sum[F, TOGETHER]()
    comptime for j in range(vectors):
        if Int32(j * step) < length:
            comptime if finish == Finish.GRADIENT:
                kept[j] = product(widened(raw[j]), widened(others[j]))
            elif gradient:
                kept[j] = widened(others[j])
            else:
                kept[j] = scale.quick(scaled_logits(j))
            add[exact](sum, kept[j])
    var d = lanes_reduce[total, lanes]((sum.value - sum.excess).reduce_add())
    var of_row = G(d)
    var pair = Pair(m, d)
    comptime if finish == Finish.LOGARITHMS:
        pair.d *= scale.quick_factor()
    var last = Float32(0)
    comptime if not gradient:
        last = end[finish, exact, quick=True](pair, x.is_masked())
    var results = Shared[Scalar[stored]](
        unsafe_from_address=Int(logits)
    ) if apart == 0 else Shared[Scalar[stored]](
        unsafe_from_address=Int(room) + Int(apart)
    ).unsafe_offset(
        shift(y.unsafe_offset(start))
    )
    var place = results.unsafe_offset(begin)
    if row < together:
        comptime for j in range(vectors):
            if Int32(j * step) < length:
                var values: Vector
                comptime if gradient:
                    values = of_row.of(widened(raw[j]), widened(others[j]))
                elif finish == Finish.LOGARITHMS:
                    values = (scaled_logits(j) - pair.m) - last
                else:
                    values = kept[j] * last
                var found = rounded[stored](values)
                if Int32((j + 1) * step) <= length:
                    comptime for k in range(TOGETHER):
                        place[unsafe_offset=j * step + k * lanes] = found[k]
                else:
                    comptime for k in range(TOGETHER):
                        if Int32(j * step + k * lanes) < left:
                            place[unsafe_offset=j * step + k * lanes] = found[k]
    barrier()
    write[BLOCK_SIZE](y.unsafe_offset(start), results, count)


@inline(.always)
def _after[
    dtype: DType, //
](panel: Shared[Scalar[dtype]], bytes: Int64) -> Shared[Scalar[dtype]]:
    """Returns what is so many bytes after the first element of a panel, of another one that begins alike.
    """
    return panel.unsafe_offset(Int(bytes) // size_of[dtype]())


def takes_short[dtype: DType](n: Int, inputs: Int) -> Bool:
    """Returns whether rows in memory are short, and faster so than by vectors of their own.

    Neighbours that are whole vectors apart wait for each other in shared memory: float32 of 16 columns makes 0.44 of a copy's rate so. An odd number of
    vectors of float32 is faster all the same: 12, 20, 28 and 36 columns 0.98, 0.99, 0.98 and 0.99 (by the vector 0.61, 0.50, 0.71 and 0.87).

    Gradients of more than 24 columns of float32 are faster by the element: of 6.7e7 elements 28, 33, 50, 65 and 127 take 184, 183, 185, 189 and 185 µs, and so 193, 190, 191, 202 and 194
    (H200).

    Parameters:
        dtype: Dtype of the logits.

    Args:
        n: Their length.
        inputs: How many inputs there are.
    """
    comptime width = VECTOR_BYTES // size_of[dtype]()
    var longest = 24 if width == 4 and inputs == 2 else LONGEST
    var is_odd = width == 4 and n % 8 == 4 and 8 < n < 40
    return 0 < n <= longest and (n % width != 0 or is_odd)


def resident_short[
    S: RowSource, T: RowTarget, //, finish: Finish
](
    y: T,
    x: S,
    rows: Rows,
    queue: Queue,
    other: Source[S.elements] = nowhere[S.elements](),
) raises:
    """Launches `resident_short_kernel`, with as few lanes a row as hold it.

    Parameters:
        S: As of the kernel.
        T: Where results go: memory.
        finish: As of the kernel.

    Args:
        y: Results.
        x: Logits, or results whose logits' gradient is wanted.
        rows: Rows along the last axis, of which `takes_short` is true.
        queue: Where kernels are launched.
        other: The gradients of results.
    """
    comptime dtype = S.Line.elements
    comptime stored = T.Line.stored
    var first = Positions(0, 0, 0, 1, rows.n, 1)
    var to = rebind[Target[stored]](y.column(first).address(0))
    var source = x.address(0, rows.n)
    comptime table = shares()
    comptime for i in range(len(table)):
        comptime share = table[i]
        comptime before = table[i - 1].up_to() if i > 0 else 0
        comptime if rows.length == 0 or before < rows.length <= share.up_to():
            if rows.n <= share.up_to():
                comptime of_block = BLOCK_SIZE // share.lanes
                var of_input = align_up(
                    of_block * rows.n * size_of[dtype]() + VECTOR_BYTES,
                    VECTOR_BYTES,
                )
                var bytes = finish.inputs() * of_input
                var apart = bytes
                comptime if dtype == stored:
                    if (Int(to) - Int(source)) % VECTOR_BYTES == 0:
                        apart = 0
                if apart > 0:
                    bytes += (
                        of_block * rows.n * size_of[stored]() + VECTOR_BYTES
                    )
                queue.launch[resident_short_kernel[S, stored, finish, share]](
                    to,
                    x,
                    rebind[Source[dtype]](other),
                    Int64(rows.count()),
                    Int64(rows.n),
                    Int64(of_input),
                    Int64(apart),
                    grid_dim=ceildiv(rows.count(), of_block),
                    block_dim=BLOCK_SIZE,
                    # A kernel is loaded once for each amount.
                    shared_mem_bytes=align_up(bytes, 4096),
                    attributes=pdl_attributes(),
                )
                return
