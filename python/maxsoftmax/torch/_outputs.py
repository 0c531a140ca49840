"""Softmax and its logarithm where the call is not the usual one: other dtypes, autocast, a tensor for the result."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from maxsoftmax.torch import _autograd as autograd
from maxsoftmax.torch import _direct as direct
from maxsoftmax.torch import _layouts as layouts
from maxsoftmax.torch._arguments import check_device, check_tensor, dimension, spelled
from maxsoftmax.torch._memory import PLAIN
from maxsoftmax.torch._modes import autocast, is_watched


def along(name: str, x: Any, dim: Any, dtype: torch.dtype | None, out: Any) -> torch.Tensor:
    """Returns what a function makes of a tensor in the dtype asked for, in `out` if that is given."""
    function = getattr(autograd, name)
    if dtype is None:
        x = autocast(x)
    elif isinstance(x, torch.Tensor):
        x = x.to(dtype)
    check_tensor(x)
    place = dimension(x, dim)
    if out is None:
        y: torch.Tensor = function(x, place)
        return y
    _check(out, x)
    if _is_like(out, x):
        getattr(direct, name)(x, place, out)
        torch.autograd.graph.increment_version(out)
        return out
    y = function(x, place)
    if out.shape != x.shape:
        if out.numel():
            warnings.warn(
                f"out has shape {tuple(out.shape)} and is given that of x, {tuple(x.shape)}: torch means to refuse "
                "this, so make it a tensor of that shape, or one without elements",
                stacklevel=3,
            )
        out.resize_(x.shape)
    return out.copy_(y)


def _check(out: Any, x: torch.Tensor) -> None:
    """Refuses what cannot be a result.

    Raises:
        TypeError: If it is no tensor, or of another dtype.
        ValueError: If it is on another device.
        RuntimeError: If a gradient is wanted.
    """
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor, not a {type(out).__name__}")
    if out.dtype != x.dtype:
        raise TypeError(f"out has dtype {spelled(out.dtype)}, but the result has {spelled(x.dtype)}")
    check_device(out, "out", x)
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        which = "x" if x.requires_grad else "out"
        raise RuntimeError(
            f"out has no gradient, but {which} requires one: call it under torch.no_grad(), or without out"
        )


def _is_like(out: torch.Tensor, x: torch.Tensor) -> bool:
    """Returns whether a kernel may write to a tensor what it makes of `x`: both lie alike, and apart."""
    return (
        not is_watched()
        and type(x) in PLAIN
        and type(out) in PLAIN
        and out.shape == x.shape
        and out.stride() == x.stride()
        and layouts.order(x.shape, x.stride()) is not None
        and not out.is_neg()
        and out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    )
