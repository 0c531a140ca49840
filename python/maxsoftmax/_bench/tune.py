"""The command `maxsoftmax tune`: finds the best block size and unrolling of the rungs that leave both to the caller."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from max.dtype import DType

from maxsoftmax._arguments import ALGORITHMS, BLOCK_SIZE, UNROLL
from maxsoftmax._bench import command
from maxsoftmax._bench.cases import BLOCK_SIZES, TUNE, Case, Entry, searched
from maxsoftmax._bench.results import Record
from maxsoftmax._bench.run import Bench, usable_cores
from maxsoftmax._commands import figures, parse
from maxsoftmax._commands.console import Console
from maxsoftmax._graph import runtime, tuning
from maxsoftmax._graph.tuning import Choice

TUNED = tuple(name for name, leaves in ALGORITHMS["gpu"].items() if leaves.unrolls)
"""The algorithms that leave both choices."""

SHAPES = ((8192, 50257), (16384, 4096))
"""Sizes to be best at unless told otherwise: logits and attention scores."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser of `maxsoftmax`."""
    tune = commands.add_parser(
        "tune",
        help="finds the best block size and unrolling for this GPU",
        description=f"Times {' and '.join(TUNED)} at every unrolling and at block sizes from {BLOCK_SIZES[0]} on, "
        "and remembers the best of each.",
    )
    tune.add_argument(
        "--shape",
        action="append",
        type=parse.shape,
        metavar="AxB",
        help=f"a size to be best at; may be repeated (default: {' and '.join('x'.join(map(str, s)) for s in SHAPES)})",
    )
    tune.add_argument("--dtype", type=parse.dtype, default=DType.float32, metavar="T", help="default: float32")
    tune.add_argument("--device", default="gpu", metavar="D", help="gpu, gpu:1, … (default: gpu)")
    tune.add_argument("--algorithm", choices=TUNED, action="append", help="only this; may be repeated")
    figures.add(tune, "the records")
    tune.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="where the search goes as a chart: .svg or .png, or both without a suffix",
    )
    tune.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit status: 0, 1 if nothing could be timed, 130 if interrupted."""
    command.check_targets(options)
    device = runtime.device(options.device)
    if device.is_host:
        raise ValueError("tune searches block sizes, which only GPU kernels have: choose a GPU with --device")
    cases = [Case(shape, options.dtype) for shape in options.shape or SHAPES]
    entries = candidates(options.algorithm or TUNED)
    bench = Bench(device, ["maxsoftmax", *sys.argv[1:]], usable_cores())
    if not command.watch(bench, TUNE, cases, entries):
        return 130
    command.show(bench.results)
    if any(r.status == "ok" for r in bench.results.records):
        command.write(bench.results, options)
    out = Console()
    found = best(bench.results.records)
    for algorithm, (choice, gain) in found.items():
        path = tuning.remember(device, algorithm, options.dtype, choice)
        chosen = f"block_size={choice.block_size}, unroll={choice.unroll}"
        out.print(f"{algorithm}: {chosen}, {gain:.2f} times as fast as untuned; kept in {path}")
    return 0 if found else 1


def candidates(algorithms: tuple[str, ...] | list[str]) -> list[Entry]:
    """Returns every block size and unrolling of each algorithm that is searched."""
    return [entry for name in algorithms for entry in searched(name)]


def best(records: list[Record]) -> dict[str, tuple[Choice, float]]:
    """Returns each algorithm's choice of the least time over all cases together, and its gain on the untuned one.

    Each case counts the same: it is the geometric mean of the times that is least.
    """
    found = {}
    for algorithm in dict.fromkeys(r.algorithm for r in records):
        mine = [r for r in records if r.algorithm == algorithm]
        cases = len({r.shape for r in mine})
        times: dict[Choice, list[float]] = {}
        for r in mine:
            if r.median_s and r.block_size and r.unroll:
                times.setdefault(Choice(r.block_size, r.unroll), []).append(math.log(r.median_s))
        means = {choice: sum(logs) / cases for choice, logs in times.items() if len(logs) == cases}
        if means:
            choice = min(means, key=lambda c: means[c])
            untuned = means.get(Choice(BLOCK_SIZE, UNROLL), means[choice])
            found[algorithm] = (choice, math.exp(untuned - means[choice]))
    return found
