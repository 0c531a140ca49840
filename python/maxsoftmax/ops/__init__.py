"""Softmax, its relatives and their gradients, for the values of a `max.graph.Graph`.

The graph should be given `maxsoftmax.extension()` in its `custom_extensions`; one that was not is given it here. All
kernels run where their first argument lives, in float32 or wider.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from max._core import Operation
from max._core.dialects.mo import GraphOp
from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, Graph, TensorType, TensorValue, TensorValueLike
from max.graph import ops as max_ops

from maxsoftmax import _forms as forms
from maxsoftmax._arguments import (
    FLOAT8,
    Out,
    accumulator,
    check_algorithm,
    check_chunk,
    check_dtype,
    check_flag,
    check_ignore_index,
    check_label_smoothing,
    check_out,
    check_reduction,
    check_softcap,
    check_target_dtype,
    check_target_shape,
    check_temperature,
    check_tokens_shape,
    check_z_loss,
    is_number,
    normalize_axis,
    words,
)
from maxsoftmax._forms import Forms
from maxsoftmax._graph import tuning
from maxsoftmax._graph.extension import extension
from maxsoftmax._types import Algorithm, Reduction

__all__ = [
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_backward_",
    "cross_entropy_forward",
    "kl_divergence",
    "kl_divergence_backward",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "linear_token_log_probs",
    "linear_token_log_probs_backward",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "max_sum",
    "softmax",
    "softmax_backward",
    "sparsemax",
    "sparsemax_backward",
    "token_log_probs",
    "token_log_probs_backward",
]


def __dir__() -> list[str]:
    """Returns what there is to use here, without what it is made of."""
    return sorted({*__all__, "sharded"})


_OPERANDS = ("scale", "mask", "temperature", "sink")
"""What logits may be scaled, masked or divided by, and what is added to their denominator, as the op takes them."""

_BEFORE, _AFTER = 4, 1
"""How many dimensions there may be before and after the axis for the op that reads them in memory."""


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
    x = _value(x)
    device = "gpu" if x.device.is_gpu() else "cpu"
    check_dtype(x.dtype)
    axis = _axis(axis, x)
    check_algorithm(algorithm, device)
    choice = tuning.choice(x.device, algorithm, x.dtype, block_size, unroll)
    wanted = Forms(scale, mask, check_flag("causal", causal), temperature, sink)
    forms.check(wanted, axis, algorithm)
    out = _out(out_dtype, out_scale, x, algorithm)
    if wanted.any:
        return _with_forms(x, axis, wanted, out)
    if algorithm == "auto":
        # What computes `x` may be fused into the kernel, and what is computed of its result.
        y = _fused("softmax_fused", x, axis, out)
    else:
        (y,) = _call("softmax", [x], [x.type], {"axis": axis, "algorithm": algorithm, **choice._asdict()})
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
    x = _value(x)
    check_dtype(x.dtype)
    out = _out(out_dtype, out_scale, x)
    return _fused("log_softmax", x, _axis(axis, x), out)


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
    return _backward("softmax_backward", y, dy, axis, log=False)


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
    return _backward("softmax_backward", y, dy, axis, log=True)


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
    x = _value(x)
    check_dtype(x.dtype)
    (y,) = _call("sparsemax", [x], [x.type], {"axis": _axis(axis, x)})
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
    return _backward("sparsemax_backward", y, dy, axis)


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
    x = _value(x)
    check_dtype(x.dtype)
    place = _axis(axis, x)
    kept = _reduced(x, place, keepdims)
    type = TensorType(accumulator(x.dtype), [_product(kept), 2], x.device)
    (pairs,) = _call("max_sum", [x], [type], {"axis": place})
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
    x = _value(x)
    check_dtype(x.dtype)
    place = _axis(axis, x)
    kept = _reduced(x, place, keepdims)
    (y,) = _call("logsumexp", [x], [TensorType(x.dtype, [_product(kept)], x.device)], {"axis": place})
    return max_ops.reshape(y, kept)


@overload
def token_log_probs(
    x: TensorValueLike,
    tokens: TensorValueLike,
    axis: int = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[False] = ...,
) -> TensorValue: ...
@overload
def token_log_probs(
    x: TensorValueLike,
    tokens: TensorValueLike,
    axis: int = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[True],
) -> tuple[TensorValue, TensorValue]: ...
@overload
def token_log_probs(
    x: TensorValueLike, tokens: TensorValueLike, axis: int = ..., *, temperature: float | None = ..., entropy: bool
) -> TensorValue | tuple[TensorValue, TensorValue]: ...
def token_log_probs(
    x: TensorValueLike,
    tokens: TensorValueLike,
    axis: int = -1,
    *,
    temperature: float | None = None,
    entropy: bool = False,
) -> TensorValue | tuple[TensorValue, TensorValue]:
    """Adds the logarithms of the probabilities of some tokens of each row, and the entropy of the row if asked for.

    These are the elements of `log_softmax(x / temperature)` that `tokens` names, without the others. The bits of a row
    depend on nothing but the row, its tokens' included, and are the same with and without the entropy. Logits are
    read once, on a CPU twice with the entropy.

    Args:
        x: Logits: any rank from 1, any dimensions; float32, bfloat16, float16 or float64.
        tokens: Which elements of each row: of the shape of `x` without `axis`, or with `axis` of another length, for
            as many tokens a row; int32 or int64. What is not from 0 to n - 1 has the logarithm NaN.
        axis: The axis of the tokens' probabilities; negative counts from the last.
        temperature: A positive number that logits are divided by; 1 if None.
        entropy: Whether to return the entropy of each row, too: -Σ p ln p.

    Returns:
        The logarithms, of the shape of `tokens`, or with `entropy` a tuple of them and the entropies, of the shape of
        `x` without `axis`: float64 if `x` is, else float32.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes or devices do not fit, there is no such axis, or the temperature is not allowed.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> logits = TensorType(DType.float32, ("rows", 50257), DeviceRef.CPU())
        >>> classes = TensorType(DType.int64, ("rows",), DeviceRef.CPU())
        >>> with Graph("tokens", input_types=[logits, classes]) as graph:
        ...     y, entropy = maxsoftmax.ops.token_log_probs(*graph.inputs, temperature=0.7, entropy=True)
        >>> y.shape, entropy.shape
        ([Dim('rows')], [Dim('rows')])
    """
    asked = _asked(x, tokens, axis, temperature)
    wanted = check_flag("entropy", entropy)
    log_probs, entropies, _ = _token_log_probs(*asked[:5], wanted)
    return (asked.turned(log_probs), max_ops.reshape(entropies, asked.kept)) if wanted else asked.turned(log_probs)


def token_log_probs_backward(
    x: TensorValueLike,
    tokens: TensorValueLike,
    dlog_probs: TensorValueLike,
    dentropy: TensorValueLike | None = None,
    axis: int = -1,
    *,
    temperature: float | None = None,
) -> TensorValue:
    """Adds the gradient of the logits of `token_log_probs`: Σ g_t (1 where t - p), and that of the entropy, over T.

    What rows sum to is found again, in one more read.

    Args:
        x: Logits: any rank from 1, any dimensions; float32, bfloat16, float16 or float64.
        tokens: Which elements of each row: (…), or (…, k) for k a row. What is not from 0 to n - 1 has no gradient if
            its own is 0, and else makes the row NaN.
        dlog_probs: The gradients of the logarithms: of the shape of `tokens` and a floating dtype.
        dentropy: The gradients of the entropies: of the shape of `x` without `axis` and a floating dtype; None for 0.
        axis: The axis of the tokens' probabilities; negative counts from the last.
        temperature: A positive number that logits are divided by; 1 if None.

    Returns:
        The gradient, of the shape, dtype and device of `x`.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes or devices do not fit, there is no such axis, or the temperature is not allowed.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> logits = TensorType(DType.float32, ("rows", 50257), DeviceRef.CPU())
        >>> classes = TensorType(DType.int64, ("rows",), DeviceRef.CPU())
        >>> upstream = TensorType(DType.float32, ("rows",), DeviceRef.CPU())
        >>> with Graph("tokens", input_types=[logits, classes, upstream]) as graph:
        ...     dx = maxsoftmax.ops.token_log_probs_backward(*graph.inputs)
        >>> dx.shape
        [Dim('rows'), Dim(50257)]
    """
    asked = _asked(x, tokens, axis, temperature)
    wide, wanted = accumulator(asked.x.dtype), dentropy is not None
    upstream = _value(dlog_probs, "dlog_probs")
    check_dtype(upstream.dtype, "dlog_probs")
    _check(upstream, "dlog_probs", upstream.dtype, asked.shape, asked.x.device)
    of_entropies = None if dentropy is None else _value(dentropy, "dentropy")
    if of_entropies is not None:
        check_dtype(of_entropies.dtype, "dentropy")
        _check(of_entropies, "dentropy", of_entropies.dtype, asked.kept, asked.x.device)
    *_, sums = _token_log_probs(*asked[:5], wanted)
    rows = sums.shape[0]
    taken = max_ops.reshape(asked.by_row(max_ops.cast(upstream, wide)), [rows, asked.each])
    last = max_ops.constant(0.0, wide, asked.x.device) if of_entropies is None else max_ops.cast(of_entropies, wide)
    last = max_ops.reshape(last, [rows if wanted else 1])
    parameters = {"axis": asked.place, "temperature": _bits(asked.temperature), "has_entropy": wanted}
    (dx,) = _call("token_log_probs_backward", [asked.x, sums, asked.tokens, taken, last], [asked.x.type], parameters)
    return dx


def kl_divergence(
    x: TensorValueLike,
    teacher: TensorValueLike,
    axis: int = -1,
    *,
    temperature: float | None = None,
    reverse: bool = False,
) -> TensorValue:
    """Adds the KL divergence between the probabilities of a teacher's logits and of `x`, a number for each row.

    With p = softmax(teacher / temperature) and q = softmax(x / temperature) it is Σ p (ln p - ln q), the forward
    divergence; reverse, p and q change places. Both tensors are read once, on a CPU a second time from its caches.

    Args:
        x: Logits of the student: any rank from 1, any dimensions; float32, bfloat16, float16 or float64.
        teacher: Logits of the same shape, dtype and device.
        axis: The axis of the probabilities; negative counts from the last.
        temperature: A positive number that both are divided by; 1 if None.
        reverse: Whether the divergence is that of the student from the teacher.

    Returns:
        The divergences, of the shape of `x` without `axis`: float64 if `x` is, else float32. Infinite where q is 0 and
        p is not, NaN where softmax of either is. Distillation takes their mean, often times temperature².

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes or devices do not fit, there is no such axis, or the temperature is not allowed.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> logits = TensorType(DType.float32, ("rows", 50257), DeviceRef.CPU())
        >>> with Graph("distillation", input_types=[logits, logits]) as graph:
        ...     kl = maxsoftmax.ops.kl_divergence(*graph.inputs, temperature=2.0)
        >>> kl.shape
        [Dim('rows')]
    """
    x, sides, place, chosen, _ = _divergence(x, teacher, axis, temperature, reverse)
    return _kl_and_sums(x, sides, place, chosen)[0]


def kl_divergence_backward(
    x: TensorValueLike,
    teacher: TensorValueLike,
    dkl: TensorValueLike | None = None,
    axis: int = -1,
    *,
    temperature: float | None = None,
    reverse: bool = False,
) -> tuple[TensorValue, TensorValue]:
    """Adds what `kl_divergence` does, and with it the gradient of `x`, in one more read of both tensors and one write.

    Args:
        x: Logits of the student: float32, bfloat16, float16 or float64.
        teacher: Logits of the same shape, dtype and device.
        dkl: The gradient of the divergences, of their shape and a floating dtype; 1 if None.
        axis: The axis of the probabilities; negative counts from the last.
        temperature: A positive number that both are divided by; 1 if None.
        reverse: Whether the divergence is that of the student from the teacher.

    Returns:
        The divergences, and the gradient of `x`, of its shape, dtype and device.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes or devices do not fit, there is no such axis, or the temperature is not allowed.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> logits = TensorType(DType.float32, ("rows", 50257), DeviceRef.CPU())
        >>> with Graph("distillation", input_types=[logits, logits]) as graph:
        ...     kl, dx = maxsoftmax.ops.kl_divergence_backward(*graph.inputs, temperature=2.0)
        >>> dx.shape
        [Dim('rows'), Dim(50257)]
    """
    x, sides, place, chosen, of_p = _divergence(x, teacher, axis, temperature, reverse)
    kl, sums = _kl_and_sums(x, sides, place, chosen)
    if dkl is None:
        dkl = max_ops.broadcast_to(max_ops.constant(1.0, kl.dtype, x.device), kl.shape)
    else:
        dkl = _value(dkl, "dkl")
        check_dtype(dkl.dtype, "dkl")
        _check(dkl, "dkl", dkl.dtype, kl.shape, x.device)
    parameters = {"axis": place, "temperature": _bits(chosen), "of_p": of_p}
    scales = max_ops.reshape(max_ops.cast(dkl, kl.dtype), [sums.shape[0]])
    (dx,) = _call("kl_divergence_backward", [*sides, sums, scales], [x.type], parameters)
    return kl, dx


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
    x = _value(x)
    target, place = _classes(x, target)
    parameters = _choices(place, ignore_index, label_smoothing, reduction)
    rows = _product(target.shape)
    each = reduction == "none"
    loss, pairs = _call(
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
    x = _value(x)
    op = _gradient(
        x, target, pairs, dloss, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    (dx,) = _call("cross_entropy_backward", [x, *op.values], [x.type], op.parameters)
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
    _check_graph()
    if not isinstance(x, BufferValue):
        raise TypeError(f"x must be a buffer of the graph (max.graph.BufferValue), not {x!r}")
    _check_own(x, "x")
    op = _gradient(
        x, target, pairs, dloss, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    _load_extension(Graph.current)
    max_ops.inplace_custom(
        "cross_entropy_backward_in_place", device=x.device, values=[x, *op.values], parameters=op.parameters
    )


def linear_cross_entropy(
    hidden: TensorValueLike,
    weight: TensorValueLike,
    target: TensorValueLike,
    bias: TensorValueLike | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> TensorValue:
    """Adds the cross entropy of the logits hidden · weightᵀ + bias, without ever having the logits of all rows.

    Rows are taken in chunks, by a loop of the graph if there are several. The products are MAX's. Rows that do not
    count are multiplied like others, but for what is in them.

    Args:
        hidden: What the logits are made of: (…, features), of floats of 16 to 64 bits.
        weight: (n, features) for n classes, of the dtype of `hidden`.
        target: The class of each row: (…), int64 or int32, from 0 to n - 1 or `ignore_index`. Another one makes its
            row's loss NaN.
        bias: (n,), of the dtype of `hidden`, or None.
        ignore_index: The class of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.
        reduction: "mean" over the rows that count, NaN if there are none; "sum"; or "none" for one loss a row.
        softcap: A positive number c that turns logits z into c · tanh(z / c), as in Gemma 2; None for none.
        z_loss: What a row's squared logsumexp is multiplied by and added to its loss, as in PaLM; 0 for none.
        chunk: Rows to take at a time. If None, so many that their logits have 24 MB on a CPU and 512 MB on a GPU, but
            at least 128; 128 where n is symbolic.

    Returns:
        The loss: a scalar, or of the shape of `target`; of the dtype and device of `hidden`.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes or devices do not fit, or another argument is not one of these.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> hidden = TensorType(DType.float32, ("rows", 768), DeviceRef.CPU())
        >>> weight = TensorType(DType.float32, (50257, 768), DeviceRef.CPU())
        >>> classes = TensorType(DType.int64, ("rows",), DeviceRef.CPU())
        >>> with Graph("head", input_types=[hidden, weight, classes]) as graph:
        ...     loss = maxsoftmax.ops.linear_cross_entropy(*graph.inputs)
        >>> loss.shape
        []
    """
    made = _made(hidden, weight, bias, softcap)
    choices = _loss_choices(ignore_index, label_smoothing, reduction, z_loss)
    classes, shape = _of_rows(target, "target", hidden)
    (loss,) = _linear().cross_entropy(made, classes, None, choices, check_chunk(chunk), False)
    return max_ops.reshape(loss, shape) if reduction == "none" else loss


def linear_cross_entropy_backward(
    hidden: TensorValueLike,
    weight: TensorValueLike,
    target: TensorValueLike,
    bias: TensorValueLike | None = None,
    dloss: TensorValueLike | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> tuple[TensorValue, TensorValue, TensorValue, TensorValue | None]:
    """Adds what `linear_cross_entropy` does, and with it the gradients of what the logits are made of.

    The logits are made once for both, so that a graph that trains needs nothing else. The gradients of weight and bias
    are added up in float32 or wider over all chunks, and rounded once.

    Args:
        hidden: What the logits are made of: (…, features), of floats of 16 to 64 bits.
        weight: (n, features) for n classes, of the dtype of `hidden`.
        target: The class of each row: (…), int64 or int32, from 0 to n - 1 or `ignore_index`. Another one makes its
            row's loss NaN.
        bias: (n,), of the dtype of `hidden`, or None.
        dloss: The gradient of the loss, of its shape and a floating dtype; 1 if None.
        ignore_index: The class of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.
        reduction: "mean" over the rows that count, NaN if there are none; "sum"; or "none" for one loss a row.
        softcap: A positive number c that turns logits z into c · tanh(z / c), as in Gemma 2; None for none.
        z_loss: What a row's squared logsumexp is multiplied by and added to its loss, as in PaLM; 0 for none.
        chunk: Rows to take at a time. If None, so many that their logits have 24 MB on a CPU and 512 MB on a GPU, but
            at least 128; 128 where n is symbolic. On a GPU, of static rows and features in bfloat16 or float16, it is
            at least as many as there are features, and all if they are at most twice as many.

    Returns:
        The loss, and the gradients of hidden, weight and bias, of their shapes; the last one None without a bias.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes or devices do not fit, or another argument is not one of these.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> hidden = TensorType(DType.float32, ("rows", 768), DeviceRef.CPU())
        >>> weight = TensorType(DType.float32, (50257, 768), DeviceRef.CPU())
        >>> classes = TensorType(DType.int64, ("rows",), DeviceRef.CPU())
        >>> with Graph("head", input_types=[hidden, weight, classes]) as graph:
        ...     loss, dhidden, dweight, _ = maxsoftmax.ops.linear_cross_entropy_backward(*graph.inputs)
        >>> dweight.shape
        [Dim(50257), Dim(768)]
    """
    made = _made(hidden, weight, bias, softcap)
    choices = _loss_choices(ignore_index, label_smoothing, reduction, z_loss)
    classes, shape = _of_rows(target, "target", hidden)
    upstream = None
    if dloss is not None:
        upstream = _value(dloss, "dloss")
        each = reduction == "none"
        _check(upstream, "dloss", upstream.dtype, shape if each else [], made.hidden.device)
        upstream = max_ops.reshape(upstream, classes.shape if each else [1])
    found = _linear().cross_entropy(made, classes, upstream, choices, check_chunk(chunk), True)
    loss, dhidden, dweight, *dbias = found
    dhidden = max_ops.reshape(dhidden, _value(hidden).shape)
    return max_ops.reshape(loss, shape) if reduction == "none" else loss, dhidden, dweight, dbias[0] if dbias else None


@overload
def linear_token_log_probs(
    hidden: TensorValueLike,
    weight: TensorValueLike,
    tokens: TensorValueLike,
    bias: TensorValueLike | None = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[False] = ...,
    softcap: float | None = ...,
    chunk: int | None = ...,
) -> TensorValue: ...
@overload
def linear_token_log_probs(
    hidden: TensorValueLike,
    weight: TensorValueLike,
    tokens: TensorValueLike,
    bias: TensorValueLike | None = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[True],
    softcap: float | None = ...,
    chunk: int | None = ...,
) -> tuple[TensorValue, TensorValue]: ...
@overload
def linear_token_log_probs(
    hidden: TensorValueLike,
    weight: TensorValueLike,
    tokens: TensorValueLike,
    bias: TensorValueLike | None = ...,
    *,
    temperature: float | None = ...,
    entropy: bool,
    softcap: float | None = ...,
    chunk: int | None = ...,
) -> TensorValue | tuple[TensorValue, TensorValue]: ...
def linear_token_log_probs(
    hidden: TensorValueLike,
    weight: TensorValueLike,
    tokens: TensorValueLike,
    bias: TensorValueLike | None = None,
    *,
    temperature: float | None = None,
    entropy: bool = False,
    softcap: float | None = None,
    chunk: int | None = None,
) -> TensorValue | tuple[TensorValue, TensorValue]:
    """Adds what `token_log_probs` does of the logits hidden · weightᵀ + bias, without the logits of all rows.

    Rows are taken in chunks, by a loop of the graph if there are several. The products are MAX's.

    Args:
        hidden: What the logits are made of: (…, features), of floats of 16 to 64 bits.
        weight: (n, features) for n classes, of the dtype of `hidden`.
        tokens: Which tokens of each row: (…), or (…, k) for k a row; int32 or int64. What is not from 0 to n - 1 has
            the logarithm NaN.
        bias: (n,), of the dtype of `hidden`, or None.
        temperature: A positive number that logits are divided by; 1 if None.
        entropy: Whether to return the entropy of each row, too: -Σ p ln p.
        softcap: A positive number c that turns logits z into c · tanh(z / c) before the temperature; None for none.
        chunk: Rows to take at a time. If None, so many that their logits have 24 MB on a CPU and 512 MB on a GPU, but
            at least 128; 128 where n is symbolic.

    Returns:
        The logarithms, of the shape of `tokens`, or with `entropy` a tuple of them and the entropies, of shape (…):
        float64 if `hidden` is, else float32.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes or devices do not fit, or another argument is not one of these.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> hidden = TensorType(DType.float32, ("rows", 768), DeviceRef.CPU())
        >>> weight = TensorType(DType.float32, (50257, 768), DeviceRef.CPU())
        >>> classes = TensorType(DType.int64, ("rows",), DeviceRef.CPU())
        >>> with Graph("head", input_types=[hidden, weight, classes]) as graph:
        ...     log_probs, entropy = maxsoftmax.ops.linear_token_log_probs(*graph.inputs, entropy=True)
        >>> log_probs.shape
        [Dim('rows')]
    """
    made = _made(hidden, weight, bias, softcap)
    options = check_temperature(temperature), check_flag("entropy", entropy), check_chunk(chunk)
    chosen, shape = _of_rows(tokens, "tokens", hidden, several=True)
    each = chosen if len(chosen.shape) > 1 else max_ops.unsqueeze(chosen, 1)
    log_probs, *entropies = _linear().token_log_probs(made, each, *options)
    result = max_ops.reshape(log_probs, shape)
    return (result, max_ops.reshape(entropies[0], _value(hidden).shape[:-1])) if entropy else result


def linear_token_log_probs_backward(
    hidden: TensorValueLike,
    weight: TensorValueLike,
    tokens: TensorValueLike,
    bias: TensorValueLike | None = None,
    dlog_probs: TensorValueLike | None = None,
    *,
    dentropy: TensorValueLike | None = None,
    temperature: float | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[TensorValue, TensorValue, TensorValue | None]:
    """Adds the gradients of what the logits of `linear_token_log_probs` are made of.

    The logits are made again. The gradients of weight and bias are added up in float32 or wider over all chunks, and
    rounded once.

    Args:
        hidden: What the logits are made of: (…, features), of floats of 16 to 64 bits.
        weight: (n, features) for n classes, of the dtype of `hidden`.
        tokens: Which tokens of each row: (…), or (…, k) for k a row; int32 or int64. What is not from 0 to n - 1 has no
            gradient if its own is 0, and else makes the row NaN.
        bias: (n,), of the dtype of `hidden`, or None.
        dlog_probs: The gradients of the logarithms, of the shape of `tokens` and a floating dtype; 1 if None.
        dentropy: The gradients of the entropies, of shape (…) and a floating dtype; 0 if None.
        temperature: A positive number that logits are divided by; 1 if None.
        softcap: A positive number c that turns logits z into c · tanh(z / c) before the temperature; None for none.
        chunk: Rows to take at a time; None if that is left to this function.

    Returns:
        The gradients of hidden, weight and bias, of their shapes; the last one None without a bias.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes or devices do not fit, or another argument is not one of these.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> hidden = TensorType(DType.float32, ("rows", 768), DeviceRef.CPU())
        >>> weight = TensorType(DType.float32, (50257, 768), DeviceRef.CPU())
        >>> classes = TensorType(DType.int64, ("rows",), DeviceRef.CPU())
        >>> with Graph("head", input_types=[hidden, weight, classes]) as graph:
        ...     dhidden, dweight, _ = maxsoftmax.ops.linear_token_log_probs_backward(*graph.inputs)
        >>> dweight.shape
        [Dim(50257), Dim(768)]
    """
    made = _made(hidden, weight, bias, softcap)
    options = check_temperature(temperature), check_chunk(chunk)
    chosen, shape = _of_rows(tokens, "tokens", hidden, several=True)
    each = chosen if len(chosen.shape) > 1 else max_ops.unsqueeze(chosen, 1)
    kept = list(_value(hidden).shape[:-1])
    given = []
    for upstream, name, wanted, flat in (
        (dlog_probs, "dlog_probs", shape, each.shape),
        (dentropy, "dentropy", kept, each.shape[:1]),
    ):
        value = None if upstream is None else _value(upstream, name)
        if value is not None:
            check_dtype(value.dtype, name)
            _check(value, name, value.dtype, wanted, made.hidden.device)
            value = max_ops.reshape(value, flat)
        given.append(value)
    dhidden, dweight, *dbias = _linear().token_log_probs_backward(made, each, *given, *options)
    return max_ops.reshape(dhidden, _value(hidden).shape), dweight, dbias[0] if dbias else None


def _linear() -> Any:
    """Returns the functions of losses without logits, whose module needs this one."""
    from maxsoftmax._graph import linear

    return linear


def _made(hidden: Any, weight: Any, bias: Any, softcap: Any) -> Any:
    """Returns what logits are made of, or refuses it."""
    hidden, weight = _value(hidden, "hidden"), _value(weight, "weight")
    check_dtype(hidden.dtype, "hidden")
    if weight.rank != 2 or not hidden.rank or weight.shape[1] != hidden.shape[-1]:
        features = hidden.shape[-1] if hidden.rank else "features"
        raise ValueError(
            f"weight has shape {words(weight.shape)}, but hidden of {words(hidden.shape)} needs (n, {features}) for n "
            "classes"
        )
    _check(weight, "weight", hidden.dtype, weight.shape, hidden.device)
    if bias is not None:
        bias = _value(bias, "bias")
        _check(bias, "bias", hidden.dtype, weight.shape[:1], hidden.device)
    rows = max_ops.reshape(hidden, [_product(hidden.shape[:-1]), hidden.shape[-1]])
    return _linear().Logits(rows, weight, bias, check_softcap(softcap))


def _loss_choices(ignore_index: Any, label_smoothing: Any, reduction: Any, z_loss: Any) -> Any:
    """Returns what is chosen of a loss, or refuses it."""
    smoothing = check_label_smoothing(label_smoothing)
    check_reduction(reduction)
    return _linear().Choices(check_ignore_index(ignore_index), smoothing, reduction, check_z_loss(z_loss))


def _of_rows(value: Any, name: str, hidden: Any, several: bool = False) -> tuple[TensorValue, Any]:
    """Returns classes or tokens with all rows along one axis, and their shape before."""
    value, hidden = _value(value, name), _value(hidden, "hidden")
    check_target_dtype(value.dtype, name)
    shape, rows = list(value.shape), list(hidden.shape[:-1])
    is_several = several and bool(shape) and shape[:-1] == rows
    if shape != rows and not is_several:
        more = f", or {words((*rows, 'k'))} for k a row" if several else ""
        raise ValueError(
            f"{name} has shape {words(shape)}, but hidden of {words(hidden.shape)} needs {words(rows)}{more}"
        )
    if value.device != hidden.device:
        raise ValueError(f"{name} is on {value.device}, but hidden is on {hidden.device}")
    return max_ops.reshape(value, [_product(rows), *shape[len(rows) :]]), shape


def _log_probs_and_sums(x: TensorValue, classes: TensorValue) -> tuple[TensorValue, TensorValue]:
    """Returns the logarithm of one class's probability for each row, and (m, d, 0) of all rows."""
    log_probs, _, sums = _token_log_probs(x, classes, 1, Dim(1), 1.0, False)
    return max_ops.squeeze(log_probs, 1), sums


def _token_log_probs(  # noqa: PLR0917
    x: TensorValue, tokens: TensorValue, place: int, each: Dim, temperature: float, entropy: bool
) -> list[TensorValue]:
    """Adds the op: of `each` tokens of a row, row by row, as are the results."""
    wide, rows = accumulator(x.dtype), _product([dim for i, dim in enumerate(x.shape) if i != place])
    return _call(
        "token_log_probs",
        [x, tokens],
        [TensorType(wide, shape, x.device) for shape in ([rows, each], [rows if entropy else 1], [rows, 3])],
        {"axis": place, "temperature": _bits(temperature), "has_entropy": entropy},
    )


class _Asked(NamedTuple):
    """Logits and tokens, as the ops take them."""

    x: TensorValue
    tokens: TensorValue
    """(rows · k,)."""
    place: int
    each: Dim
    """How many of a row."""
    temperature: float
    kept: list[Dim]
    """The dimensions of `x` beside the axis."""
    shape: list[Dim]
    """What shape tokens came in."""

    @property
    def several(self) -> bool:
        """Whether tokens have the axis."""
        return len(self.shape) > len(self.kept)

    def by_row(self, value: TensorValue) -> TensorValue:
        """Returns values of the tokens' shape with those of a row as neighbours."""
        if not self.several:
            return value
        return max_ops.permute(value, [i for i in range(len(self.shape)) if i != self.place] + [self.place])

    def turned(self, value: TensorValue) -> TensorValue:
        """Returns (rows, k) values in the tokens' shape."""
        if not self.several:
            return max_ops.reshape(value, self.kept)
        last = len(self.kept)
        value = max_ops.reshape(value, [*self.kept, self.each])
        return max_ops.permute(value, [*range(self.place), last, *range(self.place, last)])


def _asked(x: Any, tokens: Any, axis: Any, temperature: Any) -> _Asked:
    """Returns logits and tokens, or refuses them."""
    x, tokens = _value(x), _value(tokens, "tokens")
    check_dtype(x.dtype)
    place, chosen = _axis(axis, x), check_temperature(temperature)
    check_target_dtype(tokens.dtype, "tokens")
    several = check_tokens_shape(tokens.shape, x.shape, place)
    if tokens.device != x.device:
        raise ValueError(f"tokens is on {tokens.device}, but x is on {x.device}")
    kept = [dim for i, dim in enumerate(x.shape) if i != place]
    each = tokens.shape[place] if several else Dim(1)
    asked = _Asked(x, tokens, place, each, chosen, kept, list(tokens.shape))
    return asked._replace(tokens=max_ops.reshape(asked.by_row(tokens), [_product(kept) * each]))


def _divergence(
    x: Any, teacher: Any, axis: Any, temperature: Any, reverse: Any
) -> tuple[TensorValue, list[TensorValue], int, float, bool]:
    """Returns the student's logits, those of p and q, the axis, the temperature, and whether p is the student's."""
    x, teacher = _value(x), _value(teacher, "teacher")
    check_dtype(x.dtype)
    place, is_reverse = _axis(axis, x), check_flag("reverse", reverse)
    _check(teacher, "teacher", x.dtype, x.shape, x.device)
    return x, [x, teacher] if is_reverse else [teacher, x], place, check_temperature(temperature), is_reverse


def _kl_and_sums(
    x: TensorValue, sides: list[TensorValue], place: int, temperature: float
) -> tuple[TensorValue, TensorValue]:
    """Adds the op of both divergences."""
    wide, kept = accumulator(x.dtype), [dim for i, dim in enumerate(x.shape) if i != place]
    rows = _product(kept)
    types = [TensorType(wide, shape, x.device) for shape in ([rows], [rows, 5])]
    kl, sums = _call("kl_divergence", sides, types, {"axis": place, "temperature": _bits(temperature)})
    return max_ops.reshape(kl, kept), sums


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
    parameters = _choices(place, ignore_index, label_smoothing, reduction)
    wide, rows = accumulator(x.dtype), _product(target.shape)
    pairs = _value(pairs, "pairs")
    _check(pairs, "pairs", wide, [*target.shape, 2], x.device)
    each = reduction == "none"
    if dloss is None:
        ones = max_ops.constant(1.0, wide, x.device)
        scales = max_ops.broadcast_to(max_ops.reshape(ones, [1]), [rows if each else 1])
    else:
        dloss = _value(dloss, "dloss")
        _check(dloss, "dloss", dloss.dtype, list(target.shape) if each else [], x.device)
        scales = max_ops.reshape(max_ops.cast(dloss, wide), [rows if each else 1])
    return _Call([max_ops.reshape(target, [rows]), max_ops.reshape(pairs, [rows, 2]), scales], parameters)


def _fused(op: str, x: TensorValue, axis: int, out: Out | None) -> TensorValue:
    """Adds an op of one input that keeps its shape."""
    type, parameters = _written(x, out)
    if out is not None and type.dtype.size_in_bytes > x.dtype.size_in_bytes:
        # The kernels take exponentials as accurate as logits are.
        x = max_ops.cast(x, accumulator(x.dtype))
    (y,) = _call(op, [x], [type], {"axis": axis, **parameters})
    return y


def _out(out_dtype: Any, out_scale: Any, x: TensorValue, algorithm: str = "auto") -> Out | None:
    """Returns how results are to be written, None if as they always are."""
    out = check_out(out_dtype, out_scale, x.dtype.name, algorithm)
    if out is not None and out.dtype in FLOAT8 and x.device.is_cpu():
        raise ValueError(
            f"out_dtype {out.dtype} needs a GPU, as MAX has no float8 in graphs on a CPU: x is on {x.device}"
        )
    return out


def _written(x: TensorValue, out: Out | None) -> tuple[TensorType, dict[str, int]]:
    """Returns the type of results of the shape of `x`, and the parameters of an op that writes them."""
    dtype, scale = (x.dtype, 1.0) if out is None else (getattr(DType, out.dtype), out.scale)
    return TensorType(dtype, x.shape, x.device), {"out_scale": _bits(scale)}


def _bits(number: float) -> int:
    """Returns the bits of a double: as a float a parameter would be rounded to float32 on its way to the kernel."""
    return int(np.float64(number).view(np.int64))


def _with_forms(x: TensorValue, axis: int, wanted: Forms, out: Out | None) -> TensorValue:
    """Adds softmax of what `wanted` makes of `x`, which the kernel computes as it reads `x`."""
    wide = accumulator(x.dtype)
    type, written = _written(x, out)
    shared = {"axis": axis, "causal": wanted.causal, "masked": wanted.masked, **written}
    rows = [*x.shape[:axis], 1, *x.shape[axis + 1 :]]
    numbers = {name: value for name, value in wanted._asdict().items() if is_number(value)}
    tensors = {
        name: _operand(name, getattr(wanted, name), x, rows if name == "sink" else x.shape, name == "mask")
        for name in _OPERANDS
        if getattr(wanted, name) is not None and name not in numbers
    }
    plain = all(lies and operand.dtype in (wide, x.dtype, DType.bool) for operand, lies in tensors.values())
    if plain and {"mask", "sink"}.isdisjoint(numbers) and axis <= _BEFORE and len(x.shape) - axis - 1 <= _AFTER:
        # The kernel reads the tensors as they lie in memory, and `x` too, if nothing is fused into it.
        nothing = max_ops.constant(np.zeros([1] * len(x.shape), np.float32), DType.float32, x.device)
        operands = {name: tensors[name][0] if name in tensors else nothing for name in _OPERANDS}
        laid = [_of_rank(len(x.shape), y) for y in operands.values()]
        kinds = {f"has_{name}": name in tensors for name in operands}
        bits = {name: _bits(numbers.get(name, 1.0)) for name in ("scale", "temperature")}
        (y,) = _call("softmax_formed", [x, *laid], [type], {**shared, **kinds, **bits})
        return y
    scale, mask, temperature, sink = (
        max_ops.constant(float(numbers[name]), wide, x.device) if name in numbers else tensors.get(name, (None,))[0]
        for name in _OPERANDS
    )
    z = max_ops.cast(x, wide)
    if scale is not None:
        z = z * max_ops.cast(scale, wide)
    if mask is not None and mask.dtype != DType.bool:
        z = z + max_ops.cast(mask, wide)
    if temperature is not None:
        z = z / max_ops.cast(temperature, wide)
    if mask is not None and mask.dtype == DType.bool:
        z = max_ops.where(mask, z, max_ops.constant(-np.inf, wide, x.device))
    if sink is None:
        (y,) = _call("softmax_masked", [z], [type], shared)
    else:
        sink = max_ops.broadcast_to(max_ops.cast(sink, wide), rows)
        (y,) = _call("softmax_sink", [z, sink], [type], shared)
    return y


def _operand(name: str, value: Any, x: TensorValue, whole: Any, or_bool: bool) -> tuple[TensorValue, bool]:
    """Returns an argument as a tensor that broadcasts to `whole`, on the device of `x`, and whether it is in memory."""
    constant = isinstance(value, np.ndarray)
    if constant:
        # Here, where it costs nothing; MAX would run a model for it.
        value = value.reshape([*[1] * (len(x.shape) - value.ndim), *value.shape])
        value = max_ops.constant(value, DType.from_numpy(value.dtype), x.device)
    try:
        operand = TensorValue(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a tensor of the graph, not {value!r}") from error
    _check_own(operand, name)
    if not (operand.dtype.is_float() or (or_bool and operand.dtype == DType.bool)):
        allowed = "floats or bools" if or_bool else "floats"
        raise TypeError(f"{name} has dtype {operand.dtype.name}, but must be of {allowed}")
    forms.check_shape(name, operand.shape, whole)
    if operand.device != x.device:
        raise ValueError(f"{name} is on {operand.device}, but must be on {x.device}, where x is")
    lies = constant or _is_input(operand)
    if not lies and list(operand.shape) != list(whole):
        # MAX 26.7 gets wrong what it fuses of a broadcast, a comparison and another broadcast: a mask of positions.
        (operand,) = _call("in_memory", [operand], [operand.type], {})
        lies = True
    return operand, lies


def _of_rank(rank: int, x: TensorValue) -> TensorValue:
    """Returns `x` with as many dimensions of 1 before its own as it lacks."""
    missing = rank - len(x.shape)
    return max_ops.reshape(x, [*[1] * missing, *x.shape]) if missing else x


def _is_input(x: TensorValue) -> bool:
    """Returns whether `x` comes from outside of the graph, as it lies in memory."""
    return any(value._mlir_value == x._mlir_value for value in Graph.current.inputs)


def _backward(op: str, y: TensorValueLike, dy: TensorValueLike, axis: int, **options: bool) -> TensorValue:
    y, dy = _value(y, "y"), _value(dy, "dy")
    check_dtype(y.dtype, "y")
    _check(dy, "dy", y.dtype, y.shape, y.device)
    (dx,) = _call(op, [y, dy], [y.type], {"axis": _axis(axis, y, "y"), **options})
    return dx


def _value(x: Any, name: str = "x") -> TensorValue:
    """Returns `x` as a tensor of the graph that is being built."""
    _check_graph()
    try:
        value = TensorValue(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a tensor of the graph, not {x!r}") from error
    _check_own(value, name)
    return value


def _check_graph() -> None:
    """Refuses to add to no graph."""
    try:
        _ = Graph.current
    except LookupError:
        raise LookupError(
            "no graph is being built: use maxsoftmax.ops inside of `with Graph(...)`, and maxsoftmax itself for arrays"
        ) from None


def _check_own(value: TensorValue | BufferValue, name: str) -> None:
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


def _axis(axis: Any, x: TensorValue, name: str = "x") -> int:
    if x.rank == 0:
        raise ValueError(f"{name} has rank 0, but softmax needs an axis: reshape it to rank 1 first")
    return normalize_axis(axis, x.rank, name=name)


def _check(value: TensorValue, name: str, dtype: DType, shape: Any, device: DeviceRef) -> None:
    """Refuses a tensor that does not go with the others."""
    if value.dtype != dtype:
        raise TypeError(f"{name} has dtype {value.dtype.name}, but here it needs {dtype.name}")
    if list(value.shape) != list(shape):
        raise ValueError(f"{name} has shape {words(value.shape)}, but here it needs {words(shape)}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, but the others are on {device}")


def _classes(x: TensorValue | BufferValue, target: Any) -> tuple[TensorValue, int]:
    """Returns targets that fit the logits, and the axis of the classes."""
    target = _value(target, "target")
    check_dtype(x.dtype)
    check_target_dtype(target.dtype)
    place = check_target_shape(target.shape, x.shape)
    if target.device != x.device:
        raise ValueError(f"target is on {target.device}, but x is on {x.device}")
    return target, place


def _choices(place: int, ignore_index: Any, label_smoothing: Any, reduction: Any) -> dict[str, Any]:
    return {
        "axis": place,
        "ignore_index": check_ignore_index(ignore_index),
        "smoothing": _bits(check_label_smoothing(label_smoothing)),
        "reduction": check_reduction(reduction),
        "classes": 0,
    }


def _reduced(x: TensorValue, axis: int, keepdims: Any) -> list[Dim]:
    """Returns the shape of what has one value for each row of `x`."""
    one = [Dim(1)] if check_flag("keepdims", keepdims) else []
    return [*x.shape[:axis], *one, *x.shape[axis + 1 :]]


def _product(dims: Any) -> Dim:
    return functools.reduce(operator.mul, dims, Dim(1))


def _call(
    op: str, values: list[TensorValue], results: list[TensorType], parameters: dict[str, Any]
) -> list[TensorValue]:
    """Adds one of our ops to the graph."""
    _load_extension(Graph.current)
    found = max_ops.custom(op, device=values[0].device, values=values, out_types=results, parameters=parameters)
    return [value.tensor for value in found]


def _load_extension(graph: Graph) -> None:
    """Gives `graph` the kernels unless it has them."""
    if "softmax" not in graph._kernel_library:
        graph._import_kernels([extension()])
