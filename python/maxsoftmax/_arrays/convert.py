"""Whatever speaks for an array, as an `Array`: NumPy's, lists and numbers, `max.driver.Buffer`s, DLPack's."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, NoReturn

import numpy as np

from maxsoftmax._arguments import CLASSES, FLOATS
from maxsoftmax._arrays import devices, dlpack
from maxsoftmax._arrays.memory import HOST, Array, of_numpy, view

ALLOWED = "float16, float32, float64, bfloat16, integers and bools"
"""What logits may be of."""


OVERWRITTEN = "x is to be overwritten, so that it must be a contiguous, writeable array of floats"
"""Why an array is refused that would have to be copied."""


class Reader(NamedTuple):
    """What will read arrays that are on a GPU."""

    stream: int | None = None
    """The handle of its stream, if that is not MAX's own queue."""
    of_torch: bool = False
    """Whether that is the stream that torch itself would use, so that nobody has to wait."""


MAX = Reader()
"""MAX's own queue of the device where an array is."""


def is_host(x: Any) -> bool:
    """Returns whether `x` is for NumPy to look at."""
    return isinstance(x, (np.ndarray, np.generic)) or not hasattr(x, "__dlpack__")


def is_buffer(x: Any) -> bool:
    """Returns whether `x` is a `max.driver.Buffer`, which nobody has who has not imported it."""
    driver = sys.modules.get("max.driver")
    return driver is not None and isinstance(x, driver.Buffer)


def is_tensor(x: Any) -> bool:
    """Returns whether `x` is a `torch.Tensor`, likewise."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, getattr(torch, "Tensor", ()))


def device(x: Any) -> int:
    """Returns the index of the GPU that an array is on, or `HOST`."""
    if is_buffer(x):
        return HOST if x.device.is_host else int(x.device.id)
    if is_tensor(x):
        return int(x.device.index) if x.is_cuda else HOST
    return dlpack.device(x)


def floats(x: Any, name: str, reader: Reader = MAX) -> Array:
    """Returns logits, or what is like them: integers and bools become floats.

    Args:
        x: What the caller passed.
        name: The argument's name.
        reader: What will read it, on a GPU.

    Raises:
        TypeError: If it is not an array of real numbers.
        ValueError: If it is not an array.
    """
    if is_host(x):
        return of_numpy(as_floats(x, name))
    found = lend(x, name, reader)
    if found.dtype in FLOATS:
        return found
    if found.dtype != "bool" and not found.dtype.startswith(("int", "uint")):
        raise TypeError(f"{name} has dtype {found.dtype}, but the kernels take {ALLOWED}")
    return of_numpy(as_floats(view(devices.fetched(found)), name))


def classes(x: Any, name: str, reader: Reader = MAX) -> Array:
    """Returns targets, or tokens.

    Args:
        x: What the caller passed.
        name: The argument's name.
        reader: What will read it, on a GPU.

    Raises:
        TypeError: If they are not classes.
    """
    if is_host(x):
        array = np.asarray(x)
        dtype = array.dtype.newbyteorder("=")
        if dtype.name in CLASSES:
            return of_numpy(array.astype(dtype, copy=False))
        found: Any = array.dtype
    else:
        lent = lend(x, name, reader)
        if lent.dtype in CLASSES:
            return lent
        found = lent.dtype
    raise TypeError(f"{name} has dtype {found}, but classes are int32 or int64")


def operand(x: Any, name: str, reader: Reader = MAX) -> Array:
    """Returns what is computed with logits: floats, or for a mask bools.

    Raises:
        TypeError: If it is of anything else.
    """
    allowed = (*FLOATS, "bool") if name == "mask" else FLOATS
    if is_host(x):
        array = np.asarray(x)
        dtype = array.dtype.newbyteorder("=")
        if dtype.name in allowed:
            return of_numpy(array.astype(dtype, copy=False))
        if dtype.kind in "iu" and name != "mask":
            # Whether a mask of integers is to be added, or tells what takes part, nobody can know.
            return of_numpy(as_floats(array))
        found = array.dtype.name
    else:
        lent = lend(x, name, reader)
        if lent.dtype in allowed:
            return lent
        found = lent.dtype
    raise TypeError(f"{name} has dtype {found}, but must be of floats{' or bools' if name == 'mask' else ''}")


def as_floats(x: Any, name: str = "x") -> np.ndarray:
    """Returns `x` as an array, in this machine's byte order, of a dtype that the kernels take."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, and its mask would be ignored: pass {name}.filled(-numpy.inf) instead"
        )
    _check_no_value(x, name)
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
        hint = "; bfloat16 comes out of a .npy file as |V2: view it as ml_dtypes.bfloat16" if native == "V2" else ""
        raise TypeError(f"{name} has dtype {array.dtype}, but the kernels take {ALLOWED}{hint}")
    return array.astype(native, copy=False)


def lend(x: Any, name: str, reader: Reader = MAX, *, to_write: bool = False) -> Array:
    """Returns where somebody else's array lies.

    Args:
        x: A tensor of torch, a buffer of MAX, or whatever else has `__dlpack__`.
        name: The argument's name.
        reader: What will read it, on a GPU.
        to_write: Whether it will be written to; where its owner does not say that it may be, it may not.

    Raises:
        TypeError: If it cannot be shared.
        ValueError: If it is on a GPU and has gaps that its owner cannot close, or must not be written to.
    """
    if is_buffer(x):
        return _of_buffer(x, name, reader)
    if is_tensor(x) and (reader.of_torch or not x.is_cuda):
        return _of_tensor(x, name)
    try:
        on = dlpack.device(x)
        stream = None
        if on != HOST:
            stream = devices.queue(on) if reader.stream is None else reader.stream
        lent = dlpack.read(x, stream)
        if on != HOST and not (to_write or lent.array.is_row_major):
            lent = dlpack.read(_contiguous(x), stream)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        _refuse(x, name, error)
    if to_write and not lent.writeable:
        raise ValueError(OVERWRITTEN)
    return _settled(lent.array)


def _of_buffer(x: Any, name: str, reader: Reader) -> Array:
    """Returns where a buffer of MAX lies, once what computes it is done or will be before it is read."""
    where = x.device
    if where.is_host:
        devices.settle()
    else:
        if not x.is_contiguous:
            raise ValueError(f"{name} is a max.driver.Buffer that is not contiguous: pass a contiguous copy")
        devices.wait(where, x.stream, reader.stream)
    device = HOST if where.is_host else where.id
    return _settled(Array(x, x._data_ptr(), x.dtype.name, tuple(x.shape), tuple(x.strides), device))


def _of_tensor(x: Any, name: str) -> Array:
    """Returns where a tensor of torch lies, to be read in the order of torch's current stream."""
    where = x.device
    try:
        if x.requires_grad:
            raise TypeError("it requires a gradient: pass x.detach(), or use maxsoftmax.torch")
        if where.type not in ("cpu", "cuda"):
            raise TypeError(f"it is on {where}")
        x = x.resolve_neg()
        dtype = str(x.dtype).removeprefix("torch.")
        device = HOST if where.type == "cpu" else where.index
        return _settled(Array(x, x.data_ptr(), dtype, tuple(x.shape), tuple(x.stride()), device))
    except (RuntimeError, TypeError) as error:
        _refuse(x, name, error)


def _settled(array: Array) -> Array:
    """Returns an array, or a copy if it is on the host and its elements are where none should begin."""
    if array.device == HOST and array.dtype in FLOATS:
        seen = view(array)
        if array.address % seen.itemsize:
            return of_numpy(seen, array.dtype)
    return array


def _contiguous(x: Any) -> Any:
    """Returns a copy in C order of an array of a GPU, by the means of its owner."""
    if callable(getattr(x, "contiguous", None)):
        return x.contiguous()
    for namespace in namespaces(x):
        if hasattr(namespace, "ascontiguousarray"):
            return namespace.ascontiguousarray(x)
    raise ValueError("it is not contiguous: pass a contiguous copy")


def namespaces(x: Any) -> list[Any]:
    """Returns where to look for functions of the kind of array that `x` is: the array API's way first."""
    found = [x.__array_namespace__()] if hasattr(x, "__array_namespace__") else []
    return [*found, type(x), sys.modules[type(x).__module__.partition(".")[0]]]


def _check_no_value(x: Any, name: str) -> None:
    graph = sys.modules.get("max.graph")
    if graph is not None and isinstance(x, graph.Value):
        raise TypeError(f"{name} is a value of a graph, not an array: use the function of this name in maxsoftmax.ops")


def _refuse(x: Any, name: str, error: Exception) -> NoReturn:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise TypeError(f"{name}, a {type(x).__module__}.{type(x).__name__}, cannot be shared: {reason}") from error
