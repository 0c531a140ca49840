"""MAX's built-in ops, in a graph of nothing else, with symbolic dimensions as ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from max.driver import Device
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops

from maxsoftmax._bench.cases import KEPT, SCALE, SPELLED, Case, Entry
from maxsoftmax._bench.providers.base import Provider
from maxsoftmax._graph.extension import distribution_version


class MaxBuiltin(Provider):
    """`max.graph.ops.softmax` and `logsoftmax`."""

    name = "max"
    ops = ("softmax", "log_softmax", *SPELLED)
    late = True

    def version(self) -> str:
        """Returns MAX's version."""
        return distribution_version("max", "modular")

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns the compiled graph."""
        return self._function(case.like)

    @functools.cache  # noqa: B019 (a provider lives as long as the run)
    def _function(self, like: Case) -> Callable[[Any], Any]:
        return of_graph(like, self.device)


def of_graph(
    case: Case, device: Device, change: Callable[[Graph], object] = lambda graph: None
) -> Callable[[Any], Any]:
    """Returns the compiled graph, for any shape, of an op that MAX has or of one made of those.

    Args:
        case: What to compute.
        device: Where.
        change: What is done to the graph before it is compiled.
    """
    axis = case.place
    functions: dict[str, Callable[[TensorValue], TensorValue]] = {
        "softmax": lambda x: ops.softmax(x, axis=axis),
        "log_softmax": lambda x: ops.logsoftmax(x, axis=axis),
        "scaled_softmax": lambda x: ops.softmax(x * SCALE, axis=axis),
        "rescaled_softmax": lambda x: ops.softmax(x * SCALE, axis=axis) * KEPT,
        "causal_softmax": _causal,
    }
    dims = [f"d{i}" for i in range(len(case.shape))]
    x_type = TensorType(case.dtype, dims, DeviceRef.from_device(device))
    graph = Graph(case.op, functions[case.op], input_types=[x_type])
    change(graph)
    model = InferenceSession(devices=[device]).load(graph)
    return lambda x: model.execute(x)[0]


def _causal(x: TensorValue) -> TensorValue:
    queries, keys = (
        ops.range(0, dim, 1, out_dim=dim, dtype=DType.int32, device=x.device) for dim in (x.shape[-2], x.shape[-1])
    )
    # In one step each: MAX 26.7 computes wrongly what is broadcast, compared and broadcast again.
    seen = ops.broadcast_to(ops.unsqueeze(queries, 1), x.shape) >= ops.broadcast_to(keys, x.shape)
    return ops.softmax(ops.where(seen, x, ops.constant(float("-inf"), x.dtype, x.device)))
