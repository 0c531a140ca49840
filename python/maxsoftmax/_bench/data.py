"""What everybody is given to compute with, and the check of what comes back."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from max.driver import CPU, Buffer, Device
from max.dtype import DType

from maxsoftmax._arrays.layout import Rows
from maxsoftmax._bench import reference
from maxsoftmax._bench.cases import OPS, Case

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
    """Logits in fresh memory of a device, from one distribution for every provider; of a gradient, probabilities."""

    case: Case
    buffers: list[Buffer]
    """Several where one alone would stay in the cache; each holds other numbers."""
    offsets: list[int]
    """Where in the block each begins: anywhere, so that memory in which nothing was written never holds the answer."""
    others: tuple[tuple[Buffer, ...], ...] = ()
    """What goes with each: the gradient of the probabilities, or targets; nothing where the op takes logits only."""

    @classmethod
    def place(cls, case: Case, count: int, device: Device) -> Inputs:
        """Returns `count` inputs of `case`."""
        offsets = np.random.default_rng().integers(BLOCK, size=count).tolist()
        blocks = [block.to(device) for block in _given(case)]
        given = [[_cut(case, block, offset, device) for block in blocks] for offset in offsets]
        others: list[tuple[Buffer, ...]] = [tuple(rest) for _, *rest in given]
        if OPS[case.op].losses:
            others = [(Buffer.from_numpy(_targets(case, offset)).to(device),) for offset in offsets]
        # MAX copies on a CPU behind one's back, and does not wait for that when it computes.
        device.synchronize()
        return cls(case, [first for first, *_ in given], offsets, tuple(others) if any(others) else ())


class Check(NamedTuple):
    """What became of the comparison with float64."""

    error: float
    """The largest relative error, NaN if something is not a finite number."""
    correct: bool


def check(inputs: Inputs, number: int, *found: Buffer) -> Check:
    """Compares what came of input `number` with float64: the first row, the last, and others drawn by chance.

    Of a loss it is the mean of all rows.

    Raises:
        ValueError: If a result has not the shape and dtype that it should.
    """
    case = inputs.case
    op = OPS[case.op]
    shapes = [()] * op.losses + [case.shape] * op.writes
    if len(found) != len(shapes):
        raise ValueError(f"there are {len(found)} results where {case} has {len(shapes)}")
    worst = Check(0.0, True)
    for y, shape in zip(found, shapes, strict=True):
        # Of logits of 16 bits, some hand out the loss in float32.
        widened = not shape and case.dtype.size_in_bytes == 2 and y.dtype == DType.float32
        if tuple(y.shape) != shape or not (widened or y.dtype == case.dtype):
            given = f"{'×'.join(map(str, y.shape)) or 'scalar'} {y.dtype.name}"
            raise ValueError(f"the result is {given} where {case if shape else 'its loss'} was asked for")
        worst = _worse(worst, _check_rows(inputs, number, y) if shape else _check_loss(inputs, number, y))
    return worst


def _check_loss(inputs: Inputs, number: int, loss: Buffer) -> Check:
    case, offset = inputs.case, inputs.offsets[number]
    block = _floats(_block(case.dtype)).astype(np.float64)
    rows, n = case.shape
    expected = reference.mean_loss(block, offset, (rows, n), _targets(case, offset))
    found = _floats(loss.to(CPU())).astype(np.float64).item()
    if not math.isfinite(found):
        return Check(math.nan, False)
    error = abs(found - expected) / abs(expected)
    return Check(error, error <= max(TOLERANCE[case.dtype][0], reference.RUNNING_SUM))


def _check_rows(inputs: Inputs, number: int, y: Buffer) -> Check:
    case, offset = inputs.case, inputs.offsets[number]
    rows = Rows.of(case.shape, (case.place,))
    slab = rows.n * rows.inner
    chosen = {*range(rows.outer)} if rows.outer * slab <= CHECKED else {0, rows.outer - 1}
    if len(chosen) < rows.outer:
        chosen |= set(np.random.default_rng().integers(rows.outer, size=max(0, CHECKED // slab - 2)).tolist())
    flat = y.view(y.dtype, (case.size,))
    blocks = [_floats(block) for block in _given(case)]
    worst = Check(0.0, True)
    for row in sorted(chosen):
        at = (offset + row * slab + np.arange(slab)) % BLOCK
        given = [block[at].astype(np.float64).reshape(rows.n, rows.inner) for block in blocks]
        if OPS[case.op].losses:
            expected = reference.cross_entropy_gradient(given[0], int(_targets(case, offset)[row]), rows.outer)
        elif OPS[case.op].queries:
            expected = reference.of_query(case.op, given[0], row % case.shape[-2])
        else:
            expected = getattr(reference, case.op)(*given)
        result = _floats(flat[row * slab : (row + 1) * slab].to(CPU())).reshape(rows.n, rows.inner)
        worst = _worse(worst, _compare(result.astype(np.float64), expected, case.dtype))
    return worst


def _compare(found: np.ndarray, expected: reference.Expected, dtype: DType) -> Check:
    if not np.isfinite(found).all():
        return Check(math.nan, False)
    difference = np.abs(found - expected.values)
    normal = expected.terms > max(_SMALLEST[dtype], 1e-30 if dtype == DType.float32 else 0)
    relative = difference[normal] / expected.terms[normal]
    base, slope = TOLERANCE[dtype]
    if dtype == DType.float32:
        base += min(PLAIN_SUM * found.shape[0], LONGEST_SUM)
    # Below the normal numbers some libraries give 0.
    tiny = difference[~normal] <= _SMALLEST[dtype] + 1e-30
    return Check(
        float(relative.max(initial=0.0)),
        bool((relative <= base + slope * expected.below[normal]).all() and tiny.all()),
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


def _cut(case: Case, block: Buffer, offset: int, device: Device) -> Buffer:
    """Returns a tensor of a case, from a block that is repeated as often as it takes."""
    flat = Buffer(case.dtype, (case.size,), device=device)
    for start, at, length in _pieces(offset, case.size):
        flat[start : start + length].inplace_copy_from(block[at : at + length])
    return flat.view(case.dtype, case.shape)


def _targets(case: Case, offset: int) -> np.ndarray:
    """Returns the classes of the rows of an input, all over the place."""
    rows, n = case.shape
    return (offset + 7919 * np.arange(rows)) % n


def _given(case: Case) -> list[Buffer]:
    """Returns the blocks that the tensors of a case are cut from."""
    if case.op == "softmax_backward":
        return list(_gradient_blocks(case.dtype, case.shape[case.place]))
    return [_block(case.dtype)]


_blocks: dict[DType, Buffer] = {}


def _block(dtype: DType) -> Buffer:
    """Returns the random logits, in the host's memory: normal with a standard deviation of 4."""
    if dtype not in _blocks:
        _blocks[dtype] = _rounded(np.random.default_rng(0).standard_normal(BLOCK, dtype=np.float32) * 4, dtype)
    return _blocks[dtype]


@functools.lru_cache(maxsize=4)
def _gradient_blocks(dtype: DType, n: int) -> tuple[Buffer, Buffer]:
    """Returns, in the host's memory, what may be probabilities of rows of `n`, which add up to about 1, and a gradient.

    The gradient is normal around 1, so that its mean counts.
    """
    normal = np.random.default_rng(1).standard_normal((2, BLOCK), dtype=np.float32)
    y = np.abs(normal[0]) / np.float32(n)
    return _rounded(y, dtype), _rounded(normal[1] + 1, dtype)


def _rounded(x: np.ndarray, dtype: DType) -> Buffer:
    if dtype == DType.bfloat16:
        # NumPy knows no bfloat16: its bits are the upper half of a float32's.
        return Buffer.from_numpy((x.view(np.uint32) >> 16).astype(np.uint16)).view(dtype, (BLOCK,))
    return Buffer.from_numpy(x.astype(dtype.to_numpy()))


def _floats(buffer: Buffer) -> np.ndarray:
    """Returns what is in a buffer of the host as floats that NumPy knows."""
    if buffer.dtype != DType.bfloat16:
        return np.asarray(buffer.to_numpy())
    bits = np.asarray(buffer.view(DType.uint16, buffer.shape).to_numpy())
    return (bits.astype(np.uint32) << 16).view(np.float32)
