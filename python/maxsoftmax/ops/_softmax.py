"""Softmax, its logarithm and their gradients, in graphs."""

from __future__ import annotations

from max.dtype import DType
from max.graph import TensorValue, TensorValueLike

from maxsoftmax import _forms as forms
from maxsoftmax._arguments import check_algorithm, check_dtype, check_flag
from maxsoftmax._forms import Forms
from maxsoftmax._graph import tuning
from maxsoftmax._types import Algorithm
from maxsoftmax.ops._along import along_op, backward_op, checked_out
from maxsoftmax.ops._formed import with_forms
from maxsoftmax.ops._values import add_op, as_tensor, axis_of


def softmax(
    x: TensorValueLike,
    axis: int = -1,
    *,
    scale: float | TensorValueLike | None = None,
    mask: TensorValueLike | None = None,
    causal: bool = False,
    temperature: float | TensorValueLike | None = None,
    sink: TensorValueLike | None = None,
    out_dtype: DType | str | None = None,
    out_scale: float | None = None,
    algorithm: Algorithm = "auto",
    block_size: int | None = None,
    unroll: int | None = None,
) -> TensorValue:
    """Adds softmax along one axis to the graph that is being built.

    Computes exp(z - max z) / (Σ exp(z - max z) + exp(sink - max z)) along `axis`, in float32 or wider, where z is
    (x · scale + mask) / temperature. The kernel runs where `x` lives, and computes z as it reads `x`, as well as, by
    "auto", what MAX can fuse of how the graph computes `x`. The graph should be given `maxsoftmax.extension()` in
    its `custom_extensions`; one that was not is given it here.

    Args:
        x: Logits: any rank from 1, any dimensions (static or symbolic, 0 included); float32, bfloat16, float16 or
            float64.
        axis: The axis that will sum to 1; negative counts from the last.
        scale: A number, or a tensor that broadcasts to `x`, such as 1/√d.
        mask: A tensor that broadcasts to `x`: of bools, True where an element takes part, or of floats to be added.
            Where there is a mask, causal or not, a row in which nothing takes part is 0, as in attention, and not NaN.
        causal: Whether `axis` is that of keys, after one of queries, and a query sees no key after it. Both are counted
            from their end, so that the last query sees every key, however many there are of either.
        temperature: A positive number, or a tensor of them that broadcasts to `x`, such as one for each row.
        sink: Logits that take part in the denominator only, one a row: a tensor that broadcasts to `x` with `axis` of
            length 1. One for each head of (batch, heads, queries, keys) has the shape (heads, 1, 1).
        out_dtype: What the result is of, rounded once from the accumulator: a `max.dtype.DType` or its name: float32,
            bfloat16, float16, float8_e4m3fn, float8_e5m2, or that of `x`; that if None. What is too large for float8
            becomes 448 of float8_e4m3fn, and infinity of float8_e5m2. MAX has float8 on GPUs only.
        out_scale: A positive number that the result is multiplied by before it is rounded, where it is of float8.
        algorithm: "auto", or the name of a kernel that the device has.
        block_size: Threads a block, where a GPU kernel was named: a power of two up to 1024; 128 if None.
        unroll: Vectors that a thread has under way at a time, for "vector" and "online": 1, 2, 4 or 8; 4 if None.
            Where neither is given, these two use what `maxsoftmax tune` found for the GPU, if it was run.

    Returns:
        Probabilities, of the shape and device of `x`, and of its dtype if there is no `out_dtype`.

    Raises:
        TypeError: If the dtype of `x` or the type of another argument is not one of these.
        ValueError: If `x` is a scalar, there is no such axis, algorithm, block size or unroll, a tensor does not
            broadcast, a number is not allowed, or `algorithm` is not "auto" and cannot do what was asked for.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> scores = TensorType(DType.float32, (8, 1024, 1024), DeviceRef.GPU())
        >>> with Graph("attention", input_types=[scores]) as graph:
        ...     y = maxsoftmax.ops.softmax(graph.inputs[0], out_dtype="float8_e4m3fn", out_scale=448)
        >>> y.dtype.name
        'float8_e4m3fn'
    """
    x = as_tensor(x)
    device = "gpu" if x.device.is_gpu() else "cpu"
    check_dtype(x.dtype)
    axis = axis_of(axis, x)
    check_algorithm(algorithm, device)
    choice = tuning.choice(x.device, algorithm, x.dtype, block_size, unroll)
    wanted = Forms(scale, mask, check_flag("causal", causal), temperature, sink)
    forms.check(wanted, axis, algorithm)
    out = checked_out(out_dtype, out_scale, x, algorithm)
    if wanted.any:
        return with_forms(x, axis, wanted, out)
    if algorithm == "auto":
        # What computes `x` may be fused into the kernel, and what is computed of its result.
        y = along_op("softmax_fused", x, axis, out)
    else:
        (y,) = add_op("softmax", [x], [x.type], {"axis": axis, "algorithm": algorithm, **choice._asdict()})
    return y


def log_softmax(
    x: TensorValueLike,
    axis: int = -1,
    *,
    out_dtype: DType | str | None = None,
    out_scale: float | None = None,
) -> TensorValue:
    """Adds the logarithm of softmax along one axis to the graph that is being built.

    Computes (x - max x) - ln Σ exp(x - max x) along `axis`, with the kernels of softmax, which compute as they read and
    write what MAX can fuse of how the graph computes `x`, or of what it computes of the result.

    Args:
        x: Logits: any rank from 1, any dimensions; float32, bfloat16, float16 or float64.
        axis: The axis along which probabilities sum to 1; negative counts from the last.
        out_dtype: What the result is of, rounded once from the accumulator: a `max.dtype.DType` or its name: float32,
            bfloat16, float16, float8_e4m3fn, float8_e5m2, or that of `x`; that if None. -inf becomes -448 of
            float8_e4m3fn, which has no infinity. MAX has float8 on GPUs only.
        out_scale: A positive number that the result is multiplied by before it is rounded, where it is of float8.

    Returns:
        Logarithms of probabilities, of the shape and device of `x`, and of its dtype if there is no `out_dtype`; -inf
        where the logit is.

    Raises:
        TypeError: If `x` is not a tensor of floats of 16 to 64 bits, or another argument is not of its type.
        ValueError: If `x` is a scalar, there is no such axis, or `out_scale` is not allowed.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> logits = TensorType(DType.float32, ("rows", 50257), DeviceRef.CPU())
        >>> with Graph("scores", input_types=[logits]) as graph:
        ...     y = maxsoftmax.ops.log_softmax(graph.inputs[0])
        >>> y.shape, y.dtype.name
        ([Dim('rows'), Dim(50257)], 'float32')
    """
    x = as_tensor(x)
    check_dtype(x.dtype)
    out = checked_out(out_dtype, out_scale, x)
    return along_op("log_softmax", x, axis_of(axis, x), out)


def softmax_backward(y: TensorValueLike, dy: TensorValueLike, axis: int = -1) -> TensorValue:
    """Adds the gradient of the logits of `softmax`: dx = y · (dy - Σ y·dy) along `axis`.

    Args:
        y: What `softmax` returned.
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
        ...     y = maxsoftmax.ops.softmax(graph.inputs[0])
        ...     dx = maxsoftmax.ops.softmax_backward(y, graph.inputs[1])
        >>> dx.shape
        [Dim('rows'), Dim(50257)]
    """
    return backward_op("softmax_backward", y, dy, axis, log=False)


def log_softmax_backward(y: TensorValueLike, dy: TensorValueLike, axis: int = -1) -> TensorValue:
    """Adds the gradient of the logits of `log_softmax`: dx = dy - e^y · Σ dy along `axis`.

    Args:
        y: What `log_softmax` returned.
        dy: The gradient of that: of the same shape, dtype and device.
        axis: The axis along which probabilities sum to 1; negative counts from the last.

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
        ...     y = maxsoftmax.ops.log_softmax(graph.inputs[0])
        ...     dx = maxsoftmax.ops.log_softmax_backward(y, graph.inputs[1])
        >>> dx.shape
        [Dim('rows'), Dim(50257)]
    """
    return backward_op("softmax_backward", y, dy, axis, log=True)
