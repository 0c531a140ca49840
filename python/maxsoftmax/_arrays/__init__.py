"""Softmax and its relatives for arrays: taken where they lie, laid out as rows, and handed to the kernels."""

from maxsoftmax._arrays.divergence import kl_divergence, kl_divergence_backward
from maxsoftmax._arrays.functions import (
    log_softmax,
    log_softmax_backward,
    logsumexp,
    max_sum,
    softmax,
    softmax_backward,
    sparsemax,
    sparsemax_backward,
)
from maxsoftmax._arrays.layout import Rows
from maxsoftmax._arrays.linear import (
    linear_cross_entropy,
    linear_cross_entropy_backward,
    linear_token_log_probs,
    linear_token_log_probs_backward,
)
from maxsoftmax._arrays.losses import (
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_backward_,
    cross_entropy_forward,
)
from maxsoftmax._arrays.tokens import token_log_probs, token_log_probs_backward

__all__ = [
    "Rows",
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
