"""Compiled models as files: what one process has compiled, the next one loads, in milliseconds instead of seconds.

They are kept in the user's cache, or were compiled ahead of time, maybe on another machine, by `maxsoftmax compile`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import stat
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from max.engine import CompiledModel, InferenceSession, Model

from maxsoftmax import cache, files
from maxsoftmax.extension import distribution_version
from maxsoftmax.extension import key as sources_key

VARIABLE = "MAXSOFTMAX_PRECOMPILED"
"""Environment variable that names a folder of models that were compiled ahead of time."""

FILE = "softmax.mef"
"""The name of a model in its entry of the cache."""


def load(session: InferenceSession, parts: Iterable[str], compile: Callable[[], CompiledModel]) -> Model:
    """As `load_all`, for a single model."""
    (model,) = load_all(session, parts, compile).values()
    return model


def load_all(session: InferenceSession, parts: Iterable[str], compile: Callable[[], CompiledModel]) -> dict[str, Model]:
    """Returns models that were compiled together.

    They come from the cache if they are there, whole and ours; else they are compiled, and kept there if that can be.

    Args:
        session: Where they will run.
        parts: What makes them other ones than others, beside what `_surroundings` knows.
        compile: Called when there are none; what it raises is passed on.

    Returns:
        The models by the names of their graphs, ready to execute.
    """
    digest = hashlib.sha256("\0".join([*_surroundings(), *parts]).encode()).hexdigest()
    key = f"model-{digest[:32]}"
    kept = cache.find(key, FILE)
    if kept is not None:
        try:
            models: dict[str, Model] = session.load_all(kept)
            return models
        except Exception as error:  # Whatever MAX raises: the file is as it was written, and still of no use.
            warnings.warn(f"{kept} is compiled anew, because MAX cannot load it: {error}", RuntimeWarning, stacklevel=2)
            cache.remove(key)
    compiled = compile()
    try:
        cache.entry(key, FILE, compiled.export_mef)
    except (OSError, RuntimeError, ValueError) as error:
        warnings.warn(f"the compiled model is not kept for the next process: {error}", RuntimeWarning, stacklevel=2)
    models = session.init_all(compiled)
    return models


def file_name(parts: Iterable[str]) -> str:
    """Returns what a model that was compiled ahead of time is called."""
    return "-".join(["softmax", *(re.sub(r"\W", "", part) for part in parts if part)]) + ".mef"


def write(folder: Path, parts: Sequence[str], compiled: CompiledModel) -> Path:
    """Writes a model that others can load from `folder`, and beside it what is to be known about it.

    Raises:
        OSError: If it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(parts)
    with files.replacing(path) as partial:
        compiled.export_mef(partial)
        content = partial.read_bytes()
    about = {
        "parts": list(parts),
        "max": distribution_version("max", "modular"),
        "machine": platform.machine(),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    files.replace(_about(path), (json.dumps(about, indent=2) + "\n").encode())
    return path


def folder() -> Path | None:
    """Returns where models are that were compiled ahead of time, or None if nobody said."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def is_precompiled(folder: Path, parts: Iterable[str]) -> bool:
    """Returns whether there is such a model in `folder`, whole or not."""
    return (folder / file_name(parts)).exists()


def precompiled(folder: Path, session: InferenceSession, parts: Sequence[str]) -> Model | None:
    """Returns the model that is in `folder`, or None, with a warning if there is one that is of no use."""
    if not is_precompiled(folder, parts):
        return None
    path = folder / file_name(parts)
    try:
        reason = _reason_against(path)
        if reason is None:
            return session.load(path)
    except Exception as error:  # Whatever MAX raises.
        reason = str(error)
    warnings.warn(f"{path} is not used: {reason}", RuntimeWarning, stacklevel=2)
    return None


def _reason_against(path: Path) -> str | None:
    """Returns why a file is not to be loaded, or None."""
    for place, is_kind in ((path.parent, stat.S_ISDIR), (path, stat.S_ISREG)):
        reason = cache.distrust(place.resolve(), is_kind, also=0)
        if reason is not None:
            return reason
    about = json.loads(_about(path).read_text())
    here = {"max": distribution_version("max", "modular"), "machine": platform.machine()}
    for what, value in here.items():
        if about[what] != value:
            return f"it was compiled for {what} {about[what]}, and this is {value}"
    if hashlib.sha256(path.read_bytes()).hexdigest() != about["sha256"]:
        return "it is damaged"
    return None


def _about(path: Path) -> Path:
    return path.with_suffix(".json")


@functools.cache
def _surroundings() -> tuple[str, ...]:
    """Returns everything around a model that may change what it is compiled to."""
    ours = [Path(__file__).with_name(name).read_bytes() for name in ("ops.py", "runtime.py", "eager_forms.py")]
    return (
        distribution_version("max", "modular"),
        sources_key(),
        hashlib.sha256(b"\0".join(ours)).hexdigest(),
        platform.machine(),
        _processor(),
    )


def _processor() -> str:
    """Returns what the compiler may see of this machine's processor."""
    try:
        # The first processor stands for all; with hundreds of them the file takes a while.
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read(16384).partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    told = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in lines if line.startswith(told))
