"""Compiled models as files: what one process has compiled, the next one loads, in milliseconds instead of seconds."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from max.engine import CompiledModel, InferenceSession, Model

from maxsoftmax import _cache as cache
from maxsoftmax._graph.extension import distribution_version, python_sources
from maxsoftmax._graph.extension import key as sources_key
from maxsoftmax._native.machine import processor
from maxsoftmax._warnings import warn

FILE = "softmax.mef"
"""The name of a model in its entry of the cache."""

SOURCES = ("*.py", "ops/*.py", "_graph/*.py", "_commands/demo.py", "_commands/network.py")
"""The modules whose functions make graphs."""


def load(
    session: InferenceSession,
    parts: Iterable[str],
    compile: Callable[[], CompiledModel],
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, Model]:
    """Returns models that come from the cache if they are there, whole and ours; else they are compiled, and kept.

    One process at a time compiles them, and others find what that one has kept.

    Args:
        session: Where they will run.
        parts: What makes them others than others, beside what `_surroundings` knows.
        compile: Called when there are none; what it raises is passed on.
        waiting: What it returns is entered while another process is waited for.

    Returns:
        The models by the names of their graphs, ready to execute.
    """
    digest = hashlib.sha256("\0".join([*_surroundings(), *parts]).encode()).hexdigest()
    key = f"model-{digest[:32]}"
    found = _kept(session, key)
    if found is not None:
        return found
    with cache.locked(key, waiting):
        # Another process may have compiled it meanwhile.
        found = _kept(session, key)
        if found is not None:
            return found
        compiled = compile()
        try:
            cache.entry(key, FILE, compiled.export_mef)
        except (OSError, RuntimeError, ValueError) as error:
            warn(f"the compiled model is not kept for the next process: {error}")
    made: dict[str, Model] = session.init_all(compiled)
    return made


def _kept(session: InferenceSession, key: str) -> dict[str, Model] | None:
    """Returns models from the cache, if they are there, whole and ours, and MAX can load them."""
    path = cache.find(key, FILE)
    if path is None:
        return None
    try:
        found: dict[str, Model] = session.load_all(path)
    except Exception as error:  # Whatever MAX raises: the file is as it was written, and still of no use.
        warn(f"{path} is compiled anew, because MAX cannot load it: {error}")
        cache.remove(key)
        return None
    return found


@functools.cache
def _surroundings() -> tuple[str, ...]:
    """Returns everything around a model that may change what it is compiled to."""
    return (
        distribution_version("max", "modular"),
        sources_key(),
        python_sources(*SOURCES),
        platform.machine(),
        processor(),
    )
