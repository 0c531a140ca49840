"""Results as charts, in colours that read on a white page and on a dark one."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxsoftmax import files
from maxsoftmax.bench.cases import CALL, SUITES
from maxsoftmax.bench.results import Record, Results
from maxsoftmax.bench.table import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#808890"
"""Text and lines: as far from white as from black."""

OURS = "#e8590c"
"""Bars of ours."""

PEER = "#4c8dae"
"""Bars of others."""

COLOURS = (
    OURS,
    PEER,
    "#2f9e44",
    "#ae3ec9",
    "#c08a00",
    "#e03131",
    "#1098ad",
    "#7950f2",
    "#8d6e63",
    "#d6336c",
    "#6b8e23",
)
"""Lines, one after the other: each at least twice as light as black and half as light as white."""

FORMATS = ("svg", "png")

STYLE: Any = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
}
"""What matplotlib is told."""


def targets(path: Path) -> list[Path]:
    """Returns the files that a chart called `path` makes: the one its suffix says, or one of each format without.

    Raises:
        ValueError: If the suffix is of another format.
    """
    if not path.suffix:
        return [path.with_suffix(f".{form}") for form in FORMATS]
    if path.suffix.lower().lstrip(".") not in FORMATS:
        raise ValueError(f"a chart is written as {' or '.join(FORMATS)}, not {path.suffix}: {path}")
    return [path]


def check(path: Path) -> None:
    """Refuses now a chart called `path` that could not be written later.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If the suffix is of another format, or matplotlib is not installed.
    """
    for target in targets(path):
        files.check(target)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a chart needs matplotlib: pip install 'maxsoftmax[bench]'")


def write(results: Results, path: Path) -> list[Path]:
    """Draws `results` and returns the files written: an SVG, a PNG, or both where `path` has no suffix.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If a file cannot be written.
        ValueError: If nothing was timed, or the suffix is of another format.
    """
    targets(path)
    return save(draw(results), path)


def save(figure: Figure, path: Path) -> list[Path]:
    """Writes a figure as `write` does, and returns the files written.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If the suffix is of another format.
    """
    from matplotlib import rc_context

    paths = targets(path)
    for target in paths:
        content = io.BytesIO()
        form = target.suffix.lower().lstrip(".")
        # Without a date and random names the same results are the same bytes.
        metadata = {"Date": None} if form == "svg" else {}
        with rc_context({"svg.hashsalt": "maxsoftmax"}):
            figure.savefig(content, format=form, dpi=150, transparent=True, metadata=metadata)
        files.replace(target, content.getvalue())
    return paths


@contextlib.contextmanager
def styled() -> Iterator[Figure]:
    """Yields an empty figure to draw in, in these colours.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        yield Figure(layout="constrained")


def draw(results: Results) -> Figure:
    """Returns the chart of the kind that suits the cases: bars for one, lines over the length of a row, else points.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If nothing was timed.
    """
    timed = [r for r in results.records if r.status == "ok"]
    if not timed:
        raise ValueError("nothing was timed, so there is nothing to draw")
    with styled() as figure:
        cases = list(dict.fromkeys((r.case, r.dtype) for r in timed))
        if len(cases) == 1:
            _bars(figure, timed)
        elif all(r.suite == CALL for r in timed):
            _calls(figure, timed, early=results.threads is None)
        elif len({(r.dtype, r.axis) for r in timed}) == 1 and all(r.shape[:-1] == (1,) and r.gflops for r in timed):
            _lines(figure, timed)
        else:
            _points(figure, timed)
        suite = timed[0].suite
        title = SUITES[suite].title if suite in SUITES else f"softmax, {suite}"
        figure.suptitle(f"{title}\n{results.where}", fontsize=11)
        return figure


def _bars(figure: Figure, records: Sequence[Record]) -> None:
    """Time of one case, the slowest on top; the axis is logarithmic because a ladder spans orders of magnitude."""
    figure.set_size_inches(8, 1.4 + 0.3 * len(records))
    axes = figure.subplots()
    records = sorted(records, key=_time)
    places = range(len(records))
    colours = [OURS if r.ours else PEER for r in records]
    axes.barh(places, [_time(r) for r in records], color=colours)
    axes.set_yticks(places, [r.who for r in records])
    axes.set_xscale("log")
    copy = records[0].copy_s or 0.0
    axes.axvline(copy, color=INK, linestyle="--", linewidth=1)
    axes.annotate(
        f"a copy: {duration(copy)}", (copy, 1), xycoords=("data", "axes fraction"), fontsize=8, ha="center", va="bottom"
    )
    for place, r in zip(places, records, strict=True):
        axes.annotate(
            f"{duration(_time(r))}, {r.gbps:.0f} GB/s",
            (_time(r), place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_xlim(min(copy, _time(records[0])) / 1.5, _time(records[-1]) * 5)
    axes.set_xlabel(f"seconds for {records[0].case} {records[0].dtype}; less is better")


def _lines(figure: Figure, records: Sequence[Record]) -> None:
    """GFLOP/s over the length of one row, under the limit that the memory sets."""
    figure.set_size_inches(9, 5.5)
    axes = figure.subplots()
    for i, who in enumerate(dict.fromkeys((r.provider, r.who) for r in records)):
        line = [r for r in records if (r.provider, r.who) == who]
        axes.plot([r.shape[-1] for r in line], [r.gflops or 0 for r in line], label=who[1], **_style(i, who[0]))
    longest = max(r.shape[-1] for r in records)
    copied = max((r for r in records if r.shape[-1] == longest), key=lambda r: r.copy_gbps or 0.0)
    # What the best copy would do if it computed on its way.
    limit = (copied.gflops or 0.0) * (copied.copy_gbps or 0.0) / (copied.gbps or 1.0)
    label = f"copy, {copied.copy_gbps:.0f} GB/s"
    axes.axhline(limit, color=INK, linestyle="--", linewidth=1, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(f"length of the row, {records[0].dtype}")
    axes.set_ylabel("GFLOP/s, five an element")
    _legend(axes)


def _points(figure: Figure, records: Sequence[Record]) -> None:
    """Share of a copy's rate, case by case, a panel for each dtype."""
    dtypes = list(dict.fromkeys(r.dtype for r in records))
    widest = max(len({r.case for r in records if r.dtype == d}) for d in dtypes)
    figure.set_size_inches(max(7, 2.5 + 0.34 * widest), 1 + 4 * len(dtypes))
    whos = list(dict.fromkeys((r.provider, r.who) for r in records))
    for axes, dtype in zip(figure.subplots(len(dtypes), squeeze=False)[:, 0], dtypes, strict=True):
        panel = [r for r in records if r.dtype == dtype]
        cases = list(dict.fromkeys(r.case for r in panel))
        for i, who in enumerate(whos):
            points = [r for r in panel if (r.provider, r.who) == who]
            axes.plot(
                [cases.index(r.case) for r in points],
                [(r.gbps or 0) / (r.copy_gbps or 1) for r in points],
                label=who[1],
                **{**_style(i, who[0]), "linewidth": 0.6},
            )
        axes.axhline(1, color=INK, linestyle="--", linewidth=1)
        axes.set_ylim(bottom=0)
        axes.set_xticks(range(len(cases)), cases, rotation=60, ha="right", fontsize=8)
        axes.set_ylabel(f"{dtype}: rate, a copy's being 1")
        _legend(axes)


def _calls(figure: Figure, records: Sequence[Record], early: bool) -> None:
    """Time of a call over the elements of its logits, a row of panels for each op and dtype.

    A panel shows the time until the result is there; where calls return `early`, one beside it shows when.
    """
    kinds = list(dict.fromkeys((r.op, r.dtype) for r in records))
    times: dict[str, Callable[[Record], float]] = {"until its result is there": _time}
    if early:
        times = {"until it returns": lambda r: r.host_s or _time(r), **times}
    figure.set_size_inches(3 + 5.5 * len(times), 1 + 4.5 * len(kinds))
    whos = list(dict.fromkeys((r.provider, r.who) for r in records))
    grid = figure.subplots(len(kinds), len(times), squeeze=False, sharex=True, sharey="row")
    for row, (op, dtype) in zip(grid, kinds, strict=True):
        panel = sorted((r for r in records if (r.op, r.dtype) == (op, dtype)), key=lambda r: r.size)
        for axes, (until, time) in zip(row, times.items(), strict=True):
            for i, who in enumerate(whos):
                line = [r for r in panel if (r.provider, r.who) == who]
                if line:
                    axes.plot([r.size for r in line], [time(r) for r in line], label=who[1], **_style(i, who[0]))
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("elements")
            axes.set_ylabel(f"{op} {dtype}: seconds of a call\n{until}", fontsize=9)
            axes.tick_params(labelbottom=True, labelleft=True)
        _legend(row[-1])


def _style(number: int, provider: str) -> dict[str, Any]:
    """Returns a line's looks: colours of middle lightness, ours thick."""
    ours = provider.split(".", maxsplit=1)[0] == "maxsoftmax"
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": "osDv^<>PX*"[number % 10],
        "markersize": 4 if ours else 5,
        "linewidth": 1.8 if ours else 1.0,
        "linestyle": "-" if ours else ":",
    }


def _legend(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)


def _time(record: Record) -> float:
    return record.median_s or 0.0
