"""What is to be known of a kind of GPU, and what is taken of one that nobody has measured: what an H200 is best at without clusters.

Figures are shares of a device copy's rate on an H200, float32 / bfloat16, at the longest row of a line that was measured, and some
500 / 250 MB of it; a line's neighbours do worse there.
"""

from std.math import ceildiv

from .configuration import (
    HAS_ROOM,
    Lengths,
    Stream,
    Strip,
    Team,
    Units,
    WIDE_SKEWED,
)

comptime ONE_BY_ONE = 1024
"""Up to which length rows of computed logits that are no whole vectors are taken by the element. 16×1023×1023 of float32 take 36.7 µs, by
vectors 37.0; 16×2047×2047 take 262 µs, by vectors 138."""


trait Tuning:
    """How a kind of GPU takes rows. How many threads and blocks share a row on the chip, and units of longer ones, shape their bits, which are thus
    those of a model of GPU; all else is about time only.
    """

    @staticmethod
    def resident(wide: Bool, pairs: Bool, made: Bool) -> List[Team]:
        """Rows in memory.

        Args:
            wide: Whether elements have 4 bytes, not 2.
            pairs: Whether all that is written are pairs.
            made: Whether elements are hidden by a mask of bools, or scaled; of those that one number scales only float32 that is not causal was not slower so.
        """
        var table = Self.in_registers(wide, made)
        if not pairs:
            table += [
                Team.slotted(HAS_ROOM, 256, 5, 4),
                Team.slotted(HAS_ROOM, 256, 16, 2),
            ]
        return table^

    @staticmethod
    def in_registers(wide: Bool, made: Bool) -> List[Team]:
        """Those that a block holds in registers."""
        # What is made of elements takes registers, too. With fewer threads, and with 4 vectors each instead of 8, µs scaled, masked of bfloat16 (H100):
        # 4096 columns 91, 113 (94, 124), 8192 columns 91, 115 (100, 126), 16384 columns 93, 116 (100, 127), but 2047 columns 93, 124 (96, 120); of
        # float32 4096 columns 92, 103 (91, 105), 8192 columns 180, 204 (182, 238), where a copy takes 91, of the last 179.
        var held = threads(4, 4 if wide else 8) if made else 1536
        # H200: float32 of 8, 16 and 32 columns, by the element before, 0.81 each; bfloat16 of 8, 16 and 32 0.40 each, of 16 by one lane 0.74.
        var table: List[Team] = [
            Team.whole(1, 128, 1, 1, 8, Lengths.WHOLE),  # 0.81 / 0.80
            # 0.95 / 0.80
            Team.whole(2, 128, 1, 2, 8, Lengths.WHOLE) if wide else Team.whole(
                2, 128, 2, 1, 8, Lengths.WHOLE
            ),
            Team.whole(4, 128, 2, 2, 8, Lengths.WHOLE),  # 1.00 / 0.99
            Team.whole(8, 128, 4, 2, 8, Lengths.WHOLE),  # 1.00 / 0.99
            Team.elements(4, 128, 1, 4, 8),
            Team.elements(8, 128, 2, 4, 8),  # 0.84 / 0.68 (7 columns)
            Team.elements(16, 128, 4, 4, 8),  # 0.87 / 0.66 (13 columns)
            Team.elements(32, 128, 8, 4, 8),  # 0.95 / 0.74 (30 columns)
        ]
        if not wide:
            table += [
                Team.elements(64, 128, 16, 4, 8, Lengths.OTHER),
                Team.elements(128, 128, 32, 4, 8, Lengths.OTHER),
            ]
        # Where lines ended at powers of two only, lanes were idle between them: 150, 333 and 600 columns of float32 took 171, 156 and 141 µs (now 126, 139 and 126), 300 and 321
        # of bfloat16 201 and 194 (132 and 129); 6.7e7 and 1.3e8 elements, of which a copy takes 126. 64×300 bfloat16 takes 1.5 µs for it (1.4). H200.
        table += [
            Team.whole(16, 128, 8, 2, 8),  # 0.99 / 0.99
            Team.whole(24, 128, 8, 3, 8 if made else 12),  # 1.00 / 1.00
            Team.whole(32, 128, 16, 2, 8),  # 0.98 / 0.99
            # 1.00 / 1.00
            Team.whole(48, 64, 8, 6, 16) if wide else Team.whole(
                48, 128, 16, 3, 8 if made else 12
            ),
            # 0.98 / 0.99
            Team.whole(64, 128, 16, 4, 8) if wide else Team.whole(
                64, 128, 32, 2, 8
            ),
            # 1.00 / 1.00. By 16 lanes of 6 vectors 201201×333 of float32 takes 126 µs (140), but 5000×333 5.3 (4.4), and a row's bits may not depend on how many there are.
            Team.whole(96, 64, 32, 3, 16 if made else 20),
            Team.whole(
                128, 64, 32, 4, 20 if wide and not made else 16
            ),  # 0.99 / 0.99
            Team.whole(192, 64, 32, 6, 16),  # 1.00 / 1.00
            Team.whole(256, 64, 64, 4, held // 64),  # 1.00 / 1.00
            Team.whole(384, 64, 64, 6, 16),  # - / 0.98
            # 0.96 / 0.99. H200, 65536×4096 of bfloat16: 258 µs, with 12 blocks 263.
            Team.whole(
                512, 128, 128, 4, (held if wide else threads(4, 8)) // 128
            ),
            Team.whole(768, 128, 128, 6, 8),  # 0.98 / 0.98
            # 0.97 / 0.99
            Team.whole(1024, 256, 256, 4, held // 256) if wide
            or made else Team.whole(1024, 128, 128, 8, 8),
            Team.whole(1536, 256, 256, 6, 4),  # 0.98 / 0.98
            # 0.97 / 0.98
            Team.whole(2048, 512, 512, 4, held // 512) if made else Team.whole(
                2048, 256, 256, 8, 4
            ),
        ]
        return table^

    @staticmethod
    def units(wide: Bool) -> List[Units]:
        """Long rows in memory, by the warp: looked at before `resident`.

        Args:
            wide: Whether elements have 4 bytes, not 2.
        """
        return []

    comptime streams: Bool = True
    """Whether rows in memory that are not held are read twice."""

    comptime shares_short: Bool = True
    """Whether short rows in memory that are no whole vectors have a kernel of their own."""

    comptime stages_masks: Bool = False
    """Whether masks of floats are brought to shared memory, by clusters of blocks."""

    comptime holds_in_grid: Bool = False
    """Whether the whole GPU holds long rows, and columns in memory."""

    @staticmethod
    def outgrows_clusters(wide: Bool, computed: Bool, n: Int) -> Bool:
        """Returns whether a row is the whole GPU's, if it is not held by the unit.

        Args:
            wide: Whether elements have 4 bytes, not 2.
            computed: Whether they are computed, and not in memory.
            n: The row's length.
        """
        return False

    @staticmethod
    def computed(wide: Bool, width: Int) -> List[Team]:
        """Rows of logits that are computed as they are read.

        Args:
            wide: Whether a logit that is kept has 4 bytes, not 2.
            width: Elements a vector; 1, if they are computed one by one.
        """
        var table = Self.computed_in_registers(width)
        if width > 1:
            var most = most_vectors(width)
            table.append(
                Team.whole(
                    512 * most, 512, 512, most, threads(most, width) // 512
                )
            )
        return table^

    @staticmethod
    def computed_in_registers(width: Int) -> List[Team]:
        """Returns how rows are taken that a block holds in registers, of computed logits.
        """
        if width == 1:
            return [
                Team.elements(32, 128, 4, 8, 8),
                Team.elements(256, 128, 32, 8, 8),
                Team.elements(ONE_BY_ONE, 128, 128, 8, 8),
            ]
        var held = threads(4, width)
        var table: List[Team] = [
            Team.whole(16, 128, 4, 4, held // 128),
            Team.whole(32, 128, 8, 4, held // 128),
            Team.whole(64, 128, 16, 4, held // 128),
            Team.whole(128, 128, 32, 4, held // 128),
            Team.whole(256, 64, 64, 4, held // 64),
            Team.whole(512, 128, 128, 4, held // 128),
            Team.whole(1024, 256, 256, 4, held // 256),
            Team.whole(2048, 512, 512, 4, held // 512),
        ]
        if width < 8:
            table.append(Team.whole(3072, 512, 512, 6, 2))
        return table^

    @staticmethod
    def backward(wide: Bool, log: Bool) -> List[Team]:
        """Rows of which the gradient of logits is wanted: at half the vectors, since there are two inputs.

        Args:
            wide: Whether elements have 4 bytes, not 2.
            log: Whether it is of log_softmax.
        """
        # Exponentials, and twice as many elements, take more registers.
        var threads = 1024 if wide and not log else 768
        var blocks = threads // 128
        # Of bfloat16 on an H200, and before that, of the first three by the element; of 40 columns 0.94 (0.96). By twice the lanes of half the vectors 32 and 64 are as
        # fast, 24 and 40 make 0.90 and 0.75. Short rows that are no whole vectors have a kernel of their own.
        var table: List[Team] = [
            Team.elements(4, 128, 1, 4, blocks),
            Team.elements(8, 128, 2, 4, blocks),
            Team.elements(16, 128, 4, 4, blocks),
            Team.elements(32, 128, 8, 4, blocks),
        ] if wide else [
            Team.whole(1, 128, 1, 1, blocks, Lengths.WHOLE),  # 1.03 (0.61)
            Team.whole(2, 128, 2, 1, blocks, Lengths.WHOLE),  # 1.03 (0.60)
            Team.whole(4, 128, 2, 2, blocks, Lengths.WHOLE),  # 1.04 (0.60)
            Team.whole(8, 128, 4, 2, blocks, Lengths.WHOLE),  # 1.04 (0.82)
        ]
        for team in [4, 8, 16, 32, 64, 128, 256]:
            # From two warps on, a team is a block.
            var size = team if team >= 64 else 128
            # 1.3e8 elements of bfloat16 in rows of 300, 600, 1200, 2400 and 5200: 183, 182, 182, 182 and 182 µs; by 4 vectors 203, 189, 189, 190 and 191 (H200). Float32 is as
            # fast by 4. Up to 12 vectors nobody has measured 3. Rows of log_softmax of 300 and 600 take 191 and 184 µs, and 226 and 223 with registers for 1024 threads. Longer ones
            # are faster by 4 vectors: 1200, 2400 and 5200 take 185, 186 and 188 µs by 4, and 190, 193 and 202 by 3, though 4200 takes 205 by 4, and 195 by 3.
            if not wide and 4 < team <= (32 if log else 256):
                var held = threads if log else 1024
                table.append(Team.whole(3 * team, size, team, 3, held // size))
            table.append(Team.whole(4 * team, size, team, 4, threads // size))
        table += [
            # By three blocks a multiprocessor, which six vectors of two inputs are too much for, 10001 columns of bfloat16 took 257 and of log_softmax 284 µs, not 188 and
            # 187, and 6001 of float32 186 and 284, not 185 and 184 (8e8 bytes, H200).
            Team.whole(1536, 256, 256, 6, 2),
            Team.whole(2048, 256, 256, 8, 2),
        ]
        return table^

    @staticmethod
    def strips(wide: Bool, in_memory: Bool, in_vectors: Bool) -> List[Strip]:
        """Columns: by the vector from 129 positions on in pieces of 128 bytes.

        Args:
            wide: Whether elements have 4 bytes, not 2.
            in_memory: Whether logits are not computed as they are read.
            in_vectors: Whether columns are taken by the vector, as in memory they always are.
        """
        var table = Self.strips_of_blocks(wide, in_memory, in_vectors)
        if in_memory and in_vectors:
            table.append(Strip(HAS_ROOM, 8, 16, 2, True, 1))
        return table^

    @staticmethod
    def strips_of_blocks(
        wide: Bool, in_memory: Bool, in_vectors: Bool
    ) -> List[Strip]:
        """Those of which a block holds enough to keep a multiprocessor busy with others.
        """
        if not in_vectors:
            # Computed one by one.
            return [
                Strip(8, 256, 8, 4, False, 1),
                Strip(64, 64, 16, 3, False, 1),
                Strip(128, 32, 16, 3, False, 1),
            ]
        # Of logits that are computed, 16×1024×1024 along axis 1 with a factor: float32 48 µs by three blocks, 54 by two; bfloat16 38 and 30.
        var blocks = 4 if in_memory else (3 if wide else 2)
        return [
            Strip(4, 256, 4, 4, False, 1),
            Strip(8, 256, 8, 3 if wide else 2, False, 1),
            Strip(16, 64, 4, 4, False, 1),
            Strip(64, 16, 4, 4, False, 1),
            Strip(WIDE_SKEWED, 8, 4, 4, False, 1),
            Strip(128, 8, 4, 4, False, 1),  # 0.94
            Strip(HAS_ROOM, 8, 3 if in_memory else 4, blocks, True, 1),
        ]

    @staticmethod
    def strips_backward() -> List[Strip]:
        """Columns of which the gradient of logits is wanted: from 65 positions on in pieces of 128 bytes.
        """
        var table = Self.strips_backward_of_blocks()
        table.append(Strip(HAS_ROOM, 8, 8, 2, True, 1))
        return table^

    @staticmethod
    def strips_backward_of_blocks() -> List[Strip]:
        """Those of which a block holds enough to keep a multiprocessor busy with others.
        """
        return [
            Strip(4, 256, 4, 3, False, 1),
            Strip(8, 256, 8, 2, False, 1),
            Strip(16, 64, 4, 3, False, 1),
            Strip(64, 16, 4, 3, False, 1),
            Strip(WIDE_SKEWED, 8, 4, 3, False, 1),
            Strip(128, 8, 4, 3, False, 1),  # 1.00 / 1.00
            Strip(HAS_ROOM, 8, 3, 3, True, 1),  # 0.99 / 0.98 (300 positions)
        ]

    @staticmethod
    def exponentials(for_logarithm: Bool) -> Stream:
        """Long rows.

        Args:
            for_logarithm: Whether all that is wanted is the logarithm of their sum.
        """
        if for_logarithm:
            return {128, 768, 4, True, 8, 2048}
        return {256, 1024, 4, False, 16, 4096}

    @staticmethod
    def distances() -> Stream:
        """Long rows of which label smoothing takes another sum."""
        return {128, 512, 4, True, 8, 1024}

    @staticmethod
    def products() -> Stream:
        """Long rows of which the gradient of logits is wanted."""
        return {256, 1024, 2, False, 16, 4096}

    comptime waves: Int = 4
    """How many times as many blocks as the GPU holds share long rows of which only pairs are wanted: the more, the less is left for the
    last of them. 50257 columns of float32, in turn with as many as it holds: 300 rows 0.89 of the time, 400 rows 0.88."""

    @staticmethod
    def fill(rows: Int, held: Int) -> Bool:
        """Returns whether a block for each of such rows leaves little of the GPU idle at the end.

        float32, rows that share blocks in turn with a block a row: 600×50257 (0.76 of a wave) 0.98 of the time, 700×128256 (0.88) 1.01,
        1000×128256 (1.26 waves) 0.92, 1500×50257 (1.89) 1.04.

        Args:
            rows: How many there are.
            held: Blocks that the GPU holds at a time.
        """
        var waves = ceildiv(rows, held)
        return waves > 4 or 5 * rows >= 4 * held * waves

    comptime computed_block_size: Int = 512
    """Threads a block where long rows are computed as they are read."""

    comptime mask_bytes: Int = 32
    """How much of a mask of bools a thread has under way at a time. With `masked_slots` 2 instead of 1 and 16 bytes, or 4 and 64: 4×2048×16384 of
    float32 369 µs (397, 379), 1×1024×128256 365 (418, 372), of bfloat16 210 (225, 225)."""
    comptime masked_slots: Int = 2
    """Vectors in slots that are masked at a time."""

    comptime strip_unroll: Int = 4
    """Vectors of long columns that a thread has under way at a time."""
    comptime strip_unit: Int = 512
    """Positions of a unit of them, unless there are more than `strip_units` such units: their bits follow from it."""
    comptime strip_units: Int = 512
    """Most units of a column, which each block of the second launch merges."""
    comptime strip_readers: Int = 3
    """Blocks that read long columns at a time on a multiprocessor, by which they are dealt out, and for gradients."""

    @staticmethod
    def strip_blocks(
        wide: Bool, in_memory: Bool, width: Int, writes: Bool
    ) -> Int:
        """Returns how many blocks with long columns a multiprocessor is to hold.

        Args:
            wide: Whether elements have 4 bytes, not 2.
            in_memory: Whether logits are not computed as they are read.
            width: Columns a vector.
            writes: Whether the launch is the second.
        """
        if not in_memory:
            return 3 if width <= 4 else 2
        if writes:
            return 4 if wide else 3
        return Self.strip_readers if wide else 2

    comptime few_losses: Int = 4096
    """Rows up to which one block sees to all losses, and adds them without another launch."""
    comptime loss_elements: Int = 16
    """Elements of a loss's gradient that a thread takes at a time, with as many under way."""
    comptime loss_rounds: Int = 8
    """How many times that it takes at most: what it has to know of the row takes as long as one of them."""

    comptime many_losses: Int = 2048
    """Rows from which on long ones take `loss_rounds_of_many` rounds, and warps rows of `loss_team_rounds`."""

    @staticmethod
    def loss_rounds_of_many(wide: Bool) -> Int:
        """Returns how many rounds that is: `wide` says whether logits have 4 bytes, not 2.
        """
        # 8192×50257, 8192×128256 and 64×128256 of bfloat16 take 462, 1092 and 13.7 µs by 8, 450, 1076 and 16.2 by 16, 8192×50257 of float32 857 and 864 (H200).
        return Self.loss_rounds * (1 if wide else 2)

    @staticmethod
    def loss_team_rounds(wide: Bool) -> Int:
        """Returns up to how many rounds a warp takes a row alone: `wide` is as there.
        """
        # 32768×4096 of bfloat16 take 169 µs by four warps a row, 146 by one, of float32 263 and 271 (H200). Of few rows one would be a serial chain on few multiprocessors.
        return Self.loss_rounds // (2 if wide else 1)


def most_vectors(width: Int) -> Int:
    """Returns how many vectors of `width` computed logits a thread holds at most: their registers leave room for enough threads.
    """
    return 32 // width


def threads(vectors: Int, width: Int) -> Int:
    """Returns how many threads of logits that are computed, or made of elements, a multiprocessor is to hold.

    Left alone, the assembler has more loads under way in half as many threads, of 8 vectors: 1.5 times as long at 8192
    columns of float32.

    Args:
        vectors: Vectors that a thread keeps in registers.
        width: Elements a vector.
    """
    return 1280 if vectors * max(width, 4) <= 16 else 1024


struct Generic(Tuning):
    """A GPU that nobody has measured."""
