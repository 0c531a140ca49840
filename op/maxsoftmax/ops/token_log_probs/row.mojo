"""What is made of one row, given its (m, d, h)."""

from std.utils.numerics import nan

from ...io.rows import Rows, Source, Target
from ...math.exponential import logarithm
from ...math.loss import Targets
from ...math.online import accumulator

comptime SUMS = 3
"""How many accumulators there are of a row: m, d and h."""

comptime FAR = -10000
"""The logarithm of a probability that is 0 in every dtype."""


@fieldwise_init
struct Asked(TrivialRegisterPassable):
    """What a caller asks of each row."""

    var tokens: Targets
    """Those of row 0, then those of row 1 and so on."""
    var each: Int
    """How many there are of a row."""
    var temperature: Float64
    """What logits are divided by."""

    @inline(.always)
    def factor[dtype: DType](self) -> Scalar[dtype]:
        """Returns what logits are multiplied by."""
        return Scalar[dtype](1 / self.temperature)


@inline(.always)
def log_prob[
    dtype: DType, //
](
    x: Source[dtype],
    rows: Rows,
    row: Int,
    token: Int64,
    factor: Scalar[accumulator[dtype]()],
    sums: Source[accumulator[dtype]()],
) -> Scalar[accumulator[dtype]()]:
    """Returns ln p of a token; NaN if the row has no such token.

    Parameters:
        dtype: Dtype of the logits.

    Args:
        x: Logits.
        rows: How the memory is divided into rows.
        row: The row.
        token: The token.
        factor: What logits are multiplied by.
        sums: (m, d, h) of each row.
    """
    comptime accum = accumulator[dtype]()
    if token < 0 or token >= Int64(rows.n):
        return nan[accum]()
    var at = rows.start(row) + Int(token) * rows.inner
    var z = x[unsafe_offset=at].cast[accum]() * factor
    var m = sums[unsafe_offset=SUMS * row]
    return (z - m) - logarithm(sums[unsafe_offset=SUMS * row + 1])


@fieldwise_init
struct Terms[dtype: DType, width: SIMDLength = 1](TrivialRegisterPassable):
    """What the gradients of all logits of a row share, but for those of its tokens.

    Parameters:
        dtype: The accumulator's dtype.
        width: Number of rows, one a lane.
    """

    var m: SIMD[Self.dtype, Self.width]
    """The maximum."""
    var even: SIMD[Self.dtype, Self.width]
    """What p is multiplied by."""
    var slope: SIMD[Self.dtype, Self.width]
    """What p · (z - m) is multiplied by."""

    @inline(.always)
    def gradient[
        lanes: SIMDLength, //
    ](self, p: SIMD[Self.dtype, lanes], z: SIMD[Self.dtype, lanes]) -> SIMD[
        Self.dtype, lanes
    ]:
        """Returns the gradients of logits that are of no token.

        Parameters:
            lanes: As many as there are rows, or any number for a single row.

        Args:
            p: Their probabilities.
            z: The logits, divided by the temperature.
        """
        comptime V = SIMD[Self.dtype, lanes]
        var m: V
        var even: V
        var slope: V
        comptime if Self.width == 1:
            m = self.m[0]
            even = self.even[0]
            slope = self.slope[0]
        else:
            m = rebind[V](self.m)
            even = rebind[V](self.even)
            slope = rebind[V](self.slope)
        # Nothing times infinity is not wanted here.
        return p * max(z - m, V(FAR)).fma(slope, even)


@inline(.always)
def terms_of[
    dtype: DType, //
](
    tokens: Targets,
    each: Int,
    row: Int,
    n: Int,
    factor: Scalar[dtype],
    sums: Source[dtype],
    dlog_probs: Source[dtype],
    dentropy: Source[dtype],
    has_entropy: Bool,
) -> Terms[dtype]:
    """Returns those of a row; NaN if a token that it has not has a gradient.

    Parameters:
        dtype: The accumulator's dtype.

    Args:
        tokens: The tokens of all rows.
        each: How many of a row.
        row: The row.
        n: Its length.
        factor: What logits are multiplied by.
        sums: (m, d, h) of each row.
        dlog_probs: The gradients of the logarithms of all tokens.
        dentropy: The gradient of each row's entropy.
        has_entropy: Whether there is one.
    """
    var total = Scalar[dtype](0)
    for i in range(row * each, (row + 1) * each):
        var token = tokens[i]
        var gradient = dlog_probs[unsafe_offset=i]
        if token >= 0 and token < Int64(n):
            total += gradient
        elif gradient != 0:
            total = nan[dtype]()
    var of_row = sums.unsafe_offset(SUMS * row)
    var slope = Scalar[dtype](0)
    if has_entropy:
        slope = dentropy[unsafe_offset=row]
        var log_d = logarithm(of_row[unsafe_offset=1])
        total += slope * (of_row[unsafe_offset=2] - log_d)
    return {of_row[], -total * factor, -slope * factor}


@inline(.always)
def of_token[
    dtype: DType, //
](
    tokens: Targets,
    each: Int,
    i: Int,
    factor: Scalar[dtype],
    dlog_probs: Source[dtype],
) -> Scalar[dtype]:
    """Returns what the gradient of a token's logit has beside that of others: of all places of the row that name the token.

    Parameters:
        dtype: The accumulator's dtype.

    Args:
        tokens: The tokens of all rows.
        each: How many of a row.
        i: One of the places, counted through all rows.
        factor: What logits are multiplied by.
        dlog_probs: The gradients of the logarithms of all tokens.
    """
    var total = Scalar[dtype](0)
    var first = i // each * each
    for j in range(first, first + each):
        if tokens[j] == tokens[i]:
            total += dlog_probs[unsafe_offset=j]
    return total * factor
