"""The kernels of a library for a GPU: `mojo build -I op/maxsoftmax_native/gpu`."""

from maxsoftmax.gpu.kernels import Gpu as Here
