"""The command `maxsoftmax bench`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from max.driver import Device
from max.dtype import DType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from maxsoftmax import _files as files
from maxsoftmax._arguments import check_algorithm, check_block_size, check_unroll, normalize_axis
from maxsoftmax._bench import chart, losses, losses_report, published, sharded
from maxsoftmax._bench.apart import ROUNDS, Apart
from maxsoftmax._bench.cases import (
    BLOCK_SIZE,
    CALL,
    CALL_OPS,
    CALL_SHAPES,
    OPS,
    SUITES,
    Case,
    Entry,
    Suite,
    entries,
)
from maxsoftmax._bench.providers import CALLERS, PROVIDERS, Provider
from maxsoftmax._bench.results import Results
from maxsoftmax._bench.run import Bench, usable_cores
from maxsoftmax._bench.table import markdown, overview, tables
from maxsoftmax._commands import figures, parse
from maxsoftmax._commands.console import Console
from maxsoftmax._graph import runtime

REPORT = "report"
CUSTOM = "custom"

OTHERS = {losses.LOSSES: losses.run, sharded.SHARDED: sharded.run}
"""The suites that are not made of `Case`s."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser of `maxsoftmax`."""
    bench = commands.add_parser(
        "bench",
        help="measures our kernels beside other libraries",
        description="Checks every result against float64, then times it beside a copy of the same bytes.",
        epilog="suites: "
        + "; ".join(f"{name}, {suite.title[0].lower()}{suite.title[1:]}" for name, suite in SUITES.items())
        + f"; {losses.LOSSES}, linear cross entropy, time and memory"
        + f"; {sharded.SHARDED}, rows that are split over processes",
    )
    bench.add_argument(
        "suite",
        nargs="?",
        metavar="SUITE",
        help=f"{', '.join([*SUITES, *OTHERS])}, or '{REPORT}' to show FILEs again (default: ladder on a GPU, cpu "
        "without one)",
    )
    bench.add_argument("files", nargs="*", type=Path, metavar="FILE", help=f"JSON of earlier runs, for '{REPORT}'")
    bench.add_argument(
        "--providers",
        type=lambda text: text.split(","),
        metavar="NAMES",
        help=f"some of {', '.join(PROVIDERS)}; maxsoftmax:NAME is one of our algorithms; "
        f"of '{CALL}', some of {', '.join(CALLERS)} (default: all of the suite)",
    )
    bench.add_argument("--device", metavar="D", help="cpu, gpu, gpu:1, … (default: what the suite was made for)")
    bench.add_argument(
        "--shape",
        action="append",
        type=parse.shape,
        metavar="AxBxC",
        help=f"a shape instead of the suite's; may be repeated; beside a suite only of '{CALL}'",
    )
    bench.add_argument(
        "--dtype",
        action="append",
        type=parse.dtype,
        metavar="T",
        help=f"with --shape or '{CALL}': its dtype (default: float32)",
    )
    bench.add_argument(
        "--axis", type=int, default=-1, metavar="A", help=f"with --shape or '{CALL}': the axis (default: -1)"
    )
    bench.add_argument(
        "--op",
        choices=OPS,
        default="softmax",
        help=f"with --shape or '{CALL}': what to compute of it (default: softmax)",
    )
    bench.add_argument(
        "--block-size", type=int, metavar="B", help=f"threads a block of our rungs (default: {BLOCK_SIZE})"
    )
    bench.add_argument(
        "--unroll", type=int, metavar="U", help="vectors under way of vector and online (default: theirs)"
    )
    bench.add_argument("--threads", type=int, metavar="N", help="threads on a CPU (default: all cores)")
    bench.add_argument(
        "--rounds",
        type=int,
        metavar="R",
        help=f"on a CPU and of '{CALL}', where each of several providers has a process of its own: "
        f"how often it has its turn (default: {ROUNDS})",
    )
    bench.add_argument(
        "--calls",
        type=int,
        metavar="N",
        help=f"of '{CALL}': times as many calls of each kind, after one, as published comparisons do "
        "(default: as many as fit, after warming up)",
    )
    bench.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help=f"of '{sharded.SHARDED}': up to so many, each with a GPU or cores of its own (default: all GPUs, or 2)",
    )
    bench.add_argument("--together", action="store_true", help="all providers in this process, in one round")
    figures.add(bench, "the records")
    bench.add_argument("--resume", action="store_true", help="keep what is in the FILE of --json, and measure the rest")
    bench.add_argument(
        "--plot", type=Path, metavar="FILE", help="where the chart goes: .svg or .png, or both without a suffix"
    )
    bench.add_argument(
        "--markdown", action="store_true", help=f"with '{REPORT}': tables for a document, that of all cases first"
    )
    bench.add_argument(
        "--beside",
        choices=published.names(),
        help=f"with '{REPORT}': the figures of a published write-up, and those of FILEs beside them, as a table for a "
        "document; --plot draws who is in it",
    )
    bench.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit status: 0, 1 if a result was wrong, 130 if interrupted."""
    check_targets(options)
    if options.suite == REPORT:
        return _report(options)
    for name in ("markdown", "beside"):
        if getattr(options, name):
            raise ValueError(f"--{name} is for 'maxsoftmax bench {REPORT}'")
    if options.resume and (not options.json or figures.is_pipe(options.json)):
        raise ValueError("--resume needs --json FILE, the records of the run to resume")
    if options.files:
        raise ValueError(f"{options.files[0]}: files are for 'maxsoftmax bench {REPORT}'")
    _check_counts(options)
    _limit_threads(options.threads)
    if options.suite in OTHERS:
        return OTHERS[options.suite](options)
    name, suite, best = _chosen(options)
    device = runtime.device(options.device or best)
    ways = _ways(options, suite, device.label)
    bench = _bench(options, name, suite, device, ways)
    cases = suite.on(device.label)
    if options.resume:
        bench.resume(Results.read(options.json), name, cases, ways)
    complete = watch(bench, name, cases, ways, options.json)
    show(bench.results)
    if not complete and not any(r.status == "ok" for r in bench.results.records):
        # Nothing to draw, and that is not what went wrong.
        options.plot = None
    write(bench.results, options)
    if not complete:
        return 130
    return 1 if any(r.status == "wrong" for r in bench.results.records) else 0


def _check_counts(options: argparse.Namespace) -> None:
    """Refuses counts that are not for the suite, or none."""
    if options.rounds is not None and (options.together or options.rounds < 1):
        raise ValueError(f"--rounds {options.rounds}: at least 1, and not where providers are together")
    if options.calls is not None and (options.suite != CALL or options.calls < 1):
        raise ValueError(f"--calls {options.calls}: at least 1, and for suite {CALL!r}")
    if options.processes is not None and options.suite != sharded.SHARDED:
        raise ValueError(f"--processes {options.processes}: for suite {sharded.SHARDED!r}")


def check_targets(options: argparse.Namespace) -> None:
    """Refuses now what could not be written when all is measured."""
    if options.plot:
        chart.check(options.plot)
    if options.json:
        files.check(options.json)


def _report(options: argparse.Namespace) -> int:
    if options.resume:
        raise ValueError(f"--resume is not for 'maxsoftmax bench {REPORT}', which measures nothing")
    if not options.files:
        raise ValueError(f"bench {REPORT} needs the JSON files of earlier runs")
    of_losses = [losses_report.read(path) for path in options.files]
    if all(of_losses) and not options.json and not options.beside:
        for report in filter(None, of_losses):
            _show_losses(report, options)
        return 0
    of_shards = [sharded.read(path) for path in options.files]
    if all(of_shards) and not options.json and not options.beside and not options.plot:
        for found in filter(None, of_shards):
            _show_sharded(found, options)
        return 0
    several = [Results.read(path) for path in options.files]
    first = several[0]
    # A chart shows one device; tables can follow one another.
    if options.plot and any((r.device, r.threads) != (first.device, first.threads) for r in several):
        raise ValueError("a chart needs results of one device, and these files hold several")
    if options.json and len(several) > 1:
        raise ValueError("--json of a report would lose which file a record came from")
    if options.beside:
        Console().print(published.beside(options.beside, several))
    for results in several:
        if options.markdown:
            Console().print(overview(results), markdown(results), sep="\n\n")
        elif not options.beside:
            show(results)
    first.records = [record for results in several for record in results.records]
    write(first, options)
    return 0


def _bench(options: argparse.Namespace, name: str, suite: Suite, device: Device, ways: Sequence[Entry]) -> Bench:
    """Returns what measures: on a CPU, and where calls are, each of several providers in a process of its own."""
    typed = ["maxsoftmax", *sys.argv[1:]]
    threads = options.threads or usable_cores()
    alone = len({way.provider for way in ways}) == 1 and options.rounds is None
    if options.together or alone or not (device.is_host or suite.calls):
        return Bench(device, typed, threads, suite.calls, count=options.calls)

    def arguments(mine: Sequence[Entry]) -> list[str]:
        names = ",".join(":".join(filter(None, (way.provider, way.algorithm))) for way in mine)
        given = [f"--providers={names}", f"--device={runtime.name(device)}"]
        given += [f"--shape={'x'.join(map(str, shape))}" for shape in options.shape or ()]
        given += [f"--dtype={dtype.name}" for dtype in options.dtype or ()]
        given += [f"--axis={options.axis}"] * (options.axis != -1) + [f"--op={options.op}"] * (options.op != "softmax")
        for option in ("block_size", "unroll", "calls"):
            if (value := getattr(options, option)) is not None:
                given.append(f"--{option.replace('_', '-')}={value}")
        if device.is_host or options.threads:
            given.append(f"--threads={threads}")
        return ["bench", *([name] if name != CUSTOM else []), *given]

    return Apart(device, typed, threads, arguments, options.rounds or ROUNDS)


def _chosen(options: argparse.Namespace) -> tuple[str, Suite, str]:
    """Returns the suite's name, the suite, and the device it runs on unless told otherwise."""
    present = [runtime.name(device) for device in runtime.devices()]
    best = "gpu" if "gpu" in present else "cpu"
    if options.suite and options.suite not in SUITES:
        raise ValueError(f"suite {options.suite!r} does not exist: choose from {', '.join([*SUITES, *OTHERS, REPORT])}")
    if options.suite == CALL:
        return CALL, _of_calls(options), best
    if options.shape:
        if options.suite:
            raise ValueError(f"--shape replaces a suite: leave out {options.suite!r}")
        shapes, dtypes = options.shape, options.dtype or [DType.float32]
        cases = _cases((options.op,), shapes, dtypes, options.axis)
        return CUSTOM, Suite("The shapes asked for", best, cases, rungs=options.op == "softmax"), best
    if options.dtype or options.axis != -1 or options.op != "softmax":
        raise ValueError("--dtype, --axis and --op go with --shape: a suite has its own")
    name = options.suite or ("ladder" if best == "gpu" else "cpu")
    device = best if SUITES[name].host else SUITES[name].device
    if device not in present and not options.device:
        raise ValueError(f"suite {name!r} is for a {device.upper()}, and this machine has none: try 'cpu'")
    return name, SUITES[name], device


def _of_calls(options: argparse.Namespace) -> Suite:
    """Returns the suite of calls, for what was asked for."""
    if options.op not in CALL_OPS:
        raise ValueError(f"suite {CALL!r} does not time {options.op}: choose --op from {', '.join(CALL_OPS)}")
    shapes = options.shape or CALL_SHAPES
    cases = [
        case
        for dtype in options.dtype or [DType.float32]
        for op in CALL_OPS[options.op]
        for case in _cases((op,), shapes, [dtype], options.axis)
    ]
    return SUITES[CALL]._replace(cases=tuple(cases), host=tuple(cases))


def _cases(
    ops: Sequence[str], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[DType], axis: int
) -> tuple[Case, ...]:
    for op in ops:
        for shape in shapes:
            _check_op(op, shape, axis)
    return tuple(dict.fromkeys(Case(shape, dtype, axis, op) for shape in shapes for dtype in dtypes for op in ops))


def _check_op(op: str, shape: tuple[int, ...], axis: int) -> None:
    """Refuses a shape or an axis that an op is not made for."""
    place = normalize_axis(axis, len(shape))
    if OPS[op].losses and (len(shape), place) != (2, 1):
        taken = "rows and classes, such as 8192x50257"
    elif OPS[op].queries and (len(shape) < 2 or place != len(shape) - 1):
        taken = "queries and keys, such as 16x1024x1024"
    else:
        return
    raise ValueError(f"--op {op} takes {taken}, not {'x'.join(map(str, shape))} along axis {axis}")


def _ways(options: argparse.Namespace, suite: Suite, device: str) -> list[Entry]:
    """Returns the entries that were asked for."""
    default = entries(suite, device)
    known: dict[str, type[Provider]] = CALLERS if suite.calls else PROVIDERS
    if options.providers is None:
        chosen = default
    else:
        chosen = []
        for text in options.providers:
            provider, _, algorithm = text.partition(":")
            if provider not in known:
                raise ValueError(f"provider {provider!r} does not exist: choose from {', '.join(known)}")
            if algorithm and (provider != "maxsoftmax" or suite.calls):
                raise ValueError(f"provider {provider!r} has no algorithms to choose from, as in {text!r}")
            if algorithm:
                check_algorithm(algorithm, device)
                every = entries(suite._replace(rungs=True), device)
                chosen += [entry for entry in every if entry.algorithm == algorithm]
            else:
                chosen += [e for e in default if e.provider == provider] or [Entry(provider)]
    return list(dict.fromkeys(_configured(entry, options, device) for entry in chosen))


def _configured(entry: Entry, options: argparse.Namespace, device: str) -> Entry:
    """Returns the entry with the block size and unrolling asked for, where it leaves the choice."""
    if entry.provider != "maxsoftmax" or entry.algorithm in ("", "auto"):
        return entry
    if options.block_size is not None:
        entry = entry._replace(block_size=check_block_size(options.block_size, entry.algorithm, device))
    if options.unroll is not None and entry.algorithm in ("vector", "online"):
        entry = entry._replace(unroll=check_unroll(options.unroll, entry.algorithm, device))
    return entry


def _limit_threads(threads: int | None) -> None:
    """Keeps this process to so many cores, which is what every library looks at when it starts its threads."""
    if threads is None:
        return
    cores = usable_cores()
    if not 1 <= threads <= cores:
        raise ValueError(f"--threads {threads} is not from 1 to the {cores} cores of this machine")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ["OMP_NUM_THREADS"] = str(threads)


def watch(bench: Bench, name: str, cases: Sequence[Case], ways: Sequence[Entry], keep: Path | None = None) -> bool:
    """Runs it under a progress bar and returns whether it came to its end, or was interrupted.

    Args:
        bench: What runs.
        name: Of the suite.
        cases: What to measure.
        ways: How to compute it.
        keep: Where to write the records so far, after each case: not every end can be caught.
    """
    log = Console(stderr=True)
    total = bench.measured + (len(cases) * len(ways) - bench.done) * bench.rounds
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=log, transient=True, disable=not log.is_terminal) as progress:
        task = progress.add_task(f"{name}: getting ready", total=total)

        def advance(case: Case, entry: Entry) -> None:
            if keep and bench.results.records and (entry == ways[0] or bench.rounds > 1):
                bench.results.write(keep)
            progress.update(task, completed=bench.measured, description=bench.describe(case, entry))

        try:
            bench.run(name, cases, ways, advance)
        except KeyboardInterrupt:
            log.print(f"interrupted after {_several(len(bench.results.records), 'measurement')}")
            return False
    return True


def show(results: Results) -> None:
    """Prints where it was measured, and a table a case."""
    # A file or a pipe has no width to keep to.
    out = Console(soft_wrap=False, width=None if sys.stdout.isatty() else 160)
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    out.print(f"{results.where}; {versions}; {results.date}")
    for table in tables(results):
        out.print(table)


def _show_losses(report: losses_report.Report, options: argparse.Namespace) -> None:
    out = Console(soft_wrap=False, width=None if sys.stdout.isatty() else 160)
    if options.markdown:
        out.print(losses_report.markdown(report), soft_wrap=True)
    else:
        for group in report[1]:
            out.print(losses.table(group))
    if options.plot:
        for path in chart.save(losses_report.draw(report), options.plot):
            out.print(f"chart: {path}", soft_wrap=True)


def _show_sharded(found: list[sharded.Measurement], options: argparse.Namespace) -> None:
    if options.markdown:
        Console().print(sharded.markdown(found), soft_wrap=True)
    else:
        sharded.show(found)


def write(results: Results, options: argparse.Namespace) -> None:
    """Writes the JSON and the chart that were asked for, and says so."""
    out = Console()
    if options.json:
        results.write(options.json)
        out.print(f"{figures.name(options.json)}: {_several(len(results.records), 'record')}")
    if options.plot:
        name = getattr(options, "beside", None)
        drawn = replace(results, records=published.shown(name, results)) if name else results
        written = chart.write(drawn, options.plot, times=name in published.TIMES)
        out.print(f"{', '.join(map(str, written))}: chart")


def _several(count: int, what: str) -> str:
    """Returns how many there are of something, in words."""
    return f"{count} {what}{'' if count == 1 else 's'}"
