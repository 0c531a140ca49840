"""Liger's Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from max.driver import Device

from maxsoftmax.bench.cases import Case, Entry
from maxsoftmax.bench.providers.base import only_last_axis
from maxsoftmax.bench.providers.torch_eager import Torch
from maxsoftmax.extension import distribution_version


class Liger(Torch):
    """`liger_kernel.ops.softmax`."""

    name = "liger"
    lazy = True
    devices = ("gpu",)

    def __init__(self, device: Device, threads: int) -> None:
        super().__init__(device, threads)
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        self.softmax = LigerSoftmaxFunction.apply

    def version(self) -> str:
        """Returns Liger's version."""
        return distribution_version("liger-kernel")

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns its function, forward only."""
        only_last_axis(case)
        softmax: Callable[[Any], Any] = self.softmax
        return softmax
