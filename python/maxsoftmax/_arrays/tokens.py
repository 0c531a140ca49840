"""The logarithms of tokens' probabilities, for arrays: NumPy in and out, or any DLPack array in and its kind out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

import numpy as np

from maxsoftmax import _native
from maxsoftmax._arguments import check_flag, check_temperature, check_tokens_shape, normalize_axis
from maxsoftmax._arrays import memory
from maxsoftmax._arrays.call import Call, check_like
from maxsoftmax._arrays.layout import Layout, Rows, without
from maxsoftmax._arrays.memory import accumulator, product
from maxsoftmax._types import maps

if TYPE_CHECKING:
    from maxsoftmax._types import Array as Kind
    from maxsoftmax._types import Flag, Where


@overload
def token_log_probs(
    x: np.ndarray[Any, Any],
    tokens: Any,
    axis: SupportsIndex = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[False] = ...,
    device: Where = ...,
) -> Any: ...
@overload
def token_log_probs(
    x: Kind,
    tokens: Any,
    axis: SupportsIndex = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[False] = ...,
    device: Where = ...,
) -> Kind: ...
@overload
def token_log_probs(
    x: np.ndarray[Any, Any],
    tokens: Any,
    axis: SupportsIndex = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[True],
    device: Where = ...,
) -> tuple[Any, Any]: ...
@overload
def token_log_probs(
    x: Kind,
    tokens: Any,
    axis: SupportsIndex = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[True],
    device: Where = ...,
) -> tuple[Kind, Kind]: ...
@overload
def token_log_probs(
    x: object,
    tokens: Any,
    axis: SupportsIndex = ...,
    *,
    temperature: float | None = ...,
    entropy: Flag = ...,
    device: Where = ...,
) -> Any: ...
def token_log_probs(
    x: Any,
    tokens: Any,
    axis: SupportsIndex = -1,
    *,
    temperature: float | None = None,
    entropy: Flag = False,
    device: Where = None,
) -> Any:
    """Returns the logarithms of the probabilities of some tokens of each row, and the entropy of the row if asked for.

    These are the elements of `log_softmax(x / temperature)` that `tokens` names, without the others. The bits of a row
    depend on nothing but the row, its tokens' included, and are the same with and without the entropy.

    Args:
        x: Logits, of rank 1 or more: an array of NumPy or of any library with DLPack, or a sequence of numbers; floats
            of 16 to 64 bits, or what becomes such.
        tokens: Which elements of each row: of the shape of `x` without `axis`, or with `axis` of another length, for
            as many tokens a row; int32 or int64. What is not from 0 to n - 1 has the logarithm NaN.
        axis: The axis of the tokens' probabilities.
        temperature: A positive number that logits are divided by; 1 if None.
        entropy: Whether to return the entropy of each row, too: -Σ p ln p.
        device: Where to compute: "cpu", "gpu", "gpu:1" or a `max.driver.Device`; where `x` is if None.

    Returns:
        The logarithms, of the shape of `tokens`, or with `entropy` a tuple of them and the entropies, of the shape of
        `x` without `axis`. Both are of the kind and device of `x`: float64 if `x` is, else float32.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes do not fit, there is no such axis or device, or the temperature is not allowed.
        RuntimeError: If the library cannot be built.

    Example:
        >>> maxsoftmax.token_log_probs([[0.0, 0.0], [9.0, -numpy.inf]], [1, 0])
        array([-0.69314718,  0.        ])
    """
    asked = _Asked(x, tokens, axis, temperature, check_flag("entropy", entropy), device)
    log_probs, entropies, _ = asked.sums()
    result = asked.call.result(log_probs)
    return result if entropies is None else (result, asked.call.result(entropies))


@maps
def token_log_probs_backward(
    x: Any,
    tokens: Any,
    dlog_probs: Any,
    dentropy: Any = None,
    axis: int = -1,
    *,
    temperature: float | None = None,
    device: Where = None,
) -> Any:
    """Returns the gradient of the logits of `token_log_probs`: Σ g_t (1 where t - p), and that of the entropy, over T.

    What rows sum to is found again, in one more read.

    Args:
        x: Logits, of rank 1 or more: an array of NumPy or of any library with DLPack, or a sequence of numbers; floats
            of 16 to 64 bits, or what becomes such.
        tokens: Which elements of each row: of the shape of `x` without `axis`, or with `axis` of another length, for
            as many tokens a row; int32 or int64. What is not from 0 to n - 1 has no gradient if its own is 0, and else
            makes the row NaN.
        dlog_probs: The gradients of the logarithms: of the shape of `tokens`, float64 if `x` is, else float32.
        dentropy: The gradients of the entropies: of the shape of `x` without `axis`, of the same dtype; None for 0.
        axis: The axis of the tokens' probabilities.
        temperature: A positive number that logits are divided by; 1 if None.
        device: Where to compute; where `x` is if None.

    Returns:
        The gradient: the shape, dtype, kind and device of `x`.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes do not fit, there is no such axis or device, or the temperature is not allowed.
        RuntimeError: If the library cannot be built.

    Example:
        >>> maxsoftmax.token_log_probs_backward([[0.0, 0.0]], [1], [1.0])
        array([[-0.5,  0.5]])
    """
    asked = _Asked(x, tokens, axis, temperature, dentropy is not None, device)
    call, wide = asked.call, asked.wide
    upstream = call.floats(dlog_probs, "dlog_probs")
    check_like(upstream, "dlog_probs", wide, asked.taken.shape, "of the logarithms")
    of_entropy = None if dentropy is None else call.floats(dentropy, "dentropy")
    if of_entropy is not None:
        check_like(of_entropy, "dentropy", wide, asked.rows, "of the entropies")
        of_entropy = call.laid(of_entropy, asked.order)
    dx = call.empty(asked.laid.dtype, call.x.shape, asked.layout.order)
    if call.x.size:
        chosen = call.laid(upstream, asked.of_tokens)
        arrays = [dx, asked.laid, asked.sums()[2], call.laid(asked.taken, asked.of_tokens), chosen, of_entropy]
        call.run("token_log_probs_backward", asked.layout.rows, asked.told, arrays)
    return call.result(dx)


class _Asked:
    """Logits and tokens, laid out, and what is chosen beside."""

    def __init__(  # noqa: PLR0917
        self, x: Any, tokens: Any, axis: Any, temperature: Any, entropy: bool, device: Any
    ) -> None:
        self.call = call = Call(x, "x", device)
        shape = call.x.shape
        if not shape:
            raise ValueError("x has rank 0, but logits need an axis of tokens: reshape it to rank 1 first")
        place, chosen = normalize_axis(axis, len(shape)), check_temperature(temperature)
        self._entropy = entropy
        self.taken = call.classes(tokens, "tokens")
        several = check_tokens_shape(self.taken.shape, shape, place)
        self.rows = shape[:place] + shape[place + 1 :]
        if call.x.size:
            self.laid, self.layout = call.walked(call.x, (place,))
        else:
            plain = tuple(range(len(shape)))
            self.laid, self.layout = call.x, Layout(plain, Rows(product(self.rows), shape[place], 1))
        self.order = without(self.layout.order, (place,))
        # Those of a row are neighbours.
        self.of_tokens = (*(i for i in self.layout.order if i != place), place) if several else self.order
        self.wide = accumulator(self.laid.dtype)
        each = self.taken.shape[place] if several else 1
        self.told = each, int(self.taken.dtype == "int64"), _native.bits(chosen)

    def sums(self) -> tuple[memory.Array, memory.Array | None, memory.Array]:
        """Returns the logarithms, the entropies if they are wanted, and what the gradient needs."""
        call, count = self.call, product(self.rows)
        log_probs = call.empty(self.wide, self.taken.shape, self.of_tokens)
        entropies = call.empty(self.wide, self.rows, self.order) if self._entropy else None
        sums = call.empty(self.wide, (count, 3), (0, 1))
        if count:
            arrays = [log_probs, entropies, sums, self.laid, call.laid(self.taken, self.of_tokens)]
            call.run("token_log_probs", self.layout.rows, self.told, arrays)
        return log_probs, entropies, sums
