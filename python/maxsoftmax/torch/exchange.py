"""What the ranks of a process group tell each other: numbers of each row, gathered in one collective."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

HEADER = 3
"""Integers of 64 bits that a rank sends beside numbers of rows: its shard's length and start, and what was chosen."""

IN_LISTS = {"mpi"}
"""The backends that gather into a list of tensors only."""

_starts: WeakKeyDictionary[Any, dict[int, int]] = WeakKeyDictionary()
"""Where this rank's shard begins, by its length, as each group said last."""


class Group(NamedTuple):
    """A process group, and where this process is in it."""

    group: Any
    size: int
    rank: int


class Numbers(NamedTuple):
    """What all ranks know of all rows."""

    rows: torch.Tensor
    """The numbers: (ranks, numbers a row, rows)."""
    lengths: Sequence[int]
    """Classes of each rank's shard."""
    start: int
    """Classes before this rank's shard."""


def found_group(group: Any) -> Group:
    """Returns a group that this process is in; None is all processes.

    Raises:
        RuntimeError: If there is no group.
        ValueError: If this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group first")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group does not have this process among its ranks")
    return Group(dist.group.WORLD if group is None else group, dist.get_world_size(group), rank)


def gathered(mine: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns the tensors of all ranks, which have one shape: (ranks, …)."""
    every = mine.new_empty((group.size, *mine.shape))
    if dist.get_backend(group.group) in IN_LISTS:
        dist.all_gather(list(every.unbind()), mine.contiguous(), group=group.group)
    else:
        # What torch calls it depends on its version.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(every.flatten(), mine.contiguous().flatten(), group=group.group)
    return every


def in_order(terms: torch.Tensor) -> torch.Tensor:
    """Returns the sum over the first dimension, from the first term to the last: the same bits wherever a row is."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


class Sender:
    """A rank's numbers, with the length of its shard: from the lengths of all, each rank finds where its own begins.

    A rank has to know that before it can send its target's logit. It takes what the group said last, at first that all
    shards are as long as its own. If that was wrong for any rank, all ranks see it, and gather once more.
    """

    def __init__(  # noqa: PLR0917
        self, like: torch.Tensor, length: int, numbers: int, group: Group, lengths: Any, chosen: Any
    ) -> None:
        """Makes room for numbers of the dtype and shape of `like`, one for each row."""
        words = HEADER * 8 // like.element_size()
        self.group, self.length, self.lengths = group, length, lengths
        self._memory = like.new_empty(words + numbers * like.numel())
        self._header = self._memory[:words].view(torch.int64)
        self._chosen = zlib.crc32(repr((lengths, chosen)).encode())
        self._known = _starts.setdefault(group.group, {})
        self.rows = self._memory[words:].view(numbers, *like.shape)
        """This rank's numbers."""
        self.start = self._known.get(length, length * group.rank) if lengths is None else sum(lengths[: group.rank])
        """Where its shard is thought to begin."""

    def exchange(self) -> Numbers | None:
        """Gathers the numbers of all ranks.

        Returns:
            None if a rank's shard begins elsewhere than it thought: then `start` is right, and to be tried again.

        Raises:
            ValueError: On all ranks, if they have chosen differently.
        """
        for place, number in enumerate((self.length, self.start, self._chosen)):
            self._header[place].fill_(number)
        every = gathered(self._memory, self.group)
        words = len(self._memory) - self.rows.numel()
        rows = every[:, words:].view(self.group.size, *self.rows.shape)
        if self.lengths is not None and every.device.type != "cpu":
            # The host does not wait to read what it was told.
            return Numbers(rows, self.lengths, self.start)
        headers = every[:, :words].contiguous().view(torch.int64).tolist()
        lengths, starts, chosen = zip(*headers, strict=True)
        if len(set(chosen)) > 1:
            raise ValueError(
                "the ranks of the group call this with different dtypes, lengths, ignore_index, label_smoothing or "
                "reduction: all of them have to be the same"
            )
        right = tuple(sum(lengths[:rank]) for rank in range(self.group.size))
        self.start = self._known[self.length] = right[self.group.rank]
        return Numbers(rows, lengths, self.start) if starts == right else None


def merged(m: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pair (m, d) of each row from those of its shards, (ranks, …), merged in the order of the ranks."""
    m, d = m.double(), d.double()
    top = m.amax(0)
    total = in_order(torch.where(m == top, d, d * (m - top).exp()))
    return top, total.masked_fill(top == math.inf, math.nan)
