"""Cross entropy, and logarithms of probabilities, of rows that are split over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from max.dtype import DType
from max.graph import TensorType, TensorValue, TensorValueLike
from max.graph import ops as max_ops

from maxsoftmax._arguments import check_target_dtype, check_target_shape, words
from maxsoftmax._types import Reduction
from maxsoftmax.ops._losses import choices_of
from maxsoftmax.ops._values import add_op, as_tensor, bits_of, check_like
from maxsoftmax.ops.sharded._rows import Rows, Shards, Signals, gather, merge, number, split_rows, stacked

IGNORED, WRONG = -1, -2
"""What the kernels are told of a row that does not count, and of one whose target is no class."""


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
    split = split_rows(shards, signals, axis)
    found = targets_of(split, tokens, "tokens")
    if list(found[0].shape) != split.kept:
        raise ValueError(f"tokens has shape {words(found[0].shape)}, but here it needs {words(split.kept)}")
    # No class is ignored.
    losses, _ = row_losses(split, found, {"ignore_index": WRONG, "smoothing": bits_of(0.0)}, 0.0)
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
    split = split_rows(shards, signals, None)
    targets = targets_of(split, target)
    choices = loss_choices(split, targets[0], ignore_index, label_smoothing, reduction)
    losses, pairs = row_losses(split, targets, choices, label_smoothing)
    results = []
    for loss, labels, x in zip(losses, targets, split.shards, strict=True):
        result = max_ops.reshape(loss, split.kept)
        if reduction != "none":
            result = max_ops.sum(loss, 0)
            if reduction == "mean":
                ignored = max_ops.equal(max_ops.reshape(labels, [split.rows]), number(ignore_index, labels))
                ones = max_ops.where(ignored, number(0, loss), number(1, loss))
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
    split = split_rows(shards, None, None)
    targets = targets_of(split, target)
    choices = loss_choices(split, targets[0], ignore_index, label_smoothing, reduction)
    kept, each = split.kept, reduction == "none"
    upstream: Sequence[Any] = gradients if gradients is not None else [None] * len(split.shards)
    for name, values in (("pairs", pairs), ("gradients", upstream)):
        if len(values) != len(split.shards):
            raise ValueError(f"{name} has {len(values)} tensors, but there are {len(split.shards)} shards")
    results = []
    for i, (x, pair, dloss) in enumerate(zip(split.shards, pairs, upstream, strict=True)):
        found = as_tensor(pair, "pairs")
        check_like(found, "pairs", split.wide, [*kept, 2], x.device)
        if dloss is None:
            scale = max_ops.broadcast_to(number(1, found), [split.rows if each else 1])
        else:
            scale = as_tensor(dloss, "gradients")
            check_like(scale, "gradients", scale.dtype, kept if each else [], x.device)
            scale = max_ops.reshape(max_ops.cast(scale, split.wide), [split.rows if each else 1])
        values = [
            x,
            local_targets(split, i, targets[i], choices["ignore_index"]),
            max_ops.reshape(found, [split.rows, 2]),
        ]
        parameters = {**choices, "ignore_index": IGNORED}
        (dx,) = add_op("cross_entropy_backward", [*values, scale], [x.type], parameters)
        results.append(dx)
    return results


def targets_of(split: Rows, target: Any, name: str = "target") -> list[TensorValue]:
    """Returns the targets on each device.

    Raises:
        TypeError: If they are no integers.
        ValueError: If they do not fit.
    """
    given = list(target) if isinstance(target, (list, tuple)) else [target] * len(split.shards)
    if len(given) != len(split.shards):
        raise ValueError(f"{name} has {len(given)} tensors, but there are {len(split.shards)} shards")
    found = [as_tensor(t, name) for t in given]
    for t in found:
        check_target_dtype(t.dtype, name)
        if list(t.shape) != list(found[0].shape):
            raise ValueError(f"{name} has tensors of shapes {words(t.shape)} and {words(found[0].shape)}")
    return [t if t.device == x.device else t.to(x.device) for t, x in zip(found, split.shards, strict=True)]


def loss_choices(
    split: Rows, target: TensorValue, ignore_index: Any, label_smoothing: Any, reduction: Any
) -> dict[str, Any]:
    """Returns what the kernels are told of a loss."""
    place = check_target_shape(target.shape, split.shards[0].shape)
    return {**choices_of(place, ignore_index, label_smoothing, reduction), "classes": max(split.classes, 1)}


def row_losses(
    split: Rows, targets: list[TensorValue], choices: dict[str, Any], share: float
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
        values = [x, local_targets(split, i, targets[i], ignored)]
        types = [TensorType(split.wide, shape, x.device) for shape in shapes]
        term, pairs = add_op("cross_entropy", values, types, parameters)
        numbers.append([pairs[:, 0], pairs[:, 1], term])
    losses, whole = [], []
    gathered = gather(split, numbers)
    for (m, d), every, labels in zip(merge(split, numbers, gathered), gathered, targets, strict=True):
        target = max_ops.reshape(labels, [split.rows])
        loss = max_ops.log(d)
        is_wrong = _outside(target, 0, split.classes)
        for n, start, (top, _, term) in zip(split.lengths, split.starts, every, strict=True):
            is_here = max_ops.logical_not(_outside(target, start, start + n))
            even = share * n / max(split.classes, 1)
            weight = max_ops.where(is_here, number(1 - share + even, m), number(even, m))
            counts = max_ops.greater(weight, number(0, m))
            # A shard of nothing but -inf says nothing of its distance, which is infinite.
            nothing = max_ops.equal(top, number(-np.inf, m))
            distance = max_ops.where(nothing, number(np.inf, m), term + weight * (m - top))
            loss = loss + max_ops.where(counts, distance, number(0, m))
        loss = max_ops.where(is_wrong, number(np.nan, m), loss)
        if ignored != WRONG:
            loss = max_ops.where(max_ops.equal(target, number(ignored, target)), number(0, m), loss)
        losses.append(loss)
        whole.append(stacked(m, d))
    return losses, whole


def local_targets(split: Rows, i: int, target: TensorValue, ignored: int) -> TensorValue:
    """Returns targets as the kernels take them: counted from the shard's first class, past its last if elsewhere."""
    labels = max_ops.cast(max_ops.reshape(target, [split.rows]), DType.int64)
    start, n = split.starts[i], split.lengths[i]
    elsewhere = max_ops.where(_outside(labels, start, start + n), number(n, labels), labels - number(start, labels))
    known = max_ops.where(_outside(labels, 0, split.classes), number(WRONG, labels), elsewhere)
    if ignored == WRONG:
        return known
    return max_ops.where(max_ops.equal(labels, number(ignored, labels)), number(IGNORED, labels), known)


def _outside(values: TensorValue, low: int, high: int) -> TensorValue:
    """Returns where integers are below `low`, or not below `high`."""
    below = max_ops.greater(number(low, values), values)
    return max_ops.logical_or(below, max_ops.greater_equal(values, number(high, values)))
