"""The kinds of arrays that callers pass, and how results become what was passed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from maxsoftmax._arrays import convert, devices, reused
from maxsoftmax._arrays.convert import Reader
from maxsoftmax._arrays.layout import inverse
from maxsoftmax._arrays.memory import BITS, HOST, Array, bits, of_numpy, product, view


class NumPy:
    """Arrays of NumPy, and whatever it makes arrays of."""

    def reader(self, x: Any) -> Reader:
        """Returns what reads `x`."""
        return convert.MAX

    def empty(self, like: Array, dtype: str, shape: Sequence[int], order: Sequence[int]) -> Array:
        """Returns new memory for a result, where `like` is.

        Args:
            like: The first argument.
            dtype: Of the result.
            shape: Of the result.
            order: Its dimensions, in the order in which they are to lie in memory.
        """
        of_numpy_itself = dtype == like.dtype and isinstance(like.owner, np.ndarray)
        known = like.owner.dtype if of_numpy_itself else bits(dtype)
        return of_numpy(reused.array(shape, np.dtype(known), order, like.address), dtype)

    def part(self, whole: Array, i: int) -> Array:
        """Returns a part of what `empty` had made, along its first dimension, which has to lie first in memory."""
        part = whole.owner[i, ...]
        return whole._replace(owner=part, shape=whole.shape[1:], strides=whole.strides[1:])

    def give(self, x: Any, result: Array) -> Any:
        """Returns a result, which `empty` had made, as the kind of array that `x` is."""
        array = _named(result.owner, result.dtype, x)
        return array if result.shape else array[()]

    def convert(self, x: Any, array: np.ndarray, dtype: str, device: int) -> Any:
        """Returns a result of the host, perhaps of bits, as what `x` is, on the device where `x` is."""
        array = _named(array, dtype, x)
        return array if array.ndim else array[()]

    def check_dtype(self, dtype: str) -> None:
        """Refuses results of a dtype that arrays of this kind cannot be of.

        Raises:
            TypeError: If they cannot.
        """
        if dtype in BITS and find_spec("ml_dtypes") is None:
            raise TypeError(f"out_dtype {dtype} of a NumPy array needs the package ml_dtypes, which is not installed")


def _named(array: np.ndarray, dtype: str, x: Any) -> np.ndarray:
    """Returns an array, perhaps of bits, of a dtype that NumPy knows from another package, maybe by way of `x`."""
    if dtype not in BITS or array.dtype.name == dtype:
        return array
    known = np.asarray(x).dtype
    if known.name != dtype:
        import ml_dtypes

        known = np.dtype(getattr(ml_dtypes, dtype))
    return array.view(known)


class Foreign(NumPy):
    """Arrays that speak DLPack."""

    def check_dtype(self, dtype: str) -> None:
        """As of `NumPy`: whoever imports the result knows."""

    def empty(self, like: Array, dtype: str, shape: Sequence[int], order: Sequence[int]) -> Array:
        """As of `NumPy`."""
        if like.device == HOST:
            return super().empty(like, dtype, shape, order)
        return devices.empty(dtype, shape, order, like.device)

    def part(self, whole: Array, i: int) -> Array:
        """As of `NumPy`."""
        return super().part(whole, i) if whole.device == HOST else devices.part(whole, i)

    def give(self, x: Any, result: Array) -> Any:
        """As of `NumPy`."""
        if result.device == HOST or not result.is_row_major:
            return self.convert(x, view(devices.fetched(result)), result.dtype, result.device)
        return self._imported(x, result.owner.view(devices.dtype(result.dtype), result.shape))

    def convert(self, x: Any, array: np.ndarray, dtype: str, device: int) -> Any:
        """As of `NumPy`."""
        if device == HOST and dtype not in BITS:
            return self._imported(x, array)
        return self._imported(x, devices.buffer_of(array, dtype, device))

    def _imported(self, x: Any, result: Any) -> Any:
        if not isinstance(result, np.ndarray):
            # Whoever reads it next does so on a queue of its own.
            result.device.synchronize()
        for namespace in convert.namespaces(x):
            if hasattr(namespace, "from_dlpack"):
                return namespace.from_dlpack(result)
        raise TypeError(f"x is a {type(x).__module__}.{type(x).__name__}, which has no from_dlpack to return one with")


class Buffers(Foreign):
    """MAX's own arrays, which are always in C order."""

    def empty(self, like: Array, dtype: str, shape: Sequence[int], order: Sequence[int]) -> Array:
        """As of `NumPy`."""
        return devices.empty(dtype, shape, order, like.device)

    def part(self, whole: Array, i: int) -> Array:
        """As of `NumPy`."""
        return devices.part(whole, i)

    def give(self, x: Any, result: Array) -> Any:
        """As of `NumPy`."""
        if not result.is_row_major:
            return self.convert(x, view(devices.fetched(result)), result.dtype, result.device)
        buffer = result.owner
        return buffer if tuple(buffer.shape) == result.shape else buffer.view(buffer.dtype, result.shape)

    def _imported(self, x: Any, result: Any) -> Any:
        return result

    def convert(self, x: Any, array: np.ndarray, dtype: str, device: int) -> Any:
        """As of `NumPy`."""
        return devices.buffer_of(array, dtype, device)


class Torch(Foreign):
    """Tensors of torch: its own memory, in the order of its current stream."""

    def reader(self, x: Any) -> Reader:
        """As of `NumPy`."""
        if not x.is_cuda:
            return Reader(None, of_torch=True)
        torch = sys.modules["torch"]
        return Reader(torch.cuda.current_stream(x.device).cuda_stream, of_torch=True)

    def empty(self, like: Array, dtype: str, shape: Sequence[int], order: Sequence[int]) -> Array:
        """As of `NumPy`."""
        torch = sys.modules["torch"]
        place = "cpu" if like.device == HOST else f"cuda:{like.device}"
        known, sizes = getattr(torch, dtype), [shape[i] for i in order]
        size = known.itemsize * product(sizes)
        if like.device == HOST and size >= reused.LARGE:
            laid = torch.frombuffer(reused.room(size, like.address), dtype=known).view(sizes).data
        else:
            laid = torch.empty(sizes, dtype=known, device=place)
        tensor = laid.permute(*inverse(order)) if order else laid
        return Array(tensor, tensor.data_ptr(), dtype, tuple(shape), tuple(tensor.stride()), like.device)

    def part(self, whole: Array, i: int) -> Array:
        """As of `NumPy`."""
        return NumPy.part(self, whole, i)

    def give(self, x: Any, result: Array) -> Any:
        """As of `NumPy`."""
        return result.owner


NUMPY, FOREIGN, BUFFERS, TORCH = NumPy(), Foreign(), Buffers(), Torch()


def of(x: Any) -> NumPy:
    """Returns of what kind an array is."""
    if convert.is_host(x):
        return NUMPY
    if convert.is_buffer(x):
        return BUFFERS
    return TORCH if convert.is_tensor(x) else FOREIGN


def at(device: int) -> NumPy:
    """Returns what memory of a device is made of where it is not that of the arrays passed."""
    return NUMPY if device == HOST else BUFFERS
