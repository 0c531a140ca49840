"""Losses and log-probabilities without logits, in graphs."""

from __future__ import annotations

from typing import Any, Literal, overload

from max.graph import TensorValue, TensorValueLike
from max.graph import ops as max_ops

from maxsoftmax._arguments import (
    check_chunk,
    check_dtype,
    check_flag,
    check_ignore_index,
    check_label_smoothing,
    check_reduction,
    check_softcap,
    check_target_dtype,
    check_temperature,
    check_z_loss,
    words,
)
from maxsoftmax._types import Reduction
from maxsoftmax.ops import _chunks as chunks
from maxsoftmax.ops._values import as_gradient, as_tensor, check_device, check_like, product


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
    (loss,) = chunks.cross_entropy(made, classes, None, choices, check_chunk(chunk), False)
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
        upstream = as_tensor(dloss, "dloss")
        each = reduction == "none"
        check_like(upstream, "dloss", upstream.dtype, shape if each else [], made.hidden.device)
        upstream = max_ops.reshape(upstream, classes.shape if each else [1])
    found = chunks.cross_entropy(made, classes, upstream, choices, check_chunk(chunk), True)
    loss, dhidden, dweight, *dbias = found
    dhidden = max_ops.reshape(dhidden, as_tensor(hidden).shape)
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
    log_probs, *entropies = chunks.token_log_probs(made, each, *options)
    result = max_ops.reshape(log_probs, shape)
    return (result, max_ops.reshape(entropies[0], as_tensor(hidden).shape[:-1])) if entropy else result


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
    kept = list(as_tensor(hidden).shape[:-1])

    def flat(upstream: Any, name: str, wanted: Any, shape: Any) -> TensorValue | None:
        """Returns a gradient of rows along one axis, None if there is none."""
        if upstream is None:
            return None
        return max_ops.reshape(as_gradient(upstream, name, wanted, made.hidden.device), shape)

    given = flat(dlog_probs, "dlog_probs", shape, each.shape), flat(dentropy, "dentropy", kept, each.shape[:1])
    dhidden, dweight, *dbias = chunks.token_log_probs_backward(made, each, *given, *options)
    return max_ops.reshape(dhidden, as_tensor(hidden).shape), dweight, dbias[0] if dbias else None


def _made(hidden: Any, weight: Any, bias: Any, softcap: Any) -> chunks.Logits:
    """Returns what logits are made of, or refuses it."""
    hidden, weight = as_tensor(hidden, "hidden"), as_tensor(weight, "weight")
    check_dtype(hidden.dtype, "hidden")
    if weight.rank != 2 or not hidden.rank or weight.shape[1] != hidden.shape[-1]:
        features = hidden.shape[-1] if hidden.rank else "features"
        raise ValueError(
            f"weight has shape {words(weight.shape)}, but hidden of {words(hidden.shape)} needs (n, {features}) for n "
            "classes"
        )
    check_like(weight, "weight", hidden.dtype, weight.shape, hidden.device)
    if bias is not None:
        bias = as_tensor(bias, "bias")
        check_like(bias, "bias", hidden.dtype, weight.shape[:1], hidden.device)
    rows = max_ops.reshape(hidden, [product(hidden.shape[:-1]), hidden.shape[-1]])
    return chunks.Logits(rows, weight, bias, check_softcap(softcap))


def _loss_choices(ignore_index: Any, label_smoothing: Any, reduction: Any, z_loss: Any) -> chunks.Choices:
    """Returns what is chosen of a loss, or refuses it."""
    smoothing = check_label_smoothing(label_smoothing)
    check_reduction(reduction)
    return chunks.Choices(check_ignore_index(ignore_index), smoothing, reduction, check_z_loss(z_loss))


def _of_rows(value: Any, name: str, hidden: Any, several: bool = False) -> tuple[TensorValue, Any]:
    """Returns classes or tokens with all rows along one axis, and their shape before."""
    value, hidden = as_tensor(value, name), as_tensor(hidden, "hidden")
    check_target_dtype(value.dtype, name)
    shape, rows = list(value.shape), list(hidden.shape[:-1])
    is_several = several and bool(shape) and shape[:-1] == rows
    if shape != rows and not is_several:
        more = f", or {words((*rows, 'k'))} for k a row" if several else ""
        raise ValueError(
            f"{name} has shape {words(shape)}, but hidden of {words(hidden.shape)} needs {words(rows)}{more}"
        )
    check_device(value, name, hidden, "hidden")
    return max_ops.reshape(value, [product(rows), *shape[len(rows) :]]), shape
