"""softmax, log_softmax and cross_entropy of torch.nn.functional on our kernels, for as long as the caller likes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from maxsoftmax.torch._memory import NAMES, PLAIN
from maxsoftmax.torch._modes import is_forward

_lock = threading.Lock()
_depth = 0
"""How many callers are inside."""

_originals: dict[str, Callable[..., Any]] = {}
"""What torch.nn.functional had before the first of them."""


class patch(contextlib.ContextDecorator):
    """Puts softmax, log_softmax and cross_entropy of `torch.nn.functional` on the kernels of this package.

    A context manager, or a decorator; modules of `torch.nn` call these functions, too. It holds for all threads, may
    be nested, and restores what was there, whatever happens inside. Tensors on CPUs and CUDA devices of float32,
    bfloat16, float16 and float64 take our kernels; everything else goes to torch's own functions, as do derivatives
    that are computed forward (`torch.func.jvp`). `torch.softmax` and the methods of tensors stay as they are.

    Example:
        >>> import maxsoftmax.torch, torch
        >>> layer, x = torch.nn.Softmax(dim=-1), torch.zeros(2, 4)
        >>> with maxsoftmax.torch.patch():
        ...     layer(x)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500],
                [0.2500, 0.2500, 0.2500, 0.2500]])
    """

    def __enter__(self) -> patch:
        """Puts them there, if no one else has."""
        global _depth  # noqa: PLW0603 (one torch.nn.functional, one count)
        with _lock:
            if not _depth:
                for name, function in _REPLACEMENTS.items():
                    _originals[name] = getattr(torch.nn.functional, name)
                    setattr(torch.nn.functional, name, function)
            _depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        """Takes them away, if no one else is inside."""
        global _depth  # noqa: PLW0603
        with _lock:
            _depth -= 1
            if not _depth:
                for name, original in _originals.items():
                    setattr(torch.nn.functional, name, original)


def _is_ours(x: torch.Tensor) -> bool:
    """Returns whether our kernels take a tensor."""
    return (
        x.dtype in NAMES
        and x.layout is torch.strided
        and not x.is_nested
        and x.device.type in ("cpu", "cuda")
        and not is_forward()
    )


def _has_own_way(*tensors: Any) -> bool:
    """Returns whether there is something else than tensors, or one whose type wants to be asked, as torch asks it."""
    return any(type(x) not in PLAIN and (not isinstance(x, torch.Tensor) or has_torch_function((x,))) for x in tensors)


def _softmax(
    input: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Stands in for torch.nn.functional.softmax."""
    return _along("softmax", input, dim, _stacklevel, dtype)


def _log_softmax(
    input: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Stands in for torch.nn.functional.log_softmax."""
    return _along("log_softmax", input, dim, _stacklevel, dtype)


def _along(name: str, x: Any, dim: Any, stacklevel: int, dtype: torch.dtype | None) -> torch.Tensor:
    from maxsoftmax import torch as ours

    original: Callable[..., torch.Tensor] = _originals[name]
    if _has_own_way(x):
        asked: torch.Tensor = _asked(original, (x,), x, dim=dim, _stacklevel=stacklevel, dtype=dtype)
        return asked
    if not _is_ours(x) or (dtype is not None and dtype not in NAMES) or not isinstance(dim, (int, type(None))):
        return original(x, dim, stacklevel + 2, dtype)
    if dim is None:
        dim = torch.nn.functional._get_softmax_dim(name, x.dim(), stacklevel + 1)
    function: Callable[..., torch.Tensor] = getattr(ours, name)
    return function(x, dim, dtype)


def _cross_entropy(  # noqa: PLR0917
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Stands in for torch.nn.functional.cross_entropy."""
    from maxsoftmax import torch as ours

    tensors = (input, target) if weight is None else (input, target, weight)
    options: dict[str, Any] = {
        "weight": weight,
        "size_average": size_average,
        "ignore_index": ignore_index,
        "reduce": reduce,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    if _has_own_way(*tensors):
        return _asked(_originals["cross_entropy"], tensors, input, target, **options)
    are_ours = _is_ours(input) and all(t.device == input.device for t in tensors)
    function = ours.cross_entropy if are_ours else _originals["cross_entropy"]
    loss: torch.Tensor = function(input, target, **options)
    return loss


def _asked(original: Callable[..., Any], tensors: tuple[Any, ...], *arguments: Any, **options: Any) -> Any:
    """Returns what a tensor's type makes of torch's own function."""
    if has_torch_function(tensors):
        return handle_torch_function(original, tensors, *arguments, **options)
    return original(*arguments, **options)


_REPLACEMENTS = {"softmax": _softmax, "log_softmax": _log_softmax, "cross_entropy": _cross_entropy}
