"""Times the kernels of another revision and those of this checkout in turn, in one process.

    python benchmarks/in_turn.py REVISION [SUITE …] [--json FILE]

The other revision's package is copied out of git and imported under another name. On a GPU, calls are captured in CUDA
graphs that are replayed in turn with a copy of the same bytes; without one, calls are timed one by one. Needs torch.
"""

import argparse
import importlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import maxsoftmax
import maxsoftmax.torch
import torch
from max.dtype import DType
from maxsoftmax._bench import reference
from maxsoftmax._bench.cases import SCALE, SUITES, Case

ROOT = Path(__file__).parents[1]
OTHER = "maxsoftmax_other"
"""What the other revision is imported as."""
BOTH = (DType.float32, DType.bfloat16)
ROUNDS = 7
GRAPH_BYTES = 10 << 30
"""How much a graph reads, in as many calls as that takes."""

SMALL = [
    (1, 64),
    (64, 128),
    (256, 256),
    (256, 1024),
    (1024, 1000),
    (1024, 1024),
    (4096, 1024),
    (512, 4096),
    (32, 32000),
]
ODD = (777, 1023, 2047, 4097, 16383, 50257, 65537, 128255, 262143, 524287, 1048577)
AXIS = [
    ((4096, 4096), 0),
    ((1024, 50304), 0),
    ((50257, 1024), 0),
    ((30000, 500), 0),
    ((16, 1024, 1024), 1),
    ((64, 1000, 4096), 1),
    ((64, 1000, 4095), 1),
    ((8, 3000, 1021), 1),
    ((77, 513, 1001), 1),
    ((16, 1023, 1023), 1),
    ((8, 8000, 1001), 1),
    ((512, 128, 1025), 1),
    ((50257, 1023), 0),
    ((128, 2, 100000), 1),
]
LONG = [
    (64, 2**20),
    (32, 2**20 + 1),
    (160, 400001),
    (16, 2**22),
    (8, 2**23),
    (1, 400001),
    (1, 2**22),
    (1, 2**23),
    (1, 2**24),
]

CASES: dict[str, list[Case]] = {
    "small": [Case(shape, dtype) for shape in SMALL for dtype in BOTH],
    "odd": [Case((2**26 // n, n), dtype) for n in ODD for dtype in BOTH],
    "long": [Case(shape, dtype) for shape in LONG for dtype in BOTH],
    "axis": [
        Case(shape, dtype, axis, op) for shape, axis in AXIS for dtype in BOTH for op in ("softmax", "softmax_backward")
    ],
    **{
        name: [case for case in SUITES[name].cases if case.op != "rescaled_softmax"]
        for name in ("llm", "decode", "grad", "attention")
    },
}
"""The suites; what graphs spell out is asked for by name, and what they do with probabilities is left out."""


def checked_out(revision: str, folder: Path) -> Any:
    """Returns the package of a revision, imported under another name from a folder that it is put into.

    Args:
        revision: As git names it.
        folder: An empty one, which stays until the process ends.

    Raises:
        ValueError: If git does not have it; the message is git's.
    """
    command = ["git", "-C", ROOT, "archive", revision, "op", "python", "pyproject.toml"]
    asked = subprocess.run(command, capture_output=True, check=False)
    if asked.returncode != 0:
        raise ValueError(asked.stderr.decode(errors="replace").strip())
    with tarfile.open(fileobj=io.BytesIO(asked.stdout)) as archive:
        archive.extractall(folder, filter="data")
    package = (folder / "python" / "maxsoftmax").rename(folder / "python" / OTHER)
    for path in package.rglob("*.py"):
        text = re.sub(r"\bmaxsoftmax\b", OTHER, path.read_text(encoding="utf-8"))
        # The Mojo package keeps its name.
        path.write_text(text.replace(f'KERNELS = "{OTHER}"', 'KERNELS = "maxsoftmax"'), encoding="utf-8")
    sys.path.insert(0, str(folder / "python"))
    importlib.import_module(f"{OTHER}.torch")
    return importlib.import_module(OTHER)


def call(module: Any, case: Case, tensors: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """Returns what computes a case by one of the packages."""
    x, axis = tensors["x"], case.axis
    functions: dict[str, Callable[[], Any]] = {
        "softmax": lambda: module.torch.softmax(x, axis),
        "log_softmax": lambda: module.torch.log_softmax(x, axis),
        "cross_entropy": lambda: module.torch.cross_entropy(x, tensors["target"]),
        "scaled_softmax": lambda: module.softmax(x, axis=axis, scale=SCALE),
        "causal_softmax": lambda: module.softmax(x, scale=SCALE, causal=True),
        "masked_softmax": lambda: module.softmax(x, scale=SCALE, mask=tensors["mask"]),
    }
    if case.op in functions:
        return functions[case.op]
    logits = x.detach().requires_grad_()
    if case.op == "cross_entropy_gradient":
        return lambda: torch.autograd.grad(module.torch.cross_entropy(logits, tensors["target"]), logits)[0]
    y = module.torch.softmax(logits, axis)
    return lambda: torch.autograd.grad(y, logits, tensors["dy"], retain_graph=True)[0]


def timed(function: Callable[[], Any], count: int) -> Callable[[], float]:
    """Returns what computes a function, and returns the seconds of a call.

    Args:
        function: What is timed.
        count: Calls at a time.
    """
    for _ in range(2):
        function()
    if not torch.cuda.is_available():

        def calls() -> float:
            start = time.perf_counter()
            for _ in range(count):
                function()
            return (time.perf_counter() - start) / count

        return calls
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(count):
            function()
    graph.replay()

    def replay() -> float:
        # What was captured is alive as long as the function that it is of.
        _ = function
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    return replay


def measured(other: Any, case: Case, device: str) -> dict[str, float]:
    """Returns the seconds of the other revision, of this one and of a copy, and how far apart results are at most."""
    x = torch.empty(case.shape, device=device, dtype=getattr(torch, case.dtype.name)).normal_()
    tensors = {"x": x}
    if case.op == "softmax_backward":
        tensors["dy"] = torch.empty_like(x).normal_()
    if case.op.startswith("cross_entropy"):
        tensors["target"] = torch.randint(0, case.shape[-1], case.shape[:-1], device=device)
    if case.op == "masked_softmax":
        tensors["mask"] = torch.from_numpy(reference.mask(case)).to(device)
    y = torch.empty_like(x)
    calls = [call(other, case, tensors), call(maxsoftmax, case, tensors), lambda: y.copy_(x)]
    difference = (calls[0]() - calls[1]()).abs().max().item()
    count = max(1, min(200, GRAPH_BYTES // 4 // case.nbytes)) if x.is_cuda else 3
    ways = [timed(function, count) for function in calls]
    turns = [[way() for way in ways] for _ in range(ROUNDS)]
    seconds = [median(column) for column in zip(*turns, strict=True)]
    return dict(zip(("other", "this", "copy", "difference"), (*seconds, difference), strict=True))


def main() -> None:
    """Prints a line for each case, and what a suite comes to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="what is compared with, as git names it")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"some of {', '.join(CASES)} (default: all)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="where all figures go")
    told = parser.parse_args()
    if unknown := set(told.suites) - set(CASES):
        parser.error(f"there is no suite {', '.join(sorted(unknown))}: there are {', '.join(CASES)}")
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
        # What autograd does is done where it was asked for, and only there can it be captured.
        torch.cuda.set_stream(torch.cuda.Stream())
    records = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            other = checked_out(told.revision, Path(folder))
        except ValueError as error:
            parser.error(str(error))
        for suite in told.suites or CASES:
            ratios = []
            for case in CASES[suite]:
                found = measured(other, case, device)
                ratios.append(found["this"] / found["other"])
                records.append({"suite": suite, "case": str(case), **found})
                print(
                    f"{case!s:50} {found['other'] * 1e6:9.1f} → {found['this'] * 1e6:9.1f} µs, {ratios[-1]:.3f}; "
                    f"a copy {found['copy'] * 1e6:.1f}; results differ by {found['difference']:.1e}",
                    flush=True,
                )
            print(f"{suite}: {len(ratios)} cases, median {median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    if told.json:
        told.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
