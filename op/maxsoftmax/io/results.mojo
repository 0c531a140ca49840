"""Where probabilities go: into memory, or to what MAX fused into the output of an op."""

from std.builtin.device_passable import DeviceTypeEncoder
from std.sys import size_of
from std.utils import IndexList
from extensibility.managed_tensor_slice import OutputFusion

from .fusion import alignment, piece_width
from .target import RowTarget, TargetColumn, TargetLine
from .logits import unravel
from .rounding import rounded
from .rows import Positions, Rows, Target, unseen, VECTOR_BYTES


@fieldwise_init
struct IntoMemory(OutputFusion):
    """Takes nothing: results go to memory."""

    @inline(.always)
    def store[
        dtype: DType,
        rank: Int,
        simd_width: SIMDLength,
        element_alignment: Int = 1,
    ](self, idx: IndexList[rank], val: SIMD[dtype, simd_width]):
        """Does nothing."""
        pass


struct Results[
    Fusion: OutputFusion, dtype: DType, rank: Int, axis: Int, fused: Bool
](RowTarget):
    """A tensor to be written, of which nothing can be read.

    Parameters:
        Fusion: What the graph compiler has elements handed to.
        dtype: Dtype of the elements.
        rank: Number of dimensions.
        axis: The axis that sums to 1, counted from 0.
        fused: Whether they are handed to it; otherwise they go to memory.
    """

    comptime device_type: AnyType = Self
    comptime Line = ResultRow[
        Self.Fusion, Self.dtype, Self.rank, Self.axis, Self.fused
    ]
    comptime Column = ResultsColumn[
        Self.Fusion, Self.dtype, Self.rank, Self.axis, Self.fused
    ]

    var fusion: Self.Fusion
    """What is handed the elements, where fused."""
    var memory: Target[Self.dtype]
    """Where the first element goes, where not."""
    var shape: IndexList[Self.rank]
    """The tensor's shape."""
    var alignment: Int
    """As `alignment` says, where fused."""
    var scale: Float64
    """What elements of float8 are multiplied by."""

    @inline(.always)
    def __init__(
        out self,
        fusion: Self.Fusion,
        memory: Target[Self.dtype],
        shape: IndexList[Self.rank],
        scale: Float64 = 1,
    ):
        self.fusion = fusion
        self.memory = memory
        self.shape = shape
        self.alignment = 1
        comptime if Self.fused:
            self.alignment = alignment(fusion, shape)
        self.scale = scale

    @inline(.always)
    def line(self, row: Int, n: Int) -> Self.Line:
        """Returns the places of a row along the last axis."""
        return self.row(row, 0)

    @inline(.always)
    def row(self, outer: Int, inner: Int) -> Self.Line:
        """Returns the row before and after whose axis there are these places, counted as in row-major memory.
        """
        var at = IndexList[Self.rank]()
        var memory = self.memory
        var step = 1
        comptime if Self.fused:
            unravel[Self.axis + 1, Self.rank](at, inner, self.shape)
            unravel[0, Self.axis](at, outer, self.shape)
        else:
            comptime for i in range(Self.axis + 1, Self.rank):
                step *= self.shape[i]
            memory = memory.unsafe_offset(
                outer * self.shape[Self.axis] * step + inner
            )
        var place = UInt32(outer) * UInt32(self.shape[Self.axis])
        return {
            self.fusion,
            memory,
            at,
            step,
            place,
            self.alignment,
            self.scale,
        }

    @inline(.always)
    def column(self, at: Positions) -> Self.Column:
        """Returns the places of some elements of a row, and of its neighbours along the last axis.
        """
        var row = self.row(at.outer, at.inner)
        comptime if Self.fused:
            return {row, at.first, at.step}
        else:
            return {row.onwards(at.first), 0, at.step * row.step}

    @inline(.always)
    def pairs[accum: DType](self) -> Target[accum]:
        """Returns where the pair of row 0 goes: to memory, as nothing takes pairs.
        """
        return self.memory.unsafe_bitcast[Scalar[accum]]()

    @inline(.always)
    def in_vectors[width: Int](self) -> Bool:
        """Returns whether `width` neighbours can be written at a time: always, where they are handed on.
        """
        comptime bytes = min(VECTOR_BYTES, width * size_of[Self.dtype]())
        return Self.fused or Int(self.memory) % bytes == 0

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Returns what the driver calls the type."""
        return "Results"


comptime Into[dtype: DType] = Results[IntoMemory, dtype, 3, 1, False]
"""Results in memory, of whatever rank."""


def into_memory[
    dtype: DType, //
](y: Target[dtype], rows: Rows, scale: Float64) -> Into[dtype]:
    """Returns results in memory.

    Parameters:
        dtype: Their dtype.

    Args:
        y: Where the first goes.
        rows: How the tensor is divided into rows.
        scale: What those of float8 are multiplied by.
    """
    return {IntoMemory(), y, {rows.outer, rows.n, rows.inner}, scale}


@fieldwise_init
struct ResultRow[
    Fusion: OutputFusion, dtype: DType, rank: Int, axis: Int, fused: Bool
](TargetLine):
    """A row of `Results`, or what of it begins at one of its elements.

    Parameters:
        Fusion: What is handed the elements, where fused.
        dtype: Dtype of the elements.
        rank: Number of dimensions.
        axis: The axis of the row.
        fused: Whether they are handed to it; otherwise they go to memory.
    """

    comptime stored = Self.dtype

    var fusion: Self.Fusion
    """What is handed the elements, where fused."""
    var memory: Target[Self.dtype]
    """Where the first element goes, where not."""
    var at: IndexList[Self.rank]
    """Where in the tensor the first element is."""
    var step: Int
    """The distance in memory between neighbours in the row."""
    var place: UInt32
    """Where in the tensor's row-major memory the first element would be, along the last axis: of that the lowest bits."""
    var alignment: Int
    """As of `Results`."""
    var scale: Float64
    """What elements of float8 are multiplied by."""

    @inline(.always)
    def beside(self, columns: Int) -> Self:
        """Returns the row that is so many further along the last axis, where that is not its own.
        """
        var result = self
        comptime if Self.fused:
            result.at[Self.rank - 1] += columns
        else:
            result.memory = self.memory.unsafe_offset(columns)
        return result

    @inline(.always)
    def onwards(self, start: Int) -> Self:
        """Returns what of the row begins at its element `start`."""
        var result = self
        comptime if Self.fused:
            result.at[Self.axis] += start
            result.place += UInt32(start)
        else:
            result.memory = self.memory.unsafe_offset(start * self.step)
        return result

    @inline(.always)
    def is_aligned[width: Int](self) -> Bool:
        """Returns whether `width` elements can be written, or handed on, at a time.
        """
        comptime bytes = min(VECTOR_BYTES, width * size_of[Self.dtype]())
        comptime if Self.fused:
            return self.alignment >= width and self.place % UInt32(width) == 0
        return UInt64(Int(self.memory)) % UInt64(bytes) == 0

    @inline(.always)
    def store[
        accum: DType, width: SIMDLength, //, aligned: Bool
    ](self, i: Int, values: SIMD[accum, width]):
        """Writes the elements from `i` on, one by one or handed on as such if they are not aligned.
        """
        comptime if aligned:
            self.store[alignment=Int(width)](i, values)
        elif Self.fused:
            self.store[alignment=1](i, values)
        else:
            comptime for j in range(Int(width)):
                self.store[alignment=1](i + j, values[j])

    @inline(.always)
    def store[
        accum: DType, width: SIMDLength, //, *, alignment: Int = 1
    ](self, i: Int, values: SIMD[accum, width]):
        """Writes `width` elements along the tensor's last axis from the row's element `i` on, none beyond the tensor.

        Parameters:
            accum: Dtype of the arithmetic.
            width: How many.
            alignment: How many can be written at a time.

        Args:
            i: Where in the row.
            values: The elements, to be rounded.
        """
        var results = rounded[Self.dtype](values, self.scale)
        comptime if Self.fused:
            var at = self.at
            at[Self.axis] += i
            comptime piece = piece_width[Self.Fusion](Int(width))
            comptime for k in range(0, Int(width), piece):
                self.fusion.store[
                    Self.dtype, Self.rank, piece, min(piece, alignment)
                ](at, results.slice[piece, offset=k]())
                at[Self.rank - 1] += piece
        else:
            self.memory.unsafe_store[
                alignment=min(VECTOR_BYTES, alignment * size_of[Self.dtype]())
            ](i * self.step, results)


@fieldwise_init
struct ResultsColumn[
    Fusion: OutputFusion, dtype: DType, rank: Int, axis: Int, fused: Bool
](TargetColumn):
    """Places of elements of a row of `Results`, at equal distances.

    Parameters:
        Fusion: What is handed the elements, where fused.
        dtype: Dtype of the elements.
        rank: Number of dimensions.
        axis: The axis of the row, not the last.
        fused: Whether they are handed to it; otherwise they go to memory.
    """

    comptime stored = Self.dtype

    var row: ResultRow[
        Self.Fusion, Self.dtype, Self.rank, Self.axis, Self.fused
    ]
    """The row, in memory from the first element on."""
    var first: Int
    """The first element, where fused."""
    var step: Int
    """From one to the next, in memory in its elements."""

    @inline(.always)
    def store[
        accum: DType, width: SIMDLength, //
    ](self, i: Int, values: SIMD[accum, width]):
        """Writes element `i` of `width` neighbouring rows."""
        comptime if Self.fused:
            self.row.store[alignment=Int(width)](
                self.first + i * self.step, values
            )
        else:
            comptime bytes = Int(width) * size_of[Self.dtype]()
            self.address(i).unsafe_store[alignment=min(VECTOR_BYTES, bytes)](
                0, self.results(values)
            )

    @inline(.always)
    def results(self, values: SIMD[_, _]) -> SIMD[Self.stored, values.length]:
        """Returns values as they are written."""
        return rounded[Self.dtype](values, self.row.scale)

    @inline(.always)
    def address(self, i: Int) -> Target[Self.stored]:
        """Returns where in memory element `i` of the first row goes."""
        return self.row.memory.unsafe_offset(i * self.step)

    @inline(.always)
    def forget(mut self):
        """Hides from the compiler that distances are what they were."""
        comptime if not Self.fused:
            self.step = unseen(self.step)
