"""Which kernel takes which rows along the last axis: what `auto` is on a GPU."""

from std.sys import size_of

from ..ops.finish import Finish
from ..io.memory import MemorySource, MemoryTarget
from ..queue import Queue
from ..io.rows import Rows, Source, Target, VECTOR_BYTES, nowhere
from ..io.source import RowSource
from ..io.target import RowTarget
from .hardware.cluster import PORTABLE_BLOCKS
from .fallback import fallback
from .streaming_operations import Exponentials
from .streaming import streaming, streaming_pairs
from .streaming_computed import streaming_computed
from .dispatch_strided import strided
from .resident import resident
from .resident_grid import grid_holds, resident_grid
from .resident_units import Again, resident_units
from .tuning import Tuned, Units, slots


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
        strided[finish](MemoryTarget(y), MemorySource(x), rows, queue)
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
    if resident_fits[finish](MemoryTarget(y), MemorySource(x), rows, queue):
        return
    comptime if not Tuned.streams:
        raise Error("the configuration has no room for such rows")
    elif finish == Finish.PAIR:
        streaming_pairs[Exponentials[dtype, True]](
            y.unsafe_bitcast[Float32](), x, rows, queue
        )
    else:
        comptime if Tuned.holds_in_grid:
            if grid_holds[dtype](rows.n, queue):
                resident_grid[finish](MemoryTarget(y), x, rows, queue)
                return
        streaming[Exponentials[dtype, False], finish](y, x, x, rows, queue)


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
    comptime width = VECTOR_BYTES // size_of[S.elements]()
    comptime wide = size_of[S.elements]() > 2
    comptime table = Tuned.backward(
        wide, finish == Finish.GRADIENT_OF_LOGARITHMS
    ) if finish.is_gradient() else Tuned.resident(wide, finish == Finish.PAIR)
    # By nothing but the length, as a row's bits are not to depend on its address.
    var vectors = rows.n // width
    var whole = rows.n % width == 0
    comptime if _in_units[S, T](finish):
        comptime lines = Tuned.units(wide)
        comptime for i in range(len(lines)):
            comptime line = lines[i]
            if line.above < rows.n <= line.up_to and line.lengths.are(whole):
                _units[finish, line](y, x, rows, queue)
                return True
    comptime for i in range(len(table)):
        comptime t = table[i]
        comptime room = t.room(slots() // finish.inputs())
        comptime if t.is_cluster():
            if vectors <= PORTABLE_BLOCKS * room:
                resident[finish, t](
                    y, x, rows, queue, other, t.cluster_blocks(vectors, room)
                )
                return True
        else:
            var length = vectors if t.in_vectors else rows.n
            if length <= room and t.lengths.are(whole):
                comptime for edged in [False, True]:
                    comptime if edged or t.has_twin():
                        if edged or (whole and x.in_vectors[width]()):
                            resident[
                                finish, t, width if t.in_vectors else 1, edged
                            ](y, x, rows, queue, other)
                            return True
    return False


def _in_units[S: RowSource, T: RowTarget](finish: Finish) -> Bool:
    """Returns whether rows may be held by the unit: of logits that are what lies in memory, and nothing but results for each.
    """
    return (
        S.Line.in_memory
        and S.Line.elements == S.Line.held
        and not (S.Line.scaled or S.Line.transformed)
        and not (S.is_causal or S.has_sink or T.has_pairs)
        and (finish == Finish.PROBABILITIES or finish == Finish.LOGARITHMS)
    )


def _units[
    S: RowSource, T: RowTarget, //, finish: Finish, line: Units
](y: T, x: S, rows: Rows, queue: Queue) raises:
    """Enqueues rows by the unit: parameters and arguments are as of `resident_fits`.
    """
    var logits = x.line(0, rows.n).address(0)
    comptime packs = (
        line.packed_up_to > 0
        and finish == Finish.PROBABILITIES
        and size_of[S.elements]() == 2
        and size_of[T.Line.stored]() <= 2
    )
    comptime if not packs:
        resident_units[
            finish, line.rounds, line.max_threads, Again.OF_ROW, line.blocks
        ](y, logits, rows, queue)
    else:
        if rows.count() <= line.packed_up_to:
            resident_units[
                finish, line.rounds, line.max_threads, Again.PACKED, line.blocks
            ](y, logits, rows, queue)
        else:
            # More of them are on the chip at a time.
            resident_units[
                finish, line.rounds, 1024, Again.SHORTENED, line.blocks
            ](y, logits, rows, queue)
