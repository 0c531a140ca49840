"""Which kernel takes which rows along the last axis: what `auto` is on a GPU."""

from std.sys import size_of

from ..ops.finish import Finish
from ..io.memory import MemorySource, MemoryTarget
from ..queue import Queue
from ..io.rows import Rows, Source, Target, VECTOR_BYTES, nowhere
from ..io.source import RowSource
from ..io.target import RowTarget
from .fallback import fallback
from .streaming_operations import Exponentials
from .streaming import streaming, streaming_pairs
from .streaming_computed import streaming_computed
from .dispatch_strided import strided
from .partition.row import reads_vectors
from .partition.unit import lies
from .resident import resident
from .resident_grid import grid_units, resident_grid
from .resident_grid_partly import partly_units, resident_grid_partly
from .resident_short import resident_short, takes_short
from .resident_units import Again, resident_units
from .tuning import CROWDED, line_for, Team, Tuned, Units, slots


def auto[
    dtype: DType, finish: Finish, contiguous: Bool
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Enqueues the softmax of every row of `x` into `y` by the fastest kernel for the shape.

    Parameters:
        dtype: Dtype of both tensors.
        finish: What of each row is written.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: Probabilities, not in the memory of `x`.
        x: Logits.
        rows: How the memory is divided into rows.
        queue: Where kernels are launched.
    """
    if rows.n == 0:
        # Only pairs are written of rows of nothing.
        fallback[finish](MemoryTarget(y), MemorySource(x), rows, queue)
        return
    comptime if not contiguous:
        strided[finish, plain=finish != Finish.PAIR](
            MemoryTarget(y), MemorySource(x), rows, queue
        )
    elif dtype != DType.float64:
        _contiguous[dtype, finish](y, x, rows, queue)
    elif finish != Finish.PAIR:
        # Not worth kernels of its own.
        streaming_computed[finish](
            MemoryTarget(y), MemorySource(x), rows, queue
        )
    else:
        fallback[finish](MemoryTarget(y), MemorySource(x), rows, queue)


def _contiguous[
    dtype: DType, finish: Finish
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Rows along the last axis: parameters and arguments are as of `auto`."""
    var source = MemorySource(x)
    var target = MemoryTarget(y)
    if units_fit[finish](target, source, rows, queue):
        return
    comptime if finish != Finish.PAIR:
        if grid_fits[finish](
            target, MemoryTarget[passing=True](y), source, rows, queue
        ):
            return
    if teams_fit[finish](target, source, rows, queue):
        return
    comptime if surely_fits[MemorySource[dtype], MemoryTarget[dtype]](
        finish, rows.length
    ):
        pass
    elif not Tuned.streams:
        raise Error("the configuration has no room for such rows")
    elif finish == Finish.PAIR:
        streaming_pairs[Exponentials[dtype, True]](
            y.unsafe_bitcast[Float32](), x, rows, queue
        )
    else:
        streaming[Exponentials[dtype, False], finish](y, x, x, rows, queue)


def converted[
    S: RowSource, T: RowTarget, P: RowTarget, //, finish: Finish
](y: T, passing: P, x: S, rows: Rows, queue: Queue) raises:
    """Enqueues the softmax of every row along the last axis, or its logarithm, in another dtype: parameters and arguments are as of `grid_fits`.
    """
    comptime double = S.elements == DType.float64
    comptime if not double:
        if (
            units_fit[finish](y, x, rows, queue)
            or grid_fits[finish](y, passing, x, rows, queue)
            or teams_fit[finish](y, x, rows, queue)
        ):
            return
    comptime if double or not surely_fits[S, T](finish, rows.length):
        streaming_computed[finish](y, x, rows, queue)


def grid_fits[
    S: RowSource, T: RowTarget, P: RowTarget, //, finish: Finish
](y: T, passing: P, x: S, rows: Rows, queue: Queue) raises -> Bool:
    """Enqueues probabilities or logarithms of every row that `units_fit` is false of, if rows are for the whole GPU, and it holds them.

    Parameters:
        S: Where logits come from: memory, of 4 bytes or 2, maybe with a factor that is the same for all; or computed, and held in as many.
        T: Where results go, no memory of the logits.
        P: The same.
        finish: What of each element is written.

    Args:
        y: Results.
        passing: The same, if nobody will find all of them in the L2.
        x: Logits.
        rows: Rows along the last axis, none of them empty.
        queue: Where kernels are launched.

    Returns:
        Whether they are and it does.
    """
    # Of a length that is known and held by the unit kernels would be compiled that nobody launches.
    comptime may = rows.length == 0 or (
        not _by_unit[S, T](finish, rows.length)
        and outgrows_clusters[S](rows.length)
    )
    comptime if Tuned.holds_in_grid and may:
        if outgrows_clusters[S](rows.n):
            var units = grid_units[S.Line.held](rows.n, queue)
            if units > 0:
                resident_grid[finish](y, passing, x, rows, units, queue)
                return True
            units = partly_units[S.Line.held](rows.n, queue)
            if units > 0:
                resident_grid_partly[finish](passing, x, rows, units, queue)
                return True
    return False


@inline(.always)
def outgrows_clusters[S: RowSource](n: Int) -> Bool:
    """Returns whether a row of length `n` is for the whole GPU, if it is not held by the unit.
    """
    return Tuned.holds_in_grid and Tuned.outgrows_clusters(
        size_of[S.Line.held]() > 2, not lies[S](), n
    )


def resident_fits[
    S: RowSource, T: RowTarget, //, finish: Finish
](
    y: T,
    x: S,
    rows: Rows,
    queue: Queue,
    other: Source[S.elements] = nowhere[S.elements](),
) raises -> Bool:
    """Enqueues what is to be written of every row, if rows fit on the chip.

    Parameters:
        S: Where logits come from: memory, of 4 bytes or 2.
        T: Where results go.
        finish: What of each row is written.

    Args:
        y: Results.
        x: Logits.
        rows: Rows along the last axis, none of them empty.
        queue: Where kernels are launched.
        other: The gradients of results, aligned as `x` is, if their logits' gradient is wanted.

    Returns:
        Whether they do.
    """
    return units_fit[finish](y, x, rows, queue) or teams_fit[finish](
        y, x, rows, queue, other
    )


def teams_fit[
    S: RowSource, T: RowTarget, //, finish: Finish
](
    y: T,
    x: S,
    rows: Rows,
    queue: Queue,
    other: Source[S.elements] = nowhere[S.elements](),
) raises -> Bool:
    """Enqueues what is to be written of every row that `units_fit` is false of, if a block's threads or a cluster's hold it: parameters, arguments and result are as
    of `resident_fits`.
    """
    comptime width = VECTOR_BYTES // size_of[S.elements]()
    comptime if _may_be_short[S, T](finish):
        comptime inputs = finish.inputs()
        comptime short = takes_short[S.elements](rows.length, inputs)
        comptime if rows.length == 0 or short:
            if short or takes_short[S.elements](rows.n, inputs):
                resident_short[finish](y, x, rows, queue, other)
                return True
    comptime by_unit = _by_unit[S, T](finish, rows.length)
    comptime table = _teams_for[S](finish)
    comptime most = slots() // finish.inputs()
    comptime team = line_for(table, rows.length, width, most)
    comptime for i in range(len(table)):
        comptime t = table[i]
        comptime if rows.length == 0 or (i == team and not by_unit):
            if not t.takes(rows.n, width, most):
                continue
            comptime if t.is_cluster():
                var vectors = rows.n // width
                resident[finish, t](
                    y,
                    x,
                    rows,
                    queue,
                    other,
                    t.cluster_blocks(vectors, t.room(most)),
                )
                return True
            else:
                var whole = reads_vectors[width](x, rows)
                comptime for edged in [False, True]:
                    comptime if edged or t.has_twin():
                        if edged or whole:
                            resident[
                                finish, t, width if t.in_vectors else 1, edged
                            ](y, x, rows, queue, other)
                            return True
    return False


def units_fit[
    S: RowSource, T: RowTarget, //, finish: Finish
](y: T, x: S, rows: Rows, queue: Queue) raises -> Bool:
    """Enqueues what is to be written of every row, if a cluster's warps hold a unit of a row each: parameters, arguments and result are as
    of `resident_fits`.
    """
    comptime width = VECTOR_BYTES // size_of[S.elements]()
    comptime units = _units_for[S, T](finish)
    comptime unit = line_for(units, rows.length, width)
    # By nothing but the length, as a row's bits are not to depend on its address.
    comptime for i in range(len(units)):
        comptime line = units[i]
        comptime if rows.length == 0 or i == unit:
            if line.takes(rows.n, width):
                _units[finish, line](y, x, rows, queue)
                return True
    return False


def surely_fits[S: RowSource, T: RowTarget](finish: Finish, n: Int) -> Bool:
    """Returns whether `resident_fits` is true of rows of length `n`, at compile time; False if that is 0, not known.
    """
    comptime width = VECTOR_BYTES // size_of[S.elements]()
    var table = _teams_for[S](finish)
    return n > 0 and (
        _by_unit[S, T](finish, n)
        or line_for(table, n, width, slots() // finish.inputs()) < len(table)
    )


def _by_unit[S: RowSource, T: RowTarget](finish: Finish, n: Int) -> Bool:
    """Returns whether `units_fit` is true of rows of length `n`, at compile time.
    """
    comptime width = VECTOR_BYTES // size_of[S.elements]()
    var units = _units_for[S, T](finish)
    return line_for(units, n, width) < len(units)


def _may_be_short[S: RowSource, T: RowTarget](finish: Finish) -> Bool:
    """Returns whether there are kernels for short rows: from memory to memory, of what is read as it is, maybe times a number, or for their gradients.
    """
    return (
        Tuned.shares_short
        and T.in_memory
        and not (S.Line.signed or S.Line.hidden)
        and (_is_as_it_lies[S, T](finish) or finish.is_gradient())
    )


def _is_as_it_lies[S: RowSource, T: RowTarget](finish: Finish) -> Bool:
    """Returns whether logits are what lies in memory, maybe times a factor and with a mask in memory, and nothing is written but a result for each.
    """
    return (
        lies[S]()
        and not (S.is_causal or S.has_sink or T.has_pairs)
        and (finish == Finish.PROBABILITIES or finish == Finish.LOGARITHMS)
    )


def _teams_for[S: RowSource](finish: Finish) -> List[Team]:
    """Returns how rows are held by the team."""
    comptime wide = size_of[S.elements]() > 2
    if finish.is_gradient():
        return Tuned.backward(wide, finish == Finish.GRADIENT_OF_LOGARITHMS)
    return Tuned.resident(
        wide,
        finish == Finish.PAIR,
        S.Line.hidden
        or S.Line.signed
        or (wide and S.Line.scaled and not S.is_causal),
    )


def _units_for[S: RowSource, T: RowTarget](finish: Finish) -> List[Units]:
    """Returns how rows are held by the unit: of logits that are what lies in memory, maybe times a factor of the row and with a mask in memory, where
    nothing is written but a result for each.
    """
    comptime wide = size_of[S.elements]() > 2
    if _is_as_it_lies[S, T](finish):
        var lines = Tuned.units(wide)
        # Of float32 a number has the bits of a factor for each row.
        comptime if S.Line.signed or (wide and S.Line.scaled):
            for ref line in lines:
                line = line.with_factor()
        return lines^
    return []


def _units[
    S: RowSource, T: RowTarget, //, finish: Finish, line: Units
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Enqueues rows by the unit: parameters and arguments are as of `resident_fits`.
    """
    # Of 16 bits, as are their results, without a factor of each row.
    comptime short = (
        line.packed_up_to > 0
        and size_of[S.elements]() == 2
        and size_of[T.Line.stored]() <= 2
    )
    comptime packs = short and finish == Finish.PROBABILITIES
    # Registers that packed exponentials take are others' to lose. log_softmax of 1, 16, 256 and 8192 rows of 262144 bfloat16 takes 3.4, 7.0, 84.6 and
    # 2605 µs by 512 threads, 3.3, 5.7, 69.0 and 2090 by `CROWDED`, 3.2, 6.9, 64.6 and 1985 by 1024 (H200).
    comptime frees = short and line.max_threads < CROWDED
    comptime by[threads: Int, again_as: Again] = resident_units[
        S=S, T=T, finish, line.rounds, threads, again_as, line.blocks
    ]
    comptime if packs or frees:
        comptime few = Again.PACKED if packs else Again.OF_ROW
        comptime if packs:
            if rows.count() <= line.packed_up_to:
                by[line.max_threads, Again.PACKED](y, x, rows, queue)
                return
        comptime if line.crowded_up_to > 0:
            if rows.count() <= line.crowded_up_to:
                by[CROWDED, few](y, x, rows, queue)
                return
        # More of them are on the chip at a time.
        by[1024, Again.SHORTENED if packs else Again.OF_ROW](y, x, rows, queue)
    else:
        by[line.max_threads, Again.OF_ROW](y, x, rows, queue)
