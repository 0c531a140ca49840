"""Cross entropy and tokens' logarithms of logits that a matrix product makes, for arrays, a chunk of rows at a time.

Products are NumPy's, in float32 or float64, all else is done by the kernels. Rows are taken in chunks, whose logits lie
in memory that the next chunk uses again. Where arrays have to be converted for a product, that is done in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from maxsoftmax._arguments import (
    check_chunk,
    check_flag,
    check_ignore_index,
    check_label_smoothing,
    check_reduction,
    check_softcap,
    check_temperature,
    check_z_loss,
    words,
)
from maxsoftmax._arrays import losses
from maxsoftmax._arrays.bits import narrowed, widened
from maxsoftmax._arrays.call import Call, check_like
from maxsoftmax._arrays.memory import HOST, Array, accumulator, view
from maxsoftmax._arrays.tokens import token_log_probs, token_log_probs_backward
from maxsoftmax._types import reduces_hidden

if TYPE_CHECKING:
    from maxsoftmax._types import Array as Kind
    from maxsoftmax._types import Flag, Reduction

MEMORY = 24 << 20
"""Bytes of a chunk's logits, unless told otherwise."""

STEP = 128
"""Rows by which a chunk grows: products are made of blocks of so many."""

BLOCK = 2048
"""Classes whose weights are converted, or whose gradients are added to others, at a time."""

PART = 16
"""Rows whose derivatives of a soft cap are held at a time."""


@reduces_hidden
def linear_cross_entropy(
    hidden: Any,
    weight: Any,
    target: Any,
    bias: Any = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> Any:
    """Returns the cross entropy of the logits hidden · weightᵀ + bias, without ever having the logits of all rows.

    Rows are taken in chunks, on the CPU. The products are NumPy's, in float64 if `hidden` is, else in float32. Rows
    that do not count are not multiplied.

    Args:
        hidden: What the logits are made of, (…, features), on the host: an array of NumPy or of any library with
            DLPack; floats of 16 to 64 bits, or what becomes such.
        weight: (n, features) for n classes, of the dtype of `hidden`.
        target: The class of each row: (…), int64 or int32, from 0 to n - 1 or `ignore_index`.
        bias: (n,), of the dtype of `hidden`, or None.
        ignore_index: The class of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.
        reduction: "mean" over the rows that count, NaN if there are none; "sum"; or "none" for one loss a row.
        softcap: A positive number c that turns logits z into c · tanh(z / c), as in Gemma 2; None for none.
        z_loss: What a row's squared logsumexp is multiplied by and added to its loss, as in PaLM; 0 for none.
        chunk: Rows to take at a time. If None, so many that their logits have 24 MB, but at least 128.

    Returns:
        The loss: a scalar, or of the shape of `target`; the dtype and kind of `hidden`.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes do not fit, an array is on a GPU, a target is not a class, or another argument is not one
            of these.
        RuntimeError: If the library cannot be built.

    Example:
        >>> maxsoftmax.linear_cross_entropy([[1.0, 2.0]], [[3.0, 0.0], [1.0, 1.0]], [1])
        np.float64(0.6931471805599453)
    """
    choices = _Choices.of(ignore_index, label_smoothing, reduction, softcap, z_loss, chunk)
    given = _Given(hidden, weight, bias)
    return _computed(given, given.classes(target, "target"), None, choices, False)[0]


def linear_cross_entropy_backward(
    hidden: Any,
    weight: Any,
    target: Any,
    bias: Any = None,
    dloss: Any = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Returns the loss as `linear_cross_entropy` does, and with it the gradients of what the logits are made of.

    The logits are made once for both, and a chunk's are overwritten by their gradient. The gradients of weight and bias
    are added up in float32 or wider over all chunks, and rounded once.

    Args:
        hidden: What the logits are made of, (…, features), on the host: an array of NumPy or of any library with
            DLPack; floats of 16 to 64 bits, or what becomes such.
        weight: (n, features) for n classes, of the dtype of `hidden`.
        target: The class of each row: (…), int64 or int32, from 0 to n - 1 or `ignore_index`.
        bias: (n,), of the dtype of `hidden`, or None.
        dloss: The gradient of the loss, of its shape and dtype; 1 if None.
        ignore_index: The class of rows that do not count.
        label_smoothing: From 0 to 1: the share of a target that is spread evenly over all classes.
        reduction: "mean" over the rows that count, NaN if there are none; "sum"; or "none" for one loss a row.
        softcap: A positive number c that turns logits z into c · tanh(z / c), as in Gemma 2; None for none.
        z_loss: What a row's squared logsumexp is multiplied by and added to its loss, as in PaLM; 0 for none.
        chunk: Rows to take at a time. If None, so many that their logits have 24 MB, but at least 128.

    Returns:
        The loss, and the gradients of hidden, weight and bias, of their shapes; the last one None without a bias.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes do not fit, an array is on a GPU, a target is not a class, or another argument is not one
            of these.
        RuntimeError: If the library cannot be built.

    Example:
        >>> weight = [[3.0, 0.0], [1.0, 1.0]]
        >>> loss, dhidden, dweight, _ = maxsoftmax.linear_cross_entropy_backward([[1.0, 2.0]], weight, [1])
        >>> dweight
        array([[ 0.5,  1. ],
               [-0.5, -1. ]])
    """
    choices = _Choices.of(ignore_index, label_smoothing, reduction, softcap, z_loss, chunk)
    given = _Given(hidden, weight, bias)
    classes = given.classes(target, "target")
    upstream = None
    if dloss is not None:
        upstream = given.floats(dloss, "dloss")
        shape = classes.shape if reduction == "none" else ()
        if upstream.shape != shape:
            raise ValueError(f"dloss has shape {upstream.shape}, but that of the loss is {shape}")
    return _computed(given, classes, upstream, choices, True)


@overload
def linear_token_log_probs(
    hidden: np.ndarray[Any, Any],
    weight: Any,
    tokens: Any,
    bias: Any = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[False] = ...,
    softcap: float | None = ...,
    chunk: int | None = ...,
) -> Any: ...
@overload
def linear_token_log_probs(
    hidden: Kind,
    weight: Any,
    tokens: Any,
    bias: Any = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[False] = ...,
    softcap: float | None = ...,
    chunk: int | None = ...,
) -> Kind: ...
@overload
def linear_token_log_probs(
    hidden: np.ndarray[Any, Any],
    weight: Any,
    tokens: Any,
    bias: Any = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[True],
    softcap: float | None = ...,
    chunk: int | None = ...,
) -> tuple[Any, Any]: ...
@overload
def linear_token_log_probs(
    hidden: Kind,
    weight: Any,
    tokens: Any,
    bias: Any = ...,
    *,
    temperature: float | None = ...,
    entropy: Literal[True],
    softcap: float | None = ...,
    chunk: int | None = ...,
) -> tuple[Kind, Kind]: ...
@overload
def linear_token_log_probs(
    hidden: object,
    weight: Any,
    tokens: Any,
    bias: Any = ...,
    *,
    temperature: float | None = ...,
    entropy: Flag = ...,
    softcap: float | None = ...,
    chunk: int | None = ...,
) -> Any: ...
def linear_token_log_probs(
    hidden: Any,
    weight: Any,
    tokens: Any,
    bias: Any = None,
    *,
    temperature: float | None = None,
    entropy: Flag = False,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Any:
    """Returns what `token_log_probs` does of the logits hidden · weightᵀ + bias, without the logits of all rows.

    Rows are taken in chunks, on the CPU. The products are NumPy's, in float64 if `hidden` is, else in float32.

    Args:
        hidden: What the logits are made of, (…, features), on the host: an array of NumPy or of any library with
            DLPack; floats of 16 to 64 bits, or what becomes such.
        weight: (n, features) for n classes, of the dtype of `hidden`.
        tokens: Which tokens of each row: (…), or (…, k) for k a row; int32 or int64. What is not from 0 to n - 1 has
            the logarithm NaN.
        bias: (n,), of the dtype of `hidden`, or None.
        temperature: A positive number that logits are divided by; 1 if None.
        entropy: Whether to return the entropy of each row, too: -Σ p ln p.
        softcap: A positive number c that turns logits z into c · tanh(z / c) before the temperature; None for none.
        chunk: Rows to take at a time. If None, so many that their logits have 24 MB, but at least 128.

    Returns:
        The logarithms, of the shape of `tokens`, or with `entropy` a tuple of them and the entropies, of shape (…).
        Both are of the kind of `hidden`: float64 if it is, else float32.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes do not fit, an array is on a GPU, or another argument is not one of these.
        RuntimeError: If the library cannot be built.

    Example:
        >>> maxsoftmax.linear_token_log_probs([[1.0, 2.0]], [[3.0, 0.0], [1.0, 1.0]], [1])
        array([-0.69314718])
    """
    options: dict[str, Any] = {"temperature": check_temperature(temperature), "entropy": check_flag("entropy", entropy)}
    cap, step = check_softcap(softcap), check_chunk(chunk)
    given = _Given(hidden, weight, bias)
    chosen = given.classes(tokens, "tokens", several=True)
    rows = given.rows
    flat = chosen.reshape(len(rows), *chosen.shape[len(given.shape) - 1 :])
    log_probs = np.empty(flat.shape, given.wide)
    entropies = np.empty(len(rows) if entropy else 0, given.wide)
    for part in given.chunks(None, len(rows), step):
        found = token_log_probs(given.logits(given.taken(part), cap), flat[part], **options)
        if entropy:
            log_probs[part], entropies[part] = found
        else:
            log_probs[part] = found
    result = given.result(log_probs.reshape(chosen.shape), given.wide.name)
    return (result, given.result(entropies.reshape(given.shape[:-1]), given.wide.name)) if entropy else result


def linear_token_log_probs_backward(
    hidden: Any,
    weight: Any,
    tokens: Any,
    bias: Any = None,
    dlog_probs: Any = None,
    *,
    dentropy: Any = None,
    temperature: float | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[Any, Any, Any]:
    """Returns the gradients of what the logits of `linear_token_log_probs` are made of.

    The logits are made again, and there is memory for those of two chunks. The gradients of weight and bias are added
    up in float32 or wider over all chunks, and rounded once.

    Args:
        hidden: What the logits are made of, (…, features), on the host: an array of NumPy or of any library with
            DLPack; floats of 16 to 64 bits, or what becomes such.
        weight: (n, features) for n classes, of the dtype of `hidden`.
        tokens: Which tokens of each row: (…), or (…, k) for k a row; int32 or int64. What is not from 0 to n - 1 has no
            gradient if its own is 0, and else makes the row NaN.
        bias: (n,), of the dtype of `hidden`, or None.
        dlog_probs: The gradients of the logarithms, of the shape of `tokens`: float64 if `hidden` is, else float32; 1
            if None.
        dentropy: The gradients of the entropies, of shape (…) and the same dtype; 0 if None.
        temperature: A positive number that logits are divided by; 1 if None.
        softcap: A positive number c that turns logits z into c · tanh(z / c) before the temperature; None for none.
        chunk: Rows to take at a time. If None, so many that their logits have 24 MB, but at least 128.

    Returns:
        The gradients of hidden, weight and bias, of their shapes and dtype; the last one None without a bias.

    Raises:
        TypeError: If an argument is not of its type or dtype.
        ValueError: If shapes do not fit, an array is on a GPU, or another argument is not one of these.
        RuntimeError: If the library cannot be built.

    Example:
        >>> weight = [[3.0, 0.0], [1.0, 1.0]]
        >>> dhidden, dweight, _ = maxsoftmax.linear_token_log_probs_backward([[1.0, 2.0]], weight, [1])
        >>> dweight
        array([[-0.5, -1. ],
               [ 0.5,  1. ]])
    """
    chosen, cap, step = check_temperature(temperature), check_softcap(softcap), check_chunk(chunk)
    given = _Given(hidden, weight, bias)
    asked = given.classes(tokens, "tokens", several=True)
    rows = given.rows
    shape = len(rows), *asked.shape[len(given.shape) - 1 :]
    upstream = given.upstream(dlog_probs, "dlog_probs", asked.shape, "the logarithms")
    of_entropy = given.upstream(dentropy, "dentropy", given.shape[:-1], "the entropies")
    flat = asked.reshape(shape)
    of_tokens = np.ones(shape, given.wide) if upstream is None else upstream.reshape(shape)
    of_rows = None if of_entropy is None else of_entropy.reshape(-1)
    sums = _Sums(given)
    for part in given.chunks(None, len(rows), step):
        taken = given.taken(part)
        logits = given.logits(taken, cap)
        more = None if of_rows is None else of_rows[part]
        dlogits = token_log_probs_backward(logits, flat[part], of_tokens[part], more, temperature=chosen)
        if cap is not None:
            dlogits *= 1 - np.square(logits / cap)
        sums.add(part, taken, dlogits)
    return sums.found()


class _Choices(NamedTuple):
    """What is chosen of a loss, checked."""

    ignore_index: int
    smoothing: float
    reduction: str
    softcap: float | None
    z_loss: float
    chunk: int | None

    @classmethod
    def of(cls, *choices: Any) -> _Choices:
        """Returns a caller's, or refuses them."""
        checks: Any = (
            check_ignore_index,
            check_label_smoothing,
            check_reduction,
            check_softcap,
            check_z_loss,
            check_chunk,
        )
        checked: list[Any] = [check(choice) for check, choice in zip(checks, choices, strict=True)]
        return cls(*checked)


class _Given:
    """What logits are made of: arrays of the host, as NumPy has them, in the arithmetic's dtype where they are used."""

    def __init__(self, hidden: Any, weight: Any, bias: Any) -> None:
        self._call = Call(hidden, "hidden", None)
        self.dtype = self._call.x.dtype
        self.wide = np.dtype(accumulator(self.dtype))
        hidden = self._host(self._call.x, "hidden")
        self._weight = self.floats(weight, "weight")
        if self._weight.ndim != 2 or not hidden.ndim or self._weight.shape[1] != hidden.shape[-1]:
            features = hidden.shape[-1] if hidden.ndim else "features"
            raise ValueError(
                f"weight has shape {self._weight.shape}, but hidden of {hidden.shape} needs (n, {features}) for n "
                "classes"
            )
        self.bias = None if bias is None else self.floats(bias, "bias")
        if self.bias is not None and self.bias.shape != self._weight.shape[:1]:
            raise ValueError(f"bias has shape {self.bias.shape}, but weight of {self._weight.shape} needs one a row")
        self.shape = hidden.shape
        self.rows = hidden.reshape(-1, hidden.shape[-1])
        self.n = len(self._weight)
        self._room = np.empty(0, self.wide)

    def floats(self, x: Any, name: str) -> np.ndarray:
        """Returns another array of the same dtype."""
        array = self._call.floats(x, name)
        if array.dtype != self.dtype:
            raise TypeError(f"{name} has dtype {array.dtype}, but hidden has {self.dtype}")
        return self._host(array, name)

    def classes(self, x: Any, name: str, several: bool = False) -> np.ndarray:
        """Returns classes, one a row, or perhaps several."""
        array = self._host(self._call.classes(x, name), name)
        rows = self.shape[:-1]
        if array.shape != rows and not (several and array.shape[:-1] == rows and array.ndim):
            more = f", or {words((*rows, 'k'))} for k a row" if several else ""
            raise ValueError(f"{name} has shape {array.shape}, but hidden of {self.shape} needs {rows}{more}")
        return array

    def upstream(self, x: Any, name: str, shape: tuple[int, ...], whose: str) -> np.ndarray | None:
        """Returns the gradients of results in the dtype of the arithmetic, if there are any."""
        if x is None:
            return None
        array = self._call.floats(x, name)
        check_like(array, name, self.wide.name, shape, f"of {whose}")
        return self._host(array, name)

    def chunks(self, kept: np.ndarray | None, count: int, chunk: int | None) -> Iterator[Any]:
        """Yields the places of a chunk's rows, chunk by chunk, of all rows or those that are kept."""
        step = chunk or STEP * max(1, MEMORY // (max(1, self.n) * self.wide.itemsize) // STEP)
        self._room = np.empty(min(step, count) * self.n, self.wide)
        for first in range(0, count, step):
            places = slice(first, min(first + step, count))
            yield places if kept is None else kept[places]

    def taken(self, places: Any) -> np.ndarray:
        """Returns the rows of a chunk."""
        return self.to_wide(self.rows[places])

    def to_wide(self, array: np.ndarray) -> np.ndarray:
        """Returns an array, perhaps of bits, in the dtype of the arithmetic."""
        return widened(array, self.dtype, self.wide)

    def blocks(self) -> list[slice]:
        """Returns the classes whose weights are taken together: all that need not be converted."""
        step = max(self.n, 1) if self._weight.dtype == self.wide else BLOCK
        return [slice(first, min(first + step, self.n)) for first in range(0, self.n, step)]

    def weights(self, block: slice) -> np.ndarray:
        """Returns the weights of some classes."""
        return self.to_wide(self._weight[block])

    def logits(self, taken: np.ndarray, softcap: float | None) -> np.ndarray:
        """Returns the logits of a chunk, where those of the last one were."""
        logits = self._room[: len(taken) * self.n].reshape(len(taken), self.n)
        for block in self.blocks():
            np.matmul(taken, self.weights(block).T, out=logits[:, block])
        if self.bias is not None:
            logits += self.to_wide(self.bias)
        if softcap is not None:
            logits /= softcap
            np.tanh(logits, out=logits)
            logits *= softcap
        return logits

    def result(self, array: np.ndarray, dtype: str) -> Any:
        """Returns a result as the kind of array that `hidden` is."""
        return self._call.kind.convert(self._call.given, narrowed(array, dtype), dtype, HOST)

    @staticmethod
    def _host(array: Array, name: str) -> np.ndarray:
        if array.device != HOST:
            raise ValueError(
                f"{name} is on a GPU, but products of arrays are NumPy's: use maxsoftmax.torch, or maxsoftmax.ops"
            )
        return view(array)


class _Sums:
    """The gradients of what logits are made of, in the dtype of the arithmetic."""

    def __init__(self, given: _Given) -> None:
        self._given = given
        self.dhidden = np.zeros(given.rows.shape, given.wide)
        self.dweight = np.empty((given.n, given.rows.shape[1]), given.wide)
        self.dbias = np.zeros(given.n, given.wide)
        self._is_first = True

    def add(self, places: Any, taken: np.ndarray, dlogits: np.ndarray) -> None:
        """Adds what the gradients of a chunk's logits come to."""
        dhidden = np.zeros(taken.shape, taken.dtype)
        for block in self._given.blocks():
            dhidden += dlogits[:, block] @ self._given.weights(block)
        self.dhidden[places] = dhidden
        if self._given.bias is not None:
            self.dbias += dlogits.sum(0)
        if self._is_first:
            np.matmul(dlogits.T, taken, out=self.dweight)
        else:
            for first in range(0, self._given.n, BLOCK):
                block = slice(first, first + BLOCK)
                self.dweight[block] += dlogits[:, block].T @ taken
        self._is_first = False

    def found(self) -> tuple[Any, Any, Any]:
        """Returns them as results."""
        given = self._given
        if self._is_first:
            self.dweight.fill(0)
        dhidden = given.result(self.dhidden.reshape(given.shape), given.dtype)
        dbias = None if given.bias is None else given.result(self.dbias, given.dtype)
        return dhidden, given.result(self.dweight, given.dtype), dbias


def _computed(
    given: _Given, target: np.ndarray, upstream: np.ndarray | None, choices: _Choices, wanted: bool
) -> tuple[Any, Any, Any, Any]:
    """Returns the loss, and the gradients if they are wanted."""
    losses._check_classes(target, given.n, choices.ignore_index)
    classes = target.reshape(-1)
    kept = np.flatnonzero(classes != choices.ignore_index)
    count, each = len(kept), choices.reduction == "none"
    found = np.zeros(len(classes), given.wide)
    sums = _Sums(given) if wanted else None
    share = 1 / max(count, 1) if choices.reduction == "mean" else 1.0
    scales = None if upstream is None else given.to_wide(upstream).reshape(-1)
    options: dict[str, Any] = {
        "ignore_index": choices.ignore_index,
        "label_smoothing": choices.smoothing,
        "reduction": "none",
    }
    for places in given.chunks(None if count == len(classes) else kept, count, choices.chunk):
        taken, some = given.taken(places), classes[places]
        logits = given.logits(taken, choices.softcap)
        of_rows, pairs = losses.cross_entropy_forward(logits, some, **options)
        if choices.z_loss:
            logsumexp = pairs[:, 0] + np.log(pairs[:, 1])
            of_rows = of_rows + choices.z_loss * np.square(logsumexp)
            # The gradient of the term is that of the loss's probabilities, times this.
            pairs[:, 1] /= 1 + 2 * choices.z_loss * logsumexp
        found[places] = of_rows
        if sums is None:
            continue
        scale = np.full(len(some), share, given.wide)
        if scales is not None:
            scale *= scales[places] if each else scales
        step = len(some) if choices.softcap is None else PART
        for first in range(0, len(some), max(step, 1)):
            part = slice(first, first + step)
            slope = None if choices.softcap is None else 1 - np.square(logits[part] / choices.softcap)
            losses.cross_entropy_backward_(logits[part], some[part], pairs[part], scale[part], **options)
            if slope is not None:
                logits[part] *= slope
        sums.add(places, taken, logits)
    total = found.reshape(target.shape) if each else found.sum()
    if choices.reduction == "mean":
        # Of no loss at all the mean is NaN, as of no number.
        total = total / count if count else np.full((), np.nan)
    loss = given.result(np.asarray(total, given.wide), given.dtype)
    return (loss, None, None, None) if sums is None else (loss, *sums.found())
