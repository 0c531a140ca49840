"""Log-probabilities of tokens, in graphs."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

from max.graph import Dim, TensorType, TensorValue, TensorValueLike
from max.graph import ops as max_ops

from maxsoftmax._arguments import (
    accumulator,
    check_dtype,
    check_flag,
    check_target_dtype,
    check_temperature,
    check_tokens_shape,
)
from maxsoftmax.ops._values import add_op, as_gradient, as_tensor, axis_of, bits_of, check_device, kept_dims, product


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
    upstream = as_gradient(dlog_probs, "dlog_probs", asked.shape, asked.x.device)
    of_entropies = None if dentropy is None else as_gradient(dentropy, "dentropy", asked.kept, asked.x.device)
    *_, sums = _token_log_probs(*asked[:5], wanted)
    rows = sums.shape[0]
    taken = max_ops.reshape(asked.by_row(max_ops.cast(upstream, wide)), [rows, asked.each])
    last = max_ops.constant(0.0, wide, asked.x.device) if of_entropies is None else max_ops.cast(of_entropies, wide)
    last = max_ops.reshape(last, [rows if wanted else 1])
    parameters = {"axis": asked.place, "temperature": bits_of(asked.temperature), "has_entropy": wanted}
    (dx,) = add_op("token_log_probs_backward", [asked.x, sums, asked.tokens, taken, last], [asked.x.type], parameters)
    return dx


def log_probs_and_sums(x: TensorValue, classes: TensorValue) -> tuple[TensorValue, TensorValue]:
    """Returns the logarithm of one class's probability for each row, and (m, d, 0) of all rows."""
    log_probs, _, sums = _token_log_probs(x, classes, 1, Dim(1), 1.0, False)
    return max_ops.squeeze(log_probs, 1), sums


def _token_log_probs(  # noqa: PLR0917
    x: TensorValue, tokens: TensorValue, place: int, each: Dim, temperature: float, entropy: bool
) -> list[TensorValue]:
    """Adds the op: of `each` tokens of a row, row by row, as are the results."""
    wide, rows = accumulator(x.dtype), product(kept_dims(x, place))
    return add_op(
        "token_log_probs",
        [x, tokens],
        [TensorType(wide, shape, x.device) for shape in ([rows, each], [rows if entropy else 1], [rows, 3])],
        {"axis": place, "temperature": bits_of(temperature), "has_entropy": entropy},
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
    x, tokens = as_tensor(x), as_tensor(tokens, "tokens")
    check_dtype(x.dtype)
    place, chosen = axis_of(axis, x), check_temperature(temperature)
    check_target_dtype(tokens.dtype, "tokens")
    several = check_tokens_shape(tokens.shape, x.shape, place)
    check_device(tokens, "tokens", x, "x")
    kept = kept_dims(x, place)
    each = tokens.shape[place] if several else Dim(1)
    asked = _Asked(x, tokens, place, each, chosen, kept, list(tokens.shape))
    return asked._replace(tokens=max_ops.reshape(asked.by_row(tokens), [product(kept) * each]))
