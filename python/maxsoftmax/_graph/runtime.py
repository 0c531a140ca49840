"""Devices, and graphs of MAX as models: compiled once, then loaded from the cache."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from max.driver import CPU, Accelerator, Device, accelerator_count
from max.engine import CompiledModel, InferenceSession, Model
from max.graph import Graph, Module

from maxsoftmax import _cache as cache
from maxsoftmax import _files as files
from maxsoftmax._graph import artifacts
from maxsoftmax._graph.extension import extension
from maxsoftmax._interrupt import interruptible

MAX_CACHE = "MODULAR_CACHE_DIR"
"""MAX's own environment variable for the folder of what it has compiled."""

Observer = Callable[[str], AbstractContextManager[Any]]

_observers: list[Observer] = []
_models: dict[tuple[str, ...], dict[str, Model]] = {}
_compiling = threading.Lock()


def devices() -> list[Device]:
    """Returns the CPU and every GPU that MAX can use."""
    return [CPU(), *(Accelerator(i) for i in range(accelerator_count()))]


def name(device: Device) -> str:
    """Returns how `device` is called in the arguments of this package: "cpu", "gpu" or "gpu:1"."""
    return device.label if device.id == 0 else f"{device.label}:{device.id}"


def device(spec: Any) -> Device:
    """Returns the device that `spec` names: "cpu", "gpu", "gpu:1", or a `max.driver.Device`, which is itself.

    Raises:
        TypeError: If it is neither a string nor a device.
        ValueError: If this machine has no such device.
    """
    if isinstance(spec, Device):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"device must be a string such as 'cpu' or 'gpu', or a max.driver.Device, not {spec!r}")
    present = {name(d): d for d in devices()}
    if spec not in present:
        raise ValueError(f"device {spec!r} is not on this machine, which has {', '.join(map(repr, present))}")
    return present[spec]


def model(device: Device, what: str, graph: Callable[[], Graph]) -> Model:
    """Returns the model of a graph, compiled (seconds) unless this or an earlier process has done that.

    Args:
        device: Where it runs.
        what: What the graph computes, in words that tell it from all others on the device.
        graph: Called for the graph when there is no model yet.

    Returns:
        The model. Safe to call from several threads.
    """
    (found,) = models(device, what, graph).values()
    return found


def models(device: Device, what: str, graphs: Callable[[], Graph | Module]) -> dict[str, Model]:
    """Returns the models of all graphs of a module, by their names: most of MAX's time is spent once for all of them.

    Args:
        device: Where they run.
        what: What they compute, as of `model`.
        graphs: Called for the module, or for a single graph, when there are no models yet.

    Returns:
        The models. Safe to call from several threads.
    """
    architecture = "" if device.is_host else device.architecture_name
    parts = (name(device), architecture, what)
    # One lock for all: MAX compiles one graph at a time anyway.
    with _compiling:
        if parts not in _models:
            session = _session(device)

            @contextmanager
            def observed() -> Iterator[None]:
                with ExitStack() as stack:
                    for observer in _observers:
                        stack.enter_context(observer(f"{what} on {name(device)}"))
                    yield

            def compile() -> Any:
                with observed():
                    made = graphs()
                    return compiled(session, made)

            _models[parts] = artifacts.load(session, parts, compile, observed)
    return _models[parts]


def compiled(session: InferenceSession, graph: Graph | Module) -> CompiledModel:
    """Returns a graph as MAX compiles it, which Ctrl-C ends at once.

    MAX fails where its own cache is on a full disk, so that it is given a temporary one then.
    """
    folder = max_cache()
    nearest = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    with contextlib.suppress(OSError):
        if shutil.disk_usage(nearest).free < files.ROOM:
            there = cache.temporary(folder, os.strerror(errno.ENOSPC), MAX_CACHE)
            os.environ[MAX_CACHE] = str(there)
    # Of a module, MAX forgets what its graphs were given.
    extensions = [extension()] if isinstance(graph, Module) else None
    return interruptible(lambda: session.compile(graph, custom_extensions=extensions))


def max_cache() -> Path:
    """Returns where MAX keeps what it has compiled."""
    return Path(os.environ.get(MAX_CACHE) or Path.home() / ".cache" / "modular")


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Enters what `observer` returns, given words, around every compilation meanwhile: to show or to time it."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@functools.cache
def _session(device: Device) -> InferenceSession:
    return InferenceSession(devices=[device])
