"""Where the figures of a command go that `--json` asks for: to a file, or alone to standard output."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PIPE = "-"
"""How standard input and output are called where a file's name is expected."""

NAME = "standard output"
"""The name of the temporary file in its place."""


def add(parser: argparse.ArgumentParser, what: str = "the figures") -> None:
    """Adds the option to a command."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"where {what} go as JSON; - for standard output, alone"
    )


@contextlib.contextmanager
def alone(options: argparse.Namespace) -> Iterator[None]:
    """Has only figures on standard output if that is where they go, and all else meanwhile on standard error."""
    if str(getattr(options, "json", None)) != PIPE:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="maxsoftmax-") as folder:
        options.json = Path(folder) / NAME
        with contextlib.redirect_stdout(sys.stderr):
            yield
        with contextlib.suppress(FileNotFoundError):
            sys.stdout.write(options.json.read_text(encoding="utf-8"))
            sys.stdout.flush()


def is_pipe(path: Path | None) -> bool:
    """Returns whether what `--json` names stands for standard output."""
    return path is not None and path.name == NAME


def name(path: Path) -> str:
    """Returns what messages call what `--json` names."""
    return NAME if is_pipe(path) else str(path)
