"""Where the gradient of a loss goes: probabilities less 1 for each row's class, and the pairs of rows elsewhere."""

from std.builtin.device_passable import DeviceTypeEncoder
from std.utils.numerics import nan

from ..math.loss import Class, Targets
from .memory import MemoryTargetColumn, MemoryTargetLine
from .rows import Positions, Target
from .target import RowTarget, TargetLine


@fieldwise_init
struct LessTarget[dtype: DType](RowTarget):
    """Gradients of logits in row-major memory, made of probabilities along the last axis.

    Parameters:
        dtype: Their dtype.
    """

    comptime device_type: AnyType = Self
    comptime Line = LessTargetLine[Self.dtype]
    comptime Column = MemoryTargetColumn[Self.dtype]
    comptime has_pairs = True

    var memory: Target[Self.dtype]
    """Where the first is."""
    var of_rows: Target[DType.float32]
    """Where the pair of row 0 goes."""
    var targets: Targets
    """Class of each row."""
    var ignored: Int64
    """The class of rows that do not count."""

    @inline(.always)
    def line(self, row: Int, n: Int) -> Self.Line:
        """Returns the places of a row along the last axis."""
        return {
            MemoryTargetLine(self.memory.unsafe_offset(row * n)),
            self.targets,
            row,
            n,
            self.ignored,
        }

    @inline(.always)
    def column(self, at: Positions) -> Self.Column:
        """Is not called: rows are along the last axis."""
        return {self.memory, at.stride}

    @inline(.always)
    def pairs[accum: DType](self) -> Target[accum]:
        """Returns where the pair of row 0 goes."""
        return self.of_rows.unsafe_bitcast[Scalar[accum]]()

    @inline(.always)
    def in_vectors[width: Int](self) -> Bool:
        """Returns whether the first vector is aligned."""
        return MemoryTargetLine(self.memory).is_aligned[width]()

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Returns what the driver calls the type."""
        return "LessTarget"


struct LessTargetLine[dtype: DType](TargetLine):
    """Places in memory, one after the other, and which of them is that of the row's class.

    Parameters:
        dtype: Dtype of what goes there.
    """

    comptime stored = Self.dtype

    var places: MemoryTargetLine[Self.dtype]
    """The places."""
    var targets: Targets
    """Class of each row."""
    var row: Int
    """Which row it is."""
    var n: Int
    """Classes."""
    var ignored: Int64
    """The class of rows that do not count."""
    var start: Int32
    """Which element of the row is at the first place."""
    var ahead: Int32
    """How far the place of the class is from the first one; before it if there is none."""
    var all: Float32
    """What all of a row is that does not count, or whose target is no class."""
    var is_of_class: Bool
    """Whether the row's target is a class."""

    @inline(.always)
    def __init__(
        out self,
        places: MemoryTargetLine[Self.dtype],
        targets: Targets,
        row: Int,
        n: Int,
        ignored: Int64,
    ):
        """A row whose class has not been looked at."""
        self.places = places
        self.targets = targets
        self.row = row
        self.n = n
        self.ignored = ignored
        self.start = 0
        self.ahead = -1
        self.all = 0
        self.is_of_class = True

    @inline(.always)
    def onwards(self, start: Int) -> Self:
        """Returns what of the row begins at its element `start`."""
        var result = self
        result.places = self.places.onwards(start)
        result.start += Int32(start)
        result.ahead -= Int32(start)
        return result

    @inline(.always)
    def begin(mut self):
        """Looks at the row's class."""
        var target = Class.of(
            self.targets, self.row, self.n, Int(self.ignored), False
        )
        self.ahead = Int32(target.index) - self.start
        self.is_of_class = target.is_class
        self.all = 0 if target.is_ignored else nan[DType.float32]()

    @inline(.always)
    def is_aligned[width: Int](self) -> Bool:
        """Returns whether the first `width` can be written at a time."""
        return self.places.is_aligned[width]()

    @inline(.always)
    def store[
        accum: DType, width: SIMDLength, //, aligned: Bool
    ](self, i: Int, values: SIMD[accum, width]):
        """Writes the elements from `i` on."""
        var results = values
        var at = UInt32(self.ahead - Int32(i))
        if at < UInt32(width):
            comptime for j in range(Int(width)):
                if at == UInt32(j):
                    results[j] -= 1
        if not self.is_of_class:
            results = SIMD[accum, width](self.all.cast[accum]())
        self.places.store[aligned](i, results)
