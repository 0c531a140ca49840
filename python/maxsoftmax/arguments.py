"""What callers may pass: every argument is checked here, before anything is compiled or launched."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from max.dtype import DType
from numpy.exceptions import AxisError

DTYPES = (DType.float32, DType.bfloat16, DType.float16, DType.float64)
"""What the kernels compute; anything else has to be converted first."""

BLOCK_SIZE = 128
"""Threads a block unless told otherwise, as in the published kernels."""

UNROLL = 4
"""Vectors that a thread has under way at a time unless told otherwise."""


class Choices(NamedTuple):
    """What a caller may choose beside an algorithm's name."""

    block_sizes: tuple[int, ...] = ()
    """Threads a block."""
    unrolls: tuple[int, ...] = ()
    """Vectors that a thread has under way at a time."""


_ANY = tuple(2**i for i in range(11))
# Where warps work together, a block has to be whole warps, which are 64 threads on some GPUs.
_WARPS = (128, 256, 512, 1024)

ALGORITHMS: dict[str, dict[str, Choices]] = {
    "cpu": {"auto": Choices(), "naive": Choices()},
    "gpu": {
        "auto": Choices(),
        "elementwise": Choices(_ANY),
        "naive": Choices(_ANY),
        "tree": Choices(_ANY),
        "tree_blocked": Choices(_ANY),
        "warp": Choices(_WARPS),
        "vector": Choices(_WARPS, (1, 2, 4, 8)),
        "online": Choices(_WARPS, (1, 2, 4, 8)),
        "multipass": Choices(_WARPS),
        "split": Choices(_WARPS),
    },
}
"""The algorithms of each kind of device, and what each leaves to the caller."""


def check_dtype(dtype: DType) -> None:
    """Refuses a dtype that no kernel computes.

    Raises:
        TypeError: If it is not one of `DTYPES`.
    """
    if dtype not in DTYPES:
        allowed = ", ".join(d.name for d in DTYPES)
        raise TypeError(f"x has dtype {dtype.name}, but softmax takes {allowed}")


def normalize_axis(axis: Any, rank: int, allowed: str = "an integer") -> int:
    """Returns `axis` counted from 0. What the caller allows beside an integer is for it to take out first.

    Raises:
        TypeError: If it is not an integer.
        numpy.exceptions.AxisError: If a tensor of this rank has no such axis (a ValueError and an IndexError).
    """
    index = _integer("axis", axis, allowed)
    # As in NumPy's reductions, a scalar may be asked for its first or last axis.
    last = max(rank - 1, 0)
    if not -last - 1 <= index <= last:
        raise AxisError(f"axis {index} is out of bounds for x of rank {rank}: it must be from {-last - 1} to {last}")
    return index % max(rank, 1)


def normalize_axes(axis: Any, rank: int) -> tuple[int, ...]:
    """Returns the axes that `axis` names, counted from 0 and ascending: an int, a sequence of them, or None for all.

    Raises:
        TypeError: If it is none of these.
        ValueError: If an axis is named twice.
        numpy.exceptions.AxisError: If a tensor of this rank has no such axis.
    """
    if axis is None:
        return tuple(range(rank))
    several = isinstance(axis, Sequence) and not isinstance(axis, str)
    given = axis if several else (axis,)
    axes = sorted(normalize_axis(a, rank, "an integer, a tuple of integers or None") for a in given)
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis {tuple(axis)} names an axis of x twice")
    return tuple(axes) if rank else ()


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
        ValueError: If the algorithm has no such choice.
    """
    allowed = ALGORITHMS[device][algorithm].block_sizes
    return _check_choice("block_size", block_size, BLOCK_SIZE, allowed, f"{algorithm!r} on the {device.upper()}")


def check_unroll(unroll: Any, algorithm: str, device: str) -> int:
    """Returns the vectors under way at a time, `UNROLL` for None.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If the algorithm has no such choice.
    """
    allowed = ALGORITHMS[device][algorithm].unrolls
    return _check_choice("unroll", unroll, UNROLL, allowed, f"{algorithm!r} on the {device.upper()}")


def _check_choice(name: str, value: Any, default: int, allowed: tuple[int, ...], algorithm: str) -> int:
    if value is None:
        return default
    number = _integer(name, value)
    if not allowed:
        raise ValueError(f"{name} {number} has no meaning for algorithm {algorithm}, which leaves no such choice")
    if number not in allowed:
        choices = ", ".join(map(str, allowed))
        raise ValueError(f"{name} {number} does not exist for algorithm {algorithm}: choose from {choices}")
    return number


def _integer(name: str, value: Any, allowed: str = "an integer") -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be {allowed}, not the bool {value}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {allowed}, not {value!r}") from None
