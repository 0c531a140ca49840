"""What a kernel asks of where the elements of rows come from.

A row along the last axis is a `SourceLine`, which is taken by the vector of its own elements. Rows along another axis are
neighbours in memory, and are taken by the vector as well: one element of each of `width` neighbouring rows. A
`SourceColumn` is what one thread reads of the rows of one vector.
"""

from std.builtin.device_passable import DevicePassable
from std.sys import size_of
from std.utils.numerics import neg_inf

from ..math.online import accumulator
from .rows import Positions, Source
from .widening import widened


trait SourceColumn(TrivialRegisterPassable):
    """Some elements of `width` neighbouring rows, at equal distances along the rows.
    """

    comptime loaded: DType
    """Dtype of the elements as they are had: their own of what is in memory, the accumulator of what is computed."""

    def load[width: Int](self, i: Int) -> SIMD[Self.loaded, width]:
        """Returns element `i` of `width` neighbouring rows."""
        ...

    comptime scaled: Bool = False
    """Whether logits are elements times `factor`."""

    @inline(.always)
    def factor(self) -> Float32:
        """Returns what elements are multiplied by, positive and finite, where they are `scaled`.
        """
        return 1

    @inline(.always)
    def logits[
        width: SIMDLength, //
    ](self, elements: SIMD[Self.loaded, width]) -> SIMD[
        accumulator[Self.loaded](), width
    ]:
        """Returns the logits of what `load` returned."""
        var z = widened[accumulator[Self.loaded]()](elements)
        comptime if Self.scaled:
            z *= self.factor().cast[accumulator[Self.loaded]()]()
        return z

    @inline(.always)
    def length(self, n: Int) -> Int:
        """Returns how many elements of the whole rows take part, of `n`: from there on, all are -inf.
        """
        return n

    @inline(.always)
    def address(self, i: Int) -> Source[Self.loaded]:
        """Returns where in memory element `i` of the first row is, of a source that is there.
        """
        return Source[Self.loaded](unsafe_from_address=size_of[Self.loaded]())


trait SourceLine(TrivialRegisterPassable):
    """A row along the last axis, or what of it begins at one of its elements.
    """

    comptime elements: DType = Self.held
    """Dtype of the elements, where they are in memory."""
    comptime held: DType
    """Dtype in which a thread keeps elements: their own of what is in memory, the accumulator of what is computed."""
    comptime in_memory: Bool = False
    """Whether the elements lie in memory, one after the other."""
    comptime transformed: Bool = False
    """Whether a logit is made of an element after it was loaded."""
    comptime scaled: Bool = False
    """Whether it is the element times `factor`."""
    comptime signed: Bool = False
    """Whether it may be minus that."""
    comptime sums: Bool = False
    """Whether what is held, as the accumulator, is sums of elements, which may be shorter, and a mask of floats."""
    comptime hidden: Bool = False
    """Whether a mask in memory, a byte for each, may say which elements take part; what is loaded is not masked yet."""

    def onwards(self, start: Int) -> Self:
        """Returns what of the row begins at its element `start`."""
        ...

    def load[width: Int](self, i: Int) -> SIMD[Self.held, width]:
        """Returns the elements from `i` on. Of `width` elements that are in memory the first has an address that is a
        multiple of their size; of computed ones its place is, in a source that `is_aligned`, or of whole vectors its index.
        """
        ...

    @inline(.always)
    def place(self) -> Int:
        """Returns where in row-major memory the first element would be, of computed ones.
        """
        return 0

    @inline(.always)
    def load_from_any[width: Int](self, i: Int) -> SIMD[Self.held, width]:
        """Returns the elements from `i` on, of computed ones wherever that is.
        """
        return self.load[width](i)

    @inline(.always)
    def logits[
        width: SIMDLength, //
    ](self, i: Int, elements: SIMD[Self.held, width]) -> SIMD[
        accumulator[Self.held](), width
    ]:
        """Returns the logits of the elements from `i` on."""
        return widened[accumulator[Self.held]()](elements)

    @inline(.always)
    def length(self, n: Int) -> Int:
        """Returns how many elements take part, of `n`: from there on, all are -inf.
        """
        return n

    @inline(.always)
    def factor(self) -> Float32:
        """Returns what elements are multiplied by, positive and finite, where they are `scaled`.
        """
        return 1

    @inline(.always)
    def is_negative(self) -> Bool:
        """Returns whether logits are minus elements times `factor`, where they are `signed`.
        """
        return False

    @inline(.always)
    def with_sign[
        of: DType, width: SIMDLength, //
    ](self, elements: SIMD[of, width]) -> SIMD[of, width]:
        """Returns elements of which `factor` makes logits."""
        comptime if Self.signed:
            if self.is_negative():
                return -elements
        return elements

    @inline(.always)
    def hides(self) -> Bool:
        """Returns whether there is a mask of bools, where elements may be `hidden`.
        """
        return Self.hidden

    @inline(.always)
    def adds_narrow(self) -> Bool:
        """Returns whether a mask of floats has the dtype of the elements, not of the accumulator.
        """
        return False

    @inline(.always)
    def bias_factor(self) -> Float32:
        """Returns what a mask of floats is multiplied by before it is added to logits.
        """
        return 1

    @inline(.always)
    def is_mask_aligned[of: DType, width: Int](self) -> Bool:
        """Returns whether `width` elements of the mask are aligned, where the elements beside them are.
        """
        return False

    @inline(.always)
    def mask_address[of: DType](self, i: Int) -> Source[of]:
        """Returns where the mask of element `i` is."""
        return Source[of](unsafe_from_address=size_of[of]())

    @inline(.always)
    def mask_of[
        of: DType, width: Int, aligned: Bool
    ](self, i: Int) -> SIMD[of, width]:
        """Returns the mask of elements from `i` on: of bools 0 for those that take no part.
        """
        return 1

    @inline(.always)
    def limited[
        of: DType, width: SIMDLength, //
    ](self, i: Int, elements: SIMD[of, width]) -> SIMD[of, width]:
        """Returns elements from `i` on, -inf for those that take no part."""
        return elements

    @inline(.always)
    def address(self, i: Int) -> Source[Self.elements]:
        """Returns where in memory element `i` is, of a row that is there."""
        return Source[Self.elements](
            unsafe_from_address=size_of[Self.elements]()
        )


trait RowSource(DevicePassable, TrivialRegisterPassable):
    """A tensor of logits, seen as (outer, n, inner), and maybe one more logit for each row.
    """

    comptime elements: DType
    """Dtype of the logits, where they are in memory or were computed in."""
    comptime in_memory: Bool = False
    """Whether the logits lie in memory, in row-major order."""
    comptime is_causal: Bool = False
    """Whether rows may end before the tensor does."""
    comptime has_sink: Bool = False
    """Whether there is one more logit a row, in the denominator only."""
    comptime reads_ahead: Bool = False
    """Whether `line` reads what lies in memory."""
    comptime Line: SourceLine
    """What a thread reads of a row along the last axis."""
    comptime Column: SourceColumn
    """What it reads of rows along another."""

    def line(self, row: Int, n: Int) -> Self.Line:
        """Returns row `row` along the last axis, of `n` elements."""
        ...

    @inline(.always)
    def address(self, row: Int, n: Int) -> Source[Self.Line.elements]:
        """Returns where in memory row `row` along the last axis begins, of a source that is there: without what `line` reads.
        """
        return Source[Self.Line.elements](
            unsafe_from_address=size_of[Self.Line.elements]()
        )

    def column(self, at: Positions) -> Self.Column:
        """Returns some elements of a row and its neighbours."""
        ...

    @inline(.always)
    def is_aligned[width: Int](self) -> Bool:
        """Returns whether `width` elements that are computed can be read at a time where the place of the first is a multiple of as many.
        """
        return False

    @inline(.always)
    def is_masked(self) -> Bool:
        """Returns whether a row of nothing but -inf gives 0 (of logarithms -inf), not NaN.
        """
        return False

    @inline(.always)
    def sink[
        width: Int
    ](self, outer: Int, inner: Int) -> SIMD[
        accumulator[Self.Column.loaded](), width
    ]:
        """Returns the additional logits of `width` neighbouring rows, the first of them as for `column`.
        """
        comptime accum = accumulator[Self.Column.loaded]()
        return SIMD[accum, width](neg_inf[accum]())

    def in_vectors[width: Int](self) -> Bool:
        """Returns whether `width` neighbours can be had at a time, given that `inner` is a multiple of it.
        """
        ...
