"""MAX's built-in op, in a graph of nothing else, with symbolic dimensions as ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, ops

from maxsoftmax.bench.cases import Case, Entry
from maxsoftmax.bench.providers.base import Provider
from maxsoftmax.extension import distribution_version


class MaxBuiltin(Provider):
    """`max.graph.ops.softmax` and `logsoftmax`."""

    name = "max"
    ops = ("softmax", "log_softmax")

    def version(self) -> str:
        """Returns MAX's version."""
        return distribution_version("max", "modular")

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns the compiled graph."""
        model = self._model(case.op, case.dtype, len(case.shape), case.place)
        return lambda x: model.execute(x)[0]

    @functools.cache  # noqa: B019 (a provider lives as long as the run)
    def _model(self, op: str, dtype: DType, rank: int, axis: int) -> Model:
        dims = [f"d{i}" for i in range(rank)]
        x_type = TensorType(dtype, dims, DeviceRef.from_device(self.device))
        function = {"softmax": ops.softmax, "log_softmax": ops.logsoftmax}[op]
        graph = Graph("builtin", lambda x: function(x, axis=axis), input_types=[x_type])
        return InferenceSession(devices=[self.device]).load(graph)
