"""The fastest softmax that can be put in a MAX graph, and called without one.

- `softmax`, `log_softmax`, `logsumexp`, `sparsemax`, `cross_entropy`, their gradients, `token_log_probs`, and losses
  whose logits are never all there, as `linear_cross_entropy`, take arrays: NumPy, or anything that speaks DLPack. They
  call the kernels in libraries, which are built on first use; `warm_up` builds them ahead.
- `maxsoftmax.torch` takes tensors of PyTorch, and `maxsoftmax.jax` arrays of JAX; both have gradients of their own.
- The functions of `ops` take the values of a `max.graph.Graph` that was given `extension()`.
- A graph that is given `dropin()` runs MAX's own `max.graph.ops.softmax` on the same kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maxsoftmax._arrays import (
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_backward_,
    cross_entropy_forward,
    kl_divergence,
    kl_divergence_backward,
    linear_cross_entropy,
    linear_cross_entropy_backward,
    linear_token_log_probs,
    linear_token_log_probs_backward,
    log_softmax,
    log_softmax_backward,
    logsumexp,
    max_sum,
    softmax,
    softmax_backward,
    sparsemax,
    sparsemax_backward,
    token_log_probs,
    token_log_probs_backward,
)
from maxsoftmax._graph.emitted import SoftmaxKernel, softmax_kernels
from maxsoftmax._graph.extension import drop_into, dropin, extension
from maxsoftmax._native import warm_up

if TYPE_CHECKING:
    from maxsoftmax import jax as jax
    from maxsoftmax import nn as nn
    from maxsoftmax import ops as ops
    from maxsoftmax import torch as torch

__version__ = "0.1.0"
__all__ = [
    "SoftmaxKernel",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_backward_",
    "cross_entropy_forward",
    "drop_into",
    "dropin",
    "extension",
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
    "ops",
    "softmax",
    "softmax_backward",
    "softmax_kernels",
    "sparsemax",
    "sparsemax_backward",
    "token_log_probs",
    "token_log_probs_backward",
    "warm_up",
]


_MODULES = {"jax": "jax", "nn": "max", "ops": "max", "torch": "torch"}
"""What is imported when it is asked for, since that takes a while, and what each needs."""


def __getattr__(name: str) -> Any:
    """Imports a module of this package.

    Raises:
        AttributeError: If there is none of that name.
        ImportError: If what it needs is not installed.
    """
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"maxsoftmax.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns what there is to use here, without the modules that it is made of."""
    from importlib.util import find_spec

    here = (name for name, needed in _MODULES.items() if find_spec(needed))
    return sorted({*__all__, *here, "__version__"})
