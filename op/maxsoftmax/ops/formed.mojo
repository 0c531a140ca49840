"""Logits as attention has them, of a tensor in memory, for the kernels of a GPU: they load the tensor as it is, keep it so if
its elements have 16 bits, and make logits of it when they compute.
"""

from std.builtin.device_passable import DeviceTypeEncoder
from std.math import iota
from std.sys import size_of
from std.utils import IndexList
from std.utils.numerics import neg_inf

from .forms import AXIS, Class, Forms, Kind, Operand, RANK
from ..io.eviction import load_aligned
from ..io.logits import unravel
from ..io.rows import Positions, Source, unseen
from ..io.source import RowSource, SourceColumn, SourceLine
from ..io.widening import widened
from ..math.online import accumulator


@fieldwise_init
struct FormedSource[dtype: DType, *, contiguous: Bool, forms_are: Class](
    RowSource
):
    """Logits (x · scale + mask) / temperature, and a sink for each row.

    Parameters:
        dtype: Dtype of x.
        contiguous: Whether rows run along the last axis.
        forms_are: Which forms there may be.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime device_type: AnyType = Self
    comptime Line = FormedLine[Self.dtype, Self.forms_are]
    comptime elements = Self.Line.kept if Self.contiguous else Self.accum
    comptime is_causal = not Self.forms_are.is_alone()
    comptime has_sink = not Self.forms_are.is_alone()
    comptime Column = FormedColumn[Self.dtype]
    comptime reads_ahead = Self.Line.signed or not Self.Line.scaled

    var x: Source[Self.dtype]
    """Where the tensor is."""
    var forms: Forms[Self.dtype]
    """What is made of it."""

    @inline(.always)
    def _at(self, outer: Int, inner: Int) -> IndexList[RANK]:
        """Returns where the first element of a row is."""
        var at = IndexList[RANK](0)
        comptime if Self.contiguous and Self.forms_are != Class.ANY:
            # Of as many rows as 32 bits can count: in 64 a GPU has no division, and reading would wait for what takes its place.
            var rest = UInt32(outer)
            comptime for i in reversed(range(1, AXIS)):
                var before = rest // UInt32(self.forms.shape[i])
                at[i] = Int(rest - before * UInt32(self.forms.shape[i]))
                rest = before
            at[0] = Int(rest)
        else:
            unravel[AXIS + 1, RANK](at, inner, self.forms.shape)
            unravel[0, AXIS](at, outer, self.forms.shape)
        return at

    @inline(.always)
    def line(self, row: Int, n: Int) -> Self.Line:
        """Returns a row along the last axis."""
        comptime long = Self.forms_are.is_long()
        comptime if Self.forms_are.is_scaled() or long:
            var nothing = _Along[Self.dtype]()
            var scale = nothing
            scale.number = self.forms.scale.number
            var mask = nothing
            var temperature = nothing
            temperature.number = self.forms.temperature.number
            var end = n
            comptime if Self.forms_are == Class.HIDDEN:
                var at = self._at(row, 0)
                end = self.forms.length(at)
                mask = _Along.in_order(self.forms.mask, at)
            else:
                comptime if long:
                    var at = IndexList[RANK](0)
                    # To find where a row is takes divisions, and no load of the row is under way before.
                    if not self.forms.have_one_mask():
                        at = self._at(row, 0)
                    mask = _Along.in_order(self.forms.mask, at)
                elif Self.Line.hidden or Self.forms_are == Class.BIASED:
                    if self.forms.mask.kind != Kind.NOTHING:
                        mask = _Along.in_order(
                            self.forms.mask, self._at(row, 0)
                        )
                comptime if Self.Line.signed or long:
                    # Numbers were divided before (`Forms.scaled`), and to find where operands of the row are takes longer than to read them.
                    if not self.forms.are_numbers():
                        var at = self._at(row, 0)
                        var divisor = _Along(self.forms.temperature, at, 1)
                        scale.number = (
                            _Along(self.forms.scale, at, 1).number
                            / divisor.number
                        )
                        temperature.number = 1 / divisor.number
                comptime if Self.is_causal:
                    if self.forms.causal:
                        # Queries are counted fastest.
                        var at = IndexList[RANK](0)
                        at[AXIS - 1] = Int(
                            UInt32(row) % UInt32(self.forms.shape[AXIS - 1])
                        )
                        end = self.forms.length(at)
            return {
                self.x.unsafe_offset(row * n),
                end,
                scale,
                mask,
                temperature,
            }
        var at = self._at(row, 0)
        var mask = _Along(self.forms.mask, at, 0)
        var end = self.forms.length(at)
        if mask.kind == Kind.NUMBER and self.forms.mask.kind == Kind.BOOL:
            # All of the row takes part, or nothing.
            if mask.number != 0:
                end = 0
            mask.kind = Kind.NOTHING
        var scale = _Along(self.forms.scale, at, 1)
        var temperature = _Along(self.forms.temperature, at, 1)
        comptime if Self.forms_are != Class.ANY:
            # One factor for x and one for the mask: a division is a function call for every element.
            scale.number /= temperature.number
            scale.kind = Kind.NUMBER
            temperature.number = 1 / temperature.number
        return {self.x.unsafe_offset(row * n), end, scale, mask, temperature}

    @inline(.always)
    def address(self, row: Int, n: Int) -> Source[Self.dtype]:
        """Returns where a row of x along the last axis begins."""
        return self.x.unsafe_offset(row * n)

    @inline(.always)
    def column(self, at: Positions) -> Self.Column:
        """Returns some elements of a row and its neighbours."""
        var first = self._at(at.outer, at.inner)
        first[AXIS] = at.first
        return {
            self.x.unsafe_offset(at.offset()),
            at.stride * at.step,
            self.forms.length(first),
            _Across(self.forms.scale, first, at.step, 1),
            _Across(self.forms.mask, first, at.step, 0),
            _Across(self.forms.temperature, first, at.step, 1),
        }

    @inline(.always)
    def is_aligned[width: Int](self) -> Bool:
        """Returns whether masks of floats are aligned where vectors of x are.
        """
        return self.forms.have_aligned_mask(self.x)

    @inline(.always)
    def is_masked(self) -> Bool:
        """Returns whether a row of nothing but -inf gives 0."""
        return self.forms.masked

    @inline(.always)
    def sink[
        width: Int
    ](self, outer: Int, inner: Int) -> SIMD[
        accumulator[Self.Column.loaded](), width
    ]:
        """Returns the sinks of `width` neighbouring rows."""
        if self.forms.sink.kind == Kind.NOTHING:
            return neg_inf[accumulator[Self.Column.loaded]()]()
        return rebind[SIMD[accumulator[Self.Column.loaded](), width]](
            self.forms.sinks[width, RANK - 1](self._at(outer, inner))
        )

    @inline(.always)
    def in_vectors[width: Int](self) -> Bool:
        """Returns whether the first vector is aligned."""
        return Int(self.x) % (width * size_of[Self.dtype]()) == 0

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Returns what the driver calls the type."""
        return "FormedSource"


struct _Along[dtype: DType](TrivialRegisterPassable):
    """An operand along one row.

    Parameters:
        dtype: Dtype of the logits.
    """

    comptime accum = accumulator[Self.dtype]()

    var kind: Kind
    """What it is; a number, if it is the same along the row."""
    var number: Scalar[Self.accum]
    """The number."""
    var address: Source[DType.uint8]
    """Where its element beside the first of the row is."""
    var stride: Int
    """From one to the next, in elements."""

    @inline(.always)
    def __init__(out self):
        """Nothing."""
        self.kind = Kind.NOTHING
        self.number = 1
        self.address = Source[DType.uint8](unsafe_from_address=1)
        self.stride = 0

    @inline(.always)
    def __init__(
        out self,
        operand: Operand[Self.dtype],
        at: IndexList[RANK],
        nothing: Scalar[Self.accum],
    ):
        """An operand along the row that begins at `at`; `nothing`, if there is none.
        """
        self.kind = operand.kind
        self.number = nothing
        self.address = operand.address
        self.stride = operand.strides[AXIS]
        if self.kind == Kind.NUMBER:
            self.number = operand.number
        elif self.kind != Kind.NOTHING:
            if self.stride == 0:
                self.number = operand.load[1, AXIS, True](at)[0]
                self.kind = Kind.NUMBER
            else:
                self.address = self.address.unsafe_offset(
                    operand.place(at) * self.kind.bytes[Self.dtype]()
                )

    @staticmethod
    @inline(.always)
    def in_order(operand: Operand[Self.dtype], at: IndexList[RANK]) -> Self:
        """Returns a tensor whose elements lie one after the other, along the row that begins at `at`.
        """
        var result = Self()
        result.kind = operand.kind
        result.address = operand.address.unsafe_offset(
            operand.place(at) * operand.kind.bytes[Self.dtype]()
        )
        result.stride = 1
        return result

    @inline(.always)
    def onwards(self, start: Int) -> Self:
        """Returns it along what of the row begins at element `start`."""
        var result = self
        result.address = self.address.unsafe_offset(
            start * self.stride * self.kind.bytes[Self.dtype]()
        )
        return result

    @inline(.always)
    def elements[
        of: DType, width: Int, unit: Bool
    ](self, i: Int) -> SIMD[of, width]:
        """Returns its elements from `i` on.

        Parameters:
            of: Their dtype.
            width: How many.
            unit: Whether the stride is 1.

        Args:
            i: The first.
        """
        var stride = 1 if unit else self.stride
        var first = self.address.unsafe_bitcast[Scalar[of]]().unsafe_offset(
            i * stride
        )
        var values = SIMD[of, width]()
        comptime for j in range(width):
            values[j] = first[unsafe_offset=j * stride]
        return values

    @inline(.always)
    def values[width: Int, unit: Bool](self, i: Int) -> SIMD[Self.accum, width]:
        """Returns its elements from `i` on, of floats, or the number; parameters are as of `elements`.
        """
        if self.kind == Kind.NUMBER or self.kind == Kind.NOTHING:
            return SIMD[Self.accum, width](self.number)
        comptime if Self.dtype != Self.accum:
            if self.kind == Kind.NARROW:
                return self.elements[Self.dtype, width, unit](i).cast[
                    Self.accum
                ]()
        return self.elements[Self.accum, width, unit](i)


@fieldwise_init
struct FormedLine[dtype: DType, forms_are: Class](SourceLine):
    """A row of `FormedSource`, or what of it begins at one of its elements.

    Parameters:
        dtype: Dtype of x.
        forms_are: Which forms there may be.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime in_memory = not Self.forms_are.is_long()
    comptime scaled = Self.forms_are.is_scaled()
    comptime signed = Self.forms_are.is_signed()
    comptime hidden = Self.forms_are.may_hide()
    comptime sums = Self.forms_are.is_long()
    # With a mask that is read, logits are best made once: in place if they are as wide as their elements, else as they are loaded.
    comptime transformed = (
        Self.in_memory and not Self.scaled and Self.dtype == Self.accum
    )
    comptime kept = Self.dtype if Self.scaled else Self.accum
    comptime held = Self.kept
    comptime elements = Self.dtype

    var first: Source[Self.dtype]
    """Where the first element is."""
    var end: Int
    """How many elements take part: from there on, all are -inf."""
    var scale: _Along[Self.dtype]
    """What elements are multiplied by."""
    var mask: _Along[Self.dtype]
    """What is then added to them."""
    var temperature: _Along[Self.dtype]
    """What they are then divided by; where it is the same along each row, the scale is divided by it, and this is its inverse."""

    @inline(.always)
    def onwards(self, start: Int) -> Self:
        """Returns what of the row begins at its element `start`."""
        return {
            self.first.unsafe_offset(start),
            self.end - start,
            self.scale.onwards(start),
            self.mask.onwards(start),
            self.temperature.onwards(start),
        }

    @inline(.always)
    def address(self, i: Int) -> Source[Self.elements]:
        """Returns where element `i` is."""
        return self.first.unsafe_offset(i)

    @inline(.always)
    def place(self) -> Int:
        """Returns the address of the first element, counted in elements."""
        return Int(self.first) // size_of[Self.dtype]()

    @inline(.always)
    def load[width: Int](self, i: Int) -> SIMD[Self.held, width]:
        """Returns the elements from `i` on, which are aligned, or what is made of them.
        """
        comptime if Self.forms_are.is_long():
            return rebind[SIMD[Self.held, width]](self._added[width, True](i))
        var elements = load_aligned[width](self.first.unsafe_offset(i))
        comptime if Self.scaled or Self.transformed:
            return rebind[SIMD[Self.held, width]](elements)
        else:
            return rebind[SIMD[Self.held, width]](self._made(i, elements))

    @inline(.always)
    def load_from_any[width: Int](self, i: Int) -> SIMD[Self.held, width]:
        """Returns the same, beside a mask that may begin anywhere."""
        comptime if Self.forms_are.is_long():
            return rebind[SIMD[Self.held, width]](self._added[width, False](i))
        else:
            return self.load[width](i)

    @inline(.always)
    def _added[
        width: Int, aligned: Bool
    ](self, i: Int) -> SIMD[Self.accum, width]:
        """Returns the logits from `i` on, of a mask of floats that may be aligned as the elements are.
        """
        var z = widened[Self.accum](
            load_aligned[width](self.first.unsafe_offset(i))
        )
        comptime of = Self.dtype if Self.forms_are == Class.LONG_NARROW else Self.accum
        var mask = widened[Self.accum](self.mask_of[of, width, aligned](i))
        return mask.fma(
            SIMD[Self.accum, width](self.temperature.number),
            z * self.scale.number,
        )

    @inline(.always)
    def logits[
        width: SIMDLength, //
    ](self, i: Int, elements: SIMD[Self.held, width]) -> SIMD[
        accumulator[Self.held](), width
    ]:
        """Returns the logits of what `load` returned."""
        comptime if Self.transformed:
            return rebind[SIMD[accumulator[Self.held](), width]](
                self._made(i, rebind[SIMD[Self.dtype, width]](elements))
            )
        else:
            return widened[accumulator[Self.held]()](elements)

    @inline(.always)
    def length(self, n: Int) -> Int:
        """Returns how many elements take part."""
        return self.end

    @inline(.always)
    def _made[
        width: SIMDLength, //
    ](self, i: Int, elements: SIMD[Self.dtype, width]) -> SIMD[
        Self.accum, width
    ]:
        """Returns the logits of the elements from `i` on."""
        comptime lanes = Int(width)
        comptime unit = Self.forms_are != Class.ANY
        comptime nothing = SIMD[Self.accum, width](neg_inf[Self.accum]())
        var z = widened[Self.accum](elements)
        z *= self.scale.values[lanes, unit](i)
        if self.mask.kind != Kind.NOTHING and self.mask.kind != Kind.BOOL:
            var mask = self.mask.values[lanes, unit](i)
            comptime if unit:
                z = mask.fma(type_of(z)(self.temperature.number), z)
            else:
                z += mask
        comptime if not unit:
            if self.temperature.kind != Kind.NOTHING:
                z /= self.temperature.values[lanes, unit](i)
        if self.mask.kind == Kind.BOOL:
            z = (
                self.mask.elements[DType.uint8, lanes, unit](i)
                .ne(0)
                .select(z, nothing)
            )
        return self.limited(i, z)

    @inline(.always)
    def hides(self) -> Bool:
        """Returns whether there is a mask of bools."""
        return self.mask.kind == Kind.BOOL

    @inline(.always)
    def adds_narrow(self) -> Bool:
        """Returns whether there is a mask of floats of the dtype of x, shorter than the accumulator.
        """
        return self.mask.kind == Kind.NARROW

    @inline(.always)
    def bias_factor(self) -> Float32:
        """Returns what it is multiplied by."""
        return self.temperature.number.cast[DType.float32]()

    @inline(.always)
    def is_mask_aligned[of: DType, width: Int](self) -> Bool:
        """Returns whether `width` elements of the mask are aligned."""
        return Int(self.mask.address) % (width * size_of[of]()) == 0

    @inline(.always)
    def mask_address[of: DType](self, i: Int) -> Source[of]:
        """Returns where the mask of element `i` is."""
        return self.mask.address.unsafe_bitcast[Scalar[of]]().unsafe_offset(i)

    @inline(.always)
    def mask_of[
        of: DType, width: Int, aligned: Bool
    ](self, i: Int) -> SIMD[of, width]:
        """Returns the mask of elements from `i` on."""
        comptime if aligned:
            return self.mask_address[of](i).unsafe_load[
                width=width, alignment=width * size_of[of]()
            ]()
        else:
            return self.mask.elements[of, width, True](i)

    @inline(.always)
    def factor(self) -> Float32:
        """Returns what elements are multiplied by, if that is all: of `signed` ones the absolute value, and not 0, by which -inf would be NaN.
        """
        var factor = self.scale.number.cast[DType.float32]()
        comptime if Self.signed:
            comptime least = Float32(1.17549435e-38)
            return least if factor == 0 else abs(factor)
        else:
            return factor

    @inline(.always)
    def is_negative(self) -> Bool:
        """Returns whether they are multiplied by a negative number."""
        return self.scale.number < 0

    @inline(.always)
    def limited[
        of: DType, width: SIMDLength, //
    ](self, i: Int, elements: SIMD[of, width]) -> SIMD[of, width]:
        """Returns elements from `i` on, -inf for those that take no part."""
        comptime lanes = Int(width)
        if i + lanes > self.end:
            return (
                iota[DType.int32, lanes]()
                .lt(Int32(max(0, self.end - i)))
                .select(elements, type_of(elements)(neg_inf[of]()))
            )
        return elements


@fieldwise_init
struct _Across[dtype: DType](TrivialRegisterPassable):
    """An operand beside some elements of a row along another axis than the last, and beside its neighbours.

    Parameters:
        dtype: Dtype of the logits.
    """

    comptime accum = accumulator[Self.dtype]()

    var kind: Kind
    """What it is."""
    var number: Scalar[Self.accum]
    """The number, if it is one."""
    var address: Source[DType.uint8]
    """Where its element beside the first is."""
    var step: Int
    """From one to the next, in its elements."""
    var across: Int
    """From one neighbour to the next."""

    @inline(.always)
    def __init__(
        out self,
        operand: Operand[Self.dtype],
        at: IndexList[RANK],
        step: Int,
        nothing: Scalar[Self.accum],
    ):
        """An operand beside every `step`-th element from the one at `at` on; `nothing`, if there is none.
        """
        self.kind = operand.kind
        self.number = operand.number_or(nothing)
        self.address = operand.address
        self.step = operand.strides[AXIS] * step
        self.across = operand.strides[RANK - 1]
        if not operand.is_known():
            self.address = self.address.unsafe_offset(
                operand.place(at) * self.kind.bytes[Self.dtype]()
            )

    @inline(.always)
    def elements[of: DType, width: Int](self, i: Int) -> SIMD[of, width]:
        """Returns what is beside element `i` of `width` neighbours."""
        var first = self.address.unsafe_bitcast[Scalar[of]]().unsafe_offset(
            unseen(i) * self.step
        )
        var across = unseen(self.across)
        var values = SIMD[of, width]()
        comptime for j in range(width):
            values[j] = first[unsafe_offset=j * across]
        return values

    @inline(.always)
    def values[width: Int](self, i: Int) -> SIMD[Self.accum, width]:
        """Returns what is beside element `i` of `width` neighbours, of floats, or the number.
        """
        if self.kind == Kind.NUMBER or self.kind == Kind.NOTHING:
            return SIMD[Self.accum, width](self.number)
        comptime if Self.dtype != Self.accum:
            if self.kind == Kind.NARROW:
                return self.elements[Self.dtype, width](i).cast[Self.accum]()
        return self.elements[Self.accum, width](i)


@fieldwise_init
struct FormedColumn[dtype: DType](SourceColumn):
    """Elements of a row of `FormedSource`, at equal distances.

    Parameters:
        dtype: Dtype of x.
    """

    comptime loaded = accumulator[Self.dtype]()

    var x: Source[Self.dtype]
    """Where the first is."""
    var step: Int
    """From one to the next."""
    var end: Int
    """How many elements of the whole row take part."""
    var scale: _Across[Self.dtype]
    """What they are multiplied by."""
    var mask: _Across[Self.dtype]
    """What is then added to them."""
    var temperature: _Across[Self.dtype]
    """What they are then divided by."""

    @inline(.always)
    def load[width: Int](self, i: Int) -> SIMD[Self.loaded, width]:
        """Returns element `i` of `width` neighbouring rows, which is aligned.
        """
        var z = load_aligned[width](self.x.unsafe_offset(i * self.step)).cast[
            Self.loaded
        ]()
        z *= self.scale.values[width](i)
        if self.mask.kind != Kind.BOOL:
            z += self.mask.values[width](i)
        if self.temperature.kind != Kind.NOTHING:
            z /= self.temperature.values[width](i)
        if self.mask.kind == Kind.BOOL:
            z = (
                self.mask.elements[DType.uint8, width](i)
                .ne(0)
                .select(z, type_of(z)(neg_inf[Self.loaded]()))
            )
        return z

    @inline(.always)
    def length(self, n: Int) -> Int:
        """Returns how many elements of the whole row take part."""
        return self.end
