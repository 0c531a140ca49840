"""When a call has to be an operator of torch, because somebody beside the caller has to see it."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling as _is_compiled

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_are_transformed = torch._C._are_functorch_transforms_active
_jit_trace = torch._C._get_tracing_state
is_autocast = torch._C._is_any_autocast_enabled


def is_watched() -> bool:
    """Returns whether torch compiles, traces or transforms this, or modes want to see every operator."""
    return bool(
        _is_compiled()
        or _dispatch_modes()
        or _function_modes()
        or _are_transformed()
        or forward_ad._current_level >= 0
        or _jit_trace()
    )


def is_forward() -> bool:
    """Returns whether derivatives are computed along with results, which is left to torch's own functions."""
    return not _is_compiled() and forward_ad._current_level >= 0


def autocast(x: Any, kinds: tuple[str, ...] = ("cuda",)) -> Any:
    """Returns a tensor as torch.autocast has the functions of this package take it: in float32, or as it is.

    Args:
        x: A tensor; anything else stays.
        kinds: The devices on which torch does so: for losses both, for softmax and its logarithm only CUDA.
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.bfloat16, torch.float16):
        return x
    kind = x.device.type
    return x.float() if kind in kinds and torch.is_autocast_enabled(kind) else x
