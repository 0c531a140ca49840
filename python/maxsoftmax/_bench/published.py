"""What was published of other kernels, beside what was measured here.

The figures are those of `published.json`, each under its source, and stand nowhere else. Times of other GPUs do not
compare; what share of what its own memory can do a kernel reaches, does.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from maxsoftmax._bench.cases import Case
from maxsoftmax._bench.results import Record, Results
from maxsoftmax._bench.table import configured, duration, improvement, operations

FILE = Path(__file__).with_name("published.json")

GFLOP_A_GB = Decimal(5) / 8
"""Operations for a byte of float32: five for an element, which is read and written."""

TIMES = ("worklog",)
"""The write-ups whose charts show times."""

_TITLES = {"time": "time", "gflops": "GFLOP/s", "improvement": "improvement", "speedup": "speedup", "error": "error"}


@functools.cache
def _data() -> dict[str, Any]:
    # Decimals keep their zeros, so that a figure is shown as it was published.
    data: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"), parse_float=Decimal)
    return data


def names() -> list[str]:
    """Returns what the write-ups are called."""
    return list(_data()["write-ups"])


def shown(name: str, results: Results) -> list[Record]:
    """Returns those records that are beside a figure of a write-up."""
    whos = {who for figure in _write_up(name)["figures"] for who in figure["ours"]}
    return [r for r in results.records if r.who in whos]


def beside(name: str, several: Sequence[Results]) -> str:
    """Returns the figures of a write-up as a Markdown table, with what was measured here beside each.

    Args:
        name: Of the write-up.
        several: Where its case was measured; what none of them has is left out.
    """
    write_up = _write_up(name)
    columns: list[str] = write_up["columns"]
    case = Case(tuple(write_up["shape"]))
    devices = [results.device.split(" (")[0] for results in several]
    ours = devices[0] if len(set(devices)) == 1 else "here"
    first = ", ".join(filter(None, (_link(write_up), str(case), write_up.get("how"))))
    titles = [*_heads(columns, write_up.get("gpu", "theirs")), "here", *_heads(columns, ours)]
    lines = [f"| {first} | {' | '.join(titles)} |", _rule(len(columns), len(columns))]
    for figure in write_up["figures"]:
        theirs = [figure.get("what", ""), *(_theirs(column, figure, write_up, case) for column in columns)]
        found = [
            (
                r.who if len(set(devices)) == 1 else f"{r.who}, {device}",
                r,
                _best(results.records, case, _first(write_up)),
            )
            for results, device in zip(several, devices, strict=True)
            for who in figure["ours"]
            if (r := _best(results.records, case, who))
        ]
        for label, r, base in found:
            cells = [*theirs, label if r.ours else f"*{label}*", *(_ours(column, r, base, ours) for column in columns)]
            lines.append(f"| {' | '.join(cells)} |")
            theirs = [""] * len(theirs)
        if not found and "what" in figure:
            lines.append(f"| {' | '.join([*theirs, *[''] * (1 + len(columns))])} |")
    return "\n".join(lines)


def worth(name: str, several: Sequence[Results]) -> str:
    """Returns the improvements that a write-up names as a Markdown table, with what each is worth here.

    Args:
        name: Of the write-up.
        several: What was measured, of any case.
    """
    write_up = _write_up(name)
    cases = list(dict.fromkeys((r.case, r.dtype) for results in several for r in results.records))
    pairs = {
        (step["what"], case): (before, after)
        for results in several
        for step in write_up["improvements"]
        for case in cases
        if (before := _named(results.records, case, step["from"]))
        and (after := _named(results.records, case, step["to"]))
    }
    cases = [case for case in cases if any(at == case for _, at in pairs)]
    lines = [
        f"| {_link(write_up)} names | here | {' | '.join(map(' '.join, cases))} |",
        "|---|---" + "|---:" * len(cases) + "|",
    ]
    for step in write_up["improvements"]:
        times = [pairs.get((step["what"], case)) for case in cases]
        texts = [
            f"{duration(pair[0])} → {duration(pair[1])}, {pair[0] / pair[1]:.2f}×" if pair else "" for pair in times
        ]
        lines.append(f"| {step['what']} | {step['from']} → {step['to']} | {' | '.join(texts)} |")
    return "\n".join(lines)


def losses() -> list[float]:
    """Returns the published losses of a training, before each of its steps."""
    return [float(loss) for loss in _write_up("pallas")["losses"]]


def compared(found: Iterable[float]) -> str:
    """Returns the published losses as a Markdown table, beside those of a training here."""
    write_up = _write_up("pallas")
    lines = [f"| step | {_link(write_up)} | here |", "|---:|---:|---:|"]
    lines += [f"| {i} | {a} | {b:.6f} |" for i, (a, b) in enumerate(zip(write_up["losses"], found, strict=False), 1)]
    return "\n".join(lines)


def _write_up(name: str) -> dict[str, Any]:
    found: dict[str, Any] = _data()["write-ups"][name]
    return found


def _link(write_up: dict[str, Any]) -> str:
    return f"[{write_up['title']}]({write_up['source']})"


def _rate(device: str) -> Decimal | None:
    """Returns the rate of a GPU's memory by its maker, in GB/s, where that is known."""
    return Decimal(_data()["rates"][device]["gbps"]) if device in _data()["rates"] else None


def _first(write_up: dict[str, Any]) -> str:
    """Returns whose time here improvements and speedups are counted from."""
    who: str = write_up["figures"][0]["ours"][0]
    return who


def _heads(columns: Sequence[str], device: str) -> list[str]:
    rate = _rate(device)
    limit = "" if rate is None else f"of {rate * GFLOP_A_GB:.0f} GFLOP/s" if "gflops" in columns else f"of {rate} GB/s"
    first, *others = [limit if column == "limit" else _TITLES[column] for column in columns]
    return [f"{device}: {first}", *others]


def _rule(theirs: int, ours: int) -> str:
    return "|---" + "|---:" * theirs + "|---" + "|---:" * ours + "|"


def _theirs(column: str, figure: dict[str, Any], write_up: dict[str, Any], case: Case) -> str:
    """Returns a published figure as it was published, or the share that follows from it."""
    if column == "limit" and ("time" in figure or "gflops" in figure):
        rate = _rate(write_up["gpu"])
        reached = figure["gflops"] / GFLOP_A_GB if "gflops" in figure else case.moved / figure["time"] / 10**6
        return "" if rate is None else f"{reached / rate:.1%}"
    if column not in figure:
        return ""
    value = figure[column]
    if column == "error":
        return f"{value:.0e}"
    return f"{value}{ {'time': ' ms', 'improvement': '%', 'speedup': '×'}.get(column, '') }"


def _ours(column: str, r: Record, base: Record | None, device: str) -> str:
    """Returns the same of a record."""
    if r.status != "ok" or not r.median_s:
        return r.status.upper() if column in ("time", "gflops", "error") else ""
    rate, start = _rate(device), base and base.median_s
    texts = {
        "time": duration(r.median_s),
        "gflops": operations(r),
        "limit": f"{(r.gbps or 0.0) / float(rate):.1%}" if rate else "",
        "improvement": improvement(r.median_s, start) if start else "",
        "speedup": f"{start / r.median_s:.2f}×" if start else "",
        "error": f"{r.max_rel_error:.1e}",
    }
    return texts[column]


def _best(records: Sequence[Record], case: Case, who: str) -> Record | None:
    """Returns the fastest record of a way to compute a case, or why there is none, or nothing."""
    found = [r for r in records if (r.op, r.shape, r.dtype, r.who) == (case.op, case.shape, case.dtype.name, who)]
    return min(found, key=lambda r: r.median_s or float("inf"), default=None)


def _named(records: Sequence[Record], case: tuple[str, str], name: str) -> float | None:
    """Returns the time of what is called so on a case, where it was timed."""
    mine = (r for r in records if (r.case, r.dtype) == case and name in (r.who, configured(r)))
    return next((r.median_s for r in mine if r.median_s), None)
