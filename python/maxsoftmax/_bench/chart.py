"""Results as charts, in colours that read on a white page and on a dark one."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxsoftmax import _files as files
from maxsoftmax._bench.cases import BLOCKS, CALL, SEARCH, SUITES, TUNE, WIDTHS
from maxsoftmax._bench.results import Record, Results
from maxsoftmax._bench.table import duration

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


def write(results: Results, path: Path, *, times: bool = False) -> list[Path]:
    """Draws `results` as `draw` does, and returns the files written: an SVG, a PNG, or both where `path` has no suffix.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If a file cannot be written.
        ValueError: If nothing was timed, or the suffix is of another format.
    """
    targets(path)
    return save(draw(results, times=times), path)


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


def draw(results: Results, *, times: bool = False) -> Figure:
    """Returns the chart of the kind that suits the cases: bars for one, lines over the length of a row, else points.

    Block sizes make lines, and those with unrollings a map, which configurations of `auto` have no place in.

    Args:
        results: What to draw.
        times: Whether lines over the length of a row show seconds, rather than GFLOP/s.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If nothing was timed.
    """
    timed = [r for r in results.records if r.status == "ok"]
    if not timed:
        raise ValueError("nothing was timed, so there is nothing to draw")
    if {r.suite for r in timed} == {TUNE, SEARCH}:
        timed = [r for r in timed if r.suite == TUNE]
    with styled() as figure:
        cases = list(dict.fromkeys((r.case, r.dtype) for r in timed))
        suites = {r.suite for r in timed}
        alike = len({(r.op, r.dtype, r.axis) for r in timed}) == 1
        if suites == {BLOCKS}:
            _blocks(figure, timed)
        elif suites == {TUNE}:
            _search(figure, timed)
        elif len(cases) == 1:
            _bars(figure, timed)
        elif suites == {CALL}:
            _calls(figure, timed, early=results.threads is None)
        elif alike and (suites == {WIDTHS} or all(r.shape[:-1] == (1,) and r.gflops for r in timed)):
            _lines(figure, timed, times)
        else:
            _points(figure, timed)
        suite = timed[0].suite
        titles = {name: made.title for name, made in SUITES.items()}
        titles |= {TUNE: "The search for block size and unrolling", SEARCH: "auto, and other configurations of it"}
        title = titles.get(suite, f"softmax, {suite}")
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


def _lines(figure: Figure, records: Sequence[Record], times: bool) -> None:
    """GFLOP/s over the length of a row, under the limit that the memory sets; or seconds."""
    figure.set_size_inches(9, 5.5)
    axes = figure.subplots()
    for i, who in enumerate(dict.fromkeys((r.provider, r.who) for r in records)):
        # Of a kernel that was tried with several block sizes, the best.
        line: dict[int, Record] = {}
        for r in records:
            n = r.shape[-1]
            if (r.provider, r.who) == who and (n not in line or _time(r) < _time(line[n])):
                line[n] = r
        heights = [_time(r) if times else r.gflops or 0.0 for r in line.values()]
        axes.plot([*line], heights, label=who[1], **_style(i, who[0]))
    if not times:
        longest = max(r.shape[-1] for r in records)
        copied = max((r for r in records if r.shape[-1] == longest), key=lambda r: r.copy_gbps or 0.0)
        # What the best copy would do if it computed on its way: of float32 5/8 of its rate.
        limit = (copied.gflops or 0.0) * (copied.copy_gbps or 0.0) / (copied.gbps or 1.0)
        label = f"limit: {limit:.0f}, at a copy's\n{copied.copy_gbps:.0f} GB/s"
        axes.axhline(limit, color=INK, linestyle="--", linewidth=1, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(f"length of the row, {records[0].dtype}")
    axes.set_ylabel("seconds" if times else "GFLOP/s, five an element")
    _legend(axes)


def _blocks(figure: Figure, records: Sequence[Record]) -> None:
    """Rate over the threads of a block."""
    figure.set_size_inches(9, 5)
    axes = figure.subplots()
    for i, who in enumerate(dict.fromkeys(r.who for r in records)):
        line = [r for r in records if r.who == who]
        axes.plot([r.block_size or 0 for r in line], [r.gbps or 0 for r in line], label=who, **_style(i, "maxsoftmax"))
    copy = max(r.copy_gbps or 0.0 for r in records)
    axes.axhline(copy, color=INK, linestyle="--", linewidth=1, label=f"copy, {copy:.0f} GB/s")
    axes.set_xscale("log", base=2)
    sizes = sorted({r.block_size or 0 for r in records})
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"threads a block, {records[0].case} {records[0].dtype}")
    axes.set_ylabel("GB/s: each element read once and written once")
    _legend(axes)


def _search(figure: Figure, records: Sequence[Record]) -> None:
    """Share of a copy's rate for each block size and unrolling, a map for each kernel and case; the best is framed."""
    from matplotlib.patches import Rectangle

    kernels = list(dict.fromkeys(r.who for r in records))
    cases = list(dict.fromkeys(r.case for r in records))
    sizes = sorted({r.block_size or 0 for r in records})
    unrolls = sorted({r.unroll or 0 for r in records})
    figure.set_size_inches(1 + 4.5 * len(kernels), 1.2 + 3 * len(cases))
    for row, case in zip(figure.subplots(len(cases), len(kernels), squeeze=False), cases, strict=True):
        for axes, kernel in zip(row, kernels, strict=True):
            cells = {
                (sizes.index(r.block_size or 0), unrolls.index(r.unroll or 0)): r
                for r in records
                if (r.case, r.who) == (case, kernel)
            }
            shares = {cell: (r.gbps or 0.0) / (r.copy_gbps or 1.0) for cell, r in cells.items()}
            grid = [[shares.get((y, x), float("nan")) for x in range(len(unrolls))] for y in range(len(sizes))]
            axes.pcolormesh(grid, cmap="viridis", edgecolors="face")
            low, high = min(shares.values(), default=0.0), max(shares.values(), default=0.0)
            for (y, x), share in shares.items():
                light = share > low + 0.5 * (high - low)
                text = f"{share:.0%}\n{duration(_time(cells[y, x]))}"
                axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8, color="k" if light else "w")
                if share == high:
                    axes.add_patch(Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, fill=False, edgecolor=OURS, linewidth=2))
            axes.set_xticks([i + 0.5 for i in range(len(unrolls))], list(map(str, unrolls)))
            axes.set_yticks([i + 0.5 for i in range(len(sizes))], list(map(str, sizes)))
            axes.set_title(f"{kernel}, {case} {records[0].dtype}", fontsize=9)
            axes.set_xlabel("vectors under way")
            axes.set_ylabel("threads a block")


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
