"""What the suite of losses without logits has measured, read from its file: tables, and a chart of time and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from maxsoftmax._bench import chart, losses
from maxsoftmax._bench.losses import Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Report = tuple[str, list[list[Measurement]]]
"""The device, and what was measured of each shape and dtype."""


def read(path: Path) -> Report | None:
    """Returns what a file holds; None if it is of another suite.

    Raises:
        OSError: If the file cannot be read.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        found = [Measurement(**{**record, "shape": tuple(record["shape"])}) for record in kept["records"]]
        device = str(kept["device"])
    except (ValueError, TypeError, KeyError):
        # Whose reader says what is wrong with it.
        return None
    if not found or any(m.suite != losses.LOSSES for m in found):
        return None
    groups: dict[tuple[tuple[int, ...], str], list[Measurement]] = {}
    for m in found:
        groups.setdefault((m.shape, m.dtype), []).append(m)
    return device, list(groups.values())


def markdown(report: Report) -> str:
    """Returns a table for a document: times, in brackets the memory above inputs and gradients."""
    _, groups = report
    providers = list(dict.fromkeys(m.provider for group in groups for m in group if m.status == "ok"))
    lines = [f"| rows×classes×features | {' | '.join(f'`{name}`' for name in providers)} |"]
    lines.append("|---|" + "---:|" * len(providers))
    for group in groups:
        timed = {m.provider: m for m in group if m.status == "ok"}
        cells = [_cell(timed[name]) if name in timed else "" for name in providers]
        lines.append(f"| {'×'.join(map(str, group[0].shape))} {group[0].dtype} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(report: Report) -> Figure:
    """Returns a chart: the time of each provider at each shape, and beside it the memory.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If nothing was timed.
    """
    device, groups = report
    timed = [[m for m in group if m.status == "ok"] for group in groups]
    bars = [m for group in timed for m in reversed(group)]
    if not bars:
        raise ValueError("nothing was timed, so there is nothing to draw")
    # A gap between shapes.
    shapes = [j for j, group in enumerate(timed) for _ in group]
    places = [i + 0.8 * j for i, j in enumerate(shapes)]
    with chart.styled() as figure:
        figure.set_size_inches(9, 1.2 + 0.26 * len(bars))
        left, right = figure.subplots(1, 2, sharey=True)
        colours = [chart.OURS if m.provider.startswith("maxsoftmax") else chart.PEER for m in bars]
        for axes, values, unit in (
            (left, [1e3 * (m.median_s or 0.0) for m in bars], "ms"),
            (right, [(m.peak_bytes or 0) / 1e9 for m in bars], "GB"),
        ):
            axes.barh(places, values, color=colours)
            for place, value, m in zip(places, values, bars, strict=True):
                shown = "" if unit == "GB" and m.peak_bytes is None else f"{value:.3g} {unit}"
                axes.annotate(shown, (value, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
            axes.set_xlim(0, 1.2 * max(values))
        left.set_yticks(places, [f"{m.provider}, {'×'.join(map(str, m.shape))}" for m in bars], fontsize=8)
        left.set_xlabel("forward and backward; less is better")
        right.set_xlabel("above inputs and gradients; less is better")
        figure.suptitle(f"linear_cross_entropy, {bars[0].dtype}, {device}", fontsize=10)
        return figure


def _cell(m: Measurement) -> str:
    time_ms = f"{1e3 * (m.median_s or 0.0):.1f} ms"
    return time_ms if m.peak_bytes is None else f"{time_ms} ({m.peak_bytes / 1e9:.2f} GB)"
