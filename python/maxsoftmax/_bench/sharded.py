"""The suite of rows that are split over processes: one, two and more, each with a GPU or with cores of its own."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from maxsoftmax import _files as files
from maxsoftmax._bench import sharded_graph, sharded_ranks
from maxsoftmax._bench.run import processor, usable_cores
from maxsoftmax._bench.sharded_providers import PROVIDERS
from maxsoftmax._commands.console import Console
from maxsoftmax._graph.extension import distribution_version

SHARDED = "sharded"
"""The suite's name."""

Case = tuple[str, str, tuple[int, int]]
"""An op, a dtype, and rows and classes."""

CASES: dict[str, list[Case]] = {
    "gpu": [
        *(("cross_entropy", dtype, (8192, n)) for n in (128256, 262144) for dtype in ("bfloat16", "float32")),
        ("log_softmax", "bfloat16", (64, 128256)),
    ],
    "cpu": [("cross_entropy", "float32", (512, 50257)), ("log_softmax", "float32", (64, 50257))],
}
"""What is measured unless told otherwise: losses with their gradients, and logarithms forward."""

NAMES = ("maxsoftmax", sharded_graph.NAME, *(name for name in PROVIDERS if name != "maxsoftmax"))
"""The providers, those that are ours first."""


@dataclass(frozen=True)
class Measurement:
    """One provider on so many processes."""

    suite: str
    op: str
    dtype: str
    shape: tuple[int, int]
    """Rows and classes."""
    processes: int
    provider: str
    status: str
    """"ok", "wrong", "missing" or "failed"."""
    median_s: float | None = None
    """Of steps, each as long as on its slowest process."""
    min_s: float | None = None
    repeats: int = 0
    peak_bytes: int | None = None
    """Of a GPU above the logits, results included."""
    error: float | None = None
    """Of the loss and the gradient, in its norm, or of logarithms; relative, against float64."""
    note: str = ""

    @property
    def case(self) -> Case:
        """What was computed."""
        return self.op, self.dtype, self.shape


def run(options: argparse.Namespace) -> int:
    """Runs the suite and returns the exit status: 0, or 1 if a result was wrong.

    Raises:
        ValueError: If what was asked for does not exist, or torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"suite {SHARDED!r} needs PyTorch: pip install 'maxsoftmax[torch]'") from error
    kind = options.device or ("gpu" if torch.cuda.is_available() else "cpu")
    if kind not in CASES or (kind == "gpu" and not torch.cuda.is_available()):
        raise ValueError(f"suite {SHARDED!r} runs on cpu, or on gpu where torch has one, not on {kind}")
    names = options.providers or list(NAMES)
    for name in names:
        if name not in NAMES:
            raise ValueError(f"provider {name!r} does not exist: choose from {', '.join(NAMES)}")
    counts = _counts(options.processes, torch.cuda.device_count() if kind == "gpu" else None)
    cases = _cases(options, kind)
    report = {
        "device": torch.cuda.get_device_name() if kind == "gpu" else processor(),
        "threads": None if kind == "gpu" else usable_cores(),
        "versions": {package: distribution_version(package) for package in ("max", "torch")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["maxsoftmax", *sys.argv[1:]]),
    }
    found: list[Measurement] = []
    for count in counts:
        for name in names:
            found += measured(name, count, cases, kind)
            if options.json:
                text = json.dumps({**report, "records": [asdict(m) for m in found]}, indent=1, ensure_ascii=False)
                files.replace(options.json, (text + "\n").encode())
    show(found)
    return 1 if any(m.status == "wrong" for m in found) else 0


def measured(name: str, count: int, cases: list[Case], kind: str) -> list[Measurement]:
    """Returns what was measured of a provider on so many processes, whatever becomes of them."""
    import torch

    note = ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            if name == sharded_graph.NAME:
                torch.multiprocessing.spawn(sharded_graph.run, (count, cases, kind, folder), 1)
            else:
                torch.multiprocessing.spawn(sharded_ranks.run, (count, name, cases, kind, folder), count)
        except Exception as error:  # Whatever a library may raise is its result.
            lines = [line for line in str(error).splitlines() if line.strip()]
            note = f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]
        path = Path(folder) / f"{name}-{count}.json"
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    kept += [{"status": "failed", "note": note}] * (len(cases) - len(kept))
    return [Measurement(SHARDED, *case, count, name, **values) for case, values in zip(cases, kept, strict=True)]


def show(found: Iterable[Measurement]) -> None:
    """Prints a table for each case."""
    out = Console(soft_wrap=False, width=None if sys.stdout.isatty() else 160)
    for group in grouped(found):
        out.print(table(group))


def grouped(found: Iterable[Measurement]) -> list[list[Measurement]]:
    """Returns what was measured of each case."""
    groups: dict[Case, list[Measurement]] = {}
    for m in found:
        groups.setdefault(m.case, []).append(m)
    return list(groups.values())


def table(group: list[Measurement]) -> Table:
    """Returns what was measured of a case: a row for each provider, a column for each number of processes."""
    op, dtype, shape = group[0].case
    counts = list(dict.fromkeys(m.processes for m in group))
    shown = Table(title=f"{titled(op)}, {'×'.join(map(str, shape))} {dtype}", title_justify="left")
    for name in ("provider", *(f"{count} process{'es' * (count > 1)}" for count in counts), "error", ""):
        shown.add_column(name, justify="left" if name in ("provider", "") else "right")
    for name in dict.fromkeys(m.provider for m in group):
        mine = {m.processes: m for m in group if m.provider == name}
        cells = [cell(mine.get(count)) for count in counts]
        errors = [m.error for m in mine.values() if m.error is not None]
        notes = dict.fromkeys("WRONG" if m.status == "wrong" else m.note for m in mine.values())
        shown.add_row(name, *cells, f"{max(errors):.1e}" if errors else "", "; ".join(filter(None, notes)))
    return shown


def cell(m: Measurement | None) -> str:
    """Returns a time in words, if there is one."""
    return "" if m is None or m.median_s is None else f"{1e3 * m.median_s:.3g} ms"


def titled(op: str) -> str:
    """Returns what is timed of an op."""
    return f"{op}, forward and backward" if op == "cross_entropy" else f"{op}, forward"


def read(path: Path) -> list[Measurement] | None:
    """Returns what a file holds; None if it is of another suite.

    Raises:
        OSError: If the file cannot be read.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        found = [Measurement(**{**record, "shape": tuple(record["shape"])}) for record in kept["records"]]
    except (ValueError, TypeError, KeyError):
        # Whose reader says what is wrong with it.
        return None
    return found if found and all(m.suite == SHARDED for m in found) else None


def markdown(found: list[Measurement]) -> str:
    """Returns a table for a document: a row for each case and provider that was timed."""
    counts = list(dict.fromkeys(m.processes for m in found))
    columns = [f"{count} process{'es' * (count > 1)}" for count in counts]
    lines = [f"| | provider | {' | '.join(columns)} |"]
    lines.append("|---|---|" + "---:|" * len(counts))
    for group in grouped(found):
        op, dtype, shape = group[0].case
        what = f"{titled(op)}, {'×'.join(map(str, shape))} {dtype}"
        for name in dict.fromkeys(m.provider for m in group if m.status == "ok"):
            mine = {m.processes: m for m in group if m.provider == name}
            lines.append(f"| {what} | `{name}` | {' | '.join(cell(mine.get(count)) for count in counts)} |")
            what = ""
    return "\n".join(lines)


def _counts(most: int | None, gpus: int | None) -> list[int]:
    """Returns how many processes take part, from one on: each twice as many as before, up to all.

    Raises:
        ValueError: If there are none, or fewer GPUs.
    """
    if most is None:
        most = 2 if gpus is None else gpus
    if most < 1 or (gpus is not None and most > gpus):
        raise ValueError(f"--processes {most} is not from 1 to {gpus}" if gpus else f"--processes {most}: at least 1")
    found = [1]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return found


def _cases(options: argparse.Namespace, kind: str) -> list[Case]:
    """Returns what to measure.

    Raises:
        ValueError: If a shape is not one of rows and classes, or the op has no suite.
    """
    given: Any = options.shape
    if not given and not options.dtype and options.op == "softmax":
        return CASES[kind]
    op = "cross_entropy" if options.op == "softmax" else options.op
    if op not in ("cross_entropy", "log_softmax"):
        raise ValueError(f"suite {SHARDED!r} does not time {op}: choose --op from cross_entropy, log_softmax")
    shapes = given or [case[2] for case in CASES[kind] if case[0] == op]
    if any(len(shape) != 2 for shape in shapes):
        raise ValueError(f"suite {SHARDED!r} takes rows and classes, such as 512x50257")
    dtypes = [dtype.name for dtype in options.dtype or ()] or [CASES[kind][0][1]]
    return [(op, dtype, tuple(shape)) for shape in dict.fromkeys(shapes) for dtype in dtypes]
