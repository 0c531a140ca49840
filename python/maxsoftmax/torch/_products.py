"""Logits that a matrix product makes, a chunk of rows at a time, and the gradients of what they are made of.

A chunk's logits lie in memory that the next chunk uses again. The gradients of the weight and the bias are sums over
chunks: in float32 or wider, and rounded once. A sum of float32 is twice as large as a weight of bfloat16; half of it
lies where the gradient will be. On a GPU a chunk has as many rows as there are features, if these are more than
`MEMORY` says: its logits are as large as the other half. Rows that are at most twice as many are one chunk, whose
logits are no larger than both, and there is no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import Any

import torch

from maxsoftmax.torch._direct_losses import wide

MEMORY = {"cpu": 24 << 20, "cuda": 512 << 20}
"""Bytes of a chunk's logits, unless told otherwise."""

STEP = 128
"""Rows by which a chunk grows: products are made of blocks of so many."""

BLOCK = 8192
"""Rows of the weight's gradient that are computed at a time where a product cannot add to float32 by itself."""

_ADDS = "dtype_out" in torch.ops.aten.addmm.overloads()
"""Whether torch's products of bfloat16 and float16 on a GPU can add to float32."""

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Those of hidden, weight and bias, if they are wanted."""


def chunk_of(count: int, weight: torch.Tensor, dtype: torch.dtype, summed: bool, kind: str) -> int:
    """Returns how many rows to take at a time.

    Args:
        count: How many rows there are.
        weight: The weight.
        dtype: Of the products.
        summed: Whether the weight's gradient is wanted, in the dtype of the products, and its sum in a wider one.
        kind: Of the device.
    """
    n, features = weight.shape
    most = STEP * max(1, MEMORY[kind] // (max(1, n) * dtype.itemsize) // STEP)
    if kind == "cuda" and summed:
        if count * dtype.itemsize <= features * wide(dtype).itemsize:
            return max(count, 1)
        most = max(most, features // STEP * STEP)
    # As many chunks as it takes, of about one length: products of few rows are slow.
    rows: int = STEP * max(1, ceil(count / ceil(max(count, 1) / most) / STEP))
    return rows


class Products:
    """The products of a chunk of rows with the weight, and of the gradients of logits with both.

    Args:
        hidden: (rows, features).
        weight: (n, features).
        bias: (n,), or None.
        kept: The places of the rows to take, or None for all.
        dtype: Of the products.
        softcap: What bounds logits, if anything does.
        chunk: Rows to take at a time, or None.
        wanted: Of which of hidden, weight and bias a gradient is wanted.
        scale: What gradients are multiplied by.
    """

    def __init__(  # noqa: PLR0917
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kept: torch.Tensor | None,
        dtype: torch.dtype,
        softcap: float | None,
        chunk: int | None,
        wanted: Sequence[bool],
        scale: float,
    ) -> None:
        self._hidden, self._kept, self._softcap, self._scale = hidden, kept, softcap, scale
        self._count = len(hidden) if kept is None else len(kept)
        self._matrix, self._offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        place, accum = hidden.device, wide(dtype)
        rounded = wanted[1] and weight.dtype is not accum
        fits = rounded and weight.dtype is dtype
        self._step = min(self._count, chunk or chunk_of(self._count, weight, dtype, fits, place.type))
        self._dhidden = self._dweight = self._dbias = None
        if wanted[0]:
            make = torch.empty_like if self._count == len(hidden) else torch.zeros_like
            self._dhidden = make(hidden, memory_format=torch.contiguous_format)
        self._sum: _Sum | None = None
        if wanted[1]:
            make = torch.empty if self._count else torch.zeros
            self._dweight = make(weight.shape, dtype=weight.dtype, device=place)
            if self._count and not (fits and self._step == self._count):
                self._sum = _Sum(self._dweight, accum)
        if wanted[2] and bias is not None:
            self._dbias = torch.zeros(bias.shape, dtype=accum, device=place)
        self._of_bias = bias
        self._room = torch.empty(self._step * weight.shape[0], dtype=dtype, device=place)
        self._taken = 0

    def places(self) -> Iterator[slice | torch.Tensor]:
        """Yields the places of a chunk's rows, chunk by chunk."""
        for first in range(0, self._count, max(self._step, 1)):
            last = min(first + self._step, self._count)
            yield slice(first, last) if self._kept is None else self._kept[first:last]

    def rows(self, places: slice | torch.Tensor) -> torch.Tensor:
        """Returns the rows of a chunk."""
        return self._hidden[places].to(self._matrix.dtype)

    def logits(self, taken: torch.Tensor) -> torch.Tensor:
        """Returns the logits of rows, where those of the last chunk were."""
        rows, n = len(taken), len(self._matrix)
        some = self._room[: rows * n]
        # On a CPU those of a class are neighbours, which its products do faster.
        logits = some.view(rows, n) if some.is_cuda else some.view(n, rows).t()
        if self._offset is None:
            torch.mm(taken, self._matrix.t(), out=logits)
        else:
            torch.addmm(self._offset, taken, self._matrix.t(), out=logits)
        return logits if self._softcap is None else logits.div_(self._softcap).tanh_().mul_(self._softcap)

    def overwritten(self, logits: torch.Tensor, backward: Callable[[slice], torch.Tensor]) -> None:
        """Overwrites logits by the gradients of what the soft cap bounds, some rows at a time.

        Args:
            logits: They.
            backward: Overwrites some rows by the gradients of logits, and returns them.
        """
        if self._softcap is None:
            backward(slice(None))
            return
        step = STEP if logits.is_contiguous() else max(len(logits), 1)
        for first in range(0, len(logits), step):
            part = slice(first, first + step)
            slope = self.slope(logits[part].clone())
            backward(part).mul_(slope)

    def slope(self, logits: torch.Tensor) -> torch.Tensor:
        """Overwrites logits by the derivative of the soft cap there."""
        assert self._softcap is not None
        return logits.div_(self._softcap).square_().neg_().add_(1)

    def add(self, places: slice | torch.Tensor, taken: torch.Tensor, dlogits: torch.Tensor) -> None:
        """Adds what the gradients of a chunk's logits come to."""
        if self._dhidden is not None:
            product = torch.empty_like(taken).addmm_(dlogits, self._matrix, beta=0, alpha=self._scale)
            self._dhidden[places] = product.to(self._dhidden.dtype)
        if self._dbias is not None:
            self._dbias.add_(dlogits.sum(0, dtype=self._dbias.dtype), alpha=self._scale)
        if self._dweight is not None:
            how: dict[str, Any] = {"beta": 1 if self._taken else 0, "alpha": self._scale}
            self._taken += len(taken)
            if self._sum is None:
                self._dweight.addmm_(dlogits.t(), taken, **how)
            else:
                self._sum.add(dlogits, taken, **how)

    def gradients(self) -> Gradients:
        """Returns the gradients that are wanted, of all chunks, in the dtypes of what they are of."""
        # What is rounded may lie there meanwhile.
        del self._room
        if self._sum is not None:
            self._sum.round()
        dbias = None if self._dbias is None or self._of_bias is None else self._dbias.to(self._of_bias.dtype)
        return self._dhidden, self._dweight, dbias


class _Sum:
    """The sum of the products of all chunks, in a dtype that may be wider than its result's.

    If elements are twice as large, its first half lies where the result will be.

    Args:
        result: (n, features).
        dtype: Of the sum.
    """

    def __init__(self, result: torch.Tensor, dtype: torch.dtype) -> None:
        n, features = result.shape
        self._result, self._rounds = result, result.dtype is not dtype
        half = n // 2 if dtype.itemsize == 2 * result.dtype.itemsize else 0
        rest = torch.empty(n - half, features, dtype=dtype, device=result.device) if self._rounds else result
        self._parts = [rest]
        if half:
            self._parts.insert(0, result.view(-1)[: 2 * half * features].view(dtype).view(half, features))

    def add(self, dlogits: torch.Tensor, taken: torch.Tensor, beta: int, alpha: float) -> None:
        """Adds the product of a chunk's gradients and its rows."""
        dtype, first = self._parts[0].dtype, 0
        how: dict[str, Any] = {"beta": beta, "alpha": alpha}
        if dlogits.dtype is not dtype and dlogits.is_cuda and _ADDS:
            how["out_dtype"] = dtype
        converts = dlogits.dtype is not dtype and "out_dtype" not in how
        rows = taken.to(dtype) if converts else taken
        for part in self._parts:
            step = BLOCK if converts else max(len(part), 1)
            for start in range(0, len(part), step):
                some = part[start : start + step]
                of_some = dlogits[:, first + start : first + start + len(some)].t()
                torch.addmm(some, of_some.to(dtype) if converts else of_some, rows, **how, out=some)
            first += len(part)

    def round(self) -> None:
        """Makes the result of the sum."""
        *halves, rest = self._parts
        # That of the first half is written over the sums of both its parts: elsewhere, before it goes there.
        rounded = [half.to(self._result.dtype) for half in halves]
        if self._rounds:
            self._result[len(self._result) - len(rest) :].copy_(rest)
        for half in rounded:
            self._result[: len(half)].copy_(half)
