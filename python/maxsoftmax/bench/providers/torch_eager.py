"""PyTorch's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from max.driver import Buffer, Device

from maxsoftmax.bench.cases import Case, Entry
from maxsoftmax.bench.providers.base import Provider


class Torch(Provider):
    """`torch.softmax`, on MAX's stream."""

    name = "torch"

    def __init__(self, device: Device, threads: int) -> None:
        super().__init__(device, threads)
        import torch

        self.torch = torch
        if device.is_host:
            torch.set_num_threads(threads)
        elif not torch.cuda.is_available():
            raise ImportError("this build of torch has no CUDA")
        else:
            # Whatever goes to torch's current stream, peers built on torch included, goes where events are recorded.
            torch.cuda.set_stream(torch.cuda.ExternalStream(device.default_queue.native_stream_handle))

    def version(self) -> str:
        """Returns torch's version."""
        return str(self.torch.__version__)

    def share(self, x: Buffer) -> Any:
        """Returns `x` as a tensor."""
        return self.torch.from_dlpack(x)

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns `torch.softmax`."""
        return lambda x: self.torch.softmax(x, case.axis)
