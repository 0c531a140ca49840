"""The GPU kernels."""

from .fused import fused
from .softmax import softmax
