"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


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
