"""What a graph spells out around its softmaxes, as in cast(softmax(where(keep, cast(x) * 0.125, -inf))).

`drop_into` hands it over to the kernels: what is masked by positions is then not read, and elements are read and kept
as they lie in memory. Only what computes the same is taken: bools for -inf, not for large finite numbers, and casts
that lose nothing before the last. Products and sums of 16 bits are not rounded any more before the softmax.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from max._core import Block, Operation
from max._core import Value as MlirValue
from max._core.dialects import mo, rmo
from max.driver import Accelerator, accelerator_count
from max.dtype import DType
from max.graph import DeviceRef, Graph, StaticDim, TensorValue

from maxsoftmax._forms import broadcasts
from maxsoftmax._graph.causal import causal
from maxsoftmax._graph.values import constant, lies, tensor
from maxsoftmax.ops._formed import counts, spelled_softmax

FEW = 256
"""Keys up to which what MAX fuses is faster than a mask of floats by name."""

SHARING = ("sm_90", "sm_100", "sm_103")
"""GPUs with clusters of 16 blocks and 228 KiB of shared memory a multiprocessor."""

NARROW = (DType.bfloat16, DType.float16)
"""Dtypes whose numbers are numbers of float32, too."""


class Cut(NamedTuple):
    """Which keys a query sees."""

    from_start: bool
    """Whether queries and keys are counted from the first, not from the last."""
    beyond: int
    """How many keys after its own."""


class Masks(NamedTuple):
    """What leaves out elements, or is added to them."""

    cut: Cut | None = None
    keep: TensorValue | None = None
    """A tensor of bools in memory, True where an element takes part."""
    added: TensorValue | None = None
    """A tensor of floats in memory, instead of both."""
    factor: float = 1.0
    """What it is multiplied by."""

    @property
    def any(self) -> bool:
        """Whether there is anything that does."""
        return self.cut is not None or self.keep is not None or self.added is not None


class Spelled(NamedTuple):
    """A softmax and what is computed around it."""

    x: TensorValue
    scale: float
    masks: Masks
    dtype: DType
    """That of the results which are used."""


def take_over(graph: Graph) -> int:
    """Has the kernels compute what a graph spells out around its softmaxes, and returns of how many."""
    block = Block._from_cmlir(graph._graph_body)
    softmaxes = [op for op in block if isinstance(op, rmo.MoReduceSoftmaxOp)]
    if not softmaxes:
        return 0
    users = _users(block)
    # What was replaced is left to MAX, as what nobody uses.
    used = (op for op in softmaxes if users[op.results[0]])
    found = [(op, spelled) for op in used if (spelled := _found(op, users[op.results[0]]))]
    if not found:
        return 0
    results = {}
    first, *_, end = block
    # Behind a graph's output nothing can be added.
    end.move_after(first)
    try:
        with graph:
            for op, spelled in found:
                before = len(block)
                axis = op.axis % spelled.x.rank
                y = spelled_softmax(spelled.x, axis, spelled.dtype, spelled.scale, **spelled.masks._asdict())
                last = op
                for added in list(block)[before:]:
                    added.move_after(last)
                    last = added
                casts = spelled.dtype != tensor(op.results[0]).dtype
                for replaced in users[op.results[0]] if casts else [op]:
                    results[replaced.results[0]] = y._mlir_value
    finally:
        end.move_after(list(block)[-1])
    for op in _operations(block):
        for operand in _operands(op):
            if operand.value in results:
                operand.value = results[operand.value]
    return len(found)


def _operations(block: Block) -> Iterator[Any]:
    for op in block:
        yield op
        for region in op.regions:
            yield from _operations(region.front)


def _operands(op: Any) -> Any:
    """Returns an op's operands, also of those that have something else of that name."""
    return Operation.operands.__get__(op)


def _users(block: Block) -> defaultdict[MlirValue, list[Any]]:
    """Returns which ops use each value, but for those whose own results nobody uses."""
    users = defaultdict(list)
    for op in _operations(block):
        if not op.results or any(result.num_uses for result in op.results):
            for operand in _operands(op):
                users[operand.value].append(op)
    return users


def _found(softmax: Any, users: list[Any]) -> Spelled | None:
    """Returns what a softmax is of: with a mask that is added or, where that is not to be had, without."""
    return _spelled(softmax, users, adds=True) or _spelled(softmax, users, adds=False)


def _spelled(softmax: Any, users: list[Any], adds: bool) -> Spelled | None:
    """Returns what a softmax is of, if there is something around it that the kernels had better know of.

    Args:
        softmax: The op.
        users: What uses its results.
        adds: Whether masks that are added are looked for.
    """
    result = tensor(softmax.results[0])
    axis = softmax.axis % result.rank
    if not counts(axis, result.rank):
        return None
    value, scale, masks = softmax.operands[0].value, 1.0, Masks()
    while True:
        inner, factor = _unscaled(value)
        if inner is value and _is_widened(value):
            inner = value.owner.operands[0].value
        if inner is value and isinstance(value.owner, rmo.SelectOp) and masks.added is None:
            inner, masks = _unmasked(value, result, axis, masks)
        if inner is value and adds and isinstance(value.owner, rmo.AddOp) and not masks.any:
            inner, masks = _without_mask(value, result, axis, scale)
        if inner is value or not 1e-30 < scale * factor < 1e30:
            break
        value, scale = inner, scale * factor
    x, dtype = tensor(value), _used_dtype(result.dtype, users)
    narrowed = x.dtype == dtype != result.dtype
    if masks.any and not masks.cut and not takes_alone(result.device):
        return None
    if masks.added is not None and (
        masks.added.dtype not in (DType.float32, x.dtype) or not 1e-30 < scale / masks.factor < 1e30
    ):
        return None
    # What MAX computes as it is read had to be written to memory, for the kernels that scale and mask.
    fast = masks.cut or lies(value) or (scale == 1.0 and not masks.any)
    scaled = scale != 1.0 and takes_alone(result.device)
    if list(x.shape) != list(result.shape) or not fast or not (masks.any or narrowed or scaled):
        return None
    return Spelled(x, scale, masks, dtype)


def takes_alone(device: DeviceRef) -> bool:
    """Returns whether the kernels are faster with a mask in memory or a factor alone than with what MAX fuses."""
    # Bools took two cores 0.8 to 1.5 of the time.
    return bool(device.is_gpu())


def shares_masks(device: DeviceRef) -> bool:
    """Returns whether a mask that rows share is read once for several of them, as far as is known of the device."""
    if not device.is_gpu() or device.id >= accelerator_count():
        return True
    return bool(Accelerator(device.id).architecture_name.startswith(SHARING))


def _used_dtype(dtype: DType, users: list[Any]) -> DType:
    """Returns the dtype that results are used in: another than float32 if all that uses them are casts to that."""
    dtypes = {tensor(op.results[0]).dtype if isinstance(op, mo.CastOp) else dtype for op in users}
    other = dtypes.pop()
    return other if dtype == DType.float32 and other in NARROW and not dtypes else dtype


def _is_widened(value: MlirValue) -> bool:
    """Returns whether a tensor is one of other numbers that float32 has, too, cast to it."""
    narrow = isinstance(value.owner, mo.CastOp) and tensor(value.owner.operands[0].value).dtype in NARROW
    return narrow and tensor(value).dtype == DType.float32


def _unscaled(value: MlirValue) -> tuple[MlirValue, float]:
    """Returns what is multiplied by a positive number, or divided, and the factor."""
    if not isinstance(value.owner, (rmo.MulOp, rmo.DivOp)):
        return value, 1.0
    left, right = (operand.value for operand in value.owner.operands)
    divided = isinstance(value.owner, rmo.DivOp)
    number = constant(right)
    if number is None and not divided:
        left, number = right, constant(left)
    if not number or not 1e-30 < number < 1e30:
        return value, 1.0
    factor = 1 / number if divided else number
    # What is too large for float16 is infinite, and has to stay so.
    return (value, 1.0) if factor > 1 and tensor(value).dtype == DType.float16 else (left, factor)


def _unmasked(value: MlirValue, result: TensorValue, axis: int, masks: Masks) -> tuple[MlirValue, Masks]:
    """Returns what a `where` takes that is not -inf, and masks with its own; as they were if it is not known."""
    condition, *cases = (operand.value for operand in value.owner.operands)
    for inverted, (logits, low) in enumerate((cases, reversed(cases))):
        if constant(low) == -np.inf:
            both = _masks(condition, bool(inverted), result, axis, masks)
            return (logits, both) if both else (value, masks)
    return value, masks


def _without_mask(value: MlirValue, result: TensorValue, axis: int, factor: float) -> tuple[MlirValue, Masks]:
    """Returns what a mask of floats in memory is added to, and that mask; the sum and none if it is none."""
    few = isinstance(result.shape[-1], StaticDim) and int(result.shape[-1]) <= FEW
    # What is too large for float16 is infinite: sums of it have to stay so.
    if not few and tensor(value).dtype != DType.float16 and shares_masks(result.device):
        for logits, other in itertools.permutations(operand.value for operand in value.owner.operands):
            mask = other
            while isinstance(mask.owner, rmo.BroadcastToOp) or _is_widened(mask):
                mask = mask.owner.operands[0].value
            whole = [list(tensor(operand).shape) == list(result.shape) for operand in (logits, mask)]
            # Of two tensors of the shape of the results neither is a mask.
            if whole == [True, False] and _is_mask(mask, result, axis):
                return logits, Masks(added=tensor(mask), factor=factor)
    return value, Masks()


def _masks(condition: MlirValue, inverted: bool, result: TensorValue, axis: int, masks: Masks) -> Masks | None:
    """Returns masks with what a condition, or its opposite, leaves out, if the kernels know all of it."""
    for part, opposite in _parts(condition, inverted):
        cut, keep = _cut(part, opposite, result, axis), _keep(part, opposite, result, axis)
        if cut and masks.cut is None:
            masks = masks._replace(cut=cut)
        elif keep is not None and masks.keep is None:
            masks = masks._replace(keep=keep)
        else:
            return None
    return masks


def _parts(condition: MlirValue, inverted: bool) -> Iterator[tuple[MlirValue, bool]]:
    """Returns the tensors of bools, or their opposites, that are all True where a condition, or its opposite, is."""
    op = condition.owner
    if isinstance(op, rmo.MoNotOp):
        yield from _parts(op.operands[0].value, not inverted)
    elif isinstance(op, rmo.OrOp if inverted else rmo.AndOp):
        for operand in op.operands:
            yield from _parts(operand.value, inverted)
    elif isinstance(op, rmo.BroadcastToOp):
        # What it has fewer dimensions of, the kernels broadcast.
        yield from _parts(op.operands[0].value, inverted)
    else:
        yield condition, inverted


def _cut(condition: MlirValue, inverted: bool, result: TensorValue, axis: int) -> Cut | None:
    """Returns which keys a query sees if that is what a condition, or its opposite, says."""
    along = (axis - 1 - result.rank, axis - result.rank)
    said = causal(condition, inverted) if axis > 0 else None
    if not said or (said.query, said.key) != along:
        return None
    queries, keys = (result.shape[dim] for dim in along)
    if [tensor(condition).shape[dim] for dim in along] != [queries, keys]:
        return None
    for from_start, beyond in ((True, said.beyond), (False, said.beyond - (keys - queries))):
        if isinstance(beyond, StaticDim):
            return Cut(from_start, int(beyond))
    return None


def _keep(condition: MlirValue, inverted: bool, result: TensorValue, axis: int) -> TensorValue | None:
    """Returns a condition if it is a mask as the kernels are fast with: in memory, a bool for each element of a row."""
    return tensor(condition) if not inverted and _is_mask(condition, result, axis) else None


def _is_mask(value: MlirValue, result: TensorValue, axis: int) -> bool:
    """Returns whether a tensor is in memory and has an element for each of a row along the last axis."""
    mask = tensor(value)
    fits = mask.rank > 0 and mask.shape[-1] == result.shape[-1] and broadcasts(mask.shape, result.shape)
    return fits and axis == result.rank - 1 and lies(value)
