"""How rows beside a mask are dealt out: which of them a cluster takes, one after the other, and how many blocks and warps share each.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv, gcd
from max.gpu import WARP_SIZE
from max.gpu.host import DeviceContext

from ...ops.forms import Sharing
from ...queue import Queue
from ..hardware.cluster import most_blocks

comptime WARPS = 8
"""Warps of a block where a cluster has enough of them: more blocks on a multiprocessor are at different stages."""

comptime ROOMY = 640
"""Threads of a multiprocessor that have registers for rows of any alignment: with 768, as others are taken, some are in memory that is the L2's. 8192×50257 takes 884 µs of
float32 and 683 of bfloat16 instead of 1048 and 713, 16×1023×1023 42.3 and 28.1 instead of 44.3 and 33.6, but 64×128257 32.5 and 25.7 instead of 28.8 and 19.3: see `gains` (H200)."""


struct Turns(DevicePassable, TrivialRegisterPassable):
    """Which rows a cluster takes, one after the other."""

    comptime device_type: AnyType = Self

    var sharing: Sharing
    """Rows that have the same mask."""
    var step: UInt32
    """How many of them there are from one that a cluster takes to its next: those begin alike."""
    var most: UInt32
    """How many a cluster takes at most."""
    var clusters: UInt32
    """Clusters that take the rows of one mask."""

    def __init__(out self, sharing: Sharing, n: Int, width: Int, most: Int):
        """Turns of up to `most` rows.

        Args:
            sharing: Rows that have the same mask.
            n: Length of each row.
            width: Elements of the vectors that rows begin alike between.
            most: See above.
        """
        self.sharing = sharing
        var alike_at = width // gcd(width, sharing.distance * n)
        self.step = UInt32(min(alike_at, sharing.count))
        var alike = ceildiv(sharing.count, Int(self.step))
        self.most = UInt32(min(most, alike))
        self.clusters = UInt32(ceildiv(alike, Int(self.most)) * Int(self.step))

    @inline(.always)
    def of(self, cluster: Int) -> Tuple[UInt32, UInt32, UInt32]:
        """Returns a cluster's first row, how far they are apart, and how many there are.
        """
        var mask = UInt32(cluster) // self.clusters
        var mine = UInt32(cluster) - mask * self.clusters
        var turn = mine // self.step
        var first = turn * self.most * self.step + mine - turn * self.step
        var count = UInt32(self.sharing.count)
        var rows = min(
            self.most, (count - min(first, count) + self.step - 1) // self.step
        )
        var distance = UInt32(self.sharing.distance)
        var before = mask // distance
        return (
            (before * count + first) * distance + mask - before * distance,
            self.step * distance,
            rows,
        )

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Returns what the driver calls the type."""
        return "Turns"


@fieldwise_init
struct Arrangement(TrivialRegisterPassable):
    """How the units of a row are dealt out."""

    var blocks: Int
    """Blocks that share the row."""
    var warps: Int
    """Warps of each of them, each with a unit."""
    var held: Int
    """Blocks of all rows that a multiprocessor has room for."""

    def at_work(self) -> Int:
        """Returns how many units are at work at a time on a multiprocessor."""
        return self.held * self.warps


def arranged[room: Int, max_threads: Int](units: Int) -> Arrangement:
    """Returns the arrangement that has as many units as possible at work at a time.

    8192×50257, of which 9 blocks have 6 warps, takes 990 µs of float32 and 771 of bfloat16, and by 7 of 8 warps 1012 and 815 (H200, by 768 threads, before `ROOMY`).

    Parameters:
        room: Bytes of shared memory that a warp has.
        max_threads: Threads that a multiprocessor has registers for.

    Args:
        units: Units of a row.
    """
    comptime gpu = DeviceContext.default_device_info
    # Mailboxes, and what the driver keeps.
    comptime of_block = 5 * 1024
    var least = min(most_blocks(), ceildiv(units, WARPS))
    var best = Arrangement(0, 0, 0)
    for count in range(least, min(most_blocks(), least + 2) + 1):
        var warps = ceildiv(units, count)
        var blocks = ceildiv(units, warps)
        var by_memory = gpu.shared_memory_per_multiprocessor // (
            warps * room + of_block
        )
        var held = min(max_threads // WARP_SIZE // warps, by_memory)
        if count == least or held * best.blocks > best.held * blocks:
            best = {blocks, warps, held}
        # No cluster, if one block has all.
        if count == 1:
            break
    return best


def gains(
    full: Arrangement, roomy: Arrangement, units: Int, queue: Queue
) raises -> Bool:
    """Returns whether rows are taken in less time where fewer of their units are at work, with registers for all that each of them needs.

    Args:
        full: The arrangement with more at work.
        roomy: The one with fewer.
        units: Units of all rows.
        queue: Where the kernel would be launched.
    """
    # How often as many units as are at work follow each other: of few rows all are to be under way at once. 256×50257 (18 units at work and 24, 4 turns) gains, 64×128257
    # and 128×128257 (16 and 24, 2 and 5 turns) lose, 256×128257 (10 turns) gains.
    var turns = units // (queue.sm_count() * max(1, full.at_work()))
    return 4 * roomy.at_work() >= 3 * full.at_work() or (
        turns > 8 and 3 * roomy.at_work() >= 2 * full.at_work()
    )
