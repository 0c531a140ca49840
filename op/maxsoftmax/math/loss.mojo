"""The cross entropy of one row of logits, and its gradient, given the row's (max, sum) pair."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.utils.numerics import inf, nan, neg_inf

from .exponential import Unit, logarithm
from ..io.rows import Source


struct Reduction(Equatable, TrivialRegisterPassable):
    """What becomes of the losses of all rows."""

    var value: Int

    comptime NONE = Self(0)
    """One loss a row."""
    comptime SUM = Self(1)
    """Their sum."""
    comptime MEAN = Self(2)
    """Their mean over the rows that count."""

    @inline(.always)
    def __init__(out self, value: Int):
        self.value = value

    @inline(.always)
    def __eq__(self, other: Self) -> Bool:
        return self.value == other.value


@fieldwise_init
struct LossOptions(TrivialRegisterPassable):
    """What a caller chooses of a loss."""

    var ignored: Int
    """The class of rows that do not count."""
    var smoothing: Float64
    """Share of the target that is spread over all classes, from 0 to 1."""
    var reduction: Reduction
    """What becomes of the losses."""
    var is_counted: Bool
    """Whether behind the pairs of all rows there is another number: how many rows count, for the gradient of a mean."""
    var classes: Int
    """How many classes whole rows have, of which these are a shard; 0 if these are all. A target counts from the shard's
    first class: one past its last is a class of another shard, and one below 0 is none."""


struct Smoothing[dtype: DType](DevicePassable, TrivialRegisterPassable):
    """How much of a target is spread over all classes, and how many these are.

    Parameters:
        dtype: The accumulator's dtype.
    """

    comptime device_type: AnyType = Self

    var share: Scalar[Self.dtype]
    """What is spread."""
    var rest: Scalar[Self.dtype]
    """What the target keeps for itself."""
    var classes: Int64
    """How many classes a whole row has."""
    var is_shard: Bool
    """Whether there are others beside those that are here."""

    @inline(.always)
    def __init__(out self, options: LossOptions, n: Int):
        """What a caller chose, for rows of `n` classes, or for shards of them.
        """
        self.share = Scalar[Self.dtype](options.smoothing)
        self.rest = Scalar[Self.dtype](1 - options.smoothing)
        self.is_shard = options.classes > 0
        self.classes = Int64(options.classes if self.is_shard else n)

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Returns what the driver calls the type."""
        return "Smoothing"


@fieldwise_init
struct Targets(DevicePassable, TrivialRegisterPassable):
    """The class of each row, in integers of 32 or 64 bits."""

    comptime device_type: AnyType = Self

    var address: Source[DType.int32]
    """Where that of row 0 is."""
    var is_wide: Bool
    """Whether they have 64 bits."""

    @inline(.always)
    def __init__[index: DType, //](out self, targets: Source[index]):
        """Targets of a dtype that is known at compile time."""
        comptime assert index == DType.int32 or index == DType.int64
        self.address = targets.unsafe_bitcast[Int32]()
        self.is_wide = index == DType.int64

    @inline(.always)
    def __getitem__(self, row: Int) -> Int64:
        """Returns the target of a row."""
        if self.is_wide:
            return self.address.unsafe_bitcast[Int64]()[unsafe_offset=row]
        return Int64(self.address[unsafe_offset=row])

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Returns what the driver calls the type."""
        return "Targets"


struct Upstream[dtype: DType, accum: DType](
    DevicePassable, TrivialRegisterPassable
):
    """The gradient of each row's loss: of one dtype or its accumulator, one a row or the same for all.

    Parameters:
        dtype: Dtype of gradients that a caller hands over.
        accum: Dtype of gradients that a kernel computed.
    """

    comptime device_type: AnyType = Self

    var address: Source[Self.accum]
    """Where the first is, if they are not all 1."""
    var step: Int64
    """From one to the next: 1, or 0 if all are the same."""
    var is_given: Bool
    """Whether they are not all 1."""
    var is_wide: Bool
    """Whether they are of `accum`."""
    var counted: Source[Self.accum]
    """Where the number is that they are divided by, if there is one."""
    var is_divided: Bool
    """Whether there is one."""

    @inline(.always)
    def __init__(
        out self,
        given: Optional[Source[Self.dtype]],
        step: Int,
        pairs: Source[Self.accum],
    ):
        """Gradients that a caller handed over.

        Args:
            given: Where they are; all are 1 if they are nowhere.
            step: From one to the next.
            pairs: Any memory.
        """
        self.address = pairs
        if given:
            self.address = given.value().unsafe_bitcast[Scalar[Self.accum]]()
        self.step = Int64(step)
        self.is_given = Bool(given)
        self.is_wide = Self.dtype == Self.accum
        self.counted = pairs
        self.is_divided = False

    @inline(.always)
    def __init__(out self, *, computed: Source[Self.accum]):
        """The gradient of all rows that a kernel computed."""
        self.address = computed
        self.step = 0
        self.is_given = True
        self.is_wide = True
        self.counted = computed
        self.is_divided = False

    @inline(.always)
    def divided(self, counted: Source[Self.accum]) -> Self:
        """Returns these gradients, divided by a number."""
        var result = self
        result.counted = counted
        result.is_divided = True
        return result

    @inline(.always)
    def __getitem__(self, row: Int) -> Scalar[Self.accum]:
        """Returns the gradient of a row's loss."""
        var value = Scalar[Self.accum](1)
        if self.is_given:
            var at = row * Int(self.step)
            if self.is_wide:
                value = self.address[unsafe_offset=at]
            else:
                value = self.address.unsafe_bitcast[Scalar[Self.dtype]]()[
                    unsafe_offset=at
                ].cast[Self.accum]()
        if self.is_divided:
            value /= self.counted[]
        return value

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Returns what the driver calls the type."""
        return "Upstream"


struct Class(TrivialRegisterPassable):
    """What a row is to be: a class, nothing, or a mistake."""

    var index: Int64
    """The class; -1 if it is none of those that are here."""
    var is_class: Bool
    """Whether it is one of the row's classes, here or in another shard, and not ignored."""
    var is_ignored: Bool
    """Whether the row does not count."""

    @inline(.always)
    def __init__(
        out self, index: Int64, n: Int64, ignored: Int64, is_shard: Bool
    ):
        """The target `index` among `n` classes, which may be a shard of all."""
        self.is_ignored = index == ignored
        var is_here = index < n
        self.is_class = (
            not self.is_ignored and index >= 0 and (is_here or is_shard)
        )
        self.index = index if self.is_class and is_here else Int64(-1)

    @staticmethod
    @inline(.always)
    def of(
        targets: Targets, row: Int, n: Int, ignored: Int, is_shard: Bool
    ) -> Self:
        """Returns what the row `row` of `n` classes is to be."""
        return {targets[row], Int64(n), Int64(ignored), is_shard}


@fieldwise_init
struct Loss[dtype: DType](TrivialRegisterPassable):
    """What all losses of a row are computed from.

    Parameters:
        dtype: The accumulator's dtype.
    """

    var m: Scalar[Self.dtype]
    """The largest logit."""
    var d: Scalar[Self.dtype]
    """Σ e^(x - m)."""

    @inline(.always)
    def of(
        self,
        target: Class,
        logit: Scalar[Self.dtype],
        below: Scalar[Self.dtype],
        smoothing: Smoothing[Self.dtype],
    ) -> Scalar[Self.dtype]:
        """Returns -ln p of the target, a share of it replaced by the mean over all classes.

        Args:
            target: What the row is to be.
            logit: That of the target, if it is here.
            below: The sum of m - x over what is here of the row, if there is any smoothing.
            smoothing: The share, and of how many classes.

        Returns:
            The loss, of a shard its terms without ln d; 0 for a row that does not count, NaN for a mistake.
        """
        if target.is_ignored:
            return 0
        if not target.is_class:
            return nan[Self.dtype]()
        var distance = Scalar[Self.dtype](0)
        if target.index >= 0:
            distance = self.m - logit
        if smoothing.share != 0:
            # Nothing times infinity is not wanted here.
            if smoothing.rest != 0:
                distance *= smoothing.rest
            else:
                distance = 0
            var mean = below / Scalar[Self.dtype](smoothing.classes)
            if mean != mean and self.m - self.m == 0 and self.d == self.d:
                # All logits are numbers: what a compensated sum makes of an infinite distance.
                mean = inf[Self.dtype]()
            distance += mean * smoothing.share
        if smoothing.is_shard:
            return distance
        return distance + logarithm(self.d)

    @inline(.always)
    def gradient[
        lanes: SIMDLength, //
    ](
        self,
        target: Class,
        scale: Scalar[Self.dtype],
        logits: SIMD[Self.dtype, lanes],
        are_target: Bool,
        smoothing: Smoothing[Self.dtype],
    ) -> SIMD[Self.dtype, lanes]:
        """Returns the gradient of logits.

        Parameters:
            lanes: How many.

        Args:
            target: What the row is to be.
            scale: Gradient of the loss.
            logits: The logits.
            are_target: Whether they are those of the target, or of other classes.
            smoothing: The share of the target that is spread over all classes.

        Returns:
            The gradients; 0 in a row that does not count, NaN for a mistake.
        """
        comptime V = SIMD[Self.dtype, lanes]
        if target.is_ignored:
            return V(0)
        if not target.is_class:
            return V(nan[Self.dtype]())
        var unit = Unit(self.m)
        var p = unit.exp(logits) / (self.d * unit.exp(self.m))
        var wanted = smoothing.share / Scalar[Self.dtype](smoothing.classes)
        if are_target:
            wanted += smoothing.rest
        return (p - wanted) * scale


@inline(.always)
def log_of_sum[
    dtype: DType, //
](m: Scalar[dtype], d: Scalar[dtype]) -> Scalar[dtype]:
    """Returns m + ln d, ln Σ e^x of a row that has this pair; m where that is infinite, which d then says nothing of.
    """
    if m == inf[dtype]() or m == neg_inf[dtype]():
        # NaN beside -inf only is in d.
        return m if m == inf[dtype]() or d == 0 else d
    return m + logarithm(d)


comptime NOBODY = -(1 << 31)
"""What is ignored where the caller cannot say that anything is."""


def no_class(name: String, value: Int64, n: Int, ignored: Int) -> String:
    """Returns the sentence for a target that is neither a class nor ignored.

    Args:
        name: What the caller calls the target.
        value: What it is.
        n: How many classes there are.
        ignored: The class of rows that do not count.
    """
    if ignored == NOBODY:
        return String(t"{name} is {value}, which is no class from 0 to {n - 1}")
    return String(
        t"{name} is {value}, which is neither a class from 0 to {n - 1} nor"
        t" ignore_index {ignored}"
    )
