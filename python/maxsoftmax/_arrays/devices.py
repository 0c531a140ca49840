"""Devices, and arrays that go from one to another. What is on a GPU is MAX's to allocate and to copy."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from maxsoftmax import _native
from maxsoftmax._arrays import pages
from maxsoftmax._arrays.layout import inverse
from maxsoftmax._arrays.memory import HOST, Array, alias, bits, of_numpy, product, row_major, view


def number(spec: Any, home: int) -> int:
    """Returns the number of the device that an argument names, `home` for None.

    Raises:
        TypeError: If it is neither a string nor a `max.driver.Device`.
        ValueError: If this machine has no such device.
    """
    if spec is None:
        return home
    return _native.index(spec)


@functools.cache
def of(number: int) -> Any:
    """Returns the `max.driver.Device` of a number."""
    from max.driver import CPU, Accelerator

    return CPU() if number == HOST else Accelerator(number)


def queue(device: int) -> int:
    """Returns the handle of MAX's own queue of a GPU."""
    handle: int = of(device).default_queue.native_stream_handle
    return handle


def wait(device: Any, own: Any, stream: int | None) -> None:
    """Lets what reads a buffer on a GPU wait for what its own queue has to do before."""
    if stream is not None:
        own.synchronize()
    elif own != device.default_queue:
        device.default_queue.wait_for(own)


def settle() -> None:
    """Waits for what MAX still computes on the CPU, or copies to the host: its calls may return before."""
    of(HOST).synchronize()


def finish(device: int, stream: int | None) -> None:
    """Waits until a GPU has computed what was asked of it."""
    if stream is None:
        of(device).synchronize()
    else:
        sys.modules["torch"].cuda.synchronize(device)


def dtype(name: str) -> Any:
    """Returns MAX's dtype of a name."""
    from max.dtype import DType

    return getattr(DType, name)


def maker(dtype: Any, shape: Sequence[int], device: int) -> Callable[[], Any]:
    """Returns what makes uninitialized buffers of a dtype of MAX on a device: large ones of a host as of `pages`."""
    from max.driver import Buffer

    make: Callable[[], Any] = functools.partial(Buffer, dtype, shape, of(device))
    size = dtype.size_in_bytes * product(tuple(shape))
    if device != HOST or size < pages.LARGE:
        return make

    def large() -> Any:
        # MAX's own memory: it copies from it after a call has returned, and knows when that is done.
        buffer = make()
        pages.advise(buffer._data_ptr(), size)
        return buffer

    return large


def empty(dtype_name: str, shape: Sequence[int], order: Sequence[int], device: int) -> Array:
    """Returns new memory of a device, in a buffer whose dimensions are in the order in which they lie."""
    buffer = maker(dtype(dtype_name), [shape[i] for i in order], device)()
    return Array(buffer, buffer._data_ptr(), dtype_name, tuple(shape), strides(shape, order), device)


def part(whole: Array, i: int) -> Array:
    """Returns a part of what `empty` made, along its first dimension, which lies first."""
    buffer, shape = whole.owner, whole.shape[1:]
    size = product(shape)
    flat = buffer.view(buffer.dtype, (whole.size,))
    mine = flat[slice(i * size, (i + 1) * size)].view(buffer.dtype, tuple(buffer.shape)[1:])
    return whole._replace(owner=mine, address=mine._data_ptr(), shape=shape, strides=whole.strides[1:])


def strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of memory without gaps whose dimensions lie in an order."""
    steps = row_major([shape[i] for i in order])
    return tuple(steps[place] for place in inverse(order))


def buffer_of(array: np.ndarray, dtype_name: str, device: int) -> Any:
    """Returns a buffer on a device of an array in C order on the host, whose memory it shares on a CPU."""
    from max.driver import Buffer

    # MAX would copy what is read-only, and knows nothing of NumPy's bfloat16.
    flat = Buffer.from_numpy(alias(of_numpy(np.ascontiguousarray(array), dtype_name)).reshape(-1))
    whole = flat.view(dtype(dtype_name), tuple(array.shape))
    return whole if device == HOST else whole.to(of(device))


def fetched(array: Array) -> Array:
    """Returns an array of a GPU as one of the host, in C order; one of the host is returned as it is."""
    if array.device == HOST:
        return array
    from max.driver import Buffer

    owner = array.owner
    if not isinstance(owner, Buffer):
        source = owner[1] if isinstance(owner, tuple) else owner.contiguous()
        owner = Buffer._from_dlpack(_OnQueue(source, queue(array.device)))
        laid, order = array.shape, tuple(range(len(array.shape)))
    else:
        order = tuple(sorted(range(len(array.shape)), key=lambda i: -array.strides[i]))
        laid = tuple(array.shape[i] for i in order)
    plain = owner.view(dtype(bits(array.dtype)), (product(laid),)).to_numpy()
    return of_numpy(plain.reshape(laid).transpose(inverse(order)), array.dtype)


def sent(array: Array, device: int) -> Array:
    """Returns an array on a device, with the strides that it has if it has no gaps, else in C order."""
    if array.device == device:
        return array
    host = fetched(array)
    if device == HOST:
        return host
    order = tuple(sorted(range(len(host.shape)), key=lambda i: -host.strides[i]))
    buffer = buffer_of(view(host).transpose(order), host.dtype, device)
    return Array(buffer, buffer._data_ptr(), host.dtype, host.shape, strides(host.shape, order), device)


def copied(array: Array, order: Sequence[int]) -> Array:
    """Returns a copy of an array, where it is, whose dimensions lie in an order."""
    if array.device == HOST:
        laid = np.ascontiguousarray(view(array).transpose(order))
        return of_numpy(laid.transpose(inverse(order)), array.dtype)
    if hasattr(array.owner, "permute"):
        tensor = array.owner.permute(*order).contiguous().permute(*inverse(order))
        return array._replace(owner=tensor, address=tensor.data_ptr(), strides=tuple(tensor.stride()))
    return sent(copied(fetched(array), order), array.device)


def cast(array: Array, dtype_name: str) -> Array:
    """Returns a copy of an array of floats, where it is, of another dtype that NumPy knows."""
    if array.device == HOST:
        values = view(array)
        if array.dtype == "bfloat16" and values.dtype == np.uint16:
            # They are the upper halves of float32's.
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return of_numpy(values.astype(dtype_name))
    if hasattr(array.owner, "permute"):
        tensor = array.owner.to(getattr(sys.modules["torch"], dtype_name))
        return Array(tensor, tensor.data_ptr(), dtype_name, array.shape, tuple(tensor.stride()), array.device)
    return sent(cast(fetched(array), dtype_name), array.device)


def expanded(array: Array, shape: Sequence[int], order: Sequence[int]) -> Array:
    """Returns a copy of an array, where it is, broadcast to a shape whose dimensions lie in an order."""
    if array.device == HOST:
        laid = np.ascontiguousarray(np.broadcast_to(view(array), shape).transpose(order))
        return of_numpy(laid.transpose(inverse(order)), array.dtype)
    if hasattr(array.owner, "permute"):
        tensor = array.owner.expand(*shape)
        whole = array._replace(owner=tensor, shape=tuple(shape), strides=tuple(tensor.stride()))
        return copied(whole, order)
    return sent(expanded(fetched(array), shape, order), array.device)


class _OnQueue:
    """Exports an array to the queue that MAX will read it from, so that reads wait for what its owner has queued."""

    def __init__(self, array: Any, queue: int) -> None:
        self.array = array
        self.queue = queue

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**{**options, "stream": self.queue})

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()
