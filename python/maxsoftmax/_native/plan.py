"""Calls: all that a library is told of one but its stream and its pointers, made once for each shape and options."""

from __future__ import annotations

import ctypes
import functools
import struct
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from maxsoftmax._native import fork
from maxsoftmax._native.load import functions

WORDS = 48
"""The words of a call, at least."""

LIMIT = 4
"""The index in a call of what it may use: on a CPU the most threads, on a GPU how many bytes of scratch memory."""


class NoPlan(RuntimeError):
    """A library that has nothing for rows of some length, as one with one configuration of a kernel may."""


class Plan:
    """How to compute one thing of arrays of one shape: `error = plan.run(plan.call, stream, y, x, scratch)`.

    What it returns is None, or something for `fail`. May be called from several threads.
    """

    __slots__ = ("__weakref__", "_device", "_words", "call", "run", "scratch")

    run: Callable[..., int | None]
    """Takes `call`, a stream (0 on a CPU) and addresses."""
    call: int
    """The address of what the library is told, which lives as long as this."""
    scratch: int
    """Bytes of device memory that it needs beside its arguments."""

    def __init__(self, device: int, run: Callable[..., int | None], words: Any, scratch: int) -> None:
        self._device, self._words = device, words
        self.run, self.call, self.scratch = run, ctypes.addressof(words), scratch


@functools.lru_cache(maxsize=4096)
def plan(
    name: str,
    dtype: str,
    device: int,
    rows: tuple[int, int, int],
    options: tuple[int, ...] = (),
    *,
    algorithm: str = "auto",
    block_size: int = 128,
    unroll: int = 4,
    out_dtype: str = "",
) -> Plan:
    """Returns how to compute something; the first for a library loads it (milliseconds) or builds it (seconds).

    Args:
        name: The library, one of `POINTERS`.
        dtype: Of the logits, by name.
        device: -1 for the CPU, or the index of a GPU.
        rows: (outer, n, inner): memory is row-major, and the middle one is the axis.
        options: What the library is told beside, from index 5 on.
        algorithm: Of softmax, its kernel.
        block_size: Threads a block, where the kernel leaves it to the caller.
        unroll: Vectors that a thread has under way at a time, where the kernel leaves it to the caller.
        out_dtype: Of the results, by name, if it is another one.

    Raises:
        ValueError: If there is no such library or device.
        NoPlan: If the library has nothing for such rows.
        RuntimeError: If it cannot be built, or the device not be opened.
    """
    found = functions(name, dtype, device, algorithm, (block_size, unroll), out_dtype=out_dtype)
    values = (found.context, *rows, fork.threads(), *options)
    # An option that nobody gave is 0, and not what lies behind.
    words = (ctypes.c_int64 * max(WORDS, len(values)))(*values)
    scratch = found.scratch(ctypes.addressof(words))
    if scratch < 0:
        raise NoPlan(f"{name} of {dtype} {rows} on device {device} cannot be planned")
    if device >= 0:
        # 0 would say that nobody knows.
        words[LIMIT] = max(1, scratch)
    made = Plan(device, found.run, words, scratch)
    _alive.add(made)
    return made


def bits(number: float) -> int:
    """Returns the bits of a double as an integer, as options hold it."""
    (value,) = struct.unpack("=q", struct.pack("=d", number))
    return int(value)


_alive: weakref.WeakSet[Plan] = weakref.WeakSet()


def _forget() -> None:
    """Has the plans of the process that this is a fork of work here, or say why they cannot, whoever holds them."""
    plan.cache_clear()
    for made in list(_alive):
        if made._device < 0:
            made._words[LIMIT] = fork.threads()
        else:
            made.run = _refuse


def _refuse(*_: Any) -> NoReturn:
    fork.check_gpu()
    raise RuntimeError("this process is a fork of one that has used the GPU")


fork.forget_in_child(_forget)
