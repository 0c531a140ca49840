"""cuDNN, called through its library."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from max.driver import Buffer, Device, accelerator_api
from max.dtype import DType

from maxsoftmax._arrays.layout import Rows
from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.providers.base import Provider

# Numbers from cudnn_graph.h and cudnn_ops.h.
_DTYPES = {DType.float32: 0, DType.float64: 1, DType.float16: 2, DType.bfloat16: 9}
_NCHW = 0
_ACCURATE = 1
_MODE_INSTANCE, _MODE_CHANNEL = 0, 1


class Cudnn(Provider):
    """`cudnnSoftmaxForward`, accurate, with rows as instances, or as channels where the axis is not the last."""

    name = "cudnn"
    devices = ("gpu",)

    def __init__(self, device: Device, threads: int) -> None:
        super().__init__(device, threads)
        if accelerator_api() != "cuda":
            raise ImportError("needs an NVIDIA GPU")
        self.library = _load()
        self.handle = ctypes.c_void_p()
        self._call("cudnnCreate", ctypes.byref(self.handle))
        stream = ctypes.c_void_p(device.default_queue.native_stream_handle)
        self._call("cudnnSetStream", self.handle, stream)

    def version(self) -> str:
        """Returns cuDNN's version."""
        number = self.library.cudnnGetVersion()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns a call with the case's descriptor."""
        descriptor = ctypes.c_void_p()
        self._call("cudnnCreateTensorDescriptor", ctypes.byref(descriptor))
        rows = Rows.of(case.shape, (case.place,))
        dims = map(ctypes.c_int, (rows.outer, rows.n, rows.inner, 1))
        self._call("cudnnSetTensor4dDescriptor", descriptor, _NCHW, _DTYPES[case.dtype], *dims)
        mode = _MODE_INSTANCE if rows.contiguous else _MODE_CHANNEL
        # The scale factors are double for double tensors.
        real = ctypes.c_double if case.dtype == DType.float64 else ctypes.c_float
        one, zero = ctypes.byref(real(1)), ctypes.byref(real(0))

        def softmax(x: Buffer) -> Buffer:
            y = Buffer(case.dtype, case.shape, device=self.device)
            source, target = ctypes.c_void_p(x._data_ptr()), ctypes.c_void_p(y._data_ptr())
            self._call(
                "cudnnSoftmaxForward", self.handle, _ACCURATE, mode, one, descriptor, source, zero, descriptor, target
            )
            return y

        return softmax

    def result(self, y: Buffer) -> Buffer:
        """Returns `y`."""
        return y

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self.library, name)(*arguments):
            raise RuntimeError(f"{name}: {self.library.cudnnGetErrorString(status).decode()}")


def _load() -> ctypes.CDLL:
    """Returns cuDNN, from NVIDIA's wheel or from wherever the system has it."""
    spec = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    wheels = [Path(folder) / "lib" for folder in (spec.submodule_search_locations or ())] if spec else []
    candidates = [str(lib) for folder in wheels for lib in sorted(folder.glob("libcudnn.so.*"))]
    for candidate in [*candidates, ctypes.util.find_library("cudnn") or "libcudnn.so.9"]:
        try:
            library = ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        library.cudnnGetVersion.restype = ctypes.c_size_t
        library.cudnnGetErrorString.restype = ctypes.c_char_p
        return library
    raise ImportError("there is no libcudnn")
