"""Elements that come from plain memory, and go there.

Both structs are a pointer and nothing else: a kernel's argument of such a type is passed, and known not to alias, as the
pointer is.
"""

from std.builtin.device_passable import DeviceTypeEncoder
from std.sys import size_of

from .eviction import load_aligned, store_vector
from .rounding import rounded
from .rows import Positions, Source, Target, unseen
from .source import RowSource, SourceColumn, SourceLine
from .target import RowTarget, TargetColumn, TargetLine


@fieldwise_init
struct MemorySource[dtype: DType, outlasts: Bool = True](RowSource):
    """Logits in row-major memory.

    Parameters:
        dtype: Their dtype.
        outlasts: Whether a GPU is told, where lines and columns load, to give up results first; not of what may be shared memory.
    """

    comptime device_type: AnyType = Self
    comptime elements = Self.dtype
    comptime in_memory = True
    comptime Line = MemorySourceLine[Self.dtype, Self.outlasts]
    comptime Column = MemorySourceColumn[Self.dtype, Self.outlasts]

    var memory: Source[Self.dtype]
    """Where the first is."""

    @inline(.always)
    def line(self, row: Int, n: Int) -> Self.Line:
        """Returns a row along the last axis."""
        return {self.memory.unsafe_offset(row * n)}

    @inline(.always)
    def address(self, row: Int, n: Int) -> Source[Self.dtype]:
        """Returns where a row along the last axis begins."""
        return self.memory.unsafe_offset(row * n)

    @inline(.always)
    def column(self, at: Positions) -> Self.Column:
        """Returns some elements of a row and its neighbours."""
        return {self.memory.unsafe_offset(at.offset()), at.stride * at.step}

    @inline(.always)
    def in_vectors[width: Int](self) -> Bool:
        """Returns whether the first vector is aligned."""
        return Int(self.memory) % (width * size_of[Self.dtype]()) == 0

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Returns what the driver calls the type."""
        return "MemorySource"


@fieldwise_init
struct MemorySourceLine[dtype: DType, outlasts: Bool = True](SourceLine):
    """Elements in memory, one after the other.

    Parameters:
        dtype: Their dtype.
        outlasts: As of `MemorySource`.
    """

    comptime elements = Self.dtype
    comptime held = Self.dtype
    comptime in_memory = True

    var first: Source[Self.dtype]
    """Where the first is."""

    @inline(.always)
    def onwards(self, start: Int) -> Self:
        """Returns what of the row begins at its element `start`."""
        return {self.first.unsafe_offset(start)}

    @inline(.always)
    def address(self, i: Int) -> Source[Self.elements]:
        """Returns where element `i` is."""
        return self.first.unsafe_offset(i)

    @inline(.always)
    def load[width: Int](self, i: Int) -> SIMD[Self.held, width]:
        """Returns the elements from `i` on, which are aligned."""
        return load_aligned[width, told=Self.outlasts](
            self.first.unsafe_offset(i)
        )


@fieldwise_init
struct MemorySourceColumn[dtype: DType, outlasts: Bool = True](SourceColumn):
    """Elements in memory, at equal distances.

    Parameters:
        dtype: Their dtype.
        outlasts: As of `MemorySource`.
    """

    comptime loaded = Self.dtype

    var first: Source[Self.dtype]
    """Where the first is."""
    var step: Int
    """From one to the next."""

    @inline(.always)
    def address(self, i: Int) -> Source[Self.loaded]:
        """Returns where element `i` of the first row is."""
        return self.first.unsafe_offset(i * self.step)

    @inline(.always)
    def load[width: Int](self, i: Int) -> SIMD[Self.loaded, width]:
        """Returns element `i` of `width` neighbouring rows, which is aligned.
        """
        return load_aligned[width, told=Self.outlasts](self.address(i))


@fieldwise_init
struct MemoryTarget[dtype: DType, passing: Bool = False](RowTarget):
    """Results in row-major memory.

    Parameters:
        dtype: Their dtype.
        passing: Whether a GPU is told that nobody reads those of a row along the last axis soon.
    """

    comptime device_type: AnyType = Self
    comptime in_memory = True
    comptime Line = MemoryTargetLine[Self.dtype, Self.passing]
    comptime Column = MemoryTargetColumn[Self.dtype]

    var memory: Target[Self.dtype]
    """Where the first is."""

    @inline(.always)
    def line(self, row: Int, n: Int) -> Self.Line:
        """Returns the places of a row along the last axis."""
        return {self.memory.unsafe_offset(row * n)}

    @inline(.always)
    def column(self, at: Positions) -> Self.Column:
        """Returns the places of some elements of a row and its neighbours."""
        return {self.memory.unsafe_offset(at.offset()), at.stride * at.step}

    @inline(.always)
    def pairs[accum: DType](self) -> Target[accum]:
        """Returns where the pair of row 0 goes: to the same memory, whatever its type says.
        """
        return self.memory.unsafe_bitcast[Scalar[accum]]()

    @inline(.always)
    def in_vectors[width: Int](self) -> Bool:
        """Returns whether the first vector is aligned."""
        return Int(self.memory) % (width * size_of[Self.dtype]()) == 0

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Returns what the driver calls the type."""
        return "MemoryTarget"


@fieldwise_init
struct MemoryTargetLine[dtype: DType, passing: Bool = False](TargetLine):
    """Places in memory, one after the other.

    Parameters:
        dtype: Dtype of what goes there.
        passing: As of `MemoryTarget`.
    """

    comptime stored = Self.dtype

    var first: Target[Self.dtype]
    """The first."""

    @inline(.always)
    def onwards(self, start: Int) -> Self:
        """Returns what of the row begins at its element `start`."""
        return {self.first.unsafe_offset(start)}

    @inline(.always)
    def is_aligned[width: Int](self) -> Bool:
        """Returns whether the first `width` can be written at a time."""
        return (
            UInt64(Int(self.first)) % UInt64(width * size_of[Self.dtype]()) == 0
        )

    @inline(.always)
    def store[
        accum: DType, width: SIMDLength, //, aligned: Bool
    ](self, i: Int, values: SIMD[accum, width]):
        """Writes the elements from `i` on."""
        var results = rounded[Self.dtype](values)
        comptime if aligned and Self.passing:
            store_vector(self.first.unsafe_offset(i), results)
        elif aligned:
            self.first.unsafe_store[
                alignment=Int(width) * size_of[Self.dtype]()
            ](i, results)
        else:
            comptime for j in range(Int(width)):
                self.first[unsafe_offset=i + j] = results[j]


@fieldwise_init
struct MemoryTargetColumn[dtype: DType](TargetColumn):
    """Places in memory, at equal distances.

    Parameters:
        dtype: Dtype of what goes there.
    """

    comptime stored = Self.dtype

    var first: Target[Self.dtype]
    """The first."""
    var step: Int
    """From one to the next."""

    @inline(.always)
    def address(self, i: Int) -> Target[Self.stored]:
        """Returns where element `i` of the first row goes."""
        return self.first.unsafe_offset(i * self.step)

    @inline(.always)
    def store[
        accum: DType, width: SIMDLength, //
    ](self, i: Int, values: SIMD[accum, width]):
        """Writes element `i` of `width` neighbouring rows, which is aligned."""
        self.address(i).unsafe_store[
            alignment=Int(width) * size_of[Self.dtype]()
        ](0, rounded[Self.dtype](values))

    @inline(.always)
    def forget(mut self):
        """Hides from the compiler that distances are what they were."""
        self.step = unseen(self.step)
