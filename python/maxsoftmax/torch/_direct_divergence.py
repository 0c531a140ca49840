"""The KL divergence of two tensors' rows and its gradient, from memory to the kernel, as `direct` runs softmax.

Of the logits of p and q, those of q are copied only where they lie in another order, or begin elsewhere between two
multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from maxsoftmax import _native
from maxsoftmax.torch import _layouts as layouts
from maxsoftmax.torch import _memory as memory
from maxsoftmax.torch._arguments import check_result, check_same, check_tensor
from maxsoftmax.torch._direct_losses import wide
from maxsoftmax.torch._memory import VECTOR, dense, like, placed, plan, remember, run, shifted

SUMS = 5
"""How many accumulators there are of a row."""

_forward = memory.table()
_backward = memory.table()


def kl_divergence(p: torch.Tensor, q: torch.Tensor, dim: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the divergences, and what the gradient needs, of shape (…, 5)."""
    key = _key(dim, temperature, p, q)
    found = _forward.get(key)
    try:
        addresses = p.data_ptr(), q.data_ptr()
    except RuntimeError:
        # As in `direct`.
        computed: tuple[torch.Tensor, torch.Tensor] = torch.ops.maxsoftmax.kl_divergence(p, q, dim, temperature)
        return computed
    if found is None or not all(addresses) or p.is_neg() or q.is_neg() or (addresses[0] ^ addresses[1]) % VECTOR:
        return _first(p, q, dim, temperature)
    planned, results = found
    kl, sums = _made(results, p)
    error = run(planned, kl.data_ptr(), sums.data_ptr(), *addresses)
    if error:
        _native.fail(error)
    return kl, sums


def kl_divergence_backward(  # noqa: PLR0917 (as torch passes them)
    p: torch.Tensor,
    q: torch.Tensor,
    sums: torch.Tensor,
    dkl: torch.Tensor,
    dim: int,
    temperature: float,
    of_p: bool,
    dx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the gradient of the logits of p, or of q, in `dx` if that is given, which lies as `p` does."""
    key = (*_key(dim, temperature, p, q, sums, dkl), of_p)
    planned = _backward.get(key)
    try:
        addresses = p.data_ptr(), q.data_ptr(), sums.data_ptr(), dkl.data_ptr()
    except RuntimeError:
        # As in `direct`.
        return torch.ops.maxsoftmax.kl_divergence_backward(p, q, sums, dkl, dim, temperature, of_p)
    unlike = (addresses[0] ^ addresses[1]) % VECTOR
    if planned is None or not all(addresses) or any(x.is_neg() for x in (p, q, dkl)) or unlike:
        return _first_gradient(p, q, sums, dkl, dim, temperature, of_p, dx)
    if dx is None:
        dx = like(p) if addresses[0] % VECTOR else planned[4](p)
    error = run(planned, dx.data_ptr(), *addresses)
    if error:
        _native.fail(error)
    return dx


def empty_results(p: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns uninitialized results."""
    return _made(_results(p, dim), p)


def _key(dim: int, temperature: float, *tensors: torch.Tensor) -> tuple[Any, ...]:
    """Returns what a plan depends on."""
    return (dim, temperature, *[(t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def _results(p: torch.Tensor, dim: int) -> tuple[Any, ...]:
    """Returns shapes and strides of the divergences and the sums."""
    place = dim % p.ndim
    dims = layouts.order(p.shape, p.stride()) or list(range(p.ndim))
    rows = p.shape[:place] + p.shape[place + 1 :]
    strides = layouts.strides_of_rows(p.shape, dims, place)
    return (rows, strides), ((*rows, SUMS), (*(SUMS * step for step in strides), 1))


def _made(results: tuple[Any, ...], p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kl, sums = (torch.empty_strided(*how, dtype=wide(p.dtype), device=p.device) for how in results)
    return kl, sums


def _alike(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Returns both as the kernels take them, and the order of their dimensions."""
    p, dims = dense(p)
    q = placed(q, p.stride())
    if (p.data_ptr() ^ q.data_ptr()) % VECTOR and not p.is_meta:
        q = shifted(q, p.data_ptr() % VECTOR).copy_(q)
    return p, q, dims


def _first(p: torch.Tensor, q: torch.Tensor, dim: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensor(p)
    check_same(q, "teacher", p, "x")
    if p.is_meta:
        return empty_results(p, dim)
    if not p.numel():
        # Without elements there are no probabilities, and without rows there is nothing.
        kl, sums = empty_results(p, dim)
        return kl.fill_(float("nan")), sums.fill_(float("nan"))
    p, q, dims = _alike(p, q)
    key = _key(dim, temperature, p, q)
    if key not in _forward:
        rows = layouts.rows(p.shape, dims, dim % p.ndim)
        planned = plan("kl_divergence", p, rows, (_native.bits(temperature),))
        remember(_forward, key, (planned, _results(p, dim)))
    return kl_divergence(p, q, dim, temperature)


def _first_gradient(  # noqa: PLR0917 (as torch passes them)
    p: torch.Tensor,
    q: torch.Tensor,
    sums: torch.Tensor,
    dkl: torch.Tensor,
    dim: int,
    temperature: float,
    of_p: bool,
    dx: torch.Tensor | None,
) -> torch.Tensor:
    check_tensor(p)
    check_same(q, "teacher", p, "x")
    if not p.numel() or p.is_meta:
        return torch.empty_like(p) if dx is None else dx
    p, q, dims = _alike(p, q)
    of_rows, of_sums = _results(p, dim)
    check_result(sums, "sums", p, of_sums[0], wide(p.dtype))
    check_result(dkl, "dkl", p, tuple(of_rows[0]), wide(p.dtype))
    sums, dkl = placed(sums, of_sums[1]), placed(dkl, of_rows[1])
    key = (*_key(dim, temperature, p, q, sums, dkl), of_p)
    if key not in _backward:
        rows, told = layouts.rows(p.shape, dims, dim % p.ndim), (_native.bits(temperature), int(of_p))
        remember(_backward, key, plan("kl_divergence_backward", p, rows, told))
    return kl_divergence_backward(p, q, sums, dkl, dim, temperature, of_p, dx)
