"""Compiled models as files: what one process has compiled, the next one loads, in milliseconds instead of seconds."""

from __future__ import annotations

import functools
import hashlib
import platform
import warnings
from collections.abc import Callable, Iterable

from max.engine import CompiledModel, InferenceSession, Model

from maxsoftmax import _cache as cache
from maxsoftmax._graph.extension import distribution_version, python_sources
from maxsoftmax._graph.extension import key as sources_key
from maxsoftmax._native.machine import processor

FILE = "softmax.mef"
"""The name of a model in its entry of the cache."""

SOURCES = ("*.py", "_graph/*.py", "_commands/demo.py", "_commands/network.py")
"""The modules whose functions make graphs."""


def load(session: InferenceSession, parts: Iterable[str], compile: Callable[[], CompiledModel]) -> Model:
    """Returns a model that comes from the cache if it is there, whole and ours; else it is compiled, and kept.

    Args:
        session: Where it will run.
        parts: What makes it another one than others, beside what `_surroundings` knows.
        compile: Called when there is none; what it raises is passed on.

    Returns:
        The model, ready to execute.
    """
    digest = hashlib.sha256("\0".join([*_surroundings(), *parts]).encode()).hexdigest()
    key = f"model-{digest[:32]}"
    kept = cache.find(key, FILE)
    if kept is not None:
        try:
            return session.load(kept)
        except Exception as error:  # Whatever MAX raises: the file is as it was written, and still of no use.
            warnings.warn(f"{kept} is compiled anew, because MAX cannot load it: {error}", RuntimeWarning, stacklevel=2)
            cache.remove(key)
    compiled = compile()
    try:
        cache.entry(key, FILE, compiled.export_mef)
    except (OSError, RuntimeError, ValueError) as error:
        warnings.warn(f"the compiled model is not kept for the next process: {error}", RuntimeWarning, stacklevel=2)
    return session.init(compiled)


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
