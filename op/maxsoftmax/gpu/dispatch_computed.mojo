"""Logits that are computed as they are read, on the GPU: once where a row fits on the chip, or the whole GPU holds it.

Whatever MAX fused into the input is computed in the load, and nothing of it is in memory. What there is no room for is
computed again for the probabilities.
"""

from std.sys import size_of
from max.gpu.host import DeviceContext

from ..ops.finish import Finish
from ..io.rows import Rows
from ..io.source import RowSource
from ..io.target import RowTarget
from ..queue import Queue
from .dispatch import grid_fits, outgrows_clusters
from .hardware.cluster import PORTABLE_BLOCKS
from .hardware.slots import kept_dtype
from .resident import resident
from .partition.row import vector_width, whole_vectors
from .streaming_computed import streaming_computed
from .tuning import ONE_BY_ONE, Team, Tuned


def computed[
    S: RowSource, T: RowTarget, //, finish: Finish
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Enqueues what is to be written of every row of `x`, of 4 bytes or 2, along the last axis: an element for each of its own.
    """
    comptime if _may_outgrow[S]():
        if grid_fits[finish](y, y, x, rows, queue):
            return
    comptime if _outgrows[S](rows.length):
        streaming_computed[finish](y, x, rows, queue)
    else:
        _by_team[finish](y, x, rows, queue)


def _by_team[
    S: RowSource, T: RowTarget, //, finish: Finish
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Rows that blocks hold, or clusters, and those that nothing holds: parameters and arguments are as of `computed`.
    """
    comptime width = vector_width[
        S.Line.elements, S.Line.in_memory, T.Line.stored
    ]()
    comptime if S.Line.in_memory:
        # By nothing but the length, as a row's bits are not to depend on its address.
        if rows.n % width == 0 or rows.n >= 32 * width:
            _by[finish, width, edged=True](y, x, rows, queue)
            return
    else:
        comptime if rows.length % width == 0:
            if whole_vectors[width](y, x, rows):
                _by[finish, width, edged=False](y, x, rows, queue)
                return
        comptime if rows.length == 0 or rows.length > ONE_BY_ONE:
            if rows.n > ONE_BY_ONE:
                if x.is_aligned[width]():
                    _by[finish, width, edged=True](y, x, rows, queue)
                else:
                    _by[finish, width, edged=True, aligned=False](
                        y, x, rows, queue
                    )
                return
    comptime if rows.length <= ONE_BY_ONE:
        _by[finish, 1, edged=False](y, x, rows, queue)


def _by[
    S: RowSource,
    T: RowTarget,
    //,
    finish: Finish,
    width: Int,
    edged: Bool,
    aligned: Bool = True,
    line: Int = 0,
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Rows of whole vectors, which are aligned as in MAX's own elementwise kernels, whose loads these are; or rows that have edges;
    or, one by one, others.

    Parameters:
        S: As of `computed`.
        T: As of `computed`.
        finish: As of `computed`.
        width: Elements a vector.
        edged: As of `resident`.
        aligned: As of `resident`.
        line: The first line of the table that is looked at.
    """
    comptime table = Tuned.computed(size_of[S.Line.held]() > 2, width)
    comptime before = _longest[S](
        table[line - 1], width, edged
    ) if line > 0 else 0
    comptime if line == len(table) or _outgrows[S](before + 1):
        streaming_computed[finish](y, x, rows, queue)
    else:
        comptime t = table[line]
        comptime most = _longest[S](t, width, edged)
        comptime surely = 0 < rows.length <= most
        comptime if most > 0 and (rows.length == 0 or surely):
            if surely or rows.n <= most:
                var blocks = 1
                comptime if t.is_cluster():
                    blocks = t.cluster_blocks(rows.n, _room[S](t, width))
                resident[finish, t, width, edged, aligned](
                    y, x, rows, queue, blocks=blocks
                )
                return
        comptime if not surely:
            _by[finish, width, edged, aligned, line + 1](y, x, rows, queue)


def _may_outgrow[S: RowSource]() -> Bool:
    """Returns whether long rows are the whole GPU's, for use at compile time: not those that end before the tensor does, all of which would be computed, nor what
    is made of elements in memory, which loads look at operand by operand.
    """
    return not (S.is_causal or S.Line.in_memory)


def _outgrows[S: RowSource](n: Int) -> Bool:
    """Returns whether a row of length `n` is one of those; False if that is 0, not known.
    """
    return _may_outgrow[S]() and n > 0 and outgrows_clusters[S](n)


def _longest[S: RowSource](t: Team, width: Int, edged: Bool) -> Int:
    """Returns the longest row that a line of the table takes, in elements, for use at compile time.
    """
    if t.is_cluster():
        return PORTABLE_BLOCKS * _room[S](t, width)
    var whole = t.up_to * width
    if edged and not S.Line.in_memory and whole <= ONE_BY_ONE:
        # What is never longer than that has its elements one by one.
        return 0
    return whole + width - 1


def _room[S: RowSource](t: Team, width: Int) -> Int:
    """Returns how many elements have room in a block of a cluster, for use at compile time.
    """
    comptime gpu = DeviceContext.default_device_info
    var rounds = t.vectors
    if t.is_slotted():
        # What the driver and the kernel itself take is left.
        var bytes = gpu.shared_memory_per_multiprocessor // t.sharing - 8 * 1024
        rounds += bytes // (
            t.block_size * width * size_of[kept_dtype[S.elements]()]()
        )
    return rounds * t.block_size * width
