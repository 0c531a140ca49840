"""Devices by their index, -1 for the CPU, without MAX's graphs."""

from __future__ import annotations

import functools
import re
from typing import Any

from maxsoftmax._native import fork
from maxsoftmax._native.description import Target

CPU = -1
"""The index of the CPU; GPUs count from 0."""


def index(device: Any) -> int:
    """Returns the index of a device that is here: "cpu", "gpu", "gpu:1", or a `max.driver.Device`.

    Raises:
        TypeError: If it is neither a string nor a device.
        ValueError: If this machine has no such device.
        RuntimeError: If it is a GPU, in a fork of a process that has used one.
    """
    if not isinstance(device, str):
        if not (hasattr(device, "is_host") and hasattr(device, "id")):
            raise TypeError(f"device must be a string such as 'cpu' or 'gpu', or a max.driver.Device, not {device!r}")
        return CPU if device.is_host else int(device.id)
    if device == "cpu":
        return CPU
    fork.check_gpu()
    found = re.fullmatch(r"gpu(?::(0|[1-9]\d{0,3}))?", device)
    number = int(found[1] or 0) if found else 0
    if not found or number >= _count():
        here = ["cpu", *(f"gpu:{i}" if i else "gpu" for i in range(_count()))]
        raise ValueError(f"device {device!r} is not on this machine, which has {', '.join(map(repr, here))}")
    return number


@functools.cache
def target(device: int) -> Target:
    """Returns what a library for a device is built for.

    Raises:
        ValueError: If there is no such GPU.
        RuntimeError: In a fork of a process that has used one.
    """
    if device == CPU:
        return Target("cpu")
    fork.check_gpu()
    if device >= _count():
        raise ValueError(f"there is no GPU {device}: this machine has {_count()}")
    from max.driver import Accelerator

    return Target("gpu", Accelerator(device).architecture_name)


def _count() -> int:
    # Calls on a CPU do without: it takes 0.1 s to import.
    from max.driver import accelerator_count

    count: int = accelerator_count()
    if count:
        # Who counts GPUs has begun to use them, as far as forks are concerned.
        fork.opened(0)
    return count


fork.forget_in_child(target.cache_clear)
