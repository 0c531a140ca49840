"""Rows along the last axis: the lanes of a vector are neighbours in one row."""

from std.sys import simd_width_of, size_of
from std.utils.numerics import neg_inf

from ..exponential import Unit
from ..online import MaxSum, Sum, accumulator
from ..rows import Rows, Source, Target
from .memory import fetch, fetch_to_write, larger, load, store
from .portion import Portion
from .schedule import Bundles, Pairs

comptime VECTORS = 4
"""Vectors that are under way at a time, written as one so that their instructions take turns: each waits for the one
before it, and a core looks ahead no further than a few exponentials. 17.0 us for 16384 elements in the cache, one vector
at a time 20.4."""

comptime READ_AHEAD = 16384
"""Bytes by which reads are announced ahead: while one span is computed, memory delivers the next. 8192×1024 float32 in
3.4 ms, unannounced 4.5."""

comptime WRITE_AHEAD = 4096
"""The same for writes."""

comptime KEPT = 1 << 19
"""Bytes of a row up to which its exponentials are stored and read again, and not computed again: they have to stay in a
core's second cache. One row in the cache, 50240 float32: 21 us, computed again 32."""


@fieldwise_init
struct ContiguousRows[dtype: DType](Bundles):
    """Rows whose elements are neighbours in memory, one row a bundle.

    A span is read for its maximum, and again, from the first cache, for its exponentials in the unit of that maximum.
    These wait in `y` for the sum of the whole row, if they fit there.

    Parameters:
        dtype: Dtype of the tensors.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes: SIMDLength = 1
    comptime width = simd_width_of[Self.accum]()
    comptime step = VECTORS * Self.width
    comptime read_ahead = READ_AHEAD // size_of[Self.dtype]()
    comptime write_ahead = WRITE_AHEAD // size_of[Self.dtype]()
    comptime Vector = SIMD[Self.accum, Self.width]

    var y: Target[Self.dtype]
    var x: Source[Self.dtype]
    var rows: Rows

    def count(self) -> Int:
        return self.rows.count()

    def length(self) -> Int:
        return self.rows.n

    def pairs(self) -> Int:
        return 1

    def reduce(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
    ):
        var at = bundle * self.rows.n + start
        var m = self._max(at, end - start)
        var d: Sum[Self.accum, 1]
        if self._keeps():
            d = self._sum[True](at, end - start, Unit(m))
        else:
            d = self._sum[False](at, end - start, Unit(m))
        part[] = rebind[MaxSum[Self.accum, Self.lanes]](MaxSum(m, d))

    def write(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        total: Pairs[Self.accum, Self.lanes],
    ):
        var at = bundle * self.rows.n + start
        var portion = Portion(
            rebind[MaxSum[Self.accum, 1]](part[]),
            rebind[MaxSum[Self.accum, 1]](total[]),
        )
        if self._keeps():
            self._write[True](at, end - start, portion)
        else:
            self._write[False](at, end - start, portion)

    @inline(.always)
    def _keeps(self) -> Bool:
        """Returns whether `y` holds the exponentials between the passes."""
        comptime if Self.dtype != Self.accum:
            return False
        return self.rows.n * size_of[Self.dtype]() <= KEPT

    @inline(.always)
    def _max(self, at: Int, count: Int) -> Scalar[Self.accum]:
        """Returns the maximum of `count` logits from `at` on, of those that are not NaN.
        """
        var x = self.x.unsafe_offset(at)
        var m = SIMD[Self.accum, Self.step](neg_inf[Self.accum]())
        var i = 0
        while i + Self.step <= count:
            m = larger(load[Self.step](x.unsafe_offset(i), Self.step), m)
            i += Self.step
        var rest = Self.Vector(neg_inf[Self.accum]())
        while i < count:
            rest = larger(load[Self.width](x.unsafe_offset(i), count - i), rest)
            i += Self.width
        return max(m.reduce_max(), rest.reduce_max())

    @inline(.always)
    def _sum[
        keeps: Bool
    ](self, at: Int, count: Int, unit: Unit[Self.accum, 1]) -> Sum[
        Self.accum, 1
    ]:
        """Returns the sum of e^x over `count` logits from `at` on, and writes the exponentials to `y` if they are kept.
        """
        var x = self.x.unsafe_offset(at)
        var y = self.y.unsafe_offset(at)
        var d = Sum[Self.accum, Self.width]()
        var i = 0
        while i + Self.step <= count:
            var e_x = unit.exp(load[Self.step](x.unsafe_offset(i), Self.step))
            fetch[Self.step](x.unsafe_offset(i + Self.read_ahead))
            comptime if keeps:
                store(y.unsafe_offset(i), e_x, Self.step)
                fetch_to_write[Self.step](y.unsafe_offset(i + Self.write_ahead))
            d.add(_by_halves[Self.width](e_x))
            i += Self.step
        while i < count:
            var e_x = unit.exp(load[Self.width](x.unsafe_offset(i), count - i))
            comptime if keeps:
                store(y.unsafe_offset(i), e_x, count - i)
            d.add(e_x)
            i += Self.width
        return d.collapse()

    @inline(.always)
    def _write[
        kept: Bool
    ](self, at: Int, count: Int, portion: Portion[Self.accum]):
        """Writes `count` probabilities from `at` on."""
        var x = self.x.unsafe_offset(at)
        var y = self.y.unsafe_offset(at)

        @inline(.always)
        def probability[
            lanes: SIMDLength
        ](i: Int) {imm} -> SIMD[Self.accum, lanes]:
            comptime if kept:
                return portion.probability(
                    load[lanes](y.unsafe_offset(i), count - i)
                )
            else:
                return portion.probability(
                    portion.unit.exp(load[lanes](x.unsafe_offset(i), count - i))
                )

        var i = 0
        while i + Self.step <= count:
            comptime if not kept:
                fetch[Self.step](x.unsafe_offset(i + Self.read_ahead))
                fetch_to_write[Self.step](y.unsafe_offset(i + Self.write_ahead))
            store(y.unsafe_offset(i), probability[Self.step](i), Self.step)
            i += Self.step
        while i < count:
            store(y.unsafe_offset(i), probability[Self.width](i), count - i)
            i += Self.width


@inline(.always)
def _by_halves[
    dtype: DType, lanes: SIMDLength, //, width: SIMDLength
](terms: SIMD[dtype, lanes]) -> SIMD[dtype, width]:
    """Returns the sum of the vectors that `terms` consists of: four of them round twice, which the accuracy can bear.
    """
    comptime if lanes == width:
        return rebind[SIMD[dtype, width]](terms)
    else:
        comptime half = lanes // 2
        return _by_halves[width](
            terms.slice[half]() + terms.slice[half, offset=half]()
        )
