"""The folder for what is compiled: executable code, so private to the user, verified, and never a reason to fail."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import platformdirs

VARIABLE = "MAXSOFTMAX_CACHE_DIR"
"""Environment variable that moves the folder."""


def location() -> Path:
    """Returns where the folder is, whether or not it exists."""
    moved = os.environ.get(VARIABLE)
    return Path(moved).absolute() if moved else platformdirs.user_cache_path("maxsoftmax")


def entry(key: str, name: str, build: Callable[[Path], None]) -> Path:
    """Returns the file `name` of the entry `key`, which `build` writes when there is none that can be trusted.

    Args:
        key: A folder name that changes with everything that the file depends on.
        name: The file's name.
        build: Called with the path to write; what it raises is passed on.

    Returns:
        A complete file, in a folder that only this user can write to.
    """
    root = _root(location())
    folder = root / key
    if _is_sound(folder, name):
        return folder / name
    staging = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    try:
        build(staging / name)
        # Where the umask lets the group write, the file would not be trusted the next time.
        (staging / name).chmod(0o600)
        digest = hashlib.sha256((staging / name).read_bytes()).hexdigest()
        (staging / "sha256").write_text(digest)
        if os.path.lexists(folder) and not _is_sound(folder, name):
            warnings.warn(f"{folder} was damaged or is not private; it is made anew", RuntimeWarning, stacklevel=3)
            _remove(folder)
        try:
            staging.rename(folder)
        except OSError:
            # Another process was first; its file is as good if it is sound, and if not ours is kept where it is.
            if not _is_sound(folder, name):
                atexit.register(shutil.rmtree, staging, ignore_errors=True)
                return staging / name
            shutil.rmtree(staging, ignore_errors=True)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return folder / name


def _root(wanted: Path) -> Path:
    """Returns `wanted` if it is, or can be made, a private folder, and a temporary one otherwise."""
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = _distrust(wanted, stat.S_ISDIR)
        if reason is None:
            with tempfile.TemporaryFile(dir=wanted):
                return wanted
    except OSError as error:
        reason = error.strerror or str(error)
    return _temporary(wanted, reason)


@functools.cache
def _temporary(wanted: Path, reason: str) -> Path:
    """Returns a folder that lasts as long as this process, in place of `wanted`."""
    warnings.warn(
        f"{wanted} cannot keep compiled code ({reason}); a temporary folder is used", RuntimeWarning, stacklevel=5
    )
    temporary = Path(tempfile.mkdtemp(prefix="maxsoftmax-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def _is_sound(folder: Path, name: str) -> bool:
    """Returns whether `name` in `folder` is ours alone and whole."""
    try:
        if _distrust(folder, stat.S_ISDIR) or _distrust(folder / name, stat.S_ISREG):
            return False
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        return (folder / "sha256").read_text() == digest
    except (OSError, UnicodeDecodeError):
        return False


def _distrust(path: Path, is_kind: Callable[[int], bool]) -> str | None:
    """Returns why somebody else could have written `path`, or None."""
    status = path.lstat()
    if not is_kind(status.st_mode):
        return "it is a link or not of the kind expected"
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return "it belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it"
    return None


def _remove(path: Path) -> None:
    """Takes `path` away at once, whatever it is; another process may be doing the same."""
    aside = path.with_name(f".old-{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        path.rename(aside)
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside)
        else:
            aside.unlink()
