"""Having libraries ready before they are wanted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from maxsoftmax._arguments import OUT, dtype_name
from maxsoftmax._graph.extension import stop_compilers
from maxsoftmax._native import devices, load
from maxsoftmax._native.bundle import WORTH
from maxsoftmax._native.description import BUNDLE, CONVERTING, DTYPES, OPS, POINTERS, WHOLE, Library, is_for, library
from maxsoftmax._warnings import for_threads

if TYPE_CHECKING:
    from maxsoftmax._types import Where

Item = TypeVar("Item")
Result = TypeVar("Result")


def warm_up(
    *,
    ops: Iterable[str] | None = None,
    dtypes: Iterable[str] = ("float32",),
    out_dtype: str | None = None,
    device: Where = None,
) -> None:
    """Builds and loads what calls on arrays need, so that they need not wait for it.

    An op takes a few seconds; two cores build all that there is for a CPU, in four dtypes, within a minute. What this
    or an earlier process has built, or was compiled ahead of time, is loaded, which takes milliseconds.

    Args:
        ops: Names of functions of this package that take arrays, such as "softmax"; all of them if None.
        dtypes: Of the arrays: "float32", "bfloat16", "float16" and "float64".
        out_dtype: The name of the dtype of results, if not that of the arrays; for "softmax" and "log_softmax" only.
        device: Where they will be called: "cpu", "gpu", "gpu:1" or a `max.driver.Device`; the CPU if None.

    Raises:
        TypeError: If `ops` or `dtypes` is a string, or `device` is neither a string nor a device.
        ValueError: If there is no such op, dtype or device, or an op has no choice of `out_dtype`.
        RuntimeError: If something cannot be built; the message is the compiler's.

    Example:
        >>> maxsoftmax.warm_up(ops=["softmax"], dtypes=["float32"])
    """
    names = libraries(ops, out_dtype)
    chosen = _several("dtypes", dtypes, DTYPES)
    place = devices.CPU if device is None else devices.index(device)
    target = devices.target(place)
    outs = {dtype: "" if out_dtype in (None, dtype) else str(out_dtype) for dtype in chosen}
    wanted = [
        library(name, dtype, target, out_dtype=outs[dtype])
        for dtype in chosen
        for name in names
        if is_for(name, target)
    ]
    parallel(_make, together(each for each in wanted if not load.is_there(each)))
    for name, dtype, *_ in wanted:
        load.functions(name, dtype, place, "auto", (0, 0), out_dtype=outs[dtype])


def together(wanted: Iterable[Library]) -> list[Library]:
    """Returns what to build for libraries: many of the same dtype are built sooner together with all others."""
    several: dict[Library, list[Library]] = {}
    for each in wanted:
        several.setdefault(each.bundle() or each, []).append(each)
    found = []
    for bundle, members in several.items():
        found += [bundle] if len(members) >= WORTH else members
    return found


def _make(wanted: Library) -> None:
    if wanted.name == BUNDLE:
        load.load_bundle(wanted)
    else:
        load.load(wanted)


def libraries(ops: Iterable[str] | None, out_dtype: str | None = None) -> list[str]:
    """Returns the libraries that functions call, each once; for None those of whole rows.

    Args:
        ops: Names of functions.
        out_dtype: What results are to be of, if that is said.

    Raises:
        TypeError: If `ops` is a string.
        ValueError: If there is no such function or dtype, or a function has no choice of one.
    """
    if out_dtype is None:
        allowed = tuple(POINTERS)
    else:
        _several("out_dtype", [out_dtype], OUT)
        allowed = CONVERTING
    if ops is None:
        return [name for name in allowed if name in WHOLE]
    names = list(dict.fromkeys(name for op in _several("ops", ops, OPS) for name in OPS[op]))
    for name in names:
        if name not in allowed:
            raise ValueError(f"out_dtype {out_dtype} goes with softmax and log_softmax, and {name} has none")
    return names


def parallel(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Returns what `function` makes of each item, computed on as many threads as there are cores."""
    # The logging that it imports is nothing for the start of every process.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None) as pool:
        context = for_threads()
        futures = [pool.submit(context.copy().run, function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            # Ctrl-C on a terminal ends compilers, too; other signals reach this process alone.
            stop_compilers()
            raise


def _several(what: str, given: Iterable[str], allowed: Iterable[str]) -> list[str]:
    if isinstance(given, str):
        raise TypeError(f"{what} must be several names, not the string {given!r}")
    if not isinstance(given, Iterable):
        raise TypeError(f"{what} must be several names, not {given!r}")
    names = list(dict.fromkeys(map(dtype_name, given)))
    for name in names:
        if name not in allowed:
            raise ValueError(f"{what} has {name!r}: choose from {', '.join(map(repr, allowed))}")
    return names
