"""Which kernel takes which rows along an axis that is not the last."""

from std.math import ceildiv
from std.sys import size_of

from ..ops.finish import Finish
from ..io.memory import MemorySource, MemoryTarget
from ..io.source import RowSource
from ..io.target import RowTarget
from ..queue import Queue
from ..io.rows import Rows, Source, VECTOR_BYTES, nowhere
from .fallback import fallback
from .partition.row import vector_width
from .resident_grid_strided import (
    GRID_LENGTH,
    grid_column_units,
    resident_grid_strided,
)
from .resident_panel import panel_outers, resident_panel
from .resident_strided import resident_strided, resident_room
from .streaming_strided import streaming_strided
from .tuning import Tuned


def strided[
    S: RowSource, T: RowTarget, //, finish: Finish, plain: Bool = False
](
    y: T,
    x: S,
    rows: Rows,
    queue: Queue,
    other: Source[S.elements] = nowhere[S.elements](),
) raises:
    """Enqueues what is to be written of every row of `x` by the fastest kernel for the shape.

    - `plain`: Whether probabilities or logarithms are written, from plain memory to plain memory of the same dtype.
    - `y`: Results, in no memory that is read for `x`.
    - `rows`: How the tensors are divided into rows, none of them empty.
    - `other`: The gradients of results, if their logits' gradient is wanted.
    """
    comptime if S.elements == DType.float64:
        # Not worth kernels of its own.
        fallback[finish](y, x, rows, queue, other)
    else:
        comptime width = vector_width[
            S.elements, S.in_memory, T.Column.stored
        ]()
        comptime most = (1 << 31) - 1
        if rows.n > most // 2 or rows.count() > most:
            # The others count in 32 bits.
            fallback[finish](y, x, rows, queue, other)
        elif (
            rows.inner % width == 0
            and x.in_vectors[width]()
            and y.in_vectors[width]()
            and Int(other) % VECTOR_BYTES == 0
        ):
            _by[finish, width, plain=plain](y, x, other, rows, queue)
        else:
            comptime if S.in_memory:
                _by[finish, width, dealt=True, plain=plain](
                    y, x, other, rows, queue
                )
            else:
                _by[finish, 1](y, x, other, rows, queue)


def _by[
    S: RowSource,
    T: RowTarget,
    //,
    finish: Finish,
    width: Int,
    dealt: Bool = False,
    line: Int = 0,
    plain: Bool = False,
](y: T, x: S, other: Source[S.elements], rows: Rows, queue: Queue) raises:
    """Columns that are taken by vectors of `width`, or by as many that are `dealt`, from a `line` of the table on.
    """
    comptime table = Tuned.strips_backward() if finish.is_gradient() else Tuned.strips(
        size_of[S.elements]() > 2, S.in_memory, width > 1
    )
    # Pieces of 128 bytes that begin anywhere are slow. Of 16 bits wider ones are faster only where there are many, and columns do not fit in
    # registers: of bfloat16 64×1000×4095 takes 559 µs instead of 642, 64×470×1021 83 instead of 90, but 16×1023×1023 55 instead of 51 and 2048×64×513
    # 142 instead of 128 (H100).
    comptime wide = size_of[S.elements]() == 4
    comptime doubles = dealt and not finish.is_gradient()
    comptime if line == 0 and plain and Tuned.holds_in_grid and not (
        0 < rows.length < GRID_LENGTH
    ):
        var units = grid_column_units(rows.n, queue)
        if units > 0:
            resident_grid_strided[finish, dealt](
                rebind[MemoryTarget[S.elements]](y),
                rebind[MemorySource[S.elements]](x).memory,
                rows,
                units,
                queue,
            )
            return
    comptime if line == len(table):
        # 0.53 (50257 positions); of gradients 0.57 / 0.52 (20000 positions)
        comptime lanes = 8 if width > 1 else 32
        comptime if doubles and wide:
            if rows.inner >= 2 * lanes * width:
                streaming_strided[finish, lanes, 2 * width, dealt](
                    y, x, other, rows, queue
                )
                return
        streaming_strided[finish, lanes, width, dealt](y, x, other, rows, queue)
    else:
        comptime t = table[line]
        comptime room = resident_room[S, finish](t, width)
        comptime most = t.most_blocks() * room
        comptime surely = 0 < rows.length <= most
        # One alone would be divided otherwise (`quotient`).
        comptime fewest = 1 if finish.is_gradient() else 2
        comptime columns = t.width(width, dealt, fewest)
        comptime if rows.length == 0 or surely:
            if surely or rows.n <= most:
                comptime if doubles and t.doubles() and (wide or t.slotted):
                    comptime apart = 2 * t.lanes * columns
                    var blocks = ceildiv(
                        rows.count(), apart
                    ) * t.cluster_blocks(rows.n, room)
                    if rows.inner >= apart and (
                        wide or blocks > 3 * queue.sm_count()
                    ):
                        resident_strided[
                            finish, t.doubled(), 2 * columns, dealt
                        ](y, x, other, rows, queue, room)
                        return
                comptime held = not (t.slotted or t.is_cluster())
                comptime in_panels = plain and held and (dealt or t.up_to == 8)
                comptime if in_panels:
                    var together = panel_outers[t, columns, dealt](
                        rows, size_of[S.elements]()
                    )
                    if together > 0:
                        resident_panel[finish, t, columns, dealt](
                            rebind[MemoryTarget[S.elements]](y).memory,
                            rebind[MemorySource[S.elements]](x).memory,
                            rows,
                            queue,
                            together,
                        )
                        return
                resident_strided[finish, t, columns, dealt](
                    y, x, other, rows, queue, room
                )
                return
        comptime if not surely:
            _by[finish, width, dealt, line + 1, plain](y, x, other, rows, queue)
