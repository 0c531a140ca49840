"""What every direct call needs: which tensors may take it, tables of plans, streams and memory of a GPU."""

from __future__ import annotations

import os
from typing import Any

import torch

from maxsoftmax import _native
from maxsoftmax._arrays import reused
from maxsoftmax.torch import _layouts as layouts

NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}
"""What the kernels compute, and what the libraries call it."""

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types whose memory is what it seems; a subclass may be anything."""

MOST_CALLS = 4096
"""Shapes that a table remembers before it starts anew."""

VECTOR = 16
"""Bytes that the kernels of a GPU move at a time: fast where input and output begin at the same place in it."""

# A build of torch for CPUs has no such functions, nor tensors that would need them.
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)

_tables: list[dict[Any, Any]] = []


def table() -> dict[Any, Any]:
    """Returns a new table of what calls need, by all that it depends on."""
    _tables.append({})
    return _tables[-1]


def remember(calls: dict[Any, Any], key: Any, value: Any) -> None:
    """Puts something into a table."""
    if len(calls) >= MOST_CALLS:
        calls.clear()
    calls[key] = value


def _forget() -> None:
    """Empties all tables: a fork must not use what its parent planned."""
    for calls in _tables:
        calls.clear()


os.register_at_fork(after_in_child=_forget)


def plan(name: str, x: torch.Tensor, rows: tuple[int, int, int], options: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """Returns a library's function, a call's address, the device (-1: CPU), what keeps these, what makes results."""
    gpu = -1 if x.device.type == "cpu" else int(x.device.index)
    made = _native.plan(name, NAMES[x.dtype], gpu, rows, options)
    make = reused_like if gpu < 0 and x.nbytes >= reused.LARGE else torch.empty_like
    return made.run, made.call, gpu, made, make


def launch(planned: tuple[Any, ...], *pointers: int, scratch: int = 0) -> Any:
    """Enqueues a planned call on the current stream of its GPU, and returns what its function does.

    Args:
        planned: As of `plan`.
        pointers: Where its tensors are.
        scratch: Where there is memory for it; 0 to allocate what it needs.
    """
    function, call, gpu, made, _ = planned
    if _current_device() != gpu:
        with torch.cuda.device(gpu):
            return launch(planned, *pointers, scratch=scratch)
    if scratch or not made.scratch:
        return function(call, _current_stream(gpu), *pointers, scratch)
    # Memory that is given back while a kernel waits goes to later work of the same stream only.
    room = torch.empty(made.scratch, dtype=torch.uint8, device=gpu)
    return function(call, _current_stream(gpu), *pointers, room.data_ptr())


def run(planned: tuple[Any, ...], *pointers: int) -> Any:
    """Computes a planned call, or enqueues it, and returns what its function does.

    Args:
        planned: As of `plan`.
        pointers: Where its tensors are.
    """
    function, call, gpu, _made, _make = planned
    return function(call, 0, *pointers, 0) if gpu < 0 else launch(planned, *pointers)


def dense(x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Returns a tensor as the kernels take it, a copy only where it must be one, and the order of its dimensions."""
    x = materialized(x)
    dims = layouts.order(x.shape, x.stride())
    if dims is None:
        # Its dimensions keep their order.
        x = x.clone()
        dims = layouts.order(x.shape, x.stride())
    assert dims is not None
    return x, dims


def placed(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor that lies in memory as one of these strides, a copy only where it must be one."""
    x = materialized(x)
    if layouts.lie_alike(x.shape, x.stride(), strides):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def materialized(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose memory has its elements, where torch had put off a sign or zeros."""
    if x.is_neg():
        return x.resolve_neg()
    return x.clone() if x._is_zerotensor() else x


def like(x: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialized tensor that lies as `x` does, on a GPU at the same distance from a multiple of 16 bytes.

    An ordinary allocation has that distance only where `x` is aligned, as nearly always.
    """
    distance = x.data_ptr() % VECTOR
    if not distance or x.device.type == "cpu":
        return fresh_like(x)
    return shifted(x, distance)


def fresh_like(x: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialized tensor that lies as that of `torch.empty_like` does, aligned."""
    if x.device.type != "cpu" or x.nbytes < reused.LARGE or layouts.order(x.shape, x.stride()) is None:
        return torch.empty_like(x)
    return reused_like(x)


def reused_like(x: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialized tensor of a CPU that lies as `x` does, without gaps, in memory that is used again."""
    flat = torch.frombuffer(reused.room(x.nbytes, x.data_ptr()), dtype=x.dtype)
    # As below.
    return flat.as_strided(x.shape, x.stride()).data


def shifted(x: torch.Tensor, distance: int) -> torch.Tensor:
    """Returns an uninitialized tensor that lies as `x` does, so many bytes after what torch's allocator returns."""
    step = x.element_size()
    room = torch.empty(x.numel() + VECTOR // step, dtype=x.dtype, device=x.device)
    # By itself it would be a view, and that is refused where torch's own results may be changed in place.
    return room.as_strided(x.shape, x.stride(), distance // step).data
