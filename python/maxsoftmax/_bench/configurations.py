"""How `auto` may take rows along the last axis on a GPU: what `maxsoftmax tune` times beside what it does."""

from __future__ import annotations

import re
from typing import NamedTuple

from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._native.description import SEARCHED

REGISTERS = 65536
"""Those of a multiprocessor, of 32 bits."""


class Configuration(NamedTuple):
    """A line of a table in `gpu/tuning/`."""

    kind: str
    """As in `searched.mojo`."""
    numbers: tuple[int, ...]
    """What the library is built with, in its order there."""

    @property
    def entry(self) -> Entry:
        """The way to compute by it."""
        return Entry("maxsoftmax", SEARCHED + " ".join([self.kind, *map(str, self.numbers)]))

    @classmethod
    def of(cls, algorithm: str) -> Configuration:
        """Returns what an entry's algorithm names."""
        kind, *numbers = algorithm.removeprefix(SEARCHED).split()
        return cls(kind, tuple(map(int, numbers)))

    def line(self) -> str:
        """Returns it as Mojo."""
        numbers = self.numbers
        if self.kind == "whole":
            return f"Team.whole({numbers[1] * numbers[2]}, {_list(numbers)})"
        if self.kind == "slotted":
            return f"Team.slotted(HAS_ROOM, {_list(numbers)})"
        if self.kind == "cluster":
            return f"Team.cluster({_list(numbers)})"
        if self.kind == "units":
            up_to, rounds, threads, blocks = numbers
            return f"Units(0, {up_to}, {rounds}, {threads}, 0, {blocks})"
        return f"Stream({_list((*numbers[:3], bool(numbers[3]), numbers[4], 4096))})"


def configurations(case: Case, architecture: str) -> list[Configuration]:
    """Returns what may be good at rows of a length, from few threads to many; some may have no room for them."""
    n, size = case.shape[-1], case.dtype.size_in_bytes
    width = 16 // size
    vectors = -(-n // width)
    whole = (
        Configuration("whole", (max(team, 64), team, held, threads // max(team, 64)))
        for team in (8, 16, 32, 64, 128, 256, 512)
        for held in (2, 3, 4, 6, 8, 12, 16)
        for threads in (1024, 1280, 1536, 2048)
        # Four registers a vector, and some to compute with.
        if team * held // 2 < vectors <= team * held and 4 * held + 24 <= REGISTERS // threads
    )
    # Two numbers of threads may be as many blocks.
    found = list(dict.fromkeys(whole))
    if vectors > 512:
        found += [
            Configuration("slotted", (256, held, blocks)) for held, blocks in ((3, 4), (5, 4), (8, 3), (16, 2), (16, 1))
        ]
        found += [
            Configuration("streaming", (block_size, threads, unroll, 0, 16))
            for block_size, threads, unroll in ((128, 1024, 4), (256, 1024, 4), (256, 1536, 2), (512, 1024, 4))
        ]
    clustered = re.match(r"sm_(\d+)", architecture)
    if clustered and int(clustered[1]) >= 90 and vectors > 2048:
        found += [
            Configuration("cluster", (256, held, blocks, blocks, -(-vectors // shared)))
            for shared in (2, 4, 5, 8)
            for held, blocks in ((5, 4), (8, 3), (16, 2))
        ]
        for rounds, most in ((8, 768), (10, 768), (13, 512), (16, 512), (19, 512)):
            units = -(-n // (32 * rounds * width))
            # What a row has of vectors is not divided further, and each block knows of at most so many warps.
            if n % width == 0 and units <= 128:
                found += [
                    Configuration("units", (n, rounds, most, blocks))
                    for blocks in (8, 16)
                    if blocks <= units <= blocks * most // 32
                ]
    return found


def _list(numbers: tuple[object, ...]) -> str:
    return ", ".join(map(str, numbers))
