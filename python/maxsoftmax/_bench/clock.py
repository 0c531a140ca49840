"""Clocks: the host's for a CPU, device events for a GPU, and the lap of several calls that either one times."""

from __future__ import annotations

import contextlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from max.driver import Buffer, Device, DeviceEvent

from maxsoftmax._bench.replay import Recording, cache_bytes

Lap = Callable[[], list[Any]]
"""Computes some outputs in turn and returns them."""


class Clock(ABC):
    """Times laps on one device."""

    note = ""
    """How it timed the last laps, if not as usual."""
    cache = 0
    """Bytes that stay in the device's last cache; 0 where inputs are not rotated."""

    @abstractmethod
    def seconds(self, lap: Lap, repeats: int, replay: bool) -> list[float]:
        """Returns the mean time of a call in each of `repeats` laps, after one that is not timed.

        Args:
            lap: What to time.
            repeats: How often.
            replay: Whether the calls are so short that the host could be what is measured.
        """

    def copy(self, inputs: list[Buffer]) -> Lap:
        """Returns a lap that has each input copied within the device, into memory that was written before."""
        outputs = [x.copy() for x in inputs]

        def lap() -> list[Buffer]:
            for x, y in zip(inputs, outputs, strict=True):
                y.inplace_copy_from(x)
            return outputs

        return lap


class HostClock(Clock):
    """`time.perf_counter`, around laps that return when all is computed."""

    def seconds(self, lap: Lap, repeats: int, replay: bool) -> list[float]:
        """As `Clock.seconds`; nothing can be replayed."""
        lap()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            calls = len(lap())
            times.append((time.perf_counter() - start) / calls)
        return times

    def copy(self, inputs: list[Buffer]) -> Lap:
        """As `Clock.copy`, and the wait for it: on a CPU, too, MAX copies behind one's back."""
        enqueue = super().copy(inputs)

        def lap() -> list[Buffer]:
            outputs = enqueue()
            inputs[0].device.synchronize()
            return outputs

        return lap


class DeviceClock(Clock):
    """Events on the queue of a GPU, which all calls have to be enqueued on."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.queue = device.default_queue
        self.cache = cache_bytes(device)

    def seconds(self, lap: Lap, repeats: int, replay: bool) -> list[float]:
        """As `Clock.seconds`: by replays of the captured lap, or by laps enqueued one behind the other."""
        self.note = ""
        calls = len(lap())
        self.device.synchronize()
        with contextlib.ExitStack() as stack:
            enqueue: Callable[[], object] = lap
            if replay:
                try:
                    enqueue = stack.enter_context(Recording(self.queue, lap, calls)).launch
                except (ImportError, RuntimeError) as error:
                    self.note = f"not replayed: {error}"
            events = [DeviceEvent(self.device, enable_timing=True) for _ in range(repeats + 1)]
            # The host has to be ahead of the device before the first event.
            enqueue()
            enqueue()
            for event in events[:-1]:
                self.queue.record_event(event)
                enqueue()
            self.queue.record_event(events[-1])
            self.device.synchronize()
        return [a.elapsed_time(b) * 1e-3 / calls for a, b in itertools.pairwise(events)]
