"""The backward op on the CPU, along any axis."""

from std.math import ceildiv
from std.sys import simd_width_of, size_of
from max.gpu.host import DeviceContext

from ..gradient import Gradient
from ..online import MaxSum, Sum, accumulator
from ..rows import Rows, Source, Target
from .memory import first_lanes, load, store
from .schedule import Bundles, Pairs, Room, run


@fieldwise_init
struct GradientRows[dtype: DType, log: Bool, contiguous: Bool](Bundles):
    """Rows with their gradients: one row a bundle if its elements are neighbours, else as many rows as fill a cache line of
    accumulators.

    The sum over a row is kept as the d of a pair whose m is 0, which merges as a plain sum does.

    Parameters:
        dtype: Dtype of the tensors.
        log: Whether y are logarithms of probabilities.
        contiguous: Whether `rows.inner` is 1.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime width = simd_width_of[
        Self.accum
    ]() if Self.contiguous else 64 // size_of[Self.accum]()
    comptime lanes: SIMDLength = 1 if Self.contiguous else Self.width
    comptime G = Gradient[Self.log, True, Self.accum, Self.lanes]
    comptime Vector = SIMD[Self.accum, Self.width]

    var dx: Target[Self.dtype]
    var y: Source[Self.dtype]
    var dy: Source[Self.dtype]
    var rows: Rows

    def count(self) -> Int:
        return self.rows.outer * ceildiv(self.rows.inner, Int(Self.lanes))

    def length(self) -> Int:
        return self.rows.n

    def pairs(self) -> Int:
        return 1

    def room(self) -> Int:
        return 0

    @inline(.always)
    def _place(self, bundle: Int) -> Tuple[Int, Int]:
        """Returns the offset of the bundle's first element and the number of rows from there to the end of inner.
        """
        var outer, tile = divmod(
            bundle, ceildiv(self.rows.inner, Int(Self.lanes))
        )
        var column = tile * Int(Self.lanes)
        return (
            outer * self.rows.n * self.rows.inner + column,
            self.rows.inner - column,
        )

    @inline(.always)
    def _step(self) -> Tuple[Int, Int]:
        """Returns how many positions a vector has, and how far apart they are.
        """
        comptime if Self.contiguous:
            return (Int(Self.width), 1)
        else:
            return (1, self.rows.inner)

    def reduce(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        room: Room[Self.accum],
    ):
        var offset, columns = self._place(bundle)
        var positions, stride = self._step()
        var sum = Sum[Self.accum, Self.width]()
        for i in range(start, end, positions):
            var at = offset + i * stride
            var count = end - i if Self.contiguous else columns
            sum.add(
                Self.G.term(
                    _load[Self.width](self.y.unsafe_offset(at), count),
                    _load[Self.width](self.dy.unsafe_offset(at), count),
                )
            )
        comptime if Self.contiguous:
            part[] = rebind[MaxSum[Self.accum, Self.lanes]](
                MaxSum[Self.accum, 1](0, sum.collapse())
            )
        else:
            part[] = rebind[MaxSum[Self.accum, Self.lanes]](
                MaxSum[Self.accum, Self.width](0, sum)
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
        var offset, columns = self._place(bundle)
        var positions, stride = self._step()
        var gradient = Self.G(total[].d.value)
        for i in range(start, end, positions):
            var at = offset + i * stride
            var count = end - i if Self.contiguous else columns
            store(
                self.dx.unsafe_offset(at),
                gradient.of(
                    _load[Self.width](self.y.unsafe_offset(at), count),
                    _load[Self.width](self.dy.unsafe_offset(at), count),
                ),
                count,
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
    ctx: DeviceContext,
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
        ctx: The CPU to run on.
    """
    run(GradientRows[dtype, log, contiguous](dx, y, dy, rows), ctx)
