"""What is chosen for a GPU: how threads share rows, which kernels of them run, and where one gives way to another.

A kernel's table is read from its first line to its last: the first that has room for a row takes it.
"""

from std.math import ceildiv
from max.gpu.host import DeviceContext

from ...io.rows import VECTOR_BYTES
from ..hardware.cluster import PORTABLE_BLOCKS

comptime HAS_ROOM = 0
"""Of a row's length: as long as there is room for it in registers and slots."""


struct Lengths(Equatable, TrivialRegisterPassable):
    """Which rows a line is for."""

    var value: Int

    comptime ANY = Self(0)
    comptime WHOLE = Self(1)
    """Rows of whole vectors."""
    comptime OTHER = Self(2)
    """The others."""

    @inline(.always)
    def __init__(out self, value: Int):
        self.value = value

    @inline(.always)
    def are(self, whole: Bool) -> Bool:
        """Returns whether rows that are whole vectors, or are not, are meant.
        """
        return self == Self.ANY or (self == Self.WHOLE) == whole


@fieldwise_init
struct Team(TrivialRegisterPassable):
    """How rows along the last axis are held on the chip."""

    var up_to: Int
    """The longest row, in vectors: in elements, if a vector is one."""
    var block_size: Int
    """Threads a block."""
    var team: Int
    """Those of them that share a row."""
    var vectors: Int
    """Vectors, of each input, that a thread holds in registers."""
    var blocks: Int
    """Blocks a multiprocessor is to hold, which bounds the registers."""
    var sharing: Int
    """Blocks that divide a multiprocessor's shared memory into their slots; 0, if there are none."""
    var lengths: Lengths
    """Of which rows."""
    var in_vectors: Bool
    """Whether a vector is 16 bytes, and not an element."""
    var best: Int
    """What a block of a cluster is best at, in vectors, of computed logits in elements: 1, if all blocks are to share each row; 0, if
    there is no cluster."""

    @staticmethod
    def elements(
        up_to: Int,
        block_size: Int,
        team: Int,
        vectors: Int,
        blocks: Int,
        lengths: Lengths = Lengths.ANY,
    ) -> Self:
        """Rows that are read by the element."""
        return {up_to, block_size, team, vectors, blocks, 0, lengths, False, 0}

    @staticmethod
    def whole(
        up_to: Int,
        block_size: Int,
        team: Int,
        vectors: Int,
        blocks: Int,
        lengths: Lengths = Lengths.ANY,
    ) -> Self:
        """Rows that are read by the vector, and fit in registers."""
        return {up_to, block_size, team, vectors, blocks, 0, lengths, True, 0}

    @staticmethod
    def slotted(up_to: Int, block_size: Int, vectors: Int, blocks: Int) -> Self:
        """Rows that a block holds in registers and slots."""
        return {
            up_to,
            block_size,
            block_size,
            vectors,
            blocks,
            blocks,
            Lengths.ANY,
            True,
            0,
        }

    @staticmethod
    def cluster(
        block_size: Int, vectors: Int, blocks: Int, sharing: Int, best: Int
    ) -> Self:
        """Rows that the blocks of a cluster share."""
        return {
            HAS_ROOM,
            block_size,
            block_size,
            vectors,
            blocks,
            sharing,
            Lengths.ANY,
            True,
            best,
        }

    def kernel(self) -> Self:
        """Returns what of it shapes a kernel, the same for all lines that take that kernel.
        """
        var result = self
        result.up_to = HAS_ROOM
        result.sharing = Int(self.is_slotted())
        result.lengths = Lengths.ANY
        result.in_vectors = True
        result.best = Int(self.is_cluster())
        return result

    def is_slotted(self) -> Bool:
        """Returns whether there are slots in shared memory for more than registers hold.
        """
        return self.sharing > 0

    def is_cluster(self) -> Bool:
        """Returns whether the blocks of a cluster share a row."""
        return self.best > 0

    def has_twin(self) -> Bool:
        """Returns whether rows of whole vectors at multiples of 16 bytes have a kernel of their own, which knows of no edges: with one that does,
        1048576×64 bfloat16 took 1.09 of the time of the kernel before, a single row of 64 float32 1.07, its gradient 1.17; 1048576×256 and 524288×512 bfloat16
        1.03. Rows of three vectors a lane took, with such a one and without: 1×80 float32 0.99 and 0.86 µs, 5000×80 2.55 and 2.30, 1×184 bfloat16 1.38 and 1.13, 1000×304 1.98 and
        1.87, the gradient of 728260×184 202 and 186; but by 32 lanes 5000×300 float32 4.32 and 4.54, 5000×384 4.90 and 5.25 (H200).
        """
        var short = (
            0 < self.up_to <= 16
            or self.vectors <= 2
            or (self.vectors == 3 and 0 < self.up_to <= 48)
        )
        return self.in_vectors and not self.is_cluster() and short

    def room(self, slots: Int) -> Int:
        """Returns how many vectors of each input surely fit in a block, or in a cluster.

        Args:
            slots: Slots of a multiprocessor for a vector of each input.
        """
        if self.sharing == 0:
            return self.up_to
        # The last round is always in registers; what is cut to lines of 128 bytes may be a few vectors longer.
        var room = (
            self.vectors + slots // (self.block_size * self.sharing) + 1
        ) * self.block_size - 16
        return room if self.up_to == HAS_ROOM else min(room, self.up_to)

    @inline(.always)
    def takes(self, n: Int, width: Int, slots: Int) -> Bool:
        """Returns whether there is room for rows in memory, and they are of those that are meant.

        Args:
            n: Their length.
            width: Elements of 16 bytes.
            slots: As of `room`.
        """
        var vectors = n // width
        var room = self.room(slots)
        if self.is_cluster():
            return vectors <= PORTABLE_BLOCKS * room
        var length = vectors if self.in_vectors else n
        return length <= room and self.lengths.are(n % width == 0)

    @inline(.always)
    def cluster_blocks(self, length: Int, room: Int) -> Int:
        """Returns how many blocks of a cluster share a row of some length.

        Args:
            length: As `best` is measured.
            room: What a block has room for.
        """
        return min(ceildiv(length, min(self.best, room)), PORTABLE_BLOCKS)


comptime CROWDED = 768
"""Threads a block that leave each of them 80 registers: for as many rows as fit at a time only so."""


struct Units(TrivialRegisterPassable):
    """How long rows in memory are held by the warps of a cluster, a unit of the row by each.
    """

    var above: Int
    """What rows are longer than, in elements."""
    var up_to: Int
    """The longest."""
    var rounds: Int
    """Vectors of a unit that each lane holds: a row's bits follow from it."""
    var max_threads: Int
    """Threads a block at most, which bounds the registers."""
    var packed_up_to: Int
    """Rows up to which their exponentials, of 16-bit logits, are packed; 0, if they are found again in the row's scale."""
    var blocks: Int
    """Blocks of a cluster."""
    var lengths: Lengths
    """Of which rows."""
    var crowded_up_to: Int
    """Rows up to which they are packed in the registers that blocks of `CROWDED` threads leave, and logarithms computed with as many; 0, if they are not beyond
    `packed_up_to`."""

    def __init__(
        out self,
        above: Int,
        up_to: Int,
        rounds: Int,
        max_threads: Int,
        packed_up_to: Int,
        blocks: Int,
        lengths: Lengths = Lengths.WHOLE,
        crowded_up_to: Int = 0,
    ):
        """Rows of whole vectors, unless it says others."""
        self.above = above
        self.up_to = up_to
        self.rounds = rounds
        self.max_threads = max_threads
        self.packed_up_to = packed_up_to
        self.blocks = blocks
        self.lengths = lengths
        self.crowded_up_to = crowded_up_to

    def with_factor(self) -> Self:
        """Returns how rows are held whose elements are multiplied by a factor each row has, and of float32 by any, as the bits are the same.

        On an H100, 1024 rows of 262144 columns of bfloat16 take 424 µs by 128 registers a thread, 372 by blocks. Of 80001, 90001 and 151937 of float32
        they took 235, 274 and 460, by blocks 228, 256 and 432, before `Ends` kept the parts of units: these and a factor were too much for the registers.
        """
        var result = self
        # There is no room for packed ones.
        result.packed_up_to = 0
        if self.packed_up_to > 0:
            result.max_threads = max(self.max_threads, CROWDED)
        elif self.up_to > 65536 and self.rounds != 16:
            # Lines of other lengths, but for the two that have registers left.
            result.lengths = Lengths.WHOLE
        return result

    @inline(.always)
    def takes(self, n: Int, width: Int) -> Bool:
        """Returns whether rows of length `n`, of vectors of `width`, are meant.
        """
        return self.above < n <= self.up_to and self.lengths.are(n % width == 0)


def line_for(table: List[Team], n: Int, width: Int, slots: Int) -> Int:
    """Returns the first line that takes rows, `len(table)` if none does: arguments are as of `Team.takes`.
    """
    for i in range(len(table)):
        if table[i].takes(n, width, slots):
            return i
    return len(table)


def line_for(table: List[Units], n: Int, width: Int) -> Int:
    """Returns the line that takes rows, `len(table)` if none does: arguments are as of `Units.takes`.
    """
    for i in range(len(table)):
        if table[i].takes(n, width):
            return i
    return len(table)


def slots() -> Int:
    """Returns how many vectors of 16 bytes have a place in the shared memory of a multiprocessor of the GPU that is compiled for.
    """
    comptime gpu = DeviceContext.default_device_info
    # What a few blocks have of static memory, and the driver keeps, is left.
    return (gpu.shared_memory_per_multiprocessor - 16 * 1024) // VECTOR_BYTES


comptime WIDE_SKEWED = 112
"""Positions of columns in registers from which on skewed ones are taken by more threads."""


@fieldwise_init
struct Strip(TrivialRegisterPassable):
    """How columns, rows along another axis, are held on the chip by blocks of 256 threads.
    """

    var up_to: Int
    """Positions, of a block of a cluster."""
    var lanes: Int
    """Vectors of columns that a block takes."""
    var vectors: Int
    """Vectors, of each input, that a thread holds in registers."""
    var blocks: Int
    """Blocks a multiprocessor is to hold, which bounds the registers."""
    var slotted: Bool
    """Whether there are slots in shared memory for more than the registers hold."""
    var together: Int
    """Blocks of a cluster: 0, if they are to be as few as have room; 1, if there is no cluster."""

    def kernel(self) -> Self:
        """Returns what of it shapes a kernel, the same for all lines that take that kernel.
        """
        var result = self
        result.up_to = HAS_ROOM
        result.together = 0 if self.is_cluster() else 1
        return result

    def by(self, together: Int) -> Self:
        """Returns columns that are held the same way by clusters.

        Args:
            together: As of the field of this name.
        """
        var result = self
        result.together = together
        return result

    def is_cluster(self) -> Bool:
        """Returns whether the blocks of a cluster share the positions."""
        return self.together != 1

    def width(self, most: Int, dealt: Bool, fewest: Int) -> Int:
        """Returns how many columns a vector has, for use at compile time.

        Dealt to lanes of more than a warp, no column shares a thread with its neighbours, and fewer are faster: 65536×8×101 of bfloat16 takes 114 µs
        by 8, 69 by two; its gradient 120 µs by two, 94 by one.

        Args:
            most: How many can be read at a time.
            dealt: Whether they are dealt.
            fewest: How many have the same bits as several.
        """
        return fewest if dealt and self.lanes >= 64 else most

    def skews(self, wide: Bool) -> Bool:
        """Returns whether columns may be taken by the granule. Few positions of 16 bits, without slots, are faster dealt: 2048×64×513 of bfloat16 122 µs, and 128
        by the granule, 512×96×1025 104 and 114, or 107 by twice as many threads (H100).

        Args:
            wide: Whether elements have 4 bytes, not 2.
        """
        return self.slotted or wide and self.lanes <= 16

    def times(self, wide: Bool, inputs: Int) -> Int:
        """Returns how many times as many lanes and threads take columns by the granule, so that fewer granules are read by two blocks: where there are slots, and from
        where on the L2 loses the halves of sectors that another block has not written yet. 512×128×1025 of float32 takes 199 µs instead of 241, 512×96×1025 172
        instead of 153.

        Of 16 bits two blocks on a multiprocessor are better than one twice as large, of which fewer fit the GPU evenly. 64×1023×1023 107 µs instead of 118,
        20×700×999, which would be dealt then, 29 instead of 37, 16×3000×1023 88 instead of 95, but 8×8000×1001 124 instead of 123 (H200). Most gradients are slower
        so: 64×1023×1023 146 µs instead of 129, 64×500×4095 211 instead of 184, 8×8000×1001 210 instead of 148, but 20×700×999 33 instead of 41.

        Args:
            wide: Whether elements have 4 bytes, not 2.
            inputs: How many tensors are read.
        """
        if self.slotted:
            return 2 if wide or inputs > 1 else 1
        return 2 if self.up_to > WIDE_SKEWED else 1

    def skewed(self, times: Int) -> Self:
        """Returns how columns are held that are taken by the granule, by `times` as many threads, with the same bits.
        """
        var result = self
        if times > 1:
            result.blocks = ceildiv(self.blocks, times)
        elif not self.slotted:
            result.blocks -= 1
        return result

    def alone(self) -> Self:
        """Returns how columns are held by blocks of which each has a multiprocessor to itself.
        """
        var result = self
        result.blocks = 1
        return result

    @inline(.always)
    def is_skewed(self, n: Int, blocks: Int, multiprocessors: Int) -> Bool:
        """Returns whether columns are taken by the granule rather than dealt.

        On an H100, 512 times n by 1025 of float32 by the granule (dealt): 33 positions 65 µs (52), 56 83 (98), 80 147 (128), 96 153 (198). Of those in
        slots, 64×250×255 of bfloat16, by 192 blocks, takes 14.4 (11.5).

        Args:
            n: Their positions.
            blocks: How many blocks would take them.
            multiprocessors: How many the GPU has.
        """
        if self.slotted:
            return blocks > 3 * multiprocessors
        return 4 * n >= 3 * self.up_to

    def most_blocks(self) -> Int:
        """Returns how many blocks may share a column."""
        return self.together if self.together > 0 else PORTABLE_BLOCKS

    @inline(.always)
    def cluster_blocks(self, n: Int, room: Int) -> Int:
        """Returns how many blocks share a column.

        Args:
            n: Its positions.
            room: How many a block has room for.
        """
        return self.together if self.together > 0 else ceildiv(n, room)


@fieldwise_init
struct Stream(TrivialRegisterPassable):
    """How rows are summed that do not fit on the chip."""

    var block_size: Int
    """Threads a block."""
    var threads_per_sm: Int
    """Threads that a multiprocessor is to hold, which bounds the registers."""
    var unroll: Int
    """Vectors of each input that a thread has under way at a time."""
    var ahead: Bool
    """Whether the next ones, of a single input, are under way while these are added."""
    var rounds: Int
    """Vectors of a unit that each of its lanes takes, unless the row is longer than `max_units` such units: a row's bits follow from it."""
    var max_units: Int
    """Most units of a row, of which each thread of a block merges a few."""
