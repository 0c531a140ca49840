"""Softmax, its logarithm and cross entropy for `torch.Tensor`s, with gradients.

Each is a `torch.library` operator over the array functions of this package, so `torch.compile` keeps it in its graph.
Tensors are handed over through DLPack: memory is shared, not copied, where a tensor is contiguous. On a GPU the kernels
run on MAX's stream, and torch's current stream waits for them, but the host does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import torch
except ImportError as error:
    raise ImportError("maxsoftmax.torch needs PyTorch: pip install 'maxsoftmax[torch]'") from error

from maxsoftmax import arrays, eager
from maxsoftmax.arguments import (
    check_ignore_index,
    check_label_smoothing,
    check_reduction,
    check_target_shape,
    class_axis,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What the kernels compute."""

TARGET_DTYPES = (torch.int32, torch.int64)
"""What the targets of a loss may be."""


def softmax(x: torch.Tensor, dim: int | None = -1, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns softmax of a tensor along one dimension, as `torch.softmax` does.

    Args:
        x: Logits: of any shape; float32, bfloat16, float16 or float64, or anything else together with `dtype`.
        dim: The dimension that will sum to 1; negative counts from the last. None is what `torch.nn.functional`
            makes of it: 0 for tensors of rank 0, 1 and 3, else 1.
        dtype: What `x` is converted to before, if not None.

    Returns:
        Probabilities: a contiguous tensor of the shape and device of `x`. It has a gradient, and that has one too.

    Raises:
        TypeError: If an argument is not of its type, or the dtype is not one of these.
        IndexError: If there is no such dimension.
    """
    return _applied(_softmax, x, dim, dtype)


def log_softmax(x: torch.Tensor, dim: int | None = -1, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns the logarithm of softmax of a tensor along one dimension, as `torch.log_softmax` does.

    Args:
        x: Logits, as for `softmax`.
        dim: The dimension along which probabilities sum to 1, as for `softmax`.
        dtype: What `x` is converted to before, if not None.

    Returns:
        Logarithms of probabilities: a contiguous tensor of the shape and device of `x`. It has a gradient, and that has
        one too.

    Raises:
        TypeError: If an argument is not of its type, or the dtype is not one of these.
        IndexError: If there is no such dimension.
    """
    return _applied(_log_softmax, x, dim, dtype)


def cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Returns the cross entropy of logits and target classes, as `torch.nn.functional.cross_entropy` does.

    Args:
        x: Logits: (n,), (rows, n), or (rows, n, …) with the classes along dimension 1; of a dtype that `softmax` takes.
        target: The class of each row: of the shape of `x` without the classes, int32 or int64, from 0 to n - 1 or
            `ignore_index`. On a GPU another one makes its row's loss NaN.
        weight: None: weights of classes are not supported.
        ignore_index: The target of rows that do not count.
        reduction: "mean" over the rows that count, NaN if there are none; "sum"; or "none" for one loss a row.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.

    Returns:
        The loss: a scalar, or of the shape of `target`; of the dtype and device of `x`. It has a gradient, and that has
        one too.

    Raises:
        TypeError: If an argument is not of its type; if targets are probabilities of classes.
        ValueError: If shapes or devices do not fit, a target on a CPU is not a class, there are weights, or another
            argument is not one of these.
    """
    _check_tensor(x)
    _check_tensor(target, "target", TARGET_DTYPES, "int32 or int64 classes; their probabilities are not supported")
    if weight is not None:
        raise ValueError("weight must be None: weights of classes are not supported")
    check_target_shape(target.shape, x.shape, "dimension")
    if target.device != x.device:
        raise ValueError(f"target is on {target.device}, but x is on {x.device}")
    chosen = check_ignore_index(ignore_index), check_label_smoothing(label_smoothing), check_reduction(reduction)
    loss: torch.Tensor = _cross_entropy(x, target, *chosen)[0]
    return loss


def _applied(operator: Callable[..., torch.Tensor], x: Any, dim: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """Returns what an operator makes of a tensor in the dtype asked for; of a scalar as if it were a row of one."""
    if dtype is not None and isinstance(x, torch.Tensor):
        x = x.to(dtype)
    _check_tensor(x)
    return operator(x.reshape(x.shape or (1,)), _place(x, dim)).reshape(x.shape)


def _place(x: torch.Tensor, dim: Any) -> int:
    """Returns the dimension counted from 0."""
    if dim is None:
        return 0 if x.ndim in (0, 1, 3) else 1
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an integer or None, not {dim!r}")
    rank = max(x.ndim, 1)
    if not -rank <= dim < rank:
        raise IndexError(f"dim {dim} is out of bounds for x of rank {x.ndim}: it must be from {-rank} to {rank - 1}")
    place: int = dim % rank
    return place


def _check_tensor(
    x: Any,
    name: str = "x",
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    allowed: str = "float32, bfloat16, float16, float64",
) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not a {type(x).__name__}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {str(x.dtype).removeprefix('torch.')}, but it has to be {allowed}")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise TypeError(f"{name} is on {x.device}, but it has to be on a CPU or a GPU that is called cuda")


def _run(function: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> Any:
    """Returns the tensors, or the only one, that an array function makes of tensors of one device."""
    tensors = tuple(tensor.detach() for tensor in tensors)
    if not tensors[0].is_cuda:
        results = function(*map(eager.as_buffer, tensors), **options)
        (results[0] if isinstance(results, tuple) else results).device.synchronize()
        return _taken(results)
    with torch.cuda.device(tensors[0].device):
        return _run_on_gpu(function, tensors, options)


_streams: dict[int, set[torch.cuda.Stream]] = {}
"""By GPU, torch's streams that results were handed to."""


def _run_on_gpu(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> Any:
    """As `_run`, in the order of torch's current stream."""
    # Exporting a tensor makes MAX's queue wait for the current stream.
    inputs = [eager.as_buffer(tensor) for tensor in tensors]
    queue = torch.cuda.ExternalStream(inputs[0].device.default_queue.native_stream_handle)
    current = torch.cuda.current_stream()
    streams = _streams.setdefault(current.device_index, set())
    for stream in streams - {current}:
        # MAX may give these kernels memory of an earlier result that was let go of and is still being read there.
        queue.wait_stream(stream)
    streams.add(current)
    results = _taken(function(*inputs, **options))
    # Until then nothing that comes later on this stream reads the results, or writes to the inputs' memory.
    current.wait_stream(queue)
    return results


def _taken(results: Any) -> Any:
    if isinstance(results, tuple):
        return tuple(map(torch.from_dlpack, results))
    return torch.from_dlpack(results)


def _operator(name: str, schema: str) -> Callable[[Callable[..., Any]], torch.library.CustomOpDef]:
    """Makes a function an operator of torch: what decorates it says how results follow from arguments."""
    return lambda function: torch.library.custom_op(f"maxsoftmax::{name}", function, mutates_args=(), schema=schema)


def _along(op: torch.library.CustomOpDef) -> None:
    """Tells torch that the result of an operator is like its first argument, in the order of its dimensions."""
    op.register_fake(lambda x, *others: x.new_empty(x.shape))


@_operator("softmax", "(Tensor x, int dim) -> Tensor")
def _softmax(x: torch.Tensor, dim: int) -> Any:
    return _run(eager.softmax, x, axis=dim)


@_operator("log_softmax", "(Tensor x, int dim) -> Tensor")
def _log_softmax(x: torch.Tensor, dim: int) -> Any:
    return _run(arrays.log_softmax, x, axis=dim)


@_operator("softmax_backward", "(Tensor y, Tensor dy, int dim) -> Tensor")
def _softmax_backward(y: torch.Tensor, dy: torch.Tensor, dim: int) -> Any:
    return _run(arrays.softmax_backward, y, dy, axis=dim)


@_operator("log_softmax_backward", "(Tensor y, Tensor dy, int dim) -> Tensor")
def _log_softmax_backward(y: torch.Tensor, dy: torch.Tensor, dim: int) -> Any:
    return _run(arrays.log_softmax_backward, y, dy, axis=dim)


@_operator(
    "cross_entropy",
    "(Tensor x, Tensor target, int ignore_index, float label_smoothing, str reduction) -> (Tensor, Tensor)",
)
def _cross_entropy(
    x: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> Any:
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    return _run(arrays.cross_entropy_forward, x, target, **options)


@_operator(
    "cross_entropy_backward",
    "(Tensor x, Tensor target, Tensor pairs, Tensor dloss, int ignore_index, float label_smoothing, str reduction)"
    " -> Tensor",
)
def _cross_entropy_backward(  # noqa: PLR0917 (as torch passes them)
    x: torch.Tensor,
    target: torch.Tensor,
    pairs: torch.Tensor,
    dloss: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> Any:
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    return _run(arrays.cross_entropy_backward, x, target, pairs, dloss, **options)


for _op in (_softmax, _log_softmax, _softmax_backward, _log_softmax_backward, _cross_entropy_backward):
    _along(_op)


def _like_cross_entropy(
    x: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    loss = x.new_empty(target.shape if reduction == "none" else ())
    return loss, x.new_empty((*target.shape, 2), dtype=wide)


_cross_entropy.register_fake(_like_cross_entropy)


# The gradients, and theirs. What `setup` keeps is all tensors of a call, and its choices.


def _keep_result(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dim = inputs[-1]


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, torch.Tensor)))
    ctx.choices = [value for value in inputs if not isinstance(value, torch.Tensor)]


def _grad_softmax(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return _softmax_backward(*ctx.saved_tensors, dy, ctx.dim), None


def _grad_log_softmax(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return _log_softmax_backward(*ctx.saved_tensors, dy, ctx.dim), None


def _grad_softmax_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Of dx = y · (dy - Σ y·dy): by y and by dy."""
    (y, dy), (dim,) = ctx.saved_tensors, ctx.choices
    of_y = g * (dy - (y * dy).sum(dim, keepdim=True)) - dy * (y * g).sum(dim, keepdim=True)
    return of_y, _softmax_backward(y, g, dim), None


def _grad_log_softmax_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Of dx = dy - e^y · Σ dy: by y and by dy."""
    (y, dy), (dim,) = ctx.saved_tensors, ctx.choices
    weighted = g * y.exp()
    return -weighted * dy.sum(dim, keepdim=True), g - weighted.sum(dim, keepdim=True), None


def _keep_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, target, *ctx.choices = inputs
    ctx.save_for_backward(x, target, output[1])


def _grad_cross_entropy(ctx: Any, dloss: torch.Tensor, dpairs: torch.Tensor) -> tuple[Any, ...]:
    """Of the loss alone: nobody is given the pairs."""
    return _cross_entropy_backward(*ctx.saved_tensors, dloss, *ctx.choices), None, None, None, None


def _grad_cross_entropy_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Of dx = (softmax(x) - wanted) · dloss / rows: by x, the pairs being part of softmax(x), and by dloss."""
    (x, target, pairs, dloss), (ignore_index, _, reduction) = ctx.saved_tensors, ctx.choices
    place = class_axis(x.ndim)
    counts = (target != ignore_index).to(x.dtype)
    scale = dloss * counts
    if reduction == "mean":
        scale = scale / counts.sum().clamp(min=1)
    of_x = _softmax_backward(_softmax(x, place), g * scale.unsqueeze(place), place)
    of_one = g * _cross_entropy_backward(x, target, pairs, torch.ones_like(dloss), *ctx.choices)
    of_dloss = of_one.sum(place) if reduction == "none" else of_one.sum()
    return of_x, None, None, of_dloss, None, None, None


_softmax.register_autograd(_grad_softmax, setup_context=_keep_result)
_log_softmax.register_autograd(_grad_log_softmax, setup_context=_keep_result)
_softmax_backward.register_autograd(_grad_softmax_backward, setup_context=_keep_inputs)
_log_softmax_backward.register_autograd(_grad_log_softmax_backward, setup_context=_keep_inputs)
_cross_entropy.register_autograd(_grad_cross_entropy, setup_context=_keep_loss)
_cross_entropy_backward.register_autograd(_grad_cross_entropy_backward, setup_context=_keep_inputs)
