"""The Triton (on a CPU, C++) kernels that torch.compile writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maxsoftmax.bench.cases import Case, Entry
from maxsoftmax.bench.providers.torch_eager import Torch


class TorchCompile(Torch):
    """`torch.compile` of `torch.softmax`, for the case's shape alone."""

    name = "torch.compile"
    lazy = True

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns a function compiled anew."""
        self.torch.compiler.reset()
        function: Callable[[Any], Any] = self.torch.compile(super().prepare(case, entry), dynamic=False)
        return function
