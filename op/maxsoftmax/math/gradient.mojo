"""The gradient of a row's logits, given what the forward op returned and the gradient of that.

Softmax: dx = y · (dy - Σ y·dy). Its logarithm: dx = dy - e^y · Σ dy.
"""

from std.math import exp2
from std.sys import is_nvidia_gpu

from .exponential import HEADROOM, Unit


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

    @staticmethod
    @inline(.always)
    def plus_term[
        width: SIMDLength, //
    ](
        terms: SIMD[Self.dtype, width],
        y: SIMD[Self.dtype, width],
        dy: SIMD[Self.dtype, width],
    ) -> SIMD[Self.dtype, width]:
        """Returns terms and one more."""
        comptime if Self.exact and not Self.log:
            # Left to an assembler, some kernels would round the product, and others would not. Of 16 bits it is exact.
            return y.fma(dy, terms)
        else:
            return terms + Self.term(y, dy)

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
    """Returns e^y of logarithms of probabilities, NaN where y is."""
    comptime if is_nvidia_gpu() and dtype == DType.float32:
        # The hardware has powers of 2. What y · log2 e is rounded by is made up for: it grows with y.
        comptime log2_e = Float32(1.4426950408889634)
        comptime log2_e_low = Float32(1.9259629911e-08)
        comptime ln_2 = Float32(0.6931471805599453)
        var single = rebind[SIMD[DType.float32, width]](y)
        var product = single * log2_e
        var power = exp2(product)
        comptime if exact:
            var lost = single.fma(
                type_of(single)(log2_e_low), single.fma(log2_e, -product)
            )
            var corrected = power.fma(lost * ln_2, power)
            power = single.lt(-150).select(type_of(single)(0), corrected)
        return rebind[SIMD[dtype, width]](power)
    else:
        comptime shrink = Scalar[dtype](1 / (1 << HEADROOM // 2))
        return Unit[dtype, 1](0).exp(y) * shrink * shrink
