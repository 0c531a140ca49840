"""The suite of losses without logits: time and peak memory of forward and backward, beside others, from torch tensors.

Each is checked against float64: the loss, and the weight's gradient in its norm. Peak memory is what a step needs above
its inputs and the gradients that it leaves behind. On a CPU each has a process of its own, which tells its peak.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from maxsoftmax import _files as files
from maxsoftmax._bench.run import processor, usable_cores
from maxsoftmax._commands.console import Console
from maxsoftmax._graph.extension import distribution_version

LOSSES = "losses"
"""The suite's name."""

SHAPES = {"gpu": ((8192, 128256, 4096), (16384, 151936, 2048), (8192, 256000, 2304)), "cpu": ((512, 50257, 768),)}
"""Rows, classes and features: of Llama 3, Qwen 3 and Gemma 2; on a CPU of GPT-2."""

DTYPE = {"gpu": "bfloat16", "cpu": "float32"}
"""Unless told otherwise."""

REPEATS = 7
"""Timed steps, after two that are not."""

LIMIT = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3, "float64": 1e-9}
"""By how much the weight's gradient may be wrong, in norms: several bfloat16 roundings of parts of a sum are more."""

CHUNK = 1024
"""Rows of the reference at a time."""

Step = Callable[[], Any]
"""Computes the loss and leaves gradients behind; returns the loss."""

PACKAGES = {
    "maxsoftmax.torch": "torch",
    "products": "torch",
    "torch": "torch",
    "torch.compile": "torch",
    "maxsoftmax": "numpy",
    "liger": "liger-kernel",
    "cut-cross-entropy": "cut-cross-entropy",
    "quack": "quack-kernels",
}
"""Whose version is noted, by provider."""


@dataclass(frozen=True)
class Measurement:
    """One provider at one shape."""

    suite: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    """Rows, classes and features."""
    provider: str
    status: str
    """"ok", "wrong", "missing" or "failed"."""
    median_s: float | None = None
    min_s: float | None = None
    repeats: int = 0
    peak_bytes: int | None = None
    """Above inputs and gradients."""
    loss_error: float | None = None
    """Relative, against float64."""
    gradient_error: float | None = None
    """Of the weight: the norm of what is wrong over its own."""
    note: str = ""


def products(hidden: Any, weight: Any, target: Any) -> Step:
    """Returns the three matrix products alone, which leave no gradient."""
    x, matrix = hidden.detach(), weight.detach()

    def step() -> None:
        logits = x @ matrix.t()
        _ = logits @ matrix, logits.t() @ x

    return step


def ours(hidden: Any, weight: Any, target: Any) -> Step:
    """Returns `maxsoftmax.torch.linear_cross_entropy`."""
    from maxsoftmax.torch import linear_cross_entropy

    return lambda: _backward(linear_cross_entropy(hidden, weight, target))


def arrays(hidden: Any, weight: Any, target: Any) -> Step:
    """Returns `maxsoftmax.linear_cross_entropy_backward` of NumPy's arrays."""
    import torch

    import maxsoftmax

    given = [x.detach().numpy() for x in (hidden, weight, target)]

    def step() -> Any:
        loss, *gradients = maxsoftmax.linear_cross_entropy_backward(*given)
        hidden.grad, weight.grad = (torch.from_numpy(x) for x in gradients[:2])
        return torch.tensor(loss)

    return step


def eager(hidden: Any, weight: Any, target: Any) -> Step:
    """Returns torch's own functions, whose loss is of float32."""
    return lambda: _backward(_torch(hidden, weight, target))


def compiled(hidden: Any, weight: Any, target: Any) -> Step:
    """Returns the same, compiled."""
    import torch

    function = torch.compile(_torch)
    return lambda: _backward(function(hidden, weight, target))


def liger(hidden: Any, weight: Any, target: Any) -> Step:
    """Returns Liger's fused linear cross entropy, as it is unless told otherwise."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def step() -> Any:
        found = liger_fused_linear_cross_entropy(hidden, weight, target)
        return _backward(found[0] if isinstance(found, tuple) else found)

    return step


def cut(hidden: Any, weight: Any, target: Any) -> Step:
    """Returns Apple's Cut Cross Entropy, as it is unless told otherwise."""
    from cut_cross_entropy import linear_cross_entropy

    return lambda: _backward(linear_cross_entropy(hidden, weight, target))


def quack(hidden: Any, weight: Any, target: Any) -> Step:
    """Returns QuACK's chunked linear cross entropy, as it is unless told otherwise."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda: _backward(chunked_linear_cross_entropy(hidden, weight, target))


PROVIDERS: dict[str, tuple[Callable[..., Step], tuple[str, ...]]] = {
    "products": (products, ("cpu", "gpu")),
    "maxsoftmax.torch": (ours, ("cpu", "gpu")),
    "maxsoftmax": (arrays, ("cpu",)),
    "torch": (eager, ("cpu", "gpu")),
    "torch.compile": (compiled, ("cpu", "gpu")),
    "liger": (liger, ("gpu",)),
    "cut-cross-entropy": (cut, ("gpu",)),
    "quack": (quack, ("gpu",)),
}
"""Each by its name, and the devices that it has."""


def run(options: argparse.Namespace) -> int:
    """Runs the suite and returns the exit status: 0, or 1 if a result was wrong.

    Raises:
        ValueError: If what was asked for does not exist, or torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"suite {LOSSES!r} needs PyTorch: pip install 'maxsoftmax[torch]'") from error
    kind = options.device or ("gpu" if torch.cuda.is_available() else "cpu")
    if kind not in SHAPES or (kind == "gpu" and not torch.cuda.is_available()):
        raise ValueError(f"suite {LOSSES!r} runs on cpu, or on gpu where torch has one, not on {kind}")
    names = options.providers or [name for name, (_, kinds) in PROVIDERS.items() if kind in kinds]
    for name in names:
        if name not in PROVIDERS:
            raise ValueError(f"provider {name!r} does not exist: choose from {', '.join(PROVIDERS)}")
    shapes = options.shape or SHAPES[kind]
    if any(len(shape) != 3 for shape in shapes):
        raise ValueError(f"suite {LOSSES!r} takes rows, classes and features, such as 512x50257x768")
    dtypes = [dtype.name for dtype in options.dtype or ()] or [DTYPE[kind]]
    device = torch.cuda.get_device_name() if kind == "gpu" else processor()
    report = {
        "device": device,
        "threads": None if kind == "gpu" else usable_cores(),
        "versions": _versions(names),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["maxsoftmax", *sys.argv[1:]]),
    }
    out = Console(soft_wrap=False, width=None if sys.stdout.isatty() else 160)
    found: list[Measurement] = []
    for shape in shapes:
        for dtype in dtypes:
            rows = []
            for name in names:
                rows.append(measured(name, shape, dtype, kind))
                if options.json:
                    _write(options.json, {**report, "records": [asdict(m) for m in found + rows]})
            found += rows
            out.print(table(rows))
    return 1 if any(m.status == "wrong" for m in found) else 0


def measured(name: str, shape: tuple[int, ...], dtype: str, kind: str) -> Measurement:
    """Returns what was measured of a provider, whatever becomes of it."""
    if kind == "gpu":
        return measure(name, shape, dtype, kind)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, name, shape, dtype, kind).result()


def measure(name: str, shape: tuple[int, ...], dtype: str, kind: str) -> Measurement:
    """Returns what was measured of a provider, in this process."""
    import torch

    about = LOSSES, "linear_cross_entropy", dtype, tuple(shape), name
    make, kinds = PROVIDERS[name]
    if kind not in kinds:
        return Measurement(*about, "missing", note=f"not on a {kind.upper()}")
    try:
        given = inputs(shape, dtype, "cuda" if kind == "gpu" else "cpu")
        step = make(*given)
        times, peak = _timed(step, given, kind)
        figures: dict[str, Any] = {"median_s": statistics.median(times), "min_s": min(times), "repeats": len(times)}
        if name == "products":
            return Measurement(*about, "ok", **figures)
        loss = step()
        errors = checked(loss, given)
        status = "ok" if errors[1] <= LIMIT[dtype] and errors[0] <= LIMIT[dtype] else "wrong"
        return Measurement(*about, status, **figures, peak_bytes=peak, loss_error=errors[0], gradient_error=errors[1])
    except ImportError as error:
        return Measurement(*about, "missing", note=str(error))
    except Exception as error:
        return Measurement(*about, "failed", note=f"{type(error).__name__}: {str(error).splitlines()[:1]}"[:200])
    finally:
        if kind == "gpu":
            torch.cuda.empty_cache()


def inputs(shape: tuple[int, ...], dtype: str, place: str) -> tuple[Any, Any, Any]:
    """Returns hidden, weight and targets, the same at every call."""
    import torch

    rows, n, features = shape
    random = torch.Generator(place).manual_seed(0)
    how = {"generator": random, "device": place}
    hidden = torch.randn(rows, features, **how).to(getattr(torch, dtype))
    weight = torch.randn(n, features, **how).mul_(features**-0.5).to(getattr(torch, dtype))
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(n, (rows,), **how)


def checked(loss: Any, given: tuple[Any, Any, Any]) -> tuple[float, float]:
    """Returns the relative errors of the loss and the weight's gradient against float64."""
    import torch

    hidden, weight, target = given
    with torch.no_grad():
        matrix, total = weight.double(), 0.0
        dweight = torch.zeros_like(matrix)
        for first in range(0, len(hidden), CHUNK):
            rows, classes = hidden[first : first + CHUNK].double(), target[first : first + CHUNK]
            log_probs = torch.log_softmax(rows @ matrix.t(), 1)
            total -= log_probs.gather(1, classes[:, None]).sum().item()
            log_probs.exp_()[torch.arange(len(rows)), classes] -= 1
            dweight.addmm_(log_probs.t(), rows, alpha=1 / len(hidden))
        expected = total / len(hidden)
        wrong = ((dweight - weight.grad).norm() / dweight.norm()).item()
    return abs(float(loss) - expected) / expected, wrong


def table(rows: list[Measurement]) -> Table:
    """Returns what was measured at one shape."""
    first = rows[0]
    base = next((m.median_s for m in rows if m.provider == "products" and m.median_s), None)
    title = f"linear_cross_entropy, forward and backward, {'×'.join(map(str, first.shape))} {first.dtype}"
    shown = Table(title=title, title_justify="left")
    for name in ("provider", "median", "of products", "peak above gradients", "error of the weight's gradient", ""):
        shown.add_column(name, justify="left" if name in ("provider", "") else "right")
    for m in rows:
        time_s = "" if m.median_s is None else f"{m.median_s * 1e3:.2f} ms"
        share = "" if m.median_s is None or base is None else f"{m.median_s / base:.2f}"
        peak = "" if m.peak_bytes is None else f"{m.peak_bytes / 1e6:.0f} MB"
        wrong = "" if m.gradient_error is None else f"{m.gradient_error:.1e}"
        shown.add_row(m.provider, time_s, share, peak, wrong, m.note if m.status != "wrong" else "WRONG")
    return shown


def _torch(hidden: Any, weight: Any, target: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(functional.linear(hidden, weight).float(), target)


def _backward(loss: Any) -> Any:
    loss.backward()
    return loss.detach()


def _timed(step: Step, given: tuple[Any, Any, Any], kind: str) -> tuple[list[float], int]:
    """Returns the times of steps, and the peak of one above inputs and gradients."""
    import torch

    hidden, weight, _ = given
    gpu, peak, times = kind == "gpu", 0, []
    for i in range(REPEATS + 2):
        hidden.grad = weight.grad = None
        if gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if gpu else _reset()
        start = time.perf_counter()
        step()
        if gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        left = sum(x.grad.nbytes for x in (hidden, weight) if x.grad is not None)
        # The first steps compile, load and tune.
        if i == 1:
            peak = (torch.cuda.max_memory_allocated() if gpu else _peak("VmHWM")) - before - left
    hidden.grad = weight.grad = None
    return times[2:], max(peak, 0)


def _reset() -> int:
    """Forgets the peak of this process and returns what it has now, where Linux tells."""
    if sys.platform != "linux":
        return 0
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak("VmRSS")


def _peak(name: str) -> int:
    """Returns a figure of this process's memory in bytes, 0 where nobody tells."""
    if sys.platform != "linux":
        return 0
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _versions(names: list[str]) -> dict[str, str]:
    found = {}
    for package in dict.fromkeys(["max", "torch", *(PACKAGES[name] for name in names)]):
        try:
            found[package] = distribution_version(package)
        except ModuleNotFoundError:
            continue
    return found


def _write(path: Path, report: dict[str, Any]) -> None:
    files.replace(path, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())
