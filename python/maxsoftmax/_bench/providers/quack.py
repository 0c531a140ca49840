"""QuACK's CuTe kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from max.driver import Device

from maxsoftmax._bench.cases import OPS, Case, Entry
from maxsoftmax._bench.providers.base import only_last_axis
from maxsoftmax._bench.providers.torch_eager import Torch
from maxsoftmax._graph.extension import distribution_version


class Quack(Torch):
    """`quack.softmax` and `quack.cross_entropy`."""

    name = "quack"
    lazy = True
    ops: ClassVar[tuple[str, ...]] = ("softmax", "softmax_backward", "cross_entropy", "cross_entropy_gradient")
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
        if case.op == "softmax_backward":
            from quack.softmax import softmax_bwd

            return lambda given: softmax_bwd(given[1].flatten(0, -2), given[0].flatten(0, -2)).view_as(given[0])
        if OPS[case.op].losses:
            from quack.cross_entropy import cross_entropy

            return self._function(case, cross_entropy)
        # It takes matrices only.
        return lambda x: self.softmax(x.flatten(0, -2)).view_as(x)
