"""The threshold of a row, and the steps to it: what all kernels of sparsemax share."""

from ...cpu.lanes import fold_sum

comptime MOST_STEPS = 128
"""Steps after which the threshold stands, whatever it is: twice as many as f and its slope leave room for in float64."""


@inline(.always)
def positive[
    dtype: DType, width: SIMDLength, //
](values: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns the values that are above 0 or NaN, and 0 for the rest.

    Parameters:
        dtype: Dtype of the values.
        width: How many.
    """
    return values.le(0).select(SIMD[dtype, width](0), values)


struct Threshold[dtype: DType, rows: SIMDLength](TrivialRegisterPassable):
    """What is known of the thresholds of rows.

    Parameters:
        dtype: The accumulator's dtype.
        rows: Number of rows, one a lane.
    """

    comptime Values = SIMD[Self.dtype, Self.rows]

    var high: Self.Values
    """The threshold, rounded."""
    var low: Self.Values
    """What rounding took of it: of a row of 2^20 that are above it, it would take a percent of their sum."""
    var count: SIMD[DType.int64, Self.rows]
    """How many elements were above the last one."""
    var guess: SIMD[DType.int64, Self.rows]
    """How many there are if this is already the one that is looked for; -1 if nobody knows."""
    var stands: SIMD[DType.bool, Self.rows]
    """Whether this is the one that is looked for."""

    @inline(.always)
    def __init__(out self):
        """The lower bound, and no step yet."""
        self.high = -1
        self.low = 0
        self.count = Int64.MAX
        self.guess = -1
        self.stands = SIMD[DType.bool, Self.rows](fill=False)

    @inline(.always)
    def excess[
        width: SIMDLength, //
    ](self, z: SIMD[Self.dtype, width]) -> SIMD[Self.dtype, width]:
        """Returns by how much elements exceed the threshold.

        Parameters:
            width: As many as there are rows, or any number of elements of a single row.

        Args:
            z: Logits, less the maximum of their row.

        Returns:
            The difference, negative below it.
        """
        comptime if Self.rows == 1:
            return (z - self.high[0]) - self.low[0]
        else:
            return (z - rebind[type_of(z)](self.high)) - rebind[type_of(z)](
                self.low
            )

    @inline(.always)
    def step(mut self, sum: Self.Values, count: SIMD[DType.int64, Self.rows]):
        """Takes a step, where the threshold does not stand yet.

        Args:
            sum: Σ of what elements exceed the threshold by.
            count: How many do.
        """
        # To the mean of what is above, and down by as much as leaves 1: of more than 2^24 the difference of the two may round
        # to 1, which is too much.
        var total = count.cast[Self.dtype]()
        var step = sum / total
        var mean = self.high + step
        var rest = self.low + (((self.high - mean) + step) - 1 / total)
        var high = mean + rest
        var low = rest - (high - mean)
        self.high = self.stands.select(self.high, high)
        self.low = self.stands.select(self.low, low)
        # The same elements are above it as before: this step only made up for rounding.
        self.stands |= count.ge(self.count) | count.eq(self.guess)
        self.count = count
        self.guess = -1

    @inline(.always)
    def go_on(mut self):
        """Makes the threshold of some elements of the rows, the largest among them, the first that is tried for all.

        It is not above that of all. If no others are above it, it is that.
        """
        self.guess = self.count
        self.count = Int64.MAX
        self.stands = SIMD[DType.bool, Self.rows](fill=False)


@fieldwise_init
struct Support[dtype: DType](TrivialRegisterPassable):
    """The elements of a part of a row that are above 0, or above its threshold.

    Parameters:
        dtype: The accumulator's dtype.
    """

    var sum: Scalar[Self.dtype]
    """What they sum to."""
    var count: Int64
    """How many they are."""


@inline(.always)
def merged[
    dtype: DType
](a: Support[dtype], b: Support[dtype]) -> Support[dtype]:
    """Returns the support of two parts of a row.

    Parameters:
        dtype: The accumulator's dtype.
    """
    return {a.sum + b.sum, a.count + b.count}


@inline(.always)
def threshold_of[
    dtype: DType, width: SIMDLength, //
](z: SIMD[dtype, width]) -> Threshold[dtype, 1]:
    """Returns the threshold of a row of so many elements, less their maximum.
    """
    var threshold = Threshold[dtype, 1]()
    for _ in range(MOST_STEPS):
        var excess = threshold.excess(z)
        threshold.step(
            fold_sum[1](positive(excess)),
            Int64(Int(excess.gt(0).reduce_bit_count())),
        )
        if threshold.stands:
            break
    return threshold


@inline(.always)
def mean_of[dtype: DType, //](found: Support[dtype]) -> Scalar[dtype]:
    """Returns the mean over a support; anything where there is none.

    Parameters:
        dtype: The accumulator's dtype.
    """
    return found.sum / found.count.cast[dtype]()


@inline(.always)
def term[
    dtype: DType, width: SIMDLength, //
](y: SIMD[dtype, width], dy: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns what elements add to the sum of gradients over the support; NaN for NaN, so that its row is.

    Parameters:
        dtype: The accumulator's dtype.
        width: How many.

    Args:
        y: Results of the forward op.
        dy: Their gradient.
    """
    return gradient_where(y, dy + (y - y))


@inline(.always)
def gradient_where[
    dtype: DType, width: SIMDLength, //
](y: SIMD[dtype, width], values: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns the values where `y` is above 0 or NaN, and 0 elsewhere.

    Parameters:
        dtype: The accumulator's dtype.
        width: How many.

    Args:
        y: Results of the forward op.
        values: As many values.
    """
    return y.le(0).select(SIMD[dtype, width](0), values)
