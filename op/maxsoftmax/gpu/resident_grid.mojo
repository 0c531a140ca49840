"""The fast kernel of rows that are longer than what clusters are good at, and that the whole GPU holds: one read and one write an element.

Units are those of `resident_units`. A warp holds its last unit in registers, and those before, one or two, in shared memory, until all of their row has been
summed up, which goes by the `Board`. All blocks are on the GPU at once, so that nobody waits for a block that waits for room.

Logits that are computed, as MAX fuses them into the input, are units as well, and computed once, but for what lies at both ends of a unit.

Where warps take more units than they hold, each asks a counter for its next one, since not all multiprocessors are equally fast. It asks when it has waited, or
before it sums a unit up that there is room for.

Of 26.8 µs of 1×2^24 of bfloat16 on an H200 the launch takes 1.3; all of the row is read after 11.0, summed up after 13.6, and known to all after 16.4; half of the warps
are done after 22.8, the last one after 25.3. That was before pairs were merged without divisions, and bfloat16 was widened in one operation an element: since then it takes
25.5, and 16×2^20 of bfloat16 23.0 instead of 25.0; figures of bfloat16 below are from before. Of other ways to have it known none was faster at all lengths (µs, H200; a copy takes 17, 33, 33, 64 and 127):

| | 1×2^24 bfloat16 | 64×2^19 bfloat16 | 16×2^20 | 64×2^19 | 64×2^20 |
|---|---|---|---|---|---|
| as here | 26.8 | 39.0 | 37.0 | 73.5 | 132.7 |
| the same, and rows that are held at once are asked for as well | 26.1 | 39.8 | 36.6 | 72.6 | 132.4 |
| all ask, when they have waited | 26.6 | 39.8 | 37.0 | 72.8 | 132.2 |
| and the L2 gives up logits first | 27.3 | 40.2 | 37.3 | 73.4 | 133.7 |
| or no kernel clears the board: one warp of each block does, and looks for the others by the word of CUDA's grid groups, with loads that empty the L1 | 27.5 | 40.3 | 38.1 | 74.1 | 133.9 |
| or that warp takes no units, looks with loads that do not, and merges; units are asked for as here | 27.3 | 40.9 | 38.2 | 70.9 | 137.2 |

The other figures here are from before one warp of a block looked for the others whether a row is there (`Lookout`), and the L2 was told to give up logits last.

Of other ways to deal out units and to keep them none was faster at all lengths (H100, float32, µs; a copy takes 179, 180, 46.5, 4.3 and 24.1; before the L2 was told
anything, where many units are by 14 warps):

| | 64×2^20 | 16×2^22 | 16×2^20 | 1×2^20 | 1×2^23 |
|---|---|---|---|---|---|
| as here | 185 | 187 | 48.6 | 7.0 | 31.1 |
| all in turn, one in shared memory | 204 | 210 | 52.1 | 7.0 | 31.3 |
| all in turn, two in shared memory of 13 warps | 193 | 199 | 48.6 | 7.3 | – |
| by the counter, one in shared memory | 191 | 204 | 50.1 | 7.0 | – |
| by the counter, two, and warps begin 2 or 4 µs after each other | 186, 185 | 187, 188 | 48.6, 49.0 | – | – |
| in turn, one, the next unit asked for before this one is summed, to be in the L2 | 250 | 254 | – | 7.0 | 32.8 |
| in turn, two of 14 warps, which copies bring there | 225 | 255 | – | 8.0 | 34.1 |
| one row after the other, the next unit on its way to shared memory | – | – | – | – | 30.5 |
| read twice, by `streaming` | – | – | – | – | 38.5 |

Where memory is faster, on an H200, loads under way are short of room in the L1, of which two units each of 14 warps leave 28 KiB, and of 12 warps 60 (µs; a copy
takes 127, 128, 33 and, of bfloat16, 64, 64):

| | 64×2^20 | 16×2^22 | 16×2^20 | 64×2^20 bfloat16 | 16×2^22 bfloat16 |
|---|---|---|---|---|---|
| as here | 139 | 147 | 37.8 | 75.8 | 75.5 |
| by 13 warps (11) | 142 (139) | 146 (149) | 39.9 (38.4) | 78.3 (76.9) | 78.5 (78.1) |
| the L2 not told of results | 140 | 149 | 37.6 | 76.4 | 76.9 |
| nor the L1 that nobody reads logits again | 140 | 148 | 38.3 | 76.3 | 77.1 |
| both not told, by 14 warps (10) | 145 (140) | 148 (161) | 38.5 (37.9) | 79.5 (77.4) | 78.7 (79.3) |
| the L1 told, the L2 not, by 14 warps | 142 | 146 | 38.0 | 78.4 | 77.3 |
| a unit is written as soon as its row is there, not when its room is needed | 1.00 of the time | 1.01 | 1.01 | 1.01 | 1.00 |

Before that, by 14 warps where units are many, when these and 1×2^20 took 144, 147, 38.1 and 6.3:

| | 64×2^20 | 16×2^22 | 16×2^20 | 1×2^20 |
|---|---|---|---|---|
| without telling the L2 that nobody reads logits again | 145 | 146 | 40.0 | – |
| units of 8 vectors a lane, of 24 warps (12 of 18, 20 of 11, 24 of 9) | 167 (149, 144, 146) | 187 (158, 147, 146) | 44.4 (40.4, 37.6, 38.1) | – |
| a group is merged after its last unit's warp has waited for an older row | 145 | 152 | 38.6 | – |
| whether a row is there is first asked before a unit is summed | 146 | 158 | 38.6 | – |

Of 79 µs of 64×2^20 of bfloat16 waiting for rows takes nothing, and leaving and merging pairs 6, and of 294 µs of 256 such rows 8: most of it is at both ends.
"""

from std.math import ceildiv
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    grid_dim,
)
from max.gpu.primitives import warp

from ..io.eviction import GONE_FIRST, GONE_LAST
from ..io.rows import Rows, VECTOR_BYTES
from ..io.source import RowSource
from ..io.target import RowTarget
from ..ops.finish import Finish
from ..queue import Queue
from .hardware.board import (
    Board,
    GROUP,
    Words,
    clear,
    cooperative,
    most_units,
)
from .hardware.lookout import Lookout
from .hardware.pair import Pair
from .hardware.pdl import pdl_wait
from .partition.granules import Granules
from .partition.held import Held, NO_UNIT, ROUNDS, first_unit
from .partition.row import reads_vectors
from .partition.unit import lies, unit_elements

comptime FEW = 1
"""Units that a warp has in shared memory, of blocks with as many warps as have 128 registers each, all of a multiprocessor: 1×2^22 of float32 takes 16.6 µs, and
by `MANY` 17.4 (H100). Rows that fill more than three quarters of the room have `MANY`: 1×2^24 of bfloat16 takes 27.1 µs, and by `FEW` 28.6; 24×700000, though, 25.2 and
24.6 (H200)."""

comptime MANY = 2
"""The same, of 12 warps: 16×2^22 of float32 takes 187 µs by 14, and by `FEW` 208 (H100)."""


def warps(parked: Int) -> Int:
    """Returns how many warps a block has that park so many units each: of `MANY` as few as leave the L1 more than its least room.
    """
    return 16 if parked == FEW else 12


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(warps(parked) * WARP_SIZE)
    )
)
def resident_grid_kernel[
    S: RowSource, T: RowTarget, finish: Finish, parked: Int, edged: Bool
](
    y: T,
    x: S,
    memory: Words,
    n: Int64,
    rows: Int64,
    units: Int64,
    zero: UInt32,
):
    """Writes softmax of rows along the last axis, or its logarithm.

    Parameters:
        S: As of `Held`.
        T: Where results go, no memory of the logits.
        finish: What of each element is written.
        parked: How many units a warp has in shared memory: `FEW`, if nobody takes more than one beside those, or `MANY`.
        edged: Whether rows may begin or end between two multiples of 16 bytes: with or without it results are the same.

    Args:
        y: Results.
        x: Logits.
        memory: A board.
        n: Length of each row.
        rows: How many there are.
        units: How many units each of them has.
        zero: What nobody but the caller knows to be 0.
    """
    comptime H = Held[S, T, finish, parked, warps(parked), edged]
    comptime many = parked == MANY
    var held = H(y, x, Int(n), UInt32(units))
    var board = Board[GROUP](memory, Int(rows), Int(units))
    var end = UInt32(rows) * UInt32(units)
    var lookout = Lookout(Int(rows), Int(units))
    var stride = UInt32(warps(parked)) * UInt32(grid_dim.x)
    # Where all of it is held at once, nobody asks.
    var in_turn = not many or end <= UInt32(parked + 1) * stride
    pdl_wait()
    var id = first_unit()
    while id < end:
        var u = held.unit(id)
        var raw = H.Raw(fill=H.U.Values(u.filler))
        var after = held.read[past_l1=many](
            id, u, raw, GONE_LAST if many else GONE_FIRST
        )
        var next = id
        var oldest = held.oldest()
        # Nobody waits who has asked for a unit and has not left it: who has room leaves this one and the next before.
        if not in_turn and oldest == NO_UNIT:
            next = board.ask(held.lane)
        var sum = H.Sum(u, raw, after, held.lane, zero, held.factor())
        var before = board.leave(id, Pair(sum.m, sum.d), held.lane)
        var row = board.row(oldest)
        var seen = UInt64(0)
        if oldest != NO_UNIT:
            seen = lookout.seen(board, row, held.lane)
        board.merge[H.exact, H.sums](id, before, held.lane)
        var pair = Pair(sum.m, sum.d)
        if oldest != NO_UNIT:
            pair = lookout.wait[H.exact, H.sums](board, row, held.lane, seen)
        if not in_turn and oldest != NO_UNIT:
            next = board.ask(held.lane)
        if oldest != NO_UNIT:
            held.write(pair)
        held.keep(raw, id, sum.m)
        id = warp.shuffle_idx(next, 0) + stride
    for _ in range(parked):
        if held.oldest() != NO_UNIT:
            var row = board.row(held.oldest())
            var seen = lookout.seen(board, row, held.lane)
            held.write(
                lookout.wait[H.exact, H.sums](board, row, held.lane, seen)
            )
        held.forget()


def grid_units[dtype: DType](n: Int, queue: Queue) raises -> Int:
    """Returns how many units a row has, or 0 if the grid's warps do not hold it, or the board has no room for it.

    Parameters:
        dtype: Dtype of the logits.

    Args:
        n: Elements of the row.
        queue: Where the kernel would be launched.
    """
    var units = units_of[dtype](n)
    var most = min(units_held(MANY, warps(MANY), queue), most_units(GROUP))
    return units if units <= most else 0


def units_of[dtype: DType](n: Int) -> Int:
    """Returns how many units a row has.

    Parameters:
        dtype: Dtype of the logits.

    Args:
        n: Elements of the row.
    """
    return ceildiv(n, unit_elements[dtype](ROUNDS))


def units_held(parked: Int, warps: Int, queue: Queue) raises -> Int:
    """Returns how many units all warps hold together: of a row that has more, some might not be left before all wait for it.

    Args:
        parked: Units that each of them parks, beside the one in registers.
        warps: Warps a block.
        queue: Where the kernel would be launched.
    """
    return (parked + 1) * warps * queue.sm_count()


def resident_grid[
    S: RowSource, T: RowTarget, P: RowTarget, //, finish: Finish
](y: T, passing: P, x: S, rows: Rows, units: Int, queue: Queue) raises:
    """Launches `resident_grid_kernel`.

    Parameters:
        S: As of the kernel.
        T: Where results go.
        P: The same.
        finish: What of each element is written.

    Args:
        y: Results.
        passing: The same, if there are so many that nobody will find all of them in the L2.
        x: Logits.
        rows: Rows along the last axis.
        units: How many units each of them has: what `grid_units` returns.
        queue: Where kernels are launched.
    """
    var count = rows.count() * units
    var blocks = min(queue.sm_count(), count)
    # Of computed logits there is a kernel for all cases, as each compiles what computes them.
    comptime lie = lies[S]()
    var few = lie and 4 * count <= 3 * units_held(FEW, warps(FEW), queue)
    var whole = lie and reads_vectors[Granules[S.Line.held].width](x, rows)
    var size = Board[GROUP].size(rows.count(), units)
    var memory = queue.scratch[DType.uint64](size)
    clear(memory.pointer, size, queue)
    comptime for parked in [FEW, MANY]:
        comptime threads = warps(parked) * WARP_SIZE
        comptime for edged in [False, True]:
            comptime if lie or (parked == MANY and edged):
                if (parked == FEW) == few and whole != edged:

                    @inline(.always)
                    def launch[To: RowTarget](to: To) raises {imm}:
                        queue.launch[
                            resident_grid_kernel[S, To, finish, parked, edged]
                        ](
                            to,
                            x,
                            memory.pointer,
                            Int64(rows.n),
                            Int64(rows.count()),
                            Int64(units),
                            UInt32(0),
                            grid_dim=blocks,
                            block_dim=threads,
                            shared_mem_bytes=parked
                            * threads
                            * ROUNDS
                            * VECTOR_BYTES,
                            attributes=cooperative(),
                        )

                    comptime if parked == MANY:
                        launch(passing)
                    else:
                        launch(y)
    _ = memory^
