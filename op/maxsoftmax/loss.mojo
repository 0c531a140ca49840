"""The cross entropy of one row of logits, and its gradient, given the row's (max, sum) pair."""

from std.utils.numerics import nan

from .exponential import Unit, logarithm
from .rows import Source


struct Class(TrivialRegisterPassable):
    """What a row is to be: a class, nothing, or a mistake."""

    var index: Int64
    """The class; -1 if it is none."""
    var is_class: Bool
    """Whether it is one of the row's classes, and not ignored."""
    var is_ignored: Bool
    """Whether the row does not count."""

    @inline(.always)
    def __init__(out self, index: Int64, n: Int64, ignored: Int64):
        """The target `index` among `n` classes."""
        self.is_ignored = index == ignored
        self.is_class = not self.is_ignored and index >= 0 and index < n
        self.index = index if self.is_class else Int64(-1)

    @staticmethod
    @inline(.always)
    def of(targets: Source[_], row: Int, n: Int, ignored: Int) -> Self:
        """Returns what the row `row` of `n` classes is to be."""
        return {
            targets[unsafe_offset=row].cast[DType.int64](),
            Int64(n),
            Int64(ignored),
        }


@fieldwise_init
struct Loss[dtype: DType](TrivialRegisterPassable):
    """What all losses of a row are computed from.

    Parameters:
        dtype: The accumulator's dtype.
    """

    var m: Scalar[Self.dtype]
    """The largest logit."""
    var d: Scalar[Self.dtype]
    """Σ e^(x - m)."""

    @inline(.always)
    def of[
        smoothing: Float64
    ](
        self,
        target: Class,
        logit: Scalar[Self.dtype],
        below: Scalar[Self.dtype],
    ) -> Scalar[Self.dtype]:
        """Returns -ln p of the target, the share `smoothing` of it replaced by the mean over all classes.

        Parameters:
            smoothing: From 0 to 1.

        Args:
            target: What the row is to be.
            logit: That of the target.
            below: The mean of m - x over the row, if there is any smoothing.

        Returns:
            The loss; 0 for a row that does not count, NaN for a mistake.
        """
        if target.is_ignored:
            return 0
        if not target.is_class:
            return nan[Self.dtype]()
        var distance = self.m - logit
        comptime if smoothing != 0:
            comptime share = Scalar[Self.dtype](smoothing)
            distance = below * share
            # Nothing times infinity is not wanted here.
            comptime if smoothing != 1:
                distance += (self.m - logit) * (1 - share)
        return distance + logarithm(self.d)

    @inline(.always)
    def gradient[
        lanes: SIMDLength, //, smoothing: Float64
    ](
        self,
        target: Class,
        scale: Scalar[Self.dtype],
        logits: SIMD[Self.dtype, lanes],
        are_target: Bool,
        n: Int64,
    ) -> SIMD[Self.dtype, lanes]:
        """Returns the gradient of logits.

        Parameters:
            lanes: How many.
            smoothing: From 0 to 1.

        Args:
            target: What the row is to be.
            scale: Gradient of the loss.
            logits: The logits.
            are_target: Whether they are those of the target, or of other classes.
            n: How many classes there are.

        Returns:
            The gradients; 0 in a row that does not count, NaN for a mistake.
        """
        comptime V = SIMD[Self.dtype, lanes]
        if target.is_ignored:
            return V(0)
        if not target.is_class:
            return V(nan[Self.dtype]())
        var unit = Unit(self.m)
        var p = unit.exp(logits) / (self.d * unit.exp(self.m))
        var wanted = Scalar[Self.dtype](smoothing) / Scalar[Self.dtype](n)
        if are_target:
            wanted += Scalar[Self.dtype](1 - smoothing)
        return (p - wanted) * scale
