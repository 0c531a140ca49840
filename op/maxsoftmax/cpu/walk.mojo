"""Chooses how the rows of an axis are walked."""

from ..math.online import accumulator
from ..queue import Queue
from ..io.rows import Rows
from .contiguous import ContiguousRows
from .operations import Operation
from .panels import Panels
from .schedule import run, spans_of
from .sources import RowSource
from .strided import StridedRows
from .targets import RowTarget


comptime lanes_of[dtype: DType, contiguous: Bool]: SIMDLength = (
    1 if contiguous else Panels[accumulator[dtype]()].lanes
)
"""How many rows an operation has side by side."""


def walk[
    S: RowSource, O: Operation, T: RowTarget, //, contiguous: Bool
](
    source: S,
    operation: O,
    target: T,
    rows: Rows,
    queue: Queue,
    line: Int = 0,
) raises:
    """Computes an operation on every row.

    Parameters:
        S: What is read.
        O: What becomes of it.
        T: What is written.
        contiguous: Whether the axis is the last.

    Args:
        source: Tensors.
        operation: The operation.
        target: Results.
        rows: How all of them are divided into rows.
        queue: The CPU to run on.
        line: How many rows are neighbours in every tensor, if not all that have the same place before the axis.
    """
    comptime if not (T.streams or O.by_row):
        var streaming = target.streaming()
        # Of a panel that is narrower than a line, a line has others' columns.
        if streaming and (contiguous or line % Int(O.lanes) == 0):
            walk[contiguous](
                source, operation, streaming.value(), rows, queue, line
            )
            return
    comptime if contiguous:
        run(ContiguousRows(source, operation, target, rows), queue)
    else:
        var panels = Panels[O.accum](
            rows, line if line > 0 else rows.inner, spans_of(rows.n)
        )
        run(StridedRows(source, operation, target, panels), queue)
