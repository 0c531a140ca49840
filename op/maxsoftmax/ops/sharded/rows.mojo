"""What devices send each other of a row, and what they make of it."""

from std.sys import size_of
from std.utils.numerics import inf, nan, neg_inf

from ...io.rows import Source
from ...math.exponential import Unit, logarithm
from ...math.gradient import Gradient
from ...math.loss import LossOptions

comptime HEADER = 4
"""Integers of 64 bits before the numbers of rows of a loss: the shard's length, its first class, how many classes there are in all,
and what was chosen."""

comptime IGNORED = -1
"""What a target is told to be of a row that does not count."""

comptime WRONG = -2
"""What a target is told to be that is no class."""


struct Second:
    """What the second pass over a shard writes."""

    comptime PROBABILITIES = 0
    comptime LOGARITHMS = 1
    comptime OF_PROBABILITIES = 2
    """The gradient of logits, given probabilities."""
    comptime OF_LOGARITHMS = 3
    """The gradient of logits, given their logarithms."""


@fieldwise_init
struct Message[accum: DType](TrivialRegisterPassable):
    """What all devices sent of the losses of some rows: of each a header, then the pairs of all rows, then the terms of their
    losses.

    Parameters:
        accum: Dtype of the numbers.
    """

    comptime words = HEADER * 8 // size_of[Self.accum]()
    """Numbers that a header takes the place of."""

    var memory: Source[Self.accum]
    var devices: Int
    var step: Int
    """Numbers from one device to the next."""
    var rows: Int

    @inline(.always)
    def length(self, device: Int) -> Int64:
        """Returns how many classes a device has."""
        return self.memory.unsafe_offset(device * self.step).unsafe_bitcast[
            Int64
        ]()[]

    @inline(.always)
    def term(self, device: Int, row: Int) -> Scalar[Self.accum]:
        """Returns a device's terms of a row's loss."""
        return self.memory[
            unsafe_offset=device * self.step + Self.words + 2 * self.rows + row
        ]

    @inline(.always)
    def pair(self, row: Int) -> Source[Self.accum]:
        """Returns where the pair of a row is that the first device sent."""
        return self.memory.unsafe_offset(Self.words + 2 * row)

    @inline(.always)
    def loss(
        self,
        row: Int,
        target: Int64,
        options: LossOptions,
        m: Scalar[Self.accum],
        d: Scalar[Self.accum],
    ) -> Scalar[Self.accum]:
        """Returns the loss of a row: 0 if it does not count, NaN if its target is no class.

        Args:
            row: The row.
            target: Its class, counted over all devices.
            options: What a caller chose.
            m: The maximum of the whole row.
            d: Its Σ e^(x - m).
        """
        if Int(target) == options.ignored:
            return 0
        comptime F = DType.float64
        var classes = Int64(0)
        for device in range(self.devices):
            classes += self.length(device)
        # Of nothing but -inf the logarithm of the sum would be of nothing, too.
        if target < 0 or target >= classes or m == neg_inf[Self.accum]():
            return nan[Self.accum]()
        var even = options.smoothing / Float64(classes)
        var loss = logarithm(d).cast[F]()
        var start = Int64(0)
        for device in range(self.devices):
            var n = self.length(device)
            var weight = even * Float64(n)
            if target >= start and target < start + n:
                weight += 1 - options.smoothing
            start += n
            if weight == 0:
                continue
            var top = self.pair(row)[unsafe_offset=device * self.step]
            if top == neg_inf[Self.accum]():
                # A shard of nothing but -inf says nothing of its distance, which is infinite.
                loss += inf[F]()
            else:
                loss += self.term(device, row).cast[F]()
                loss += weight * (m - top).cast[F]()
        return loss.cast[Self.accum]()


@inline(.always)
def whole_pair[
    accum: DType, //
](first: Source[accum], devices: Int, step: Int) -> Tuple[
    Scalar[accum], Scalar[accum]
]:
    """Returns the pair (m, d) of a row, merged from those of all devices in their order.

    Parameters:
        accum: Dtype of the pairs.

    Args:
        first: Where the first device's is.
        devices: How many there are.
        step: Numbers from one device's to the next.
    """
    var m = first[]
    for device in range(1, devices):
        var top = first[unsafe_offset=device * step]
        # NaN stays, whatever follows.
        if top > m or top != top:
            m = top
    var unit = Unit(m)
    var one = unit.exp(m)
    var d = Float64(0)
    for device in range(devices):
        var top = first[unsafe_offset=device * step]
        var part = first[unsafe_offset=device * step + 1]
        if top != m:
            part *= unit.exp(top) / one
        d += part.cast[DType.float64]()
    if m == inf[accum]():
        d = nan[DType.float64]()
    return m, d.cast[accum]()


@inline(.always)
def whole_sum[
    accum: DType, //
](first: Source[accum], devices: Int, step: Int) -> Scalar[accum]:
    """Returns the sum of what all devices have of a row, in their order. Arguments are as of `whole_pair`.
    """
    var sum = Float64(0)
    for device in range(devices):
        sum += first[unsafe_offset=device * step].cast[DType.float64]()
    return sum.cast[accum]()


@inline(.always)
def own_target(
    target: Int64, start: Int, n: Int, classes: Int, ignored: Int
) -> Int64:
    """Returns a target as the kernels of a shard take it: counted from its first class, its length for one of another shard.

    Args:
        target: Counted over all shards.
        start: The first class of this one.
        n: How many it has.
        classes: How many there are in all.
        ignored: The target of rows that do not count.
    """
    if Int(target) == ignored:
        return IGNORED
    if target < 0 or target >= Int64(classes):
        return WRONG
    var place = target - Int64(start)
    return place if place >= 0 and place < Int64(n) else Int64(n)


@fieldwise_init
struct Finished[what: Int, accum: DType, rows: SIMDLength](
    TrivialRegisterPassable
):
    """What the second pass over a shard computes elements from.

    Parameters:
        what: One of `Second`.
        accum: The accumulator's dtype.
        rows: How many rows, one a lane.
    """

    comptime Values = SIMD[Self.accum, Self.rows]
    comptime log = Self.what == Second.OF_LOGARITHMS

    var unit: Unit[Self.accum, Self.rows]
    """What exponentials are counted in."""
    var first: Self.Values
    """What is subtracted: m, or the sum over the row."""
    var second: Self.Values
    """Of probabilities what they are divided by, of logarithms ln d."""

    @staticmethod
    @inline(.always)
    def of(
        numbers: Source[Self.accum],
        row: Int,
        count: Int,
        total: Int,
        devices: Int,
    ) -> Self:
        """Returns what neighbouring rows need, given what all devices sent.

        Args:
            numbers: Of each device the pairs of all rows, or their sums.
            row: The first of the rows.
            count: How many there are; lanes beyond are of no row.
            total: How many rows there are in all.
            devices: How many devices.
        """
        var first = Self.Values(0)
        var second = Self.Values(1)
        for lane in range(min(count, Int(Self.rows))):
            comptime if Self.what <= Second.LOGARITHMS:
                var pair = whole_pair(
                    numbers.unsafe_offset(2 * (row + lane)), devices, 2 * total
                )
                first[lane] = pair[0]
                second[lane] = pair[1]
            else:
                first[lane] = whole_sum(
                    numbers.unsafe_offset(row + lane), devices, total
                )
        var unit = Unit(first)
        comptime if Self.what == Second.PROBABILITIES:
            second *= unit.exp(first)
        elif Self.what == Second.LOGARITHMS:
            second = logarithm(second)
        return {unit, first, second}

    @inline(.always)
    def result[
        width: SIMDLength, //
    ](self, x: SIMD[Self.accum, width], other: SIMD[Self.accum, width]) -> SIMD[
        Self.accum, width
    ]:
        """Returns results.

        Parameters:
            width: As many as there are rows, or any number of elements of a single row.

        Args:
            x: Logits, or results.
            other: The gradients of results.
        """
        var first: type_of(x)
        var second: type_of(x)
        comptime if Self.rows == 1:
            first = self.first[0]
            second = self.second[0]
        else:
            first = rebind[type_of(x)](self.first)
            second = rebind[type_of(x)](self.second)
        comptime if Self.what == Second.PROBABILITIES:
            return self.unit.exp(x) / second
        elif Self.what == Second.LOGARITHMS:
            return (x - first) - second
        else:
            return Gradient[Self.log, True, Self.accum, Self.rows](
                self.first
            ).of(x, other)
