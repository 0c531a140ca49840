"""Logits as attention has them, of a plain tensor: (x · scale + mask) / temperature, and a sink for each row."""

from std.sys import size_of
from std.utils import IndexList
from std.utils.numerics import inf, neg_inf

from ..math.online import accumulator
from ..io.rows import Rows, Source, VECTOR_BYTES

comptime RANK = 6
"""Dimensions of the tensor: four, the last of them the queries', the axis of the softmax, and what is after it."""

comptime AXIS = 4
"""The axis of the softmax."""


struct Kind(Equatable, TrivialRegisterPassable):
    """What an operand is."""

    var value: Int

    comptime NOTHING = Self(0)
    """Not there."""
    comptime WIDE = Self(1)
    """A tensor of accumulators."""
    comptime NARROW = Self(2)
    """A tensor of the dtype of the logits."""
    comptime BOOL = Self(3)
    """A tensor of bools: False where an element takes no part."""
    comptime NUMBER = Self(4)
    """A number, the same for all elements."""

    @inline(.always)
    def __init__(out self, value: Int):
        self.value = value

    @inline(.always)
    def __eq__(self, other: Self) -> Bool:
        return self.value == other.value

    @inline(.always)
    def bytes[dtype: DType](self) -> Int:
        """Returns how many an element has of a tensor beside logits of `dtype`.
        """
        if self == Self.BOOL:
            return 1
        return (
            size_of[dtype]() if self
            == Self.NARROW else size_of[accumulator[dtype]()]()
        )


@fieldwise_init
struct Operand[dtype: DType](TrivialRegisterPassable):
    """What logits are scaled, masked or divided by, or what is added to their denominator.

    Parameters:
        dtype: Dtype of the logits.
    """

    comptime accum = accumulator[Self.dtype]()

    var kind: Kind
    """What it is."""
    var address: Source[DType.uint8]
    """Where its first element is, of a tensor."""
    var number: Scalar[Self.accum]
    """The number."""
    var strides: IndexList[RANK]
    """From one element to the next along each dimension, in elements; 0 where it is broadcast."""

    @staticmethod
    def of(number: Float64) -> Self:
        """Returns a number."""
        return {
            Kind.NUMBER,
            Source[DType.uint8](unsafe_from_address=1),
            number.cast[Self.accum](),
            IndexList[RANK](0),
        }

    @staticmethod
    def of_nothing() -> Self:
        """Returns what is not there."""
        var result = Self.of(0)
        result.kind = Kind.NOTHING
        return result

    def is_known(self) -> Bool:
        """Returns whether it is known without reading memory what it is."""
        return self.kind == Kind.NOTHING or self.kind == Kind.NUMBER

    @inline(.always)
    def number_or(self, nothing: Scalar[Self.accum]) -> Scalar[Self.accum]:
        """Returns the number, `nothing` if it is none."""
        return self.number if self.kind == Kind.NUMBER else nothing

    @inline(.always)
    def place(self, at: IndexList[RANK]) -> Int:
        """Returns where in its tensor the element is beside that of the logits at `at`.
        """
        var place = 0
        comptime for i in range(RANK):
            place += at[i] * self.strides[i]
        return place

    @inline(.always)
    def load[
        width: Int, last: Int, mask: Bool = False
    ](self, at: IndexList[RANK]) -> SIMD[Self.accum, width]:
        """Returns its elements for neighbours along a dimension.

        Parameters:
            width: How many.
            last: The dimension.
            mask: Whether it may be of bools, which become 0 and -inf.

        Args:
            at: Where the first is.
        """
        if self.kind == Kind.NUMBER:
            return SIMD[Self.accum, width](self.number)
        var place = self.place(at)
        comptime if mask:
            if self.kind == Kind.BOOL:
                var takes = self._load[DType.uint8, width](
                    place, self.strides[last]
                )
                return takes.ne(0).select(
                    SIMD[Self.accum, width](0),
                    SIMD[Self.accum, width](neg_inf[Self.accum]()),
                )
        comptime if Self.dtype != Self.accum:
            if self.kind == Kind.NARROW:
                return self._load[Self.dtype, width](
                    place, self.strides[last]
                ).cast[Self.accum]()
        return self._load[Self.accum, width](place, self.strides[last])

    @inline(.always)
    def _load[
        of: DType, width: Int
    ](self, place: Int, stride: Int) -> SIMD[of, width]:
        var first = self.address.unsafe_bitcast[Scalar[of]]().unsafe_offset(
            place
        )
        comptime if width > 1:
            if stride == 1:
                return first.unsafe_load[width=width, alignment=size_of[of]()]()
            if stride != 0:
                var values = SIMD[of, width]()
                comptime for i in range(width):
                    values[i] = first[unsafe_offset=i * stride]
                return values
        return SIMD[of, width](first[])


@inline(.always)
def place_of(at: IndexList[RANK], shape: IndexList[RANK]) -> Int:
    """Returns which element of row-major memory is at `at`."""
    var place = at[0]
    comptime for i in range(1, RANK):
        place = place * shape[i] + at[i]
    return place


@inline(.always)
def spread[
    rank: Int, //, axis: Int
](values: IndexList[rank], filler: Int) -> IndexList[RANK]:
    """Returns one value for each of the dimensions of `Forms`, of those of a tensor.

    Parameters:
        rank: Dimensions of the tensor.
        axis: The axis of its softmax, counted from 0, with at most `AXIS` before it and one after it.

    Args:
        values: One for each of its dimensions.
        filler: What the others have.
    """
    comptime assert axis <= AXIS and rank - axis <= RANK - AXIS
    var result = IndexList[RANK](filler)
    comptime for i in range(rank):
        result[AXIS - axis + i] = values[i]
    return result


@fieldwise_init
struct Class(Equatable, TrivialRegisterPassable):
    """What forms may be, for kernels that are made for less than all of them.
    """

    var value: Int

    comptime SCALED = Self(0)
    """Numbers as scale and temperature, whose quotient is positive and finite, and nothing else."""
    comptime CUT = Self(3)
    """The same, but causal, or with a sink."""
    comptime HIDDEN = Self(4)
    """The same, and a mask of bools whose elements lie one after the other."""
    comptime ROWS = Self(6)
    """Any scales and temperatures that are the same along each row; maybe causal, or with a sink."""
    comptime FACTORS = Self(7)
    """Any scales and temperatures that are the same along each row, and nothing else: more than `SCALED`, less than `ROWS`."""
    comptime MASKED_FACTORS = Self(8)
    """The same, and maybe a mask of bools whose elements lie one after the other."""
    comptime MASKED = Self(1)
    """Scales and temperatures that are the same along each row, and a mask whose elements lie one after the other, or that is the same along
    each row."""
    comptime BIASED = Self(5)
    """Any scales and temperatures that are the same along each row, and a mask of floats whose elements lie one after the other; nothing else."""
    comptime BIASED_NARROW = Self(11)
    """The same with a mask of the dtype of the logits, which is shorter than accumulators."""
    comptime LONG = Self(9)
    """`BIASED` ones of rows that are the whole GPU's: logits are made as they are loaded. The mask is of accumulators."""
    comptime LONG_NARROW = Self(10)
    """The same of `BIASED_NARROW` ones: a branch for each vector would have the next loads wait for this one."""
    comptime ANY = Self(2)
    """Anything."""

    @inline(.always)
    def __eq__(self, other: Self) -> Bool:
        return self.value == other.value

    def is_scaled(self) -> Bool:
        """Returns whether a number that elements are multiplied by is all that is made of those that take part.
        """
        return self in (
            Self.SCALED,
            Self.CUT,
            Self.HIDDEN,
            Self.ROWS,
            Self.FACTORS,
            Self.MASKED_FACTORS,
            Self.BIASED,
        )

    def is_signed(self) -> Bool:
        """Returns whether this number may be negative or 0, and another one for each row.
        """
        return self in (
            Self.ROWS,
            Self.FACTORS,
            Self.MASKED_FACTORS,
            Self.BIASED,
        )

    def may_hide(self) -> Bool:
        """Returns whether there may be a mask of bools beside this number."""
        return self == Self.HIDDEN or self == Self.MASKED_FACTORS

    def is_alone(self) -> Bool:
        """Returns whether it is neither causal nor has a sink."""
        return self in (
            Self.SCALED,
            Self.FACTORS,
            Self.MASKED_FACTORS,
            Self.BIASED,
            Self.LONG,
            Self.LONG_NARROW,
        )

    def is_long(self) -> Bool:
        """Returns whether logits are made as they are loaded."""
        return self == Self.LONG or self == Self.LONG_NARROW

    def has_bias(self) -> Bool:
        """Returns whether there is a mask of floats for certain."""
        return self == Self.BIASED or self == Self.BIASED_NARROW

    def may_be(self, other: Self) -> Bool:
        """Returns whether forms that are known to be of this class may be of `other`. Those that are known to have a mask of floats, and no more than that, are called
        `BIASED` or `BIASED_NARROW`; those that have one of bools are `MASKED`, or narrower.
        """
        return (
            self == Self.ANY
            or self == other
            or (self.has_bias() and other in (Self.MASKED, Self.BIASED))
            or (self == Self.BIASED and other == Self.LONG)
            or (self == Self.BIASED_NARROW and other == Self.LONG_NARROW)
        )


@fieldwise_init
struct Sharing(TrivialRegisterPassable):
    """Rows that have the same mask."""

    var count: Int
    """How many there are of each mask."""
    var distance: Int
    """How many rows there are from one to the next."""


@fieldwise_init
struct Forms[dtype: DType](TrivialRegisterPassable):
    """What is made of logits before they are normalized.

    Parameters:
        dtype: Dtype of the logits.
    """

    var shape: IndexList[RANK]
    """The shape of the logits."""
    var causal: Bool
    """Whether an element of the axis before that of the softmax, a query, sees only what is not after it."""
    var beyond: Int
    """How many elements after its own index it sees then: as `from_end` says, if both are counted from the end."""
    var masked: Bool
    """Whether a row of nothing but -inf gives 0, not NaN."""
    var scale: Operand[Self.dtype]
    """What logits are multiplied by."""
    var mask: Operand[Self.dtype]
    """What is then added to them."""
    var temperature: Operand[Self.dtype]
    """What they are then divided by."""
    var sink: Operand[Self.dtype]
    """One more logit a row, in the denominator only."""

    @staticmethod
    def of_nothing(rows: Rows) -> Self:
        """Returns forms that leave logits as they are."""
        var nothing = Operand[Self.dtype].of_nothing()
        return {
            {1, 1, 1, rows.outer, rows.n, rows.inner},
            False,
            0,
            False,
            nothing,
            nothing,
            nothing,
            nothing,
        }

    @staticmethod
    @inline(.always)
    def from_end(shape: IndexList[RANK]) -> Int:
        """Returns how many elements after its own index the first query sees, where the last one sees all of them.
        """
        return shape[AXIS] - shape[AXIS - 1]

    def is_empty(self) -> Bool:
        """Returns whether there are no logits."""
        var count = 1
        comptime for i in range(RANK):
            count *= self.shape[i]
        return count == 0

    @inline(.always)
    def length(self, at: IndexList[RANK]) -> Int:
        """Returns how many elements of the row that `at` is in take part: from there on, all are -inf.
        """
        var n = self.shape[AXIS]
        if not self.causal:
            return n
        return max(0, min(n, at[AXIS - 1] + 1 + self.beyond))

    @inline(.always)
    def sinks[
        width: Int, last: Int
    ](self, at: IndexList[RANK]) -> SIMD[accumulator[Self.dtype](), width]:
        """Returns the additional logits of neighbours along a dimension, -inf if there are none; parameters and arguments are
        as of `made`.
        """
        comptime accum = accumulator[Self.dtype]()
        if self.sink.kind == Kind.NOTHING:
            return SIMD[accum, width](neg_inf[accum]())
        return self.sink.load[width, last](at)

    def factor(self) -> Scalar[accumulator[Self.dtype]()]:
        """Returns what logits are multiplied by, of numbers as scale and temperature.
        """
        return self.scale.number_or(1) / self.temperature.number_or(1)

    def are_numbers(self) -> Bool:
        """Returns whether scale and temperature are numbers, or not there."""
        return self.scale.is_known() and self.temperature.is_known()

    def have_factor(self) -> Bool:
        """Returns whether they are, and all logits are multiplied by a positive and finite number.
        """
        var factor = self.factor()
        return (
            self.are_numbers() and factor > 0 and factor < inf[factor.dtype]()
        )

    def scaled(self) -> Self:
        """Returns the same, of numbers as scale and temperature, as a scale alone; what masks of floats are multiplied by is the number that
        the temperature has then.
        """
        var result = self
        if self.are_numbers():
            result.scale.kind = Kind.NUMBER
            result.scale.number = self.factor()
            result.temperature = Operand[Self.dtype].of_nothing()
            result.temperature.number = 1 / self.temperature.number_or(1)
        return result

    def are_alone(self) -> Bool:
        """Returns whether they are neither causal nor have a sink."""
        return self.sink.kind == Kind.NOTHING and not self.causal

    def are(self) -> Class:
        """Returns which forms there are, of several classes the narrowest but those of factors (see `are_masked_factors`), for which there are not kernels for all lengths.
        """
        if (
            self.scale.strides[AXIS] != 0
            or self.temperature.strides[AXIS] != 0
            or self.mask.strides[AXIS] not in (0, 1)
            # The kernels of the other classes count rows in 32 bits.
            or Rows.of[AXIS](self.shape).count() > Int(UInt32.MAX)
        ):
            return Class.ANY
        var scaled = self.have_factor()
        if self.mask.kind != Kind.NOTHING:
            return Class.HIDDEN if self._hide() and scaled else Class.MASKED
        if not scaled:
            return Class.ROWS
        return Class.SCALED if self.are_alone() else Class.CUT

    def _hide(self) -> Bool:
        """Returns whether there is a mask of bools whose elements lie one after the other.
        """
        return self.mask.kind == Kind.BOOL and self.mask.strides[AXIS] == 1

    def are_masked_factors(self) -> Bool:
        """Returns whether they are `MASKED_FACTORS`."""
        return (
            self.are() != Class.ANY
            and self.are_alone()
            and (self.mask.kind == Kind.NOTHING or self._hide())
        )

    def are_biased(self) -> Bool:
        """Returns whether they are `BIASED`."""
        return (
            self.are() == Class.MASKED
            and self.are_alone()
            and self.mask.strides[AXIS] == 1
            and self.mask.kind != Kind.BOOL
        )

    @inline(.always)
    def have_one_mask(self) -> Bool:
        """Returns whether all rows along the axis have the same mask."""
        var apart = 0
        comptime for i in range(AXIS):
            apart |= self.mask.strides[i]
        return apart == 0

    @inline(.always)
    def have_aligned_mask(self, x: Source[Self.dtype]) -> Bool:
        """Returns whether as many elements of the mask of long ones are aligned, beside those of x that are, as 16 bytes hold accumulators.

        - `x`: Where the logits are.
        """
        var bytes = self.mask.kind.bytes[Self.dtype]()  # A power of two.
        var width = VECTOR_BYTES // size_of[accumulator[Self.dtype]()]()
        var distances = self.shape[AXIS]
        comptime for i in range(AXIS):
            distances |= self.mask.strides[i]
        return (
            Int(x) % (width * size_of[Self.dtype]()) == 0
            and Int(self.mask.address) & (width * bytes - 1) == 0
            and distances % width == 0
        )

    def sharing(self) -> Sharing:
        """Returns which rows along the axis have the same mask, of neighbouring dimensions in which it is broadcast those with the most rows.
        """
        var result = Sharing(1, 1)
        var count = 1
        var distance = 1
        var before = 1
        comptime for i in reversed(range(AXIS)):
            if self.mask.strides[i] == 0 or self.shape[i] == 1:
                count *= self.shape[i]
                if count > result.count:
                    result = {count, distance}
            else:
                count = 1
                distance = before * self.shape[i]
            before *= self.shape[i]
        return result

    @inline(.always)
    def made[
        width: Int, last: Int
    ](
        self,
        elements: SIMD[accumulator[Self.dtype](), width],
        at: IndexList[RANK],
    ) -> SIMD[accumulator[Self.dtype](), width]:
        """Returns what is made of neighbours along a dimension.

        Parameters:
            width: How many.
            last: The dimension, after which there is no other.

        Args:
            elements: The neighbours.
            at: Where the first is.
        """
        var z = elements
        if self.scale.kind != Kind.NOTHING:
            z *= self.scale.load[width, last](at)
        if self.mask.kind != Kind.NOTHING and not (self.mask.kind == Kind.BOOL):
            z += self.mask.load[width, last, True](at)
        if self.temperature.kind != Kind.NOTHING:
            z /= self.temperature.load[width, last](at)
        if self.mask.kind == Kind.BOOL:
            var bias = self.mask.load[width, last, True](at)
            z = bias.eq(0).select(z, bias)
        return z
