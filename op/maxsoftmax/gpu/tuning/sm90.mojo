"""NVIDIA's GPUs with clusters: an H200 was measured, and those after it take the same, as far as they have the shared memory. Figures are as in `tuning.mojo`."""

from max.gpu.host import DeviceContext

from ..hardware.cluster import PORTABLE_BLOCKS, most_blocks
from .configuration import HAS_ROOM, Lengths, Strip, Team, Units
from .tuning import Generic, Tuning, most_vectors


struct Sm90(Tuning):
    """What clusters add."""

    @staticmethod
    def resident(wide: Bool, pairs: Bool, made: Bool) -> List[Team]:
        var table = Self.in_registers(wide, made)
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
        # µs by units in clusters of 16 (of 8), of 1, 16, 64 and 256 rows, in one process on an H200. Where rows are few, blocks have four warps, or a
        # multiple: with others some of an SM's schedulers have more to do, and what lies between these lines is left to clusters of blocks. So are rows of
        # 201088 logits of 16 bits: by 7 vectors a lane 3.6 (5.3), 9.0 (9.1), 18.8 (19.4), but 62.8 (58.3). Where it says H100, it was one of these, and µs are by units (by
        # blocks, in clusters or not), of 1, 32, 256 and 8192 rows.
        comptime few = PORTABLE_BLOCKS
        comptime ANY = Lengths.ANY
        if wide:
            return [
                # Of these three lines µs are those of 1, 32, 256 and 1.34e8 elements' rows on an H200 (by 4 vectors a lane, of the last by 6): more of them are faster
                # where rows are many. 12288 columns: 1.9, 3.0, 8.2, 255 (1.9, 2.9, 8.6, 270). H100, 8200 columns, 512 rows, by 4 vectors: 9.8 (by blocks 8.8)
                Units(10239, 12288, 6, 768, 0, few // 2),
                # 16384 columns: 2.1, 3.6, 9.8, 257 (in clusters of 8 1.7, 3.2, 10.6, 264). H100, 16385 columns, 256 rows, so: 11.2 (by blocks 10.1)
                Units(12288, 16384, 8, 768, 0, few // 2),
                # 20480 columns: 2.1, 3.9, 13.0, 255 (1.9, 3.8, 13.9, 285), in clusters of 4 2.4, 4.1, 12.4, 256; 24576: 2.1, 4.3, 14.7, 256 (1.9, 4.1, 14.8, 261)
                Units(16384, 24576, 8, 768, 0, few),
                # H100, 32000 columns: 2.2 (4.0), 3.7 (5.9), 23.1 (26.0), 695 (702); 32001: 2.5 (4.1), 4.4 (5.9), 25.5 (26.5), 692 (706)
                Units(24576, 32768, 8, 768, 0, few, ANY),
                # H100, 40001 columns: 2.6 (3.9), 5.0 (6.4), 30.8 (31.5), 873 (882)
                Units(32768, 40960, 10, 768, 0, few, ANY),
                # H100, 45001 columns: 2.8 (3.7), 5.4 (6.4), 34.5 (35.8), 975 (987)
                Units(40960, 49152, 12, 640, 0, few, ANY),
                # H100, 50304 columns: 2.6 (3.8), 4.9 (6.7), 36.1 (38.9), 1091 (1102); 50257: 2.9 (3.9), 7.2 (6.8), 39.4 (39.4), 1092 (1103)
                Units(49152, 53248, 13, 512, 0, few, ANY),
                # 65536 columns: 2.9 (2.9), 5.4 (5.4), 10.9 (11.3), 34.8 (35.2). H100, 57344: 2.8 (3.9), 6.6 (7.2), 41.0 (43.6), 1231 (1256);
                # 57001: 3.3 (3.9), 8.4 (7.5), 45.2 (43.5), 1240 (1253)
                Units(53248, 65536, 16, 512, 0, most_blocks()),
                # H100, 70000 columns: 2.8 (3.9), 6.4 (8.1), 49.2 (52.3), 1521 (1536); 80001: 3.0 (4.1), 8.1 (10.5), 58.9 (59.5), 1739 (1756)
                Units(65536, 81920, 10, 768, 0, most_blocks(), ANY),
                # H100, 90001 columns: 3.1 (4.5), 8.2 (11.8), 66.3 (66.3), 1960 (1979)
                Units(81920, 90112, 12, 640, 0, most_blocks(), ANY),
                # 128256 columns: 3.4 (4.1), 8.2 (8.6), 19.2 (20.8), 65.9 (68.4); 8 rows 6.0 (5.7). H100, 114689 columns, 256 rows: 86.7 (84.2)
                Units(90112, 122880, 16, 512, 0, most_blocks()),
                # H100, 128257 columns: 3.7 (5.8), 12.4 (17.2), 94.3 (94.3), 2808 (2837)
                Units(122880, 131072, 16, 512, 0, most_blocks(), ANY),
                # 151936 columns: 3.7 (4.6), 9.2 (10.2), 22.4 (24.0), 77.0 (80.1); 8 rows 6.6 (6.3). H100, 151937: 4.1 (6.5), 14.6 (21.7), 110 (113),
                # 3336 (3369)
                Units(131072, 155648, 19, 512, 0, most_blocks(), ANY),
                # H100, 160000 columns: 4.3 (6.0), 14.7 (18.6), 111 (116), 3435 (3505); 170000 by 12 vectors a lane, 256 rows: 131 (124)
                Units(155648, 163840, 10, 768, 0, most_blocks()),
                # 201088 columns, in turn with clusters of blocks: 4.7 (7.2), 11.8 (16.2), 34.6 (37.7), 117.3 (117.2); 1024 rows 446 (431)
                Units(186368, 212992, 13, 512, 0, most_blocks()),
                # 262144 columns: 5.4 (6.7), 14.4 (17.8), 41.0 (44.0), 140.6 (146.8). H100, 220000: 5.0 (8.1), 25.0 (29.7), 154 (162), 4761 (4859)
                Units(212992, 262144, 16, 512, 0, most_blocks()),
                # 262208 columns, Gemma 3's: 5.4 (7.1), 14.2 (18.3), 40.4 (45.2), 139.3 (151.4)
                Units(262144, 311296, 19, 512, 0, most_blocks()),
            ]
        return [
            # Of the first three lines µs are those of 1, 16, 64, 256 and 8192 rows on an H200 (by other units): more vectors a lane, in smaller clusters, are
            # faster where rows are many. 20480 columns of bfloat16: 2.2, 2.7, 3.4, 6.9, 162 (by 4 vectors in clusters of 4: 1.9, 2.3, 3.3, 7.6, 183). H100, 16384
            # columns, 512 rows, by 4 vectors: 10.0 (by blocks 8.3). Of a length that is no multiple of 16 bytes, 50257 columns, 64 rows: 8.7 (6.2), on
            # an H200 since the ends of units are kept 9.1 (7.2)
            Units(16384, 24576, 6, 768, 64, few // 4),
            # 32768 columns: 2.1, 2.7, 4.3, 9.8, 260 (by 4 vectors in clusters of 8: 1.7, 2.5, 4.5, 10.4, 286)
            Units(24576, 32768, 8, 768, 64, few // 2),
            # 40960 columns: 2.3, 3.0, 5.6, 12.4, 318 (by 6 vectors in clusters of 8: 1.9, 2.8, 5.0, 13.2, 344)
            Units(32768, 49152, 7, 768, 64, few // 2),
            # H100, 50304 columns: 2.2 (4.0), 3.5 (5.1), 18.0 (20.9), 547 (549)
            Units(49152, 57344, 7, 768, 64, few),
            # 65536 columns: 2.5 (2.4), 3.7 (3.7), 7.8 (7.3), 23.5 (19.2)
            Units(57344, 65536, 8, 768, 96, few),
            # H200, 80000 columns, 1, 32, 256 and 4096 rows: 2.6, 5.8, 23.3, 313 (by 6 vectors in clusters of 16: 2.2, 5.1, 26.2, 373)
            Units(65536, 98304, 8, 768, 64, few),
            # 128256 columns: 2.7 (3.2), 5.5 (5.7), 11.1 (12.3), 34.2 (35.5)
            Units(98304, 131072, 8, 768, 64, most_blocks()),
            # 151936 columns: 3.0 (3.7), 6.2 (6.8), 13.6 (14.4), 41.8 (42.7)
            Units(131072, 163840, 10, 768, 0, most_blocks()),
            # 262144 columns: 3.8 (4.9), 9.5 (11.9), 21.2 (24.4), 71.5 (74.3). H100, packed by 512 threads (by 768, not packed), 12 rows: 5.3 (6.8,
            # 5.9), 16 rows: 8.2 (6.9, 8.4)
            Units(
                229376,
                262144,
                8,
                512,
                12,
                most_blocks(),
                Lengths.WHOLE,
                crowded_up_to=20,
            ),
            # 262208 columns: 4.1 (5.1), 10.0 (12.5), 22.3 (24.9), 74.9 (76.8)
            Units(262144, 294912, 9, 512, 16, most_blocks()),
        ]

    # The grid's blocks take most of a multiprocessor's shared memory, and three of those with masks, or one of long rows with masks.
    comptime holds_in_grid = DeviceContext.default_device_info.shared_memory_per_multiprocessor >= 228 * 1024
    comptime stages_masks = Self.holds_in_grid and most_blocks() > PORTABLE_BLOCKS

    @staticmethod
    @inline(.always)
    def outgrows_clusters(wide: Bool, computed: Bool, n: Int) -> Bool:
        # µs by the whole GPU (by clusters of blocks), of 1, 16, 64 and 256 rows, on an H100. Float32, 163842 columns: 5.8 (6.5), 11.8 (13.8), 36.9 (36.3),
        # 128 (120); 200001: 5.8 (7.6), 14.1 (17.1), 43.4 (44.2), 153 (148); 262146: 6.0 (9.4), 17.8 (22.3), 53.1 (58.2), 197 (195). Bfloat16, 327680 columns:
        # 7.1 (6.4), 12.8 (13.0), 36.7 (34.8), 120 (118); 400000: 6.7 (7.5), 14.6 (16.6), 42.5 (42.9), 146 (145); 524288: 7.0 (9.6), 17.8 (20.7), 51.4
        # (56.1), 189 (192); 400001: 7.2 (7.7), 15.4 (16.4), 48.0 (42.9), 165 (146); 700000: 7.5 (13.0) of one row, 28.7 (38.5) of 24.
        if computed:
            # What is computed by whole vectors, on an H200, of 1, 16, 64 and 2.68e8 elements' rows: float32, 128256 columns: 7.1 (5.8), 13.0 (11.4), 26.5 (27.8),
            # 578 (607); 160000: 5.8 (6.0), 11.7 (12.9), 27.4 (31.8), 542 (570). With a mask of one row that MAX fuses, of as many elements, 100008: 735 (1167),
            # 128256: 721 (1247). Bfloat16, 262144 columns: 7.7 (4.9), 12.4 (10.5), 28.0 (24.7), 304 (275); 300000: 7.5 (7.2), 13.0 (14.1), 31.9 (39.3), 306 (420).
            return n > (114688 if wide else 262144)
        if wide:
            return n > 196608
        return n > (393216 if n % 8 == 0 else 524288)

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
        if log:
            # Results and their exponentials are too much for registers, µs of 8e8 bytes by clusters (by a block) on an H200: float32, 7001 and 8192 columns
            # 187 and 186 (197, 192); bfloat16, 14000 and 16384 188 and 186 (212, 225), but 14001 239 (213).
            var last = table.pop()
            if not wide:
                last.lengths = Lengths.OTHER
                table.append(last)
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
        var last = table[len(table) - 1]
        if not in_memory:
            table.append(last.by(0))
            return table^
        # Clusters of as many blocks as leave no place of a GPC empty, not of as few as have room, µs on an H200: float32, 8×1500×1024 along axis 1 by 4 blocks 29.4 (by 3
        # 32.8), 16×2500×1024 by 8 85 (by 5 89), bfloat16, 16×3000×1023 by 8 79 (by 7 83), but 16×2000×1023 59 (by 5 56).
        # Of 16 bits by 3 blocks a multiprocessor: 16×1023×1023 31.9 (33.5), 16×1024×1024 21.3 (24.3), 64×1023×1023 96 (101), 8×4500×1001 66 (72), 8×4096×1024 42.2 (44.1),
        # but 32×1100×1024 42.6 (41.9) and of float32 8×4500×1001 133 (124).
        if wide:
            table += [last.by(2), last.by(4), last.by(8)]
        else:
            table += [
                last.by(2),
                Strip(520, 8, 3, 3, True, together=2),
                last.by(4),
                last.by(5),
                last.by(8),
                Strip(HAS_ROOM, 8, 3, 3, True, together=8),
            ]
        # Longer columns are the whole GPU's, unless there is a sink, or results have another dtype.
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
