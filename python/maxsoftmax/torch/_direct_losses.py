"""Cross entropy and its gradient, from memory to the kernel, as `direct` runs softmax.

Tensors of one element a row lie in the order in which the kernels count the rows of the logits.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import torch

from maxsoftmax import _native
from maxsoftmax.torch import _layouts as layouts
from maxsoftmax.torch import _memory as memory
from maxsoftmax.torch._arguments import check_result, check_target, check_tensor
from maxsoftmax.torch._memory import dense, launch, like, placed, plan, remember

REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
"""What the kernels call them."""

ALIGNMENT = 256
"""Bytes that scratch memory is aligned to."""

_losses = memory.table()
_gradients = memory.table()
_overwritten = memory.table()
_trained = memory.table()


class TargetError(ValueError, IndexError):
    """A target is no class: a ValueError as everywhere in this package, and an IndexError as torch has it."""


def _key(x: torch.Tensor, y: torch.Tensor, *choices: Any) -> tuple[Any, ...]:
    """Returns what a plan depends on, of two tensors and what was chosen."""
    return (x.shape, x.stride(), x.dtype, x.device, y.shape, y.stride(), y.dtype, y.device, *choices)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the arithmetic, in which the pairs (m, d) of rows are."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def cross_entropy(
    x: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss, and the pairs (m, d) of all rows, of shape (…, 2)."""
    device = x.device
    key = _key(x, target, ignore_index, label_smoothing, reduction)
    found = _losses.get(key)
    try:
        source = x.data_ptr()
    except RuntimeError:
        # As in `direct`.
        computed: tuple[torch.Tensor, torch.Tensor] = torch.ops.maxsoftmax.cross_entropy(x, target, *key[-3:])
        return computed
    if found is None or not source or x.is_neg():
        return _first_loss(x, target, ignore_index, label_smoothing, reduction)
    planned, (shape, strides, of_pairs, strides_of_pairs), accumulator = found
    loss = torch.empty_strided(shape, strides, dtype=x.dtype, device=device)
    pairs = torch.empty_strided(of_pairs, strides_of_pairs, dtype=accumulator, device=device)
    if planned[2] < 0:
        error = planned[0](planned[1], 0, loss.data_ptr(), pairs.data_ptr(), source, target.data_ptr(), 0)
    else:
        error = launch(planned, loss.data_ptr(), pairs.data_ptr(), source, target.data_ptr())
    if error:
        _fail(error, target)
    return loss, pairs


def training(
    x: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> tuple[Any, ...] | None:
    """Returns how a training step of such tensors is computed, for `trained` and `gradient`.

    Returns:
        None where tensors have to be laid out first, or are not memory at all, which is for `cross_entropy`.
    """
    key = _key(x, target, ignore_index, label_smoothing, reduction)
    return _trained.get(key) or _trained_first(x, target, key)


def trained(step: tuple[Any, ...], x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the loss, and what its gradient needs; None where `x` is no memory.

    What it needs is flat: the pairs of all rows, and how many rows count, so that the gradient need not count again.
    """
    try:
        source = x.data_ptr()
    except RuntimeError:
        return None
    if not source or x.is_neg():
        return None
    (run, call, gpu, _made, _make), _, loss_like, (size, how), room = step
    loss, kept = x.new_empty_strided(*loss_like), torch.empty(size, **how)
    place = kept.data_ptr()
    if gpu < 0:
        error = run(call, 0, loss.data_ptr(), place, source, target.data_ptr(), 0)
    else:
        error = launch(step[0], loss.data_ptr(), place, source, target.data_ptr(), scratch=place + room)
    if error:
        _fail(error, target)
    return loss, kept


def _trained_first(x: torch.Tensor, target: torch.Tensor, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Returns what a training step of such tensors needs to know."""
    check_tensor(x)
    check_target(target, x)
    dims = layouts.order(x.shape, x.stride())
    if not x.numel() or x.is_meta or dims is None:
        return None
    place = class_dimension(x)
    if not layouts.lie_alike(target.shape, target.stride(), layouts.strides_of_rows(x.shape, dims, place)):
        return None
    rows = layouts.rows(x.shape, dims, place)
    ignore_index, label_smoothing, reduction = key[-3:]
    options = _options(target, ignore_index, label_smoothing, reduction, counted=True)
    shape, strides, _, _ = layout_of_losses(x, reduction)
    backward = plan("cross_entropy_backward", x, rows, options)
    forward = plan("cross_entropy", x, rows, options)
    # One allocation is less to wait for than two: the kernels' scratch memory follows, aligned.
    like = {"dtype": wide(x.dtype), "device": x.device}
    room = -(-(2 * rows[0] * rows[2] + 1) * like["dtype"].itemsize // ALIGNMENT) * ALIGNMENT
    size = (room + forward[3].scratch) // like["dtype"].itemsize
    found = forward, (backward, strides), (shape, strides), (size, like), room
    remember(_trained, key, found)
    return found


def gradient(
    step: tuple[Any, ...], x: torch.Tensor, target: torch.Tensor, kept: torch.Tensor, dloss: torch.Tensor
) -> torch.Tensor | None:
    """Returns the gradient of the logits, given what `trained` returned; None if `dloss` has to be laid out first."""
    backward, strides = step[1]
    if dloss.stride() != strides or dloss.dtype is not x.dtype or dloss.device != x.device or dloss.is_neg():
        return None
    try:
        source, upstream = x.data_ptr(), dloss.data_ptr()
    except RuntimeError:
        return None
    if not upstream:
        return None
    run, call, gpu, _made, make = backward
    dx = like(x) if source & 15 else make(x)
    if gpu < 0:
        error = run(call, 0, dx.data_ptr(), source, kept.data_ptr(), target.data_ptr(), upstream, 0)
    else:
        error = launch(backward, dx.data_ptr(), source, kept.data_ptr(), target.data_ptr(), upstream)
    if error:
        _fail(error, target)
    return dx


def pairs_of(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns the pairs of all rows, of shape (…, 2), in what `trained` returned."""
    _, _, shape, strides = layout_of_losses(x, "mean")
    return kept.as_strided(shape, strides)


def cross_entropy_backward(  # noqa: PLR0917 (as torch passes them)
    x: torch.Tensor,
    target: torch.Tensor,
    pairs: torch.Tensor,
    dloss: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    dx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the gradient of the logits, in `dx` if that is given, which lies as `x` does."""
    choices = ignore_index, label_smoothing, reduction
    key = _key(x, target, *choices) + _key(pairs, dloss)
    planned = _gradients.get(key)
    try:
        source, upstream = x.data_ptr(), dloss.data_ptr()
    except RuntimeError:
        # As in `direct`.
        return torch.ops.maxsoftmax.cross_entropy_backward(x, target, pairs, dloss, *choices)
    if planned is None or not source or not upstream or x.is_neg() or dloss.is_neg():
        return _first_gradient(x, target, pairs, dloss, choices, dx)
    if dx is None:
        dx = like(x) if source & 15 else planned[4](x)
    if planned[2] < 0:
        error = planned[0](planned[1], 0, dx.data_ptr(), source, pairs.data_ptr(), target.data_ptr(), upstream, 0)
    else:
        error = launch(planned, dx.data_ptr(), source, pairs.data_ptr(), target.data_ptr(), upstream)
    if error:
        _fail(error, target)
    return dx


def overwrite(x: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Overwrites logits by the gradient of each row's loss, and returns the pairs (m, d).

    Args:
        x: Logits on a GPU: (rows, n), neither of them 0, row by row.
        target: (rows,), one after the other.
        ignore_index: The class of rows that do not count.
    """
    key = _key(x, target, ignore_index)
    planned = _overwritten.get(key)
    if planned is None:
        options = _options(target, ignore_index, 0.0, "none")
        planned = plan("cross_entropy_gradient", x, (len(x), x.shape[1], 1), options)
        remember(_overwritten, key, planned)
    pairs = torch.empty(len(x), 2, dtype=wide(x.dtype), device=x.device)
    source = x.data_ptr()
    error = launch(planned, source, pairs.data_ptr(), source, target.data_ptr())
    if error:
        _fail(error, target)
    return pairs


def class_dimension(x: torch.Tensor) -> int:
    """Returns the dimension of the classes."""
    return 0 if x.ndim == 1 else 1


def layout_of_losses(x: torch.Tensor, reduction: str) -> tuple[tuple[int, ...], ...]:
    """Returns shape and strides of the loss, and of the pairs, for logits."""
    place = class_dimension(x)
    shape = (*x.shape[:place], *x.shape[place + 1 :])
    dims = layouts.order(x.shape, x.stride()) or layouts.order(x.shape, torch.empty_like(x, device="meta").stride())
    assert dims is not None
    strides = layouts.strides_of_rows(x.shape, dims, place)
    of_pairs = (*shape, 2), (*(2 * step for step in strides), 1)
    return (shape, strides, *of_pairs) if reduction == "none" else ((), (), *of_pairs)


def empty_losses(x: torch.Tensor, reduction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns an uninitialized loss and pairs."""
    shape, strides, of_pairs, strides_of_pairs = layout_of_losses(x, reduction)
    pairs = torch.empty_strided(of_pairs, strides_of_pairs, dtype=wide(x.dtype), device=x.device)
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device), pairs


def _first_loss(
    x: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensor(x)
    check_target(target, x)
    if x.is_meta:
        return empty_losses(x, reduction)
    if not x.numel():
        return _loss_of_nothing(x, target, ignore_index, reduction)
    x, dims = dense(x)
    place = class_dimension(x)
    target = placed(target, layouts.strides_of_rows(x.shape, dims, place))
    key = _key(x, target, ignore_index, label_smoothing, reduction)
    if key not in _losses:
        options = _options(target, ignore_index, label_smoothing, reduction)
        planned = plan("cross_entropy", x, layouts.rows(x.shape, dims, place), options)
        remember(_losses, key, (planned, layout_of_losses(x, reduction), wide(x.dtype)))
    return cross_entropy(x, target, ignore_index, label_smoothing, reduction)


def _first_gradient(  # noqa: PLR0917 (as torch passes them)
    x: torch.Tensor,
    target: torch.Tensor,
    pairs: torch.Tensor,
    dloss: torch.Tensor,
    choices: tuple[int, float, str],
    dx: torch.Tensor | None,
) -> torch.Tensor:
    check_tensor(x)
    check_target(target, x)
    if not x.numel() or x.is_meta:
        return torch.empty_like(x) if dx is None else dx
    x, dims = dense(x)
    place = class_dimension(x)
    strides = layouts.strides_of_rows(x.shape, dims, place)
    shape, strides_of_loss, of_pairs, strides_of_pairs = layout_of_losses(x, choices[-1])
    check_result(pairs, "pairs", x, of_pairs, wide(x.dtype))
    check_result(dloss, "dloss", x, shape, x.dtype)
    target, pairs, dloss = placed(target, strides), placed(pairs, strides_of_pairs), placed(dloss, strides_of_loss)
    key = _key(x, target, *choices) + _key(pairs, dloss)
    if key not in _gradients:
        rows = layouts.rows(x.shape, dims, place)
        remember(_gradients, key, plan("cross_entropy_backward", x, rows, _options(target, *choices)))
    return cross_entropy_backward(x, target, pairs, dloss, *choices, dx)


def _options(
    target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str, counted: bool = False
) -> tuple[int, ...]:
    """Returns what the kernels are told beside tensors."""
    wide_target = int(target.dtype is torch.int64)
    return ignore_index, _native.bits(label_smoothing), REDUCTIONS[reduction], wide_target, int(counted)


def _loss_of_nothing(
    x: torch.Tensor, target: torch.Tensor, ignore_index: int, reduction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `cross_entropy` does for logits without rows or without classes."""
    counts = target != ignore_index
    if x.device.type == "cpu" and counts.any():
        where = tuple(counts.nonzero()[0].tolist())
        raise TargetError(
            f"target{list(where)} is {int(target[where])}, but x has no classes, and ignore_index is {ignore_index}"
        )
    losses = torch.where(counts, float("nan"), 0.0).to(x.dtype)
    _, _, of_pairs, _ = layout_of_losses(x, reduction)
    pairs = torch.tensor([float("-inf"), 0.0], dtype=wide(x.dtype), device=x.device).expand(of_pairs).clone()
    if reduction == "none":
        return losses, pairs
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum(), pairs


def _fail(error: Any, target: torch.Tensor) -> NoReturn:
    """Raises what a kernel says, a wrong row by its place among the targets."""
    try:
        _native.fail(error)
    except ValueError as failure:
        text = str(failure)
        found = re.match(r"target\[(\d+)\]", text)
        if not found:
            raise
        dims = layouts.order(target.shape, target.stride()) or []
        row, where = int(found[1]), [0] * target.ndim
        for dim in reversed(dims):
            row, where[dim] = divmod(row, target.shape[dim])
        name = f"target[{', '.join(map(str, where))}]" if where else "target"
        raise TargetError(name + text[found.end() :]) from None
    raise AssertionError("a failure says so")
