"""Softmax, its relatives and their gradients, for the values of a `max.graph.Graph`.

The graph should be given `maxsoftmax.extension()` in its `custom_extensions`; one that was not is given it here. All
kernels run where their first argument lives, in float32 or wider.
"""

from __future__ import annotations

from maxsoftmax.ops._divergence import kl_divergence, kl_divergence_backward
from maxsoftmax.ops._linear import (
    linear_cross_entropy,
    linear_cross_entropy_backward,
    linear_token_log_probs,
    linear_token_log_probs_backward,
)
from maxsoftmax.ops._losses import cross_entropy, cross_entropy_backward, cross_entropy_backward_, cross_entropy_forward
from maxsoftmax.ops._softmax import log_softmax, log_softmax_backward, softmax, softmax_backward
from maxsoftmax.ops._sparsemax import sparsemax, sparsemax_backward
from maxsoftmax.ops._statistics import logsumexp, max_sum
from maxsoftmax.ops._tokens import token_log_probs, token_log_probs_backward

__all__ = [
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_backward_",
    "cross_entropy_forward",
    "kl_divergence",
    "kl_divergence_backward",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "linear_token_log_probs",
    "linear_token_log_probs_backward",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "max_sum",
    "softmax",
    "softmax_backward",
    "sparsemax",
    "sparsemax_backward",
    "token_log_probs",
    "token_log_probs_backward",
]


def __dir__() -> list[str]:
    """Returns what there is to use here, without what it is made of."""
    return sorted({*__all__, "sharded"})
