"""What DLPack says of an array, read from its capsule.

The capsule is kept, not consumed: whoever exported the array lends it until the capsule is let go of.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from maxsoftmax._arrays.memory import HOST, Array, row_major

ON_HOST = (1, 3, 11)
"""DLPack's numbers of memory that the host may read: its own, and what CUDA or ROCm have pinned."""

ON_GPU = (2, 10, 13)
"""Those of memory of a GPU: CUDA's, ROCm's, and CUDA's managed one."""


class Lent(NamedTuple):
    """An array of somebody else, and what they allow."""

    array: Array
    writeable: bool
    """Whether they say so, which DLPack's first version has no word for."""


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Dtype(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("rank", ctypes.c_int32),
        ("dtype", _Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


READ_ONLY = 1
"""The flag of memory that must not be written to."""

VERSION = (1, 1)
"""The newest version of DLPack that is read here."""

KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
"""What the codes of dtypes stand for."""

_is_valid: Callable[[Any, bytes], int] = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer: Callable[[Any, bytes], int] = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def device(x: Any) -> int:
    """Returns the index of the GPU that a DLPack array is on, or `HOST`.

    Raises:
        TypeError: If it is on neither.
    """
    kind, index = x.__dlpack_device__()
    if int(kind) in ON_HOST:
        return HOST
    if int(kind) in ON_GPU:
        return int(index)
    raise TypeError("it is neither in memory of the host nor in that of a GPU")


def read(x: Any, stream: int | None = None) -> Lent:
    """Returns where a DLPack array lies.

    Args:
        x: What has `__dlpack__`.
        stream: Of a GPU: what will read the array, so that its owner lets it wait for what is still queued.

    Raises:
        TypeError: If what is exported is nothing that can be read here.
        Exception: Whatever the owner raises who does not export it.
    """
    options = {} if stream is None else {"stream": stream}
    try:
        capsule = x.__dlpack__(max_version=VERSION, **options)
    except TypeError:
        # Its owner knows nothing of versions.
        capsule = x.__dlpack__(**options)
    writeable = False
    if _is_valid(capsule, b"dltensor_versioned"):
        whole = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if whole.major != VERSION[0]:
            raise TypeError(f"it is exported by version {whole.major}.{whole.minor} of DLPack")
        tensor, writeable = whole.tensor, not whole.flags & READ_ONLY
    elif _is_valid(capsule, b"dltensor"):
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    else:
        raise TypeError("what it exports is no capsule of DLPack")
    shape = tuple(tensor.shape[i] for i in range(tensor.rank))
    strides = tuple(tensor.strides[i] for i in range(tensor.rank)) if tensor.strides else row_major(shape)
    where = int(tensor.device.index) if tensor.device.kind in ON_GPU else HOST
    address = (tensor.data or 0) + tensor.offset
    return Lent(Array((capsule, x), address, _name(tensor.dtype), shape, strides, where), writeable)


def _name(dtype: _Dtype) -> str:
    kind = KINDS.get(dtype.code)
    if kind is None or dtype.lanes != 1:
        return f"{dtype.lanes} x DLPack's {dtype.code} of {dtype.bits} bits"
    return "bool" if kind == "bool" else f"{kind}{dtype.bits}"
