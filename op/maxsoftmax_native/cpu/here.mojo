"""The kernels of a library for a CPU: `mojo build -I op/maxsoftmax_native/cpu`."""

from maxsoftmax.cpu.kernels import Cpu as Here
