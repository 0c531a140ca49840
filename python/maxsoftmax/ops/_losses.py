"""Cross entropy and its gradient, in graphs."""

from __future__ import annotations

from typing import Any, NamedTuple

from max.graph import BufferValue, Graph, TensorType, TensorValue, TensorValueLike
from max.graph import ops as max_ops

from maxsoftmax._arguments import (
    accumulator,
    check_dtype,
    check_ignore_index,
    check_label_smoothing,
    check_reduction,
    check_target_dtype,
    check_target_shape,
)
from maxsoftmax._types import Reduction
from maxsoftmax.ops._values import (
    add_op,
    as_tensor,
    bits_of,
    check_device,
    check_graph,
    check_like,
    check_own,
    load_extension,
    product,
)


def cross_entropy(
    x: TensorValueLike,
    target: TensorValueLike,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> TensorValue:
    """Adds the cross entropy of logits and target classes, -ln softmax(x)[target], as PyTorch defines it.

    No probabilities are stored: logits are read once (twice with `label_smoothing`).

    Args:
        x: Logits: (n,), (rows, n), or (rows, n, …) with the classes along axis 1; of floats of 16 to 64 bits.
        target: The class of each row: of the shape of `x` without the classes, int32 or int64, from 0 to n - 1 or
            `ignore_index`. On a CPU another one is an error when the graph runs; on a GPU it makes the row's loss NaN.
        ignore_index: The target of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.
        reduction: "mean" over the rows that count, NaN if there are none; "sum"; or "none" for one loss a row.

    Returns:
        The loss: a scalar, or of the shape of `target`; of the dtype of `x`.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes or devices do not fit, or another argument is not one of these.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> logits = TensorType(DType.float32, ("rows", 50257), DeviceRef.CPU())
        >>> classes = TensorType(DType.int64, ("rows",), DeviceRef.CPU())
        >>> with Graph("loss", input_types=[logits, classes]) as graph:
        ...     loss = maxsoftmax.ops.cross_entropy(*graph.inputs, reduction="none")
        >>> loss.shape
        [Dim('rows')]
    """
    return cross_entropy_forward(
        x, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )[0]


def cross_entropy_forward(
    x: TensorValueLike,
    target: TensorValueLike,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> tuple[TensorValue, TensorValue]:
    """Adds `cross_entropy` and returns beside it what its gradient needs.

    Args:
        x: Logits: (n,), (rows, n), or (rows, n, …) with the classes along axis 1; float32, bfloat16, float16 or
            float64.
        target: The class of each row: of the shape of `x` without the classes, int32 or int64.
        ignore_index: The target of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.
        reduction: "mean" over the rows that count, "sum", or "none" for one loss a row.

    Returns:
        The loss, and the pairs m = max x and d = Σ exp(x - m) of all rows: of the shape of `target` and another axis,
        of 2.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes or devices do not fit, or another argument is not one of these.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> logits = TensorType(DType.float32, ("rows", 50257), DeviceRef.CPU())
        >>> classes = TensorType(DType.int64, ("rows",), DeviceRef.CPU())
        >>> with Graph("loss", input_types=[logits, classes]) as graph:
        ...     loss, pairs = maxsoftmax.ops.cross_entropy_forward(*graph.inputs)
        >>> loss.shape, pairs.shape
        ([], [Dim('rows'), Dim(2)])
    """
    x = as_tensor(x)
    target, place = _classes(x, target)
    parameters = choices_of(place, ignore_index, label_smoothing, reduction)
    rows = product(target.shape)
    each = reduction == "none"
    loss, pairs = add_op(
        "cross_entropy",
        [x, max_ops.reshape(target, [rows])],
        [
            TensorType(x.dtype, [rows if each else 1], x.device),
            TensorType(accumulator(x.dtype), [rows, 2], x.device),
        ],
        parameters,
    )
    return max_ops.reshape(loss, target.shape if each else []), max_ops.reshape(pairs, [*target.shape, 2])


def cross_entropy_backward(
    x: TensorValueLike,
    target: TensorValueLike,
    pairs: TensorValueLike,
    dloss: TensorValueLike | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> TensorValue:
    """Adds the gradient of the logits of `cross_entropy`: (softmax(x) - target) · dloss, in one read and one write.

    Args:
        x: Logits: (n,), (rows, n), or (rows, n, …) with the classes along axis 1; float32, bfloat16, float16 or
            float64.
        target: The class of each row: of the shape of `x` without the classes, int32 or int64.
        pairs: The pairs that `cross_entropy_forward` returned.
        dloss: The gradient of the loss, of its shape and a floating dtype; 1 if None.
        ignore_index: The target of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.
        reduction: "mean" over the rows that count, "sum", or "none" for one loss a row.

    Returns:
        The gradient, of the shape, dtype and device of `x`: 0 in rows that do not count.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes or devices do not fit, or another argument is not one of these.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> logits = TensorType(DType.float32, ("rows", 50257), DeviceRef.CPU())
        >>> classes = TensorType(DType.int64, ("rows",), DeviceRef.CPU())
        >>> with Graph("loss", input_types=[logits, classes]) as graph:
        ...     loss, pairs = maxsoftmax.ops.cross_entropy_forward(*graph.inputs)
        ...     dx = maxsoftmax.ops.cross_entropy_backward(*graph.inputs, pairs)
        >>> dx.shape
        [Dim('rows'), Dim(50257)]
    """
    x = as_tensor(x)
    op = _gradient(
        x, target, pairs, dloss, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    (dx,) = add_op("cross_entropy_backward", [x, *op.values], [x.type], op.parameters)
    return dx


def cross_entropy_backward_(
    x: BufferValue,
    target: TensorValueLike,
    pairs: TensorValueLike,
    dloss: TensorValueLike | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> None:
    """Adds what `cross_entropy_backward` does, written over the logits: there is no second tensor of their size.

    Args:
        x: A buffer of logits, (n,), (rows, n) or (rows, n, …), which are the gradient from then on. What reads it as
            logits has to be added before.
        target: The class of each row: of the shape of `x` without the classes, int32 or int64.
        pairs: The pairs that `cross_entropy_forward` returned.
        dloss: The gradient of the loss, of its shape and a floating dtype; 1 if None.
        ignore_index: The target of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.
        reduction: "mean" over the rows that count, "sum", or "none" for one loss a row.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes or devices do not fit, or another argument is not one of these.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import BufferType, DeviceRef, Graph, TensorType
        >>> logits = BufferType(DType.float32, ("rows", 50257), DeviceRef.CPU())
        >>> classes = TensorType(DType.int64, ("rows",), DeviceRef.CPU())
        >>> with Graph("loss", input_types=[logits, classes]) as graph:
        ...     x, target = graph.inputs
        ...     loss, pairs = maxsoftmax.ops.cross_entropy_forward(x[...], target)
        ...     maxsoftmax.ops.cross_entropy_backward_(x, target, pairs)
    """
    check_graph()
    if not isinstance(x, BufferValue):
        raise TypeError(f"x must be a buffer of the graph (max.graph.BufferValue), not {x!r}")
    check_own(x, "x")
    op = _gradient(
        x, target, pairs, dloss, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    load_extension(Graph.current)
    max_ops.inplace_custom(
        "cross_entropy_backward_in_place", device=x.device, values=[x, *op.values], parameters=op.parameters
    )


class _Call(NamedTuple):
    """What an op takes beside its logits."""

    values: list[TensorValue]
    parameters: dict[str, Any]


def _gradient(
    x: TensorValue | BufferValue,
    target: Any,
    pairs: Any,
    dloss: Any,
    *,
    ignore_index: Any,
    label_smoothing: Any,
    reduction: Any,
) -> _Call:
    """Returns what the gradient of a loss takes."""
    target, place = _classes(x, target)
    parameters = choices_of(place, ignore_index, label_smoothing, reduction)
    wide, rows = accumulator(x.dtype), product(target.shape)
    pairs = as_tensor(pairs, "pairs")
    check_like(pairs, "pairs", wide, [*target.shape, 2], x.device)
    each = reduction == "none"
    if dloss is None:
        ones = max_ops.constant(1.0, wide, x.device)
        scales = max_ops.broadcast_to(max_ops.reshape(ones, [1]), [rows if each else 1])
    else:
        dloss = as_tensor(dloss, "dloss")
        check_like(dloss, "dloss", dloss.dtype, list(target.shape) if each else [], x.device)
        scales = max_ops.reshape(max_ops.cast(dloss, wide), [rows if each else 1])
    return _Call([max_ops.reshape(target, [rows]), max_ops.reshape(pairs, [rows, 2]), scales], parameters)


def _classes(x: TensorValue | BufferValue, target: Any) -> tuple[TensorValue, int]:
    """Returns targets that fit the logits, and the axis of the classes."""
    target = as_tensor(target, "target")
    check_dtype(x.dtype)
    check_target_dtype(target.dtype)
    place = check_target_shape(target.shape, x.shape)
    check_device(target, "target", x, "x")
    return target, place


def choices_of(place: int, ignore_index: Any, label_smoothing: Any, reduction: Any) -> dict[str, Any]:
    """Returns the parameters of an op of losses, or refuses what was chosen."""
    return {
        "axis": place,
        "ignore_index": check_ignore_index(ignore_index),
        "smoothing": bits_of(check_label_smoothing(label_smoothing)),
        "reduction": check_reduction(reduction),
        "classes": 0,
    }
