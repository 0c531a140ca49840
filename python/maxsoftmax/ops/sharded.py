"""Softmax, its relatives and cross entropy of logits whose rows are split over the devices of a `max.graph.Graph`.

Each device has a shard of every row: some of the classes, all devices together all of them, in the order in which they
are passed. Shards may differ in length, which has to be static, and be empty; all else of their shapes and the dtype is
the same. What goes from device to device is a few numbers a row, by one `max.graph.ops.allgather`: no logits. All
devices merge them in the same order, so what there is one of for each row, or for all, has the same bits on all.

`signals` are the values of a graph's inputs for `max.nn.Signals`, one a device. Without GPUs, shards may lie on one
device together, as in a simulated `max.experimental.sharding.DeviceMesh`: then nothing travels.

Example:
    >>> import maxsoftmax.ops.sharded
    >>> from max.dtype import DType
    >>> from max.graph import DeviceRef, Graph, TensorType
    >>> from max.nn import Signals
    >>> gpus = [DeviceRef.GPU(0), DeviceRef.GPU(1)]
    >>> logits = [TensorType(DType.bfloat16, ("rows", 64128), gpu) for gpu in gpus]
    >>> types = [*logits, TensorType(DType.int64, ("rows",), gpus[0]), *Signals(gpus).input_types()]
    >>> with Graph("loss", input_types=types) as graph:
    ...     first, second, target, *signals = graph.inputs
    ...     losses = maxsoftmax.ops.sharded.cross_entropy([first, second], target, signals)
    >>> losses[1].device
    gpu:1
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from max.dtype import DType
from max.graph import BufferValueLike, Dim, StaticDim, TensorType, TensorValue, TensorValueLike
from max.graph import ops as max_ops

from maxsoftmax import ops
from maxsoftmax._arguments import accumulator, check_dtype, check_target_dtype, check_target_shape, words
from maxsoftmax._types import Reduction

__all__ = [
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "softmax",
    "softmax_backward",
    "token_log_probs",
]

Shards = Sequence[TensorValueLike]
Signals = Iterable[BufferValueLike]

IGNORED, WRONG = -1, -2
"""What the kernels are told of a row that does not count, and of one whose target is no class."""


class _Rows(NamedTuple):
    """Shards of rows."""

    shards: list[TensorValue]
    axis: int
    signals: list[Any]

    @property
    def lengths(self) -> list[int]:
        """The classes of each shard."""
        return [int(x.shape[self.axis]) for x in self.shards]

    @property
    def starts(self) -> list[int]:
        """The classes before each shard."""
        return list(itertools.accumulate(self.lengths, initial=0))[:-1]

    @property
    def classes(self) -> int:
        """How many there are of a row."""
        return sum(self.lengths)

    @property
    def kept(self) -> list[Dim]:
        """The dimensions beside the axis."""
        return [dim for i, dim in enumerate(self.shards[0].shape) if i != self.axis]

    @property
    def rows(self) -> Dim:
        """How many there are."""
        return ops._product(self.kept)

    @property
    def wide(self) -> DType:
        """The dtype of the accumulator."""
        return accumulator(self.shards[0].dtype)


def softmax(shards: Shards, signals: Signals = (), axis: int = -1) -> list[TensorValue]:
    """Adds softmax of whole rows.

    Args:
        shards: Logits of each device: of rank 1 or more, of one dtype that `maxsoftmax.ops.softmax` takes.
        signals: Buffers of the devices, where there are several.
        axis: The axis that is split; negative counts from the last.

    Returns:
        Probabilities, one tensor a shard, of its shape, dtype and device.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If there is no such axis, or shapes, devices or the number of signals do not fit.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> types = [TensorType(DType.float32, ("rows", n), DeviceRef.CPU()) for n in (4, 3)]
        >>> with Graph("scores", input_types=types) as graph:
        ...     shards = maxsoftmax.ops.sharded.softmax(graph.inputs)
        >>> shards[1].shape
        [Dim('rows'), Dim(3)]
    """
    split = _split(shards, signals, axis)
    pairs = [_stacked(m, d) for m, d in _whole(split, _pairs(split))]
    return [_probabilities(split, x, pair) for x, pair in zip(split.shards, pairs, strict=True)]


def log_softmax(shards: Shards, signals: Signals = (), axis: int = -1) -> list[TensorValue]:
    """Adds the logarithm of softmax of whole rows.

    Args:
        shards: Logits: a shard of each row a device, in the order of the classes.
        signals: Buffers of the devices, where there are several.
        axis: The axis that is split; negative counts from the last.

    Returns:
        Logarithms of probabilities, one tensor a shard, of its shape, dtype and device.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If there is no such axis, or shapes, devices or the number of signals do not fit.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> types = [TensorType(DType.float32, ("rows", n), DeviceRef.CPU()) for n in (4, 3)]
        >>> with Graph("scores", input_types=types) as graph:
        ...     shards = maxsoftmax.ops.sharded.log_softmax(graph.inputs)
        >>> shards[1].shape
        [Dim('rows'), Dim(3)]
    """
    split = _split(shards, signals, axis)
    results = []
    for x, (m, d) in zip(split.shards, _whole(split, _pairs(split)), strict=True):
        top, rest = (_along(y, split) for y in (m, max_ops.log(d)))
        results.append(max_ops.cast(max_ops.cast(x, split.wide) - top - rest, x.dtype))
    return results


def softmax_backward(
    shards: Shards, gradients: Sequence[TensorValueLike], signals: Signals = (), axis: int = -1
) -> list[TensorValue]:
    """Adds the gradient of the logits of `softmax`: y · (dy - Σ y·dy), for which one number a row travels.

    Args:
        shards: What `softmax` returned.
        gradients: The gradient of each: of its shape, dtype and device.
        signals: Buffers of the devices, where there are several.
        axis: The axis that is split; negative counts from the last.

    Returns:
        The gradients of the logits, one a shard, of its shape, dtype and device.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If there is no such axis, or shapes, devices or the number of signals do not fit.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> types = [TensorType(DType.float32, ("rows", n), DeviceRef.CPU()) for n in (4, 3)]
        >>> with Graph("gradient", input_types=types) as graph:
        ...     shards = maxsoftmax.ops.sharded.softmax(graph.inputs)
        ...     gradients = maxsoftmax.ops.sharded.softmax_backward(shards, graph.inputs)
        >>> gradients[1].shape
        [Dim('rows'), Dim(3)]
    """
    split = _split(shards, signals, axis)
    pairs = _with_gradients(split, gradients)
    totals = _totals(split, [y * dy for y, dy in pairs])
    return [
        max_ops.cast(y * (dy - total), x.dtype) for x, (y, dy), total in zip(split.shards, pairs, totals, strict=True)
    ]


def log_softmax_backward(
    shards: Shards, gradients: Sequence[TensorValueLike], signals: Signals = (), axis: int = -1
) -> list[TensorValue]:
    """Adds the gradient of the logits of `log_softmax`: dy - e^y · Σ dy, for which one number a row travels.

    Args:
        shards: What `log_softmax` returned.
        gradients: The gradient of each: of its shape, dtype and device.
        signals: Buffers of the devices, where there are several.
        axis: The axis that is split; negative counts from the last.

    Returns:
        The gradients of the logits, one a shard, of its shape, dtype and device.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If there is no such axis, or shapes, devices or the number of signals do not fit.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> types = [TensorType(DType.float32, ("rows", n), DeviceRef.CPU()) for n in (4, 3)]
        >>> with Graph("gradient", input_types=types) as graph:
        ...     shards = maxsoftmax.ops.sharded.log_softmax(graph.inputs)
        ...     gradients = maxsoftmax.ops.sharded.log_softmax_backward(shards, graph.inputs)
        >>> gradients[1].shape
        [Dim('rows'), Dim(3)]
    """
    split = _split(shards, signals, axis)
    pairs = _with_gradients(split, gradients)
    totals = _totals(split, [dy for _, dy in pairs])
    return [
        max_ops.cast(dy - _exp(y) * total, x.dtype)
        for x, (y, dy), total in zip(split.shards, pairs, totals, strict=True)
    ]


def logsumexp(shards: Shards, signals: Signals = (), axis: int = -1) -> list[TensorValue]:
    """Adds ln Σ exp of whole rows.

    Args:
        shards: Logits: a shard of each row a device, in the order of the classes.
        signals: Buffers of the devices, where there are several.
        axis: The axis that is split; negative counts from the last.

    Returns:
        One number a row, the same on each device: of the shape of a shard without the axis, and its dtype; -inf for a
        row of nothing but -inf.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If there is no such axis, or shapes, devices or the number of signals do not fit.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> types = [TensorType(DType.float32, ("rows", n), DeviceRef.CPU()) for n in (4, 3)]
        >>> with Graph("sums", input_types=types) as graph:
        ...     sums = maxsoftmax.ops.sharded.logsumexp(graph.inputs)
        >>> sums[1].shape
        [Dim('rows')]
    """
    split = _split(shards, signals, axis)
    results = []
    for x, (m, d) in zip(split.shards, _whole(split, _pairs(split)), strict=True):
        # Where m is infinite, d says nothing of it, but for NaN beside -inf only.
        nothing = max_ops.logical_and(max_ops.equal(m, _number(-np.inf, m)), max_ops.equal(d, _number(0, m)))
        infinite = max_ops.logical_or(nothing, max_ops.equal(m, _number(np.inf, m)))
        found = max_ops.where(infinite, m, m + max_ops.log(d))
        results.append(max_ops.reshape(max_ops.cast(found, x.dtype), split.kept))
    return results


def token_log_probs(
    shards: Shards, tokens: TensorValueLike | Sequence[TensorValueLike], signals: Signals = (), axis: int = -1
) -> list[TensorValue]:
    """Adds the logarithm of the probability of one token of each row.

    Args:
        shards: Logits: a shard of each row a device, in the order of the classes.
        tokens: Which class of each row, counted over all shards: of the shape of a shard without the axis, int32 or
            int64; one tensor for all devices, or the same values on each. What is no class has the logarithm NaN.
        signals: Buffers of the devices, where there are several.
        axis: The axis that is split; negative counts from the last.

    Returns:
        The logarithms, the same on each device, of the shape of `tokens`: float64 if the logits are, else float32.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If there is no such axis, or shapes, devices or the number of signals do not fit.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> types = [TensorType(DType.float32, ("rows", n), DeviceRef.CPU()) for n in (4, 3)]
        >>> types.append(TensorType(DType.int64, ("rows",), DeviceRef.CPU()))
        >>> with Graph("losses", input_types=types) as graph:
        ...     *shards, classes = graph.inputs
        ...     found = maxsoftmax.ops.sharded.token_log_probs(shards, classes)
        >>> found[1].shape
        [Dim('rows')]
    """
    split = _split(shards, signals, axis)
    found = _targets(split, tokens, "tokens")
    if list(found[0].shape) != split.kept:
        raise ValueError(f"tokens has shape {words(found[0].shape)}, but here it needs {words(split.kept)}")
    # No class is ignored.
    losses, _ = _losses(split, found, {"ignore_index": WRONG, "smoothing": ops._bits(0.0)}, 0.0)
    return [max_ops.reshape(max_ops.negate(loss), split.kept) for loss in losses]


def cross_entropy(
    shards: Shards,
    target: TensorValueLike | Sequence[TensorValueLike],
    signals: Signals = (),
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> list[TensorValue]:
    """Adds the cross entropy of whole rows, as `maxsoftmax.ops.cross_entropy` defines it.

    Args:
        shards: Logits of each device: (n,), (rows, n), or (rows, n, …) with its n classes along axis 1.
        target: The class of each row, counted over all shards: of the shape of a shard without the classes, int32 or
            int64; one tensor for all devices, or the same values on each. A target that is neither a class nor
            `ignore_index` makes the row's loss NaN, on a CPU, too.
        signals: Buffers of the devices, where there are several.
        ignore_index: The target of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes of all shards.
        reduction: "mean" over the rows that count, NaN if there are none; "sum"; or "none" for one loss a row.

    Returns:
        The loss, the same on each device: a scalar, or of the shape of `target`; of the dtype of the shards.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes, devices or the number of signals do not fit, or another argument is not one of these.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> types = [TensorType(DType.float32, ("rows", n), DeviceRef.CPU()) for n in (4, 3)]
        >>> types.append(TensorType(DType.int64, ("rows",), DeviceRef.CPU()))
        >>> with Graph("losses", input_types=types) as graph:
        ...     *shards, classes = graph.inputs
        ...     found = maxsoftmax.ops.sharded.cross_entropy(shards, classes, reduction="none")
        >>> found[1].shape
        [Dim('rows')]
    """
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    return cross_entropy_forward(shards, target, signals, **options)[0]  # type: ignore[arg-type]


def cross_entropy_forward(
    shards: Shards,
    target: TensorValueLike | Sequence[TensorValueLike],
    signals: Signals = (),
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> tuple[list[TensorValue], list[TensorValue]]:
    """Adds `cross_entropy` and returns beside it what its gradient needs.

    Args:
        shards: Logits of each device: (n,), (rows, n), or (rows, n, …) with its n classes along axis 1.
        target: The class of each row, counted over all shards: of the shape of a shard without the classes, int32 or
            int64; one tensor for all devices, or the same values on each. A target that is neither a class nor
            `ignore_index` makes the row's loss NaN, on a CPU, too.
        signals: Buffers of the devices, where there are several.
        ignore_index: The target of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes of all shards.
        reduction: "mean" over the rows that count, NaN if there are none; "sum"; or "none" for one loss a row.

    Returns:
        The loss, and the pairs (m, d) of whole rows, of the shape of `target` and another axis, of 2: both the same on
        each device.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes, devices or the number of signals do not fit, or another argument is not one of these.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> types = [TensorType(DType.float32, ("rows", n), DeviceRef.CPU()) for n in (4, 3)]
        >>> types.append(TensorType(DType.int64, ("rows",), DeviceRef.CPU()))
        >>> with Graph("loss", input_types=types) as graph:
        ...     *shards, classes = graph.inputs
        ...     losses, pairs = maxsoftmax.ops.sharded.cross_entropy_forward(shards, classes)
        >>> losses[0].rank, pairs[0].rank
        (0, 2)
    """
    split = _split(shards, signals, None)
    targets = _targets(split, target)
    choices = _choices(split, targets[0], ignore_index, label_smoothing, reduction)
    losses, pairs = _losses(split, targets, choices, label_smoothing)
    results = []
    for loss, labels, x in zip(losses, targets, split.shards, strict=True):
        result = max_ops.reshape(loss, split.kept)
        if reduction != "none":
            result = max_ops.sum(loss, 0)
            if reduction == "mean":
                ignored = max_ops.equal(max_ops.reshape(labels, [split.rows]), _number(ignore_index, labels))
                ones = max_ops.where(ignored, _number(0, loss), _number(1, loss))
                result = result / max_ops.sum(ones, 0)
            result = max_ops.reshape(result, [])
        results.append(max_ops.cast(result, x.dtype))
    return results, [max_ops.reshape(pair, [*split.kept, 2]) for pair in pairs]


def cross_entropy_backward(
    shards: Shards,
    target: TensorValueLike | Sequence[TensorValueLike],
    pairs: Sequence[TensorValueLike],
    gradients: Sequence[TensorValueLike] | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> list[TensorValue]:
    """Adds the gradient of the logits of `cross_entropy`: one read and one write on each device, and nothing travels.

    Args:
        shards: Logits of each device: (n,), (rows, n), or (rows, n, …) with its n classes along axis 1.
        target: The class of each row, counted over all shards: of the shape of a shard without the classes, int32 or
            int64; one tensor for all devices, or the same values on each. A target that is neither a class nor
            `ignore_index` makes the row's loss NaN, on a CPU, too.
        pairs: The pairs that `cross_entropy_forward` returned.
        gradients: The gradient of the loss, on each device, of its shape and a floating dtype; 1 if None.
        ignore_index: The target of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes of all shards.
        reduction: "mean" over the rows that count, NaN if there are none; "sum"; or "none" for one loss a row.

    Returns:
        The gradients, one a shard, of its shape, dtype and device: 0 in rows that do not count.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes or devices do not fit, or another argument is not one of these.
        LookupError: If no graph is being built.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> types = [TensorType(DType.float32, ("rows", n), DeviceRef.CPU()) for n in (4, 3)]
        >>> types.append(TensorType(DType.int64, ("rows",), DeviceRef.CPU()))
        >>> with Graph("loss", input_types=types) as graph:
        ...     *shards, classes = graph.inputs
        ...     losses, pairs = maxsoftmax.ops.sharded.cross_entropy_forward(shards, classes)
        ...     gradients = maxsoftmax.ops.sharded.cross_entropy_backward(shards, classes, pairs)
        >>> gradients[1].shape
        [Dim('rows'), Dim(3)]
    """
    split = _split(shards, None, None)
    targets = _targets(split, target)
    choices = _choices(split, targets[0], ignore_index, label_smoothing, reduction)
    kept, each = split.kept, reduction == "none"
    upstream: Sequence[Any] = gradients if gradients is not None else [None] * len(split.shards)
    for name, values in (("pairs", pairs), ("gradients", upstream)):
        if len(values) != len(split.shards):
            raise ValueError(f"{name} has {len(values)} tensors, but there are {len(split.shards)} shards")
    results = []
    for i, (x, pair, dloss) in enumerate(zip(split.shards, pairs, upstream, strict=True)):
        found = ops._value(pair, "pairs")
        ops._check(found, "pairs", split.wide, [*kept, 2], x.device)
        if dloss is None:
            scale = max_ops.broadcast_to(_number(1, found), [split.rows if each else 1])
        else:
            scale = ops._value(dloss, "gradients")
            ops._check(scale, "gradients", scale.dtype, kept if each else [], x.device)
            scale = max_ops.reshape(max_ops.cast(scale, split.wide), [split.rows if each else 1])
        values = [x, _local(split, i, targets[i], choices["ignore_index"]), max_ops.reshape(found, [split.rows, 2])]
        parameters = {**choices, "ignore_index": IGNORED}
        (dx,) = ops._call("cross_entropy_backward", [*values, scale], [x.type], parameters)
        results.append(dx)
    return results


def _split(shards: Any, signals: Any, axis: int | None) -> _Rows:
    """Returns shards that fit each other.

    Args:
        shards: What a caller passed.
        signals: What a caller passed; None if nothing travels.
        axis: The axis that is split; None if it is that of a loss.

    Raises:
        TypeError: If they are no tensors, or not of one dtype.
        ValueError: If they do not fit.
    """
    if isinstance(shards, TensorValue) or not isinstance(shards, Sequence):
        raise TypeError(f"shards must be a list of tensors of the graph, one a device, not {shards!r}")
    if not shards:
        raise ValueError("shards is empty, but there has to be a tensor for each device")
    found = [ops._value(x, f"shards[{i}]") for i, x in enumerate(shards)]
    first = found[0]
    check_dtype(first.dtype, "shards[0]")
    place = ops._axis(axis if axis is not None else min(first.rank, 2) - 1, first, "shards[0]")
    for i, x in enumerate(found):
        if x.dtype != first.dtype:
            raise TypeError(f"shards[{i}] has dtype {x.dtype.name}, but shards[0] has {first.dtype.name}")
        beside = [list(y.shape[:place]) + list(y.shape[place + 1 :]) for y in (x, first)]
        if x.rank != first.rank or beside[0] != beside[1]:
            raise ValueError(
                f"shards[{i}] has shape {words(x.shape)} and shards[0] {words(first.shape)}, but they may differ along "
                f"axis {place} only"
            )
        if not isinstance(x.shape[place], StaticDim):
            raise ValueError(
                f"shards[{i}] has shape {words(x.shape)}, but its length along axis {place} must be static"
            )
    devices = {x.device for x in found}
    if len(devices) not in (1, len(found)):
        raise ValueError(f"shards are on {len(devices)} devices, but {len(found)} need as many, or one for all")
    buffers = [] if signals is None else list(signals)
    if signals is not None and len(devices) > 1 and len(buffers) != len(found):
        raise ValueError(
            f"signals has {len(buffers)} buffers, but {len(found)} devices need one each: max.nn.Signals makes them"
        )
    return _Rows(found, place, buffers)


def _targets(split: _Rows, target: Any, name: str = "target") -> list[TensorValue]:
    """Returns the targets on each device.

    Raises:
        TypeError: If they are no integers.
        ValueError: If they do not fit.
    """
    given = list(target) if isinstance(target, (list, tuple)) else [target] * len(split.shards)
    if len(given) != len(split.shards):
        raise ValueError(f"{name} has {len(given)} tensors, but there are {len(split.shards)} shards")
    found = [ops._value(t, name) for t in given]
    for t in found:
        check_target_dtype(t.dtype, name)
        if list(t.shape) != list(found[0].shape):
            raise ValueError(f"{name} has tensors of shapes {words(t.shape)} and {words(found[0].shape)}")
    return [t if t.device == x.device else t.to(x.device) for t, x in zip(found, split.shards, strict=True)]


def _choices(
    split: _Rows, target: TensorValue, ignore_index: Any, label_smoothing: Any, reduction: Any
) -> dict[str, Any]:
    """Returns what the kernels are told of a loss."""
    place = check_target_shape(target.shape, split.shards[0].shape)
    return {**ops._choices(place, ignore_index, label_smoothing, reduction), "classes": max(split.classes, 1)}


def _losses(
    split: _Rows, targets: list[TensorValue], choices: dict[str, Any], share: float
) -> tuple[list[TensorValue], list[TensorValue]]:
    """Returns the loss of each row, and the pairs of whole rows, on each device.

    A shard's term of the loss is (1 - share)·(m - x) of its target, if it has that, and the share of the mean of m - x
    over all classes that falls to it, with the shard's own m. So one number is what others have to know beside a pair.
    """
    ignored = choices["ignore_index"]
    parameters = {
        **choices,
        "axis": split.axis,
        "ignore_index": IGNORED,
        "reduction": "none",
        "classes": max(split.classes, 1),
    }
    numbers = []
    for i, x in enumerate(split.shards):
        shapes = [split.rows], [split.rows, 2]
        values = [x, _local(split, i, targets[i], ignored)]
        types = [TensorType(split.wide, shape, x.device) for shape in shapes]
        term, pairs = ops._call("cross_entropy", values, types, parameters)
        numbers.append([pairs[:, 0], pairs[:, 1], term])
    losses, whole = [], []
    gathered = _gathered(split, numbers)
    for (m, d), every, labels in zip(_whole(split, numbers, gathered), gathered, targets, strict=True):
        target = max_ops.reshape(labels, [split.rows])
        loss = max_ops.log(d)
        is_wrong = _outside(target, 0, split.classes)
        for n, start, (top, _, term) in zip(split.lengths, split.starts, every, strict=True):
            is_here = max_ops.logical_not(_outside(target, start, start + n))
            even = share * n / max(split.classes, 1)
            weight = max_ops.where(is_here, _number(1 - share + even, m), _number(even, m))
            counts = max_ops.greater(weight, _number(0, m))
            # A shard of nothing but -inf says nothing of its distance, which is infinite.
            nothing = max_ops.equal(top, _number(-np.inf, m))
            distance = max_ops.where(nothing, _number(np.inf, m), term + weight * (m - top))
            loss = loss + max_ops.where(counts, distance, _number(0, m))
        loss = max_ops.where(is_wrong, _number(np.nan, m), loss)
        if ignored != WRONG:
            loss = max_ops.where(max_ops.equal(target, _number(ignored, target)), _number(0, m), loss)
        losses.append(loss)
        whole.append(_stacked(m, d))
    return losses, whole


def _local(split: _Rows, i: int, target: TensorValue, ignored: int) -> TensorValue:
    """Returns targets as the kernels take them: counted from the shard's first class, past its last if elsewhere."""
    labels = max_ops.cast(max_ops.reshape(target, [split.rows]), DType.int64)
    start, n = split.starts[i], split.lengths[i]
    elsewhere = max_ops.where(_outside(labels, start, start + n), _number(n, labels), labels - _number(start, labels))
    known = max_ops.where(_outside(labels, 0, split.classes), _number(WRONG, labels), elsewhere)
    if ignored == WRONG:
        return known
    return max_ops.where(max_ops.equal(labels, _number(ignored, labels)), _number(IGNORED, labels), known)


def _outside(values: TensorValue, low: int, high: int) -> TensorValue:
    """Returns where integers are below `low`, or not below `high`."""
    below = max_ops.greater(_number(low, values), values)
    return max_ops.logical_or(below, max_ops.greater_equal(values, _number(high, values)))


def _pairs(split: _Rows) -> list[list[TensorValue]]:
    """Returns m and d of the rows of each shard: (rows,) both."""
    return [[max_ops.reshape(y, [split.rows]) for y in ops.max_sum(x, split.axis)] for x in split.shards]


def _gathered(split: _Rows, numbers: list[list[TensorValue]]) -> list[list[list[TensorValue]]]:
    """Returns the numbers of all shards on each device, by one collective: its [shard][number], each (rows,)."""
    mine = [max_ops.stack(each, 0) for each in numbers]
    count = len(numbers[0])
    if len({x.device for x in split.shards}) > 1:
        every = max_ops.allgather(mine, split.signals, axis=0)
    else:
        every = [max_ops.concat(mine, 0)] * len(mine)
    return [[[y[count * i + j] for j in range(count)] for i in range(len(mine))] for y in every]


def _whole(
    split: _Rows, numbers: list[list[TensorValue]], gathered: list[list[list[TensorValue]]] | None = None
) -> list[tuple[TensorValue, TensorValue]]:
    """Returns the pair (m, d) of whole rows on each device, merged from those of the shards in their order."""
    results = []
    for every in _gathered(split, numbers) if gathered is None else gathered:
        m = functools.reduce(max_ops.max, [top for top, *_ in every])
        terms = [max_ops.where(max_ops.equal(top, m), d, d * _exp(top - m)) for top, d, *_ in every]
        results.append((m, functools.reduce(operator.add, terms)))
    return results


def _exp(x: TensorValue) -> TensorValue:
    """Returns e^x of what is not above 0."""
    if x.dtype != DType.float64:
        return max_ops.exp(x)
    # MAX's has eleven digits. Softmax of x and 0 is e^x and 1 over their sum.
    both = ops.softmax(max_ops.stack([x, max_ops.broadcast_to(_number(0, x), x.shape)], -1))
    return both[..., 0] / both[..., 1]


def _stacked(m: TensorValue, d: TensorValue) -> TensorValue:
    """Returns pairs as the kernels take them."""
    return max_ops.stack([m, d], 1)


def _probabilities(split: _Rows, x: TensorValue, pairs: TensorValue) -> TensorValue:
    """Returns what the kernel of the loss's gradient makes of logits whose targets are all elsewhere: p."""
    shape = [split.rows]
    elsewhere = max_ops.broadcast_to(max_ops.constant(np.iinfo(np.int32).max, DType.int32, x.device), shape)
    ones = max_ops.broadcast_to(_number(1, pairs), [1])
    choices = ops._choices(split.axis, IGNORED, 0.0, "sum")
    parameters = {**choices, "classes": max(split.classes, 1)}
    (y,) = ops._call("cross_entropy_backward", [x, elsewhere, pairs, ones], [x.type], parameters)
    return y


def _with_gradients(split: _Rows, gradients: Any) -> list[tuple[TensorValue, TensorValue]]:
    """Returns results and their gradients, in the dtype of the accumulator.

    Raises:
        TypeError: If gradients are not of the dtype of the results.
        ValueError: If they do not fit.
    """
    if len(gradients) != len(split.shards):
        raise ValueError(f"gradients has {len(gradients)} tensors, but there are {len(split.shards)} shards")
    found = []
    for i, (y, dy) in enumerate(zip(split.shards, gradients, strict=True)):
        value = ops._value(dy, f"gradients[{i}]")
        ops._check(value, f"gradients[{i}]", y.dtype, y.shape, y.device)
        found.append((max_ops.cast(y, split.wide), max_ops.cast(value, split.wide)))
    return found


def _totals(split: _Rows, terms: list[TensorValue]) -> list[TensorValue]:
    """Returns sums over whole rows on each device, by one collective, with the axis of length 1."""
    sums = []
    for term, n in zip(terms, split.lengths, strict=True):
        total = max_ops.sum(term, split.axis) if n else max_ops.broadcast_to(_number(0, term), split.kept)
        sums.append([max_ops.reshape(total, [split.rows])])
    every = _gathered(split, sums)
    return [_along(functools.reduce(operator.add, [total for (total,) in each]), split) for each in every]


def _along(y: TensorValue, split: _Rows) -> TensorValue:
    """Returns (rows,) with the dimensions of shards, whose axis has length 1."""
    kept = split.kept
    return max_ops.reshape(y, [*kept[: split.axis], 1, *kept[split.axis :]])


def _number(value: float, like: TensorValue) -> TensorValue:
    """Returns a constant of the dtype of a tensor, where that is."""
    return max_ops.constant(value, like.dtype, like.device)
