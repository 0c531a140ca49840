"""The command `maxsoftmax`."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rich import filesize
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from maxsoftmax import __version__, _native
from maxsoftmax import _cache as cache
from maxsoftmax._commands import ahead, train
from maxsoftmax._commands.console import Console
from maxsoftmax._graph import runtime
from maxsoftmax._graph.extension import CompilerError, distribution_version, source
from maxsoftmax.bench import command as bench_command
from maxsoftmax.bench import tune as bench_tune

out = Console()
log = Console(stderr=True)


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

    demo = commands.add_parser("demo", help="two softmaxes on every device, checked against SciPy: puzzle 18's first")
    demo.set_defaults(command=_demo)

    run = commands.add_parser("run", help="softmax of a .npy file")
    run.add_argument("input", type=Path, metavar="INPUT.npy", help="logits, from numpy.save; may exceed memory")
    run.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUTPUT.npy",
        help="probabilities; replaced if it exists (default: INPUT.softmax.npy)",
    )
    run.add_argument("--axis", type=_axis, default=-1, metavar="A", help="axis that sums to 1, or 'all' (default: -1)")
    run.add_argument("--device", default="cpu", help="cpu, gpu, gpu:1, … (default: cpu)")
    run.add_argument("--algorithm", default="auto", metavar="NAME", help="auto, or a kernel's name (default: auto)")
    run.set_defaults(command=_run)

    bench_command.add(commands)
    bench_tune.add(commands)

    train.add(commands)

    ahead.add(commands)

    kept = commands.add_parser("cache", help="what is kept of what was compiled: its place and size")
    kept.add_argument("--clear", action="store_true", help="take it all away")
    kept.set_defaults(command=_cache)

    info = commands.add_parser("info", help="versions, devices and folders")
    info.set_defaults(command=_info)
    return parser


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
    correct = True
    for device in runtime.devices():
        for name, case in demo.cases().items():
            with runtime.observing(_spinner):
                result = demo.measure(name, case, device)
            correct &= result.correct
            table.add_row(
                result.case,
                result.device,
                f"{result.compile_s:.1f} s" if result.compile_s else "kept",
                f"{result.run_s * 1e3:.3f} ms",
                f"{result.error:.1e}" + ("" if result.correct else " WRONG"),
                f"{result.row_sum:.9f}",
            )
    out.print(table)
    out.print("Errors are relative to scipy.special.softmax in float64.")
    return 0 if correct else 1


def _spinner(what: str | _native.Library) -> AbstractContextManager[object]:
    seconds = "seconds" if isinstance(what, _native.Library) else "ten seconds or more"
    return log.status(f"compiling {what}: {seconds} the first time")


def _run(options: argparse.Namespace) -> int:
    from maxsoftmax._commands import npy

    x = npy.read(options.input)
    output = options.output or options.input.with_suffix(".softmax.npy")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=log, transient=True, disable=not log.is_terminal) as progress:
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
    out.print(f"{output}: softmax of {'×'.join(map(str, x.shape)) or 'a scalar'} {x.dtype}, as {dtype}")
    return 0


def _cache(options: argparse.Namespace) -> int:
    cache.check()
    sizes = cache.entries()
    count = f"{len(sizes)} entr{'y' if len(sizes) == 1 else 'ies'}"
    if options.clear:
        out.print(f"{cache.location()}: took away {filesize.decimal(cache.clear())} in {count}")
    else:
        out.print(f"{cache.location()}: {filesize.decimal(sum(sizes.values()))} in {count}")
    return 0


def _info(options: argparse.Namespace) -> int:
    lines = [
        ("maxsoftmax", __version__),
        ("MAX", distribution_version("max", "modular")),
        ("Mojo", distribution_version("mojo-compiler", "mojo")),
    ]
    for device in runtime.devices():
        what = "" if device.is_host else f"{device.model_name}, {device.architecture_name}"
        lines.append(("device", f"{runtime.name(device)} {what}".rstrip()))
    max_cache = os.environ.get("MODULAR_CACHE_DIR") or Path.home() / ".cache" / "modular"
    lines += [("op package", str(source())), ("cache", str(cache.location())), ("MAX's cache", str(max_cache))]
    for title, text in lines:
        # Not a table, which would cut long paths to the terminal's width.
        out.print(f"{title:<12} {text}")
    return 0
