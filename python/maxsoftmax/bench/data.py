"""The logits that everybody gets, and the check of what comes back."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from max.driver import CPU, Buffer, Device
from max.dtype import DType

from maxsoftmax.bench.cases import Case
from maxsoftmax.eager import Rows

BLOCK = 2**22 - 3
"""Random logits that all inputs are cut from. A prime, so that the rows of usual lengths all differ."""

CHECKED = 2**22
"""Elements of an output that are compared, in whole rows, unless one row is longer."""

TOLERANCE = {
    DType.float32: (1e-5, 2.0**-22),
    DType.bfloat16: (2.0**-6, 2.0**-8),
    DType.float16: (2.0**-9, 2.0**-11),
    DType.float64: (1e-11, 2.0**-50),
}
"""Relative error from which a result counts as wrong, and how much more for each unit by which x is below the maximum:
fast exponentials, and arithmetic in the dtype itself, as XLA does it, are not wrong. The error is recorded.
"""

PLAIN_SUM = 2.0**-26
"""What is added to the tolerance of float32 for each element of a row, up to `LONGEST_SUM`: many libraries keep a plain
running sum, whose error grows with its length, and are not wrong for that."""

LONGEST_SUM = 2.0**-9
"""Where that ends: what a thousand threads with such a sum each make of a row of millions."""

_SMALLEST = {DType.float32: 2.0**-126, DType.bfloat16: 2.0**-126, DType.float16: 2.0**-14, DType.float64: 2.0**-1022}


class Inputs(NamedTuple):
    """Logits in fresh memory of a device, from one distribution for every provider."""

    case: Case
    buffers: list[Buffer]
    """Several where one alone would stay in the cache; each holds other numbers."""
    offsets: list[int]
    """Where in the block each begins: anywhere, so that memory in which nothing was written never holds the answer."""

    @classmethod
    def place(cls, case: Case, count: int, device: Device) -> Inputs:
        """Returns `count` inputs of `case`."""
        block = _block(case.dtype).to(device)
        buffers = []
        offsets = np.random.default_rng().integers(BLOCK, size=count).tolist()
        for offset in offsets:
            flat = Buffer(case.dtype, (case.size,), device=device)
            for start, at, length in _pieces(offset, case.size):
                flat[start : start + length].inplace_copy_from(block[at : at + length])
            buffers.append(flat.view(case.dtype, case.shape))
        # MAX copies on a CPU behind one's back, and does not wait for that when it computes.
        device.synchronize()
        return cls(case, buffers, offsets)


class Check(NamedTuple):
    """What became of the comparison with float64."""

    error: float
    """The largest relative error, NaN if something is not a finite number."""
    correct: bool


def check(inputs: Inputs, number: int, y: Buffer) -> Check:
    """Compares `y` with softmax of input `number` in float64: the first row, the last, and others drawn by chance.

    Raises:
        ValueError: If `y` has not the shape and dtype of the input.
    """
    case = inputs.case
    # Imported only where it is needed, so that the command starts fast.
    import scipy.special

    if tuple(y.shape) != case.shape or y.dtype != case.dtype:
        found = f"{'×'.join(map(str, y.shape))} {y.dtype.name}"
        raise ValueError(f"the result is {found} where {case} was asked for")
    rows = Rows.of(case.shape, (case.place,))
    slab = rows.n * rows.inner
    chosen = {*range(rows.outer)} if rows.outer * slab <= CHECKED else {0, rows.outer - 1}
    if len(chosen) < rows.outer:
        chosen |= set(np.random.default_rng().integers(rows.outer, size=max(0, CHECKED // slab - 2)).tolist())
    flat = y.view(y.dtype, (case.size,))
    block = _floats(_block(case.dtype))
    worst = Check(0.0, True)
    for row in sorted(chosen):
        at = inputs.offsets[number] + row * slab + np.arange(slab)
        x = block[at % BLOCK].astype(np.float64).reshape(rows.n, rows.inner)
        expected = scipy.special.softmax(x, axis=0)
        result = _floats(flat[row * slab : (row + 1) * slab].to(CPU())).reshape(rows.n, rows.inner)
        below = x.max(axis=0) - x
        worst = _worse(worst, _compare(result.astype(np.float64), expected, below, case.dtype))
    return worst


def _compare(found: np.ndarray, expected: np.ndarray, below: np.ndarray, dtype: DType) -> Check:
    if not np.isfinite(found).all():
        return Check(math.nan, False)
    difference = np.abs(found - expected)
    normal = expected > max(_SMALLEST[dtype], 1e-30 if dtype == DType.float32 else 0)
    relative = difference[normal] / expected[normal]
    base, slope = TOLERANCE[dtype]
    if dtype == DType.float32:
        base += min(PLAIN_SUM * expected.shape[0], LONGEST_SUM)
    # Below the normal numbers some libraries give 0.
    tiny = difference[~normal] <= _SMALLEST[dtype] + 1e-30
    return Check(
        float(relative.max(initial=0.0)), bool((relative <= base + slope * below[normal]).all() and tiny.all())
    )


def _worse(a: Check, b: Check) -> Check:
    error = math.nan if math.isnan(a.error) or math.isnan(b.error) else max(a.error, b.error)
    return Check(error, a.correct and b.correct)


def _pieces(offset: int, size: int) -> list[tuple[int, int, int]]:
    """Returns (start, at, length): which parts of an input come from where in the block."""
    pieces, start = [], 0
    while start < size:
        at = (offset + start) % BLOCK
        length = min(BLOCK - at, size - start)
        pieces.append((start, at, length))
        start += length
    return pieces


_blocks: dict[DType, Buffer] = {}


def _block(dtype: DType) -> Buffer:
    """Returns the random logits, in the host's memory: normal with a standard deviation of 4."""
    if dtype not in _blocks:
        x = np.random.default_rng(0).standard_normal(BLOCK, dtype=np.float32) * 4
        if dtype == DType.bfloat16:
            # NumPy knows no bfloat16: its bits are the upper half of a float32's.
            _blocks[dtype] = Buffer.from_numpy((x.view(np.uint32) >> 16).astype(np.uint16)).view(dtype, (BLOCK,))
        else:
            _blocks[dtype] = Buffer.from_numpy(x.astype(dtype.to_numpy()))
    return _blocks[dtype]


def _floats(buffer: Buffer) -> np.ndarray:
    """Returns what is in a buffer of the host as floats that NumPy knows."""
    if buffer.dtype != DType.bfloat16:
        return np.asarray(buffer.to_numpy())
    bits = np.asarray(buffer.view(DType.uint16, buffer.shape).to_numpy())
    return (bits.astype(np.uint32) << 16).view(np.float32)
