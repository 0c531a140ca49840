"""Softmax, its logarithm, sparsemax and their gradients, from a tensor to the kernel: no operator, no gradient.

A call looks up what it needs by shape, strides, dtype, device and dimension. Arguments are checked where that is not
there yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from maxsoftmax import _native
from maxsoftmax.torch import _layouts as layouts
from maxsoftmax.torch import _memory as memory
from maxsoftmax.torch._arguments import check_same, check_tensor, dimension
from maxsoftmax.torch._memory import dense, launch, like, placed, plan, remember

_empty_like = torch.empty_like


def _along(name: str) -> Callable[..., torch.Tensor]:
    """Returns the function that runs an op from one tensor to another of its kind."""
    calls = memory.table()

    def apply(x: torch.Tensor, dim: int, y: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the result for `x` along `dim`, in `y` if that is given, which lies as `x` does."""
        planned = calls.get((x.shape, x.stride(), x.dtype, x.device, dim))
        try:
            source = x.data_ptr()
        except RuntimeError:
            # A batch of tensors, as autograd makes for is_grads_batched, has no memory of its own.
            return getattr(torch.ops.maxsoftmax, name)(x, dim)
        if planned is None or not source or x.is_neg():
            return first(x, dim, y)
        if y is None:
            y = like(x) if source & 15 else planned[4](x)
        if planned[2] < 0:
            error = planned[0](planned[1], 0, y.data_ptr(), source, 0)
        else:
            error = launch(planned, y.data_ptr(), source)
        if error:
            _native.fail(error)
        return y

    def first(x: torch.Tensor, dim: int, y: torch.Tensor | None) -> torch.Tensor:
        check_tensor(x)
        place = dimension(x, dim)
        if not x.numel() or x.is_meta:
            return _empty_like(x) if y is None else y
        x, dims = dense(x)
        key = (x.shape, x.stride(), x.dtype, x.device, dim)
        if key not in calls:
            remember(calls, key, plan(name, x, layouts.rows(x.shape, dims, place)))
        return apply(x, dim, y)

    return apply


def _backward(name: str) -> Callable[..., torch.Tensor]:
    """Returns the function that runs an op from a result and its gradient to the gradient of logits."""
    calls = memory.table()

    def apply(y: torch.Tensor, dy: torch.Tensor, dim: int, dx: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the gradient along `dim`, in `dx` if that is given, which lies as `y` does."""
        planned = calls.get((y.shape, y.stride(), y.dtype, y.device, dim, dy.shape, dy.stride(), dy.dtype, dy.device))
        try:
            source, upstream = y.data_ptr(), dy.data_ptr()
        except RuntimeError:
            # As in `_along`.
            return getattr(torch.ops.maxsoftmax, name)(y, dy, dim)
        if planned is None or not source or not upstream or y.is_neg() or dy.is_neg():
            return first(y, dy, dim, dx)
        if dx is None:
            dx = like(y) if source & 15 else planned[4](y)
        if planned[2] < 0:
            error = planned[0](planned[1], 0, dx.data_ptr(), source, upstream, 0)
        else:
            error = launch(planned, dx.data_ptr(), source, upstream)
        if error:
            _native.fail(error)
        return dx

    def first(y: torch.Tensor, dy: torch.Tensor, dim: int, dx: torch.Tensor | None) -> torch.Tensor:
        check_tensor(y, "y")
        check_same(dy, "dy", y, "y")
        place = dimension(y, dim)
        if not y.numel() or y.is_meta:
            return _empty_like(y) if dx is None else dx
        y, dims = dense(y)
        dy = placed(dy, y.stride())
        key = (y.shape, y.stride(), y.dtype, y.device, dim, dy.shape, dy.stride(), dy.dtype, dy.device)
        if key not in calls:
            remember(calls, key, plan(name, y, layouts.rows(y.shape, dims, place)))
        return apply(y, dy, dim, dx)

    return apply


softmax = _along("softmax")
log_softmax = _along("log_softmax")
sparsemax = _along("sparsemax")
softmax_backward = _backward("softmax_backward")
log_softmax_backward = _backward("log_softmax_backward")
sparsemax_backward = _backward("sparsemax_backward")
