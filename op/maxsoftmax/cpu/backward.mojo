"""The backward op on the CPU, along any axis."""

from std.math import ceildiv
from std.sys import simd_width_of

from ..gradient import Gradient
from ..online import MaxSum, Sum, accumulator
from ..queue import Queue
from ..rows import Rows, Source, Target
from .memory import fetch, fetch_to_write, first_lanes, load, store
from .panels import Panels
from .schedule import Bundles, Pairs, Room, run, spans_of


comptime UNROLL = 4
"""Elements of each row that are added before the sum is compensated."""


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


@fieldwise_init
struct StridedGradientRows[dtype: DType, log: Bool](Bundles):
    """Rows whose elements are `inner` apart, with their gradients, in panels of neighbours.

    Sums are kept as in `GradientRows`.

    Parameters:
        dtype: Dtype of the tensors.
        log: Whether y are logarithms of probabilities.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = Panels[Self.accum].lanes
    comptime G = Gradient[Self.log, True, Self.accum, Self.lanes]
    comptime Vector = SIMD[Self.accum, Self.lanes]

    var dx: Target[Self.dtype]
    var y: Source[Self.dtype]
    var dy: Source[Self.dtype]
    var panels: Panels[Self.accum]

    def count(self) -> Int:
        return self.panels.count()

    def length(self) -> Int:
        return self.panels.rows.n

    def pairs(self) -> Int:
        return self.panels.vectors()

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
        var _, offset, count = self.panels.place(bundle)
        for pair in range(ceildiv(count, Int(Self.lanes))):
            part[unsafe_offset=pair] = MaxSum[Self.accum, Self.lanes](0, {})
        var i = start
        while i + UNROLL <= end:
            self._add[UNROLL](offset + i * self._stride(), count, part)
            i += UNROLL
        while i < end:
            self._add[1](offset + i * self._stride(), count, part)
            i += 1

    @inline(.always)
    def _stride(self) -> Int:
        return self.panels.rows.inner

    @inline(.always)
    def _add[
        n: Int
    ](self, offset: Int, count: Int, part: Pairs[Self.accum, Self.lanes]):
        """Adds what the next `n` elements of `count` rows, from `offset` on, add to their sums.
        """
        for pair in range(ceildiv(count, Int(Self.lanes))):
            var column = pair * Int(Self.lanes)
            var terms = Self.Vector(0)
            comptime for j in range(n):
                var y, dy = self._next[n](
                    offset + j * self._stride() + column, count - column
                )
                terms += Self.G.term(y, dy)
            part[unsafe_offset=pair].d.add(terms)

    def write(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        total: Pairs[Self.accum, Self.lanes],
        room: Room[Self.accum],
    ):
        var _, offset, count = self.panels.place(bundle)
        var i = start
        while i + UNROLL <= end:
            self._write[UNROLL](offset + i * self._stride(), count, total)
            i += UNROLL
        while i < end:
            self._write[1](offset + i * self._stride(), count, total)
            i += 1

    @inline(.always)
    def _write[
        n: Int
    ](self, offset: Int, count: Int, total: Pairs[Self.accum, Self.lanes]):
        """Writes the next `n` gradients of `count` rows, from `offset` on."""
        for pair in range(ceildiv(count, Int(Self.lanes))):
            var column = pair * Int(Self.lanes)
            var gradient = Self.G(total[unsafe_offset=pair].d.value)
            comptime for j in range(n):
                var at = offset + j * self._stride() + column
                var y, dy = self._next[n](at, count - column)
                fetch_to_write[1](
                    self.dx.unsafe_offset(at + n * self._stride())
                )
                store(
                    self.dx.unsafe_offset(at),
                    gradient.of(y, dy),
                    count - column,
                )

    @inline(.always)
    def _next[
        n: Int
    ](self, at: Int, count: Int) -> Tuple[Self.Vector, Self.Vector]:
        """Loads the results at `at` and their gradients, and announces those `n` positions behind them.
        """
        fetch[1](self.y.unsafe_offset(at + n * self._stride()))
        fetch[1](self.dy.unsafe_offset(at + n * self._stride()))
        return (
            _load[Self.lanes](self.y.unsafe_offset(at), count),
            _load[Self.lanes](self.dy.unsafe_offset(at), count),
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
        var panels = Panels[accumulator[dtype]()](rows, spans_of(rows.n))
        run(StridedGradientRows[dtype, log](dx, y, dy, panels), queue)
