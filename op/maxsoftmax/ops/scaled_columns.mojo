"""Logits along another axis than the last that are what lies in memory times a number, and maybe a sink for each row, for the kernels of a GPU:
elements stay as they are in memory.
"""

from std.builtin.device_passable import DeviceTypeEncoder

from .formed import FormedSource
from .forms import Class, Forms
from ..io.memory import MemorySource, MemorySourceColumn, MemorySourceLine
from ..io.rows import Positions, Source
from ..io.source import RowSource, SourceColumn
from ..math.online import accumulator


@fieldwise_init
struct ScaledSource[dtype: DType, with_sink: Bool](RowSource):
    """A tensor times a number that is positive and finite.

    Parameters:
        dtype: Dtype of the tensor.
        with_sink: Whether each row has one more logit. Kernels that look for one are slower where there is none: 4000×16×512 of bfloat16 take 54 µs by them
            and 44 by those that do not, 64×1023×1023 125 and 111, 64×500×4096 134 and 134 (H200).
    """

    comptime device_type: AnyType = Self
    comptime elements = Self.dtype
    comptime in_memory = True
    comptime has_sink = Self.with_sink
    comptime Line = MemorySourceLine[Self.dtype]
    comptime Column = ScaledColumn[Self.dtype]

    var x: Source[Self.dtype]
    """Where the tensor is."""
    var forms: Forms[Self.dtype]
    """The number, as a scale, and the sinks, if there are any."""

    @inline(.always)
    def line(self, row: Int, n: Int) -> Self.Line:
        """Is not called: rows are not along the last axis."""
        return MemorySource(self.x).line(row, n)

    @inline(.always)
    def column(self, at: Positions) -> Self.Column:
        """Returns some elements of a row and its neighbours."""
        return {
            MemorySource(self.x).column(at),
            self.forms.scale.number.cast[DType.float32](),
        }

    @inline(.always)
    def is_masked(self) -> Bool:
        """Returns whether a row of nothing but -inf gives 0, not NaN."""
        return self.forms.masked

    @inline(.always)
    def sink[
        width: Int
    ](self, outer: Int, inner: Int) -> SIMD[
        accumulator[Self.Column.loaded](), width
    ]:
        """Returns the sinks of `width` neighbouring rows."""
        return rebind[SIMD[accumulator[Self.Column.loaded](), width]](
            FormedSource[Self.dtype, contiguous=False, forms_are=Class.ANY](
                self.x, self.forms
            ).sink[width](outer, inner)
        )

    @inline(.always)
    def in_vectors[width: Int](self) -> Bool:
        """Returns whether the first vector is aligned."""
        return MemorySource(self.x).in_vectors[width]()

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Returns what the driver calls the type."""
        return "ScaledSource"


@fieldwise_init
struct ScaledColumn[dtype: DType](SourceColumn):
    """Elements of a row of `ScaledSource`, at equal distances.

    Parameters:
        dtype: Their dtype.
    """

    comptime loaded = Self.dtype
    comptime scaled = True

    var elements: MemorySourceColumn[Self.dtype]
    """The elements."""
    var number: Float32
    """What they are multiplied by."""

    @inline(.always)
    def factor(self) -> Float32:
        """Returns what elements are multiplied by."""
        return self.number

    @inline(.always)
    def address(self, i: Int) -> Source[Self.loaded]:
        """Returns where element `i` of the first row is."""
        return self.elements.address(i)

    @inline(.always)
    def load[width: Int](self, i: Int) -> SIMD[Self.loaded, width]:
        """Returns element `i` of `width` neighbouring rows."""
        return self.elements.load[width](i)
