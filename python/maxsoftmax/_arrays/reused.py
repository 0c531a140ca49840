"""Memory of large results on a CPU, used again once nobody has them.

The pages of new memory take longer than softmax does: an EPYC writes 32 MB in 1.4 ms, and takes 3 to 10 ms more where
the operating system has to find and clear them first. So what a result lay in is kept when the result is gone, up to a
limit of bytes in all, and the next result that it has room for, and that needs most of it, is put there.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxsoftmax._arrays.layout import descending, inverse
from maxsoftmax._arrays.memory import address, product

LARGE = 8 << 20
"""Bytes from which results are put here; smaller ones are served by the allocators of NumPy and torch."""

ALIGNMENT = 64
"""Of every result, in bytes."""

ALIASED = 4096
"""Bytes that two addresses are a multiple of apart where a core takes a load for one of what it has just stored.

A result lies half of that off what it is made of. NumPy's large arrays begin 16 bytes behind a page and new memory 64,
which is the worst: 8192×1024 float32 took an EPYC (Zen 3) 3.1 to 3.4 ms, and takes 2.1 to 2.9.
"""

_free: deque[np.ndarray] = deque()
"""What nobody has, oldest first. It is given back anywhere, in the midst of `room` as well: so each step is atomic."""


@functools.cache
def _limit() -> int:
    """Returns how many bytes are kept, `MAXSOFTMAX_KEEP_MB` or 512 MB, as it was when the first result was.

    Raises:
        ValueError: If that is no number.
    """
    value = os.environ.get("MAXSOFTMAX_KEEP_MB", "512")
    try:
        return max(0, int(value)) << 20
    except ValueError:
        raise ValueError(f"MAXSOFTMAX_KEEP_MB is {value!r}; it is a number of megabytes, 0 for none") from None


def room(size: int, beside: int) -> Any:
    """Returns so many bytes, uninitialized, by Python's buffer protocol; free once nothing refers to them.

    Args:
        size: How many.
        beside: Where what they are made of begins: they begin half a page off that.
    """
    block = _found(size) if _limit() else None
    if block is None:
        block = np.empty(size + ALIASED, np.uint8)
    start = address(block)
    behind = -(-(beside + ALIASED // 2) // ALIGNMENT) * ALIGNMENT
    given = (ctypes.c_ubyte * size).from_address(start + (behind - start) % ALIASED)
    # Finalizers go before threads do when Python ends; what is in use stays.
    given.block = block  # type: ignore[attr-defined]
    weakref.finalize(given, _give_back, block).atexit = False
    return given


def array(shape: Sequence[int], dtype: np.dtype, order: Sequence[int], beside: int = 0) -> np.ndarray:
    """Returns an uninitialized array without gaps.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        order: Its dimensions, in the order in which they are to lie in memory.
        beside: As of `room`, 0 where it does not matter.
    """
    sizes = [shape[i] for i in order]
    size = dtype.itemsize * product(sizes)
    laid = np.empty(sizes, dtype) if size < LARGE else np.ndarray(sizes, dtype, room(size, beside))
    return laid.transpose(inverse(order))


def array_like(x: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
    """Returns an uninitialized array whose dimensions lie in memory in the order of those of `x`.

    Args:
        x: An array without gaps.
        dtype: Of the result, None for that of `x`.
    """
    return array(x.shape, x.dtype if dtype is None else np.dtype(dtype), descending(x.strides), address(x))


def _found(size: int) -> np.ndarray | None:
    """Returns the latest free block that has room for so many bytes, and not much more; those that do not fit age."""
    for _ in range(len(_free)):
        try:
            block = _free.pop()
        except IndexError:
            break
        if size + ALIASED <= block.nbytes <= size + size // 4 + ALIASED:
            return block
        _free.appendleft(block)
    return None


def _give_back(block: np.ndarray) -> None:
    """Keeps a block for the next result, and of others as many as are not too much."""
    if block.nbytes > _limit():
        return
    _free.append(block)
    while sum(kept.nbytes for kept in tuple(_free)) > _limit():
        try:
            _free.popleft()
        except IndexError:
            return
