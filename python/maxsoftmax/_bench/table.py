"""Results as tables, in a terminal and in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from itertools import groupby

from rich.table import Table
from rich.text import Text

from maxsoftmax._bench.cases import CALL, Entry
from maxsoftmax._bench.results import Record, Results


def tables(results: Results) -> Iterator[Table]:
    """Yields a table a case, in the order of the records."""
    for records in _cases(results):
        first = records[0]
        what = "softmax of " if first.op == "softmax" else ""
        yield _table(f"{first.suite}: {what}{first.case} {first.dtype}", records)


def markdown(results: Results, only: Container[str] | None = None) -> str:
    """Returns the records as Markdown tables, one a case, for documents.

    Args:
        results: What to show.
        only: Providers and algorithms to keep; None for all.
    """
    parts = []
    for records in _cases(results):
        names, columns = _names(records), _columns(records[0])
        lines = [
            f"| {records[0].case} {records[0].dtype} | {' | '.join(columns)} |",
            "|---" + "|---:" * len(columns) + "|",
        ]
        lines += [
            f"| {name if r.ours else f'*{name}*'} | {' | '.join(_cells(r, _naive(r, records)))} |"
            for r, name in zip(records, names, strict=True)
            if only is None or r.who in only
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def overview(results: Results, only: Container[str] | None = None) -> str:
    """Returns the records as one Markdown table: a row a case, and for each way to compute it time and share of a copy.

    Of a call it is the time that it keeps its caller, where that is another, and the time until its result is there.

    Args:
        results: What to show.
        only: As for `markdown`; of them, those that never have a time are left out.
    """
    cases = [(records, _names(records)) for records in _cases(results)]
    named = [(r, name) for records, names in cases for r, name in zip(records, names, strict=True)]
    timed = {name for r, name in named if r.status == "ok" and (only is None or r.who in only)}
    columns = [name for name in dict.fromkeys(name for _, name in named) if name in timed]
    lines = ["| | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for records, names in cases:
        texts_of = {name: _short(r) for r, name in zip(records, names, strict=True) if r.status != "missing"}
        texts = (texts_of.get(column, "") for column in columns)
        lines.append(f"| {records[0].case} {records[0].dtype} | {' | '.join(texts)} |")
    return "\n".join(lines)


COLUMNS = ("time", "GB/s", "of a copy", "GFLOP/s", "× naive", "improvement", "error")
"""What is shown of each record."""

CALL_COLUMNS = ("returns after", "result after", "GB/s", "of a copy", "error")
"""What is shown of one where calls are timed."""


def _columns(r: Record) -> tuple[str, ...]:
    return CALL_COLUMNS if r.suite == CALL else COLUMNS


def _short(r: Record) -> str:
    """Returns what an overview says of a record."""
    if r.host_s and r.median_s:
        times = (duration(r.host_s), duration(r.median_s))
        return ", ".join(dict.fromkeys(times))
    time, _, share, *_ = _cells(r, None)
    return f"{time}, {share}".removesuffix(", ")


def _cases(results: Results) -> Iterator[list[Record]]:
    """Yields the records of each case, which follow one another."""
    for _, records in groupby(results.records, key=lambda r: (r.suite, r.case, r.dtype)):
        yield list(records)


def _names(records: list[Record]) -> list[str]:
    """Returns what to call the ways to compute a case: those of one kernel are told apart by what was chosen."""
    times = Counter(r.who for r in records)
    return [r.who if times[r.who] == 1 else configured(r) for r in records]


def configured(r: Record) -> str:
    """Returns what to call a way to compute a case, with what was chosen: online,512,4."""
    return ",".join(str(part) for part in (r.who, r.block_size, r.unroll) if part)


def _table(title: str, records: list[Record]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("provider", no_wrap=True)
    for column in _columns(records[0]):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for r in records:
        # Notes hold what libraries said, which is not markup.
        table.add_row(
            str(Entry(r.provider, r.algorithm, r.block_size, r.unroll)), *_cells(r, _naive(r, records)), Text(r.note)
        )
    return table


def _naive(r: Record, records: list[Record]) -> float | None:
    """Returns the time of `naive` on the case: in blocks of the same size, if there are several."""
    times = {other.block_size: other.median_s for other in records if other.algorithm == "naive" and other.median_s}
    return times.get(r.block_size, next(iter(times.values()), None))


def improvement(seconds: float, naive: float) -> str:
    """Returns by how much a time is less than that of `naive`, as published sources say it."""
    return f"{1 - seconds / naive:.1%}"


def _cells(r: Record, naive: float | None) -> list[str]:
    if r.status == "ok" and r.median_s and r.gbps and r.copy_gbps:
        rates = [f"{r.gbps:.1f}" if r.gbps < 100 else f"{r.gbps:.0f}", f"{r.gbps / r.copy_gbps:.0%}"]
        if r.suite == CALL:
            return [duration(r.host_s or r.median_s), duration(r.median_s), *rates, f"{r.max_rel_error:.1e}"]
        return [
            duration(r.median_s),
            *rates,
            operations(r),
            f"{naive / r.median_s:.2f}" if naive else "",
            improvement(r.median_s, naive) if naive else "",
            f"{r.max_rel_error:.1e}",
        ]
    empty = [""] * (len(_columns(r)) - 2)
    return [r.status.upper(), *empty, "" if r.max_rel_error is None else f"{r.max_rel_error:.1e}"]


def operations(r: Record) -> str:
    """Returns the GFLOP/s of a record, with three digits."""
    return "" if r.gflops is None else f"{r.gflops:.3g}" if r.gflops < 100 else f"{r.gflops:.0f}"


def duration(seconds: float) -> str:
    """Returns a time with four digits, in the unit that suits it."""
    scale, unit = next((u for u in ((1, "s"), (1e3, "ms")) if seconds * u[0] >= 1), (1e6, "µs"))
    return f"{seconds * scale:.4g} {unit}"
