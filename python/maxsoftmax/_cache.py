"""The folder for what is compiled: executable code, so private to the user, verified, and never a reason to fail."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import platformdirs

from maxsoftmax import _files as files
from maxsoftmax._warnings import warn

VARIABLE = "MAXSOFTMAX_CACHE_DIR"
"""Environment variable that moves the folder."""

LIMIT = 512 * 2**20
"""Bytes beyond which the entries that were not used for longest are taken away."""

NEW = ".new-"
"""How the names of folders begin in which something is made."""

OURS = ("model-", "mojo-", "native-", NEW, ".old-")
"""How the names of what this package keeps begin; it takes nothing else away."""

LOCK = ".lock-"
"""How the names of lock files begin; what follows is the key of the entry."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a file system that has no room for what is to be written."""

ROOM = 2**20
"""Bytes that a file system has to have left, or it is full."""

WAIT_S = 300.0
"""Seconds after which another process is not waited for any longer."""

DAY_S = 24 * 60 * 60.0
"""Seconds after which what a process has not finished writing is taken for abandoned."""


def location() -> Path:
    """Returns where the folder is, whether or not it exists."""
    moved = os.environ.get(VARIABLE)
    return Path(moved).absolute() if moved else platformdirs.user_cache_path("maxsoftmax")


def entry(key: str, name: str, build: Callable[[Path], None], *others: str) -> Path:
    """Returns the file `name` of the entry `key`, which `build` writes when there is none that can be trusted.

    Args:
        key: A folder name that changes with everything that the file depends on.
        name: The file's name.
        build: Called with the path to write; what it raises is passed on.
        others: Names of files that it writes beside that one, and without which that one is of no use.

    Returns:
        A complete file, in a folder that only this user can write to: a temporary one where there is no more room.
    """
    wanted = location()
    root = _root(wanted)
    try:
        try:
            return _entry(root, key, name, build, others)
        except _Full as full:
            if root != wanted:
                raise
            reason = full.reason
        return _entry(temporary(wanted, reason), key, name, build, others)
    except _Full as full:
        raise full.error from None


class _Full(Exception):
    """There was no room for an entry."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.reason = os.strerror(getattr(error, "errno", None) or errno.ENOSPC)


def is_full(root: Path, error: BaseException) -> bool:
    """Returns whether an error tells, or the file system of `root` does, that nothing more can be written."""
    if isinstance(error, OSError):
        return error.errno in FULL
    if not isinstance(error, RuntimeError):
        return False
    # A compiler that could not write may have words of its own for it.
    with contextlib.suppress(OSError):
        return any(os.strerror(number) in str(error) for number in FULL) or shutil.disk_usage(root).free < ROOM
    return False


def _entry(root: Path, key: str, name: str, build: Callable[[Path], None], others: tuple[str, ...]) -> Path:
    """Does what `entry` does in one folder.

    Raises:
        _Full: If there is no room.
    """
    folder = root / key
    names = (name, *others)
    if _is_sound(folder, *names):
        _use(folder)
        return folder / name
    try:
        staging = Path(tempfile.mkdtemp(prefix=NEW, dir=root))
    except OSError as error:
        raise _Full(error) if is_full(root, error) else error from None
    try:
        build(staging / name)
        for written in names:
            # Where the umask lets the group write, the file would not be trusted the next time.
            (staging / written).chmod(0o600)
        (staging / "sha256").write_text(_digest(staging, names))
        if os.path.lexists(folder) and not _is_sound(folder, *names):
            warn(f"{folder} was damaged or is not private; it is made anew")
            _remove(folder)
        try:
            staging.rename(folder)
        except OSError:
            # Another process was first; its file is as good if it is sound, and if not ours is kept where it is.
            if not _is_sound(folder, *names):
                atexit.register(_forget, staging, os.getpid())
                return staging / name
            shutil.rmtree(staging, ignore_errors=True)
        _trim(root, folder)
    except BaseException as error:
        full = isinstance(error, Exception) and is_full(root, error)
        shutil.rmtree(staging, ignore_errors=True)
        if full:
            raise _Full(error) from error  # type: ignore[arg-type]
        raise
    return folder / name


def made_once(key: str, name: str, build: Callable[[Path], None], *others: str) -> Path:
    """Does what `entry` does, in one process at a time: others wait, and find what that one has built."""
    found = find(key, name, *others)
    if found is None:
        with locked(key, nullcontext):
            found = entry(key, name, build, *others)
    return found


def find(key: str, name: str, *others: str) -> Path | None:
    """Returns the file `name` of the entry `key` if it and `others` are there, whole, and ours; makes nothing."""
    for root in trusted():
        if _is_sound(root / key, name, *others):
            _use(root / key)
            return root / key / name
    return None


@contextmanager
def locked(key: str, waiting: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Lets one process at a time through for an entry; others wait, but no longer than `WAIT_S`.

    A lock that cannot be had is no reason to fail: then several processes write the same entry, which does no harm.

    Args:
        key: Of the entry.
        waiting: What it returns is entered while another process is waited for.
    """
    # Only who builds needs it.
    import filelock

    root = _root(location())
    file = root / f"{LOCK}{key}"
    lock = filelock.FileLock(file, mode=0o600, thread_local=False)
    # A timeout is an OSError, too.
    with contextlib.suppress(OSError, NotImplementedError):
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            with waiting():
                lock.acquire(timeout=WAIT_S)
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                # Before it is released: who waits for it sees that it has gone, and asks for the next.
                file.unlink()
            with contextlib.suppress(OSError):
                lock.release()


def remove(key: str) -> None:
    """Takes an entry away, if that can be."""
    _remove(location() / key)


def check() -> None:
    """Refuses a folder that is there, but is not used.

    Raises:
        OSError: If others could have written to it.
    """
    root = location()
    with contextlib.suppress(FileNotFoundError):
        reason = distrust(root, stat.S_ISDIR)
        if reason is not None:
            raise OSError(
                f"{root} is not used, because {reason}: make it private (chmod 700), or name another by {VARIABLE}"
            )


def trusted() -> list[Path]:
    """Returns the folder, if it is there and nobody else can write to it."""
    root = location()
    with contextlib.suppress(OSError):
        return [] if distrust(root, stat.S_ISDIR) else [root]
    return []


def entries() -> dict[str, int]:
    """Returns the bytes of every entry by its key, that which was not used for longest first."""
    return {folder.name: _size(folder) for folder in _by_age(location()) if not folder.name.startswith(".")}


def clear() -> int:
    """Takes away all that is kept, and returns how many bytes that were."""
    freed = 0
    with contextlib.suppress(OSError):
        # Of processes that were killed; who builds just now does no harm without.
        for file in location().glob(f"{LOCK}*"):
            file.unlink()
    for folder in _by_age(location()):
        size = _size(folder)
        _remove(folder)
        freed += size - _size(folder)
    return freed


def _by_age(root: Path) -> list[Path]:
    """Returns the folders in `root` that are ours, by when they were last used."""
    found = []
    with contextlib.suppress(OSError):
        if distrust(root, stat.S_ISDIR) is None:
            for path in root.iterdir():
                with contextlib.suppress(OSError):
                    if path.name.startswith(OURS) and stat.S_ISDIR(path.lstat().st_mode):
                        found.append((path.lstat().st_mtime, path))
    return [path for _, path in sorted(found)]


def _size(folder: Path) -> int:
    size = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                size += path.lstat().st_size
    return size


def _use(folder: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(folder)


def _trim(root: Path, new: Path) -> None:
    """Takes away what was not used for longest until the rest is within `LIMIT`, and what was never finished."""
    folders = _by_age(root)
    size = sum(map(_size, folders))
    for folder in folders:
        with contextlib.suppress(OSError):
            unfinished = folder.name.startswith(".")
            if (unfinished and time.time() - folder.lstat().st_mtime < DAY_S) or folder == new:
                continue
            if unfinished or size > LIMIT:
                size -= _size(folder)
                _remove(folder)


def _root(wanted: Path) -> Path:
    """Returns `wanted` if it is, or can be made, a private folder, and a temporary one otherwise."""
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = distrust(wanted, stat.S_ISDIR)
        if reason is None:
            with tempfile.TemporaryFile(dir=wanted):
                return wanted
    except OSError as error:
        reason = error.strerror or str(error)
    return temporary(wanted, reason)


@functools.cache
def temporary(wanted: Path, reason: str, variable: str = VARIABLE) -> Path:
    """Returns a folder that lasts as long as this process, in place of `wanted`, which the variable names."""
    warn(
        f"{wanted} cannot keep compiled code ({reason}); a temporary folder is used: make room, or make the folder "
        f"private and writeable (chmod 700), or name another one by {variable}"
    )
    folder = Path(tempfile.mkdtemp(prefix="maxsoftmax-", dir=files.roomy()[0]))
    atexit.register(_forget, folder, os.getpid())
    return folder


def _forget(folder: Path, process: int) -> None:
    """Takes away what a process has made for itself, unless this is a fork of it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _digest(folder: Path, names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _is_sound(folder: Path, *names: str) -> bool:
    """Returns whether the files `names` in `folder` are ours alone and whole."""
    try:
        if distrust(folder, stat.S_ISDIR) or any(distrust(folder / name, stat.S_ISREG) for name in names):
            return False
        return (folder / "sha256").read_text() == _digest(folder, names)
    except (OSError, UnicodeDecodeError):
        return False


def distrust(path: Path, is_kind: Callable[[int], bool], also: int | None = None) -> str | None:
    """Returns why somebody else could have written `path`, or None.

    Args:
        path: A file or folder.
        is_kind: Whether a mode is of the kind that it is to be.
        also: A user to whom it may belong as well.
    """
    status = path.lstat()
    if not is_kind(status.st_mode):
        return f"it is a link, or no {'folder' if is_kind is stat.S_ISDIR else 'file'}"
    if hasattr(os, "getuid") and status.st_uid not in (os.getuid(), also):
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
