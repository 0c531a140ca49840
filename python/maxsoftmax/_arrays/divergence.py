"""The KL divergence of two arrays' rows and its gradient: NumPy in and out, or any DLPack array in and its kind out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maxsoftmax import _native
from maxsoftmax._arguments import check_flag, check_temperature, normalize_axis
from maxsoftmax._arrays.call import Call, check_like
from maxsoftmax._arrays.layout import Layout, Rows, without
from maxsoftmax._arrays.memory import accumulator, product
from maxsoftmax._types import reduces, reduces_to_pair

if TYPE_CHECKING:
    from maxsoftmax._types import Flag, Where

SUMS = 5
"""How many accumulators the library keeps of a row."""


@reduces
def kl_divergence(
    x: Any,
    teacher: Any,
    axis: int = -1,
    *,
    temperature: float | None = None,
    reverse: Flag = False,
    device: Where = None,
) -> Any:
    """Returns the KL divergence between the probabilities of a teacher's logits and of `x`, a number for each row.

    With p = softmax(teacher / temperature) and q = softmax(x / temperature) it is Σ p (ln p - ln q), the forward
    divergence; reverse, p and q change places.

    Args:
        x: Logits of the student, of rank 1 or more: an array of NumPy or of any library with DLPack, or a sequence of
            numbers; floats of 16 to 64 bits, or what becomes such.
        teacher: Logits of the same shape and dtype.
        axis: The axis of the probabilities.
        temperature: A positive number that both are divided by; 1 if None.
        reverse: Whether the divergence is that of the student from the teacher.
        device: Where to compute: "cpu", "gpu", "gpu:1" or a `max.driver.Device`; where `x` is if None.

    Returns:
        The divergences, of the shape of `x` without `axis` and of its kind and device: float64 if `x` is, else float32.
        Infinite where q is 0 and p is not, NaN where softmax of either is. Distillation takes their mean, often times
        temperature².

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes do not fit, there is no such axis or device, or the temperature is not allowed.
        RuntimeError: If the library cannot be built.

    Example:
        >>> maxsoftmax.kl_divergence([[0.0, 0.0]], [[9.0, -numpy.inf]])
        array([0.69314718])
    """
    return _computed(x, teacher, None, axis, temperature, reverse, device, False)[0]


@reduces_to_pair
def kl_divergence_backward(
    x: Any,
    teacher: Any,
    dkl: Any = None,
    axis: int = -1,
    *,
    temperature: float | None = None,
    reverse: Flag = False,
    device: Where = None,
) -> tuple[Any, Any]:
    """Returns what `kl_divergence` does, and with it the gradient of `x`.

    Args:
        x: Logits of the student, of rank 1 or more: an array of NumPy or of any library with DLPack, or a sequence of
            numbers; floats of 16 to 64 bits, or what becomes such.
        teacher: Logits of the same shape and dtype.
        dkl: The gradient of the divergences, of their shape and dtype; 1 if None.
        axis: The axis of the probabilities.
        temperature: A positive number that both are divided by; 1 if None.
        reverse: Whether the divergence is that of the student from the teacher.
        device: Where to compute; where `x` is if None.

    Returns:
        The divergences, and the gradient, of the shape, dtype, kind and device of `x`.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes do not fit, there is no such axis or device, or the temperature is not allowed.
        RuntimeError: If the library cannot be built.

    Example:
        >>> kl, dx = maxsoftmax.kl_divergence_backward([[0.0, 0.0]], [[9.0, -numpy.inf]])
        >>> dx
        array([[-0.5,  0.5]])
    """
    kl, dx = _computed(x, teacher, dkl, axis, temperature, reverse, device, True)
    return kl, dx


def _computed(  # noqa: PLR0917
    x: Any, teacher: Any, dkl: Any, axis: Any, temperature: Any, reverse: Any, device: Any, wanted: bool
) -> tuple[Any, ...]:
    """Returns the divergences, and the gradient if it is wanted."""
    call = Call(x, "x", device)
    shape, dtype = call.x.shape, call.x.dtype
    if not shape:
        raise ValueError("x has rank 0, but logits need an axis of probabilities: reshape it to rank 1 first")
    place = normalize_axis(axis, len(shape))
    chosen, is_reverse = _native.bits(check_temperature(temperature)), check_flag("reverse", reverse)
    other = call.floats(teacher, "teacher")
    check_like(other, "teacher", dtype, shape, "of x")
    wide, kept = accumulator(dtype), shape[:place] + shape[place + 1 :]
    upstream = None if dkl is None else call.floats(dkl, "dkl")
    if upstream is not None:
        check_like(upstream, "dkl", wide, kept, "of the divergences")
    rows = product(kept)
    if call.x.size:
        laid, layout = call.walked(call.x, (place,))
        other = call.alike(other, laid, layout)
    else:
        laid, layout = call.x, Layout(tuple(range(len(shape))), Rows(rows, shape[place], 1))
    order = without(layout.order, (place,))
    kl = call.empty(wide, kept, order)
    sides = [laid, other] if is_reverse else [other, laid]
    sums = call.empty(wide, (rows, SUMS), (0, 1))
    if rows:
        call.run("kl_divergence", layout.rows, (chosen,), [kl, sums, *sides])
    if not wanted:
        return (call.result(kl),)
    dx = call.empty(dtype, shape, layout.order)
    if call.x.size:
        given = None if upstream is None else call.laid(upstream, order)
        call.run("kl_divergence_backward", layout.rows, (chosen, int(is_reverse)), [dx, *sides, sums, given])
    return call.result(kl), call.result(dx)
