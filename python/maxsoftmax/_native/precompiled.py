"""Libraries that were built ahead of time, maybe on another machine, by `maxsoftmax compile`."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxsoftmax import _cache as cache
from maxsoftmax import _files as files
from maxsoftmax._graph.extension import compiler
from maxsoftmax._native import build, machine
from maxsoftmax._native.description import Library
from maxsoftmax._warnings import warn

VARIABLE = "MAXSOFTMAX_PRECOMPILED"
"""Environment variable that names their folder."""


def folder() -> Path | None:
    """Returns where libraries are that were built ahead of time, or None if nobody said."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def write(folder: Path, library: Library, target_cpu: str = "") -> Path:
    """Builds a library into `folder`, and beside it a .json that says what it is.

    Args:
        folder: Made if it is not there.
        library: What to build.
        target_cpu: The CPU to build it for; this machine's if "".

    Raises:
        CompilerError: If that fails; the message is the compiler's.
        OSError: If it cannot be written.
    """
    import json

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / library.file_name(target_cpu)
    with build.built(library, target_cpu) as built:
        content = built.read_bytes()
    about = {
        **library.about(),
        **build.versions(),
        "mojo": compiler(),
        "target_cpu": target_cpu,
        "features": build.features(target_cpu),
        "processor": "" if target_cpu else _processor(),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    files.replace(path, content)
    files.replace(path.with_suffix(".json"), (json.dumps(about, indent=2) + "\n").encode())
    return path


def find(library: Library) -> Path | None:
    """Returns a library from the folder that the variable names, or None if there is none that can be used.

    Where there is one that is of no use, a warning says why.
    """
    here = folder()
    if here is None:
        return None
    reasons = {}
    # This very processor's first, then what makes most of this one.
    for path, about in sorted(_matching(here, library), key=_preference, reverse=True):
        reason = _reason_against(path, about, library)
        if reason is None:
            return path
        reasons[path] = reason
    for path, reason in reasons.items():
        warn(f"{path} is not used: {reason}")
    return None


def warn_if_useless(library: Library, *others: Library) -> None:
    """Warns, once, that the folder that the variable names has neither a library nor others that would do."""
    here = folder()
    if here is not None:
        _warn_if_useless(here, library, others)


def _matching(here: Path, library: Library) -> Iterator[tuple[Path, dict[str, Any] | ValueError]]:
    """Yields the files that are this library, for any GPU, and what is told about each, or why nothing is."""
    # Only who uses it imports it.
    import json

    try:
        # Sorted, so that all processes take the same one.
        paths = sorted(here.glob("*.so"))
    except OSError:
        return
    ours = {name: value for name, value in library.about().items() if name != "architecture"}
    stem = library.file_name().removesuffix(".so")
    for path in paths:
        try:
            about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            if not isinstance(about, dict):
                raise ValueError(f"{path.with_suffix('.json')} holds no object")
            if all(name in about and about[name] == value for name, value in ours.items()):
                yield path, about
        except (OSError, ValueError, RecursionError) as error:
            missing = f"there is no {path.stem}.json beside it, which says what it was built for"
            if path.stem == stem:
                yield path, ValueError(missing if isinstance(error, FileNotFoundError) else str(error))


def _preference(found: tuple[Path, dict[str, Any] | ValueError]) -> tuple[bool, int]:
    about = found[1]
    if not isinstance(about, dict):
        return False, 0
    features = about.get("features")
    return about.get("processor") == _processor(), len(features) if isinstance(features, list) else 0


def _reason_against(path: Path, about: dict[str, Any] | ValueError, library: Library) -> str | None:
    """Returns why a file is not to be loaded as a library, or None."""
    if not isinstance(about, dict):
        return str(about)
    if about.get("architecture") != library.target.architecture:
        return f"it was built for GPU {about.get('architecture')}, and this one is {library.target.architecture}"
    try:
        return (
            _distrust(path)
            or _reason_against_versions(about)
            or _reason_against_processor(about)
            or _damage(path, about)
        )
    except OSError as error:
        return str(error)


def _distrust(path: Path) -> str | None:
    for place, is_kind in (
        (path.parent, stat.S_ISDIR),
        (path, stat.S_ISREG),
        (path.with_suffix(".json"), stat.S_ISREG),
    ):
        # What belongs to root may be used by everybody.
        reason = cache.distrust(place.resolve(), is_kind, also=0)
        if reason is not None:
            return reason if place == path else f"of {place}, {reason}"
    return None


def _reason_against_versions(about: dict[str, Any]) -> str | None:
    for what, value in build.versions().items():
        if about.get(what) != value:
            if what == "sources":
                return "it was built from other sources of this package"
            return f"it was built for {what} {about.get(what)}, and this is {value}"
    return None


def _damage(path: Path, about: dict[str, Any]) -> str | None:
    damaged = hashlib.sha256(path.read_bytes()).hexdigest() != about.get("sha256")
    return "it is damaged" if damaged else None


def _reason_against_processor(about: dict[str, Any]) -> str | None:
    if about.get("processor") == _processor():
        return None
    features = about.get("features")
    if not isinstance(features, list) or not features:
        return "it was built for another CPU"
    lacking = machine.missing([str(feature) for feature in features])
    if lacking:
        return f"it was built for a CPU with {', '.join(lacking)}, which this one does not have"
    return None


@functools.cache
def _warn_if_useless(here: Path, library: Library, others: tuple[Library, ...]) -> None:
    try:
        if not any(path.suffix == ".so" for path in here.iterdir()):
            reason = "it holds no library"
        elif any(True for wanted in (library, *others) for _ in _matching(here, wanted)):
            # Of which it has been said why they are not used.
            return
        else:
            reason = f"it does not hold {library}"
    except OSError as error:
        reason = error.strerror or str(error)
    warn(f"{VARIABLE} names {here}, which is of no use here: {reason}")


def _processor() -> str:
    return hashlib.sha256(machine.processor().encode()).hexdigest()
