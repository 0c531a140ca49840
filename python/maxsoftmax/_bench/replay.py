"""Launches captured once and replayed, so that the host's part of a short call is not what is measured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

from max.driver import Device, DeviceQueue

CACHE = 128 * 2**20
"""Bytes that a GPU's last cache is taken to hold where nobody says."""


class Recording:
    """What a lap enqueued, captured as a CUDA graph. A context manager.

    Args:
        queue: Where the lap enqueues.
        lap: Called once. What it returns is kept, because the graph writes there.
        calls: The least number of launches that it has to consist of.

    Raises:
        ImportError: If cuda-bindings is not installed.
        RuntimeError: If the lap cannot be captured, or went elsewhere.
    """

    def __init__(self, queue: DeviceQueue, lap: Callable[[], list[Any]], calls: int) -> None:
        self._cuda = _driver()
        cuda = self._cuda
        self._stream = cuda.CUstream(queue.native_stream_handle)
        (context,) = self._do(cuda.cuStreamGetCtx(self._stream))[:1]
        self._do(cuda.cuCtxSetCurrent(context))
        self._do(cuda.cuStreamBeginCapture(self._stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            self.outputs = lap()
        finally:
            # A capture that was begun has to end, whatever happened in it.
            ended = cuda.cuStreamEndCapture(self._stream)
        (graph,) = self._do(ended)
        _, launches = self._do(cuda.cuGraphGetNodes(graph))
        if launches < calls:
            self._do(cuda.cuGraphDestroy(graph))
            raise RuntimeError(f"{launches} launches captured of {calls} calls")
        (self._executable,) = self._do(cuda.cuGraphInstantiate(graph, 0))
        self._do(cuda.cuGraphDestroy(graph))

    def launch(self) -> None:
        """Enqueues all of it."""
        self._do(self._cuda.cuGraphLaunch(self._executable, self._stream))

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cuda.cuGraphExecDestroy(self._executable)

    def _do(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        status, *values = answer
        if int(status):
            raise RuntimeError(str(status).rsplit(".", maxsplit=1)[-1])
        return tuple(values)


@functools.cache
def _driver() -> Any:
    """Returns NVIDIA's binding of the CUDA driver."""
    from cuda.bindings import driver

    return driver


def cache_bytes(device: Device) -> int:
    """Returns how many bytes the last cache of a GPU holds."""
    try:
        cuda = _driver()
    except ImportError:
        return CACHE
    attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
    status, number = cuda.cuDeviceGetAttribute(attribute, device.id)
    return CACHE if int(status) else int(number)
