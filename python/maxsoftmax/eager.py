"""Softmax for arrays: NumPy in and NumPy out, or any DLPack array in and the same kind out."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import Model
from max.graph import Value

from maxsoftmax import eager_forms, forms, runtime, tuning
from maxsoftmax.arguments import DTYPES, check_algorithm, check_dtype, normalize_axes, normalize_axis
from maxsoftmax.forms import Forms


def softmax(
    x: Any,
    axis: int | tuple[int, ...] | None = -1,
    *,
    scale: Any = None,
    mask: Any = None,
    causal: bool = False,
    temperature: Any = None,
    sink: Any = None,
    device: str | Device | None = None,
    algorithm: str = "auto",
    block_size: int | None = None,
    unroll: int | None = None,
) -> Any:
    """Returns softmax of an array: exp(z - max z) / (Σ exp(z - max z) + exp(sink - max z)) along `axis`.

    z is (x · scale + mask) / temperature, and `x` unless one of these is given.

    Special values come out as from `scipy.special.softmax` in float64: NaN or +inf turn their own row to NaN, a row of
    nothing but -inf is NaN, and -inf beside finite values is exactly 0. The first call for each device, dtype and
    position of the axis compiles a model (seconds); every later one, of any shape, reuses it. May be called from
    several threads.

    Args:
        x: Logits. A NumPy array or whatever `numpy.asarray` takes (strided, Fortran-ordered, integers and bools
            included), or an array that supports DLPack, such as a `torch.Tensor` or a `max.driver.Buffer`, on any
            device that MAX knows. Memory that is contiguous and writeable is shared, not copied.
        axis: The axis or axes that will sum to 1; None for all of them together. One axis, where any of the next five
            is given, whose meaning is that of `maxsoftmax.ops.softmax`.
        scale: A number, or an array that broadcasts to `x`.
        mask: An array that broadcasts to `x`: of bools, True where an element takes part, or of floats to be added.
            A row in which nothing takes part is 0.
        causal: Whether an element of the axis before `axis` sees only what is not after it, both counted from the end.
        temperature: A positive number, or an array of them that broadcasts to `x`.
        sink: Logits that take part in the denominator only: an array that broadcasts to `x` with `axis` of length 1.
        device: Where to compute: "cpu", "gpu", "gpu:1" or a `max.driver.Device`; where `x` is if None.
        algorithm: "auto", or the name of a kernel that the device has.
        block_size: Threads a block, where a GPU kernel was named: a power of two up to 1024; 128 if None.
        unroll: Vectors that a thread has under way at a time, for "vector" and "online": 1, 2, 4 or 8; 4 if None.
            Where neither is given, these two use what `maxsoftmax tune` found for the GPU, if it was run.

    Returns:
        Probabilities: the shape, dtype, kind and device of `x`. Integers become the float that NumPy's `exp` makes of
        them, bools float64, scalars a NumPy scalar.

    Raises:
        TypeError: If `x` is not an array of real numbers, or another argument is not of its type.
        ValueError: If there is no such axis, device, algorithm, block size or unroll, or an array does not broadcast.
    """
    key = None
    plain = scale is None and mask is None and causal is False and temperature is None and sink is None
    if plain and type(x) in (np.ndarray, Buffer) and block_size is None and unroll is None:
        key = _key(x, axis, device, algorithm)
        shortcut = _shortcuts.get(key) if key else None
        if shortcut and (x.flags.carray if type(x) is np.ndarray else x.is_contiguous):
            return shortcut.take(x)
    if isinstance(x, Value):
        raise TypeError("x is a value of a graph, not an array: use maxsoftmax.ops.softmax")
    if not plain:
        wanted = Forms(scale, mask, causal, temperature, sink)
        return _with_forms(x, axis, wanted, device, Chosen(algorithm, block_size, unroll))
    if isinstance(x, (np.ndarray, np.generic)) or not hasattr(x, "__dlpack__"):
        array = as_floats(x)
        kernel = Kernel(runtime.device("cpu" if device is None else device), algorithm, block_size, unroll)
        axes = normalize_axes(axis, array.ndim)
        y = _of_bits(*to_bits(array), axes, kernel).view(array.dtype)[()]
        taken_as_it_lies = array is x and x.flags.carray and x.ndim and x.dtype.name != "bfloat16"
        if key and taken_as_it_lies and kernel.device.is_host:
            _learn(key, DType.from_numpy(x.dtype), x.shape, axes, kernel)
        return y
    buffer = as_buffer(x)
    where = buffer.device
    kernel = Kernel(where if device is None else runtime.device(device), algorithm, block_size, unroll)
    axes = normalize_axes(axis, buffer.rank)
    if buffer.dtype in DTYPES and are_consecutive(axes):
        result = _of_buffer(buffer, Rows.of(tuple(buffer.shape), axes), kernel)
        if key:
            _learn(key, buffer.dtype, tuple(buffer.shape), axes, kernel)
    else:
        # What the kernels cannot take as it lies is arranged by NumPy.
        if buffer.dtype == DType.bfloat16:
            bits, dtype = buffer.view(DType.uint16).to_numpy(), DType.bfloat16
        else:
            bits, dtype = to_bits(as_floats(buffer.to_numpy()))
        host = _of_bits(bits, dtype, axes, kernel)
        result = Buffer.from_numpy(np.ascontiguousarray(host)).view(dtype, host.shape).to(where)
    return like(x, result)


class Chosen(NamedTuple):
    """A caller's choice of algorithm, on whatever device."""

    algorithm: str
    block_size: int | None
    unroll: int | None


def _with_forms(x: Any, axis: Any, wanted: Forms, device: Any, chosen: Chosen) -> Any:
    """Returns softmax of what `wanted` makes of an array."""
    of_numpy = isinstance(x, (np.ndarray, np.generic)) or not hasattr(x, "__dlpack__")
    buffer = _shared(as_floats(x)) if of_numpy else as_buffer(x)
    check_dtype(buffer.dtype)
    if buffer.rank == 0:
        raise ValueError("x has rank 0, but softmax needs an axis: reshape it to rank 1 first")
    place = buffer.device if device is None else runtime.device(device)
    index = normalize_axis(axis, buffer.rank, "an integer where scale, mask, causal, temperature or sink is given")
    algorithm = check_algorithm(chosen.algorithm, place.label)
    tuning.choice(place, algorithm, buffer.dtype, chosen.block_size, chosen.unroll)
    forms.check(wanted, index, algorithm)
    operands = {}
    for name in eager_forms.OPERANDS:
        value = getattr(wanted, name)
        if value is not None:
            operands[name] = _operand(name, value, buffer.dtype)
    result = eager_forms.softmax(buffer, index, wanted, operands, place)
    if not of_numpy:
        return like(x, result)
    if result.dtype == DType.bfloat16:
        return result.view(DType.uint16).to_numpy().view(as_floats(x).dtype)
    return result.to_numpy()


def _operand(name: str, value: Any, dtype: DType) -> Buffer:
    """Returns an argument as a buffer of bools or floats."""
    if forms.is_number(value):
        return Buffer.from_numpy(eager_forms.number(value, dtype))
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        array = np.asarray(value)
        buffer = _shared(array) if array.dtype.kind == "b" or array.dtype.name in FLOATS else None
        given = array.dtype.name
    else:
        buffer = as_buffer(value)
        given = buffer.dtype.name
    bools = name == "mask" and buffer is not None and buffer.dtype == DType.bool
    if buffer is None or not (bools or buffer.dtype in DTYPES):
        raise TypeError(f"{name} has dtype {given}, but must be of floats{' or bools' if name == 'mask' else ''}")
    return buffer


def _shared(array: np.ndarray) -> Buffer:
    """Returns an array as a buffer, sharing its memory if it is as MAX would have it."""
    bits, dtype = to_bits(array)
    laid = np.require(bits, requirements=["C_CONTIGUOUS", "ALIGNED", "WRITEABLE"])
    return Buffer.from_numpy(laid).view(dtype, laid.shape)


FLOATS = ("float16", "float32", "float64", "bfloat16")
"""The names of what the kernels take, as NumPy has them."""

KDL_CPU = 1
"""DLPack's number for memory of the host."""


class Kernel(NamedTuple):
    """What computes: the device, and the caller's choice of algorithm there."""

    device: Device
    algorithm: str
    block_size: int | None
    unroll: int | None


class Rows(NamedTuple):
    """A row-major array as the kernels see it: `outer` × `n` × `inner`, softmax along the middle."""

    outer: int
    n: int
    inner: int

    @classmethod
    def of(cls, shape: tuple[int, ...], axes: tuple[int, ...]) -> Rows:
        """Returns the view of an array along consecutive `axes`, which may be none: then every element is a row."""
        first, last = (axes[0], axes[-1] + 1) if axes else (len(shape), len(shape))
        return cls(math.prod(shape[:first]), math.prod(shape[first:last]), math.prod(shape[last:]))

    @property
    def contiguous(self) -> bool:
        """Whether neighbours in a row are neighbours in memory."""
        return self.inner == 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the compiled model takes."""
        return (self.outer, self.n) if self.contiguous else tuple(self)

    @property
    def reduced(self) -> tuple[int, ...]:
        """The shape of what there is one of for each row."""
        return (self.outer,) if self.contiguous else (self.outer, self.inner)


class Shortcut(NamedTuple):
    """How to compute softmax of an array like one that came before, without looking at everything again."""

    model: Model
    rows: tuple[int, ...]
    """The shape that the model takes."""

    def take(self, x: Any) -> Any:
        """Returns softmax of an array or a buffer."""
        if type(x) is Buffer:
            result = self.model.execute(x if x.shape == self.rows else x.view(x.dtype, self.rows))[0]
            return result if x.shape == self.rows else result.view(x.dtype, x.shape)
        y = np.from_dlpack(self.model.execute(Buffer._from_dlpack(x.reshape(self.rows)))[0]).reshape(x.shape)
        return y if y.flags.writeable else y.copy()


_shortcuts: dict[tuple[Any, ...], Shortcut] = {}

MOST_SHORTCUTS = 256
"""Kinds of arrays that are remembered at a time."""


def _key(x: np.ndarray | Buffer, axis: Any, device: Any, algorithm: Any) -> tuple[Any, ...] | None:
    """Returns what tells calls apart, or None where arguments may equal others without being the same."""
    if type(axis) is not int and axis is not None:
        return None
    if (type(device) is not str and device is not None) or type(algorithm) is not str:
        return None
    if type(x) is Buffer:
        # Where it is says where to compute, unless somebody else does.
        return None if device is not None else (x.dtype, x.shape, axis, x.device, algorithm)
    return x.dtype, x.shape, axis, device, algorithm


def _learn(key: tuple[Any, ...], dtype: DType, shape: tuple[int, ...], axes: tuple[int, ...], kernel: Kernel) -> None:
    """Remembers how contiguous memory was computed, where it is, if there is any and it was taken as it lies."""
    if math.prod(shape) and are_consecutive(axes):
        rows = Rows.of(shape, axes)
        if len(_shortcuts) >= MOST_SHORTCUTS:
            _shortcuts.clear()
        _shortcuts[key] = Shortcut(runtime.model(signature(kernel, dtype, rows), rows.n), rows.shape)


def are_consecutive(axes: tuple[int, ...] | list[int]) -> bool:
    """Returns whether ascending axes are neighbours."""
    return not axes or axes[-1] - axes[0] == len(axes) - 1


def as_floats(x: Any, name: str = "x") -> np.ndarray:
    """Returns `x` as an array, in this machine's byte order, of a dtype that the kernels take."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, and its mask would be ignored: pass {name}.filled(-numpy.inf) instead"
        )
    try:
        array = np.asarray(x)
    except ValueError as error:
        raise ValueError(f"{name} is not an array, but a sequence of others that differ in shape") from error
    if array.dtype == bool:
        return array.astype(np.float64)
    if array.dtype.kind in "iu":
        return array.astype(np.exp(np.empty(0, array.dtype)).dtype)
    native = array.dtype.newbyteorder("=")
    if native.name not in FLOATS:
        allowed = "float16, float32, float64, bfloat16, integers and bools"
        hint = "; bfloat16 comes out of a .npy file as |V2: view it as ml_dtypes.bfloat16" if native == "V2" else ""
        raise TypeError(f"{name} has dtype {array.dtype}, but softmax takes {allowed}{hint}")
    return array.astype(native, copy=False)


def to_bits(array: np.ndarray) -> tuple[np.ndarray, DType]:
    """Returns floats in a dtype that NumPy can export, and which they are: it knows bfloat16 only by name."""
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16), DType.bfloat16
    return array, DType.from_numpy(array.dtype)


def _of_bits(bits: np.ndarray, dtype: DType, axes: tuple[int, ...], kernel: Kernel) -> np.ndarray:
    """Returns softmax along `axes` of an array whose elements are the bits of `dtype`, as such bits."""
    # Axes in the order in which they lie in memory, so that a transposed or Fortran-ordered array is taken as it lies.
    order = sorted(range(bits.ndim), key=lambda i: -abs(bits.strides[i]))
    places = sorted(order.index(a) for a in axes)
    if not are_consecutive(places):
        order = [a for a in range(bits.ndim) if a not in axes] + list(axes)
        places = list(range(bits.ndim - len(axes), bits.ndim))
    laid = np.require(bits.transpose(order), requirements=["C_CONTIGUOUS", "ALIGNED", "WRITEABLE"])
    rows = Rows.of(laid.shape, tuple(places))
    result = _of_buffer(Buffer.from_numpy(laid).view(dtype, laid.shape), rows, kernel)
    host: np.ndarray = result.view(DType.from_numpy(bits.dtype), laid.shape).to_numpy()
    return host.transpose(np.argsort(order))


def _of_buffer(buffer: Buffer, rows: Rows, kernel: Kernel) -> Buffer:
    """Returns softmax of a contiguous buffer, on the buffer's device."""
    check_dtype(buffer.dtype)
    wanted = signature(kernel, buffer.dtype, rows)
    shape = tuple(buffer.shape)
    if buffer.num_elements == 0:
        return Buffer(buffer.dtype, shape, buffer.device)
    model = runtime.model(wanted, rows.n)
    result = model.execute(buffer.view(buffer.dtype, rows.shape).to(kernel.device))[0]
    return result.view(buffer.dtype, shape).to(buffer.device)


def signature(kernel: Kernel, dtype: DType, rows: Rows) -> runtime.Signature:
    """Returns which model computes it; refuses choices that the kernel does not leave."""
    algorithm = check_algorithm(kernel.algorithm, kernel.device.label)
    choice = tuning.choice(kernel.device, algorithm, dtype, kernel.block_size, kernel.unroll)
    return runtime.Signature(kernel.device, dtype, rows.contiguous, algorithm, *choice)


class _OnQueue:
    """Exports an array to the queue that MAX will read it from, so that reads wait for what its owner has queued."""

    def __init__(self, array: Any, queue: int) -> None:
        self.array = array
        self.queue = queue

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**{**options, "stream": self.queue})

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def as_buffer(x: Any, name: str = "x") -> Buffer:
    """Returns the memory of a DLPack array, shared if it is contiguous.

    MAX takes what it imports for row-major whatever its strides say, so those are looked at here.
    """
    if isinstance(x, Buffer):
        if not x.is_contiguous:
            raise ValueError(f"{name} is a max.driver.Buffer that is not contiguous: pass a contiguous copy")
        return x
    kind, index = x.__dlpack_device__()
    on_host = int(kind) == KDL_CPU
    try:
        if callable(getattr(x, "contiguous", None)):
            x = x.contiguous()
        elif on_host:
            view = np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)
            if not view.flags.c_contiguous:
                bits, dtype = to_bits(np.ascontiguousarray(view))
                return Buffer.from_numpy(bits).view(dtype, bits.shape)
        elif getattr(x, "__cuda_array_interface__", {"strides": ()})["strides"] is not None:
            raise ValueError(f"{name} is not known to be contiguous: pass a contiguous copy")
        if on_host:
            return Buffer._from_dlpack(x)
        queue = runtime.device(f"gpu:{index}" if index else "gpu").default_queue
        return Buffer._from_dlpack(_OnQueue(x, queue.native_stream_handle))
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError(f"{name}, a {type(x).__module__}.{type(x).__name__}, cannot be shared: {error}") from error


def like(x: Any, result: Buffer) -> Any:
    """Returns `result` as the kind of array that `x` is, shared."""
    if isinstance(x, Buffer):
        return result
    # Whoever reads it next does so on a queue of its own.
    result.device.synchronize()
    namespaces = [x.__array_namespace__()] if hasattr(x, "__array_namespace__") else []
    namespaces += [type(x), sys.modules[type(x).__module__.partition(".")[0]]]
    for namespace in namespaces:
        if hasattr(namespace, "from_dlpack"):
            return namespace.from_dlpack(result)
    raise TypeError(f"x is a {type(x).__module__}.{type(x).__name__}, which has no from_dlpack to return one with")
