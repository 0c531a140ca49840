"""What becomes of rows: what is reduced of them, and what their elements, or they themselves, turn into."""

from std.utils.numerics import inf, isnan, nan, neg_inf

from ..gradient import Gradient
from ..loss import log_of_sum
from ..online import Logarithms, MaxSum, Normalizer, accumulator
from ..rows import Rows, Source, Target
from .memory import store


trait Operation(TrivialRegisterPassable):
    """An operation on rows. A sum over a row is kept as the d of a pair whose m is 0, which merges as a plain sum does.
    """

    comptime reduces: Bool
    """Whether anything is reduced of a row."""
    comptime has_max: Bool
    """Whether that is its (max, sum) pair, or the sum of `term`."""
    comptime by_row: Bool
    """Whether there is one result a row, which `finish` writes, or one an element."""
    comptime divides: Bool
    """Whether results are e^x / d, so that e^x may be kept."""
    comptime State[accum: DType, rows: SIMDLength]: TrivialRegisterPassable
    """What the results of neighbouring rows are computed from, once they are reduced."""

    @staticmethod
    def term[
        accum: DType, width: SIMDLength, //
    ](x: SIMD[accum, width], other: SIMD[accum, width]) -> SIMD[accum, width]:
        """Returns what elements add to the sum."""
        return x

    def state[
        accum: DType, rows: SIMDLength, //
    ](self, total: MaxSum[accum, rows], place: Place) -> Self.State[
        accum, rows
    ]:
        """Returns the state of rows, given their pairs."""
        ...

    def result[
        accum: DType, width: SIMDLength, //, rows: SIMDLength
    ](
        self,
        state: Self.State[accum, rows],
        x: SIMD[accum, width],
        other: SIMD[accum, width],
    ) -> SIMD[accum, width]:
        """Returns what elements turn into.

        Parameters:
            accum: The accumulator's accum.
            width: How many elements.
            rows: As many rows, or 1.

        Args:
            state: That of the rows.
            x: The elements.
            other: Those of the second tensor, where there is one.
        """
        return x

    def finish[
        accum: DType, rows: SIMDLength, //
    ](self, total: MaxSum[accum, rows], place: Place):
        """Writes what there is one of for each row, given the pairs of rows."""
        pass

    def correct[
        accum: DType, //, rows: SIMDLength
    ](self, state: Self.State[accum, rows], place: Place):
        """Writes the elements again that are not as `result` has them."""
        pass


@fieldwise_init
struct Place(TrivialRegisterPassable):
    """Which part of which rows."""

    var row: Int
    """The first of the rows."""
    var count: Int
    """How many there are; lanes beyond are of no row."""
    var start: Int
    """The first element of each."""
    var end: Int
    """The one after the last."""


@fieldwise_init
struct Softmax(Operation):
    """Probabilities: e^x / d."""

    comptime reduces = True
    comptime has_max = True
    comptime by_row = False
    comptime divides = True
    comptime State[accum: DType, rows: SIMDLength] = Normalizer[accum, rows]

    var masked: Bool
    """Whether a row of nothing but -inf gives 0, not NaN."""

    @inline(.always)
    def dividing[
        accum: DType, rows: SIMDLength, //
    ](self, total: MaxSum[accum, rows]) -> MaxSum[accum, rows]:
        """Returns pairs whose d is what exponentials are divided by."""
        var result = total
        if self.masked:
            var empty = total.m.eq(neg_inf[accum]()) & total.d.value.eq(0)
            result.d.value = empty.select(SIMD[accum, rows](1), result.d.value)
        return result

    @inline(.always)
    def state[
        accum: DType, rows: SIMDLength, //
    ](self, total: MaxSum[accum, rows], place: Place) -> Self.State[
        accum, rows
    ]:
        return self.dividing(total).normalizer()

    @inline(.always)
    def result[
        accum: DType, width: SIMDLength, //, rows: SIMDLength
    ](
        self,
        state: Self.State[accum, rows],
        x: SIMD[accum, width],
        other: SIMD[accum, width],
    ) -> SIMD[accum, width]:
        return state.probability(x)


@fieldwise_init
struct LogSoftmax(Operation):
    """Logarithms of probabilities: (x - m) - ln d."""

    comptime reduces = True
    comptime has_max = True
    comptime by_row = False
    comptime divides = False
    comptime State[accum: DType, rows: SIMDLength] = Logarithms[accum, rows]

    @inline(.always)
    def state[
        accum: DType, rows: SIMDLength, //
    ](self, total: MaxSum[accum, rows], place: Place) -> Self.State[
        accum, rows
    ]:
        return total.logarithms()

    @inline(.always)
    def result[
        accum: DType, width: SIMDLength, //, rows: SIMDLength
    ](
        self,
        state: Self.State[accum, rows],
        x: SIMD[accum, width],
        other: SIMD[accum, width],
    ) -> SIMD[accum, width]:
        return state.probability(x)


@fieldwise_init
struct SoftmaxGradient[log: Bool](Operation):
    """The gradient of logits, given the results of the forward op and, as the second tensor, their gradient.

    Parameters:
        log: Whether the results are logarithms of probabilities.
    """

    comptime reduces = True
    comptime has_max = False
    comptime by_row = False
    comptime divides = False
    comptime State[accum: DType, rows: SIMDLength] = Gradient[
        Self.log, True, accum, rows
    ]

    @staticmethod
    @inline(.always)
    def term[
        accum: DType, width: SIMDLength, //
    ](x: SIMD[accum, width], other: SIMD[accum, width]) -> SIMD[accum, width]:
        return Gradient[Self.log, True, accum].term(x, other)

    @inline(.always)
    def state[
        accum: DType, rows: SIMDLength, //
    ](self, total: MaxSum[accum, rows], place: Place) -> Self.State[
        accum, rows
    ]:
        return {total.d.value}

    @inline(.always)
    def result[
        accum: DType, width: SIMDLength, //, rows: SIMDLength
    ](
        self,
        state: Self.State[accum, rows],
        x: SIMD[accum, width],
        other: SIMD[accum, width],
    ) -> SIMD[accum, width]:
        return state.of(x, other)


struct Form(Equatable, TrivialRegisterPassable):
    """How the pairs of rows are written."""

    var value: Int

    comptime PAIRS = Self(0)
    """The m and the d of a row, and then those of the next."""
    comptime APART = Self(1)
    """All m, and then all d."""
    comptime LOGSUMEXP = Self(2)
    """As m + ln d, in the dtype of the logits."""

    @inline(.always)
    def __init__(out self, value: Int):
        self.value = value

    @inline(.always)
    def __eq__(self, other: Self) -> Bool:
        return self.value == other.value


@fieldwise_init
struct Statistics[dtype: DType](Operation):
    """What each row comes to: m and d = Σ e^(x - m), m being NaN where the maximum is +inf and there is a NaN as well.

    Parameters:
        dtype: The logits' dtype.
    """

    comptime reduces = True
    comptime has_max = True
    comptime by_row = True
    comptime divides = False
    comptime State[accum: DType, rows: SIMDLength] = SIMD[accum, rows]

    var y: Target[accumulator[Self.dtype]()]
    """Where that of row 0 is; of `dtype`, whatever its type says, where the form does."""
    var x: Source[Self.dtype]
    var rows: Rows
    var form: Form

    @inline(.always)
    def state[
        accum: DType, rows: SIMDLength, //
    ](self, total: MaxSum[accum, rows], place: Place) -> Self.State[
        accum, rows
    ]:
        return total.m

    def finish[
        accum: DType, rows: SIMDLength, //
    ](self, total: MaxSum[accum, rows], place: Place):
        var sums = total.relative()
        var count = self.rows.count()
        for lane in range(min(place.count, Int(rows))):
            var row = place.row + lane
            var m = total.m[lane]
            # d is NaN for either: only the logits tell whether the maximum was found among all of them.
            if m == inf[accum]() and self._has_nan(row):
                m = nan[accum]()
            var y = self.y.unsafe_bitcast[Scalar[accum]]()
            if self.form == Form.PAIRS:
                y[unsafe_offset=2 * row] = m
                y[unsafe_offset=2 * row + 1] = sums[lane]
            elif self.form == Form.APART:
                y[unsafe_offset=row] = m
                y[unsafe_offset=count + row] = sums[lane]
            else:
                store(
                    self.y.unsafe_bitcast[Scalar[Self.dtype]]().unsafe_offset(
                        row
                    ),
                    rebind[Scalar[accumulator[Self.dtype]()]](
                        log_of_sum(m, sums[lane])
                    ),
                    1,
                )

    def _has_nan(self, row: Int) -> Bool:
        """Returns whether there is a NaN in a row."""
        var x = self.x.unsafe_offset(self.rows.start(row))
        for i in range(self.rows.n):
            if isnan(x[unsafe_offset=i * self.rows.inner]):
                return True
        return False
