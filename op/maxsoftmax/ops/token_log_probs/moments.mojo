"""What a GPU sums of a row in one read: its maximum, the sum of its exponentials, and what the entropy needs beside."""

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
from ...gpu.streaming_operations import LANES, Sums
from ...gpu.tuning import Tuned
from ...io.rows import Target
from ...math.exponential import QuickScale, Scale, logarithm
from .row import SUMS

comptime LN2 = Float32(0.6931471805599453)

comptime LOWEST = Float32(-10000)
"""The exponent of a term that is 0, instead of -inf, times which it would be NaN."""


@fieldwise_init
struct Moments(TrivialRegisterPassable):
    """What a part of a row sums to."""

    var pair: Pair[]
    """The maximum, and the sum of exponentials in its `Scale`."""
    var s: Float32
    """The sum of these times m - z."""

    @inline(.always)
    def over[exact: Bool](self, m: Float32) -> Tuple[Float32, Float32]:
        """Returns d and s as they are in a row whose maximum is `m`, which is not smaller.

        Parameters:
            exact: Of both scales.
        """
        if self.pair.m == neg_inf[DType.float32]():
            return Float32(0), Float32(0)
        var scale = Scale[exact](m)
        var ratio = Scale[exact](self.pair.m).over(scale)
        var raised = min(m - self.pair.m, -LOWEST)
        return self.pair.d * ratio, raised.fma(self.pair.d, self.s) * ratio


struct EntropySums[of: DType](Sums):
    """The maximum of a row, the sum of its exponentials, and that of these times what each is below the maximum.
    """

    comptime dtype = Self.of
    comptime tuned = Tuned.exponentials(True)
    comptime exact = True
    comptime width = Granules[Self.of].width
    comptime Whole = Moments
    comptime Values = SIMD[DType.float32, Self.width]

    var m: Float32
    """The maximum."""
    var d: Self.Values
    """The sum in the `QuickScale` of the maximum."""
    var s: Self.Values
    """The sum of these times their exponents."""
    var quick: QuickScale
    """That scale."""
    var factor: Float32
    """What logits are multiplied by."""

    @inline(.always)
    def __init__(out self, factor: Float32):
        self.m = neg_inf[DType.float32]()
        self.d = 0
        self.s = 0
        self.quick = QuickScale(self.m)
        self.factor = factor

    @staticmethod
    @inline(.always)
    def nothing() -> Moments:
        return Moments(Pair(neg_inf[DType.float32](), 0), 0)

    @inline(.always)
    def add[
        count: Int
    ](mut self, x: Self.Taken[count], other: Self.Taken[count]):
        comptime F = DType.float32
        var largest = x[0]
        comptime for j in range(1, count):
            largest = maximum(largest, x[j])
        # As of `Exponentials`: all lanes have one maximum, and NaN stays.
        var found = largest_of_lanes[LANES](largest_lane(largest).cast[F]())
        var m = maximum(self.m, found * self.factor)
        if not m <= self.m:
            var quick = QuickScale(m)
            var ratio = Float32(0)
            var raised = Float32(0)
            if self.m != neg_inf[F]():
                # What exponents become less by.
                raised = max(
                    quick.exponent(self.m) - self.quick.exponent(self.m), LOWEST
                )
                ratio = exp2(raised)
            self.s = (self.d * raised + self.s) * ratio
            self.d *= ratio
            self.quick = quick
            self.m = m
        comptime for j in range(count):
            var exponents = self.quick.exponent(x[j].cast[F]() * self.factor)
            var terms = exp2(exponents)
            self.d += terms
            self.s = terms.fma(max(exponents, Self.Values(LOWEST)), self.s)

    @inline(.always)
    def of_unit(self, shift: Int32, lane: Int) -> Moments:
        var d = lanes_reduce[total, LANES](
            turned[LANES](self.d, shift, lane).reduce_add()
        )
        var s = lanes_reduce[total, LANES](
            turned[LANES](self.s, shift, lane).reduce_add()
        )
        # From one unit to the other by way of the maximum, which is 0 there if it is -inf.
        var scale = Scale[Self.exact](self.m)
        var of_max = self.quick.exponent(scale.m)
        var ratio = scale.exp(scale.m) * exp2(-of_max)
        var below = (of_max * d - s) * LN2
        return Moments(Pair(self.m, d * ratio), below * ratio)

    @staticmethod
    @inline(.always)
    def merged[
        most: Int, //
    ](
        pairs: Array[Moments, most],
        count: Int,
        scratch: Shared[Float32],
        thread: Int,
    ) -> Moments:
        comptime size = Self.tuned.block_size
        comptime warps = size // WARP_SIZE
        var m = pairs[0].pair.m
        comptime for j in range(1, most):
            m = maximum(m, pairs[j].pair.m)
        m = team_reduce[size, greater](scratch, thread, m)
        var d = Float32(0)
        var s = Float32(0)
        comptime for j in range(most):
            if j < count:
                var mine, below = pairs[j].over[Self.exact](m)
                d += mine
                s += below
        d = team_reduce[size, total](scratch.unsafe_offset(warps), thread, d)
        s = team_reduce[size, total](
            scratch.unsafe_offset(2 * warps), thread, s
        )
        return Moments(Pair(m, d), s)

    @staticmethod
    @inline(.always)
    def write(result: Target[DType.float32], row: Int, whole: Moments):
        var to = result.unsafe_offset(SUMS * row)
        var d = whole.pair.relative[Self.exact]()
        to[unsafe_offset=0] = whole.pair.m
        to[unsafe_offset=1] = d
        to[unsafe_offset=2] = logarithm(d) + whole.s / whole.pair.d
