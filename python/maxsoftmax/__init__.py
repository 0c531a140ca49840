"""The fastest softmax that can be put in a MAX graph.

- `softmax`, `log_softmax`, `logsumexp`, `cross_entropy` and their gradients take arrays: NumPy, or anything that speaks
  DLPack.
- The functions of `ops` take the values of a `max.graph.Graph` that was given `extension()`.
- A graph that is given `dropin()` runs MAX's own `max.graph.ops.softmax` on the same kernels.
"""

from maxsoftmax import ops
from maxsoftmax.arrays import (
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_backward_,
    cross_entropy_forward,
    log_softmax,
    log_softmax_backward,
    logsumexp,
    max_sum,
    softmax_backward,
)
from maxsoftmax.eager import softmax
from maxsoftmax.extension import drop_into, dropin, extension

__version__ = "0.1.0"
__all__ = [
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_backward_",
    "cross_entropy_forward",
    "drop_into",
    "dropin",
    "extension",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "max_sum",
    "ops",
    "softmax",
    "softmax_backward",
]
