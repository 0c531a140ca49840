"""What `streaming` sums of a row, and what it writes of it: an operation is one of each."""

from std.bit import log2_ceil
from std.math import exp2
from std.sys import size_of
from std.utils.numerics import neg_inf
from max.gpu import WARP_SIZE

from ..io.rows import Target
from ..io.widening import widened
from ..math.exponential import QuickScale, Scale, logarithm
from ..ops.finish import Finish
from ..math.gradient import Gradient
from ..math.online import Sum
from .hardware.pair import Pair
from .partition.granules import Granule, Granules, turned
from .hardware.team import (
    greater,
    largest_lane,
    largest_of_lanes,
    maximum,
    team_reduce,
    total,
)
from .partition.pair import add, write_pair
from .hardware.tree_reduction import Shared
from .hardware.warp_reduction import lanes_reduce
from .tuning import Stream, Tuned


comptime LANES = 32
"""Threads that share a unit."""


trait Sums(TrivialRegisterPassable):
    """What a thread has of a row, of vector after vector."""

    comptime dtype: DType
    """Of the inputs, of 4 bytes or 2."""
    comptime inputs: Int = 1
    """How many there are: 1 or 2."""
    comptime tuned: Stream
    """How the row is taken."""
    comptime exact: Bool = size_of[Self.dtype]() > 2
    """Whether results are of more than 16 bits."""
    comptime Taken[count: Int] = Array[Granule[Self.dtype], count]
    """Some vectors of an input."""
    comptime Whole: TrivialRegisterPassable
    """What elements sum to, in float32: of pairs `Pair[]`."""

    def __init__(out self, factor: Float32):
        """That of nothing.

        Args:
            factor: What elements are multiplied by, if sums are of such.
        """
        ...

    @staticmethod
    @inline(.always)
    def filler() -> Scalar[Self.dtype]:
        """Returns an element that adds nothing."""
        return neg_inf[Self.dtype]()

    @staticmethod
    def nothing() -> Self.Whole:
        """Returns what no elements sum to."""
        ...

    def add[
        count: Int
    ](mut self, x: Self.Taken[count], other: Self.Taken[count]):
        """Adds vectors.

        Args:
            x: Of the first input.
            other: Of the second, if there is one.
        """
        ...

    def of_unit(self, shift: Int32, lane: Int) -> Self.Whole:
        """Returns what all lanes of a unit have together.

        Args:
            shift: Of the row's granules.
            lane: This thread's index among them.
        """
        ...

    @staticmethod
    def merged[
        most: Int, //
    ](
        pairs: Array[Self.Whole, most],
        count: Int,
        scratch: Shared[Float32],
        thread: Int,
    ) -> Self.Whole:
        """Returns what all threads of a block have together, the same bits for each.

        Parameters:
            most: Pairs a thread, at most.

        - `pairs`: This thread's.
        - `count`: How many of them there are.
        - `scratch`: Memory for as many values a warp as `Whole` has.
        """
        ...

    @staticmethod
    def write(result: Target[DType.float32], row: Int, whole: Self.Whole):
        """Writes what there is one of for a row: of pairs (m, d).

        - `result`: Where that of row 0 goes.
        - `whole`: What it sums to.
        """
        ...


struct Exponentials[
    of: DType,
    for_logarithm: Bool,
    stream: Stream = Tuned.exponentials(for_logarithm),
](Sums):
    """The maximum of a row, and the sum of its exponentials in the `Scale` of the maximum.

    - `for_logarithm`: Whether only the logarithm of the sum is needed, for which exponentials of three operations will do: nothing is
      written that they could hide behind.
    - `stream`: How the row is taken: in the kernel's name, by which MAX finds kernels that it has loaded.
    """

    comptime dtype = Self.of
    comptime tuned = Self.stream
    comptime width = Granules[Self.of].width
    comptime S = Scale[Self.exact]
    comptime Whole = Pair[]

    var m: Float32
    """The maximum."""
    var d: Sum[DType.float32, Self.width]
    """The sum; where it is for a logarithm, in the `QuickScale` of the maximum."""
    var quick: QuickScale
    """That scale."""

    @inline(.always)
    def __init__(out self, factor: Float32):
        self.m = neg_inf[DType.float32]()
        self.d = Sum[DType.float32, Self.width]()
        self.quick = QuickScale(self.m)

    @staticmethod
    @inline(.always)
    def nothing() -> Pair[]:
        return Pair(neg_inf[DType.float32](), 0)

    @inline(.always)
    def add[
        count: Int
    ](mut self, x: Self.Taken[count], other: Self.Taken[count]):
        comptime F = DType.float32
        var largest = x[0]
        comptime for j in range(1, count):
            largest = maximum(largest, x[j])
        # All lanes have one maximum: which elements are one lane's follows from where the row begins.
        var found = largest_of_lanes[LANES](largest_lane(largest).cast[F]())
        # NaN stays, whatever follows.
        var m = maximum(self.m, found)
        # After the first few vectors hardly ever.
        if not m <= self.m:
            var nothing = self.m == neg_inf[F]()
            comptime if Self.for_logarithm:
                var quick = QuickScale(m)
                var power = quick.exponent(self.m) - self.quick.exponent(self.m)
                self.d.value *= Float32(0) if nothing else exp2(power)
                self.quick = quick
            else:
                self.d.scale(
                    Float32(0) if nothing else Self.S(self.m).over(Self.S(m))
                )
            self.m = m
        comptime if Self.for_logarithm:
            comptime for j in range(count):
                self.d.value += self.quick.exp(widened(x[j]))
        else:
            var scale = Self.S(self.m)
            var terms = scale.exp(widened(x[0]))
            comptime for j in range(1, count):
                terms += scale.exp(widened(x[j]))
            add[Self.exact](self.d, terms)

    @inline(.always)
    def of_unit(self, shift: Int32, lane: Int) -> Pair[]:
        var chains = turned[LANES](self.d.value - self.d.excess, shift, lane)
        var d = lanes_reduce[total, LANES](chains.reduce_add())
        comptime if Self.for_logarithm:
            var scale = Self.S(self.m)
            # From one unit to the other by way of the maximum, which is 0 there if it is -inf.
            d *= scale.exp(scale.m) * exp2(-self.quick.exponent(scale.m))
        return Pair(self.m, d)

    @staticmethod
    @inline(.always)
    def merged[
        most: Int, //
    ](
        pairs: Array[Pair[], most],
        count: Int,
        scratch: Shared[Float32],
        thread: Int,
    ) -> Pair[]:
        var m = pairs[0].m
        comptime for j in range(1, most):
            m = maximum(m, pairs[j].m)
        m = team_reduce[Self.tuned.block_size, greater](scratch, thread, m)
        var scale = Self.S(m)
        var d = Float32(0)
        comptime for j in range(most):
            if j < count:
                d += pairs[j].sum_over(scale)
        return Pair(
            m,
            team_reduce[Self.tuned.block_size, total](
                scratch.unsafe_offset(Self.tuned.block_size // WARP_SIZE),
                thread,
                d,
            ),
        )

    @staticmethod
    @inline(.always)
    def merged_by_warp[
        most: Int
    ](pairs: Shared[Float32], count: Int, lane: Int) -> Pair[]:
        """Returns what a row's units come to, with the bits of `merged`, to every lane of a warp.

        Parameters:
            most: Units at most, no more than `merged` has threads.

        Args:
            pairs: Those of the units, one after the other.
            count: How many there are.
            lane: This thread's index in its warp.
        """
        comptime warps = Self.tuned.block_size // WARP_SIZE
        comptime assert most <= Self.tuned.block_size
        var mine = Array[Pair[], warps](fill=Self.nothing())
        var m = neg_inf[DType.float32]()
        comptime for i in range(warps):
            var unit = i * WARP_SIZE + lane
            if unit < count:
                mine[i] = Pair(
                    pairs[unsafe_offset=2 * unit],
                    pairs[unsafe_offset=2 * unit + 1],
                )
            m = maximum(m, mine[i].m)
        m = lanes_reduce[greater](m)
        var scale = Self.S(m)
        var sums = Array[Float32, warps](fill=0)
        comptime for i in range(warps):
            sums[i] = lanes_reduce[total](mine[i].sum_over(scale))
        # The butterfly of as many lanes.
        comptime for bit in reversed(range(log2_ceil(warps))):
            comptime for i in range(1 << bit):
                sums[i] += sums[i + (1 << bit)]
        return Pair(m, sums[0])

    @staticmethod
    @inline(.always)
    def write(result: Target[DType.float32], row: Int, whole: Pair[]):
        write_pair[Self.exact](result, row, whole)


struct Products[of: DType, log: Bool](Sums):
    """What the gradients of a row's logits share: Σ y·dy, or of log_softmax Σ dy.

    Parameters:
        of: Dtype of the results and their gradients.
        log: Whether the results are logarithms of probabilities.
    """

    comptime dtype = Self.of
    comptime inputs = 2
    comptime tuned = Tuned.products()
    comptime width = Granules[Self.of].width
    comptime Whole = Pair[]

    var sum: Sum[DType.float32, Self.width]
    """The sum."""

    @inline(.always)
    def __init__(out self, factor: Float32):
        self.sum = Sum[DType.float32, Self.width]()

    @staticmethod
    @inline(.always)
    def filler() -> Scalar[Self.dtype]:
        return 0

    @staticmethod
    @inline(.always)
    def nothing() -> Pair[]:
        return Pair(0, 0)

    @inline(.always)
    def add[
        count: Int
    ](mut self, x: Self.Taken[count], other: Self.Taken[count]):
        comptime F = DType.float32
        var terms = SIMD[F, Self.width](0)
        comptime for j in range(count):
            terms += Gradient[Self.log, Self.exact].term(
                widened(x[j]), widened(other[j])
            )
        add[Self.exact](self.sum, terms)

    @inline(.always)
    def of_unit(self, shift: Int32, lane: Int) -> Pair[]:
        var chains = turned[LANES](
            self.sum.value - self.sum.excess, shift, lane
        )
        return Pair(lanes_reduce[total, LANES](chains.reduce_add()), Float32(0))

    @staticmethod
    @inline(.always)
    def merged[
        most: Int, //
    ](
        pairs: Array[Pair[], most],
        count: Int,
        scratch: Shared[Float32],
        thread: Int,
    ) -> Pair[]:
        var sum = pairs[0].m
        comptime for j in range(1, most):
            sum += pairs[j].m
        return Pair(
            team_reduce[Self.tuned.block_size, total](scratch, thread, sum),
            Float32(0),
        )

    @staticmethod
    @inline(.always)
    def write(result: Target[DType.float32], row: Int, whole: Pair[]):
        write_pair[Self.exact](result, row, whole)


struct Written[finish: Finish, exact: Bool](TrivialRegisterPassable):
    """What becomes of the elements of a row, once it is known what they sum to.

    Parameters:
        finish: What is written.
        exact: Of the scale of the sum; of gradients, whether they are to the accuracy of float32.
    """

    comptime G = Gradient[
        Self.finish == Finish.GRADIENT_OF_LOGARITHMS, Self.exact
    ]

    var m: Float32
    """The maximum, or the sum that a gradient takes."""
    var scale: Scale[Self.exact]
    """Of the exponentials."""
    var factor: Float32
    """What they are multiplied by, or ln Σ e^(x - m)."""

    @inline(.always)
    def __init__(out self, whole: Pair[]):
        self.m = whole.m
        self.scale = Scale[Self.exact](whole.m)
        self.factor = 1
        comptime if Self.finish == Finish.LOGARITHMS:
            self.factor = logarithm(whole.relative[Self.exact]())
        elif not Self.finish.is_gradient():
            self.factor = whole.reciprocal()

    @inline(.always)
    def of[
        width: SIMDLength, //
    ](
        self,
        x: SIMD[DType.float32, width],
        other: SIMD[DType.float32, width],
    ) -> SIMD[DType.float32, width]:
        """Returns results of elements of the first input, and of the second, if there is one.
        """
        comptime if Self.finish.is_gradient():
            return Self.G(self.m).of(x, other)
        elif Self.finish == Finish.LOGARITHMS:
            return (x - self.m) - self.factor
        else:
            return self.scale.exp(x) * self.factor
