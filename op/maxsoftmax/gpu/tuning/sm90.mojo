"""NVIDIA's GPUs with clusters: an H200 was measured, and those after it take the same. Figures are as in `tuning.mojo`."""

from ..hardware.cluster import PORTABLE_BLOCKS, most_blocks
from .configuration import HAS_ROOM, Strip, Team, Units
from .tuning import Generic, Tuning, most_vectors


struct Sm90(Tuning):
    """What clusters add."""

    @staticmethod
    def resident(wide: Bool, pairs: Bool) -> List[Team]:
        var table = Self.in_registers(wide)
        if not pairs:
            # Few rows would be faster over more of the GPU, but the bits of a row may not depend on how many others there are.
            table += [
                Team.slotted(3300, 256, 5, 4),  # 0.97
                # 0.93 / 0.97 (151936 columns). Blocks work best at 8 to 11 vectors a thread, of 16 bits at 8.
                Team.cluster(256, 5, 4, 4, 2740 if wide else 2100),
                # 0.88 / 0.91 (262144 and 400001 columns)
                Team.cluster(256, 16, 2, 2, 1),
            ]
        return table^

    @staticmethod
    def units(wide: Bool) -> List[Units]:
        # µs by units, in turn with clusters of blocks, of 1, 16, 64 and 256 rows. Blocks have four warps, or a multiple: with others some of an
        # SM's schedulers have more to do, and what lies between these lines is left to clusters of blocks (256×201088 float32: 126, and 117).
        if wide:
            return [
                # 65536 columns: 3.0 (4.5), 5.2 (6.4), 11.8 (15.2), 36.8 (40.6)
                Units(57344, 65536, 16, 512, 0, PORTABLE_BLOCKS),
                # 128256 columns: 4.2 (6.0), 9.0 (11.0), 21.5 (25.2), 69.4 (75.3)
                # 100352 columns, seven warps a block: 3.9 (5.1), 7.4 (8.9), 19.1 (19.5), 60.4 (58.7)
                Units(90112, 131072, 16, 512, 0, PORTABLE_BLOCKS),
                # 151936 columns: 4.7 (6.7), 9.8 (12.5), 25.1 (30.8), 81.8 (91.2)
                Units(131072, 155648, 19, 512, 0, PORTABLE_BLOCKS),
                # 262144 columns: 6.8 (9.3), 17.6 (21.4), 45.1 (50.8), 147 (153)
                Units(229376, 262144, 16, 512, 0, PORTABLE_BLOCKS),
                Units(262144, 311296, 19, 512, 0, PORTABLE_BLOCKS),
            ]
        return [
            # 65536 columns of bfloat16: 2.6 (4.1), 3.7 (5.0), 7.5 (10.5), 19.6 (22.5)
            Units(57344, 65536, 8, 768, 96, PORTABLE_BLOCKS),
            # 128256 columns: 3.3 (4.0), 5.5 (6.2), 12.6 (12.8), 37.1 (37.9)
            Units(90112, 131072, 8, 768, 64, PORTABLE_BLOCKS),
            # 151936 columns: 3.9 (4.6), 6.8 (7.2), 15.5 (15.5), 44.5 (44.3)
            Units(131072, 163840, 10, 768, 0, PORTABLE_BLOCKS),
            # On an H100, in turn with clusters of eight: 262144 columns: 4.1 (5.5), 10.3 (11.9), 25.8 (29.7), 93.7 (97.6)
            Units(229376, 262144, 8, 512, 16, most_blocks()),
            # 262208 columns, Gemma 3's: 4.3 (5.6), 10.7 (11.8), 26.5 (29.9), 94.5 (97.4)
            Units(262144, 294912, 9, 512, 16, most_blocks()),
        ]

    comptime holds_in_grid = True

    @staticmethod
    def computed(wide: Bool, width: Int) -> List[Team]:
        var table = Self.computed_in_registers(width)
        if width == 1:
            return table^
        # As long as three blocks fit in a multiprocessor, fewer of them are faster. All of a row in registers is best, as all of it is asked for at
        # once: with slots for more than 4 vectors a thread, filled by 4 at a time, 50256, 128256 and 151936 columns of bfloat16 made 0.69, 0.65
        # and 0.62 of a copy's rate, with 8 the last two of float32 0.60 and 0.64.
        var best = 20480 if wide else 32768
        if not wide:
            return table + [
                Team.cluster(256, 8, 4, 0, best),  # 0.94 (128256)
                Team.cluster(256, 12, 3, 0, best),  # 0.86 (151936)
                Team.cluster(256, 16, 2, 0, best),  # 0.84 (262144)
                Team.cluster(256, 16, 2, 2, best),
            ]
        var most = most_vectors(width)
        table.append(Team.cluster(256, most, 4, 0, best))
        if width > 4:
            table.append(Team.cluster(256, most, 3, 2, best))
            return table^
        return table + [
            Team.cluster(256, 20, 2, 0, best),  # 0.85 (151936)
            Team.cluster(256, 16, 2, 2, best),  # 0.68 (262144)
        ]

    @staticmethod
    def backward(wide: Bool, log: Bool) -> List[Team]:
        var table = Generic.backward(wide, log)
        # Of 262144 columns, blocks of 256 threads make 0.93 of a copy's rate in bfloat16, blocks of 512 0.89; of 128256 columns
        # of float32 they make 0.98 and 1.02.
        table += [
            Team.cluster(256, 3, 3, 3 if wide else 2, 1400),
            Team.cluster(512, 7, 1, 1, 1),
        ]
        return table^

    @staticmethod
    def strips(wide: Bool, in_memory: Bool, in_vectors: Bool) -> List[Strip]:
        var table = Self.strips_of_blocks(wide, in_memory, in_vectors)
        if not in_vectors:
            table.append(Strip(128, 32, 16, 3, False, together=0))
            return table^
        # 0.93 / 0.82 (1000 and 4000 positions)
        var last = table[len(table) - 1]
        table.append(
            Strip(HAS_ROOM, 8, last.vectors, last.blocks, True, together=0)
        )
        if in_memory:
            table += [
                Strip(HAS_ROOM, 8, 16, 2, True, together=8),
                Strip(HAS_ROOM, 4, 16, 2, True, together=8),
            ]
        return table^

    @staticmethod
    def strips_backward() -> List[Strip]:
        var table = Self.strips_backward_of_blocks()
        table += [
            # 0.97 / 0.87 (1024 positions); with as few blocks as have room 0.93 / 0.84.
            Strip(HAS_ROOM, 8, 3, 3, True, together=2),
            Strip(HAS_ROOM, 8, 3, 3, True, together=8),
            # 0.85 / 0.72 (4096 positions)
            Strip(HAS_ROOM, 8, 8, 2, True, together=8),
            # 0.75 / 0.76 (8000 positions)
            Strip(HAS_ROOM, 4, 8, 2, True, together=8),
        ]
        return table^
