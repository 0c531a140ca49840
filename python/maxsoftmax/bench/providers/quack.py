"""QuACK's CuTe kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from max.driver import Device

from maxsoftmax.bench.cases import Case, Entry
from maxsoftmax.bench.providers.base import only_last_axis
from maxsoftmax.bench.providers.torch_eager import Torch
from maxsoftmax.extension import distribution_version


class Quack(Torch):
    """`quack.softmax`."""

    name = "quack"
    lazy = True
    devices = ("gpu",)

    def __init__(self, device: Device, threads: int) -> None:
        super().__init__(device, threads)
        from quack.softmax import softmax

        self.softmax = softmax

    def version(self) -> str:
        """Returns QuACK's version."""
        return distribution_version("quack-kernels")

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns its function."""
        only_last_axis(case)
        # It takes matrices only.
        return lambda x: self.softmax(x.flatten(0, -2)).view_as(x)
