"""What is left of a process in its forks: no threads, so neither MAX's nor a GPU's.

A fork computes on the thread that calls, where the process had threads of MAX, and on no GPU, where it had used one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

_opened: set[int] = set()
"""Devices that this process has used, or the one that it is a fork of."""

_forked_from: set[int] = set()
"""Devices that the process had used that this is a fork of."""

_forgetting: list[Callable[[], None]] = []


def opened(device: int) -> None:
    """Notes that a device is used: its threads do not survive a fork."""
    _opened.add(device)


def threads() -> int:
    """Returns how many threads a call on the CPU may use: 0 for all, 1 where there are no others any more."""
    return 1 if -1 in _forked_from else 0


def has_lost_gpu() -> bool:
    """Returns whether this is a fork of a process that had used a GPU."""
    return any(device >= 0 for device in _forked_from)


def check_gpu() -> None:
    """Refuses a GPU where it cannot be used.

    Raises:
        RuntimeError: If this is a fork of a process that had used one.
    """
    if has_lost_gpu():
        raise RuntimeError(
            "this process is a fork of one that has used the GPU, which a fork cannot: start it by the method 'spawn' "
            "(multiprocessing.get_context('spawn'))"
        )


def forget_in_child(function: Callable[[], None]) -> None:
    """Has `function` called in every fork, first thing."""
    _forgetting.append(function)


def _after() -> None:
    _forked_from.update(_opened)
    if "max._core" in sys.modules:
        # Others may have had MAX start its threads.
        _forked_from.add(-1)
    for function in _forgetting:
        function()


os.register_at_fork(after_in_child=_after)
