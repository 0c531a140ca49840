"""Softmax kernels for CPU and GPU, and their registrations as MAX ops."""

from .registry import (
    CrossEntropy,
    CrossEntropyBackward,
    FusedSoftmax,
    LogSoftmax,
    MaskedSoftmax,
    MaxSum,
    SinkSoftmax,
    Softmax,
    SoftmaxBackward,
)
