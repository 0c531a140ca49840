"""The fastest softmax that can be put in a MAX graph.

- `softmax` takes arrays: NumPy, or anything that speaks DLPack.
- `ops.softmax` takes the values of a `max.graph.Graph` that was given `extension()`.
"""

from maxsoftmax import ops
from maxsoftmax.eager import softmax
from maxsoftmax.extension import extension

__version__ = "0.1.0"
__all__ = ["extension", "ops", "softmax"]
