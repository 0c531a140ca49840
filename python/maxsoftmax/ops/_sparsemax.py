"""Sparsemax and its gradient, in graphs."""

from __future__ import annotations

from max.graph import TensorValue, TensorValueLike

from maxsoftmax._arguments import check_dtype
from maxsoftmax.ops._along import backward_op
from maxsoftmax.ops._values import add_op, as_tensor, axis_of


def sparsemax(x: TensorValueLike, axis: int = -1) -> TensorValue:
    """Adds sparsemax along one axis to the graph that is being built.

    Computes max(x - max x - t, 0), where t is what makes it sum to 1 along `axis`: the probabilities that are nearest
    to `x`, most of them exactly 0 (Martins and Astudillo 2016, arXiv 1602.02068).

    Args:
        x: Logits: any rank from 1, any dimensions; float32, bfloat16, float16 or float64.
        axis: The axis that will sum to 1; negative counts from the last.

    Returns:
        Probabilities, of the shape, dtype and device of `x`.

    Raises:
        TypeError: If `x` is not a tensor of floats of 16 to 64 bits, or `axis` is not an integer.
        ValueError: If `x` is a scalar, or there is no such axis.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> logits = TensorType(DType.float32, ("rows", 50257), DeviceRef.CPU())
        >>> with Graph("sparse", input_types=[logits]) as graph:
        ...     y = maxsoftmax.ops.sparsemax(graph.inputs[0])
        >>> y.shape
        [Dim('rows'), Dim(50257)]
    """
    x = as_tensor(x)
    check_dtype(x.dtype)
    (y,) = add_op("sparsemax", [x], [x.type], {"axis": axis_of(axis, x)})
    return y


def sparsemax_backward(y: TensorValueLike, dy: TensorValueLike, axis: int = -1) -> TensorValue:
    """Adds the gradient of the logits of `sparsemax`: where y is above 0, dy less its mean over all such, else 0.

    Args:
        y: What `sparsemax` returned.
        dy: The gradient of that: of the same shape, dtype and device.
        axis: The axis that sums to 1; negative counts from the last.

    Returns:
        The gradient of the logits, of the shape, dtype and device of `y`.

    Raises:
        TypeError: If an argument is not a tensor of floats of 16 to 64 bits, or the dtypes differ.
        ValueError: If shapes or devices differ, or there is no such axis.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> logits = TensorType(DType.float32, ("rows", 50257), DeviceRef.CPU())
        >>> with Graph("gradient", input_types=[logits, logits]) as graph:
        ...     y = maxsoftmax.ops.sparsemax(graph.inputs[0])
        ...     dx = maxsoftmax.ops.sparsemax_backward(y, graph.inputs[1])
        >>> dx.shape
        [Dim('rows'), Dim(50257)]
    """
    return backward_op("sparsemax_backward", y, dy, axis)
