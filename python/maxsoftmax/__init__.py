"""The fastest softmax that can be put in a MAX graph.

- `softmax` takes arrays: NumPy, or anything that speaks DLPack.
- `ops.softmax` takes the values of a `max.graph.Graph` that was given `extension()`.
- A graph that is given `dropin()` runs MAX's own `max.graph.ops.softmax` on the same kernels.
"""

from maxsoftmax import ops
from maxsoftmax.eager import softmax
from maxsoftmax.extension import drop_into, dropin, extension

__version__ = "0.1.0"
__all__ = ["drop_into", "dropin", "extension", "ops", "softmax"]
