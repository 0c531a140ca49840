"""What a loss of split rows is expected to take, from what one GPU takes: a model, to be held against measurements.

A step on N GPUs reads and writes an N-th of the logits at the rate of one GPU, waits for one all-gather, and receives
what the others send: t(N) = t(1) / N + L + (N - 1) · rows · bytes / W.
"""

from __future__ import annotations

from maxsoftmax._bench.results import Results
from maxsoftmax._bench.sharded import Measurement

OP = "cross_entropy_gradient"
"""The op of the records: a loss, forward and backward."""

BYTES = 12
"""That a rank sends of a row."""

LATENCY_S = 38e-6
"""L: what logsumexp of 8192×128256 bfloat16 took in a graph on two H200s, 312 µs, beyond half of the 486 of
one GPU's kernel and the 30 of the call, with which one GPU took 516."""

CLASSES = (128256, 262144)
"""The vocabularies of the table."""

LINKS = {"NVLink 4": 450e9, "InfiniBand NDR": 50e9}
"""W: bytes a second that a GPU receives, as their data sheets say: 18 links of 25 GB/s, and a port of 400 Gb/s."""


def seconds(alone_s: float, rows: int, count: int, link: float) -> float:
    """Returns the time of a step.

    Args:
        alone_s: Of one GPU.
        rows: How many.
        count: GPUs.
        link: Bytes a second that each receives.
    """
    if count == 1:
        return alone_s
    return alone_s / count + LATENCY_S + (count - 1) * rows * BYTES / link


def markdown(results: Results, counts: tuple[int, ...] = (1, 2, 4, 8, 16)) -> str:
    """Returns a table for a document: of each case of ours that was measured, times and how many times as fast."""
    columns = [f"{count} GPU{'s' * (count > 1)}" for count in counts]
    lines = [f"| rows×classes | link | {' | '.join(columns)} |", "|---|---|" + "---:|" * len(counts)]
    for r in results.records:
        if (r.op, r.provider) != (OP, "maxsoftmax") or not r.median_s or r.shape[1] not in CLASSES:
            continue
        what = f"{'×'.join(map(str, r.shape))} {r.dtype}"
        for name, link in LINKS.items():
            times = [seconds(r.median_s, r.shape[0], count, link) for count in counts]
            cells = [f"{1e3 * t:.2f} ms ({r.median_s / t:.1f} ×)" for t in times]
            lines.append(f"| {what} | {name} | {' | '.join(cells)} |")
            what = ""
    return "\n".join(lines)


def compared(found: list[Measurement]) -> str:
    """Returns a table for a document: what our losses took on GPUs of one host, and what the model expects of them."""
    lines = ["| rows×classes | | GPUs | measured | expected | as fast as one |", "|---|---|---:|---:|---:|---:|"]
    ours = [m for m in found if m.op == "cross_entropy" and m.provider.startswith("maxsoftmax") and m.median_s]
    one = {(m.case, m.provider): m.median_s for m in ours if m.processes == 1}
    for m in ours:
        alone = one.get((m.case, m.provider))
        if m.processes > 1 and m.median_s and alone:
            what = f"{'×'.join(map(str, m.shape))} {m.dtype}"
            expected = seconds(alone, m.shape[0], m.processes, LINKS["NVLink 4"])
            times = " | ".join(f"{1e3 * t:.2f} ms" for t in (m.median_s, expected))
            lines.append(f"| {what} | `{m.provider}` | {m.processes} | {times} | {alone / m.median_s:.2f} × |")
    return "\n".join(lines)
