"""Primitives of JAX that XLA computes by calls of the libraries, and those that are formulas around them.

Each takes and returns arrays of the kinds below, and the place of the axis among the dimensions of the first of them.
What is true of all of them follows from which array is of which kind: a batch is one more dimension, of rows.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from maxsoftmax import _native
from maxsoftmax._native import load
from maxsoftmax._native.description import SPECULATIVE

WHOLE, ROW, SUM, PAIR, SUMS, TOKENS, NOWHERE = "whole", "row", "sum", "pair", "sums", "tokens", "nowhere"
"""Of the shape of the logits; of that without the axis, in their dtype and in accumulators; of that with two, three and
as many elements for each row as there are tokens, in accumulators; what a library is not asked for."""


class Op(NamedTuple):
    """What a library does."""

    taken: tuple[str, ...]
    """The kinds of its arguments: the logits, or what is of their shape, first."""
    returned: tuple[str, ...]
    """The kinds of its results."""
    library: str
    """Its name."""
    overwritten: int | None = None
    """Which argument becomes the result, in its memory."""


OPS = {
    "softmax": Op((WHOLE,), (WHOLE,), "softmax"),
    "log_softmax": Op((WHOLE,), (WHOLE,), "log_softmax"),
    "sparsemax": Op((WHOLE,), (WHOLE,), "sparsemax"),
    "softmax_backward": Op((WHOLE, WHOLE), (WHOLE,), "softmax_backward"),
    "log_softmax_backward": Op((WHOLE, WHOLE), (WHOLE,), "log_softmax_backward"),
    "sparsemax_backward": Op((WHOLE, WHOLE), (WHOLE,), "sparsemax_backward"),
    "logsumexp": Op((WHOLE,), (ROW,), "statistics"),
    "max_sum": Op((WHOLE,), (PAIR,), "statistics"),
    "cross_entropy": Op((WHOLE, ROW), (ROW, PAIR), "cross_entropy"),
    "cross_entropy_backward": Op((WHOLE, PAIR, ROW, ROW), (WHOLE,), "cross_entropy_backward"),
    "cross_entropy_speculative": Op((WHOLE, ROW), (ROW, PAIR, WHOLE, SUM), "cross_entropy_speculative"),
    "cross_entropy_unforeseen": Op(
        (WHOLE, PAIR, ROW, ROW, WHOLE, SUM), (WHOLE,), "cross_entropy_unforeseen", overwritten=4
    ),
    "token_log_probs": Op((WHOLE, TOKENS), (TOKENS, NOWHERE, SUMS), "token_log_probs"),
    "token_log_probs_and_entropy": Op((WHOLE, TOKENS), (TOKENS, SUM, SUMS), "token_log_probs"),
    "token_log_probs_backward": Op((WHOLE, SUMS, TOKENS, TOKENS, NOWHERE), (WHOLE,), "token_log_probs_backward"),
    "token_log_probs_and_entropy_backward": Op(
        (WHOLE, SUMS, TOKENS, TOKENS, SUM), (WHOLE,), "token_log_probs_backward"
    ),
}
"""What XLA calls."""

OF_NOTHING = {"logsumexp": -math.inf, "token_log_probs": math.nan, "token_log_probs_and_entropy": math.nan}
"""What there is of a row without elements, if not 0."""

PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
"""Where the kernels compute, as JAX and as XLA call it."""

WORDS = 64
"""Words of 8 bytes that calls leave for later ones, as in `kept.mojo`."""

CHOICES = (128, 4)
"""What `load.functions` is told of kernels that leave nothing to the caller."""

primitives: dict[str, Primitive] = {}
"""All of them, by name."""

_kinds: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
"""What they take and return."""

_expected: list[Any] = []
"""The memory, an array a device, in which calls leave word for later ones. Like contexts it is never released."""

_expecting = threading.Lock()
"""Held while that is added to."""


def bind(name: str, *arrays: Any, axis: int, options: tuple[Any, ...] = ()) -> Any:
    """Returns what a primitive makes of arrays: one result, or several.

    Args:
        name: One of `primitives`.
        arrays: Of its kinds: the logits, or what is of their shape, first.
        axis: The axis of the logits, counted from 0.
        options: What the library is told beside, or the formula. With tokens, first how many a row has.
    """
    if arrays[0].size:
        results = primitives[name].bind(*_alike(arrays), axis=axis, options=options)
    else:
        results = [
            jnp.full(r.shape, OF_NOTHING.get(name, 0), r.dtype) for r in _results(name, arrays[0], axis, options)
        ]
    return results[0] if len(results) == 1 else tuple(results)


def varying(x: Any) -> frozenset[Any]:
    """Returns the axes of a mesh, under shard_map, along which an array may differ."""
    kind = jax.typeof(x)
    # Versions of JAX tell it one way or the other.
    found = getattr(kind, "vma", None) or getattr(getattr(kind, "manual_axis_type", None), "varying", None)
    return frozenset(found or ())


def spread(x: Any, axes: frozenset[Any]) -> Any:
    """Returns an array that may differ along axes of a mesh, too: its gradients of all devices then add up."""
    missing = tuple(sorted(axes - varying(x), key=str))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _alike(arrays: Sequence[Any]) -> list[Any]:
    """Returns arrays that may differ along the same axes of a mesh."""
    axes = frozenset().union(*map(varying, arrays))
    return [spread(array, axes) for array in arrays]


def accumulator(x: Any) -> Any:
    """Returns the dtype of accumulators."""
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


def _results(name: str, x: Any, axis: int, options: tuple[Any, ...]) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the results for logits."""
    return [
        jax.ShapeDtypeStruct(
            _of(x.shape, axis, kind, _each(kind, options)), x.dtype if kind in (WHOLE, ROW) else accumulator(x)
        )
        for kind in _kinds[name][1]
    ]


def _each(kind: str, options: tuple[Any, ...]) -> int:
    """Returns how many elements each row has, of a kind that has several."""
    return {PAIR: 2, SUMS: 3}.get(kind) or (options[0] if kind == TOKENS else 0)


def _of(whole: Sequence[Any], axis: int, kind: str, last: Any) -> tuple[Any, ...]:
    """Returns a shape, or whatever there is for each dimension, of a kind of array."""
    if kind == WHOLE:
        return tuple(whole)
    rows = (*whole[:axis], *whole[axis + 1 :])
    return rows if kind in (ROW, SUM) else (*rows, last)


def _types(name: str, x: Any, *others: Any, axis: int, options: tuple[Any, ...]) -> list[Any]:
    """Returns the types of the results, on the mesh of the logits and divided as they are."""
    found = []
    for kind, result in zip(_kinds[name][1], _results(name, x, axis, options), strict=True):
        spec = jax.sharding.PartitionSpec(*_of(x.sharding.spec, axis, kind, None))
        sharding = jax.sharding.NamedSharding(x.sharding.mesh, spec)
        found.append(x.update(shape=result.shape, dtype=result.dtype, weak_type=False, sharding=sharding))
    return found


def _batched(
    name: str, arrays: Sequence[Any], dims: Sequence[int | None], *, axis: int, options: tuple[Any, ...]
) -> Any:
    """Returns the results of a batch, whose dimension stays where it is among those of the logits."""
    taken, returned = _kinds[name]
    size = next(array.shape[dim] for array, dim in zip(arrays, dims, strict=True) if dim is not None)
    place = dims[0] if dims[0] is not None else 0
    axis += place <= axis
    places = [place if kind == WHOLE else place - (place > axis) for kind in (*taken, *returned)]
    placed = [
        jnp.broadcast_to(jnp.expand_dims(array, to), (*array.shape[:to], size, *array.shape[to:]))
        if dim is None
        else jnp.moveaxis(array, dim, to)
        for array, dim, to in zip(arrays, dims, places[: len(taken)], strict=True)
    ]
    results = bind(name, *placed, axis=axis, options=options)
    return results if isinstance(results, tuple) else [results], places[len(taken) :]


def _called(name: str, platform: str, *arrays: Any, axis: int, options: tuple[int, ...]) -> list[Any]:
    """Returns the results on a platform, as XLA computes them: by a call of the library."""
    op, x = OPS[name], arrays[0]
    n, inner = x.shape[axis], math.prod(x.shape[axis + 1 :])
    given, found = iter(arrays), iter(_results(name, x, axis, options))
    told = [jnp.zeros(0, x.dtype) if kind == NOWHERE else next(given) for kind in op.taken]
    results: list[Any] = [
        jax.ShapeDtypeStruct((0,), x.dtype) if kind == NOWHERE else next(found) for kind in op.returned
    ]
    target = _target(op.library, x.dtype.name, platform)
    if platform != "cpu":
        rows = math.prod(x.shape[:axis]), n, inner
        plans = [_native.plan(op.library, x.dtype.name, device, rows, options) for device in _devices(platform)]
        scratch = max(plan.scratch for plan in plans)
        if op.library in SPECULATIVE:
            _expect(platform, op.library, x.dtype.name)
        if scratch:
            results.append(jax.ShapeDtypeStruct((scratch,), np.uint8))
    aliases = None if op.overwritten is None else {op.overwritten: 0}
    call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
    returned = call(*told, call=np.array([n, inner, *options], np.int64))
    # Behind them is scratch memory.
    return [result for kind, result in zip(op.returned, returned, strict=False) if kind != NOWHERE]


@functools.cache
def _target(library: str, dtype: str, platform: str) -> str:
    """Returns what XLA calls a library, which is built (seconds) unless that was done before."""
    # All devices are opened now: XLA has nobody to do it when it computes.
    found = [load.functions(library, dtype, device, "auto", CHOICES) for device in _devices(platform)]
    target = f"maxsoftmax_{library}_{dtype}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(found[0].xla), platform=PLATFORMS[platform])
    return target


@functools.cache
def _expect(platform: str, library: str, dtype: str) -> None:
    """Gives each device memory in which calls leave word for later ones."""
    for device in jax.local_devices(backend=platform):
        # A context, which all libraries share, begins with its address.
        context = load.functions(library, dtype, device.local_hardware_id, "auto", CHOICES).context
        begin = ctypes.c_int64.from_address(context)
        with _expecting:
            if not begin.value:
                with jax.ensure_compile_time_eval():
                    words = jax.device_put(np.zeros(2 * WORDS, np.uint32), device).block_until_ready()
                _expected.append(words)
                begin.value = words.unsafe_buffer_pointer()


def _devices(platform: str) -> list[int]:
    """Returns the devices that a platform may compute on, as libraries count them."""
    if platform == "cpu":
        return [-1]
    return [device.local_hardware_id for device in jax.local_devices(backend=platform)]


def _refuse(name: str, context: Any, *arrays: Any, **options: Any) -> NoReturn:
    platforms = ", ".join(context.module_context.platforms)
    raise NotImplementedError(f"{name} of maxsoftmax.jax computes on CPUs and CUDA devices, not on {platforms}")


def _primitive(name: str, taken: tuple[str, ...], returned: tuple[str, ...]) -> Primitive:
    primitive = primitives[name] = Primitive(f"maxsoftmax_{name}")
    given, found = (tuple(kind for kind in kinds if kind != NOWHERE) for kinds in (taken, returned))
    _kinds[name] = given, found
    primitive.multiple_results = True
    primitive.def_abstract_eval(functools.partial(_types, name))
    primitive.def_impl(jax.jit(primitive.bind, static_argnames=("axis", "options")))
    batching.primitive_batchers[primitive] = functools.partial(_batched, name)
    return primitive


def formula(taken: tuple[str, ...], returned: tuple[str, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a primitive of a function of `jax.numpy`, whose name it has: one that is given derivatives of its own.

    Args:
        taken: The kinds of its arguments.
        returned: The kinds of its results.
    """

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        primitive = _primitive(function.__name__, taken, returned)
        computed = function if len(returned) > 1 else lambda *arrays, **how: [function(*arrays, **how)]
        mlir.register_lowering(primitive, mlir.lower_fun(computed, multiple_results=True))
        return functools.partial(bind, function.__name__)

    return made


def _speculative_on_cpu(x: Any, target: Any, *, axis: int, options: tuple[int, ...]) -> list[Any]:
    loss, pairs = bind("cross_entropy", x, target, axis=axis, options=options)
    return [loss, pairs, jnp.zeros_like(x), jnp.zeros(target.shape, accumulator(x))]


def _unforeseen_on_cpu(*arrays: Any, axis: int, options: tuple[int, ...]) -> list[Any]:
    return [bind("cross_entropy_backward", *arrays[:4], axis=axis, options=options)]


ELSEWHERE: dict[str, Callable[..., list[Any]]] = {
    "cross_entropy_speculative": _speculative_on_cpu,
    "cross_entropy_unforeseen": _unforeseen_on_cpu,
}
"""What there is on a CPU of what is for GPUs alone."""

for _name, _op in OPS.items():
    _made = _primitive(_name, _op.taken, _op.returned)
    mlir.register_lowering(_made, functools.partial(_refuse, _name))
    for _platform in PLATFORMS:
        _function: Callable[..., list[Any]] = functools.partial(_called, _name, _platform)
        if _platform == "cpu":
            _function = ELSEWHERE.get(_name, _function)
        mlir.register_lowering(_made, mlir.lower_fun(_function, multiple_results=True), platform=_platform)
