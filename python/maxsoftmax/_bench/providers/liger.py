"""Liger's Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

from max.driver import Device

from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.providers.base import only_last_axis
from maxsoftmax._bench.providers.torch_eager import Torch
from maxsoftmax._graph.extension import distribution_version


class Liger(Torch):
    """`liger_kernel.ops.softmax` and `liger_cross_entropy`, which makes the gradient where the logits were."""

    name = "liger"
    lazy = True
    ops: ClassVar[tuple[str, ...]] = ("softmax", "softmax_backward", "cross_entropy", "cross_entropy_gradient")
    in_place = ("cross_entropy_gradient",)
    devices = ("gpu",)

    def __init__(self, device: Device, threads: int) -> None:
        super().__init__(device, threads)
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        self.softmax = LigerSoftmaxFunction

    def version(self) -> str:
        """Returns Liger's version."""
        return distribution_version("liger-kernel")

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns its function."""
        only_last_axis(case)
        if case.op == "softmax":
            softmax: Callable[[Any], Any] = self.softmax.apply
            return softmax
        if case.op == "softmax_backward":
            return self._backward()
        from liger_kernel.transformers.functional import liger_cross_entropy

        return self._function(case, liger_cross_entropy)

    def _backward(self) -> Callable[[Any], Any]:
        """Returns the backward half of its autograd function, given what the forward half leaves for it."""
        context = SimpleNamespace(save_for_backward=lambda *tensors: None)
        seen: list[bool] = []

        def backward(given: tuple[Any, Any]) -> Any:
            y, dy = given
            if not seen:
                self.softmax.forward(context, y)
                seen.append(True)
            context.saved_tensors = (y,)
            return self.softmax.backward(context, dy)

        return backward
