"""Softmax, its logarithm and cross entropy of `torch.distributed.tensor.DTensor`s, without gathering logits.

The dimension of a mesh that splits the classes has a process group, in which `maxsoftmax.torch.distributed` computes
the local shard. Other dimensions of the mesh split rows, or replicate them, and nothing travels along them, but for
what a loss of all rows comes to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import tensor as tensors

from maxsoftmax._types import Reduction
from maxsoftmax.torch import _autograd as autograd
from maxsoftmax.torch import distributed


def along(name: str, x: Any, dim: int) -> Any:
    """Returns softmax or its logarithm along a dimension, from 0, as a DTensor of the same placements.

    Raises:
        ValueError: If the dimension is not split as this can have it.
    """
    x, split = _whole_terms(x, dim)
    local = x.to_local()
    if split is None:
        y = getattr(autograd, name)(local, dim)
    else:
        y = getattr(distributed, name)(local, dim, x.device_mesh.get_group(split))
    return _made(y, x, x.placements, x.shape)


def cross_entropy(x: Any, target: Any, ignore_index: int, label_smoothing: float, reduction: Reduction) -> Any:
    """Returns the loss of logits and classes, as a DTensor: replicated, or for "none" split as rows are.

    Args:
        x: Logits.
        target: The class of each row, as a DTensor of any placements, or as a tensor that is the same everywhere.
        ignore_index: The class of rows that do not count.
        label_smoothing: The share of a target that is spread over all classes.
        reduction: What becomes of the losses.

    Raises:
        ValueError: If classes are not split as this can have it, or a target on a CPU is no class.
    """
    place = 0 if x.ndim == 1 else 1
    x, split = _whole_terms(x, place)
    mesh, replicated = x.device_mesh, tensors.Replicate()
    if not isinstance(target, tensors.DTensor):
        target = tensors.DTensor.from_local(target, mesh, [replicated] * mesh.ndim, run_check=False)
    by_row = [_of_rows(placement, place) for placement in x.placements]
    target = target.redistribute(mesh, by_row)
    local, labels = x.to_local(), target.to_local()
    # Rows that are split are added up here.
    are_split = any(placement.is_shard() for placement in by_row)
    each = "none" if are_split else reduction
    if split is None:
        loss = autograd.cross_entropy(local, labels, ignore_index, label_smoothing, each)
    else:
        loss = distributed.cross_entropy(
            local,
            labels,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=each,
            group=mesh.get_group(split),
            lengths=_lengths(x.shape[place], mesh.size(split)),
        )
    if reduction == "none":
        return _made(loss, x, by_row, target.shape)
    if not are_split:
        return _made(loss, x, by_row, loss.shape)
    total = loss.sum(dtype=torch.float64)
    partial = [tensors.Partial() if placement.is_shard() else replicated for placement in by_row]
    if reduction == "mean":
        count = (labels != ignore_index).sum()
        whole = tensors.DTensor.from_local(count, mesh, partial, run_check=False)
        total = total / whole.redistribute(mesh, [replicated] * mesh.ndim).to_local()
    made = tensors.DTensor.from_local(total, mesh, partial, run_check=False)
    return made.redistribute(mesh, [replicated] * mesh.ndim).to(x.dtype)


def _whole_terms(x: Any, dim: int) -> tuple[Any, int | None]:
    """Returns a DTensor that is no sum of others, and which dimension of its mesh splits `dim`, if one does.

    Raises:
        ValueError: If several do, or one in a way of its own.
    """
    if any(placement.is_partial() for placement in x.placements):
        whole = [tensors.Replicate() if placement.is_partial() else placement for placement in x.placements]
        x = x.redistribute(x.device_mesh, whole)
    return x, _split(x.placements, x.ndim, dim)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _split(placements: Any, rank: int, dim: int) -> int | None:
    """Returns which dimension of a mesh splits `dim`, if one does.

    Raises:
        ValueError: If several do, or one in a way of its own.
    """
    split = [i for i, placement in enumerate(placements) if placement.is_shard() and placement.dim % rank == dim]
    if len(split) > 1:
        raise ValueError(
            f"x has dimension {dim} split by dimensions {split} of its mesh, but it has to be one: redistribute it, or "
            "flatten the mesh"
        )
    strange = [placement for placement in placements if type(placement) not in (tensors.Shard, tensors.Replicate)]
    if strange:
        raise ValueError(f"x has the placement {strange[0]}, but each has to be Shard, Replicate or Partial")
    return split[0] if split else None


def _of_rows(placement: Any, place: int) -> Any:
    """Returns how what there is one of for each row lies, where logits lie so."""
    if not placement.is_shard() or placement.dim == place:
        return tensors.Replicate()
    return tensors.Shard(placement.dim - (placement.dim > place))


def _lengths(n: int, ranks: int) -> list[int]:
    """Returns how many classes of `n` each rank has, as DTensor deals them: as torch.chunk does."""
    most = -(-n // ranks)
    return [max(0, min(most, n - rank * most)) for rank in range(ranks)]


def _made(y: torch.Tensor, like: Any, placements: Any, shape: torch.Size) -> Any:
    """Returns a DTensor of a shape on the mesh of another, of its local shard."""
    stride = like.stride() if shape == like.shape else torch.empty(shape, device="meta").stride()
    return tensors.DTensor.from_local(y, like.device_mesh, placements, run_check=False, shape=shape, stride=stride)
