"""The GPU kernels."""

from .backward import backward
from .choose import auto
from .cross_entropy import gradients, losses
from .fused import fused
from .softmax import softmax
