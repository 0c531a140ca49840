"""Softmax kernels for CPU and GPU, and their registrations as MAX ops."""

from .registry import FusedSoftmax, MaskedSoftmax, SinkSoftmax, Softmax
