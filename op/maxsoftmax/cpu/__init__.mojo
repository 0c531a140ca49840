"""The CPU kernels."""

from .softmax import softmax
