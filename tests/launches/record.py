"""Prints what a library of kernels launches on a GPU that is not there: `record.py softmax float32 LIBRARY.so`.

A line for each launch of a call, and then one for the call. `diff` of what two versions print tells whether the host's
part of a redesign is what it was; the device's is compared by PTX.
"""

import ctypes
import itertools
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from maxsoftmax._native.description import POINTERS

LENGTHS = [
    *(1, 2, 3, 4, 7, 8, 13, 16, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 256, 257, 500, 512, 777, 1000, 1023),
    *(1024, 1025, 2000, 2048, 3000, 4095, 4096, 4097, 6000, 8192, 8193, 12288, 12289, 16384, 20000, 24577, 32768),
    *(40000, 50257, 50304, 57344, 57345, 57352, 65536, 65537, 90112, 100352, 128256, 131072, 151936, 163840),
    *(196609, 201088, 229376, 262144, 262145, 262208, 311296, 400000, 400001, 524287, 524288, 800001),
    *(1 << 20, (1 << 20) + 1, 1 << 22, 5000003, 1 << 23, 1 << 24),
]
COUNTS = [1, 3, 64, 65, 300, 1000, 8192, 100000]
AROUND = [(1, 2), (1, 5), (7, 33), (16, 128), (1, 1000), (16, 1024), (3, 4097), (2, 100000)]
"""Rows along another axis: (outer, inner)."""
MOST = 1 << 33
"""Elements."""


def shapes():
    """Returns (outer, n, inner) of many rows."""
    along = [(rows, n, 1) for n in LENGTHS for rows in COUNTS]
    around = [(outer, n, inner) for n in LENGTHS if n < 70000 for outer, inner in AROUND]
    most = [(2, n, inner) for n in (30000, 300000) for inner in (65, 1023)]
    return [shape for shape in along + around + most if shape[0] * shape[1] * shape[2] < MOST]


def options(name):
    """Returns what a library may be told."""
    bits = [struct.unpack("q", struct.pack("d", value))[0] for value in (0.0, 0.1, 1.0, 0.7)]
    if name.startswith("cross_entropy"):
        return list(itertools.product([-100], bits[:2], [0, 1, 2], [0, 1], [0, 1]))
    if name.startswith("token_log_probs"):
        return list(itertools.product([1, 5], [1], bits[2:]))
    if name.startswith("kl_divergence"):
        return list(itertools.product(bits[2:], [0, 1]))
    return [(0,), (1,), (2,)] if name == "statistics" else [()]


def load_driver():
    """Builds and loads a driver for a GPU that is not there, before MAX looks for one."""
    source = Path(__file__).with_name("cuda.c")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            path = Path(folder) / name
            command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", source, "-o", path]
            subprocess.run(command, check=True)
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def main(name, dtype, path):
    log = tempfile.NamedTemporaryFile("r", suffix=".txt")  # noqa: SIM115 (it lives as long as the process)
    os.environ["LAUNCHES"] = log.name
    load_driver()
    import max.driver  # noqa: F401 (it loads what the library calls)

    library = ctypes.CDLL(path)
    opening, scratch, run = library.maxsoftmax_open, library.maxsoftmax_scratch, library.maxsoftmax_run
    opening.argtypes, opening.restype = (ctypes.c_int64, ctypes.c_void_p), ctypes.c_void_p
    scratch.argtypes, scratch.restype = (ctypes.c_void_p,), ctypes.c_int64
    run.argtypes, run.restype = (ctypes.c_void_p,) * (2 + POINTERS[name]), ctypes.c_void_p
    error = ctypes.c_void_p()
    context = opening(0, ctypes.addressof(error))
    if not context:
        sys.exit(ctypes.string_at(error.value)[1:].decode())
    size = {"float64": 8, "float32": 4}.get(dtype, 2)
    for shape, told, shift in itertools.product(shapes(), options(name), (0, size)):
        call = (ctypes.c_int64 * 48)(context, *shape, 0, *told)
        counted = scratch(ctypes.addressof(call))
        # Nobody reads what is there.
        pointers = [(i + 1 << 44) + shift for i in range(POINTERS[name] - 1)]
        call[4] = 1
        if counted and not run(ctypes.addressof(call), 0, *pointers, 1 << 43):
            sys.exit(f"{shape} was not refused, which has too little scratch memory")
        log.read()
        call[4] = counted or 1
        failed = run(ctypes.addressof(call), 0, *pointers, 1 << 43)
        print(log.read(), end="")
        outcome = ctypes.string_at(failed).decode() if failed else f"scratch={counted}"
        print(f"call {name} {dtype} {shape} {told} shift={shift}: {outcome}")


if __name__ == "__main__":
    main(*sys.argv[1:])
