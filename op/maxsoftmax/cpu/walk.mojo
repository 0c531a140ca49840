"""Chooses how the rows of an axis are walked."""

from ..queue import Queue
from ..rows import Rows
from .operations import Operation
from .panels import Panels
from .schedule import run, spans_of
from .sources import RowSource
from .strided import StridedRows
from .targets import RowTarget


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
    comptime if contiguous:
        pass
    else:
        var panels = Panels[S.accum](
            rows, line if line > 0 else rows.inner, spans_of(rows.n)
        )
        run(StridedRows(source, operation, target, panels), queue)
