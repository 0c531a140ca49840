"""Calls to the kernels without a graph: libraries of `op/maxsoftmax_native`, found or built, and loaded.

made = plan("softmax", "float32", -1, (outer, n, inner))
error = made.run(made.call, 0, y, x, None)
if error:
    fail(error)
"""

from maxsoftmax._native.description import Library, Target
from maxsoftmax._native.devices import index
from maxsoftmax._native.load import fail
from maxsoftmax._native.plan import Plan, bits, plan
from maxsoftmax._native.progress import observing
from maxsoftmax._native.warm import warm_up

__all__ = ["Library", "Plan", "Target", "bits", "fail", "index", "observing", "plan", "warm_up"]
