"""Softmax of a .npy file, streamed: the file may be larger than memory, and the result appears whole or not at all."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxsoftmax import _files as files
from maxsoftmax._arguments import normalize_axes
from maxsoftmax._arrays import Rows, softmax

if TYPE_CHECKING:
    from max.driver import Device

SLAB = 64 * 2**20
"""Bytes of input that are computed at a time."""

STRIDED = 8
"""How many times as many where a slab is a few columns of all lines: each touches every page, so fewer are better."""


REASONS = {
    "mmap length": "the file is shorter than its header says",
    "Python objects": "it holds Python objects, not numbers",
}
"""What is wrong with a file, by a part of NumPy's message."""


def read(path: Path, name: str = "") -> np.ndarray:
    """Returns the array in a .npy file, mapped into memory.

    Args:
        path: The file.
        name: What messages call it; its path if "".

    Raises:
        OSError: If there is no such file, or it cannot be read.
        ValueError: If it is not a .npy file of numbers.
    """
    with path.open("rb") as file:
        magic = file.read(len(np.lib.format.MAGIC_PREFIX))
    if magic != np.lib.format.MAGIC_PREFIX:
        raise ValueError(f"{name or path} is not a .npy file, as numpy.save writes them")
    try:
        # Copy on write: whoever gets the array may write to it, and the file stays as it is.
        with np.errstate(over="ignore"):
            array: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
            return array
    except OSError:
        raise
    except Exception as error:  # A damaged header raises whatever the parser that it upsets does.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        # In a caller's words, what NumPy says of its own.
        reason = next((ours for theirs, ours in REASONS.items() if theirs in reason), reason)
        raise ValueError(f"{name or path} cannot be read as an array: {reason}") from error


def transform(
    x: np.ndarray,
    output: Path,
    *,
    axis: int | None,
    device: str | Device,
    algorithm: str,
    advance: Callable[[int], None],
) -> np.dtype[Any]:
    """Writes softmax of `x` to the .npy file `output` and returns its dtype.

    Args:
        x: Logits, in C or Fortran order, mapped or not.
        output: Replaced only when all is computed.
        axis: The axis that will sum to 1; None for all together.
        device: Where to compute.
        algorithm: As in `maxsoftmax.softmax`.
        advance: Called with the number of bytes of input that were done since the last call.

    Raises:
        OSError: If `output` cannot be written.
        TypeError: If `x` has a dtype that softmax does not take.
        ValueError: If there is no such axis, device or algorithm.
    """
    axes = normalize_axes(axis, x.ndim)
    options: dict[str, Any] = {"device": device, "algorithm": algorithm}
    # Refuses bad arguments before anything is written, and tells the result's dtype.
    dtype: np.dtype[Any] = softmax(np.empty(0, x.dtype), **options).dtype
    fortran = x.flags.f_contiguous and not x.flags.c_contiguous
    with _replacing(output, x.shape, dtype, fortran) as y:
        if x.size == 0:
            return dtype
        source, target = x, y
        if fortran:
            source, target = x.T, y.T
            axes = tuple(sorted(x.ndim - 1 - a for a in axes))
        rows = Rows.of(source.shape, axes)
        source, target = source.reshape(rows), target.reshape(rows)
        for slab in _slabs(rows, x.itemsize):
            target[slab] = softmax(source[slab], axis=1, **options)
            advance(source[slab].nbytes)
    return dtype


def _slabs(rows: Rows, itemsize: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yields pieces of whole rows of about `SLAB` bytes: many outer ones, or part of one where that is too long."""
    if rows.n * rows.inner * itemsize <= SLAB:
        columns = rows.inner
    else:
        columns = max(1, min(rows.inner, STRIDED * SLAB // (rows.n * itemsize)))
    step = max(1, SLAB // (rows.n * columns * itemsize)) if columns == rows.inner else 1
    for i in range(0, rows.outer, step):
        for j in range(0, rows.inner, columns):
            yield slice(i, i + step), slice(None), slice(j, j + columns)


@contextlib.contextmanager
def _replacing(output: Path, shape: tuple[int, ...], dtype: np.dtype[Any], fortran: bool) -> Iterator[np.ndarray]:
    """Yields an array whose file takes the place of `output` at the end, or vanishes if something goes wrong."""
    with files.replacing(output) as partial:
        try:
            _create(partial, shape, dtype, fortran)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(output)) from error
        if 0 in shape:
            yield np.empty(shape, dtype)
        else:
            mapped = np.lib.format.open_memmap(partial, mode="r+")
            yield mapped
            mapped.flush()


def _create(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], fortran: bool) -> None:
    """Makes a .npy file of zeros."""
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": fortran, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()
        size = file.tell() + dtype.itemsize * math.prod(shape)
        # Taking the space now turns a full disk into an error here instead of a crash in the mapping.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
