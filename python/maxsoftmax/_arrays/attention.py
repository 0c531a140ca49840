"""Softmax of arrays with a scale, masks, a temperature or a sink."""

from __future__ import annotations

from typing import Any

import numpy as np

from maxsoftmax import _forms as forms
from maxsoftmax import _native
from maxsoftmax._arguments import is_number, normalize_axis, told_out
from maxsoftmax._arrays import devices, shortcuts
from maxsoftmax._arrays.broadcast import OUTER, Dimensions, Walk, merged, steps
from maxsoftmax._arrays.call import AUTO, Call, Chosen
from maxsoftmax._arrays.layout import Rows
from maxsoftmax._arrays.memory import SIZES, Array, accumulator, address, product
from maxsoftmax._arrays.shortcuts import is_home
from maxsoftmax._forms import Forms

OPERANDS = ("scale", "mask", "temperature", "sink")
"""What may be an array, in the order in which the library takes them."""

KINDS = {"float32": 1, "bfloat16": 2, "float16": 3, "float64": 4, "bool": 5}
"""What the library calls dtypes."""

ABSENT, NUMBER = 0, 6
"""What it calls what is not there, and a number."""

NUMBERS = (float, int, np.float32, np.float64)
"""Types of numbers by which calls are told apart."""

_known = shortcuts.Known("softmax_forms")


def softmax(x: Any, axis: Any, wanted: Forms, device: Any, chosen: Chosen, *, out_dtype: Any, out_scale: Any) -> Any:
    """Returns softmax of what `wanted` makes of an array: see `maxsoftmax.softmax`."""
    key = None
    if type(x) is np.ndarray and chosen is AUTO and (device is None or is_home(device)):
        key = _key(x, axis, wanted, told_out(out_dtype, out_scale))
        again = _known.get(key)
        found = again(x, wanted.scale, wanted.mask, wanted.temperature, wanted.sink) if again is not None else None
        if found is not None:
            return found
    call = Call(x, "x", device)
    shape = call.x.shape
    if not shape:
        raise ValueError("x has rank 0, but softmax needs an axis: reshape it to rank 1 first")
    place = normalize_axis(axis, len(shape), "an integer where scale, mask, causal, temperature or sink is given")
    algorithm = call.chosen(chosen).algorithm
    forms.check(wanted, place, algorithm)
    call.write(out_dtype, out_scale, algorithm)
    numbers, arrays = _operands(call, wanted, place)
    if call.x.size == 0:
        return call.nothing()
    laid, layout = call.walked(call.x, (place,))
    if not Walk.of(shape, layout, place, wanted.causal).is_possible:
        # In C order queries come right before keys.
        laid, layout = call.walked(devices.copied(call.x, range(len(shape))), (place,))
    walk = Walk.of(shape, layout, place, wanted.causal)
    taken, dims = _fitted(call, arrays, walk, place, wanted.causal)
    y = call.empty(call.out_dtype, shape, layout.order)
    rows = Rows(product(dims.shape[:OUTER]), *dims.shape[OUTER:])
    pointers = [y, laid, *(taken.get(name) for name in OPERANDS)]
    options = (*_options(wanted, numbers, taken, dims), *call.out_options)
    plan = call.run(_known.library, rows, options, pointers)
    result = call.result(y)
    if key is not None and call.is_plain((x, laid), *((getattr(wanted, name), taken[name]) for name in taken)):
        _known.learn(key, _again(plan, laid.dtype, taken, result.nbytes, call.made(result)))
    return result


def _operands(call: Call, wanted: Forms, place: int) -> tuple[dict[str, float], dict[str, Array]]:
    """Returns the numbers and the arrays among the arguments, by name."""
    shape = call.x.shape
    rows = (*shape[:place], 1, *shape[place + 1 :])
    wide = accumulator(call.x.dtype)
    numbers, arrays = {}, {}
    for name in OPERANDS:
        value = getattr(wanted, name)
        if is_number(value):
            numbers[name] = float(value)
        elif value is not None:
            array = call.operand(value, name)
            # The library reads what it computes with, what logits are of, and bools.
            known = array.dtype in (wide, call.x.dtype, "bool")
            arrays[name] = array if known else devices.cast(array, wide)
            forms.check_shape(name, arrays[name].shape, rows if name == "sink" else shape)
    return numbers, arrays


def _fitted(
    call: Call, arrays: dict[str, Array], walk: Walk, place: int, causal: bool
) -> tuple[dict[str, Array], Dimensions]:
    """Returns arrays where they are computed with, as they lie or copied, so that six dimensions can tell of them."""
    rank = len(walk.shape)
    taken = {name: call.sent(_thick(array, walk)) for name, array in arrays.items()}
    # What has the most elements takes the least to be made whole.
    rest = sorted(taken, key=lambda name: taken[name].size)
    while True:
        found = merged(walk, [steps(array, rank) for array in taken.values()], causal)
        if found is not None:
            return taken, found
        name = rest.pop()
        whole = [1 if name == "sink" and i == place else size for i, size in enumerate(walk.shape)]
        taken[name] = call.sent(devices.expanded(taken[name], whole, walk.order))


def _thick(array: Array, walk: Walk) -> Array:
    """Returns an array that is read like the logits: neighbours with neighbours, and none backwards."""
    rank = len(walk.shape)
    own = steps(array, rank)
    if walk.inmost is None or (own[walk.inmost] in (0, 1) and min(own) >= 0):
        return array
    missing = rank - len(array.shape)
    return devices.copied(array, [i - missing for i in walk.order if i >= missing])


def _options(wanted: Forms, numbers: dict[str, float], arrays: dict[str, Array], dims: Dimensions) -> tuple[int, ...]:
    """Returns what the library is told beside the rows."""
    strides = dict(zip(arrays, dims.strides, strict=True))
    kinds = [
        NUMBER if name in numbers else KINDS[arrays[name].dtype] if name in arrays else ABSENT for name in OPERANDS
    ]
    return (
        int(wanted.causal),
        int(wanted.masked),
        *kinds,
        *(_native.bits(numbers.get(name, 0.0)) for name in OPERANDS),
        *dims.shape,
        *(step for name in OPERANDS for step in strides.get(name, (0,) * len(dims.shape))),
    )


def _key(x: np.ndarray, axis: Any, wanted: Forms, out: Any) -> Any:
    """Returns what tells a call apart, or None if nobody should look for another one like it."""
    scale, mask, causal, temperature, sink = wanted
    if type(axis) is not int or type(causal) is not bool:
        return None
    told = _told(scale), _told(mask), _told(temperature), _told(sink)
    return None if "other" in told else (x.dtype, x.shape, x.strides, axis, causal, told, out)


def _told(value: Any) -> Any:
    """Returns what tells an argument apart: of an array not its elements."""
    if value is None:
        return None
    if type(value) is np.ndarray:
        return value.dtype, value.shape, value.strides
    return float(value) if type(value) in NUMBERS else "other"


def _again(plan: _native.Plan, dtype: str, arrays: dict[str, Array], size: int, out: Any) -> shortcuts.Again:
    """Returns what computes the same of other arrays of NumPy."""
    run, call, fail, odd = plan.run, plan.call, _native.fail, SIZES[dtype] - 1
    at, empty_like = address, shortcuts.like(out, size)
    odds = [(i, SIZES[arrays[name].dtype] - 1) for i, name in enumerate(OPERANDS) if name in arrays]

    def again(x: np.ndarray, *given: Any) -> np.ndarray | None:
        _ = plan
        source, places = at(x), [0, 0, 0, 0]
        if source & odd:
            return None
        for i, odd_of_it in odds:
            place = places[i] = at(given[i])
            if place & odd_of_it:
                return None
        y = empty_like(x)
        error = run(call, 0, at(y), source, *places, 0)
        if error:
            fail(error)
        return y

    return again
