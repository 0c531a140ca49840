"""The CPU kernels."""

from .backward import backward
from .cross_entropy import gradients, losses, wrong_target
from .fused import fused
from .softmax import auto, softmax
