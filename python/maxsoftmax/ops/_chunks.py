"""Cross entropy and tokens' logarithms of logits that a matrix product makes, in a graph, a chunk of rows at a time.

Products are MAX's, all else is done by the kernels. Rows are taken in chunks by a loop of the graph. They are padded to
whole chunks by rows that do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, NamedTuple

from max.dtype import DType
from max.graph import DeviceRef, Dim, StaticDim, TensorType, TensorValue
from max.graph import ops as max_ops

from maxsoftmax._arguments import accumulator
from maxsoftmax.ops import _losses as loss_ops
from maxsoftmax.ops import _tokens as token_ops

MEMORY = {False: 24 << 20, True: 512 << 20}
"""Bytes of a chunk's logits, unless told otherwise, on a CPU and on a GPU."""

STEP = 128
"""Rows by which a chunk grows: products are made of blocks of so many."""


WHOLE = 64
"""What dimensions of products of 16 bits are to be multiples of on a GPU: of some others MAX 26.7 writes nothing, or
beyond its memory (H200: of 24×40 by 40×136, of 40×24 by 24×130)."""


class Logits(NamedTuple):
    """What logits are made of, checked."""

    hidden: TensorValue
    """(rows, features)."""
    weight: TensorValue
    """(n, features)."""
    bias: TensorValue | None
    """(n,)."""
    softcap: float | None

    @property
    def wide(self) -> DType:
        """The dtype of the arithmetic."""
        return accumulator(self.hidden.dtype)

    def of(self, taken: TensorValue) -> TensorValue:
        """Returns the logits of some rows."""
        logits = _product(taken, max_ops.transpose(self.weight, 0, 1), taken.dtype)
        if self.bias is not None:
            logits = logits + self.bias
        if self.softcap is not None:
            logits = max_ops.cast(max_ops.tanh(max_ops.cast(logits, self.wide) / self.softcap), logits.dtype)
            logits = logits * self.softcap
        return logits

    def through_cap(self, logits: TensorValue, dlogits: TensorValue) -> TensorValue:
        """Returns the gradients of what the soft cap bounds."""
        if self.softcap is None:
            return dlogits
        share = max_ops.cast(logits, self.wide) / self.softcap
        return max_ops.cast(max_ops.cast(dlogits, self.wide) * (1.0 - share * share), dlogits.dtype)


class Choices(NamedTuple):
    """What is chosen of a loss, checked."""

    ignore_index: int
    smoothing: float
    reduction: str
    z_loss: float


def chunk_of(logits: Logits, chunk: int | None, summed: bool) -> int:
    """Returns how many rows to take at a time.

    Args:
        logits: What logits are made of.
        chunk: What the caller chose.
        summed: Whether the weight's gradient is wanted, whose sum over chunks would be in `wide`.
    """
    n, (rows, features), dtype = logits.weight.shape[0], logits.hidden.shape, logits.hidden.dtype
    is_gpu, most = logits.hidden.device.is_gpu(), chunk or STEP
    if chunk is None and isinstance(n, StaticDim):
        most = STEP * max(1, MEMORY[is_gpu] // (max(1, int(n)) * dtype.size_in_bytes) // STEP)
    if not isinstance(rows, StaticDim):
        return most
    if chunk is None and summed and is_gpu and dtype != logits.wide and isinstance(features, StaticDim):
        # The logits of so many are no larger than a sum would be, which is not needed then.
        if int(rows) * dtype.size_in_bytes <= int(features) * logits.wide.size_in_bytes:
            return max(1, int(rows))
        most = max(most, int(features) // STEP * STEP)
    count = max(1, int(rows))
    if count <= most or chunk:
        return min(count, most)
    return STEP * ceil(count / ceil(count / most) / STEP)


def cross_entropy(  # noqa: PLR0917
    logits: Logits, target: TensorValue, dloss: TensorValue | None, choices: Choices, chunk: int | None, wanted: bool
) -> list[TensorValue]:
    """Returns the loss, of one number or one a row, and the gradients of hidden, weight and bias, if they are wanted.

    Args:
        logits: What logits are made of.
        target: (rows,).
        dloss: The gradient of the loss, of one number or (rows,); 1 if None.
        choices: Of the loss.
        chunk: Rows to take at a time.
        wanted: Whether gradients are.
    """
    wide, device, rows = logits.wide, logits.hidden.device, logits.hidden.shape[0]
    step = chunk_of(logits, chunk, wanted)
    padded = _padded(rows, step)
    is_alone = rows == padded and isinstance(rows, StaticDim) and int(rows) <= step
    counts = max_ops.not_equal(target, max_ops.constant(choices.ignore_index, target.dtype, device))
    nothing = max_ops.constant(0.0, logits.hidden.dtype, device)
    # What is in rows that do not count is not to reach the others by way of a product.
    hidden = max_ops.where(max_ops.unsqueeze(counts, 1), logits.hidden, nothing)
    hidden = _extended(hidden, padded, 0.0)
    classes = _extended(target, padded, choices.ignore_index)
    upstream = None
    if dloss is not None and choices.reduction == "none":
        upstream = _extended(max_ops.cast(dloss, wide), padded, 0.0)
    # The mean of many is a subnormal number in float16: there gradients are divided once they are added up.
    is_late = logits.hidden.dtype == DType.float16
    count = max_ops.sum(max_ops.cast(counts, wide), axis=0)
    scale = _scale(count, dloss if upstream is None else None, choices)
    # On a GPU, MAX 26.7's results of 16 bits are wrong for some shapes where those of 32 are right (64×192 by 192×64).
    of_products = logits.hidden.dtype if is_alone and not is_late and not device.is_gpu() else wide
    states = [_zeros(wide, [padded], device), *(_no_sums(logits, padded) if wanted else [])]

    def body(first: TensorValue, losses: TensorValue, *sums: TensorValue) -> list[TensorValue]:
        taken, some = _part(hidden, first, step), _part(classes, first, step)
        z = logits.of(taken)
        of_rows, pairs = _losses(z, some, choices)
        after = [_stored(losses, of_rows, first)]
        if not wanted:
            return after
        scales = _ones(wide, step, device) if upstream is None else _part(upstream, first, step)
        options: dict[str, Any] = {"ignore_index": choices.ignore_index, "label_smoothing": choices.smoothing}
        given = scales if is_late else scales * scale
        dz = loss_ops.cross_entropy_backward(z, some, pairs, given, reduction="none", **options)
        return after + _added(logits, sums, taken, logits.through_cap(z, dz), first, of_products)

    losses, *sums = _loop(rows, step, padded, states, body)
    losses = _first(losses, rows)
    loss = losses
    if choices.reduction != "none":
        # Of no loss at all the mean is NaN, as of no number.
        total = max_ops.sum(losses, axis=0)
        loss = max_ops.reshape(total / count if choices.reduction == "mean" else total, [])
    # Rows that do not count have gradients of 0.
    gradients = _found(sums, rows) if wanted else []
    if is_late:
        gradients = [gradient * scale for gradient in gradients]
    return [max_ops.cast(value, logits.hidden.dtype) for value in (loss, *gradients)]


def token_log_probs(
    logits: Logits, tokens: TensorValue, temperature: float, entropy: bool, chunk: int | None
) -> list[TensorValue]:
    """Returns the logarithms, (rows, k) as the tokens, and the entropies, (rows,), if they are wanted."""
    wide, device, rows = logits.wide, logits.hidden.device, logits.hidden.shape[0]
    step = chunk_of(logits, chunk, False)
    padded = _padded(rows, step)
    hidden, chosen = _extended(logits.hidden, padded, 0.0), _extended(tokens, padded, 0)
    states = [_zeros(wide, shape, device) for shape in ([padded, tokens.shape[1]], [padded])[: 1 + entropy]]

    def body(first: TensorValue, *states: TensorValue) -> list[TensorValue]:
        z = logits.of(_part(hidden, first, step))
        found = token_ops.token_log_probs(z, _part(chosen, first, step), temperature=temperature, entropy=entropy)
        results = found if isinstance(found, tuple) else (found,)
        return [_stored(state, result, first) for state, result in zip(states, results, strict=True)]

    return [_first(state, rows) for state in _loop(rows, step, padded, states, body)]


def token_log_probs_backward(  # noqa: PLR0917
    logits: Logits,
    tokens: TensorValue,
    dlog_probs: TensorValue | None,
    dentropy: TensorValue | None,
    temperature: float,
    chunk: int | None,
) -> list[TensorValue]:
    """Returns the gradients of hidden, weight and bias.

    Args:
        logits: What logits are made of.
        tokens: (rows, k).
        dlog_probs: Their gradients, (rows, k); 1 if None.
        dentropy: Those of entropies, (rows,); 0 if None.
        temperature: What logits are divided by.
        chunk: Rows to take at a time.
    """
    wide, rows = logits.wide, logits.hidden.shape[0]
    step = chunk_of(logits, chunk, True)
    padded = _padded(rows, step)
    if dlog_probs is None:
        dlog_probs = max_ops.broadcast_to(max_ops.constant(1.0, wide, logits.hidden.device), tokens.shape)
    hidden, chosen = _extended(logits.hidden, padded, 0.0), _extended(tokens, padded, 0)
    # Rows beyond the last have gradients of 0.
    upstream = _extended(max_ops.cast(dlog_probs, wide), padded, 0.0)
    of_entropies = None if dentropy is None else _extended(max_ops.cast(dentropy, wide), padded, 0.0)

    def body(first: TensorValue, *sums: TensorValue) -> list[TensorValue]:
        taken = _part(hidden, first, step)
        z = logits.of(taken)
        more = None if of_entropies is None else _part(of_entropies, first, step)
        given = _part(chosen, first, step), _part(upstream, first, step), more
        dz = token_ops.token_log_probs_backward(z, *given, temperature=temperature)
        return _added(logits, sums, taken, logits.through_cap(z, dz), first, wide)

    sums = _loop(rows, step, padded, _no_sums(logits, padded), body)
    return [max_ops.cast(gradient, logits.hidden.dtype) for gradient in _found(sums, rows)]


def _no_sums(logits: Logits, padded: Dim) -> list[TensorValue]:
    """Returns what the gradients of hidden, weight and bias begin with, that of the weight turned."""
    n, features = logits.weight.shape
    shapes: list[list[Dim]] = [[padded, features], [features, n], *([] if logits.bias is None else [[n]])]
    return [_zeros(logits.wide, shape, logits.hidden.device) for shape in shapes]


def _added(  # noqa: PLR0917
    logits: Logits, sums: Sequence[TensorValue], taken: TensorValue, dz: TensorValue, first: TensorValue, of: DType
) -> list[TensorValue]:
    """Returns the gradients with those of a chunk: its rows, and the gradients of its logits. Products are in `of`."""
    is_alone = sums[0].shape[0] == taken.shape[0]
    # The transpose of the smaller of the two: the gradient is turned once, when all is added up.
    product = _product(max_ops.transpose(taken, 0, 1), dz, of)
    after = [_stored(sums[0], _product(dz, logits.weight, of), first), product if is_alone else sums[1] + product]
    if logits.bias is not None:
        after.append(sums[2] + max_ops.squeeze(max_ops.sum(max_ops.cast(dz, logits.wide), axis=0), 0))
    return after


def _found(sums: Sequence[TensorValue], rows: Dim) -> list[TensorValue]:
    """Returns the gradients, once all is added up."""
    return [_first(sums[0], rows), max_ops.transpose(sums[1], 0, 1), *sums[2:]]


def _scale(count: TensorValue, dloss: TensorValue | None, choices: Choices) -> TensorValue:
    """Returns what gradients of rows' losses are multiplied by, (1,).

    Args:
        count: How many rows count.
        dloss: The gradient of the loss, if that is one number and it is not 1.
        choices: Of the loss.
    """
    scale = _ones(count.dtype, 1, count.device)
    if choices.reduction == "mean":
        scale = scale / max_ops.max(count, scale)
    return scale if dloss is None else scale * max_ops.cast(dloss, count.dtype)


def _losses(z: TensorValue, classes: TensorValue, choices: Choices) -> tuple[TensorValue, TensorValue]:
    """Returns the losses of rows in the dtype of the arithmetic, and the pairs that the gradient takes."""
    wide = accumulator(z.dtype)
    log_probs, sums = token_ops.log_probs_and_sums(z, classes)
    m, d = (max_ops.squeeze(column, 1) for column in max_ops.split(sums, [1, 1, 1], 1)[:2])
    losses = -log_probs
    if choices.smoothing:
        mean = m + max_ops.log(d) - max_ops.squeeze(max_ops.mean(max_ops.cast(z, wide), axis=1), 1)
        losses = losses * (1 - choices.smoothing) + mean * choices.smoothing if choices.smoothing < 1 else mean
    if choices.z_loss:
        logsumexp = m + max_ops.log(d)
        losses = losses + logsumexp * logsumexp * choices.z_loss
        # The gradient of the term is that of the loss's probabilities, times this.
        d = d / (1.0 + logsumexp * (2 * choices.z_loss))
    counts = max_ops.not_equal(classes, max_ops.constant(choices.ignore_index, classes.dtype, z.device))
    return max_ops.where(counts, losses, max_ops.constant(0.0, wide, z.device)), max_ops.stack([m, d], axis=1)


def _product(a: TensorValue, b: TensorValue, wide: DType) -> TensorValue:
    """Returns a matrix product in a dtype: its own, or that of its arithmetic."""
    shape = [a.shape[0], b.shape[1]]
    if a.device.is_gpu() and a.dtype.size_in_bytes == 2:
        a, b = _filled(a), _filled(b)
    product = _multiplied(a, b, wide)
    if list(product.shape) == shape:
        return product
    return max_ops.slice_tensor(product, [(slice(0, _scalar(dim)), dim) for dim in shape])


def _multiplied(a: TensorValue, b: TensorValue, wide: DType) -> TensorValue:
    if a.dtype == wide:
        return max_ops.matmul(a, b)
    # The function has no argument for it, but the op of that name has.
    type = TensorType(wide, [a.shape[0], b.shape[1]], a.device)
    parameters = {"transpose_b": False, "packed_b": False}
    (product,) = max_ops.custom("mo.matmul", device=a.device, values=[a, b], out_types=[type], parameters=parameters)
    return product.tensor


def _filled(x: TensorValue) -> TensorValue:
    """Returns a matrix with as many more rows and columns of zeros as make both multiples of `WHOLE`."""
    for axis in (0, 1):
        x = _extended(x, _padded(x.shape[axis], WHOLE), 0.0, axis)
    return x


def _loop(
    rows: Dim,
    step: int,
    padded: Dim,
    states: Sequence[TensorValue],
    body: Callable[..., list[TensorValue]],
) -> list[TensorValue]:
    """Returns what becomes of states, chunk by chunk: `body` is given the first row, on the CPU, and states."""
    start = max_ops.constant(0, DType.int64, DeviceRef.CPU())
    if isinstance(rows, StaticDim) and int(rows) <= step:
        return body(start, *states) if int(rows) else list(states)
    end = max_ops.reshape(max_ops.shape_to_tensor([padded]), [])

    def predicate(first: TensorValue, *states: TensorValue) -> TensorValue:
        return first < end

    def next(first: TensorValue, *states: TensorValue) -> list[TensorValue]:
        return [first + step, *body(first, *states)]

    found: list[TensorValue] = max_ops.while_loop([start, *states], predicate, next)[1:]
    return found


def _padded(rows: Dim, step: int) -> Dim:
    """Returns how many rows there are in whole chunks."""
    return (rows + (step - 1)) // step * step


def _extended(x: TensorValue, padded: Dim, value: float, axis: int = 0) -> TensorValue:
    """Returns a tensor that is longer along an axis, with one value in what is added."""
    length = x.shape[axis]
    if length == padded:
        return x
    shape, more = list(x.shape), list(x.shape)
    shape[axis], more[axis] = padded, padded - length
    added = max_ops.broadcast_to(max_ops.constant(value, x.dtype, x.device), more)
    return max_ops.rebind(max_ops.concat([x, added], axis=axis), shape)


def _first(x: TensorValue, rows: Dim) -> TensorValue:
    """Returns the rows that were there before."""
    return x if x.shape[0] == rows else max_ops.slice_tensor(x, [(slice(0, _scalar(rows)), rows)])


def _scalar(dim: Dim) -> TensorValue:
    return max_ops.reshape(max_ops.shape_to_tensor([dim]), [])


def _part(x: TensorValue, first: TensorValue, step: int) -> TensorValue:
    """Returns the rows of a chunk."""
    return max_ops.slice_tensor(x, [(slice(first, first + step), step)])


def _stored(whole: TensorValue, part: TensorValue, first: TensorValue) -> TensorValue:
    """Returns a tensor with some rows written over."""
    if whole.shape == part.shape:
        return part
    step = int(part.shape[0])
    places = max_ops.range(0, step, 1, out_dim=step, dtype=DType.int64, device=whole.device)
    places = places + max_ops.transfer_to(first, whole.device)
    return max_ops.scatter_nd(whole, part, max_ops.unsqueeze(places, 1))


def _zeros(dtype: DType, shape: Sequence[Any], device: DeviceRef) -> TensorValue:
    return max_ops.broadcast_to(max_ops.constant(0.0, dtype, device), shape)


def _ones(dtype: DType, count: int, device: DeviceRef) -> TensorValue:
    return max_ops.broadcast_to(max_ops.constant(1.0, dtype, device), [count])
