"""Libraries as this process calls them: found or built, loaded once, and opened for a device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from maxsoftmax import _cache as cache
from maxsoftmax._graph.extension import CompilerError
from maxsoftmax._native import build, devices, fork, precompiled, progress
from maxsoftmax._native.description import POINTERS, Library, library
from maxsoftmax._warnings import warn


class Entry(NamedTuple):
    """The functions of a library."""

    open: Callable[[int, Any], int | None]
    """Takes a device and where an error's text goes; returns the address of a context, or None."""
    scratch: Callable[[int], int]
    """Takes a call; returns bytes of device memory."""
    run: Callable[..., int | None]
    """Takes a call, a stream and pointers; returns the address of an error's text, or None."""
    xla: Any = None
    """Takes a call of XLA's; None where XLA cannot call the library."""


class Functions(NamedTuple):
    """What a library has to call, for one device."""

    context: int
    """Address of the device's context."""
    run: Callable[..., int | None]
    """As in `Entry`."""
    scratch: Callable[[int], int]
    """As in `Entry`."""
    xla: Any = None
    """As in `Entry`."""


_libraries: dict[Library, Entry] = {}
_bundles: dict[Library, ctypes.CDLL] = {}
_contexts: dict[int, int] = {}
_locks: dict[Library | int, threading.Lock] = {}
"""Held while a library is built, or a device opened."""


@functools.lru_cache(maxsize=1024)
def functions(
    name: str, dtype: str, device: int, algorithm: str, choices: tuple[int, int], *, out_dtype: str = ""
) -> Functions:
    """Returns the functions of a library, which is built (seconds) unless this or an earlier process has done that.

    Args:
        name: Which one: see `POINTERS`.
        dtype: Of the logits, by name.
        device: -1 for the CPU, or the index of a GPU.
        algorithm: The kernel, or "auto".
        choices: Threads a block, and vectors that a thread has under way at a time, where the kernel leaves them to
            the caller.
        out_dtype: Of the results, by name, if it is another one.

    Raises:
        ValueError: If there is no such library or device.
        RuntimeError: If it cannot be built, or the device not be opened.
    """
    block_size, unroll = choices
    target = devices.target(device)
    wanted = library(name, dtype, target, algorithm, block_size=block_size, unroll=unroll, out_dtype=out_dtype)
    loaded = load(wanted)
    return Functions(_context(loaded, device), loaded.run, loaded.scratch, loaded.xla)


def load(wanted: Library) -> Entry:
    """Returns a library, loaded. Safe to call from several threads: those that want the same one wait.

    Raises:
        RuntimeError: If it cannot be built.
    """
    if wanted not in _libraries:
        with _locks.setdefault(wanted, threading.Lock()):
            if wanted not in _libraries:
                _libraries[wanted] = _find(wanted) or _entry(_made(wanted), wanted)
    return _libraries[wanted]


def is_there(wanted: Library) -> bool:
    """Returns whether `load` need not build a library, which it has loaded then.

    Raises:
        CompilerError: If it is not there, and there is no compiler.
    """
    if wanted not in _libraries:
        with _locks.setdefault(wanted, threading.Lock()):
            found = None if wanted in _libraries else _find(wanted)
            if found:
                _libraries[wanted] = found
    return wanted in _libraries


def load_bundle(bundle: Library) -> None:
    """Has `load` find what a bundle has. It is built unless it is in the cache.

    Raises:
        RuntimeError: If it cannot be built.
    """
    with _locks.setdefault(bundle, threading.Lock()):
        if bundle not in _bundles:
            _load_runtime()
            _bundles[bundle] = _kept(build.key(bundle)) or _made(bundle)


def fail(error: int) -> NoReturn:
    """Raises what a library has told, and releases its text.

    Args:
        error: The text's address.

    Raises:
        ValueError: If a value was wrong.
        RuntimeError: If it was anything else.
    """
    text = _text(error)
    raise (ValueError if text[:1] == "V" else RuntimeError)(text[1:])


def _find(wanted: Library) -> Entry | None:
    """Returns a library that was built before, alone or with others: ahead of time, or for the cache."""
    _load_runtime()
    bundle = wanted.bundle()
    if bundle in _bundles:
        return _entry(_bundles[bundle], wanted, bundled=True)
    candidates = [wanted] if bundle is None else [wanted, bundle]
    for find in (_precompiled, lambda candidate: _kept(build.key(candidate))):
        for candidate in candidates:
            found = find(candidate)
            if found is not None:
                return _entry(found, wanted, bundled=candidate == bundle)
        if find is _precompiled:
            precompiled.warn_if_useless(*candidates)
    return None


def _precompiled(wanted: Library) -> ctypes.CDLL | None:
    """Returns a library that was built ahead of time, if there is one that can be used."""
    path = precompiled.find(wanted)
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        warn(f"{path} is not used: {error}")
        return None


def _made(wanted: Library) -> ctypes.CDLL:
    """Builds a library, unless another process does."""
    key = build.key(wanted)

    def waiting() -> AbstractContextManager[object]:
        return progress.shown(wanted, waiting=True)

    with cache.locked(key, waiting):
        # Another process may have built it meanwhile.
        found = _kept(key)
        if found is not None:
            return found
        with build.built(wanted) as path:
            kept = _keep(key, path)
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                # Of what lies among temporary files nothing may be executed on some machines.
                reason = error
            with contextlib.suppress(OSError):
                return ctypes.CDLL(str(kept or path))
            raise CompilerError(f"{wanted} was built, but cannot be loaded: {reason}")


def _kept(key: str) -> ctypes.CDLL | None:
    """Returns a library from the cache, if it is there, whole and ours."""
    path = cache.find(key, build.FILE)
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        warn(
            f"{path} is built anew, because it cannot be loaded: {error} (if that stays, name by {cache.VARIABLE} "
            "a folder whose files may be executed)"
        )
        cache.remove(key)
        return None


def _keep(key: str, path: Path) -> Path | None:
    """Keeps a library for the next process, if that can be, and returns where."""
    try:
        return cache.entry(key, build.FILE, functools.partial(shutil.copyfile, path))
    except OSError as error:
        warn(f"built libraries are not kept for the next process: {error}")
        return None


@functools.cache
def _load_runtime() -> None:
    """Loads what of MAX the libraries call, which they look for by name where they were built elsewhere."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    names = [f"lib{name}.{suffix}" for name in ("KGENCompilerRTShared", "AsyncRTMojoBindings")]
    # Of pip's packages, then of conda's.
    modular = find_spec("modular")
    places = [Path(place) / "lib" for place in (modular and modular.submodule_search_locations) or ()]
    for folder in (*places, Path(sys.prefix) / "lib"):
        if all((folder / name).exists() for name in names):
            for name in names:
                ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
            return
    # Wherever they are, MAX finds them: it takes 0.1 s longer.
    import max.driver  # noqa: F401


def _entry(loaded: ctypes.CDLL, wanted: Library, bundled: bool = False) -> Entry:
    suffix = f"_{wanted.name}" if bundled else ""
    opening = loaded.maxsoftmax_open
    scratch = getattr(loaded, f"maxsoftmax_scratch{suffix}")
    run = getattr(loaded, f"maxsoftmax_run{suffix}")
    opening.argtypes, opening.restype = (ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p)), ctypes.c_void_p
    scratch.argtypes, scratch.restype = (ctypes.c_void_p,), ctypes.c_int64
    # After a call and a stream.
    run.argtypes, run.restype = (ctypes.c_void_p,) * (2 + POINTERS[wanted.name]), ctypes.c_void_p
    return Entry(opening, scratch, run, getattr(loaded, f"maxsoftmax_xla{suffix}", None))


def _context(loaded: Entry, device: int) -> int:
    """Returns the context of a device: one for all libraries, as long as the process lives."""
    with _locks.setdefault(device, threading.Lock()):
        if device not in _contexts:
            error = ctypes.c_void_p()
            fork.opened(device)
            context = loaded.open(device, ctypes.byref(error))
            if not context:
                raise RuntimeError(_text(error.value)[1:] if error.value else f"device {device} cannot be opened")
            _contexts[device] = context
        return _contexts[device]


def _text(address: int) -> str:
    text = ctypes.string_at(address).decode(errors="replace")
    _free(address)
    return text


def _free(address: int) -> None:
    release: Any = ctypes.CDLL(None).free
    release.argtypes, release.restype = (ctypes.c_void_p,), None
    release(address)


def _forget() -> None:
    # Threads that held them are not here any more.
    _locks.clear()
    functions.cache_clear()


fork.forget_in_child(_forget)
