"""PyTorch's own kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from max.driver import Buffer, Device

from maxsoftmax._bench import reference
from maxsoftmax._bench.cases import KEPT, OPS, SCALE, Case, Entry
from maxsoftmax._bench.providers.base import Provider


class Torch(Provider):
    """`torch.softmax` and its relatives, on MAX's stream."""

    name = "torch"
    ops = tuple(OPS)

    def __init__(self, device: Device, threads: int) -> None:
        super().__init__(device, threads)
        import torch

        self.torch = torch
        if device.is_host:
            torch.set_num_threads(threads)
        elif not torch.cuda.is_available():
            raise ImportError("this build of torch has no CUDA")
        else:
            self._join()

    def _join(self) -> None:
        """Goes where events are recorded, as then does all that goes to torch's current stream, of peers too."""
        handle = self.device.default_queue.native_stream_handle
        self.torch.cuda.set_stream(self.torch.cuda.ExternalStream(handle))

    def version(self) -> str:
        """Returns torch's version."""
        return str(self.torch.__version__)

    def share(self, x: Buffer) -> Any:
        """Returns `x` as a tensor."""
        return self.torch.from_dlpack(x)

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns torch's function, for a gradient by way of autograd."""
        return self._function(case, self.torch.nn.functional.cross_entropy)

    def _function(self, case: Case, loss: Callable[..., Any]) -> Callable[[Any], Any]:
        """Returns the function of the case's op, where `loss` computes the cross entropy of logits and targets."""
        torch, axis = self.torch, case.axis
        if OPS[case.op].queries:
            where = None if self.device.is_host else torch.device("cuda", self.device.id)
            hidden = torch.from_numpy(~reference.mask(case)).to(where)
            return lambda x: torch.softmax(x.masked_fill(hidden, -math.inf), axis)
        functions: dict[str, Callable[[Any], Any]] = {
            "softmax": lambda x: torch.softmax(x, axis),
            "scaled_softmax": lambda x: torch.softmax(x * SCALE, axis),
            "rescaled_softmax": lambda x: torch.softmax(x * SCALE, axis) * KEPT,
            "log_softmax": lambda x: torch.log_softmax(x, axis),
            "softmax_backward": lambda given: torch.ops.aten._softmax_backward_data(
                given[1], given[0], axis, given[0].dtype
            ),
            "cross_entropy": lambda given: loss(*given),
            "cross_entropy_gradient": lambda given: self._gradient(loss, *given),
        }
        return functions[case.op]

    def _gradient(self, loss: Callable[..., Any], x: Any, target: Any) -> tuple[Any, Any]:
        x = x.detach().requires_grad_()
        found = loss(x, target)
        (dx,) = self.torch.autograd.grad(found, x)
        return found.detach(), dx
