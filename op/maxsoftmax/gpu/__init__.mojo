"""The GPU kernels."""

from .softmax import softmax
