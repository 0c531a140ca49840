"""The command `maxsoftmax`."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from rich import filesize
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn
from rich.table import Table

from maxsoftmax import __version__, _native
from maxsoftmax import _cache as cache
from maxsoftmax import _files as files
from maxsoftmax._bench import command as bench_command
from maxsoftmax._bench import tune as bench_tune
from maxsoftmax._bench.run import processor
from maxsoftmax._commands import ahead, figures, train
from maxsoftmax._commands.console import Console
from maxsoftmax._commands.figures import PIPE
from maxsoftmax._graph import runtime, tuning
from maxsoftmax._graph.extension import CompilerError, distribution_version, source
from maxsoftmax._native import precompiled

out = Console()
log = Console(stderr=True)

NARROW = 60
"""Columns of a terminal below which progress is shown as a bar alone."""

SHELLS = ("bash", "zsh", "tcsh")
"""The shells that shtab knows."""

SINGULAR = {"devices": "device", "variables": "variable"}
"""What each of several lines of `info` is called."""

VARIABLES = {
    cache.VARIABLE: "the folder of what was compiled",
    precompiled.VARIABLE: "a folder of libraries that `maxsoftmax compile` has written",
    "MAXSOFTMAX_KEEP_MB": "how much memory of results is kept for the next ones",
    runtime.MAX_CACHE: "the folder of what MAX has compiled",
}
"""The environment variables that this package and MAX look at."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 if it failed, 2 if called wrongly, 130 if interrupted."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name, or ×, that the terminal cannot show is no reason to fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    # A polite kill cleans up like Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Unless nohup has had it ignored, so does a closed terminal.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        with figures.alone(options):
            status: int = options.command(options)
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except CompilerError as error:
        # Whose own words may be many lines.
        print(f"maxsoftmax: {error}", file=sys.stderr)
        return 1
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"maxsoftmax: {_sentence(error)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="maxsoftmax", description="Softmax on MAX, for CPU and GPU.")
    parser.add_argument("--version", action="version", version=f"maxsoftmax {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="two softmaxes on every device, checked against SciPy: puzzle 18's first",
        description="Computes two softmaxes in MAX graphs on every device, and checks them against SciPy in float64.",
    )
    figures.add(demo)
    demo.set_defaults(command=_demo)

    run = commands.add_parser(
        "run",
        help="softmax of a .npy file",
        description="Writes softmax of the array in a .npy file to another one, or from one pipe to another.",
    )
    run.add_argument(
        "input", type=Path, metavar="INPUT.npy", help="logits, from numpy.save; may exceed memory; - for standard input"
    )
    run.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUTPUT.npy",
        help="probabilities; replaced if it exists; - for standard output (default: INPUT.softmax.npy, or -)",
    )
    run.add_argument("--axis", type=_axis, default=-1, metavar="A", help="axis that sums to 1, or 'all' (default: -1)")
    run.add_argument("--device", default="cpu", help="cpu, gpu, gpu:1, … (default: cpu)")
    run.add_argument("--algorithm", default="auto", metavar="NAME", help="auto, or a kernel's name (default: auto)")
    run.set_defaults(command=_run)

    bench_command.add(commands)
    bench_tune.add(commands)

    train.add(commands)

    ahead.add(commands)

    kept = commands.add_parser(
        "cache",
        help="what is kept of what was compiled: its place and size",
        description="Tells where compiled models and libraries are kept, and how large they are, or takes them away.",
    )
    kept.add_argument("--clear", action="store_true", help="take it all away")
    figures.add(kept)
    kept.set_defaults(command=_cache)

    info = commands.add_parser(
        "info",
        help="versions, devices and folders",
        description="Tells of this machine what a bug report needs: versions, devices, folders and variables.",
    )
    figures.add(info)
    info.set_defaults(command=_info)

    completion = commands.add_parser(
        "completion",
        help="what has a shell complete this command",
        description="Prints a script with which a shell completes this command: "
        'eval "$(maxsoftmax completion bash)". It needs shtab.',
    )
    completion.add_argument("shell", choices=SHELLS, help="the shell")
    completion.set_defaults(command=_completion)

    told = "; ".join(f"{name}, {what}" for name, what in VARIABLES.items())
    for command in (parser, *commands.choices.values()):
        command.epilog = f"Environment variables: {told}."
    return parser


def _tell(options: argparse.Namespace, found: dict[str, Any], told: Callable[[], None]) -> None:
    """Prints for readers, or writes figures for programs, as `options` say."""
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    if not figures.is_pipe(options.json):
        told()
    if options.json is not None:
        files.replace(options.json, text.encode(errors="backslashreplace"))


def _axis(text: str) -> int | None:
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither an integer nor 'all'") from None


def _sentence(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return text.replace("\n", " ")


def _demo(options: argparse.Namespace) -> int:
    # SciPy is imported only where it is needed.
    from maxsoftmax._commands import demo

    table = Table("case", "device", "compile", "run", "largest error", "sum of the row")
    correct, results = True, []
    for device in runtime.devices():
        with runtime.observing(_spinner):
            measured = demo.measure(device)
        for i, result in enumerate(measured):
            correct &= result.correct
            table.add_row(
                result.case,
                result.device,
                "" if i else f"{result.compile_s:.1f} s" if result.compile_s else "kept",
                f"{result.run_s * 1e3:.3f} ms",
                f"{result.error:.1e}" + ("" if result.correct else " WRONG"),
                f"{result.row_sum:.9f}",
            )
            results.append(result._asdict())

    def tell() -> None:
        out.print(table)
        out.print("Errors are relative to scipy.special.softmax in float64.")

    _tell(options, {"results": results}, tell)
    return 0 if correct else 1


def _spinner(what: str | _native.Library) -> AbstractContextManager[object]:
    seconds = "seconds" if isinstance(what, _native.Library) else "ten seconds or more"
    return log.working(f"compiling {what}: {seconds} the first time")


def _run(options: argparse.Namespace) -> int:
    reads = str(options.input) == PIPE
    output = options.output or (Path(PIPE) if reads else Path(f"{os.path.splitext(options.input)[0]}.softmax.npy"))
    writes = str(output) == PIPE
    if writes and sys.stdout.isatty():
        raise ValueError("standard output is a terminal: send it to a file or a pipe, or name a file by -o")
    if not reads and not writes:
        out.print(_transform(options, options.input, output))
        return 0
    # Through files all the same: the array may exceed memory.
    with tempfile.TemporaryDirectory(prefix="maxsoftmax-") as folder:
        source, target = options.input, output
        if reads:
            source = Path(folder) / "input.npy"
            with source.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        if writes:
            target = Path(folder) / "output.npy"
        names = ("standard input" if reads else "", "standard output" if writes else "")
        told = _transform(options, source, target, *names)
        if not writes:
            out.print(told)
            return 0
        with target.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.flush()
    log.print(told)
    return 0


def _transform(options: argparse.Namespace, source: Path, output: Path, read: str = "", written: str = "") -> str:
    """Writes softmax of one file to another, and returns what to tell of it.

    Args:
        options: Of the command.
        source: What to read.
        output: What to write.
        read: What messages call `source`; its path if "". The same holds for `written`.
        written: What they call `output`.
    """
    from maxsoftmax._commands import npy

    x = npy.read(source, read)
    columns = [BarColumn(bar_width=None), DownloadColumn(), TimeRemainingColumn()]
    shown = columns[: 1 if log.width < NARROW else None]
    with log.progress(*shown, room=min(46, log.width * 2 // 3)) as progress:
        task = progress.add_task("softmax", total=x.nbytes)

        @contextmanager
        def compiling(library: _native.Library) -> Iterator[None]:
            progress.update(task, description=f"compiling {library}")
            yield
            progress.update(task, description="softmax")

        with _native.observing(compiling):
            dtype = npy.transform(
                x,
                output,
                axis=options.axis,
                device=options.device,
                algorithm=options.algorithm,
                advance=lambda done: progress.advance(task, done),
            )
    shape = "×".join(map(str, x.shape)) or "a scalar"
    return f"{written or output}: softmax of {shape} {x.dtype}, as {dtype}"


def _cache(options: argparse.Namespace) -> int:
    cache.check()
    sizes = cache.entries()
    freed = cache.clear() if options.clear else 0
    told = f"took away {_size(freed, len(sizes))}" if options.clear else _kept()
    found = {"folder": str(cache.location()), "entries": sizes, **({"freed": freed} if options.clear else {})}
    _tell(options, found, lambda: out.print(f"{cache.location()}: {told}"))
    return 0


def _size(size: int, count: int) -> str:
    return f"{filesize.decimal(size)} in {count} entr{'y' if count == 1 else 'ies'}"


def _kept() -> str:
    """Returns how much the cache holds, or why it is not used, in words."""
    try:
        cache.check()
    except OSError as error:
        return str(error)
    sizes = cache.entries()
    return _size(sum(sizes.values()), len(sizes))


def _info(options: argparse.Namespace) -> int:
    devices = {}
    for device in runtime.devices():
        what = processor() if device.is_host else f"{device.model_name}, {device.architecture_name}"
        devices[runtime.name(device)] = f"{what}, {os.cpu_count()} threads" if device.is_host else what
    tuned = tuning.location()
    told: dict[str, str | dict[str, str]] = {
        "maxsoftmax": __version__,
        "MAX": distribution_version("max", "modular"),
        "Mojo": _version("mojo-compiler", "mojo"),
        "Python": platform.python_version(),
        **{name: _version(name) for name in ("numpy", "scipy", "torch", "jax")},
        "platform": platform.platform(),
        "devices": devices,
        "op package": str(source()),
        "cache": str(cache.location()),
        "kept": _kept(),
        "MAX's cache": str(runtime.max_cache()),
        "tuned": f"{tuned}{'' if tuned.exists() else ', nothing yet'}",
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }

    def tell() -> None:
        for title, value in told.items():
            values = [value] if isinstance(value, str) else [f"{name} {what}" for name, what in value.items()]
            for text in values:
                # Not a table, which would cut long paths to the terminal's width.
                out.print(f"{SINGULAR.get(title, title):<12} {text}")

    _tell(options, told, tell)
    return 0


def _version(*names: str) -> str:
    """Returns what version of a distribution is installed, in words if none is."""
    try:
        return distribution_version(*names)
    except PackageNotFoundError:
        return "not installed"


def _completion(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise ImportError("completion needs shtab: pip install shtab") from None
    out.print(shtab.complete(_parser(), options.shell))
    return 0
