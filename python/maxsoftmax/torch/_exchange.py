"""What the ranks of a process group tell each other: numbers of each row, gathered in one collective."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

HEADER = 4
"""Integers of 64 bits that a rank sends before the numbers of rows of a loss: its shard's length, its first class, how
many classes there are in all, and what was chosen."""

IN_LISTS = {"mpi"}
"""The backends that gather into a list of tensors only."""

_shards: WeakKeyDictionary[Any, dict[int, tuple[int, int]]] = WeakKeyDictionary()
"""Where this rank's shard begins and how many classes there are, by the shard's length, as each group said last."""


class Group(NamedTuple):
    """A process group, and where this process is in it."""

    group: Any
    size: int
    rank: int

    @property
    def name(self) -> str:
        """What torch calls it."""
        name: str = self.group.group_name
        return name


class Place(NamedTuple):
    """The same, of constants only."""

    name: str
    size: int
    rank: int


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def place_in(group: Any) -> Place:
    """Returns where this process is in a group, as constants, which torch.compile asks for once.

    Raises:
        RuntimeError: If there is no group.
        ValueError: If this process is not in the group.
    """
    found = group_of(group)
    return Place(found.name, found.size, found.rank)


def group_of(group: Any) -> Group:
    """Returns the group that a caller named; None is all processes.

    Raises:
        RuntimeError: If there is no group.
        ValueError: If this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group first")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group does not have this process among its ranks")
    found = dist.group.WORLD if group is None else group
    return Group(found, found.size(), rank)


def checked_lengths(lengths: Any, n: int, group: Place | Group) -> tuple[int, ...] | None:
    """Returns the lengths of all shards, if a caller gave them; n is that of this rank.

    Raises:
        TypeError: If they are no integers.
        ValueError: If they cannot be those of the group.
    """
    if lengths is None:
        return None
    try:
        found = tuple(operator.index(length) for length in lengths)
    except TypeError:
        raise TypeError(f"lengths must be an integer for each rank, not {lengths!r}") from None
    if len(found) != group.size or min(found) < 0:
        raise ValueError(f"lengths is {found}, but it has to be a number from 0 for each of {group.size} ranks")
    if found[group.rank] != n:
        raise ValueError(f"lengths is {found}, but rank {group.rank} has a shard of {n}")
    return found


def named(name: str) -> Group:
    """Returns the group of a name, which this process is in."""
    group = _resolve_process_group(name)
    return Group(group, group.size(), group.rank())


def gathered(mine: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns the tensors of all ranks, which have one shape and lie in one piece: (ranks, …)."""
    every = mine.new_empty((group.size, *mine.shape))
    if dist.get_backend(group.group) in IN_LISTS:
        dist.all_gather(list(every.unbind()), mine, group=group.group)
    else:
        # What torch calls it depends on its version.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(every.flatten(), mine.flatten(), group=group.group)
    return every


class Messages(NamedTuple):
    """What all ranks sent of the losses of some rows."""

    every: torch.Tensor
    """(ranks, numbers), of each rank a header, the pairs of all rows, and the terms of their losses."""
    classes: int
    """How many there are in all."""


def exchanged(  # noqa: PLR0917
    message: torch.Tensor,
    fill: Callable[[int, int, int], None],
    length: int,
    group: Group,
    lengths: Sequence[int] | None,
    chosen: Any,
) -> Messages:
    """Gathers what ranks send of losses.

    A rank has to know where its shard begins, and of how many classes rows are, before it can compute its terms. It
    takes what the group said last, at first that all shards are as long as its own. If that was wrong for any rank,
    all ranks see it, and gather once more.

    Args:
        message: Where this rank's is, of the dtype of its numbers.
        fill: Computes it, given the shard's first class, how many classes there are, and what was chosen, as a number.
        length: The classes of this rank's shard.
        group: The ranks.
        lengths: The classes of each, if the caller knows them.
        chosen: What has to be the same on all ranks.

    Raises:
        ValueError: On all ranks, if they have chosen differently.
    """
    known = _shards.setdefault(group.group, {})
    if lengths is None:
        mine = known.get(length, (length * group.rank, length * group.size))
    else:
        mine = sum(lengths[: group.rank]), sum(lengths)
    checksum = zlib.crc32(repr((lengths, chosen)).encode())
    words = HEADER * 8 // message.element_size()
    while True:
        fill(*mine, checksum)
        every = gathered(message, group)
        if lengths is not None and message.device.type != "cpu":
            # The host does not wait to read what it was told.
            return Messages(every, mine[1])
        headers = every[:, :words].contiguous().view(torch.int64).tolist()
        found, starts, totals, checksums = zip(*headers, strict=True)
        if len(set(checksums)) > 1:
            raise ValueError(
                "the ranks of the group call this with different dtypes, lengths, ignore_index, label_smoothing or "
                "reduction: all of them have to be the same"
            )
        right = [(sum(found[:rank]), sum(found)) for rank in range(group.size)]
        mine = known[length] = right[group.rank]
        if list(zip(starts, totals, strict=True)) == right:
            return Messages(every, mine[1])
