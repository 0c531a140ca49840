"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOM = 64 * 2**20
"""Bytes that suffice for whatever is compiled."""

TEMPORARY = ("/var/tmp", "/dev/shm")
"""Folders for temporary files beside that which the system names."""


def roomy(*others: Path) -> list[Path]:
    """Returns where temporary files can be, `others` after the system's own place; what has no room comes last.

    Raises:
        OSError: If they can be nowhere.
    """
    found: dict[Path, int] = {}
    with contextlib.suppress(OSError):
        found[Path(tempfile.gettempdir())] = 0
    for place in (*found, *others, *map(Path, TEMPORARY)):
        with contextlib.suppress(OSError):
            if os.access(place, os.W_OK | os.X_OK):
                found[place] = min(ROOM, shutil.disk_usage(place).free)
    if not found:
        # Which says what was tried.
        tempfile.gettempdir()
    return sorted(found, key=found.__getitem__, reverse=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a name beside `path` for a file that takes its place at the end, or vanishes if something goes wrong.

    Raises:
        OSError: If `path` cannot be written.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(f"{path} exists and is not a file")
    # Random, so that it is nobody else's; short, so that it fits wherever the file's name does.
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        try:
            partial.touch(exist_ok=False)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        yield partial
        if path.exists():
            shutil.copymode(path, partial)
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def replace(path: Path, content: bytes) -> None:
    """Makes `content` what is in `path`.

    Raises:
        OSError: If it cannot be written.
    """
    with replacing(path) as partial:
        partial.write_bytes(content)


def check(path: Path) -> None:
    """Tries whether `path` could be replaced, and leaves all as it was.

    Raises:
        OSError: If it cannot be written.
    """

    class Enough(Exception):
        """Ends the try before anything is replaced."""

    with contextlib.suppress(Enough), replacing(path):
        raise Enough
