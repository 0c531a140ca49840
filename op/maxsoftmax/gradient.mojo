"""The gradient of a row's logits, given what the forward op returned and the gradient of that.

Softmax: dx = y · (dy - Σ y·dy). Its logarithm: dx = dy - e^y · Σ dy.
"""

from std.math import exp2

from .exponential import HEADROOM, Scale, Unit


struct Gradient[
    log: Bool,
    exact: Bool,
    dtype: DType = DType.float32,
    rows: SIMDLength = 1,
](TrivialRegisterPassable):
    """What one sum over the row lets each thread compute.

    Parameters:
        log: Whether the results are logarithms of probabilities.
        exact: Whether to the accuracy of float32; for float64 always to its own.
        dtype: The accumulator's dtype.
        rows: Number of rows, one a lane.
    """

    var sum: SIMD[Self.dtype, Self.rows]
    """Σ of `term` over the row."""

    @inline(.always)
    def __init__(out self, sum: SIMD[Self.dtype, Self.rows]):
        self.sum = sum

    @staticmethod
    @inline(.always)
    def term[
        width: SIMDLength, //
    ](y: SIMD[Self.dtype, width], dy: SIMD[Self.dtype, width]) -> SIMD[
        Self.dtype, width
    ]:
        """Returns what elements add to the sum.

        Parameters:
            width: How many.

        Args:
            y: Results.
            dy: Their gradients.
        """
        comptime if Self.log:
            return dy
        else:
            return y * dy

    @inline(.always)
    def of[
        width: SIMDLength, //
    ](self, y: SIMD[Self.dtype, width], dy: SIMD[Self.dtype, width]) -> SIMD[
        Self.dtype, width
    ]:
        """Returns the gradients of logits.

        Parameters:
            width: As many as there are rows, or any number of elements of a single row.

        Args:
            y: Results.
            dy: Their gradients.
        """
        var sum: type_of(y)
        comptime if Self.rows == 1:
            sum = self.sum[0]
        else:
            sum = rebind[type_of(y)](self.sum)
        comptime if Self.log:
            return _exp[Self.exact](y).fma(-sum, dy)
        else:
            return y * (dy - sum)


@inline(.always)
def _exp[
    dtype: DType, width: SIMDLength, //, exact: Bool
](y: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns e^y, for y that need not be the logarithm of a probability."""
    comptime if dtype == DType.float64:
        var unit = Unit[dtype, 1](0)
        return unit.exp(y) * Scalar[dtype](0.5**HEADROOM)
    else:
        var single = rebind[SIMD[DType.float32, width]](y)
        var e = exp2(single * Float32(1.4426950408889634))
        comptime if exact:
            # What is in no row of logarithms, NaN with it, is left to the other.
            var small = Scale[True](0).exp(single) * Float32(0.5**HEADROOM)
            e = single.lt(32).select(small, e)
        return rebind[SIMD[dtype, width]](e)
