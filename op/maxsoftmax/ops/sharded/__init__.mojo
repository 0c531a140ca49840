"""Softmax, its relatives and cross entropy of rows that are split over devices: what each computes of its own shard.

Each device has some classes of every row. It sends a few numbers a row, all get those of all devices, and merge them in the
same order:

    softmax, log_softmax    (m, d) of the shard; then each device writes its part of e^(x - m) / d, or of (x - m) - ln d
    their gradients         Σ y·dy, or Σ dy, of the shard; then dx = y · (dy - Σ), or dy - e^y · Σ
    cross entropy           (m, d), and the shard's terms of the loss: with label smoothing s, of n classes in all, (1 - s) · (m - x)
                            of the target, if the shard has it, and s/n · Σ (m - x); the gradient is that of `cross_entropy`

Who sends numbers, and how, is not known here.
"""

from .direct import (
    losses_of_rows,
    own_targets,
    pairs_of_rows,
    second_pass,
    sums_of_shard,
)
from .rows import Message, Second
