"""The command `maxsoftmax tune`: finds what is fastest on a GPU.

That is the block size and unrolling of rungs that leave both to the caller, and how `auto` might take rows.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from max.dtype import DType

from maxsoftmax._arguments import ALGORITHMS, BLOCK_SIZE, UNROLL
from maxsoftmax._bench import command
from maxsoftmax._bench.cases import BLOCK_SIZES, SEARCH, TUNE, Case, Entry, searched
from maxsoftmax._bench.configurations import Configuration, configurations
from maxsoftmax._bench.results import Record
from maxsoftmax._bench.run import Bench, usable_cores
from maxsoftmax._bench.table import duration
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
        help="finds what is fastest on this GPU",
        description=f"Times {' and '.join(TUNED)} at every unrolling and at block sizes from {BLOCK_SIZES[0]} on, "
        "and remembers the best of each. Then times other configurations of auto beside its own, and says which is "
        "best for each size: auto stays as it is, since the bits of its results would change with it.",
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
    tune.add_argument("--algorithm", choices=(*TUNED, "auto"), action="append", help="only this; may be repeated")
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
    algorithms = options.algorithm or (*TUNED, "auto")
    bench = Bench(device, ["maxsoftmax", *sys.argv[1:]], usable_cores())
    rungs = [name for name in algorithms if name in TUNED]
    parts = [(TUNE, cases, candidates(rungs))] if rungs else []
    if "auto" in algorithms:
        architecture = device.architecture_name
        auto = Entry("maxsoftmax", "auto")
        parts += [
            (SEARCH, [case], [auto, *(found.entry for found in configurations(case, architecture))]) for case in cases
        ]
    complete = all(command.watch(bench, *part) for part in parts)
    command.show(bench.results)
    if any(r.status == "ok" for r in bench.results.records):
        command.write(bench.results, options)
    if not complete:
        return 130
    out = Console()
    found = best([r for r in bench.results.records if r.suite == TUNE])
    for algorithm, (choice, gain) in found.items():
        path = tuning.remember(device, algorithm, options.dtype, choice)
        chosen = f"block_size={choice.block_size}, unroll={choice.unroll}"
        out.print(f"{algorithm}: {chosen}, {gain:.2f} times as fast as untuned; kept in {path}")
    said = [compared(case, bench.results.records) for case in cases]
    for sentence in filter(None, said):
        out.print(sentence)
    return 0 if found or any(said) else 1


def compared(case: Case, records: list[Record]) -> str:
    """Returns a sentence about the fastest configuration for a case beside that of `auto`, "" if that was not timed."""
    mine = [r for r in records if r.suite == SEARCH and (r.shape, r.dtype) == (case.shape, case.dtype.name)]
    times = {r.algorithm: r.median_s for r in mine if r.median_s}
    now = times.pop("auto", None)
    if now is None:
        return ""
    if not times:
        return f"auto, {case}: {duration(now)}; of rows of {case.shape[-1]} nothing else was timed"
    name = min(times, key=lambda algorithm: times[algorithm])
    return (
        f"auto, {case}: {duration(now)}; the fastest of {len(times)} others is {Configuration.of(name).line()}, "
        f"{now / times[name]:.2f} times as fast"
    )


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
