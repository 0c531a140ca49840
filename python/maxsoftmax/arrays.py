"""The relatives of softmax and their gradients, for arrays: NumPy in and out, or any DLPack array in and its kind out.

The first call for each op, device, dtype and position of the axis compiles a model (seconds); every later one, of any
shape, reuses it. Contiguous memory is shared, not copied. May be called from several threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType
from max.graph import Value

from maxsoftmax import eager, runtime
from maxsoftmax.arguments import (
    accumulator,
    check_dtype,
    check_ignore_index,
    check_label_smoothing,
    check_reduction,
    check_target_dtype,
    check_target_shape,
    normalize_axes,
)
from maxsoftmax.eager import Rows


def log_softmax(x: Any, axis: int | tuple[int, ...] | None = -1, *, device: str | Device | None = None) -> Any:
    """Returns the logarithm of softmax: (x - max x) - ln Σ exp(x - max x) along `axis`.

    Args:
        x: Logits: whatever `maxsoftmax.softmax` takes.
        axis: The axis or axes along which probabilities sum to 1; None for all of them together.
        device: Where to compute: "cpu", "gpu", "gpu:1" or a `max.driver.Device`; where `x` is if None.

    Returns:
        Logarithms of probabilities: the shape, dtype, kind and device of `x`; -inf where the logit is.

    Raises:
        TypeError: If `x` is not an array of real numbers, or another argument is not of its type.
        ValueError: If there is no such axis or device.
    """
    return _along("log_softmax", {"x": x}, axis, device)


def softmax_backward(
    y: Any, dy: Any, axis: int | tuple[int, ...] | None = -1, *, device: str | Device | None = None
) -> Any:
    """Returns the gradient of the logits of `softmax`: y · (dy - Σ y·dy) along `axis`.

    Args:
        y: What `softmax` returned.
        dy: The gradient of that, of the same shape and dtype.
        axis: The axis or axes that sum to 1; None for all of them together.
        device: Where to compute; where `y` is if None.

    Returns:
        The gradient: the shape, dtype, kind and device of `y`.

    Raises:
        TypeError: If an argument is not an array of real numbers, or not of its type, or dtypes differ.
        ValueError: If shapes differ, or there is no such axis or device.
    """
    return _along("softmax_backward", {"y": y, "dy": dy}, axis, device)


def log_softmax_backward(
    y: Any, dy: Any, axis: int | tuple[int, ...] | None = -1, *, device: str | Device | None = None
) -> Any:
    """Returns the gradient of the logits of `log_softmax`: dy - e^y · Σ dy along `axis`.

    Args:
        y: What `log_softmax` returned.
        dy: The gradient of that, of the same shape and dtype.
        axis: The axis or axes along which probabilities sum to 1; None for all of them together.
        device: Where to compute; where `y` is if None.

    Returns:
        The gradient: the shape, dtype, kind and device of `y`.

    Raises:
        TypeError: If an argument is not an array of real numbers, or not of its type, or dtypes differ.
        ValueError: If shapes differ, or there is no such axis or device.
    """
    return _along("log_softmax_backward", {"y": y, "dy": dy}, axis, device)


def max_sum(x: Any, axis: int | tuple[int, ...] | None = -1, *, device: str | Device | None = None) -> tuple[Any, Any]:
    """Returns the pair that softmax is made of: m = max x and d = Σ exp(x - m) along `axis`.

    Pairs of parts of a row merge into that of the whole row: with m = max(m₁, m₂), it is
    (m, d₁ · exp(m₁ - m) + d₂ · exp(m₂ - m)) (Milakov and Gimelshein 2018, arXiv 1805.02867).

    Args:
        x: Logits: whatever `maxsoftmax.softmax` takes.
        axis: The axis or axes that are reduced; None for all of them together.
        device: Where to compute; where `x` is if None.

    Returns:
        m and d, of the shape of `x` without the axes, its kind and device: float64 if `x` is, else float32. Nothing and
        nothing but -inf have (-inf, 0); NaN and +inf turn d to NaN.

    Raises:
        TypeError: If `x` is not an array of real numbers, or another argument is not of its type.
        ValueError: If there is no such axis or device.
    """
    m, d = _reduced("max_sum", x, axis, device)
    return m, d


def logsumexp(x: Any, axis: int | tuple[int, ...] | None = -1, *, device: str | Device | None = None) -> Any:
    """Returns ln Σ exp x along `axis`, which overflows for no finite result.

    Args:
        x: Logits: whatever `maxsoftmax.softmax` takes.
        axis: The axis or axes that are reduced; None for all of them together.
        device: Where to compute; where `x` is if None.

    Returns:
        The logarithms, of the shape of `x` without the axes, its dtype, kind and device: -inf for nothing but -inf, NaN
        beside NaN, and else inf beside +inf.

    Raises:
        TypeError: If `x` is not an array of real numbers, or another argument is not of its type.
        ValueError: If there is no such axis or device.
    """
    (result,) = _reduced("logsumexp", x, axis, device)
    return result


def cross_entropy(
    x: Any,
    target: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    device: str | Device | None = None,
) -> Any:
    """Returns the cross entropy of logits and target classes, -ln softmax(x)[target], as PyTorch defines it.

    Args:
        x: Logits: (n,), (rows, n), or (rows, n, …) with the classes along axis 1; whatever `maxsoftmax.softmax` takes.
        target: The class of each row: of the shape of `x` without the classes, int32 or int64, from 0 to n - 1 or
            `ignore_index`. On a GPU another one makes its row's loss NaN.
        ignore_index: The target of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.
        reduction: "mean" over the rows that count, NaN if there are none; "sum"; or "none" for one loss a row.
        device: Where to compute; where `x` is if None.

    Returns:
        The loss: a scalar, or of the shape of `target`; the dtype, kind and device of `x`.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes do not fit, a target on a CPU is not a class, or another argument is not one of these.
    """
    return cross_entropy_forward(
        x,
        target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
        device=device,
    )[0]


def cross_entropy_forward(
    x: Any,
    target: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    device: str | Device | None = None,
) -> tuple[Any, Any]:
    """Returns the loss as `cross_entropy` does, and what its gradient needs.

    Args:
        x: As for `cross_entropy`.
        target: As for `cross_entropy`.
        ignore_index: As for `cross_entropy`.
        label_smoothing: As for `cross_entropy`.
        reduction: As for `cross_entropy`.
        device: As for `cross_entropy`.

    Returns:
        The loss, and the pairs (m, d) of all rows, as of `max_sum`: of the shape of `target` and another axis, of 2.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes do not fit, a target on a CPU is not a class, or another argument is not one of these.
    """
    options = _loss_options(ignore_index, label_smoothing, reduction)
    logits, classes, rows = _classified(x, target, ignore_index)
    shape = tuple(classes.shape)
    results = _run(
        "cross_entropy_forward",
        [logits.view(logits.dtype, rows.shape), classes.view(classes.dtype, rows.reduced)],
        rows,
        device,
        (("target", classes.dtype), *options),
    )
    shapes = (shape if reduction == "none" else (), (*shape, 2))
    loss, pairs = (_given(x, r.view(r.dtype, s)) for r, s in zip(results, shapes, strict=True))
    return loss, pairs


def cross_entropy_backward(
    x: Any,
    target: Any,
    pairs: Any,
    dloss: Any = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    device: str | Device | None = None,
) -> Any:
    """Returns the gradient of the logits of `cross_entropy`: (softmax(x) - target) · dloss.

    Args:
        x: As for `cross_entropy`.
        target: As for `cross_entropy`.
        pairs: The pairs that `cross_entropy_forward` returned.
        dloss: The gradient of the loss, of its shape and dtype; 1 if None.
        ignore_index: As for `cross_entropy`.
        label_smoothing: As for `cross_entropy`.
        reduction: As for `cross_entropy`.
        device: As for `cross_entropy`.

    Returns:
        The gradient: the shape, dtype, kind and device of `x`; 0 in rows that do not count.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes do not fit, or another argument is not one of these.
    """
    op = _gradient(x, target, pairs, dloss, _loss_options(ignore_index, label_smoothing, reduction))
    (dx,) = _run("cross_entropy_backward", op.inputs, op.rows, device, op.options)
    return _given(x, dx.view(dx.dtype, op.shape))


def cross_entropy_backward_(
    x: Any,
    target: Any,
    pairs: Any,
    dloss: Any = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Any:
    """Does what `cross_entropy_backward` does, but writes the gradient over the logits, where they are.

    Args:
        x: Logits, as for `cross_entropy`: a NumPy or DLPack array, contiguous and writeable, in whose memory the
            gradient will be.
        target: As for `cross_entropy`.
        pairs: The pairs that `cross_entropy_forward` returned.
        dloss: The gradient of the loss, of its shape and dtype; 1 if None.
        ignore_index: As for `cross_entropy`.
        label_smoothing: As for `cross_entropy`.
        reduction: As for `cross_entropy`.

    Returns:
        `x` itself.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes do not fit, another argument is not one of these, or the memory of `x` cannot be shared.
    """
    _check_shared(x)
    op = _gradient(x, target, pairs, dloss, _loss_options(ignore_index, label_smoothing, reduction))
    _run("cross_entropy_backward_", op.inputs, op.rows, None, op.options)
    if not isinstance(x, Buffer):
        # Whoever reads it next does so on a queue of its own.
        op.inputs[0].device.synchronize()
    return x


class _Gradient(NamedTuple):
    """What the gradient of a loss is computed from."""

    inputs: list[Buffer]
    rows: Rows
    shape: tuple[int, ...]
    """Of the logits."""
    options: tuple[tuple[str, Any], ...]


def _gradient(x: Any, target: Any, pairs: Any, dloss: Any, options: tuple[tuple[str, Any], ...]) -> _Gradient:
    """Returns what the gradient of a loss takes."""
    chosen = dict(options)
    logits, classes, rows = _classified(x, target, chosen["ignore_index"])
    shape = tuple(classes.shape)
    inputs = [logits.view(logits.dtype, rows.shape), classes.view(classes.dtype, rows.reduced)]
    wide = accumulator(logits.dtype)
    of_rows = _buffer(pairs, "pairs")
    _check_like(of_rows, "pairs", wide, (*shape, 2), "of these logits")
    inputs.append(of_rows.view(wide, (*rows.reduced, 2)))
    if dloss is not None:
        upstream = _buffer(dloss, "dloss")
        each = chosen["reduction"] == "none"
        _check_like(upstream, "dloss", logits.dtype, shape if each else (), "of the loss")
        inputs.append(upstream.view(upstream.dtype, rows.reduced if each else ()))
    given = (("target", classes.dtype), ("dloss", dloss is not None))
    return _Gradient(inputs, rows, tuple(logits.shape), given + options)


def _along(op: str, arrays: dict[str, Any], axis: Any, device: Any) -> Any:
    """Returns what an op that keeps the shape makes of arrays that are alike."""
    (name, x), *others = arrays.items()
    first = _buffer(x, name)
    check_dtype(first.dtype, name)
    inputs = [first]
    for other, value in others:
        inputs.append(_buffer(value, other))
        _check_like(inputs[-1], other, first.dtype, tuple(first.shape), f"of {name}")
    axes = normalize_axes(axis, first.rank)
    order = _order(axes, first.rank)
    inputs = [_transposed(value, order) for value in inputs]
    shape = tuple(inputs[0].shape)
    rows = Rows.of(shape, tuple(sorted(order.index(a) for a in axes)))
    if first.num_elements == 0:
        result = Buffer(first.dtype, shape, first.device)
    else:
        (result,) = _run(op, [value.view(first.dtype, rows.shape) for value in inputs], rows, device)
        result = result.view(first.dtype, shape)
    return _given(x, _transposed(result, [order.index(i) for i in range(first.rank)]))


def _reduced(op: str, x: Any, axis: Any, device: Any) -> list[Any]:
    """Returns what an op makes of each row of an array."""
    first = _buffer(x, "x")
    check_dtype(first.dtype)
    axes = normalize_axes(axis, first.rank)
    kept = tuple(size for i, size in enumerate(first.shape) if i not in axes)
    order = _order(axes, first.rank)
    laid = _transposed(first, order)
    rows = Rows.of(tuple(laid.shape), tuple(sorted(order.index(a) for a in axes)))
    results = _run(op, [laid.view(laid.dtype, rows.shape)], rows, device)
    return [_given(x, result.view(result.dtype, kept)) for result in results]


def _run(
    op: str, inputs: list[Buffer], rows: Rows, device: Any, options: tuple[tuple[str, Any], ...] = ()
) -> list[Buffer]:
    """Returns the results of an op, on the device of its first input."""
    where = inputs[0].device
    target = where if device is None else runtime.device(device)
    signature = runtime.Signature(target, inputs[0].dtype, rows.contiguous, op=op, options=options)
    results = runtime.model(signature, rows.n).execute(*(value.to(target) for value in inputs))
    return [result.to(where) for result in results]


def _loss_options(ignore_index: Any, label_smoothing: Any, reduction: Any) -> tuple[tuple[str, Any], ...]:
    return (
        ("ignore_index", check_ignore_index(ignore_index)),
        ("label_smoothing", check_label_smoothing(label_smoothing)),
        ("reduction", check_reduction(reduction)),
    )


def _classified(x: Any, target: Any, ignored: int) -> tuple[Buffer, Buffer, Rows]:
    """Returns logits, targets that fit them, and how the logits are divided into rows."""
    logits, classes = _buffer(x, "x"), _buffer(target, "target", classes=True)
    check_dtype(logits.dtype)
    check_target_dtype(classes.dtype)
    shape = tuple(logits.shape)
    place = check_target_shape(classes.shape, shape)
    if classes.device.is_host:
        values = classes.to_numpy()
        wrong = (values != ignored) & ((values < 0) | (values >= shape[place]))
        if wrong.any():
            where = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(
                f"target{list(where) if where else ''} is {values[where]}, which is neither a class from 0 to "
                f"{shape[place] - 1} nor ignore_index {ignored}"
            )
    return logits, classes, Rows.of(shape, (place,))


def _check_like(value: Buffer, name: str, dtype: DType, shape: tuple[int, ...], whose: str) -> None:
    """Refuses an array that does not go with another one."""
    if value.dtype != dtype:
        raise TypeError(f"{name} has dtype {value.dtype.name}, but that {whose} is {dtype.name}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, but that {whose} is {shape}")


def _buffer(x: Any, name: str, classes: bool = False) -> Buffer:
    """Returns the memory of an array, shared if it can be taken as it lies."""
    if isinstance(x, Value):
        raise TypeError(f"{name} is a value of a graph, not an array: use maxsoftmax.ops")
    if not _is_host(x):
        return eager.as_buffer(x, name)
    array = np.asarray(x) if classes else eager.as_floats(x, name)
    if classes and array.dtype.kind not in "iu":
        raise TypeError(f"target has dtype {array.dtype}, but classes are int32 or int64")
    bits, dtype = eager.to_bits(np.require(array, requirements=["C_CONTIGUOUS", "ALIGNED", "WRITEABLE"]))
    return Buffer.from_numpy(bits).view(dtype, bits.shape)


def _check_shared(x: Any) -> None:
    """Refuses what cannot be written to where it lies."""
    if isinstance(x, np.ndarray):
        native = x.dtype.isnative and x.dtype.name in eager.FLOATS
        shared = native and x.flags.c_contiguous and x.flags.aligned and x.flags.writeable
    elif isinstance(x, Buffer):
        shared = x.is_contiguous
    elif hasattr(x, "is_contiguous"):
        shared = x.is_contiguous()
    else:
        raise TypeError(
            f"x is to be overwritten, so that it must be a NumPy array, a torch.Tensor or a max.driver.Buffer, "
            f"not a {type(x).__name__}"
        )
    if not shared:
        raise ValueError("x is to be overwritten, so that it must be a contiguous, writeable array of floats")


def _is_host(x: Any) -> bool:
    """Returns whether `x` is for NumPy to look at."""
    return isinstance(x, (np.ndarray, np.generic)) or not hasattr(x, "__dlpack__")


def _given(x: Any, result: Buffer) -> Any:
    """Returns `result` as the kind of array that `x` is."""
    if not _is_host(x):
        return eager.like(x, result)
    if result.dtype == DType.bfloat16:
        return _bits(result).view(x.dtype)[()]
    return result.to_numpy()[()]


def _order(axes: tuple[int, ...], rank: int) -> list[int]:
    """Returns the order of dimensions in which those of `axes` are neighbours: as they are if they can be."""
    if eager.are_consecutive(axes):
        return list(range(rank))
    return [i for i in range(rank) if i not in axes] + list(axes)


def _transposed(value: Buffer, order: list[int]) -> Buffer:
    """Returns an array with its dimensions in another order, by NumPy."""
    if order == sorted(order):
        return value
    bits = np.ascontiguousarray(_bits(value).transpose(order))
    return Buffer.from_numpy(bits).view(value.dtype, bits.shape).to(value.device)


def _bits(value: Buffer) -> np.ndarray:
    """Returns an array on the host, of the bits where NumPy does not know the dtype."""
    known = value.view(DType.uint16, tuple(value.shape)) if value.dtype == DType.bfloat16 else value
    result: np.ndarray = known.to_numpy()
    return result
