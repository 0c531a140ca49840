"""Cross entropy and its gradient, for arrays: NumPy in and out, or any DLPack array in and its kind out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maxsoftmax import _native
from maxsoftmax._arguments import FLOATS, check_ignore_index, check_label_smoothing, check_reduction, check_target_shape
from maxsoftmax._arrays import convert, kinds, shortcuts
from maxsoftmax._arrays.call import Call, check_like
from maxsoftmax._arrays.layout import Layout, Rows, without
from maxsoftmax._arrays.memory import HOST, SIZES, Array, accumulator, address, product, view
from maxsoftmax._arrays.shortcuts import discard, is_home, of_buffers
from maxsoftmax._types import maps, reduces, reduces_to_pair

if TYPE_CHECKING:
    from maxsoftmax._types import Reduction, Where

REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
"""What the library calls what becomes of the losses of all rows."""

_forward = shortcuts.Known("cross_entropy")
_backward, _in_place = shortcuts.Known("cross_entropy_backward"), shortcuts.Known("cross_entropy_backward")


@reduces
def cross_entropy(
    x: Any,
    target: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    device: Where = None,
) -> Any:
    """Returns the cross entropy of logits and target classes, -ln softmax(x)[target], as PyTorch defines it.

    Args:
        x: Logits: (n,), (rows, n), or (rows, n, …) with the classes along axis 1; an array of NumPy or of any library
            with DLPack, or a sequence of numbers; floats of 16 to 64 bits, or what becomes such.
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
        RuntimeError: If the library cannot be built.

    Example:
        >>> maxsoftmax.cross_entropy([[0.0, 0.0], [9.0, 0.0]], [1, -100])
        np.float64(0.6931471805599453)
    """
    return _losses(x, target, (ignore_index, label_smoothing, reduction), device)


@reduces_to_pair
def cross_entropy_forward(
    x: Any,
    target: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    device: Where = None,
) -> tuple[Any, Any]:
    """Returns the loss as `cross_entropy` does, and what its gradient needs.

    Args:
        x: Logits: (n,), (rows, n), or (rows, n, …) with the classes along axis 1; an array of NumPy or of any library
            with DLPack, or a sequence of numbers; floats of 16 to 64 bits, or what becomes such.
        target: The class of each row: of the shape of `x` without the classes, int32 or int64.
        ignore_index: The target of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.
        reduction: "mean" over the rows that count, "sum", or "none" for one loss a row.
        device: Where to compute; where `x` is if None.

    Returns:
        The loss, and the pairs m = max x and d = Σ exp(x - m) of all rows: of the shape of `target` and another axis,
        of 2.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes do not fit, a target on a CPU is not a class, or another argument is not one of these.
        RuntimeError: If the library cannot be built.

    Example:
        >>> loss, pairs = maxsoftmax.cross_entropy_forward([[0.0, 0.0]], [1])
        >>> pairs
        array([[0., 2.]])
    """
    loss, pairs = _losses(x, target, (ignore_index, label_smoothing, reduction), device, with_pairs=True)
    return loss, pairs


@maps
def cross_entropy_backward(
    x: Any,
    target: Any,
    pairs: Any,
    dloss: Any = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    device: Where = None,
) -> Any:
    """Returns the gradient of the logits of `cross_entropy`: (softmax(x) - target) · dloss.

    Args:
        x: Logits: (n,), (rows, n), or (rows, n, …) with the classes along axis 1; an array of NumPy or of any library
            with DLPack, or a sequence of numbers; floats of 16 to 64 bits, or what becomes such.
        target: The class of each row: of the shape of `x` without the classes, int32 or int64.
        pairs: The pairs that `cross_entropy_forward` returned.
        dloss: The gradient of the loss, of its shape and dtype; 1 if None.
        ignore_index: The target of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.
        reduction: "mean" over the rows that count, "sum", or "none" for one loss a row.
        device: Where to compute; where `x` is if None.

    Returns:
        The gradient: the shape, dtype, kind and device of `x`; 0 in rows that do not count.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes do not fit, or another argument is not one of these.
        RuntimeError: If the library cannot be built.

    Example:
        >>> loss, pairs = maxsoftmax.cross_entropy_forward([[0.0, 0.0]], [1])
        >>> maxsoftmax.cross_entropy_backward([[0.0, 0.0]], [1], pairs)
        array([[ 0.5, -0.5]])
    """
    return _gradient((x, target, pairs, dloss), (ignore_index, label_smoothing, reduction), device)


@maps
def cross_entropy_backward_(
    x: Any,
    target: Any,
    pairs: Any,
    dloss: Any = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Any:
    """Does what `cross_entropy_backward` does, but writes the gradient over the logits, where they are.

    Args:
        x: Logits, (n,), (rows, n) or (rows, n, …): a NumPy array, a `torch.Tensor` or a `max.driver.Buffer`, writeable
            and without gaps, in whose memory the gradient will be.
        target: The class of each row: of the shape of `x` without the classes, int32 or int64.
        pairs: The pairs that `cross_entropy_forward` returned.
        dloss: The gradient of the loss, of its shape and dtype; 1 if None.
        ignore_index: The target of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.
        reduction: "mean" over the rows that count, "sum", or "none" for one loss a row.

    Returns:
        `x` itself.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If shapes do not fit, another argument is not one of these, or the memory of `x` cannot be shared.
        RuntimeError: If the library cannot be built.

    Example:
        >>> x = numpy.zeros((1, 2))
        >>> loss, pairs = maxsoftmax.cross_entropy_forward(x, [1])
        >>> maxsoftmax.cross_entropy_backward_(x, [1], pairs) is x
        True
    """
    return _gradient((x, target, pairs, dloss), (ignore_index, label_smoothing, reduction), in_place=True)


class _Options(NamedTuple):
    """What is asked for beside the logits, checked."""

    ignore_index: int
    smoothing: float
    reduction: str

    @classmethod
    def of(cls, ignore_index: Any, label_smoothing: Any, reduction: Any) -> _Options:
        """Returns a caller's, or refuses them."""
        return cls(check_ignore_index(ignore_index), check_label_smoothing(label_smoothing), check_reduction(reduction))

    def told(self, target: Array) -> tuple[int, ...]:
        """Returns what the library is told of them, and of the dtype of targets."""
        reduction = REDUCTIONS[self.reduction]
        return self.ignore_index, _native.bits(self.smoothing), reduction, int(target.dtype == "int64"), 0


class _Rows(NamedTuple):
    """Logits and their targets, laid out."""

    x: Array
    target: Array
    layout: Layout
    """Of the logits."""
    order: tuple[int, ...]
    """Of the dimensions of targets in memory."""


def _losses(x: Any, target: Any, choices: tuple[Any, Any, Any], device: Any, with_pairs: bool = False) -> Any:
    """Returns the loss, or the loss and the pairs."""
    key, chosen = None, _sign(*choices)
    if type(x) is not np.ndarray or type(target) is not np.ndarray:
        key = of_buffers((x, target), device, chosen and (with_pairs, chosen))
    elif chosen is not None and (device is None or is_home(device)):
        key = x.dtype, x.shape, x.strides, target.dtype, target.shape, target.strides, with_pairs, chosen
    again = _forward.get(key)
    found = again(x, target) if again is not None else None
    if found is not None:
        return found
    options = _Options.of(*choices)
    call = Call(x, "x", device)
    laid = _laid(call, target, options)
    dtype, shape, order = laid.x.dtype, laid.target.shape, laid.order
    each = options.reduction == "none"
    loss = call.empty(dtype, shape if each else (), order if each else ())
    wide = accumulator(dtype), (*shape, 2), (*order, len(shape))
    pairs = call.empty(*wide)
    if product(shape):
        plan = _run(call, _forward.library, laid, options, [loss, pairs, laid.x, laid.target])
        if key is not None and call.is_plain((x, laid.x), (target, laid.target)):
            if call.kind is kinds.NUMPY:
                of_loss = call.maker(dtype, loss.shape, order if each else ())
                _forward.learn(key, _again(plan, laid, of_loss, call.maker(*wide), with_pairs))
            else:
                both = shortcuts.buffers(plan, [loss, pairs], [laid.x, laid.target], (0, 1))
                _forward.learn(key, both if with_pairs else shortcuts.first(both))
    if not product(shape) and not each:
        # There is no row that counts.
        result = call.scalar(np.nan if options.reduction == "mean" else 0)
    else:
        result = call.result(loss)
    return (result, call.result(pairs)) if with_pairs else result


def _gradient(given: tuple[Any, ...], choices: tuple[Any, Any, Any], device: Any = None, in_place: bool = False) -> Any:
    """Returns the gradient of the logits, in new memory or in theirs."""
    key, known = None, _in_place if in_place else _backward
    x, target, pairs, dloss = given
    if dloss is None:
        given = given[:3]
    chosen = _sign(*choices)
    if not (type(x) is type(target) is type(pairs) is np.ndarray):
        key = of_buffers(given, device, chosen)
    elif chosen is not None and (device is None or is_home(device)):
        key = chosen, x.dtype, x.shape, x.strides, target.dtype, target.shape, target.strides
        key += pairs.dtype, pairs.shape, pairs.strides
        if dloss is not None:
            key = (*key, dloss.dtype, dloss.shape, dloss.strides) if type(dloss) is np.ndarray else None
    again = known.get(key)
    found = again(*given) if again is not None else None
    if found is not None:
        return found
    options = _Options.of(*choices)
    place = _check_shared(x) if in_place else None
    call = Call(x, "x", device)
    laid = _laid(call, target, options)
    if in_place and laid.x.address != (place or call.x.address):
        raise ValueError(convert.OVERWRITTEN)
    wide, (shape, order) = accumulator(laid.x.dtype), (laid.target.shape, laid.order)
    of_rows = call.floats(pairs, "pairs")
    check_like(of_rows, "pairs", wide, (*shape, 2), "of these logits")
    arrays = [laid.x, call.laid(of_rows, (*order, len(shape))), laid.target]
    if dloss is not None:
        upstream = call.floats(dloss, "dloss")
        each = options.reduction == "none"
        check_like(upstream, "dloss", laid.x.dtype, shape if each else (), "of the loss")
        arrays.append(call.laid(upstream, order if each else ()))
    dx = laid.x if in_place else call.empty(laid.x.dtype, laid.x.shape, laid.layout.order)
    if laid.x.size:
        plan = _run(call, known.library, laid, options, [dx, *arrays, None][:5])
        ins = [laid.x, laid.target, arrays[1], *arrays[3:]]
        if key is not None and call.is_plain(*zip(given, ins, strict=True)):
            if call.kind is kinds.NUMPY:
                known.learn(key, _gradient_again(plan, arrays, in_place))
            else:
                order = 0, 2, 1, -1 if dloss is None else 3
                known.learn(key, shortcuts.first(shortcuts.buffers(plan, [dx], ins, order)))
    return call.written(x) if in_place else call.result(dx)


def _sign(ignore_index: Any, label_smoothing: Any, reduction: Any) -> Any:
    """Returns what tells options apart, or None if they are not what they should be."""
    if type(ignore_index) is int and type(label_smoothing) in (float, int) and type(reduction) is str:
        return ignore_index, label_smoothing, reduction
    return None


def _laid(call: Call, target: Any, options: _Options) -> _Rows:
    """Returns logits, and targets in the order in which they lie, or refuses targets that do not fit."""
    classes = call.classes(target)
    shape = call.x.shape
    place = check_target_shape(classes.shape, shape)
    n = shape[place]
    if call.place != HOST and classes.device == HOST:
        _check_classes(view(classes), n, options.ignore_index)
    if call.x.size:
        x, layout = call.walked(call.x, (place,))
    else:
        plain = tuple(range(len(shape)))
        x, layout = call.x, Layout(plain, Rows(product(classes.shape), n, 1))
    order = without(layout.order, (place,))
    return _Rows(x, call.laid(classes, order), layout, order)


def _check_classes(target: np.ndarray, n: int, ignored: int) -> None:
    """Refuses targets of the host that are no classes, where a GPU will compute, which raises nothing."""
    wrong = (target != ignored) & ((target < 0) | (target >= n))
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(_no_class(where, int(target[where]), n, ignored))


def _no_class(where: Sequence[int], value: int, n: int, ignored: int) -> str:
    place = str(list(where)) if where else ""
    return f"target{place} is {value}, which is neither a class from 0 to {n - 1} nor ignore_index {ignored}"


def _run(call: Call, name: str, laid: _Rows, options: _Options, arrays: Sequence[Array | None]) -> _native.Plan:
    """Computes; a target that is no class is told by its place in what the caller passed."""
    try:
        return call.run(name, laid.layout.rows, options.told(laid.target), arrays)
    except ValueError as error:
        found = re.match(r"target\[(\d+)\] is (-?\d+),", str(error))
        if not found:
            raise
        shape = laid.target.shape
        inside = np.unravel_index(int(found[1]), [shape[i] for i in laid.order]) if shape else ()
        where = [0] * len(shape)
        for i, index in zip(laid.order, inside, strict=True):
            where[i] = int(index)
        n = laid.layout.rows.n
    raise ValueError(_no_class(where, int(found[2]), n, options.ignore_index))


def _again(plan: _native.Plan, laid: _Rows, of_loss: Any, of_pairs: Any, with_pairs: bool) -> shortcuts.Again:
    """Returns what computes the loss of other arrays of NumPy."""
    run, call, odd = plan.run, plan.call, SIZES[laid.x.dtype] - 1
    odd_target = SIZES[laid.target.dtype] - 1
    at, is_scalar = address, not of_loss().shape

    def again(x: np.ndarray, target: np.ndarray) -> Any:
        _ = plan
        source, classes = at(x), at(target)
        if source & odd or classes & odd_target:
            return None
        loss, pairs = of_loss(), of_pairs()
        error = run(call, 0, at(loss), at(pairs), source, classes, 0)
        if error:
            # The long way round says where.
            return discard(error)
        if is_scalar:
            loss = loss[()]
        return (loss, pairs) if with_pairs else loss

    return again


def _gradient_again(plan: _native.Plan, arrays: Sequence[Array], in_place: bool) -> shortcuts.Again:
    """Returns what computes the gradient of other arrays of NumPy."""
    run, call, at = plan.run, plan.call, address
    empty_like = shortcuts.like(None, arrays[0].size * SIZES[arrays[0].dtype])
    odd, odd_pairs, odd_target = (SIZES[array.dtype] - 1 for array in arrays[:3])

    def again(x: np.ndarray, target: np.ndarray, pairs: np.ndarray, dloss: np.ndarray | None = None) -> Any:
        _ = plan
        source, classes, rows = at(x), at(target), at(pairs)
        upstream = 0 if dloss is None else at(dloss)
        if (source | upstream) & odd or classes & odd_target or rows & odd_pairs:
            return None
        if in_place and not x.flags.writeable:
            return None
        dx = x if in_place else empty_like(x)
        error = run(call, 0, at(dx), source, rows, classes, upstream, 0)
        return dx if not error else discard(error)

    return again


def _check_shared(x: Any) -> int | None:
    """Refuses what cannot be written to where it lies; returns where that is, if NumPy does not know."""
    if isinstance(x, np.ndarray):
        found = None
        shared = x.dtype.isnative and x.dtype.name in FLOATS and x.flags.aligned and x.flags.writeable
    elif hasattr(x, "__dlpack__") and not isinstance(x, np.generic):
        lent = convert.lend(x, "x", kinds.of(x).reader(x), to_write=True)
        found, shared = lent.address, lent.dtype in FLOATS
    else:
        raise TypeError(
            "x is to be overwritten, so that it must be a NumPy array, a max.driver.Buffer, a torch.Tensor or another "
            f"array that speaks DLPack, not a {type(x).__name__}"
        )
    if not shared:
        raise ValueError(convert.OVERWRITTEN)
    return found
