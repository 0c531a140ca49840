"""MAX's own op names on the kernels of `maxsoftmax`: what a graph loads to have its softmaxes run there."""

from .registry import LogSoftmax, Softmax
