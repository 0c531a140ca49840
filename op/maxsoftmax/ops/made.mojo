"""Logits as attention has them, as functions: what is made of elements that are computed, or loaded, as they are read."""

from std.sys import size_of
from std.utils import IndexList
from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from .finish import Finish
from .forms import AXIS, Forms, place_of, RANK, spread
from ..io.fusion import alignment
from ..io.logits import Logits
from ..io.results import Results
from ..io.rows import Rows, Source
from ..kernels import Kernels
from ..math.online import accumulator
from ..queue import Queue


def made_softmax[
    Out: OutputFusion,
    Fusion: InputFusion,
    out_dtype: DType,
    of: DType,
    rank: Int,
    epilogue: Bool,
    //,
    K: Kernels,
    axis: Int,
](
    y: Results[Out, out_dtype, rank, axis, epilogue],
    fusion: Fusion,
    forms: Forms[of],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes softmax of what `forms` makes of what `fusion` loads.

    Parameters:
        Out: What takes the probabilities.
        Fusion: What is loaded.
        out_dtype: Dtype of the probabilities.
        of: Dtype of what is loaded.
        rank: Number of dimensions.
        epilogue: Whether something takes the probabilities.
        K: `Cpu` or `Gpu`.
        axis: The axis of the softmax, as for `spread`.

    Args:
        y: Probabilities.
        fusion: What is loaded.
        forms: What is made of it.
        rows: How the tensor is divided into rows.
        queue: Where to compute.
    """
    comptime accum = accumulator[of]()
    var ones = y.shape
    ones[axis] = 1
    K.fused[has_sink=True, finish=Finish.PROBABILITIES](
        y,
        Logits[Made[Fusion, of, axis], accum, rank, axis, axis > 0](
            Made[Fusion, of, axis](fusion, forms),
            y.shape,
            forms.masked,
            alignment=alignment(fusion, y.shape),
            beyond=forms.beyond if forms.causal else forms.shape[AXIS],
        ),
        Logits[Sinks[of, axis], accum, rank, axis, False](
            Sinks[of, axis](forms), ones, forms.masked
        ),
        rows,
        queue,
    )


@fieldwise_init
struct InMemory[of: DType, axis: Int](InputFusion):
    """Elements as they lie in row-major memory.

    Parameters:
        of: Their dtype.
        axis: The axis of the softmax.
    """

    var x: Source[Self.of]
    """Where the first is."""
    var shape: IndexList[RANK]
    """The shape of `Forms`."""

    @inline(.always)
    def load[
        dtype: DType, rank: Int, simd_width: Int, element_alignment: Int = 1
    ](self, idx: IndexList[rank]) -> SIMD[dtype, simd_width]:
        """Returns elements."""
        var place = place_of(spread[Self.axis](idx, 0), self.shape)
        return rebind[SIMD[dtype, simd_width]](
            self.x.unsafe_load[
                width=simd_width,
                alignment=element_alignment * size_of[Self.of](),
            ](place)
        )


@fieldwise_init
struct Made[Fusion: InputFusion, of: DType, axis: Int](InputFusion):
    """What is made of elements that a function loads.

    Parameters:
        Fusion: What is loaded.
        of: Its dtype.
        axis: The axis of the softmax.
    """

    var fusion: Self.Fusion
    """What is loaded."""
    var forms: Forms[Self.of]
    """What is made of it."""

    @inline(.always)
    def load[
        dtype: DType, rank: Int, simd_width: Int, element_alignment: Int = 1
    ](self, idx: IndexList[rank]) -> SIMD[dtype, simd_width]:
        """Returns elements."""
        var elements = self.fusion.load[
            Self.of, rank, simd_width, element_alignment
        ](idx).cast[accumulator[Self.of]()]()
        return rebind[SIMD[dtype, simd_width]](
            self.forms.made[simd_width, AXIS - Self.axis + rank - 1](
                elements, spread[Self.axis](idx, 0)
            )
        )


@fieldwise_init
struct Sinks[of: DType, axis: Int](InputFusion):
    """The additional logits.

    Parameters:
        of: Dtype of the logits.
        axis: The axis of the softmax.
    """

    var forms: Forms[Self.of]
    """What they are of."""

    @inline(.always)
    def load[
        dtype: DType, rank: Int, simd_width: Int, element_alignment: Int = 1
    ](self, idx: IndexList[rank]) -> SIMD[dtype, simd_width]:
        """Returns elements."""
        return rebind[SIMD[dtype, simd_width]](
            self.forms.sinks[simd_width, AXIS - Self.axis + rank - 1](
                spread[Self.axis](idx, 0)
            )
        )
