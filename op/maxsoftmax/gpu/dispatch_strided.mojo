"""Which kernel takes which rows along an axis that is not the last."""

from std.math import ceildiv
from std.sys import size_of
from max.gpu.host import DeviceContext

from ..ops.finish import Finish
from ..io.memory import MemorySource, MemoryTarget
from ..io.source import RowSource
from ..io.target import RowTarget
from ..queue import Queue
from ..io.rows import Positions, Rows, Source, VECTOR_BYTES, nowhere
from .fallback import fallback
from .partition.row import vector_width
from .partition.tile import Tile, Way
from .resident_grid_strided import (
    GRID_LENGTH,
    LANES,
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
        else:
            var aligned = (
                x.in_vectors[width]()
                and y.in_vectors[width]()
                and Int(other) % VECTOR_BYTES == 0
            )
            if aligned and rows.inner % width == 0:
                _by[finish, width, plain=plain](y, x, other, rows, queue)
                return
            comptime if S.in_memory:
                _by[finish, width, Way.DEALT, plain=plain](
                    y, x, other, rows, queue, aligned
                )
            else:
                _by[finish, 1](y, x, other, rows, queue)


def _by[
    S: RowSource,
    T: RowTarget,
    //,
    finish: Finish,
    width: Int,
    way: Way = Way.VECTORS,
    line: Int = 0,
    plain: Bool = False,
](
    y: T,
    x: S,
    other: Source[S.elements],
    rows: Rows,
    queue: Queue,
    aligned: Bool = True,
) raises:
    """Columns that are taken by vectors of `width`, from a `line` of the table on.

    - `way`: How they are taken; dealt ones by the granule where that is faster.
    - `aligned`: Whether all tensors begin with a vector.
    """
    comptime table = Tuned.strips_backward() if finish.is_gradient() else Tuned.strips(
        size_of[S.elements]() > 2, S.in_memory, width > 1
    )
    comptime dealt = way == Way.DEALT
    # Of larger warps fewer rows would be added up, and in another order.
    comptime gpu = DeviceContext.default_device_info
    comptime skews = dealt and gpu.warp_size == 32
    comptime in_grid = plain or (
        finish == Finish.PROBABILITIES
        and S.in_memory
        and S.Column.scaled
        and not S.has_sink
        and T.Column.stored == S.elements
    )
    comptime if line == 0 and in_grid and Tuned.holds_in_grid and not (
        0 < rows.length < GRID_LENGTH
    ):
        var units = grid_column_units(rows.n, queue)
        if units > 0:
            comptime tile = Tile(LANES, width, way)
            comptime if skews:
                comptime skewed = tile.skewed(1)
                if aligned and _fits[skewed](y, x, other, rows):
                    resident_grid_strided[finish, skewed](
                        y, x, rows, units, queue
                    )
                    return
            resident_grid_strided[finish, tile](y, x, rows, units, queue)
            return
    comptime if line == len(table):
        # 0.53 (50257 positions); of gradients 0.57 / 0.52 (20000 positions)
        comptime lanes = 8 if width > 1 else 32
        comptime if skews:
            comptime skewed = Tile(lanes, width).skewed(2)
            if aligned and _fits[skewed](y, x, other, rows):
                streaming_strided[finish, skewed](y, x, other, rows, queue)
                return
        streaming_strided[finish, Tile(lanes, width, way)](
            y, x, other, rows, queue
        )
    else:
        comptime t = table[line]
        # One alone would be divided otherwise (`quotient`).
        comptime fewest = 1 if finish.is_gradient() else 2
        comptime tile = Tile(t.lanes, t.width(width, dealt, fewest), way)
        comptime room = resident_room[S, finish](t, Tile(t.lanes, width))
        comptime most = t.most_blocks() * room
        comptime surely = 0 < rows.length <= most
        comptime if rows.length == 0 or surely:
            if surely or rows.n <= most:
                comptime wide = size_of[S.elements]() > 2
                comptime if skews and t.skews(wide):
                    comptime times = t.times(wide, finish.inputs())
                    comptime skewed = Tile(t.lanes, width).skewed(times)
                    comptime by = t.skewed(times)
                    # Twice the columns are not twice the room: sums take more.
                    comptime limit = resident_room[S, finish](
                        by.alone() if times > 1 else by, skewed
                    )
                    var together = t.cluster_blocks(rows.n, room)
                    var blocks = skewed.count(rows) * together
                    if (
                        aligned
                        and ceildiv(rows.n, together) <= limit
                        and t.is_skewed(rows.n, blocks, queue.sm_count())
                        and _fits[skewed](y, x, other, rows)
                    ):
                        resident_strided[finish, by, skewed](
                            y, x, other, rows, queue, room
                        )
                        return
                comptime held = not (t.slotted or t.is_cluster())
                comptime in_panels = plain and held and (dealt or t.up_to == 8)
                comptime if in_panels:
                    var together = panel_outers[tile](
                        rows, size_of[S.elements]()
                    )
                    if together > 0:
                        resident_panel[finish, t, tile](
                            rebind[MemoryTarget[S.elements]](y).memory,
                            rebind[MemorySource[S.elements]](x).memory,
                            rows,
                            queue,
                            together,
                        )
                        return
                resident_strided[finish, t, tile](
                    y, x, other, rows, queue, room
                )
                return
        comptime if not surely:
            _by[finish, width, way, line + 1, plain](
                y, x, other, rows, queue, aligned
            )


def _fits[
    tile: Tile, S: RowSource, T: RowTarget
](y: T, x: S, other: Source[S.elements], rows: Rows) -> Bool:
    """Returns whether columns can be taken by the granule: where they fill the blocks, and no block writes what others read.
    """
    if not tile.fills(rows.inner):
        return False
    var first = Positions(0, 0, 0, 1, rows.n, rows.inner)
    var place = Int(y.column(first).address(0))
    return place != Int(x.column(first).address(0)) and place != Int(other)
