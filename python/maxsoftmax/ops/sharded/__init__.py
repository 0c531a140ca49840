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
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from max.dtype import DType
from max.graph import TensorValue, TensorValueLike
from max.graph import ops as max_ops

from maxsoftmax.ops._losses import choices_of
from maxsoftmax.ops._statistics import max_sum
from maxsoftmax.ops._values import add_op, as_tensor, check_like
from maxsoftmax.ops.sharded._losses import (
    IGNORED,
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_forward,
    token_log_probs,
)
from maxsoftmax.ops.sharded._rows import Rows, Shards, Signals, along, exp, gather, merge, number, split_rows, stacked

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


def __dir__() -> list[str]:
    """Returns what there is to use here, without what it is made of."""
    return sorted(__all__)


def softmax(shards: Shards, signals: Signals = (), axis: int = -1) -> list[TensorValue]:
    """Adds softmax of whole rows.

    Args:
        shards: Logits of each device: of rank 1 or more, of one dtype, floats of 16 to 64 bits.
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
    split = split_rows(shards, signals, axis)
    pairs = [stacked(m, d) for m, d in merge(split, pairs_of(split))]
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
    split = split_rows(shards, signals, axis)
    results = []
    for x, (m, d) in zip(split.shards, merge(split, pairs_of(split)), strict=True):
        top, rest = (along(y, split) for y in (m, max_ops.log(d)))
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
    split = split_rows(shards, signals, axis)
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
    split = split_rows(shards, signals, axis)
    pairs = _with_gradients(split, gradients)
    totals = _totals(split, [dy for _, dy in pairs])
    return [
        max_ops.cast(dy - exp(y) * total, x.dtype)
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
    split = split_rows(shards, signals, axis)
    results = []
    for x, (m, d) in zip(split.shards, merge(split, pairs_of(split)), strict=True):
        # Where m is infinite, d says nothing of it, but for NaN beside -inf only.
        nothing = max_ops.logical_and(max_ops.equal(m, number(-np.inf, m)), max_ops.equal(d, number(0, m)))
        infinite = max_ops.logical_or(nothing, max_ops.equal(m, number(np.inf, m)))
        found = max_ops.where(infinite, m, m + max_ops.log(d))
        results.append(max_ops.reshape(max_ops.cast(found, x.dtype), split.kept))
    return results


def pairs_of(split: Rows) -> list[list[TensorValue]]:
    """Returns m and d of the rows of each shard: (rows,) both."""
    return [[max_ops.reshape(y, [split.rows]) for y in max_sum(x, split.axis)] for x in split.shards]


def _probabilities(split: Rows, x: TensorValue, pairs: TensorValue) -> TensorValue:
    """Returns what the kernel of the loss's gradient makes of logits whose targets are all elsewhere: p."""
    shape = [split.rows]
    elsewhere = max_ops.broadcast_to(max_ops.constant(np.iinfo(np.int32).max, DType.int32, x.device), shape)
    ones = max_ops.broadcast_to(number(1, pairs), [1])
    choices = choices_of(split.axis, IGNORED, 0.0, "sum")
    parameters = {**choices, "classes": max(split.classes, 1)}
    (y,) = add_op("cross_entropy_backward", [x, elsewhere, pairs, ones], [x.type], parameters)
    return y


def _with_gradients(split: Rows, gradients: Any) -> list[tuple[TensorValue, TensorValue]]:
    """Returns results and their gradients, in the dtype of the accumulator.

    Raises:
        TypeError: If gradients are not of the dtype of the results.
        ValueError: If they do not fit.
    """
    if len(gradients) != len(split.shards):
        raise ValueError(f"gradients has {len(gradients)} tensors, but there are {len(split.shards)} shards")
    found = []
    for i, (y, dy) in enumerate(zip(split.shards, gradients, strict=True)):
        value = as_tensor(dy, f"gradients[{i}]")
        check_like(value, f"gradients[{i}]", y.dtype, y.shape, y.device)
        found.append((max_ops.cast(y, split.wide), max_ops.cast(value, split.wide)))
    return found


def _totals(split: Rows, terms: list[TensorValue]) -> list[TensorValue]:
    """Returns sums over whole rows on each device, by one collective, with the axis of length 1."""
    sums = []
    for term, n in zip(terms, split.lengths, strict=True):
        total = max_ops.sum(term, split.axis) if n else max_ops.broadcast_to(number(0, term), split.kept)
        sums.append([max_ops.reshape(total, [split.rows])])
    every = gather(split, sums)
    return [along(functools.reduce(operator.add, [total for (total,) in each]), split) for each in every]
