"""The logarithms of tokens' probabilities, for arrays: NumPy in and out, or any DLPack array in and its kind out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

import numpy as np

from maxsoftmax import _native
from maxsoftmax._arguments import check_flag, check_temperature, check_tokens_shape, normalize_axis
from maxsoftmax._arrays.call import Call
from maxsoftmax._arrays.layout import Layout, Rows, without
from maxsoftmax._arrays.memory import accumulator, product

if TYPE_CHECKING:
    from maxsoftmax._types import Array, Flag, Where


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
    x: Array,
    tokens: Any,
    axis: SupportsIndex = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[False] = ...,
    device: Where = ...,
) -> Array: ...
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
    x: Array,
    tokens: Any,
    axis: SupportsIndex = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[True],
    device: Where = ...,
) -> tuple[Array, Array]: ...
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
        x: Logits: whatever `maxsoftmax.softmax` takes, of rank 1 or more.
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
    call = Call(x, "x", device)
    if not call.x.shape:
        raise ValueError("x has rank 0, but logits need an axis of tokens: reshape it to rank 1 first")
    shape, place = call.x.shape, normalize_axis(axis, len(call.x.shape))
    chosen, wanted = check_temperature(temperature), check_flag("entropy", entropy)
    taken = call.classes(tokens, "tokens")
    several = check_tokens_shape(taken.shape, shape, place)
    rows = shape[:place] + shape[place + 1 :]
    if call.x.size:
        laid, layout = call.walked(call.x, (place,))
    else:
        laid, layout = call.x, Layout(tuple(range(len(shape))), Rows(product(rows), shape[place], 1))
    order = without(layout.order, (place,))
    # Those of a row are neighbours.
    of_tokens = (*(i for i in layout.order if i != place), place) if several else order
    wide = accumulator(laid.dtype)
    log_probs = call.empty(wide, taken.shape, of_tokens)
    entropies = call.empty(wide, rows, order) if wanted else None
    if product(rows):
        sums = call.empty(wide, (product(rows), 3), (0, 1))
        told = taken.shape[place] if several else 1, int(taken.dtype == "int64"), _native.bits(chosen)
        arrays = [log_probs, entropies, sums, laid, call.laid(taken, of_tokens)]
        call.run("token_log_probs", layout.rows, told, arrays)
    result = call.result(log_probs)
    return result if entropies is None else (result, call.result(entropies))
