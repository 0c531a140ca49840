"""What callers may pass: every argument is checked here, before anything is planned or launched."""

from __future__ import annotations

from typing import Any

import torch

from maxsoftmax._arguments import check_target_shape, check_tokens_shape
from maxsoftmax.torch._memory import NAMES

_ALLOWED = "float32, bfloat16, float16 or float64"


def check_tensor(x: Any, name: str = "x", device_types: tuple[str, ...] = ("cpu", "cuda", "meta")) -> None:
    """Refuses what has no softmax.

    Raises:
        TypeError: If it is no tensor, or one of another dtype, layout or kind of device.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not a {type(x).__name__}")
    if x.dtype not in NAMES:
        raise TypeError(f"{name} has dtype {spelled(x.dtype)}, but it has to be {_ALLOWED}")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} has layout {spelled(x.layout)}, but it has to be strided: call to_dense() first")
    if x.device.type not in device_types:
        raise TypeError(f"{name} is on {x.device}, but it has to be on a CPU or a GPU that is called cuda")


def check_target(target: Any, x: torch.Tensor) -> None:
    """Refuses what are no classes for all rows of logits.

    Raises:
        TypeError: If they are no tensor of integers.
        ValueError: If shapes or devices do not fit.
    """
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target has dtype {spelled(target.dtype)}, but classes are int64, int32 or uint8")
    check_target_shape(target.shape, x.shape, "dimension")
    check_device(target, "target", x)


def check_tokens(tokens: Any, x: torch.Tensor, dim: int) -> None:
    """Refuses what are no tokens of the rows of logits along a dimension.

    Raises:
        TypeError: If they are no tensor of integers.
        ValueError: If shapes or devices do not fit, or `x` has no dimension.
    """
    if not isinstance(tokens, torch.Tensor):
        raise TypeError(f"tokens must be a torch.Tensor, not a {type(tokens).__name__}")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"tokens has dtype {spelled(tokens.dtype)}, but it has to be int64 or int32")
    if not x.ndim:
        raise ValueError("x has rank 0, but logits need a dimension of tokens: reshape it to rank 1 first")
    check_tokens_shape(tokens.shape, x.shape, dim % x.ndim)
    check_device(tokens, "tokens", x)


def check_result(result: torch.Tensor, name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuses what is not of the shape and dtype that a loss of `x` has.

    Raises:
        TypeError: If the dtype is another.
        ValueError: If the shape or the device is.
    """
    if result.dtype != dtype:
        raise TypeError(f"{name} has dtype {spelled(result.dtype)}, but x of {spelled(x.dtype)} needs {spelled(dtype)}")
    if tuple(result.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(result.shape)}, but x of {tuple(x.shape)} needs {shape}")
    check_device(result, name, x)


def check_same(other: torch.Tensor, name: str, x: torch.Tensor, of: str) -> None:
    """Refuses a tensor that goes with `x`, but is not of its shape, dtype and device.

    Raises:
        TypeError: If the dtype is another.
        ValueError: If the shape or the device is.
    """
    if other.dtype != x.dtype:
        raise TypeError(f"{name} has dtype {spelled(other.dtype)}, but {of} has {spelled(x.dtype)}")
    if other.shape != x.shape:
        raise ValueError(f"{name} has shape {tuple(other.shape)}, but {of} has {tuple(x.shape)}")
    check_device(other, name, x, of)


def check_device(other: torch.Tensor, name: str, x: torch.Tensor, of: str = "x") -> None:
    """Refuses a tensor that is elsewhere.

    Raises:
        ValueError: If it is.
    """
    if other.device != x.device:
        raise ValueError(f"{name} is on {other.device}, but {of} is on {x.device}")


def dimension(x: torch.Tensor, dim: Any) -> int:
    """Returns a dimension counted from 0; None is what `torch.nn.functional` makes of it.

    Raises:
        TypeError: If it is not an integer or None.
        IndexError: If a tensor of this rank has no such dimension.
    """
    if dim is None:
        return 0 if x.ndim in (0, 1, 3) else 1
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an integer or None, not {dim!r}")
    rank = max(x.ndim, 1)
    if not -rank <= dim < rank:
        raise IndexError(f"dim {dim} is out of bounds for x of rank {x.ndim}: it must be from {-rank} to {rank - 1}")
    place: int = dim % rank
    return place


def spelled(name: object) -> str:
    """Returns what torch calls a dtype or a layout, without saying that it is torch's."""
    return str(name).removeprefix("torch.")
