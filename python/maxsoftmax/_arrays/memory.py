"""Where arrays lie: addresses, and NumPy's view of memory that somebody else owns."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

HOST = -1
"""The number of the CPU, where a GPU has its index."""

SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}
"""Bytes of an element, of all that the kernels read."""

BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""What NumPy has for elements of dtypes that it knows only where another package is imported."""


class Array(NamedTuple):
    """An array that a kernel can be told of."""

    owner: Any
    """What keeps its memory."""
    address: int
    """Of its first element."""
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    device: int
    """The index of its GPU, or `HOST`."""

    @property
    def size(self) -> int:
        """How many elements there are."""
        return product(self.shape)

    @property
    def is_row_major(self) -> bool:
        """Whether it lies in C order, without gaps, or has no elements."""
        steps = zip(self.shape, self.strides, row_major(self.shape), strict=True)
        return all(size == 1 or mine == plain for size, mine, plain in steps) or 0 in self.shape


def product(sizes: tuple[int, ...] | list[int]) -> int:
    """Returns the product of sizes; `math.prod` is slower for so few."""
    total = 1
    for size in sizes:
        total *= size
    return total


def row_major(shape: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """Returns the strides of an array of this shape in C order, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def accumulator(dtype: str) -> str:
    """Returns the dtype of the arithmetic: float64 for itself, float32 for the rest."""
    return "float64" if dtype == "float64" else "float32"


def bits(dtype: str) -> str:
    """Returns what NumPy itself has for elements of a dtype."""
    return BITS.get(dtype, dtype)


def of_numpy(array: np.ndarray, dtype: str = "") -> Array:
    """Returns an array of the host as a kernel sees it: as it lies, or a copy where elements are between others.

    Args:
        array: Of elements in this machine's byte order.
        dtype: What they are, where NumPy knows them only as bits.
    """
    where, size = address(array), array.itemsize
    if where % size or any(step % size for step in array.strides):
        array = array.copy(order="K")
        where = address(array)
    strides = tuple([step // size for step in array.strides])
    return Array(array, where, dtype or array.dtype.name, array.shape, strides, HOST)


def view(array: Array) -> np.ndarray:
    """Returns memory of the host as NumPy sees it, of bits where it does not know the dtype.

    Raises:
        TypeError: If it is not of a dtype that it knows.
    """
    return array.owner if isinstance(array.owner, np.ndarray) else alias(array)


def alias(array: Array) -> np.ndarray:
    """Returns as `view` does, but always of bits, and writeable, whether writing to it is allowed or not."""
    dtype = np.dtype(bits(array.dtype))
    if array.size == 0:
        return np.empty(array.shape, dtype)
    size = dtype.itemsize
    # Strides may be negative: memory begins at the lowest address that one leads to.
    ends = [(n - 1) * step * size for n, step in zip(array.shape, array.strides, strict=True)]
    low, high = sum(min(end, 0) for end in ends), sum(max(end, 0) for end in ends)
    block = (ctypes.c_char * (high - low + size)).from_address(array.address + low)
    # NumPy keeps the block, and the block the owner.
    block.owner = array.owner  # type: ignore[attr-defined]
    buffer: Any = block
    return np.ndarray(array.shape, dtype, buffer, -low, tuple(step * size for step in array.strides))


_at = ctypes.c_void_p.from_address

DATA = getattr(object, "__basicsize__", 0)
"""Where in an object of NumPy's array type the address of its elements is: right after what every object has."""


def _slowly(array: np.ndarray) -> int:
    where: int = array.__array_interface__["data"][0]
    return where


def _quickly(array: np.ndarray) -> int:
    # Extensions are compiled against this layout. `array.ctypes.data` says the same, and takes six times as long.
    where: int = _at(id(array) + DATA).value or 0
    return where


def _is_as_compiled() -> bool:
    """Returns whether arrays are in memory what extensions of NumPy take them for."""
    if not DATA or not hasattr(ctypes, "pythonapi"):
        return False
    samples: list[np.ndarray] = [
        np.empty(7),
        np.empty((2, 3), np.float32)[1:, ::-1],
        np.zeros((), np.int8),
        np.empty(4).view(np.uint8),
    ]
    return all(_quickly(sample) == _slowly(sample) for sample in samples)


address = _quickly if _is_as_compiled() else _slowly
"""Returns the address of the first element of a NumPy array."""
