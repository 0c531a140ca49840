"""`maxsoftmax compile`: models for a device that need not be here, as files that it can load without a compiler."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from typing import Any

from max import driver
from max.driver import CPU, Accelerator, Device
from max.dtype import DType
from rich import filesize

from maxsoftmax import artifacts, parse, runtime
from maxsoftmax.arguments import BLOCK_SIZE, UNROLL, check_algorithm
from maxsoftmax.console import Console

out = Console()
log = Console(stderr=True)


def add(commands: Any) -> None:
    """Adds the command to those of the parser."""
    parser = commands.add_parser(
        "compile",
        help="compile ahead of time, for any device",
        description=f"Writes models that are loaded, and not compiled, where {artifacts.VARIABLE} names their folder.",
    )
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), default="cpu", help="(default: cpu, one like this machine's)"
    )
    parser.add_argument(
        "--arch", metavar="A", help="a GPU's architecture: sm_90a, sm_80, gfx942, … (default: that of the GPU here)"
    )
    parser.add_argument(
        "--dtype", action="append", type=parse.dtype, metavar="T", help="may be repeated (default: float32)"
    )
    parser.add_argument(
        "--axis", choices=("last", "other"), action="append", help="for which axes; may be repeated (default: last)"
    )
    parser.add_argument("--n", type=_length, metavar="N", help="for rows of this length only (default: of any)")
    parser.add_argument("--algorithm", default="auto", metavar="NAME", help="auto, or a kernel's name (default: auto)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="where to write")
    parser.set_defaults(command=_compile)


def _length(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _compile(options: argparse.Namespace) -> int:
    algorithm = check_algorithm(options.algorithm, options.device)
    device = target(options.device, options.arch)
    dtypes: list[DType] = options.dtype or [DType.float32]
    for kind in dict.fromkeys(dtypes):
        for axis in dict.fromkeys(options.axis or ["last"]):
            signature = runtime.Signature(device, kind, axis == "last", algorithm, BLOCK_SIZE, UNROLL, options.n)
            with log.status(f"compiling {signature}"):
                path = artifacts.write(options.output, signature.parts(), runtime.compile(signature))
            out.print(f"{path}: {filesize.decimal(path.stat().st_size)}")
    return 0


def target(kind: str, architecture: str | None) -> Device:
    """Returns the device to compile for, a virtual one if its architecture is given.

    Raises:
        ValueError: If there is no such device or architecture.
    """
    if kind == "cpu":
        if architecture is not None:
            raise ValueError("--arch goes with --device gpu: for a CPU, compile on one like it")
        return CPU()
    if architecture is None:
        return runtime.device("gpu")
    known = _architectures()
    if architecture not in known:
        raise ValueError(
            f"--arch {architecture!r} is not an architecture that Mojo knows: choose from {', '.join(known)}"
        )
    driver.set_virtual_device_api("hip" if architecture.startswith("gfx") else "cuda")
    driver.set_virtual_device_count(1)
    driver.set_virtual_device_target_arch(architecture)
    return Accelerator()


def _architectures() -> list[str]:
    """Returns what Mojo can compile for; MAX crashes on others."""
    # Only who compiles needs the compiler.
    from mojo.run import subprocess_run_mojo

    listed = subprocess_run_mojo(
        ["build", "--print-supported-accelerators"], check=True, stdout=subprocess.PIPE, encoding="utf-8"
    )
    return re.findall(r"^ +(sm_\w+|gfx\w+) ", listed.stdout, re.M)
