"""Softmax, its logarithm, sparsemax, cross entropy and tokens' logarithms for `torch.Tensor`s, with gradients.

Tensors are taken as they lie in memory, on the CPU or on a CUDA device, there on torch's current stream. A call goes
straight to the kernel; under torch.compile, torch.func and the like it is an operator of `torch.library`. Derivatives
that are computed forward, as by `torch.func.jvp`, are torch's own, of sparsemax those of sorting.
"""

from __future__ import annotations

from typing import Literal, overload

try:
    import torch
except ImportError as error:
    raise ImportError("maxsoftmax.torch needs PyTorch: pip install 'maxsoftmax[torch]'") from error

from maxsoftmax._arguments import (
    check_chunk,
    check_flag,
    check_ignore_index,
    check_label_smoothing,
    check_reduction,
    check_softcap,
    check_temperature,
    check_z_loss,
)
from maxsoftmax._types import Reduction
from maxsoftmax.torch import _autograd as autograd
from maxsoftmax.torch import _linear as linear
from maxsoftmax.torch import _linear_tokens as linear_tokens
from maxsoftmax.torch import _losses as losses
from maxsoftmax.torch import _operators as _operators  # torch knows them from here on.
from maxsoftmax.torch._arguments import check_same, check_tensor, check_tokens, dimension
from maxsoftmax.torch._direct_losses import REDUCTIONS
from maxsoftmax.torch._modes import is_autocast
from maxsoftmax.torch._outputs import along
from maxsoftmax.torch._patch import patch

__all__ = [
    "cross_entropy",
    "kl_divergence",
    "linear_cross_entropy",
    "linear_token_log_probs",
    "log_softmax",
    "patch",
    "softmax",
    "sparsemax",
    "token_log_probs",
]


def __dir__() -> list[str]:
    """Returns what there is to use here, without what it is made of."""
    return sorted({*__all__, "distributed"})


CLASSES = (torch.int64, torch.int32)
"""What the kernels take as classes."""


def softmax(
    x: torch.Tensor, dim: int | None = -1, dtype: torch.dtype | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns softmax of a tensor along one dimension, as `torch.softmax` does.

    Args:
        x: Logits: of any shape; float32, bfloat16, float16 or float64, or anything else together with `dtype`. In any
            order of dimensions, and from any address, they are not copied, unless they have gaps or overlaps.
        dim: The dimension that will sum to 1; negative counts from the last. None is what `torch.nn.functional`
            makes of it: 0 for tensors of rank 0, 1 and 3, else 1.
        dtype: What `x` is converted to before, if not None. Under torch.autocast on a CUDA device it is float32 for
            bfloat16 and float16.
        out: Where the result goes, if not None: of its dtype and device. If its shape is another, it is given that
            of `x`.

    Returns:
        Probabilities: of the shape and device of `x`, with its strides if it has no gaps. They have a gradient, and
        that has one too.

    Raises:
        TypeError: If an argument is not of its type, or the dtype is not one of these.
        IndexError: If there is no such dimension.
        ValueError: If `out` is on another device.
        RuntimeError: If `out` is given where a gradient is wanted.

    Example:
        >>> import maxsoftmax.torch, torch
        >>> maxsoftmax.torch.softmax(torch.tensor([[0.0, 0.0], [0.0, float("-inf")]]), dim=-1)
        tensor([[0.5000, 0.5000],
                [1.0000, 0.0000]])
    """
    if dtype is None and out is None and type(dim) is int and not is_autocast():
        return autograd.softmax(x, dim)
    return along("softmax", x, dim, dtype, out)


def log_softmax(
    x: torch.Tensor, dim: int | None = -1, dtype: torch.dtype | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the logarithm of softmax of a tensor along one dimension, as `torch.log_softmax` does.

    Args:
        x: Logits: of any shape; float32, bfloat16, float16 or float64, or anything else together with `dtype`.
        dim: The dimension along which probabilities sum to 1; negative counts from the last. None is 0 for tensors of
            rank 0, 1 and 3, else 1.
        dtype: What `x` is converted to before, if not None.
        out: Where the result goes, if not None: of its dtype and device.

    Returns:
        Logarithms of probabilities: of the shape and device of `x`, with its strides if it has no gaps. They have a
        gradient, and that has one too.

    Raises:
        TypeError: If an argument is not of its type, or the dtype is not one of these.
        IndexError: If there is no such dimension.
        ValueError: If `out` is on another device.
        RuntimeError: If `out` is given where a gradient is wanted.

    Example:
        >>> import maxsoftmax.torch, torch
        >>> maxsoftmax.torch.log_softmax(torch.zeros(1, 2))
        tensor([[-0.6931, -0.6931]])
    """
    if dtype is None and out is None and type(dim) is int and not is_autocast():
        return autograd.log_softmax(x, dim)
    return along("log_softmax", x, dim, dtype, out)


def sparsemax(
    x: torch.Tensor, dim: int | None = -1, dtype: torch.dtype | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns sparsemax of a tensor along one dimension: the probabilities that are nearest to it, most of them 0.

    It is max(x - max x - t, 0), where t is what makes it sum to 1 (Martins and Astudillo 2016, arXiv 1602.02068).

    Args:
        x: Logits: of any shape; float32, bfloat16, float16 or float64, or anything else together with `dtype`.
        dim: The dimension that will sum to 1; negative counts from the last. None is 0 for tensors of rank 0, 1 and 3,
            else 1.
        dtype: What `x` is converted to before, if not None.
        out: Where the result goes, if not None: of its dtype and device.

    Returns:
        Probabilities: of the shape and device of `x`, with its strides if it has no gaps. They have a gradient, and
        that has one too.

    Raises:
        TypeError: If an argument is not of its type, or the dtype is not one of these.
        IndexError: If there is no such dimension.
        ValueError: If `out` is on another device.
        RuntimeError: If `out` is given where a gradient is wanted.

    Example:
        >>> import maxsoftmax.torch, torch
        >>> maxsoftmax.torch.sparsemax(torch.tensor([2.0, 1.5, 0.0]))
        tensor([0.7500, 0.2500, 0.0000])
    """
    if dtype is None and out is None and type(dim) is int and not is_autocast():
        return autograd.sparsemax(x, dim)
    return along("sparsemax", x, dim, dtype, out)


def cross_entropy(  # noqa: PLR0917 (as torch has them)
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Returns the cross entropy of logits and targets, as `torch.nn.functional.cross_entropy` does.

    Args:
        x: Logits: (n,), (rows, n), or (rows, n, …) with the classes along dimension 1; of floats of 16 to 64 bits.
        target: The class of each row: of the shape of `x` without the classes, int64, int32 or uint8, from 0 to n - 1
            or `ignore_index`. On a GPU another one makes its row's loss NaN. Or the probabilities of all classes: of
            the shape of `x`, and floating.
        weight: What each class counts: of shape (n,) and the dtype of `x`; None counts all alike.
        size_average: Deprecated in torch, as is `reduce`: either overrides `reduction`, with a warning.
        ignore_index: The class of rows that do not count.
        reduce: Deprecated in torch, as `size_average` is.
        reduction: "mean" over the rows that count, by their weights, NaN if there are none; "sum"; or "none" for one
            loss a row.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.
        z_loss: What a row's squared logsumexp is multiplied by and added to its loss, as in PaLM; 0 for none, which it
            has to be with weights of classes, and with probabilities. It costs no further pass over the logits.

    Returns:
        The loss: a scalar, or of the shape of a class for each row; of the dtype and device of `x`, but float32 for
        bfloat16 and float16 under torch.autocast. It has a gradient, and that has one too.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes or devices do not fit, a target on a CPU is not a class, or another argument is not one of
            these.

    Example:
        >>> import maxsoftmax.torch, torch
        >>> logits = torch.zeros(3, 4, requires_grad=True)
        >>> loss = maxsoftmax.torch.cross_entropy(logits, torch.tensor([0, 3, -100]))
        >>> loss.backward()
        >>> print(f"{loss:.4f}", logits.grad[0])
        1.3863 tensor([-0.3750,  0.1250,  0.1250,  0.1250])
    """
    if (
        weight is None
        and size_average is None
        and reduce is None
        and z_loss == 0
        and type(ignore_index) is int
        and type(label_smoothing) is float
        and 0.0 <= label_smoothing <= 1.0
        and type(reduction) is str
        and reduction in REDUCTIONS
        and type(target) is torch.Tensor
        and target.dtype in CLASSES
        and not is_autocast()
    ):
        return autograd.cross_entropy(x, target, ignore_index, label_smoothing, reduction)
    return losses.cross_entropy(
        x, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing, z_loss
    )


@overload
def token_log_probs(
    x: torch.Tensor,
    tokens: torch.Tensor,
    dim: int = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def token_log_probs(
    x: torch.Tensor, tokens: torch.Tensor, dim: int = ..., *, temperature: float | None = ..., entropy: Literal[True]
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def token_log_probs(
    x: torch.Tensor, tokens: torch.Tensor, dim: int = ..., *, temperature: float | None = ..., entropy: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def token_log_probs(
    x: torch.Tensor, tokens: torch.Tensor, dim: int = -1, *, temperature: float | None = None, entropy: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns the logarithms of the probabilities of some tokens of each row, and the entropy of the row if asked for.

    These are the elements of `log_softmax(x / temperature)` that `tokens` names, without the others. The bits of a row
    depend on nothing but the row, its tokens' included, and are the same with and without the entropy.

    Args:
        x: Logits, of rank 1 or more; float32, bfloat16, float16 or float64.
        tokens: Which elements of each row: of the shape of `x` without `dim`, or with `dim` of another length, for as
            many tokens a row; int64 or int32. What is not from 0 to n - 1 has the logarithm NaN, and no gradient where
            the gradient of that is 0, as behind `torch.where`; else the row's gradient is NaN.
        dim: The dimension of the tokens' probabilities; negative counts from the last.
        temperature: A positive number that logits are divided by; 1 if None.
        entropy: Whether to return the entropy of each row, too: -Σ p ln p.

    Returns:
        The logarithms, of the shape of `tokens`, or with `entropy` a tuple of them and the entropies, of the shape of
        `x` without `dim`: float64 if `x` is, else float32. They have a gradient, one for both, and that has one too.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        IndexError: If there is no such dimension.
        ValueError: If shapes or devices do not fit, or the temperature is not allowed.

    Example:
        >>> import maxsoftmax.torch, torch
        >>> maxsoftmax.torch.token_log_probs(torch.zeros(2, 4), torch.tensor([0, 3]), entropy=True)
        (tensor([-1.3863, -1.3863]), tensor([1.3863, 1.3863]))
    """
    check_tensor(x)
    place = dimension(x, dim)
    check_tokens(tokens, x, place)
    found = autograd.token_log_probs(x, tokens, place, check_temperature(temperature), check_flag("entropy", entropy))
    return found if entropy else found[0]


def kl_divergence(
    x: torch.Tensor,
    teacher: torch.Tensor,
    dim: int = -1,
    *,
    temperature: float | None = None,
    reverse: bool = False,
) -> torch.Tensor:
    """Returns the KL divergence between the probabilities of a teacher's logits and of `x`, a number for each row.

    With p = softmax(teacher / temperature) and q = softmax(x / temperature) it is Σ p (ln p - ln q), the forward
    divergence; reverse, p and q change places. A gradient takes one read of both and one write.

    Args:
        x: Logits of the student, of rank 1 or more; float32, bfloat16, float16 or float64.
        teacher: Logits of the same shape, dtype and device, which may have a gradient as well.
        dim: The dimension of the probabilities; negative counts from the last.
        temperature: A positive number that both are divided by; 1 if None.
        reverse: Whether the divergence is that of the student from the teacher.

    Returns:
        The divergences, of the shape of `x` without `dim`: float64 if `x` is, else float32. Infinite where q is 0 and p
        is not, NaN where softmax of either is. They have a gradient, and that has one too. Distillation takes their
        mean, often times temperature².

    Raises:
        TypeError: If an argument is not of its type or dtype.
        IndexError: If there is no such dimension.
        ValueError: If shapes or devices do not fit, or the temperature is not allowed.

    Example:
        >>> import maxsoftmax.torch, torch
        >>> student = torch.zeros(1, 2, requires_grad=True)
        >>> kl = maxsoftmax.torch.kl_divergence(student, torch.tensor([[9.0, float("-inf")]]))
        >>> kl.mean().backward()
        >>> kl.detach(), student.grad
        (tensor([0.6931]), tensor([[-0.5000,  0.5000]]))
    """
    check_tensor(x)
    check_tensor(teacher, "teacher")
    if not x.ndim:
        raise ValueError("x has rank 0, but logits need a dimension of probabilities: reshape it to rank 1 first")
    check_same(teacher, "teacher", x, "x")
    place, chosen = dimension(x, dim), check_temperature(temperature)
    sides = (x, teacher) if check_flag("reverse", reverse) else (teacher, x)
    return autograd.kl_divergence(*sides, place, chosen)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> torch.Tensor:
    """Returns the cross entropy of the logits hidden · weightᵀ + bias, without ever having the logits of all rows.

    Rows are taken in chunks, whose logits are overwritten by their gradient; few rows may be one chunk. The products
    are torch's. The gradients of weight and bias are added up in float32 or wider over all chunks, and rounded once.
    Rows that do not count are not multiplied. On a GPU the host waits until it knows how many count.

    Args:
        hidden: What the logits are made of: (…, features); of floats of 16 to 64 bits.
        weight: (n, features) for n classes, of the dtype of `hidden`, or any under torch.autocast.
        target: The class of each row: (…), int64 or int32, from 0 to n - 1 or `ignore_index`. On a GPU another one
            makes its row's loss NaN.
        bias: (n,), or None.
        ignore_index: The class of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.
        reduction: "mean" over the rows that count, NaN if there are none; "sum"; or "none" for one loss a row, which
            makes the logits twice if there is a gradient.
        softcap: A positive number c that turns logits z into c · tanh(z / c), as in Gemma 2; None for none.
        z_loss: What a row's squared logsumexp is multiplied by and added to its loss, as in PaLM; 0 for none.
        chunk: Rows to take at a time. If None, so many that their logits have 24 MB on a CPU and 512 MB on a GPU, but
            at least 128, and on a GPU, if the gradient of a weight in bfloat16 or float16 is wanted, at least as many
            as there are features, and all if they are at most twice as many. Fewer take less memory and more time.

    Returns:
        The loss: a scalar, or of the shape of `target`; of the dtype and device of `hidden`, but float32 for bfloat16
        and float16 under torch.autocast. It has a gradient, which has none.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes or devices do not fit, a target on a CPU is not a class, or another argument is not one of
            these.

    Example:
        >>> import maxsoftmax.torch, torch
        >>> hidden, weight = torch.ones(2, 3), torch.zeros(4, 3, requires_grad=True)
        >>> loss = maxsoftmax.torch.linear_cross_entropy(hidden, weight, torch.tensor([0, 3]))
        >>> loss.backward()
        >>> print(f"{loss:.4f}", weight.grad[:, 0])
        1.3863 tensor([-0.2500,  0.2500,  0.2500, -0.2500])
    """
    linear.check(hidden, weight, target, bias)
    options = linear.Options(
        check_ignore_index(ignore_index),
        check_label_smoothing(label_smoothing),
        check_reduction(reduction),
        check_softcap(softcap),
        check_z_loss(z_loss),
        check_chunk(chunk),
        linear.product_dtype(hidden, weight, bias),
    )
    loss = linear.linear_cross_entropy(hidden, weight, target, bias, options)
    return loss if torch.is_autocast_enabled(hidden.device.type) else loss.to(hidden.dtype)


@overload
def linear_token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[False] = ...,
    softcap: float | None = ...,
    chunk: int | None = ...,
) -> torch.Tensor: ...
@overload
def linear_token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[True],
    softcap: float | None = ...,
    chunk: int | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def linear_token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    temperature: float | None = ...,
    entropy: bool,
    softcap: float | None = ...,
    chunk: int | None = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def linear_token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float | None = None,
    entropy: bool = False,
    softcap: float | None = None,
    chunk: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns what `token_log_probs` does of the logits hidden · weightᵀ + bias, without the logits of all rows.

    Rows are taken in chunks. The products are torch's. A gradient makes the logits of a chunk again, and has memory for
    the logits of two; the gradients of weight and bias are added up in float32 or wider, and rounded once.

    Args:
        hidden: What the logits are made of: (…, features); of floats of 16 to 64 bits.
        weight: (n, features) for n tokens, of the dtype of `hidden`, or any under torch.autocast.
        tokens: Which tokens of each row: (…), or (…, k) for k a row; int64 or int32. What is not from 0 to n - 1
            has the logarithm NaN, and no gradient.
        bias: (n,), or None.
        temperature: A positive number that logits are divided by; 1 if None.
        entropy: Whether to return the entropy of each row, too: -Σ p ln p.
        softcap: A positive number c that turns logits z into c · tanh(z / c), before the temperature; None for none.
        chunk: Rows to take at a time; None to choose it.

    Returns:
        The logarithms, of the shape of `tokens`, or with `entropy` a tuple of them and the entropies, of shape (…):
        float64 if the products are, else float32. They have a gradient, which has none.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes or devices do not fit, or another argument is not one of these.

    Example:
        >>> import maxsoftmax.torch, torch
        >>> hidden, weight = torch.ones(2, 3), torch.zeros(4, 3)
        >>> maxsoftmax.torch.linear_token_log_probs(hidden, weight, torch.tensor([0, 3]))
        tensor([-1.3863, -1.3863])
    """
    linear_tokens.check(hidden, weight, tokens, bias)
    options = linear_tokens.Options(
        check_temperature(temperature),
        check_flag("entropy", entropy),
        check_softcap(softcap),
        check_chunk(chunk),
        linear.product_dtype(hidden, weight, bias),
    )
    found = linear_tokens.linear_token_log_probs(hidden, weight, tokens, bias, options)
    return found if entropy else found[0]
