"""One warp of a block that looks at the board for the others: where all warps of a GPU read the same words again and again, the L2 has little time for anybody else.
"""

from std.memory import unsafe_stack_allocation
from std.sys import inlined_assembly, is_nvidia_gpu
from max.gpu import thread_idx
from max.gpu.primitives import warp
from max.gpu.sync import barrier

from .board import Board, bits_of, pairs_of, sleep
from .pair import Pair
from .tree_reduction import Shared

comptime LOOKED_FOR = 64
"""Rows that a block has room for; of those after them each warp looks for itself."""

comptime LEAST_UNITS = 1536
"""Units of all rows from which on one warp looks for the others. µs where one does (where all do), H200, bfloat16: 1×2^22, 1024 units, 11.3 (10.9); 1×2^23, 2048 units, 16.9 (16.5), but of float32 4×2^20, as many, 14.7 (15.7); 1×2^24
26.0 (27.4); 16×2^22 73.8 (75.6)."""

comptime LEAST_OF_ROW = 320
"""The same, of each row: 64×2^19 of bfloat16, 128 units each, 40.6 (40.2); 64×1048577, 257 units, 91.5 (87.0)."""


struct Lookout(TrivialRegisterPassable):
    """What the warps of a block know of rows, in shared memory: a word for the pair of each row, 0 while it is not known, and one that says whether somebody looks for it.
    """

    var pairs: Shared[UInt64]
    """The pairs, and then the others."""
    var rows: UInt32
    """The first row of which each warp looks for itself."""

    @inline(.always)
    def __init__(out self, rows: Int, units: Int):
        """Nothing is known yet. All threads of the block call this, at least two for each of `LOOKED_FOR`.

        Args:
            rows: How many rows there are.
            units: How many units each of them has.
        """
        var looks = units >= LEAST_OF_ROW and rows * units >= LEAST_UNITS
        self.rows = LOOKED_FOR if looks else 0
        self.pairs = unsafe_stack_allocation[
            2 * LOOKED_FOR, UInt64, address_space=AddressSpace.SHARED
        ]()
        if Int(thread_idx.x) < 2 * LOOKED_FOR:
            self.pairs[unsafe_offset=Int(thread_idx.x)] = 0
        barrier()

    @inline(.always)
    def seen(self, board: Board, row: UInt32, lane: Int) -> UInt64:
        """Returns what the board has of a row now, if each warp looks for itself, or else 0.

        Args:
            board: As of `wait`.
            row: The same.
            lane: The same.
        """
        return board.seen(row, lane) if row >= self.rows else 0

    @inline(.always)
    def wait[
        exact: Bool, sums: Bool = False
    ](self, board: Board, row: UInt32, lane: Int, seen: UInt64) -> Pair[]:
        """Returns a row's pair, once all of its groups' are there.

        Parameters:
            exact: Of the scale that the sums are in.
            sums: Of this scale, too.

        Args:
            board: Where they are left.
            row: The row.
            lane: This thread's index in its warp.
            seen: What the function of this name returned.
        """
        if row >= self.rows:
            return board.merged[exact, sums](board.there(row, seen, lane))
        var place = self.pairs.unsafe_offset(Int(row))
        var known = UInt64(0)
        var looks = UInt64(0)
        if lane == 0:
            known = _exchange["or"](place, 0)
            if known == 0:
                looks = 1 - _exchange["exch"](
                    place.unsafe_offset(LOOKED_FOR), 1
                )
        if warp.shuffle_idx(UInt32(looks), 0) != 0:
            var pair = board.wait[exact, sums](row, lane)
            if lane == 0:
                _ = _exchange["exch"](place, bits_of(pair))
            return pair
        if lane == 0:
            while known == 0:
                sleep(32)
                known = _exchange["or"](place, 0)
        var pair = pairs_of(known)
        # All of the warp wait here for the first lane.
        return Pair(
            warp.shuffle_idx(pair.m, 0),
            warp.shuffle_idx(pair.d, 0),
        )


@inline(.always)
def _exchange[
    name: StaticString
](place: Shared[UInt64], value: UInt64) -> UInt64:
    """Changes a word at once, and returns what it was: 0 on other GPUs than NVIDIA's, where each warp looks for itself.

    Parameters:
        name: How, as the instruction set calls it.

    Args:
        place: Where it is.
        value: What it is changed by.
    """
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            "atom.shared." + name + ".b64 $0, [$1], $2;",
            UInt64,
            constraints="=l,r,l,~{memory}",
        ](UInt32(Int(place)), value)
    else:
        return 0
