"""What is made of one row, given its pairs and its divergence."""

from std.utils.numerics import inf, nan

from ...io.rows import Source
from ...math.exponential import logarithm

comptime SUMS = 5
"""How many accumulators there are of a row: the pair of p, that of q, and the divergence."""


@inline(.always)
def distance[dtype: DType, //](sums: Source[dtype]) -> Scalar[dtype]:
    """Returns by how much the logarithm of Σ e^z of p is above that of q.

    Args:
        sums: Both pairs of the row.
    """
    var log_p = logarithm(sums[unsafe_offset=1])
    var log_q = logarithm(sums[unsafe_offset=3])
    return (sums[unsafe_offset=0] - sums[unsafe_offset=2]) + (log_p - log_q)


@inline(.always)
def divergence[
    dtype: DType, //
](sums: Source[dtype], mean: Scalar[dtype]) -> Scalar[dtype]:
    """Returns the divergence of a row.

    Args:
        sums: Both pairs of the row.
        mean: Σ p (z_p - z_q).
    """
    var apart = distance(sums)
    if abs(mean) < inf[dtype]():
        return mean - apart
    # Where both have probabilities, terms are infinite where q is 0, and their sums may have lost that.
    return inf[dtype]() if abs(apart) < inf[dtype]() else nan[dtype]()


@fieldwise_init
struct Terms[dtype: DType, width: SIMDLength = 1](TrivialRegisterPassable):
    """What the gradients of all logits of a row share.

    Parameters:
        dtype: The accumulator's dtype.
        width: Number of rows, one a lane.
    """

    var scale: SIMD[Self.dtype, Self.width]
    """The gradient of the divergence, divided by the temperature."""
    var shift: SIMD[Self.dtype, Self.width]
    """What is added to z_p - z_q."""

    @staticmethod
    @inline(.always)
    def of(
        sums: Source[Self.dtype],
        dkl: Source[Self.dtype],
        has_dkl: Bool,
        row: Int,
        factor: Scalar[Self.dtype],
    ) -> Terms[Self.dtype]:
        """Returns those of one row.

        Args:
            sums: What there is of each row.
            dkl: The gradient of each row's divergence.
            has_dkl: Whether there are any; else each is 1.
            row: The row.
            factor: What logits are multiplied by.
        """
        var of_row = sums.unsafe_offset(SUMS * row)
        var scale = factor
        if has_dkl:
            scale *= dkl[unsafe_offset=row]
        return {scale, -distance(of_row) - of_row[unsafe_offset=4]}

    @inline(.always)
    def gradient[
        lanes: SIMDLength, //, of_p: Bool
    ](
        self,
        p: SIMD[Self.dtype, lanes],
        q: SIMD[Self.dtype, lanes],
        apart: SIMD[Self.dtype, lanes],
    ) -> SIMD[Self.dtype, lanes]:
        """Returns the gradients of logits.

        Parameters:
            lanes: As many as there are rows, or any number for a single row.
            of_p: Whether of the logits of p, else of q.

        Args:
            p: Probabilities.
            q: Those of q; not looked at for the gradient of p.
            apart: z_p - z_q; not looked at for the gradient of q.
        """
        comptime V = SIMD[Self.dtype, lanes]
        var scale: V
        var shift: V
        comptime if Self.width == 1:
            scale = self.scale[0]
            shift = self.shift[0]
        else:
            scale = rebind[V](self.scale)
            shift = rebind[V](self.shift)
        comptime if of_p:
            # Nothing times infinity is not wanted here.
            return (p.eq(0) | scale.eq(0)).select(
                V(0), p * (apart + shift) * scale
            )
        else:
            return (q - p) * scale
