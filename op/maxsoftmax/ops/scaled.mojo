"""Logits in memory that a CPU's walk multiplies by a number as it reads them."""

from ..cpu.sources import Memory, RowSource, SourceRow
from ..math.online import accumulator


@fieldwise_init
struct Scaled[dtype: DType, contiguous: Bool, two: Bool = False](
    RowSource, SourceRow
):
    """Logits in memory, of one tensor or two, multiplied by a number.

    Parameters:
        dtype: Their dtype.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.
        two: Whether there is a second tensor.
    """

    comptime Row = Scaled[Self.dtype, Self.contiguous, Self.two]

    var x: Memory[Self.dtype, Self.contiguous, Self.two]
    var factor: Scalar[accumulator[Self.dtype]()]

    @inline(.always)
    def row(self, outer: Int, inner: Int) -> Self.Row:
        return {self.x.row(outer, inner), self.factor}

    @inline(.always)
    def load[
        accum: DType, width: SIMDLength
    ](self, i: Int, column: Int, count: Int) -> SIMD[accum, width]:
        var values = self.x.load[accum, width](i, column, count)
        return values * self.factor.cast[accum]()

    @inline(.always)
    def load_other[
        accum: DType, width: SIMDLength
    ](self, i: Int, column: Int, count: Int) -> SIMD[accum, width]:
        var values = self.x.load_other[accum, width](i, column, count)
        return values * self.factor.cast[accum]()

    @inline(.always)
    def prefetch[count: Int, ahead: Int = 0](self, i: Int, column: Int):
        self.x.prefetch[count, ahead](i, column)
