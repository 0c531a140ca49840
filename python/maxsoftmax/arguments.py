"""What callers may pass: every argument is checked here, before anything is compiled or launched."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from max.dtype import DType
from numpy.exceptions import AxisError

DTYPES = (DType.float32, DType.bfloat16, DType.float16, DType.float64)
"""What the kernels compute; anything else has to be converted first."""

ALGORITHMS = {"cpu": ("auto",), "gpu": ("auto", "tree")}
"""The algorithms of each kind of device."""

BLOCK_SIZE = 128
"""Threads a block of `tree` unless told otherwise, as in its published form."""


def check_dtype(dtype: DType) -> None:
    """Refuses a dtype that no kernel computes.

    Raises:
        TypeError: If it is not one of `DTYPES`.
    """
    if dtype not in DTYPES:
        allowed = ", ".join(d.name for d in DTYPES)
        raise TypeError(f"x has dtype {dtype.name}, but softmax takes {allowed}")


def normalize_axis(axis: Any, rank: int, name: str = "axis") -> int:
    """Returns `axis` counted from 0.

    Raises:
        TypeError: If it is not an integer.
        numpy.exceptions.AxisError: If a tensor of this rank has no such axis (a ValueError and an IndexError).
    """
    if isinstance(axis, bool):
        raise TypeError(f"{name} must be an integer, not the bool {axis}")
    try:
        index = operator.index(axis)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {axis!r}") from None
    if not -rank <= index < rank:
        raise AxisError(f"{name} {index} is out of bounds for x of rank {rank}: it must be from {-rank} to {rank - 1}")
    return index % rank


def normalize_axes(axis: Any, rank: int) -> tuple[int, ...]:
    """Returns the axes that `axis` names, counted from 0 and ascending: an int, a sequence of them, or None for all.

    Raises:
        TypeError: If it is none of these.
        ValueError: If an axis is named twice.
        numpy.exceptions.AxisError: If a tensor of this rank has no such axis.
    """
    if axis is None:
        return tuple(range(rank))
    if not isinstance(axis, Sequence) or isinstance(axis, str):
        # As in NumPy's reductions, a scalar may be asked for its first or last axis.
        if rank == 0 and not isinstance(axis, bool) and axis in (0, -1):
            return ()
        return (normalize_axis(axis, rank),)
    axes = sorted(normalize_axis(a, rank) for a in axis)
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis {tuple(axis)} names an axis of x twice")
    return tuple(axes)


def check_algorithm(algorithm: Any, device: str) -> str:
    """Returns `algorithm` if a `device` ("cpu" or "gpu") has it.

    Raises:
        TypeError: If it is not a string.
        ValueError: If there is no such algorithm.
    """
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm must be a string, not {algorithm!r}")
    if algorithm not in ALGORITHMS[device]:
        allowed = ", ".join(repr(a) for a in ALGORITHMS[device])
        raise ValueError(f"algorithm {algorithm!r} does not exist on the {device.upper()}: choose from {allowed}")
    return algorithm


def check_block_size(block_size: Any, algorithm: str, device: str) -> int:
    """Returns the threads a block, `BLOCK_SIZE` for None.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is not a power of two from 1 to 1024, or the algorithm has no such choice.
    """
    if block_size is None:
        return BLOCK_SIZE
    if device != "gpu" or algorithm == "auto":
        raise ValueError(
            f"block_size {block_size!r} has no meaning for algorithm {algorithm!r} on the {device.upper()}: "
            "it belongs to 'tree' on a GPU"
        )
    if isinstance(block_size, bool):
        raise TypeError(f"block_size must be an integer, not the bool {block_size}")
    try:
        size = operator.index(block_size)
    except TypeError:
        raise TypeError(f"block_size must be an integer, not {block_size!r}") from None
    if not 1 <= size <= 1024 or size & (size - 1):
        raise ValueError(f"block_size {size} is not a power of two from 1 to 1024")
    return size
