"""The suite of rows that are split, in a MAX graph of several GPUs: one process for all of them."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

NAME = "maxsoftmax.ops"
"""The provider's name."""

REPEATS = 5
"""How often calls are timed."""

CALLS = 10
"""Calls that are timed together."""


def run(rank: int, count: int, cases: list[tuple[str, str, tuple[int, int]]], kind: str, folder: str) -> None:
    """Measures graphs of so many GPUs, and leaves what was measured in a file, as `sharded_ranks.run` does."""
    found: list[dict[str, Any]] = []
    for op, dtype, shape in cases:
        if kind == "cpu":
            found.append({"status": "missing", "note": "in a graph all shards of a CPU are computed by one process"})
        else:
            found.append(measure(op, dtype, shape, count))
        Path(f"{folder}/{NAME}-{count}.json").write_text(json.dumps(found), encoding="utf-8")


def measure(op: str, dtype: str, shape: tuple[int, int], count: int) -> dict[str, Any]:
    """Returns what was measured of a graph, after its results were compared with float64."""
    import torch
    from max.driver import Accelerator, Buffer
    from max.dtype import DType
    from max.engine import InferenceSession
    from max.graph import DeviceRef, Graph, TensorType
    from max.nn import Signals

    import maxsoftmax
    import maxsoftmax.ops.sharded
    from maxsoftmax._bench.losses import LIMIT
    from maxsoftmax._bench.sharded_ranks import lengths_of

    (rows, n), lengths = shape, lengths_of(shape[1], count)
    places, devices = [DeviceRef.GPU(i) for i in range(count)], [Accelerator(i) for i in range(count)]
    kind = DType._from_str(dtype) if hasattr(DType, "_from_str") else getattr(DType, dtype)
    types = [TensorType(kind, (rows, length), place) for length, place in zip(lengths, places, strict=True)]
    types += [TensorType(DType.int64, (rows,), place) for place in places]
    signals = Signals(places) if count > 1 else None
    with Graph(
        "sharded",
        input_types=[*types, *(signals.input_types() if signals else ())],
        custom_extensions=[maxsoftmax.extension()],
    ) as graph:
        values = [value.tensor for value in graph.inputs[: 2 * count]]
        buffers = graph.inputs[2 * count :]
        if op == "log_softmax":
            graph.output(*maxsoftmax.ops.sharded.log_softmax(values[:count], buffers))
        else:
            losses, pairs = maxsoftmax.ops.sharded.cross_entropy_forward(values[:count], values[count:], buffers)
            graph.output(*losses, *maxsoftmax.ops.sharded.cross_entropy_backward(values[:count], values[count:], pairs))
    model = InferenceSession(devices=devices).load(graph)

    target = torch.randint(n, (rows,), generator=torch.Generator().manual_seed(99))
    shards, given = [], []
    for i, length in enumerate(lengths):
        with torch.cuda.device(i):
            random = torch.Generator("cuda").manual_seed(i)
            x = torch.randn(rows, length, generator=random, device="cuda").mul_(3).to(getattr(torch, dtype))
            shards.append(x)
            torch.cuda.synchronize()
            given.append(Buffer.from_dlpack(x))
    given += [Buffer.from_numpy(target.numpy()).to(device) for device in devices]
    given += signals.buffers() if signals else []

    results = model.execute(*given)
    for device in devices:
        device.synchronize()
    error = _error(op, results, shards, target)
    if error > LIMIT[dtype]:
        return {"status": "wrong", "error": error}
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        for _ in range(CALLS):
            results = model.execute(*given)
        for device in devices:
            device.synchronize()
        times.append((time.perf_counter() - start) / CALLS)
    # The first warms up.
    times = times[1:]
    return {
        "status": "ok",
        "median_s": statistics.median(times),
        "min_s": min(times),
        "repeats": CALLS * len(times),
        "error": error,
        "note": "timed by the host's clock, several calls at once",
    }


def _error(op: str, results: Any, shards: list[Any], target: Any, chunk: int = 512) -> float:
    """Returns the relative error of the loss and the gradient, or of logarithms, against float64 on the first GPU."""
    import torch

    mine = [torch.from_dlpack(x) for x in results]
    total = norms = wrong = 0.0
    for first in range(0, len(target), chunk):
        part = slice(first, first + chunk)
        logs = torch.cat([x[part].cuda(0).double() for x in shards], 1).log_softmax(1)
        expected = logs
        if op == "cross_entropy":
            rows, labels = torch.arange(len(logs)), target[part]
            total -= logs[rows, labels].sum().item()
            expected = logs.exp()
            expected[rows, labels] -= 1
            expected /= len(target)
        found = torch.cat([x[part].cuda(0).double() for x in mine[-len(shards) :]], 1)
        norms += expected.square().sum().item()
        wrong += (found - expected).square().sum().item()
    error = (wrong / norms) ** 0.5
    if op == "cross_entropy":
        error = max(error, abs(float(mine[0]) * len(target) - total) / total)
    return float(error)
