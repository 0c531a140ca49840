"""Logits as attention has them, of a plain tensor: (x · scale + mask) / temperature, computed as they are read."""

from std.sys import size_of
from std.utils import IndexList
from std.utils.numerics import neg_inf
from extensibility.managed_tensor_slice import InputFusion

from .finish import Finish
from ..kernels import Kernels
from ..io.logits import Logits
from ..math.online import accumulator
from ..queue import Queue
from ..io.results import IntoMemory, Results
from ..io.rows import LOADED, Source, Target

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
        var place = 0
        comptime for i in range(RANK):
            place += at[i] * self.strides[i]
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


@fieldwise_init
struct Forms[dtype: DType](TrivialRegisterPassable):
    """What is made of logits before they are normalized.

    Parameters:
        dtype: Dtype of the logits.
    """

    var shape: IndexList[RANK]
    """The shape of the logits."""
    var causal: Bool
    """Whether an element of the axis before that of the softmax sees only what is not after it, counted from the end."""
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


@fieldwise_init
struct _Formed[of: DType](InputFusion):
    """The logits, for kernels whose logits are functions."""

    var x: Source[Self.of]
    var forms: Forms[Self.of]

    @inline(.always)
    def load[
        dtype: DType, rank: Int, simd_width: Int, element_alignment: Int = 1
    ](self, idx: IndexList[rank]) -> SIMD[dtype, simd_width]:
        comptime accum = accumulator[Self.of]()
        comptime last = rank - 1
        var at = IndexList[RANK](0)
        comptime for i in range(rank):
            at[i] = idx[i]
        var place = at[0]
        comptime for i in range(1, RANK):
            place = place * self.forms.shape[i] + at[i]
        var z = (
            self.x.unsafe_offset(place)
            .unsafe_load[
                width=simd_width,
                alignment=min(LOADED, element_alignment * size_of[Self.of]()),
            ]()
            .cast[accum]()
        )
        if self.forms.scale.kind != Kind.NOTHING:
            z *= self.forms.scale.load[simd_width, last](at)
        if self.forms.mask.kind != Kind.NOTHING and not (
            self.forms.mask.kind == Kind.BOOL
        ):
            z += self.forms.mask.load[simd_width, last, True](at)
        if self.forms.temperature.kind != Kind.NOTHING:
            z /= self.forms.temperature.load[simd_width, last](at)
        if self.forms.mask.kind == Kind.BOOL:
            var bias = self.forms.mask.load[simd_width, last, True](at)
            z = bias.eq(0).select(z, bias)
        return rebind[SIMD[dtype, simd_width]](z)


@fieldwise_init
struct _Sink[of: DType](InputFusion):
    """The additional logits, for kernels whose logits are functions."""

    var forms: Forms[Self.of]

    @inline(.always)
    def load[
        dtype: DType, rank: Int, simd_width: Int, element_alignment: Int = 1
    ](self, idx: IndexList[rank]) -> SIMD[dtype, simd_width]:
        comptime accum = accumulator[Self.of]()
        var values = SIMD[accum, simd_width](neg_inf[accum]())
        if self.forms.sink.kind != Kind.NOTHING:
            var at = IndexList[RANK](0)
            comptime for i in range(rank):
                at[i] = idx[i]
            values = self.forms.sink.load[simd_width, rank - 1](at)
        return rebind[SIMD[dtype, simd_width]](values)


def formed_softmax[
    dtype: DType, out_dtype: DType, //, K: Kernels, contiguous: Bool
](
    y: Target[out_dtype],
    x: Source[dtype],
    forms: Forms[dtype],
    queue: Queue,
    out_scale: Float64 = 1,
) raises:
    """Writes softmax of what `forms` makes of `x`.

    Parameters:
        dtype: Dtype of the logits.
        out_dtype: Dtype of the probabilities, which are rounded once.
        K: `Cpu` or `Gpu`.
        contiguous: Whether there is nothing after the axis of the softmax.

    Args:
        y: Probabilities, in no memory that is read.
        x: Logits, row-major memory of `forms.shape`.
        forms: What is made of them.
        queue: Where to compute.
        out_scale: What probabilities of float8 are multiplied by.
    """
    # Rows along the last axis have other kernels, which are chosen by the rank.
    comptime rank = RANK - 1 if contiguous else RANK
    comptime accum = accumulator[dtype]()
    var shape = IndexList[rank]()
    var ones = IndexList[rank]()
    var count = 1
    comptime for i in range(rank):
        shape[i] = forms.shape[i]
        ones[i] = 1 if i == AXIS else forms.shape[i]
        count *= forms.shape[i]
    if count == 0:
        return
    var results = Results[IntoMemory, out_dtype, rank, AXIS, False](
        IntoMemory(), y, shape, out_scale
    )
    var logits = Logits[_Formed[dtype], accum, rank, AXIS, True](
        _Formed(x, forms),
        shape,
        forms.masked,
        0 if forms.causal else forms.shape[AXIS - 1],
        (Int(x) | Int(y)) % LOADED == 0,
    )
    var sinks = Logits[_Sink[dtype], accum, rank, AXIS, False](
        _Sink(forms), ones, forms.masked
    )
    K.fused[has_sink=True, finish=Finish.PROBABILITIES](
        results, logits, sinks, queue
    )
