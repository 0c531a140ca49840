"""What becomes of rows: what is reduced of them, and what their elements, or they themselves, turn into."""

from std.utils.numerics import inf, isnan, nan, neg_inf

from ..math.gradient import Gradient
from ..math.online import Logarithms, MaxSum, Normalizer, accumulator
from ..io.rows import Rows, Source, Target


@fieldwise_init
struct Place(TrivialRegisterPassable):
    """Which part of which rows."""

    var row: Int
    """The first of the rows, all of which are neighbours."""
    var count: Int
    """How many there are; lanes beyond are of no row."""
    var first: Int
    """Where in memory the first element of the first row is."""
    var start: Int
    """The first of the elements."""
    var end: Int
    """The one after the last."""


trait Operation(TrivialRegisterPassable):
    """An operation on rows. A sum over a row is kept as the d of a pair whose m is the row's origin: pairs with the same m
    merge as plain sums do.
    """

    comptime accum: DType
    """Dtype of the arithmetic."""
    comptime lanes: SIMDLength
    """How many neighbouring rows are reduced side by side."""
    comptime reduces: Bool = True
    """Whether anything is reduced of a row."""
    comptime has_max: Bool = True
    """Whether that is its (max, sum) pair, or the sum of `term`."""
    comptime by_row: Bool = False
    """Whether there is one result a row, which `finish` writes, or one an element."""
    comptime divides: Bool = False
    """Whether results are e^x / d, so that e^x may be kept."""
    comptime State: TrivialRegisterPassable
    """What the results of rows are computed from, once they are reduced."""

    def origin(self, place: Place) -> SIMD[Self.accum, Self.lanes]:
        """Returns what `term` is told of each row."""
        return 0

    def term[
        n: SIMDLength, //
    ](
        self,
        x: SIMD[Self.accum, n],
        other: SIMD[Self.accum, n],
        origin: SIMD[Self.accum, n],
    ) -> SIMD[Self.accum, n]:
        """Returns what elements, and those of the second tensor, add to the sum.
        """
        return x

    def dividing(
        self, total: MaxSum[Self.accum, Self.lanes]
    ) -> MaxSum[Self.accum, Self.lanes]:
        """Returns pairs whose d is what exponentials are divided by."""
        return total

    def state(
        self, total: MaxSum[Self.accum, Self.lanes], place: Place
    ) -> Self.State:
        """Returns the state of rows, given their pairs."""
        ...

    def result[
        n: SIMDLength, //
    ](
        self,
        state: Self.State,
        x: SIMD[Self.accum, n],
        other: SIMD[Self.accum, n],
    ) -> SIMD[Self.accum, n]:
        """Returns what elements turn into: one of each row, or any number of a single row.
        """
        return x

    def finish(self, total: MaxSum[Self.accum, Self.lanes], place: Place):
        """Writes what there is one of for each row, given the pairs of rows."""
        pass

    def correct(self, state: Self.State, place: Place):
        """Writes the elements again that are not as `result` has them."""
        pass


@fieldwise_init
struct Softmax[dtype: DType, rows: SIMDLength](Operation):
    """Probabilities: e^x / d.

    Parameters:
        dtype: Dtype of the logits.
        rows: How many are side by side.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = Self.rows
    comptime divides = True
    comptime State = Normalizer[Self.accum, Self.lanes]

    var masked: Bool
    """Whether a row of nothing but -inf gives 0, not NaN."""

    @inline(.always)
    def dividing(
        self, total: MaxSum[Self.accum, Self.lanes]
    ) -> MaxSum[Self.accum, Self.lanes]:
        var result = total
        if self.masked:
            var empty = total.m.eq(neg_inf[Self.accum]()) & total.d.value.eq(0)
            result.d.value = empty.select(type_of(total.m)(1), result.d.value)
        return result

    @inline(.always)
    def state(
        self, total: MaxSum[Self.accum, Self.lanes], place: Place
    ) -> Self.State:
        return self.dividing(total).normalizer()

    @inline(.always)
    def result[
        n: SIMDLength, //
    ](
        self,
        state: Self.State,
        x: SIMD[Self.accum, n],
        other: SIMD[Self.accum, n],
    ) -> SIMD[Self.accum, n]:
        return state.probability(x)


@fieldwise_init
struct LogSoftmax[dtype: DType, rows: SIMDLength](Operation):
    """Logarithms of probabilities: (x - m) - ln d. Parameters are as of `Softmax`.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = Self.rows
    comptime State = Logarithms[Self.accum, Self.lanes]

    var masked: Bool
    """Whether a row of nothing but -inf gives -inf, not NaN."""

    @inline(.always)
    def state(
        self, total: MaxSum[Self.accum, Self.lanes], place: Place
    ) -> Self.State:
        var result = Self._logarithms(total)
        if self.masked:
            var empty = total.m.eq(neg_inf[Self.accum]()) & total.d.value.eq(0)
            result.m = empty.select(type_of(result.m)(0), result.m)
            result.log_d = empty.select(type_of(result.m)(0), result.log_d)
        return result

    # In place it would slow down what is around it: 64×64 float32 by a sixth.
    @staticmethod
    @inline(.never)
    def _logarithms(total: MaxSum[Self.accum, Self.lanes]) -> Self.State:
        return total.logarithms()

    @inline(.always)
    def result[
        n: SIMDLength, //
    ](
        self,
        state: Self.State,
        x: SIMD[Self.accum, n],
        other: SIMD[Self.accum, n],
    ) -> SIMD[Self.accum, n]:
        return state.probability(x)


@fieldwise_init
struct SoftmaxGradient[dtype: DType, rows: SIMDLength, log: Bool](Operation):
    """The gradient of logits, given the results of the forward op and, as the second tensor, their gradient.

    Parameters:
        dtype: Dtype of the tensors.
        rows: How many are side by side.
        log: Whether the results are logarithms of probabilities.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = Self.rows
    comptime has_max = False
    comptime State = Gradient[Self.log, True, Self.accum, Self.lanes]

    @inline(.always)
    def term[
        n: SIMDLength, //
    ](
        self,
        x: SIMD[Self.accum, n],
        other: SIMD[Self.accum, n],
        origin: SIMD[Self.accum, n],
    ) -> SIMD[Self.accum, n]:
        return Self.State.term(x, other)

    @inline(.always)
    def state(
        self, total: MaxSum[Self.accum, Self.lanes], place: Place
    ) -> Self.State:
        return {total.d.value}

    @inline(.always)
    def result[
        n: SIMDLength, //
    ](
        self,
        state: Self.State,
        x: SIMD[Self.accum, n],
        other: SIMD[Self.accum, n],
    ) -> SIMD[Self.accum, n]:
        return state.of(x, other)


@fieldwise_init
struct Statistics[dtype: DType, rows: SIMDLength](Operation):
    """What each row comes to: m and d = Σ e^(x - m), m being NaN where the maximum is +inf and there is a NaN as well.
    Parameters are as of `Softmax`.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = Self.rows
    comptime by_row = True
    comptime State = Bool

    var y: Target[Self.accum]
    """Where the m of row 0 goes."""
    var step: Int
    """From the m of a row to the next."""
    var apart: Int
    """From the m of a row to its d."""
    var x: Source[Self.dtype]
    var shape: Rows[]

    @inline(.always)
    def state(
        self, total: MaxSum[Self.accum, Self.lanes], place: Place
    ) -> Self.State:
        return True

    # In place it would slow down what is around it: 64×1024 float32 by a tenth.
    @inline(.never)
    def finish(self, total: MaxSum[Self.accum, Self.lanes], place: Place):
        var sums = total.relative()
        for lane in range(min(place.count, Int(Self.lanes))):
            var row = place.row + lane
            var m = total.m[lane]
            var d = sums[lane]
            # d is the same with NaN and without: only the logits tell whether the maximum was found among all of them.
            if abs(m) == inf[Self.accum]() and self._has_nan(
                place.first + lane
            ):
                m = nan[Self.accum]()
                d = m
            self.y[unsafe_offset=self.step * row] = m
            self.y[unsafe_offset=self.step * row + self.apart] = d

    def _has_nan(self, first: Int) -> Bool:
        """Returns whether there is a NaN in the row that starts there."""
        for i in range(self.shape.n):
            if isnan(self.x[unsafe_offset=first + i * self.shape.inner]):
                return True
        return False
