"""What there is one of for each row, in graphs."""

from __future__ import annotations

from max.graph import TensorType, TensorValue, TensorValueLike
from max.graph import ops as max_ops

from maxsoftmax._arguments import accumulator, check_dtype
from maxsoftmax.ops._values import add_op, as_tensor, axis_of, kept_dims, product


def max_sum(x: TensorValueLike, axis: int = -1, *, keepdims: bool = False) -> tuple[TensorValue, TensorValue]:
    """Adds the pair that softmax is made of: m = max x and d = Σ exp(x - m) along one axis.

    Pairs of parts of a row merge into that of the whole row, on one device or several: with m = max(m₁, m₂), it is
    (m, d₁ · exp(m₁ - m) + d₂ · exp(m₂ - m)) (Milakov and Gimelshein 2018, arXiv 1805.02867).

    Args:
        x: Logits: any rank from 1, any dimensions; float32, bfloat16, float16 or float64.
        axis: The axis that is reduced; negative counts from the last.
        keepdims: Whether the axis stays, of length 1.

    Returns:
        m and d, of the shape of `x` without the axis unless `keepdims`: float64 if `x` is, else float32. An axis of
        length 0 and a row of nothing but -inf have (-inf, 0); NaN and +inf turn d to NaN.

    Raises:
        TypeError: If `x` is not a tensor of floats of 16 to 64 bits, or another argument is not of its type.
        ValueError: If `x` is a scalar, or there is no such axis.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> logits = TensorType(DType.float32, ("rows", 50257), DeviceRef.CPU())
        >>> with Graph("pairs", input_types=[logits]) as graph:
        ...     m, d = maxsoftmax.ops.max_sum(graph.inputs[0])
        >>> m.shape, d.shape
        ([Dim('rows')], [Dim('rows')])
    """
    x = as_tensor(x)
    check_dtype(x.dtype)
    place = axis_of(axis, x)
    kept = kept_dims(x, place, keepdims)
    type = TensorType(accumulator(x.dtype), [product(kept), 2], x.device)
    (pairs,) = add_op("max_sum", [x], [type], {"axis": place})
    m, d = (max_ops.reshape(pairs[:, i], kept) for i in range(2))
    return m, d


def logsumexp(x: TensorValueLike, axis: int = -1, *, keepdims: bool = False) -> TensorValue:
    """Adds ln Σ exp x along one axis, which overflows for no finite result.

    Args:
        x: Logits: any rank from 1, any dimensions; float32, bfloat16, float16 or float64.
        axis: The axis that is reduced; negative counts from the last.
        keepdims: Whether the axis stays, of length 1.

    Returns:
        The logarithms, of the shape of `x` without the axis unless `keepdims`, and of its dtype: -inf for nothing but
        -inf, NaN beside NaN, and else inf beside +inf.

    Raises:
        TypeError: If `x` is not a tensor of floats of 16 to 64 bits, or another argument is not of its type.
        ValueError: If `x` is a scalar, or there is no such axis.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> logits = TensorType(DType.float32, ("rows", 50257), DeviceRef.CPU())
        >>> with Graph("sums", input_types=[logits]) as graph:
        ...     y = maxsoftmax.ops.logsumexp(graph.inputs[0])
        >>> y.shape
        [Dim('rows')]
    """
    x = as_tensor(x)
    check_dtype(x.dtype)
    place = axis_of(axis, x)
    kept = kept_dims(x, place, keepdims)
    (y,) = add_op("logsumexp", [x], [TensorType(x.dtype, [product(kept)], x.device)], {"axis": place})
    return max_ops.reshape(y, kept)
