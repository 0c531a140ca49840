"""The CPU kernels."""

from .fused import fused
from .softmax import softmax
