"""What each rank does for the suite of rows that are split: computes, checks and times one provider.

Every result is compared with float64 before it is timed. A step takes as long as it does on the slowest rank.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from maxsoftmax._bench.losses import LIMIT
from maxsoftmax._bench.sharded_providers import PROVIDERS, Step

WARM = 30
"""Steps before those that are timed: of two GPUs a process's first ones were seen to be a fifth slower."""

REPEATS = 15
"""Timed steps."""

TIMEOUT = datetime.timedelta(seconds=180)
"""How long ranks wait for one that does not come."""

CALLS = 20
"""Calls of a CUDA graph."""

CHUNK = 512
"""Rows of the reference at a time."""


def lengths_of(n: int, ranks: int) -> list[int]:
    """Returns the classes of each rank, as torch.chunk and DTensors deal them."""
    most = -(-n // ranks)
    return [max(0, min(most, n - rank * most)) for rank in range(ranks)]


def run(  # noqa: PLR0917 (as torch passes them)
    rank: int, ranks: int, name: str, cases: list[tuple[str, str, tuple[int, int]]], kind: str, folder: str
) -> None:
    """Measures a provider, and leaves what was measured in a file.

    Args:
        rank: Of this process.
        ranks: How many there are.
        name: Of the provider.
        cases: An op, a dtype, and rows and classes each.
        kind: "cpu" or "gpu".
        folder: Where the ranks meet, and where the first leaves its file.
    """
    if kind == "cpu" and hasattr(os, "sched_setaffinity"):
        # Each has cores of its own, as far as there are.
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // ranks)
        os.sched_setaffinity(0, [cores[(rank * share + i) % len(cores)] for i in range(share)])
    import torch
    import torch.distributed as dist

    place = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    if kind == "gpu":
        torch.cuda.set_device(place)
    else:
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    dist.init_process_group(
        "nccl" if kind == "gpu" else "gloo",
        init_method=f"file://{folder}/{name}-{ranks}",
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
    )
    found = []
    for op, dtype, shape in cases:
        try:
            found.append(measure(name, op, dtype, shape, place))
        except ImportError as error:
            found.append({"status": "missing", "note": str(error)})
        if rank == 0:
            Path(f"{folder}/{name}-{ranks}.json").write_text(json.dumps(found), encoding="utf-8")
        if kind == "gpu":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def measure(name: str, op: str, dtype: str, shape: tuple[int, int], place: Any) -> dict[str, Any]:
    """Returns what was measured of a provider, the same on all ranks."""
    import torch
    import torch.distributed as dist

    rows, n = shape
    lengths = lengths_of(n, dist.get_world_size())
    random = torch.Generator(place).manual_seed(dist.get_rank())
    shard = torch.randn(rows, lengths[dist.get_rank()], generator=random, device=place).mul_(3)
    shard = shard.to(getattr(torch, dtype)).requires_grad_(op == "cross_entropy")
    target = torch.randint(n, (rows,), generator=torch.Generator(place).manual_seed(99), device=place)
    step = PROVIDERS[name](op, shard, target, lengths)
    error = checked(op, step, shard, target, lengths)
    status = "ok" if error <= LIMIT[dtype] else "wrong"
    if status == "wrong":
        return {"status": status, "error": error}
    # Steps without gradients are so short that the host would take longer.
    is_replayed = place.type == "cuda" and not shard.requires_grad
    peak = warmed(step, shard)
    times = replayed(step, place) if is_replayed else timed(step, shard)
    return {
        "status": status,
        "median_s": statistics.median(times),
        "min_s": min(times),
        "repeats": len(times),
        "peak_bytes": peak,
        "error": error,
        "note": f"replayed from a CUDA graph of {CALLS} calls" if is_replayed else "",
    }


def checked(op: str, step: Step, shard: Any, target: Any, lengths: list[int]) -> float:
    """Returns the largest relative error of any rank against float64: of the loss, and of the gradient in its norm."""
    import torch
    import torch.distributed as dist

    start = sum(lengths[: dist.get_rank()])
    result = step()
    total, norms, wrong = 0.0, 0.0, 0.0
    for first in range(0, len(shard), CHUNK):
        x, labels = shard.detach()[first : first + CHUNK].double(), target[first : first + CHUNK] - start
        sums = [torch.empty(len(x), dtype=torch.float64, device=x.device) for _ in lengths]
        dist.all_gather(sums, torch.logsumexp(x, 1))
        logs = x - torch.logsumexp(torch.stack(sums), 0).unsqueeze(1)
        here = ((labels >= 0) & (labels < x.shape[1])).nonzero().squeeze(1)
        if op == "log_softmax":
            expected, mine = logs, result[first : first + CHUNK]
        else:
            total -= logs[here, labels[here]].sum().item()
            expected, mine = logs.exp(), shard.grad[first : first + CHUNK]
            expected[here, labels[here]] -= 1
            expected /= len(shard)
        norms += expected.square().sum().item()
        wrong += (mine.double() - expected).square().sum().item()
    errors = torch.tensor([total, norms, wrong], dtype=torch.float64, device=shard.device)
    dist.all_reduce(errors)
    total, norms, wrong = errors.tolist()
    error = (wrong / norms) ** 0.5
    if op == "cross_entropy":
        error = max(error, abs(float(result) * len(shard) - total) / total)
    return float(error)


def warmed(step: Step, shard: Any) -> int | None:
    """Does the first steps, and returns the peak of one above its inputs, on a GPU."""
    import torch

    gpu, peak = shard.device.type == "cuda", None
    for i in range(WARM):
        shard.grad = None
        if gpu and i == WARM - 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        kept = step()
        if gpu and i == WARM - 1:
            peak = torch.cuda.max_memory_allocated() - before
        del kept
    return peak


def timed(step: Step, shard: Any) -> list[float]:
    """Returns the times of steps, each that of the slowest rank."""
    import torch.distributed as dist

    def fresh() -> None:
        shard.grad = None
        step()

    if shard.device.type == "cuda":
        return slowest(by_events(fresh), shard.device)
    times = []
    for _ in range(REPEATS):
        shard.grad = None
        dist.barrier()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return slowest(times, shard.device)


def replayed(step: Step, place: Any) -> list[float]:
    """Returns the times of steps without gradients on a GPU, of the slowest rank, without what the host does."""
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                step()
        graph.replay()
        times = by_events(graph.replay)
    return slowest([each / CALLS for each in times], place)


def by_events(step: Step) -> list[float]:
    """Returns the times of steps on a GPU, of this rank."""
    import torch
    import torch.distributed as dist

    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    dist.barrier()
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(events)]


def slowest(times: list[float], place: Any) -> list[float]:
    """Returns the times of the slowest rank."""
    import torch
    import torch.distributed as dist

    found = torch.tensor(times, dtype=torch.float64, device=place)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    values: list[float] = found.tolist()
    return values
