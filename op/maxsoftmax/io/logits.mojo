"""Logits that are computed as they are read: what MAX fused into the input of an op, and which of it takes part."""

from std.builtin.device_passable import DeviceTypeEncoder
from std.math import iota
from std.sys import is_gpu, size_of
from std.utils import IndexList
from std.utils.numerics import neg_inf
from extensibility.managed_tensor_slice import InputFusion

from .fusion import piece_width
from .source import RowSource, SourceColumn, SourceLine
from ..math.online import accumulator
from .rows import Positions, Rows
from .widening import widened


struct Logits[
    Fusion: InputFusion, dtype: DType, rank: Int, axis: Int, causal: Bool
](RowSource):
    """A tensor that is nowhere in memory: a function from indices to elements.

    Parameters:
        Fusion: That function, which the graph compiler writes.
        dtype: Dtype of the elements.
        rank: Number of dimensions.
        axis: The axis that will sum to 1, counted from 0.
        causal: Whether row q of the axis before takes only the elements that are not after it.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime device_type: AnyType = Self
    comptime elements = Self.dtype
    comptime is_causal = Self.causal
    comptime Line = Row[
        Self.Fusion, Self.dtype, Self.rank, Self.axis, Self.causal
    ]
    comptime Column = LogitsColumn[
        Self.Fusion, Self.dtype, Self.rank, Self.axis, Self.causal
    ]

    var fusion: Self.Fusion
    """What is loaded."""
    var shape: IndexList[Self.rank]
    """The tensor's shape."""
    var masked: Bool
    """Whether a row of nothing but -inf gives 0, or the logarithm -inf, and not NaN."""
    var alignment: Int
    """As `alignment` says."""
    var beyond: Int
    """How many elements after element q take part of row q, if the row may end before the tensor does."""

    @inline(.always)
    def __init__(
        out self,
        fusion: Self.Fusion,
        shape: IndexList[Self.rank],
        masked: Bool,
        *,
        alignment: Int = 1,
        beyond: Int = 0,
    ):
        self.fusion = fusion
        self.shape = shape
        self.masked = masked
        self.alignment = alignment
        self.beyond = beyond

    @inline(.always)
    def rows(self) -> Rows[]:
        """Returns how the tensor is divided into rows."""
        return Rows.of[Self.axis](self.shape)

    @inline(.always)
    def line(self, row: Int, n: Int) -> Self.Line:
        """Returns a row along the last axis."""
        return self.row(row, 0)

    @inline(.always)
    def row(self, outer: Int, inner: Int) -> Self.Line:
        """Returns the row before and after whose axis there are these places, counted as in row-major memory.
        """
        var at = IndexList[Self.rank]()
        unravel[Self.axis + 1, Self.rank](at, inner, self.shape)
        unravel[0, Self.axis](at, outer, self.shape)
        var n = self.shape[Self.axis]
        comptime if Self.causal:
            comptime query = Self.axis - 1
            n = max(
                0,
                min(n, at[query] + 1 + self.beyond),
            )
        var rows = self.rows()
        var place = outer * rows.n * rows.inner + inner
        return {self.fusion, at, place, n}

    @inline(.always)
    def column(self, at: Positions) -> Self.Column:
        """Returns some elements of a row, and of its neighbours along the last axis.
        """
        return {self.row(at.outer, at.inner), at.first, at.step}

    @inline(.always)
    def is_masked(self) -> Bool:
        """Returns whether a row of nothing but -inf gives 0."""
        return self.masked

    @inline(.always)
    def in_vectors[width: Int](self) -> Bool:
        """Returns whether no `width` elements in a row-major tensor, counted from the first, are in two rows of the last
        axis.
        """
        return self.shape[Self.rank - 1] % width == 0

    @inline(.always)
    def is_aligned[width: Int](self) -> Bool:
        """Returns whether `width` elements can be read at a time where the place of the first is a multiple of as many.
        """
        return self.alignment >= width

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Returns what the driver calls the type."""
        return "Logits"


@fieldwise_init
struct Row[
    Fusion: InputFusion, dtype: DType, rank: Int, axis: Int, causal: Bool
](SourceLine):
    """A row of `Logits`, or what of it begins at one of its elements.

    Parameters:
        Fusion: What is loaded.
        dtype: Dtype of what is loaded.
        rank: Number of dimensions.
        axis: The axis of the row.
        causal: Whether the row may end before the tensor does.
    """

    comptime accum = accumulator[Self.dtype]()
    # Widened, they would be twice the registers.
    comptime held = Self.dtype if size_of[Self.dtype]() == 2 else Self.accum

    var fusion: Self.Fusion
    """What is loaded."""
    var at: IndexList[Self.rank]
    """Where the first element is."""
    var first: Int
    """Its place, counted as in row-major memory."""
    var end: Int
    """How many elements take part: from there on, all are -inf."""

    @inline(.always)
    def beside(self, columns: Int) -> Self:
        """Returns the row that is so many further along the last axis, where that is not its own.
        """
        var result = self
        result.at[Self.rank - 1] += columns
        return result

    @inline(.always)
    def onwards(self, start: Int) -> Self:
        """Returns what of the row begins at its element `start`."""
        var result = self
        result.at[Self.axis] += start
        result.first += start
        result.end -= start
        return result

    @inline(.always)
    def place(self) -> Int:
        """Returns where in row-major memory the first element would be, of a row along the last axis.
        """
        return self.first

    @inline(.always)
    def length(self, n: Int) -> Int:
        """Returns how many elements take part."""
        return self.end

    @inline(.always)
    def load[width: Int](self, i: Int) -> SIMD[Self.held, width]:
        """Returns the elements from `i` on, the first of which can be read together with `width - 1` others: see `RowSource.is_aligned`.
        """
        return self._loaded[Self.held, width, width](i)

    @inline(.always)
    def load_from_any[width: Int](self, i: Int) -> SIMD[Self.held, width]:
        """Returns the elements from `i` on: one index is computed for all of them, wherever they are.
        """
        return self._loaded[Self.held, width, 1](i)

    @inline(.always)
    def load[
        width: Int, alignment: Int
    ](self, i: Int) -> SIMD[Self.accum, width]:
        """Returns `width` elements along the tensor's last axis from the row's element `i` on, none beyond the tensor.

        Parameters:
            width: How many.
            alignment: How many can be read at a time.

        Args:
            i: Where in the row.

        Returns:
            The elements, widened; -inf for those of the row that take no part.
        """
        return self._loaded[Self.accum, width, alignment](i)

    @inline(.always)
    def _loaded[
        of: DType, width: Int, alignment: Int
    ](self, i: Int) -> SIMD[of, width]:
        """Returns what `load` does, as `of`: their own dtype, or the accumulator.
        """
        var at = self.at
        at[Self.axis] += i
        var values = SIMD[of, width]()
        comptime piece = piece_width[Self.Fusion](width)
        comptime for k in range(0, width, piece):
            values = values.insert[offset=k](
                widened[of](
                    self.fusion.load[
                        Self.dtype, Self.rank, piece, min(piece, alignment)
                    ](at)
                )
            )
            at[Self.rank - 1] += piece
        comptime if width > 1:
            return self.limited(i, values)
        else:
            return values

    @inline(.always)
    def limited[
        of: DType, width: SIMDLength, //
    ](self, i: Int, elements: SIMD[of, width]) -> SIMD[of, width]:
        """Returns elements from `i` on, -inf for those that take no part."""
        comptime if Self.causal and Self.axis == Self.rank - 1:
            var left = self.end - i
            if left < Int(width):
                return (
                    iota[DType.int32, Int(width)]()
                    .lt(Int32(max(0, left)))
                    .select(elements, SIMD[of, width](neg_inf[of]()))
                )
        return elements


@fieldwise_init
struct LogitsColumn[
    Fusion: InputFusion, dtype: DType, rank: Int, axis: Int, causal: Bool
](SourceColumn):
    """Elements of a row of `Logits`, at equal distances.

    Parameters:
        Fusion: What is loaded.
        dtype: Dtype of what is loaded.
        rank: Number of dimensions.
        axis: The axis of the row, not the last.
        causal: Whether the row may end before the tensor does.
    """

    comptime loaded = accumulator[Self.dtype]()

    var row: Row[Self.Fusion, Self.dtype, Self.rank, Self.axis, Self.causal]
    """The row."""
    var first: Int
    """The first element."""
    var step: Int
    """From one to the next."""

    @inline(.always)
    def load[width: Int](self, i: Int) -> SIMD[Self.loaded, width]:
        """Returns element `i` of `width` neighbouring rows."""
        return self.row.load[width, width](self.first + i * self.step)

    @inline(.always)
    def length(self, n: Int) -> Int:
        """Returns how many elements of the whole row take part."""
        return self.row.end


@inline(.always)
def unravel[
    rank: Int, //, start: Int, end: Int
](mut at: IndexList[rank], place: Int, shape: IndexList[rank]):
    """Puts the indices along the dimensions from `start` to `end` of a place that is counted through all of them.

    Parameters:
        rank: Number of dimensions.
        start: The first of them.
        end: The one after the last.

    Args:
        at: Where they are put.
        place: The place, counted as in row-major memory.
        shape: The tensor's shape.
    """
    var rest = place
    comptime for i in reversed(range(start, end)):
        comptime if i == start:
            at[i] = rest
        else:
            var before = _quotient(rest, shape[i])
            at[i] = rest - before * shape[i]
            rest = before


@inline(.always)
def _quotient(a: Int, b: Int) -> Int:
    """Returns a // b of what is not negative."""
    comptime if is_gpu():
        # 64 bits take a GPU a hundred instructions, more than the exponentials of a thread's part of a short row.
        if (a | b) >> 32 == 0:
            return Int(UInt32(a) // UInt32(b))
    return a // b
