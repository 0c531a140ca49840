"""Softmax in another dtype than that of its logits, on the GPU: logits in memory, as a function for `fused`."""

from std.sys import size_of
from std.utils import IndexList
from extensibility.managed_tensor_slice import InputFusion

from ..io.logits import Logits
from ..io.results import IntoMemory, Results
from ..io.rows import LOADED, Rows, Source, Target
from ..math.online import accumulator
from ..ops.finish import Finish
from ..queue import Queue
from .dispatch_computed import fused


@fieldwise_init
struct _Memory[of: DType](InputFusion):
    """Logits in row-major memory.

    Parameters:
        of: Their dtype.
    """

    var x: Source[Self.of]
    """Where the first is."""
    var rows: Rows
    """How the memory is divided into rows."""

    @inline(.always)
    def load[
        dtype: DType, rank: Int, simd_width: Int, element_alignment: Int = 1
    ](self, idx: IndexList[rank]) -> SIMD[dtype, simd_width]:
        """Returns neighbours in memory, maybe widened."""
        var place = idx[0] * self.rows.n + idx[1]
        comptime if rank == 3:
            place = place * self.rows.inner + idx[2]
        comptime alignment = min(LOADED, element_alignment * size_of[Self.of]())
        return self.x.unsafe_load[width=simd_width, alignment=alignment](
            place
        ).cast[dtype]()


def converted[
    dtype: DType, out_dtype: DType, //, finish: Finish, contiguous: Bool
](
    y: Target[out_dtype],
    x: Source[dtype],
    rows: Rows,
    scale: Float64,
    queue: Queue,
) raises:
    """Enqueues softmax of every row of `x`, or its logarithm, into `y`.

    Parameters:
        dtype: Dtype of the logits.
        out_dtype: Dtype of the results.
        finish: What of each row is written: an element for each of its own.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: Results, not in the memory of `x`.
        x: Logits.
        rows: How the memory is divided into rows, none of them empty.
        scale: What results of float8 are multiplied by.
        queue: Where kernels are launched.
    """
    comptime rank = 2 if contiguous else 3
    # Kernels take exponentials as accurate as logits are: for results that are wider, logits are widened.
    comptime in_dtype = accumulator[dtype]() if size_of[out_dtype]() > size_of[
        dtype
    ]() else dtype
    var shape = IndexList[rank](rows.outer, rows.n)
    comptime if not contiguous:
        shape[2] = rows.inner
    var logits = Logits[_Memory[dtype], in_dtype, rank, 1, False](
        _Memory(x, rows),
        shape,
        False,
        aligned=(Int(x) | Int(y)) % LOADED == 0,
    )
    var results = Results[IntoMemory, out_dtype, rank, 1, False](
        IntoMemory(), y, shape, scale
    )
    fused[has_sink=False, finish=finish](results, logits, logits, queue)
