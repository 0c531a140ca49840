"""Writes the tables of the documents and draws the charts again, all of them, from the records.

    python benchmarks/write.py

A table is what follows a mark, up to the next empty line. A mark names the kind of the table, and the files that it is
made of: `<!-- table: benchmarks/results/cpu-xeon.json auto torch -->`.
"""

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxsoftmax._bench import losses_report, published, sharded, sharded_model
from maxsoftmax._bench.results import Results
from maxsoftmax._bench.table import markdown, overview
from maxsoftmax._commands import cli, train

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = ROOT / "benchmarks" / "results"
CHARTS = ROOT / "benchmarks" / "charts"

KINDS = "table|overview|beside|worth|losses|linear|models|architectures|sharded|expected|model"
"""The kinds of tables, as marks name them."""

MARK = re.compile(rf"<!-- ({KINDS}): ([^>]+) -->\n\n(.*?)(?=\n\n)", re.S)

DRAWN = {
    "cpu": ["cpu-xeon.json"],
    **{
        name: [f"{name}.json"]
        for name in (
            "cpu-call",
            *(
                f"h200-{suite}"
                for suite in ("blocks", "call", "grad", "ladder", "llm", "square", "tune", "vector", "widths")
            ),
        )
    },
    "h200-linear": ["h200-linear.json"],
    "h200-worklog": ["h200-sweep.json", "--beside", "worklog"],
}
"""The charts of the benchmark, and the records and options that each is drawn from."""


def table(kind: str, what: str) -> str:
    """Returns the table that a mark stands for."""
    files = [ROOT / word for word in what.split() if word.endswith(".json")]
    words = [word for word in what.split() if not word.endswith(".json")]
    if kind == "losses":
        return published.compared(json.loads(files[0].read_text(encoding="utf-8"))["losses"])
    reports: dict[str, tuple[Callable[[Path], Any], Callable[[Any], str]]] = {
        "linear": (losses_report.read, losses_report.markdown),
        "sharded": (sharded.read, sharded.markdown),
        "expected": (sharded.read, sharded_model.compared),
    }
    if kind in reports:
        read, written = reports[kind]
        report = read(files[0])
        assert report
        return written(report)
    if kind in ("models", "architectures"):
        shown = {"models": models, "architectures": architectures}[kind]
        return shown(json.loads(files[0].read_text(encoding="utf-8")))
    several = [Results.read(file) for file in files]
    if kind == "model":
        return sharded_model.markdown(several[0])
    if kind in ("beside", "worth"):
        return {"beside": published.beside, "worth": published.worth}[kind](words[0], several)
    return {"table": markdown, "overview": overview}[kind](several[0], words or None)


def models(found: dict[str, Any]) -> str:
    """Returns the table of what the drop-in replaces in MAX's own models."""
    lines = ["| softmax in MAX | used by | CPU | GPU |", "|---|---|---|---|"]
    for row in found["places"]:
        file, _, name = row["place"].partition(": ")
        used = ", ".join(row["architectures"]) or "no architecture of its own"
        cells = [row["beyond"]] * 2 if "beyond" in row else [_replaced(row[kind]) for kind in ("cpu", "gpu")]
        lines.append(" | ".join([f"| `{name}` of `{file.removeprefix('pipelines/')}`", used, *cells]) + " |")
    return "\n".join(lines)


def _replaced(found: dict[str, Any]) -> str:
    """Returns what became of the softmaxes of a graph, in words."""
    if "failed" in found:
        refused = found["failed"].startswith("RuntimeError: MAX does not compile")
        return "MAX does not compile it" if refused else f"not built: {found['failed']}"
    words = []
    for kernel in found["kernels"]:
        if kernel["name"].startswith("maxsoftmax"):
            parts = [part for part in ("Prologue", "Epilogue") if f"{part}(" in kernel["fused"]]
            fused = " and ".join({"Prologue": "before", "Epilogue": "after"}[part] for part in parts)
            words.append(f"replaced, fused with ops {fused}" if fused else "replaced")
        else:
            words.append(f"MAX's `{kernel['name'].rpartition('.')[2]}`")
    counts = {word: words.count(word) for word in words}
    return "; ".join(f"{count} × {word}" if count > 1 else word for word, count in counts.items()) or "none is left"


def architectures(found: dict[str, Any]) -> str:
    """Returns the architectures of MAX that compute no softmax as an op of their graphs."""
    names = [f"`{name}`" for name in found["without"]]
    return f"{len(names)} architectures: {', '.join(names)}."


def rewritten(text: str) -> str:
    """Returns a document with the tables that its marks stand for."""
    return MARK.sub(lambda mark: mark[0].removesuffix(mark[3]) + table(mark[1], mark[2]), text)


def draw() -> None:
    """Draws every chart."""
    for name, (file, *options) in DRAWN.items():
        with contextlib.redirect_stdout(io.StringIO()):
            status = cli.main(["bench", "report", str(RESULTS / file), *options, "--plot", str(CHARTS / f"{name}.svg")])
        if status:
            sys.exit(status)
    found = json.loads((RESULTS / "cpu-train.json").read_text(encoding="utf-8"))
    title = f"{found['task']}, seed {found['seed']}"
    train.plot(found["losses"], CHARTS / "cpu-train.svg", title, published.losses())


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(rewritten(document.read_text(encoding="utf-8")), encoding="utf-8")
    draw()
