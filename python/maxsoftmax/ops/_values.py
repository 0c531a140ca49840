"""Values of the graph that is being built, as the ops take them, and how an op is added to it."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
from max._core import Operation
from max._core.dialects.mo import GraphOp
from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, Graph, TensorType, TensorValue
from max.graph import ops as max_ops

from maxsoftmax._arguments import check_dtype, check_flag, normalize_axis, words
from maxsoftmax._graph.extension import extension


def bits_of(number: float) -> int:
    """Returns the bits of a double: as a float a parameter would be rounded to float32 on its way to the kernel."""
    return int(np.float64(number).view(np.int64))


def as_tensor(x: Any, name: str = "x") -> TensorValue:
    """Returns `x` as a tensor of the graph that is being built."""
    check_graph()
    try:
        value = TensorValue(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a tensor of the graph, not {x!r}") from error
    check_own(value, name)
    return value


def check_graph() -> None:
    """Refuses to add to no graph."""
    try:
        _ = Graph.current
    except LookupError:
        raise LookupError(
            "no graph is being built: use maxsoftmax.ops inside of `with Graph(...)`, and maxsoftmax itself for arrays"
        ) from None


def check_own(value: TensorValue | BufferValue, name: str) -> None:
    """Refuses a value of another graph, which MAX finds when it compiles this one, and tells by no name."""
    graph = Graph.current
    if graph._current_block != graph._graph_body:
        # MAX builds the branches of a conditional in a graph of their own, and moves them.
        return
    found: Any = value._mlir_value.owner
    while not isinstance(found, GraphOp):
        found = found.parent_op
    if found != Operation._from_cmlir(graph._mlir_op):
        raise ValueError(f"{name} is a value of another graph than {graph.name!r}, which is being built")


def axis_of(axis: Any, x: TensorValue, name: str = "x") -> int:
    """Returns an axis, counted from the first, or refuses it."""
    if x.rank == 0:
        raise ValueError(f"{name} has rank 0, but softmax needs an axis: reshape it to rank 1 first")
    return normalize_axis(axis, x.rank, name=name)


def check_like(value: TensorValue, name: str, dtype: DType, shape: Any, device: DeviceRef) -> None:
    """Refuses a tensor that does not go with the others."""
    if value.dtype != dtype:
        raise TypeError(f"{name} has dtype {value.dtype.name}, but here it needs {dtype.name}")
    if list(value.shape) != list(shape):
        raise ValueError(f"{name} has shape {words(value.shape)}, but here it needs {words(shape)}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, but the others are on {device}")


def check_device(value: TensorValue, name: str, other: Any, others: str) -> None:
    """Refuses a tensor that is on another device."""
    if value.device != other.device:
        raise ValueError(f"{name} is on {value.device}, but {others} is on {other.device}")


def as_gradient(value: Any, name: str, shape: Any, device: DeviceRef) -> TensorValue:
    """Returns the gradient of results of a shape, of any floating dtype."""
    gradient = as_tensor(value, name)
    check_dtype(gradient.dtype, name)
    check_like(gradient, name, gradient.dtype, shape, device)
    return gradient


def kept_dims(x: TensorValue, axis: int, keepdims: Any = False) -> list[Dim]:
    """Returns the shape of what has one value for each row of `x`."""
    one = [Dim(1)] if check_flag("keepdims", keepdims) else []
    return [*x.shape[:axis], *one, *x.shape[axis + 1 :]]


def product(dims: Any) -> Dim:
    """Returns the product of dimensions."""
    return functools.reduce(operator.mul, dims, Dim(1))


def add_op(
    op: str, values: list[TensorValue], results: list[TensorType], parameters: dict[str, Any]
) -> list[TensorValue]:
    """Adds one of our ops to the graph."""
    load_extension(Graph.current)
    found = max_ops.custom(op, device=values[0].device, values=values, out_types=results, parameters=parameters)
    return [value.tensor for value in found]


def load_extension(graph: Graph) -> None:
    """Gives `graph` the kernels unless it has them."""
    if "softmax" not in graph._kernel_library:
        graph._import_kernels([extension()])
