"""Cross entropy and tokens' logarithms of logits that a matrix product makes, in a graph, a chunk of rows at a time.

Products are MAX's, all else is done by the kernels. Rows are taken in chunks by a loop of the graph. They are padded to
whole chunks by rows that do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from max.dtype import DType
from max.graph import DeviceRef, Dim, StaticDim, TensorType, TensorValue
from max.graph import ops as max_ops

from maxsoftmax import ops
from maxsoftmax._arguments import accumulator

MEMORY = {False: 24 << 20, True: 512 << 20}
"""Bytes of a chunk's logits, unless told otherwise, on a CPU and on a GPU."""

STEP = 128
"""Rows by which a chunk grows: products are made of blocks of so many."""


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
        logits = max_ops.matmul(taken, max_ops.transpose(self.weight, 0, 1))
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


def chunk_of(logits: Logits, chunk: int | None) -> int:
    """Returns how many rows to take at a time."""
    n, rows = logits.weight.shape[0], logits.hidden.shape[0]
    step = chunk or STEP
    if chunk is None and isinstance(n, StaticDim):
        fit = MEMORY[logits.hidden.device.is_gpu()] // (max(1, int(n)) * logits.hidden.dtype.size_in_bytes)
        step = STEP * max(1, fit // STEP)
    return min(step, max(1, int(rows))) if isinstance(rows, StaticDim) else step


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
    n, features = logits.weight.shape[0], logits.hidden.shape[1]
    step = chunk_of(logits, chunk)
    padded = _padded(rows, step)
    counts = max_ops.not_equal(target, max_ops.constant(choices.ignore_index, target.dtype, device))
    nothing = max_ops.constant(0.0, logits.hidden.dtype, device)
    # What is in rows that do not count is not to reach the others by way of a product.
    hidden = max_ops.where(max_ops.unsqueeze(counts, 1), logits.hidden, nothing)
    hidden = _extended(hidden, padded, 0.0)
    classes = _extended(target, padded, choices.ignore_index)
    upstream = None
    if dloss is not None and choices.reduction == "none":
        upstream = _extended(max_ops.cast(dloss, wide), padded, 0.0)
    states = [_zeros(wide, [padded], device)]
    if wanted:
        states += [_zeros(wide, shape, device) for shape in ([padded, features], [features, n])]
        if logits.bias is not None:
            states.append(_zeros(wide, [n], device))

    def body(first: TensorValue, losses: TensorValue, *sums: TensorValue) -> list[TensorValue]:
        taken, some = _part(hidden, first, step), _part(classes, first, step)
        z = logits.of(taken)
        of_rows, pairs = _losses(z, some, choices)
        after = [_stored(losses, of_rows, first)]
        if not wanted:
            return after
        scales = _ones(wide, step, device) if upstream is None else _part(upstream, first, step)
        options: dict[str, Any] = {"ignore_index": choices.ignore_index, "label_smoothing": choices.smoothing}
        dz = ops.cross_entropy_backward(z, some, pairs, scales, reduction="none", **options)
        dz = logits.through_cap(z, dz)
        after.append(_stored(sums[0], _product(dz, logits.weight, wide), first))
        # The transpose of the smaller of the two: the gradient is turned once, when all is added up.
        after.append(sums[1] + _product(max_ops.transpose(taken, 0, 1), dz, wide))
        if logits.bias is not None:
            after.append(sums[2] + max_ops.squeeze(max_ops.sum(max_ops.cast(dz, wide), axis=0), 0))
        return after

    losses, *sums = _loop(rows, step, padded, states, body)
    losses = _first(losses, rows)
    count = max_ops.sum(max_ops.cast(counts, wide), axis=0)
    loss = losses
    if choices.reduction != "none":
        # Of no loss at all the mean is NaN, as of no number.
        total = max_ops.sum(losses, axis=0)
        loss = max_ops.reshape(total / count if choices.reduction == "mean" else total, [])
    found = [max_ops.cast(loss, logits.hidden.dtype)]
    if not wanted:
        return found
    scale = _ones(wide, 1, device)
    if choices.reduction == "mean":
        scale = scale / max_ops.max(count, scale)
    if dloss is not None and upstream is None:
        scale = scale * max_ops.cast(dloss, wide)
    # Rows that do not count have gradients of 0.
    gradients = [_first(sums[0], rows), max_ops.transpose(sums[1], 0, 1), *sums[2:]]
    return found + [max_ops.cast(gradient * scale, logits.hidden.dtype) for gradient in gradients]


def token_log_probs(
    logits: Logits, tokens: TensorValue, temperature: float, entropy: bool, chunk: int | None
) -> list[TensorValue]:
    """Returns the logarithms, (rows, k) as the tokens, and the entropies, (rows,), if they are wanted."""
    wide, device, rows = logits.wide, logits.hidden.device, logits.hidden.shape[0]
    step = chunk_of(logits, chunk)
    padded = _padded(rows, step)
    hidden, chosen = _extended(logits.hidden, padded, 0.0), _extended(tokens, padded, 0)
    states = [_zeros(wide, shape, device) for shape in ([padded, tokens.shape[1]], [padded])[: 1 + entropy]]

    def body(first: TensorValue, *states: TensorValue) -> list[TensorValue]:
        z = logits.of(_part(hidden, first, step))
        found = ops.token_log_probs(z, _part(chosen, first, step), temperature=temperature, entropy=entropy)
        results = found if isinstance(found, tuple) else (found,)
        return [_stored(state, result, first) for state, result in zip(states, results, strict=True)]

    return [_first(state, rows) for state in _loop(rows, step, padded, states, body)]


def _losses(z: TensorValue, classes: TensorValue, choices: Choices) -> tuple[TensorValue, TensorValue]:
    """Returns the losses of rows in the dtype of the arithmetic, and the pairs that the gradient takes."""
    wide = accumulator(z.dtype)
    log_probs, sums = ops._log_probs_and_sums(z, classes)
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
    """Returns a matrix product in the dtype of its arithmetic."""
    if a.dtype == wide:
        return max_ops.matmul(a, b)
    # The function has no argument for it, but the op of that name has.
    type = TensorType(wide, [a.shape[0], b.shape[1]], a.device)
    parameters = {"transpose_b": False, "packed_b": False}
    (product,) = max_ops.custom("mo.matmul", device=a.device, values=[a, b], out_types=[type], parameters=parameters)
    return product.tensor


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


def _extended(x: TensorValue, padded: Dim, value: float) -> TensorValue:
    """Returns a tensor with as many more rows as fill chunks."""
    rows, rest = x.shape[0], list(x.shape[1:])
    if rows == padded:
        return x
    more = max_ops.broadcast_to(max_ops.constant(value, x.dtype, x.device), [padded - rows, *rest])
    return max_ops.rebind(max_ops.concat([x, more], axis=0), [padded, *rest])


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
