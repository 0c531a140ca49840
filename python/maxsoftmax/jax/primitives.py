"""The ops of the libraries as primitives of JAX: their types, what a batch of them is, and how XLA calls them.

An op takes logits, results or gradients of their shape, and arrays that have one element a row, or a pair. What is true
of all ops follows from which array is of which kind: a batch is one more dimension, of rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from maxsoftmax import _native
from maxsoftmax._native import load

WHOLE, ROW, PAIR = "whole", "row", "pair"
"""Of the shape of the logits; of that without the axis; of that with two accumulators for each row."""

KINDS = {
    "softmax": ((WHOLE,), (WHOLE,)),
    "log_softmax": ((WHOLE,), (WHOLE,)),
    "sparsemax": ((WHOLE,), (WHOLE,)),
    "softmax_backward": ((WHOLE, WHOLE), (WHOLE,)),
    "log_softmax_backward": ((WHOLE, WHOLE), (WHOLE,)),
    "sparsemax_backward": ((WHOLE, WHOLE), (WHOLE,)),
    "statistics": ((WHOLE,), (ROW,)),
    "cross_entropy": ((WHOLE, ROW), (ROW, PAIR)),
    "cross_entropy_backward": ((WHOLE, PAIR, ROW, ROW), (WHOLE,)),
}
"""The libraries that XLA calls, and what they take and return; of `statistics`, logsumexp alone."""

PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
"""Where the kernels compute, as JAX and as XLA call it."""

CHOICES = (128, 4)
"""What `load.functions` is told of kernels that leave nothing to the caller."""


def bind(name: str, *arrays: Any, axis: int, options: tuple[int, ...] = ()) -> Any:
    """Returns what an op makes of arrays, under any transformation but differentiation: one result, or several.

    Args:
        name: One of `KINDS`.
        arrays: Of its kinds: the logits, or what is of their shape, first.
        axis: The axis of the logits, counted from 0.
        options: What the library is told beside.
    """
    if arrays[0].size:
        results = _primitives[name].bind(*arrays, axis=axis, options=options)
    else:
        # Of rows of nothing the maximum is -inf, and so is logsumexp; anything else has no elements.
        results = [jnp.full(r.shape, -np.inf, r.dtype) for r in _results(name, arrays[0], axis)]
    return results[0] if len(results) == 1 else tuple(results)


def _results(name: str, x: Any, axis: int) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the results for logits."""
    wide = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    return [
        jax.ShapeDtypeStruct(_of(x.shape, axis, kind, 2), wide if kind == PAIR else x.dtype) for kind in KINDS[name][1]
    ]


def _of(whole: Sequence[Any], axis: int, kind: str, pair: Any) -> tuple[Any, ...]:
    """Returns a shape, or whatever there is for each dimension, of a kind of array."""
    if kind == WHOLE:
        return tuple(whole)
    rows = (*whole[:axis], *whole[axis + 1 :])
    return rows if kind == ROW else (*rows, pair)


def _types(name: str, x: Any, *others: Any, axis: int, options: tuple[int, ...]) -> list[Any]:
    """Returns the types of the results, on the mesh of the logits and divided as they are."""
    found = []
    for kind, result in zip(KINDS[name][1], _results(name, x, axis), strict=True):
        spec = jax.sharding.PartitionSpec(*_of(x.sharding.spec, axis, kind, None))
        sharding = jax.sharding.NamedSharding(x.sharding.mesh, spec)
        found.append(x.update(shape=result.shape, dtype=result.dtype, weak_type=False, sharding=sharding))
    return found


def _batched(
    name: str, arrays: Sequence[Any], dims: Sequence[int | None], *, axis: int, options: tuple[int, ...]
) -> Any:
    """Returns the results of a batch, whose dimension stays where it is among those of the logits."""
    taken, returned = KINDS[name]
    size = next(array.shape[dim] for array, dim in zip(arrays, dims, strict=True) if dim is not None)
    place = dims[0] if dims[0] is not None else 0
    axis += place <= axis
    places = {WHOLE: place, ROW: place - (place > axis), PAIR: place - (place > axis)}
    placed = [
        jnp.broadcast_to(jnp.expand_dims(array, to), (*array.shape[:to], size, *array.shape[to:]))
        if dim is None
        else jnp.moveaxis(array, dim, to)
        for array, dim, to in zip(arrays, dims, (places[kind] for kind in taken), strict=True)
    ]
    results = bind(name, *placed, axis=axis, options=options)
    return results if isinstance(results, tuple) else [results], [places[kind] for kind in returned]


def _called(name: str, platform: str, *arrays: Any, axis: int, options: tuple[int, ...]) -> list[Any]:
    """Returns the results on a platform, as XLA computes them: by a call of the library."""
    x = arrays[0]
    n, inner = x.shape[axis], math.prod(x.shape[axis + 1 :])
    results: list[Any] = _results(name, x, axis)
    target = _target(name, x.dtype.name, platform)
    count = len(results)
    if platform != "cpu":
        rows = math.prod(x.shape[:axis]), n, inner
        plans = [_native.plan(name, x.dtype.name, device, rows, options) for device in _devices(platform)]
        results.append(jax.ShapeDtypeStruct((max(plan.scratch for plan in plans),), np.uint8))
    call = jax.ffi.ffi_call(target, results)
    return list(call(*arrays, call=np.array([n, inner, *options], np.int64))[:count])


@functools.cache
def _target(name: str, dtype: str, platform: str) -> str:
    """Returns what XLA calls the library of an op, which is built (seconds) unless that was done before."""
    # All devices are opened now: XLA has nobody to do it when it computes.
    found = [load.functions(name, dtype, device, "auto", CHOICES) for device in _devices(platform)]
    target = f"maxsoftmax_{name}_{dtype}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(found[0].xla), platform=PLATFORMS[platform])
    return target


def _devices(platform: str) -> list[int]:
    """Returns the devices that a platform may compute on, as libraries count them."""
    if platform == "cpu":
        return [-1]
    return [device.local_hardware_id for device in jax.local_devices(backend=platform)]


def _refuse(name: str, context: Any, *arrays: Any, **options: Any) -> NoReturn:
    platforms = ", ".join(context.module_context.platforms)
    raise NotImplementedError(f"{name} of maxsoftmax.jax computes on CPUs and CUDA devices, not on {platforms}")


def _primitive(name: str) -> Primitive:
    primitive = Primitive(f"maxsoftmax_{name}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(functools.partial(_types, name))
    primitive.def_impl(jax.jit(primitive.bind, static_argnames=("axis", "options")))
    batching.primitive_batchers[primitive] = functools.partial(_batched, name)
    mlir.register_lowering(primitive, functools.partial(_refuse, name))
    for platform in PLATFORMS:
        lowered = mlir.lower_fun(functools.partial(_called, name, platform), multiple_results=True)
        mlir.register_lowering(primitive, lowered, platform=platform)
    return primitive


_primitives = {name: _primitive(name) for name in KINDS}
