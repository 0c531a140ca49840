"""`maxsoftmax compile`: libraries for a device that need not be here, as files that it can load without a compiler."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich import filesize

from maxsoftmax import _files as files
from maxsoftmax import _native
from maxsoftmax._arguments import BLOCK_SIZE, OUT, UNROLL, check_algorithm
from maxsoftmax._commands import figures, parse
from maxsoftmax._commands.console import Console
from maxsoftmax._graph.extension import run_mojo
from maxsoftmax._native import devices, precompiled, progress, warm
from maxsoftmax._native.description import OPS, Library, Target, is_for, library

out = Console()

LAUNCHING = {"x86_64": "x86-64-v3", "AMD64": "x86-64-v3", "aarch64": "generic"}
"""The CPU that a GPU's libraries launch from unless told otherwise, by the machine: nearly all that have such GPUs."""


def add(commands: Any) -> None:
    """Adds the command to those of the parser."""
    parser = commands.add_parser(
        "compile",
        help="compile ahead of time, for any device",
        description=f"Writes libraries that are loaded where {precompiled.VARIABLE} names their folder.",
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="(default: cpu)")
    parser.add_argument(
        "--arch", metavar="A", help="a GPU's architecture: sm_90a, sm_80, gfx942, … (default: that of the GPU here)"
    )
    parser.add_argument(
        "--target-cpu",
        metavar="C",
        help="the CPU that computes, or that the GPU is in: x86-64-v4, … (default: this one; x86-64-v3 with a GPU)",
    )
    parser.add_argument(
        "--dtype", action="append", type=parse.dtype, metavar="T", help="may be repeated (default: float32)"
    )
    parser.add_argument(
        "--op", action="append", choices=OPS, metavar="OP", help=f"may be repeated: {', '.join(OPS)} (default: all)"
    )
    parser.add_argument(
        "--out-dtype", choices=OUT, metavar="T", help=f"what softmax and log_softmax write: {', '.join(OUT)}"
    )
    parser.add_argument(
        "--algorithm", default="auto", metavar="NAME", help="of softmax: auto, or a kernel's name (default: auto)"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="where to write")
    figures.add(parser, "files and their sizes")
    parser.set_defaults(command=_compile)


def _compile(options: argparse.Namespace) -> int:
    algorithm = check_algorithm(options.algorithm, options.device)
    wanted = target(options.device, options.arch)
    names = warm.libraries(options.op, options.out_dtype)
    if algorithm != "auto":
        if options.op and set(options.op) != {"softmax"}:
            raise ValueError(f"--algorithm {algorithm} is one of softmax: leave --op {options.op[0]} out")
        if options.out_dtype:
            raise ValueError(f"--algorithm {algorithm} writes the dtype of logits: leave --out-dtype out")
        names = ["softmax"]
    dtypes = dict.fromkeys(dtype.name for dtype in options.dtype or [parse.dtype("float32")])
    libraries = [
        library(
            *(name, dtype, wanted, algorithm),
            block_size=BLOCK_SIZE,
            unroll=UNROLL,
            out_dtype="" if options.out_dtype in (None, dtype) else options.out_dtype,
        )
        for dtype in dtypes
        for name in names
        if is_for(name, wanted)
    ]
    cpu = target_cpu(options.target_cpu) or ("" if options.device == "cpu" else LAUNCHING.get(platform.machine(), ""))

    if options.json is not None:
        files.check(options.json)

    def write(wanted: Library) -> tuple[str, int]:
        path = precompiled.write(options.output, wanted, cpu)
        size = path.stat().st_size
        out.print(f"{path}: {filesize.decimal(size)}")
        return str(path), size

    with _native.observing(Spinner()):
        written = dict(warm.parallel(write, warm.together(libraries)))
    if options.json is not None:
        text = json.dumps({"libraries": written}, indent=1, ensure_ascii=False) + "\n"
        files.replace(options.json, text.encode(errors="backslashreplace"))
    return 0


class Spinner:
    """Shows what is being built on a terminal, and nothing elsewhere."""

    def __init__(self) -> None:
        self._display = progress.Display()

    def __call__(self, library: Library) -> AbstractContextManager[None]:
        """Returns what shows it meanwhile."""
        if sys.stderr is None or not sys.stderr.isatty():
            return nullcontext()
        return self._display.showing(f"building {library}: it takes seconds")


def target(kind: str, architecture: str | None) -> Target:
    """Returns what to compile for: the device here, or another GPU if its architecture is given.

    Raises:
        ValueError: If there is no such device or architecture.
    """
    if kind == "cpu":
        if architecture is not None:
            raise ValueError("--arch goes with --device gpu: a CPU is named by --target-cpu")
        return Target("cpu")
    if architecture is None:
        try:
            return devices.target(devices.index("gpu"))
        except ValueError as error:
            raise ValueError(f"{error}: name the GPU that it is for with --arch, such as sm_90a") from None
    # Mojo's own message for others is no sentence.
    known = re.findall(r"^ +(sm_\w+|gfx\w+) ", run_mojo("build", "--print-supported-accelerators"), re.M)
    if architecture not in known:
        raise ValueError(
            f"--arch {architecture!r} is not an architecture that Mojo knows: choose from {', '.join(known)}"
        )
    return Target("gpu", architecture)


def target_cpu(name: str | None) -> str:
    """Returns the CPU to compile for, "" for this one.

    Raises:
        ValueError: If Mojo does not know it.
    """
    if name is None:
        return ""
    triple = re.search(r"--target-triple (\S+)", run_mojo("build", "--print-effective-target"))
    given = ["--target-triple", triple[1]] if triple else []
    known = re.findall(r"^ +(\S+)$", run_mojo("build", "--print-supported-cpus", *given), re.M)
    if name not in known:
        raise ValueError(f"--target-cpu {name!r} is not a CPU that Mojo knows: choose from {', '.join(known)}")
    return name
