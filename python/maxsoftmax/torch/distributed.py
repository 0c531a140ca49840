"""Softmax, its relatives and cross entropy of logits whose rows are split over the ranks of a process group.

Each rank has a shard of every row: some of the classes, all ranks together all of them, in the order of the ranks.
Shards may differ in length, and be empty; all else of their shapes, the dtype and the arguments are the same on all
ranks. Every rank calls the function, and if one calls `backward`, all do. What goes from rank to rank is a few numbers
a row, by one all-gather of `torch.distributed`: no logits. What there is one of for each row, or for all, has the same
bits on all ranks. A rank that does not come leaves the others to the time-out of the group.

Example:
    >>> import maxsoftmax.torch.distributed, torch
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> shard = torch.zeros(2, 4, requires_grad=True)
    >>> loss = maxsoftmax.torch.distributed.cross_entropy(shard, torch.tensor([0, 3]))
    >>> loss.backward()
    >>> print(f"{loss:.4f}", shard.grad[0])
    1.3863 tensor([-0.3750,  0.1250,  0.1250,  0.1250])
    >>> torch.distributed.destroy_process_group()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from maxsoftmax._arguments import check_ignore_index, check_label_smoothing, check_reduction
from maxsoftmax._types import Reduction
from maxsoftmax.torch import _sharded_autograd as autograd
from maxsoftmax.torch._arguments import check_target, check_tensor, dimension
from maxsoftmax.torch._memory import PLAIN
from maxsoftmax.torch._modes import autocast

__all__ = ["cross_entropy", "log_softmax", "logsumexp", "softmax"]


def __dir__() -> list[str]:
    """Returns what there is to use here, without what it is made of."""
    return sorted(__all__)


def softmax(shard: torch.Tensor, dim: int = -1, group: Any = None) -> torch.Tensor:
    """Returns this rank's shard of softmax of whole rows.

    Args:
        shard: Logits: of rank 1 or more, float32, bfloat16, float16 or float64, on a CPU or a CUDA device.
        dim: The dimension that is split; negative counts from the last.
        group: The process group; None is all processes.

    Returns:
        Probabilities: of the shape, dtype and strides of `shard`. They have a gradient, which has none, and which is
        one collective of one number a row.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        IndexError: If there is no such dimension.
        ValueError: If `shard` has rank 0, or this process is not in the group.
        RuntimeError: If there is no process group.

    Example:
        >>> # In a process group of one; each rank of more passes its own classes.
        >>> shard = torch.zeros(2, 4)
        >>> maxsoftmax.torch.distributed.softmax(shard)[0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    return _along(shard, dim, lambda x: autograd.softmax(x, False, group))


def log_softmax(shard: torch.Tensor, dim: int = -1, group: Any = None) -> torch.Tensor:
    """Returns this rank's shard of the logarithm of softmax of whole rows.

    Args:
        shard: Logits: this rank's classes of every row; float32, bfloat16, float16 or float64.
        dim: The dimension that is split; negative counts from the last.
        group: The process group; None is all processes.

    Returns:
        Logarithms of probabilities: of the shape, dtype and strides of `shard`. They have a gradient, as softmax has.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        IndexError: If there is no such dimension.
        ValueError: If `shard` has rank 0, or this process is not in the group.
        RuntimeError: If there is no process group.

    Example:
        >>> # In a process group of one; each rank of more passes its own classes.
        >>> shard = torch.zeros(2, 4)
        >>> maxsoftmax.torch.distributed.log_softmax(shard)[0]
        tensor([-1.3863, -1.3863, -1.3863, -1.3863])
    """
    return _along(shard, dim, lambda x: autograd.softmax(x, True, group))


def logsumexp(shard: torch.Tensor, dim: int = -1, group: Any = None) -> torch.Tensor:
    """Returns ln Σ exp of whole rows, the same on all ranks.

    Args:
        shard: Logits: this rank's classes of every row; float32, bfloat16, float16 or float64.
        dim: The dimension that is split; negative counts from the last.
        group: The process group; None is all processes.

    Returns:
        One number a row: of the shape of `shard` without `dim`, and its dtype; -inf for a row of nothing but -inf. It
        has a gradient, that of this rank's shard, for which nothing goes from rank to rank, and which has none.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        IndexError: If there is no such dimension.
        ValueError: If `shard` has rank 0, or this process is not in the group.
        RuntimeError: If there is no process group.

    Example:
        >>> # In a process group of one; each rank of more passes its own classes.
        >>> shard = torch.zeros(2, 4)
        >>> maxsoftmax.torch.distributed.logsumexp(shard)
        tensor([1.3863, 1.3863])
    """
    return _along(shard, dim, lambda x: autograd.logsumexp(x, group))


def cross_entropy(
    shard: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    group: Any = None,
    lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """Returns the cross entropy of whole rows, the same on all ranks.

    Args:
        shard: Logits: (n,), (rows, n) or (rows, n, …) with this rank's n classes along dimension 1, of floats
            of 16 to 64 bits.
        target: The class of each row, counted over all shards: of the shape of `shard` without the classes, int64,
            int32 or uint8, from 0 to the number of all classes less 1, or `ignore_index`. It is the same on all ranks.
            On a GPU another one makes its row's loss NaN.
        ignore_index: The class of rows that do not count.
        reduction: "mean" over the rows that count, NaN if there are none; "sum"; or "none" for one loss a row.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes of all shards.
        group: The process group; None is all processes.
        lengths: The classes of each rank's shard, if they are known. If not, ranks tell each other, with all else. Then
            on a GPU the host waits until they have, and where shards are not all of one length, the first call of a
            group gathers twice. Given, they are compared with those of the other ranks on a CPU only.

    Returns:
        The loss: a scalar, or of the shape of `target`; of the dtype of `shard`, but float32 for bfloat16 and float16
        under torch.autocast. It has a gradient, that of this rank's shard, for which nothing goes from rank to rank,
        and which has none.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes or devices do not fit, or another argument is not one of these; on all ranks, if on a CPU
            a target is not a class, or ranks pass different dtypes, lengths or options.
        RuntimeError: If there is no process group.

    Example:
        >>> # In a process group of one; each rank of more passes its own classes.
        >>> shard = torch.zeros(2, 4)
        >>> maxsoftmax.torch.distributed.cross_entropy(shard, torch.tensor([0, 3]))
        tensor(1.3863)
    """
    _check(shard)
    shard = autocast(shard, ("cpu", "cuda"))
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"target must be a torch.Tensor, not a {type(target).__name__}")
    if target.dtype is torch.uint8:
        target = target.long()
    check_target(target, shard)
    choices = check_ignore_index(ignore_index), check_label_smoothing(label_smoothing), check_reduction(reduction)
    if shard.ndim > 1:
        return autograd.cross_entropy(shard, target, choices, lengths, group)
    return autograd.cross_entropy(shard.unsqueeze(0), target.unsqueeze(0), choices, lengths, group).reshape(())


def _along(shard: torch.Tensor, dim: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns what a function makes of a shard whose classes are along any dimension."""
    _check(shard)
    if not shard.ndim:
        raise ValueError("shard has rank 0, but logits need a dimension that is split: reshape it to rank 1 first")
    if dim is None:
        raise TypeError("dim must be an integer, not None")
    place = dimension(shard, dim)
    shard = autocast(shard)
    x = shard.movedim(place, 1) if shard.ndim > 1 else shard.unsqueeze(0)
    y = function(x)
    if y.ndim < x.ndim:
        return y if shard.ndim > 1 else y.squeeze(0)
    return y.movedim(1, place) if shard.ndim > 1 else y.squeeze(0)


def _check(shard: Any) -> None:
    """Refuses what is no shard.

    Raises:
        TypeError: If it is no tensor with memory of its own, or one of another dtype or kind of device.
    """
    check_tensor(shard, "shard", ("cpu", "cuda"))
    if type(shard) not in PLAIN:
        raise TypeError(f"shard is a {type(shard).__name__}, but it has to be a plain tensor, such as its local shard")
