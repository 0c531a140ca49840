"""The Triton (on a CPU, C++) kernels that torch.compile writes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.providers.torch_eager import Torch


class TorchCompile(Torch):
    """`torch.compile` of torch's function, for the case's shape alone."""

    name = "torch.compile"
    lazy = True

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns a function compiled anew."""
        self.torch.compiler.reset()
        compile = functools.partial(self.torch.compile, dynamic=False)
        if case.op == "cross_entropy_gradient":
            # Compiled with its gradient, which autograd asks for.
            return self._function(case, compile(self.torch.nn.functional.cross_entropy))
        function: Callable[[Any], Any] = compile(super().prepare(case, entry))
        return function
