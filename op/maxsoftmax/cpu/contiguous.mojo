"""Rows along the last axis: the lanes of a vector are neighbours in one row."""

from std.sys import simd_width_of

from ..finish import Finish
from ..online import MaxSum, accumulator
from ..rows import Rows, Source, Target
from .memory import load, store, write_pairs
from .schedule import UNROLL, Bundles


@fieldwise_init
struct ContiguousRows[dtype: DType, finish: Finish](Bundles):
    """Rows whose elements are neighbours in memory, one row a bundle.

    Parameters:
        dtype: Dtype of the tensors.
        finish: What of each row is written.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = 1
    comptime width = simd_width_of[Self.accum]()

    var y: Target[Self.dtype]
    var x: Source[Self.dtype]
    var rows: Rows

    def count(self) -> Int:
        return self.rows.count()

    def length(self) -> Int:
        return self.rows.n

    def reduce(
        self, bundle: Int, start: Int, end: Int
    ) -> MaxSum[Self.accum, Self.lanes]:
        comptime Vector = SIMD[Self.accum, Self.width]
        comptime step = UNROLL * Self.width
        var x = self.x.unsafe_offset(bundle * self.rows.n)
        var pair = MaxSum[Self.accum, Self.width]()
        var i = start
        while i + step <= end:
            var logits = Array[Vector, UNROLL](fill=0)
            comptime for j in range(UNROLL):
                logits[j] = load[Self.width](
                    x.unsafe_offset(i + j * Self.width), Self.width
                )
            pair.add(logits)
            i += step
        while i < end:
            pair.add(
                Array[Vector, 1](
                    fill=load[Self.width](x.unsafe_offset(i), end - i)
                )
            )
            i += Self.width
        return rebind[MaxSum[Self.accum, Self.lanes]](pair.collapse())

    def write(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        total: MaxSum[Self.accum, Self.lanes],
    ):
        var x = self.x.unsafe_offset(bundle * self.rows.n)
        var y = self.y.unsafe_offset(bundle * self.rows.n)
        comptime if Self.finish == Finish.PAIR:
            if start == 0:
                write_pairs(self.y, bundle, 1, total)
        elif Self.finish == Finish.LOGARITHMS:
            var row = total.logarithms()
            for i in range(start, end, Self.width):
                var logits = load[Self.width](x.unsafe_offset(i), end - i)
                store(y.unsafe_offset(i), row.probability(logits), end - i)
        else:
            var row = total.normalizer()
            for i in range(start, end, Self.width):
                var logits = load[Self.width](x.unsafe_offset(i), end - i)
                store(y.unsafe_offset(i), row.probability(logits), end - i)
