"""Arrays of the host in the dtype of the arithmetic, and back: of bfloat16 NumPy knows the bits only."""

from __future__ import annotations

import numpy as np


def widened(array: np.ndarray, dtype: str, wide: np.dtype) -> np.ndarray:
    """Returns an array of `dtype`, perhaps of bits, in a wider one."""
    if dtype == "bfloat16":
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(wide, copy=False)


def narrowed(array: np.ndarray, dtype: str) -> np.ndarray:
    """Returns an array rounded to `dtype`: bits of bfloat16."""
    if dtype != "bfloat16":
        return array.astype(dtype, copy=False)
    bits = array.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)
