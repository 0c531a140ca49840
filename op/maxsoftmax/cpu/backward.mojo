"""The backward op on the CPU, along any axis."""

from std.math import ceildiv
from std.sys import simd_width_of

from ..gradient import Gradient
from ..online import MaxSum, Sum, accumulator
from ..queue import Queue
from ..rows import Rows, Source, Target
from .memory import first_lanes, load, store
from .operations import SoftmaxGradient
from .schedule import Bundles, Pairs, Room, run
from .sources import Memory
from .targets import ToMemory
from .walk import walk


@fieldwise_init
struct GradientRows[dtype: DType, log: Bool](Bundles):
    """Rows whose elements are neighbours in memory, with their gradients.

    The sum over a row is kept as the d of a pair whose m is 0, which merges as a plain sum does.

    Parameters:
        dtype: Dtype of the tensors.
        log: Whether y are logarithms of probabilities.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes: SIMDLength = 1
    comptime reduces = True
    comptime width = simd_width_of[Self.accum]()
    comptime G = Gradient[Self.log, True, Self.accum]

    var dx: Target[Self.dtype]
    var y: Source[Self.dtype]
    var dy: Source[Self.dtype]
    var rows: Rows

    def count(self) -> Int:
        return self.rows.count()

    def length(self) -> Int:
        return self.rows.n

    def pairs(self) -> Int:
        return 1

    def room(self) -> Int:
        return 0

    def reduce(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        room: Room[Self.accum],
    ):
        var sum = Sum[Self.accum, Self.width]()
        for i in range(start, end, Self.width):
            var at = bundle * self.rows.n + i
            sum.add(
                Self.G.term(
                    _load[Self.width](self.y.unsafe_offset(at), end - i),
                    _load[Self.width](self.dy.unsafe_offset(at), end - i),
                )
            )
        part[] = rebind[MaxSum[Self.accum, Self.lanes]](
            MaxSum[Self.accum, 1](0, sum.collapse())
        )

    def write(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        total: Pairs[Self.accum, Self.lanes],
        room: Room[Self.accum],
    ):
        var gradient = Self.G(rebind[Scalar[Self.accum]](total[].d.value))
        for i in range(start, end, Self.width):
            var at = bundle * self.rows.n + i
            store(
                self.dx.unsafe_offset(at),
                gradient.of(
                    _load[Self.width](self.y.unsafe_offset(at), end - i),
                    _load[Self.width](self.dy.unsafe_offset(at), end - i),
                ),
                end - i,
            )


@inline(.always)
def _load[
    dtype: DType, //, width: SIMDLength
](x: Source[dtype], count: Int) -> SIMD[accumulator[dtype](), width]:
    """Loads `count` elements, followed by 0: what adds nothing to a sum."""
    var values = load[width](x, count)
    if count >= Int(width):
        return values
    return first_lanes[width](count).select(values, 0)


def backward[
    dtype: DType, log: Bool, contiguous: Bool
](
    dx: Target[dtype],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes the gradient of the logits of every row.

    Parameters:
        dtype: Dtype of all tensors; the arithmetic is in its accumulator.
        log: Whether y are logarithms of probabilities.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        dx: Gradient of the logits; may be the same memory as `y` or `dy`.
        y: Results of the forward op.
        dy: Their gradient.
        rows: How the memory is divided into rows, none of them empty.
        queue: The CPU to run on.
    """
    comptime if contiguous:
        run(GradientRows[dtype, log](dx, y, dy, rows), queue)
    else:
        walk[False](
            Memory[dtype, False, True](y, dy, rows),
            SoftmaxGradient[log](),
            ToMemory[dtype, False](dx, rows),
            rows,
            queue,
        )
