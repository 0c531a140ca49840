"""What label smoothing needs of a row beside its pair, in the same read: how far its elements are below the maximum."""

from std.utils.numerics import inf, neg_inf
from max.gpu import WARP_SIZE

from ..io.rows import Source, Target
from ..io.widening import widened
from .hardware.pair import Pair
from .hardware.team import team_reduce, total
from .hardware.tree_reduction import Shared
from .hardware.warp_reduction import lanes_reduce
from .partition.granules import turned
from .partition.pair import write_pair
from .streaming_operations import Exponentials, LANES, Sums
from .tuning import Tuned

comptime NUMBERS = 4
"""How many numbers are left of a row."""

comptime MOST = 1 << 24
"""Most elements of a row: as far as float32 counts."""


@fieldwise_init
struct Distance(TrivialRegisterPassable):
    """What a part of a row sums to."""

    var pair: Pair[]
    """The maximum and the sum of exponentials."""
    var below: Float32
    """Σ (m - x) of all elements but those of -inf."""
    var count: Float32
    """How many these are."""


struct Distances[of: DType](Sums):
    """The pair of a row, and the sum of what its elements are below the maximum.
    """

    comptime Exponents = Exponentials[Self.of, True]
    comptime dtype = Self.of
    comptime tuned = Tuned.distances()
    comptime width = Self.Exponents.width
    comptime Whole = Distance

    var exponentials: Self.Exponents
    """The pair."""
    var origin: Float32
    """The maximum of the first vectors: what is below it cancels nothing that counts."""
    var sum: SIMD[DType.float32, Self.width]
    """Σ (x - origin) of all elements but those of -inf."""
    var count: Float32
    """How many these are."""

    @inline(.always)
    def __init__(out self, factor: Float32):
        self.exponentials = Self.Exponents(factor)
        self.origin = neg_inf[DType.float32]()
        self.sum = 0
        self.count = 0

    @staticmethod
    @inline(.always)
    def nothing() -> Distance:
        return Distance(Self.Exponents.nothing(), 0, 0)

    @inline(.always)
    def add[
        count: Int
    ](mut self, x: Self.Taken[count], other: Self.Taken[count]):
        comptime F = DType.float32
        comptime nothing = neg_inf[F]()
        self.exponentials.add(x, other)
        if self.origin == nothing:
            self.origin = self.exponentials.m
        var terms = SIMD[F, Self.width](0)
        comptime for j in range(count):
            terms += widened(x[j]) - self.origin
        self.count += Float32(count * Self.width)
        if terms.reduce_min() == nothing:
            # Masked elements, or the end of the row.
            terms = 0
            comptime for j in range(count):
                var values = widened(x[j])
                var masked = values.eq(nothing)
                terms += masked.select(
                    SIMD[F, Self.width](0), values - self.origin
                )
                self.count -= masked.cast[F]().reduce_add()
        self.sum += terms

    @inline(.always)
    def of_unit(self, shift: Int32, lane: Int) -> Distance:
        var chains = turned[LANES](self.sum, shift, lane)
        var sum = lanes_reduce[total, LANES](chains.reduce_add())
        var count = lanes_reduce[total, LANES](self.count)
        var below = Float32(0)
        if count != 0:
            below = (self.exponentials.m - self.origin).fma(count, -sum)
        return Distance(self.exponentials.of_unit(shift, lane), below, count)

    @staticmethod
    @inline(.always)
    def merged[
        most: Int, //
    ](
        pairs: Array[Distance, most],
        count: Int,
        scratch: Shared[Float32],
        thread: Int,
    ) -> Distance:
        comptime size = Self.tuned.block_size
        comptime warps = size // WARP_SIZE
        var of_pairs = Array[Pair[], most](fill=Self.Exponents.nothing())
        comptime for j in range(most):
            of_pairs[j] = pairs[j].pair
        var pair = Self.Exponents.merged(of_pairs, count, scratch, thread)
        var below = Float32(0)
        var elements = Float32(0)
        comptime for j in range(most):
            if pairs[j].count != 0:
                below += (pair.m - pairs[j].pair.m).fma(
                    pairs[j].count, pairs[j].below
                )
                elements += pairs[j].count
        return Distance(
            pair,
            team_reduce[size, total](
                scratch.unsafe_offset(2 * warps), thread, below
            ),
            team_reduce[size, total](
                scratch.unsafe_offset(3 * warps), thread, elements
            ),
        )

    @staticmethod
    @inline(.always)
    def write(result: Target[DType.float32], row: Int, whole: Distance):
        var to = result.unsafe_offset(NUMBERS * row)
        write_pair[Self.exact](to, 0, whole.pair)
        to[unsafe_offset=2] = whole.below
        to[unsafe_offset=3] = whole.count


@inline(.always)
def sum_below[accum: DType, //](of_row: Source[accum], n: Int) -> Scalar[accum]:
    """Returns the sum of m - x over a row.

    Args:
        of_row: What `Distances` wrote of it.
        n: Its length.
    """
    if of_row[unsafe_offset=3] != Scalar[accum](n):
        # An element is -inf.
        return inf[accum]()
    return of_row[unsafe_offset=2]
