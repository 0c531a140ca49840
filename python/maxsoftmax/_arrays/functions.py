"""Softmax, its logarithm, sparsemax, what is made of their rows, and their gradients, for arrays.

Arrays of NumPy in and out, or any DLPack array in and its kind out. All may be called from several threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from maxsoftmax._arguments import check_flag, normalize_axes, told_out
from maxsoftmax._arrays import attention, kinds, shortcuts
from maxsoftmax._arrays.call import AUTO, Call, Chosen, check_like
from maxsoftmax._arrays.layout import Rows, without
from maxsoftmax._arrays.memory import accumulator, product
from maxsoftmax._arrays.shortcuts import Known, first, is_home, of_buffers, spelled
from maxsoftmax._forms import Forms
from maxsoftmax._types import gradient, maps, reduces_to_pair

if TYPE_CHECKING:
    from maxsoftmax._types import Algorithm, Array, Axes, Flag, Where

_softmax, _log_softmax = Known("softmax"), Known("log_softmax")
_softmax_backward, _log_softmax_backward = Known("softmax_backward"), Known("log_softmax_backward")
_sparsemax, _sparsemax_backward = Known("sparsemax"), Known("sparsemax_backward")
_max_sum, _logsumexp = Known("statistics"), Known("statistics")


@maps
def softmax(
    x: Any,
    axis: Axes = -1,
    *,
    scale: Any = None,
    mask: Any = None,
    causal: Flag = False,
    temperature: Any = None,
    sink: Any = None,
    out_dtype: Any = None,
    out_scale: float | None = None,
    device: Where = None,
    algorithm: Algorithm = "auto",
    block_size: int | None = None,
    unroll: int | None = None,
) -> Any:
    """Returns softmax of an array along `axis`: the last one, unless told otherwise, where SciPy's takes all.

    That is exp(z - max z) / (Σ exp(z - max z) + exp(sink - max z)); z is (x · scale + mask) / temperature, and `x`
    unless one of these is given.

    Special values come out as from `scipy.special.softmax` in float64: NaN or +inf turn their own row to NaN, a row of
    nothing but -inf is NaN, and -inf beside finite values is exactly 0. The first call for each device and dtype builds
    a library (seconds), which is kept for later processes; `maxsoftmax.warm_up` does that ahead. May be called from
    several threads.

    Args:
        x: Logits. A NumPy array or whatever `numpy.asarray` takes (strided, Fortran-ordered, integers and bools
            included), or an array that supports DLPack, such as a `torch.Tensor` or a `max.driver.Buffer`, on any
            device that MAX knows. Memory without gaps is read where it lies, whatever the order of its dimensions.
        axis: The axis or axes that will sum to 1; None for all of them together. One axis, where any of the next five
            is given.
        scale: A number, or an array that broadcasts to `x`.
        mask: An array that broadcasts to `x`: of bools, True where an element takes part, or of floats to be added.
            A row in which nothing takes part is 0.
        causal: Whether an element of the axis before `axis` sees only what is not after it, both counted from the end.
        temperature: A positive number, or an array of them that broadcasts to `x`.
        sink: Logits that take part in the denominator only: an array that broadcasts to `x` with `axis` of length 1.
        out_dtype: What the result is of, rounded once from the accumulator: a `max.dtype.DType`, a dtype of NumPy or
            torch, or its name: "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", or that of `x`; that
            if None. What is too large for float8 becomes 448 of float8_e4m3fn, and infinity of float8_e5m2.
        out_scale: A positive number that the result is multiplied by before it is rounded, where it is of float8.
        device: Where to compute: "cpu", "gpu", "gpu:1" or a `max.driver.Device`; where `x` is if None.
        algorithm: "auto", or the name of a kernel that the device has.
        block_size: Threads a block, where a GPU kernel was named: a power of two up to 1024; 128 if None.
        unroll: Vectors that a thread has under way at a time, for "vector" and "online": 1, 2, 4 or 8; 4 if None.
            Where neither is given, these two use what `maxsoftmax tune` found for the GPU, if it was run.

    Returns:
        Probabilities: the shape, dtype (if there is no `out_dtype`), kind and device of `x`, and in memory the order of
        its dimensions. Integers become the float that NumPy's `exp` makes of them, bools float64, scalars a NumPy
        scalar. bfloat16 and float8 of NumPy are those of the package ml_dtypes.

    Raises:
        TypeError: If `x` is not an array of real numbers, or another argument is not of its type.
        ValueError: If there is no such axis, device, algorithm, block size or unroll, or an array does not broadcast.
        RuntimeError: If the library cannot be built.

    Example:
        >>> maxsoftmax.softmax([[0.0, 0.0, 0.0, 0.0]])
        array([[0.25, 0.25, 0.25, 0.25]])
        >>> maxsoftmax.softmax(numpy.zeros((1, 3)), out_dtype="float8_e4m3fn", out_scale=256).astype("float32")
        array([[88., 88., 88.]], dtype=float32)
    """
    if causal is not False:
        causal = check_flag("causal", causal)
    plain = scale is None and mask is None and causal is False and temperature is None and sink is None
    if type(algorithm) is str and algorithm == "auto" and block_size is None and unroll is None:
        chosen = AUTO
    else:
        chosen = Chosen(algorithm, block_size, unroll)
    if plain:
        return _along(_softmax, x, axis, device, chosen, out_dtype=out_dtype, out_scale=out_scale)
    wanted = Forms(scale, mask, causal, temperature, sink)
    return attention.softmax(x, axis, wanted, device, chosen, out_dtype=out_dtype, out_scale=out_scale)


@maps
def log_softmax(
    x: Any,
    axis: Axes = -1,
    *,
    out_dtype: Any = None,
    out_scale: float | None = None,
    device: Where = None,
) -> Any:
    """Returns the logarithm of softmax along `axis`: the last one, unless told otherwise, where SciPy's takes all.

    That is (x - max x) - ln Σ exp(x - max x).

    Args:
        x: Logits: an array of NumPy or of any library with DLPack, or a sequence of numbers; floats of 16 to 64 bits,
            or what becomes such.
        axis: The axis or axes along which probabilities sum to 1; None for all of them together.
        out_dtype: What the result is of, rounded once from the accumulator: a `max.dtype.DType`, a dtype of NumPy or
            torch, or its name: "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", or that of `x`; that
            if None. -inf becomes -448 of float8_e4m3fn, which has no infinity.
        out_scale: A positive number that the result is multiplied by before it is rounded, where it is of float8.
        device: Where to compute: "cpu", "gpu", "gpu:1" or a `max.driver.Device`; where `x` is if None.

    Returns:
        Logarithms of probabilities: the shape, dtype (if there is no `out_dtype`), kind, device and order of `x`;
        -inf where the logit is.

    Raises:
        TypeError: If `x` is not an array of real numbers, or another argument is not of its type.
        ValueError: If there is no such axis or device.
        RuntimeError: If the library cannot be built.

    Example:
        >>> maxsoftmax.log_softmax([0.0, -numpy.inf])
        array([  0., -inf])
    """
    return _along(_log_softmax, x, axis, device, out_dtype=out_dtype, out_scale=out_scale)


@gradient
def softmax_backward(y: Any, dy: Any, axis: Axes = -1, *, device: Where = None) -> Any:
    """Returns the gradient of the logits of `softmax`: y · (dy - Σ y·dy) along `axis`.

    Args:
        y: What `softmax` returned.
        dy: The gradient of that, of the same shape and dtype.
        axis: The axis or axes that sum to 1; None for all of them together.
        device: Where to compute; where `y` is if None.

    Returns:
        The gradient: the shape, dtype, kind, device and order of `y`.

    Raises:
        TypeError: If an argument is not an array of real numbers, or not of its type, or dtypes differ.
        ValueError: If shapes differ, or there is no such axis or device.
        RuntimeError: If the library cannot be built.

    Example:
        >>> maxsoftmax.softmax_backward([0.5, 0.5], [1.0, 0.0])
        array([ 0.25, -0.25])
    """
    return _backward(_softmax_backward, y, dy, axis, device)


@gradient
def log_softmax_backward(y: Any, dy: Any, axis: Axes = -1, *, device: Where = None) -> Any:
    """Returns the gradient of the logits of `log_softmax`: dy - e^y · Σ dy along `axis`.

    Args:
        y: What `log_softmax` returned.
        dy: The gradient of that, of the same shape and dtype.
        axis: The axis or axes along which probabilities sum to 1; None for all of them together.
        device: Where to compute; where `y` is if None.

    Returns:
        The gradient: the shape, dtype, kind, device and order of `y`.

    Raises:
        TypeError: If an argument is not an array of real numbers, or not of its type, or dtypes differ.
        ValueError: If shapes differ, or there is no such axis or device.
        RuntimeError: If the library cannot be built.

    Example:
        >>> maxsoftmax.log_softmax_backward([0.0, -numpy.inf], [1.0, 0.0])
        array([0., 0.])
    """
    return _backward(_log_softmax_backward, y, dy, axis, device)


@maps
def sparsemax(x: Any, axis: Axes = -1, *, device: Where = None) -> Any:
    """Returns sparsemax: max(x - max x - t, 0), where t is what makes it sum to 1 along `axis`.

    These are the probabilities that are nearest to `x`, most of them exactly 0 (Martins and Astudillo 2016, arXiv
    1602.02068). NaN or +inf turn their own row to NaN, a row of nothing but -inf is NaN, and -inf beside finite values
    is 0.

    Args:
        x: Logits: an array of NumPy or of any library with DLPack, or a sequence of numbers; floats of 16 to 64 bits,
            or what becomes such.
        axis: The axis or axes that will sum to 1; None for all of them together.
        device: Where to compute: "cpu", "gpu", "gpu:1" or a `max.driver.Device`; where `x` is if None.

    Returns:
        Probabilities: the shape, dtype, kind, device and order of `x`.

    Raises:
        TypeError: If `x` is not an array of real numbers, or another argument is not of its type.
        ValueError: If there is no such axis or device.
        RuntimeError: If the library cannot be built.

    Example:
        >>> maxsoftmax.sparsemax([[2.0, 1.5, 0.0], [2.0, 0.5, 0.0]])
        array([[0.75, 0.25, 0.  ],
               [1.  , 0.  , 0.  ]])
    """
    return _along(_sparsemax, x, axis, device)


@gradient
def sparsemax_backward(y: Any, dy: Any, axis: Axes = -1, *, device: Where = None) -> Any:
    """Returns the gradient of the logits of `sparsemax`: where y is above 0, dy less its mean over all such, else 0.

    Args:
        y: What `sparsemax` returned.
        dy: The gradient of that, of the same shape and dtype.
        axis: The axis or axes that sum to 1; None for all of them together.
        device: Where to compute; where `y` is if None.

    Returns:
        The gradient: the shape, dtype, kind, device and order of `y`. Rows with NaN in `y` are NaN where it is not 0.

    Raises:
        TypeError: If an argument is not an array of real numbers, or not of its type, or dtypes differ.
        ValueError: If shapes differ, or there is no such axis or device.
        RuntimeError: If the library cannot be built.

    Example:
        >>> maxsoftmax.sparsemax_backward([0.75, 0.25, 0.0], [1.0, 0.0, 5.0])
        array([ 0.5, -0.5,  0. ])
    """
    return _backward(_sparsemax_backward, y, dy, axis, device)


@reduces_to_pair
def max_sum(x: Any, axis: Axes = -1, *, keepdims: Flag = False, device: Where = None) -> tuple[Any, Any]:
    """Returns the pair that softmax is made of: m = max x and d = Σ exp(x - m) along `axis`, the last by default.

    Pairs of parts of a row merge into that of the whole row: with m = max(m₁, m₂), it is
    (m, d₁ · exp(m₁ - m) + d₂ · exp(m₂ - m)) (Milakov and Gimelshein 2018, arXiv 1805.02867).

    Args:
        x: Logits: an array of NumPy or of any library with DLPack, or a sequence of numbers; floats of 16 to 64 bits,
            or what becomes such.
        axis: The axis or axes that are reduced; None for all of them together.
        keepdims: Whether the axes stay, of length 1.
        device: Where to compute; where `x` is if None.

    Returns:
        m and d, of the shape of `x` without the axes unless `keepdims`, its kind and device: float64 if `x` is, else
        float32. Nothing and nothing but -inf have (-inf, 0); NaN and +inf turn d to NaN.

    Raises:
        TypeError: If `x` is not an array of real numbers, or another argument is not of its type.
        ValueError: If there is no such axis or device.
        RuntimeError: If the library cannot be built.

    Example:
        >>> m, d = maxsoftmax.max_sum([[1.0, 1.0], [2.0, -numpy.inf]])
        >>> m, d
        (array([1., 2.]), array([2., 1.]))
    """
    m, d = _reduced(_max_sum, x, axis, keepdims, device, planes=True)
    return m, d


@overload
def logsumexp(
    x: np.ndarray[Any, Any],
    axis: Axes = ...,
    *,
    b: Any = ...,
    keepdims: Flag = ...,
    return_sign: Literal[False] = ...,
    device: Where = ...,
) -> Any: ...
@overload
def logsumexp(
    x: Array,
    axis: Axes = ...,
    *,
    b: Any = ...,
    keepdims: Flag = ...,
    return_sign: Literal[False] = ...,
    device: Where = ...,
) -> Array: ...
@overload
def logsumexp(
    x: np.ndarray[Any, Any],
    axis: Axes = ...,
    *,
    b: Any = ...,
    keepdims: Flag = ...,
    return_sign: Literal[True],
    device: Where = ...,
) -> tuple[Any, Any]: ...
@overload
def logsumexp(
    x: Array, axis: Axes = ..., *, b: Any = ..., keepdims: Flag = ..., return_sign: Literal[True], device: Where = ...
) -> tuple[Array, Array]: ...
@overload
def logsumexp(
    x: object, axis: Axes = ..., *, b: Any = ..., keepdims: Flag = ..., return_sign: Flag = ..., device: Where = ...
) -> Any: ...
def logsumexp(
    x: Any,
    axis: Axes = -1,
    *,
    b: Any = None,
    keepdims: Flag = False,
    return_sign: Flag = False,
    device: Where = None,
) -> Any:
    """Returns ln Σ exp x along `axis`, the last by default, where SciPy's reduces all; no finite result overflows.

    Args:
        x: Logits: an array of NumPy or of any library with DLPack, or a sequence of numbers; floats of 16 to 64 bits,
            or what becomes such.
        axis: The axis or axes that are reduced; None for all of them together.
        b: What exponentials are multiplied by before they are added up, which broadcasts with `x`; 1 if None. `x` is on
            the host then, and the logarithm is that of a sum of float32 or wider.
        keepdims: Whether the axes stay, of length 1.
        return_sign: Whether to return the sign of the sum: 1, -1, 0 of no sum at all. Without it the logarithm of a
            negative sum is NaN.
        device: Where to compute; where `x` is if None.

    Returns:
        The logarithms, of the shape of `x` without the axes unless `keepdims`, its dtype, kind and device: -inf for
        nothing but -inf, NaN beside NaN, and else inf beside +inf. With `return_sign` a tuple of them and the signs.

    Raises:
        TypeError: If `x` is not an array of real numbers, or another argument is not of its type.
        ValueError: If there is no such axis or device, or `b` does not broadcast with `x`.
        RuntimeError: If the library cannot be built.

    Example:
        >>> maxsoftmax.logsumexp([[1000.0], [-1000.0]])
        array([ 1000., -1000.])
        >>> maxsoftmax.logsumexp([1000.0, 1000.0], b=[1, -3], return_sign=True)
        (np.float64(1000.69314718056), np.float64(-1.0))
    """
    if b is not None or return_sign is not False:
        from maxsoftmax._arrays import weighted

        keepdims, return_sign = check_flag("keepdims", keepdims), check_flag("return_sign", return_sign)
        return weighted.logsumexp(
            x, b, return_sign, lambda terms: logsumexp(terms, axis, keepdims=keepdims, device=device)
        )
    return _reduced(_logsumexp, x, axis, keepdims, device, planes=False)


def _along(
    known: Known,
    x: Any,
    axis: Any,
    device: Any,
    chosen: Chosen = AUTO,
    *,
    out_dtype: Any = None,
    out_scale: Any = None,
) -> Any:
    """Returns what an op that keeps the shape makes of an array."""
    key = None
    same = out_dtype is None and out_scale is None
    if chosen is AUTO:
        turned: Any = axis if axis is None or type(axis) is int else spelled(axis)
        if not same:
            turned = (turned, told_out(out_dtype, out_scale))
        if type(x) is not np.ndarray:
            key = of_buffers((x,), device, (turned,))
        elif device is None or is_home(device):
            key = x.dtype, x.shape, x.strides, turned
        again = known.get(key)
        y = again(x) if again is not None else None
        if y is not None:
            return y
    call = Call(x, "x", device)
    chosen = call.chosen(chosen)
    if not same:
        call.write(out_dtype, out_scale, chosen.algorithm)
    axes = normalize_axes(axis, len(call.x.shape))
    if call.x.size == 0:
        return call.nothing()
    laid, layout = call.walked(call.x, axes)
    y = call.empty(call.out_dtype, laid.shape, layout.order)
    plan = call.run(known.library, layout.rows, call.out_options, [y, laid], chosen)
    result = call.result(y)
    if key is not None and call.is_plain((x, laid)):
        if call.kind is kinds.NUMPY:
            known.learn(key, shortcuts.along(plan, laid.dtype, result.nbytes, call.made(result)))
        else:
            known.learn(key, first(shortcuts.buffers(plan, [y], [laid], (0,))))
    return result


def _backward(known: Known, y: Any, dy: Any, axis: Any, device: Any) -> Any:
    """Returns the gradient of an op that keeps the shape."""
    key = None
    turned = axis if axis is None or type(axis) is int else spelled(axis)
    if type(y) is not np.ndarray or type(dy) is not np.ndarray:
        key = of_buffers((y, dy), device, (turned,))
    elif device is None or is_home(device):
        key = y.dtype, y.shape, y.strides, dy.dtype, dy.shape, dy.strides, turned
    again = known.get(key)
    dx = again(y, dy) if again is not None else None
    if dx is not None:
        return dx
    call = Call(y, "y", device)
    upstream = call.floats(dy, "dy")
    check_like(upstream, "dy", call.x.dtype, call.x.shape, "of y")
    axes = normalize_axes(axis, len(call.x.shape), "y")
    if call.x.size == 0:
        return call.nothing()
    laid, layout = call.walked(call.x, axes)
    upstream = call.alike(upstream, laid, layout)
    dx = call.empty(laid.dtype, laid.shape, layout.order)
    plan = call.run(known.library, layout.rows, (), [dx, laid, upstream])
    if key is not None and call.is_plain((y, laid), (dy, upstream)):
        if call.kind is kinds.NUMPY:
            known.learn(key, shortcuts.backward(plan, laid.dtype, dx.owner.nbytes))
        else:
            known.learn(key, first(shortcuts.buffers(plan, [dx], [laid, upstream], (0, 1))))
    return call.result(dx)


PAIRS, LOGARITHMS, PLANES = 0, 1, 2
"""What the library of statistics is asked for."""


def _reduced(known: Known, x: Any, axis: Any, keepdims: Any, device: Any, *, planes: bool) -> Any:
    """Returns what is made of each row of an array: one array, or with `planes` m and d."""
    key = None
    turned: Any = axis if axis is None or type(axis) is int else spelled(axis)
    if keepdims is not False:
        keepdims = check_flag("keepdims", keepdims)
        turned = (turned, keepdims)
    if type(x) is not np.ndarray:
        key = of_buffers((x,), device, (turned,))
    elif device is None or is_home(device):
        key = x.dtype, x.shape, x.strides, turned
    again = known.get(key)
    found = again(x) if again is not None else None
    if found is not None:
        return found
    call = Call(x, "x", device)
    axes = normalize_axes(axis, len(call.x.shape))
    left = [i for i in range(len(call.x.shape)) if i not in axes]
    kept = tuple(1 if i in axes else size for i, size in enumerate(call.x.shape) if keepdims or i not in axes)
    if call.x.size == 0:
        rows = Rows(product(kept), product([call.x.shape[i] for i in axes]), 1)
        laid, order = call.x, tuple(range(len(left)))
    else:
        laid, layout = call.walked(call.x, axes)
        rows, order = layout.rows, without(layout.order, axes)
    order = (*(left[i] for i in order), *axes) if keepdims else order
    dtype, shape = laid.dtype, kept
    if planes:
        dtype, shape, order = accumulator(dtype), (2, *kept), (0, *(1 + i for i in order))
    out = call.empty(dtype, shape, order)
    if rows.outer * rows.inner:
        plan = call.run(known.library, rows, (PLANES if planes else LOGARITHMS,), [out, laid])
        if key is not None and laid.size and call.is_plain((x, laid)):
            if call.kind is kinds.NUMPY:
                known.learn(key, shortcuts.reduced(plan, laid.dtype, call.maker(dtype, shape, order), planes))
            elif not planes:
                known.learn(key, first(shortcuts.buffers(plan, [out], [laid], (0,))))
    if planes:
        return tuple(call.result(call.part(out, i)) for i in range(2))
    return call.result(out)
