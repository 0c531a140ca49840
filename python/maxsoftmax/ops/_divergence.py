"""Kullback-Leibler divergence, in graphs."""

from __future__ import annotations

from typing import Any

from max.graph import TensorType, TensorValue, TensorValueLike
from max.graph import ops as max_ops

from maxsoftmax._arguments import accumulator, check_dtype, check_flag, check_temperature
from maxsoftmax.ops._values import add_op, as_gradient, as_tensor, axis_of, bits_of, check_like, kept_dims, product


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
        dkl = as_gradient(dkl, "dkl", kl.shape, x.device)
    parameters = {"axis": place, "temperature": bits_of(chosen), "of_p": of_p}
    scales = max_ops.reshape(max_ops.cast(dkl, kl.dtype), [sums.shape[0]])
    (dx,) = add_op("kl_divergence_backward", [*sides, sums, scales], [x.type], parameters)
    return kl, dx


def _divergence(
    x: Any, teacher: Any, axis: Any, temperature: Any, reverse: Any
) -> tuple[TensorValue, list[TensorValue], int, float, bool]:
    """Returns the student's logits, those of p and q, the axis, the temperature, and whether p is the student's."""
    x, teacher = as_tensor(x), as_tensor(teacher, "teacher")
    check_dtype(x.dtype)
    place, is_reverse = axis_of(axis, x), check_flag("reverse", reverse)
    check_like(teacher, "teacher", x.dtype, x.shape, x.device)
    return x, [x, teacher] if is_reverse else [teacher, x], place, check_temperature(temperature), is_reverse


def _kl_and_sums(
    x: TensorValue, sides: list[TensorValue], place: int, temperature: float
) -> tuple[TensorValue, TensorValue]:
    """Adds the op of both divergences."""
    wide, kept = accumulator(x.dtype), kept_dims(x, place)
    rows = product(kept)
    types = [TensorType(wide, shape, x.device) for shape in ([rows], [rows, 5])]
    kl, sums = add_op("kl_divergence", sides, types, {"axis": place, "temperature": bits_of(temperature)})
    return max_ops.reshape(kl, kept), sums
