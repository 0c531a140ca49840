"""Rows along any other axis: the lanes of a vector are the same element of neighbouring rows."""

from std.math import ceildiv
from std.sys import size_of

from ..online import MaxSum, accumulator
from ..rows import Rows, Source, Target
from .memory import load, store
from .schedule import Bundles, Pairs

comptime UNROLL = 8
"""Elements of each row between two rescalings of d."""


@fieldwise_init
struct StridedRows[dtype: DType](Bundles):
    """Rows whose elements are `inner` apart, as many a bundle as fill a cache line of accumulators.

    The last bundle before the end of `inner` may be narrower: its other lanes hold -inf and are not stored.

    Parameters:
        dtype: Dtype of the tensors.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes: SIMDLength = 64 // size_of[Self.accum]()

    var y: Target[Self.dtype]
    var x: Source[Self.dtype]
    var rows: Rows

    def count(self) -> Int:
        return self.rows.outer * ceildiv(self.rows.inner, Self.lanes)

    def length(self) -> Int:
        return self.rows.n

    def pairs(self) -> Int:
        return 1

    @inline(.always)
    def _place(self, bundle: Int) -> Tuple[Int, Int]:
        """Returns the offset of the bundle's first element and the number of rows from there to the end of inner.
        """
        var outer, tile = divmod(bundle, ceildiv(self.rows.inner, Self.lanes))
        var column = tile * Self.lanes
        return (
            outer * self.rows.n * self.rows.inner + column,
            self.rows.inner - column,
        )

    def reduce(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
    ):
        comptime Vector = SIMD[Self.accum, Self.lanes]
        var offset, count = self._place(bundle)
        var x = self.x.unsafe_offset(offset)
        var pair = MaxSum[Self.accum, Self.lanes]()
        var i = start
        while i + UNROLL <= end:
            var logits = Array[Vector, UNROLL](fill=0)
            comptime for j in range(UNROLL):
                logits[j] = load[Self.lanes](
                    x.unsafe_offset((i + j) * self.rows.inner), count
                )
            pair.add(logits)
            i += UNROLL
        while i < end:
            pair.add(
                Array[Vector, 1](
                    fill=load[Self.lanes](
                        x.unsafe_offset(i * self.rows.inner), count
                    )
                )
            )
            i += 1
        part[] = pair

    def write(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        total: Pairs[Self.accum, Self.lanes],
    ):
        var offset, count = self._place(bundle)
        var x = self.x.unsafe_offset(offset)
        var y = self.y.unsafe_offset(offset)
        var rows = total[].normalizer()
        for i in range(start, end):
            store(
                y.unsafe_offset(i * self.rows.inner),
                rows.probability(
                    load[Self.lanes](
                        x.unsafe_offset(i * self.rows.inner), count
                    )
                ),
                count,
            )
