"""What a GPU sums of a row of two tensors in one read."""

from std.math import exp2
from std.utils.numerics import neg_inf
from max.gpu import WARP_SIZE

from ...gpu.hardware.pair import Pair
from ...gpu.hardware.team import (
    greater,
    largest_lane,
    largest_of_lanes,
    maximum,
    team_reduce,
    total,
)
from ...gpu.hardware.tree_reduction import Shared
from ...gpu.hardware.warp_reduction import lanes_reduce
from ...gpu.partition.granules import Granules, turned
from ...gpu.partition.row import product
from ...gpu.streaming_operations import LANES, Sums
from ...gpu.tuning import Stream
from ...io.rows import Target
from ...math.exponential import QuickScale, Scale
from .row import SUMS, divergence


@fieldwise_init
struct Both(TrivialRegisterPassable):
    """What a part of a row sums to."""

    var p: Pair[]
    """The maximum, and the sum of exponentials in its `Scale`."""
    var q: Pair[]
    """The same of q."""
    var s: Float32
    """The sum of p's exponentials times z_p - z_q."""


@fieldwise_init
struct _Side[width: SIMDLength](TrivialRegisterPassable):
    """The maximum of a thread's logits of one tensor, and the sum of their exponentials.

    Parameters:
        width: Chains that are summed.
    """

    var m: Float32
    """The maximum."""
    var d: SIMD[DType.float32, Self.width]
    """The sum, in the scale."""
    var quick: QuickScale
    """Of the maximum."""

    @inline(.always)
    def __init__(out self):
        self.m = neg_inf[DType.float32]()
        self.d = 0
        self.quick = QuickScale(self.m)

    @inline(.always)
    def raised[
        dtype: DType, count: Int, //
    ](
        mut self,
        x: Array[SIMD[dtype, Self.width], count],
        factor: Float32,
    ) -> Float32:
        """Raises the maximum to that of more logits, and returns what sums became less by.
        """
        comptime F = DType.float32
        var largest = x[0]
        comptime for j in range(1, count):
            largest = maximum(largest, x[j])
        # As of `Exponentials`: all lanes have one maximum, and NaN stays.
        var found = largest_of_lanes[LANES](largest_lane(largest).cast[F]())
        var m = maximum(self.m, found * factor)
        var ratio = Float32(1)
        if not m <= self.m:
            var quick = QuickScale(m)
            if self.m != neg_inf[F]():
                ratio = exp2(
                    quick.exponent(self.m) - self.quick.exponent(self.m)
                )
            self.d *= ratio
            self.quick = quick
            self.m = m
        return ratio

    @inline(.always)
    def of_unit(self, shift: Int32, lane: Int) -> Tuple[Pair[], Float32]:
        """Returns the pair of all lanes, and what sums are multiplied by from one scale to the other.
        """
        var d = lanes_reduce[total, LANES](
            turned[LANES](self.d, shift, lane).reduce_add()
        )
        # By way of the maximum, which is 0 there if it is -inf.
        var scale = Scale[True](self.m)
        var ratio = scale.exp(scale.m) * exp2(-self.quick.exponent(scale.m))
        return Pair(self.m, d * ratio), ratio


struct DivergenceSums[of: DType](Sums):
    """The pairs of both tensors, and the sum of p's exponentials times z_p - z_q.
    """

    comptime dtype = Self.of
    comptime inputs = 2
    # Each thread that merges units has five numbers of each.
    comptime tuned = Stream(128, 768, 2, False, 16, 1024)
    comptime exact = True
    comptime width = Granules[Self.of].width
    comptime Whole = Both
    comptime Values = SIMD[DType.float32, Self.width]

    var p: _Side[Self.width]
    var q: _Side[Self.width]
    var s: Self.Values
    """The sum, in the scale of p."""
    var factor: Float32
    """What logits are multiplied by."""

    @inline(.always)
    def __init__(out self, factor: Float32):
        self.p = _Side[Self.width]()
        self.q = _Side[Self.width]()
        self.s = 0
        self.factor = factor

    @staticmethod
    @inline(.always)
    def nothing() -> Both:
        var none = Pair(neg_inf[DType.float32](), 0)
        return Both(none, none, 0)

    @inline(.always)
    def add[
        count: Int
    ](mut self, x: Self.Taken[count], other: Self.Taken[count]):
        comptime F = DType.float32
        self.s *= self.p.raised(x, self.factor)
        _ = self.q.raised(other, self.factor)
        comptime for j in range(count):
            # Rounded, in the kernel of rows that begin at a multiple of 16 bytes and in that of others.
            var z_p = product(x[j].cast[F](), Self.Values(self.factor))
            var z_q = product(other[j].cast[F](), Self.Values(self.factor))
            var terms = self.p.quick.exp(z_p)
            self.p.d += terms
            self.q.d += self.q.quick.exp(z_q)
            # Nothing times infinity is not wanted here.
            self.s += terms.eq(0).select(
                Self.Values(0), product(terms, z_p - z_q)
            )

    @inline(.always)
    def of_unit(self, shift: Int32, lane: Int) -> Both:
        var p, ratio = self.p.of_unit(shift, lane)
        var q, _ = self.q.of_unit(shift, lane)
        var s = lanes_reduce[total, LANES](
            turned[LANES](self.s, shift, lane).reduce_add()
        )
        return Both(p, q, s * ratio)

    @staticmethod
    @inline(.always)
    def merged[
        most: Int, //
    ](
        pairs: Array[Both, most],
        count: Int,
        scratch: Shared[Float32],
        thread: Int,
    ) -> Both:
        comptime size = Self.tuned.block_size
        comptime warps = size // WARP_SIZE
        var m_p = pairs[0].p.m
        var m_q = pairs[0].q.m
        comptime for j in range(1, most):
            m_p = maximum(m_p, pairs[j].p.m)
            m_q = maximum(m_q, pairs[j].q.m)
        m_p = team_reduce[size, greater](scratch, thread, m_p)
        m_q = team_reduce[size, greater](
            scratch.unsafe_offset(warps), thread, m_q
        )
        var d_p = Float32(0)
        var d_q = Float32(0)
        var s = Float32(0)
        comptime for j in range(most):
            if j < count:
                var ratio = _over(pairs[j].p.m, m_p)
                d_p += pairs[j].p.d * ratio
                s += pairs[j].s * ratio
                d_q += pairs[j].q.d * _over(pairs[j].q.m, m_q)
        d_p = team_reduce[size, total](
            scratch.unsafe_offset(2 * warps), thread, d_p
        )
        d_q = team_reduce[size, total](
            scratch.unsafe_offset(3 * warps), thread, d_q
        )
        s = team_reduce[size, total](
            scratch.unsafe_offset(4 * warps), thread, s
        )
        return Both(Pair(m_p, d_p), Pair(m_q, d_q), s)

    @staticmethod
    @inline(.always)
    def write(result: Target[DType.float32], row: Int, whole: Both):
        var to = result.unsafe_offset(SUMS * row)
        to[unsafe_offset=0] = whole.p.m
        to[unsafe_offset=1] = whole.p.relative[True]()
        to[unsafe_offset=2] = whole.q.m
        to[unsafe_offset=3] = whole.q.relative[True]()
        to[unsafe_offset=4] = divergence(to, whole.s / whole.p.d)


@inline(.always)
def _over(m: Float32, larger: Float32) -> Float32:
    """Returns what sums in the scale of one maximum are multiplied by in that of a larger one.
    """
    # Those of nothing are 0, whatever they are multiplied by.
    if m == neg_inf[DType.float32]():
        return 1
    return Scale[True](m).over(Scale[True](larger))
