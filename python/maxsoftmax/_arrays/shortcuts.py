"""Calls like one that came before: found by what tells calls apart, and made without looking at anything again.

What is remembered is a function of the same arrays that returns the result; or None, where after all this is not a call
like that one, because memory begins where no element should.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from maxsoftmax import _native
from maxsoftmax._arguments import are_several
from maxsoftmax._arrays import devices, reused
from maxsoftmax._arrays.layout import inverse
from maxsoftmax._arrays.memory import HOST, SIZES, Array, address, product

Again = Callable[..., Any]

MOST = 1024
"""Calls that are remembered at a time, of each function."""


class Known(dict[Any, Again]):
    """The calls of a function that are remembered, by what tells them apart."""

    everywhere: ClassVar[list[Known]] = []

    def __init__(self, library: str) -> None:
        """Remembers nothing yet.

        Args:
            library: The native library that computes the function.
        """
        super().__init__()
        self.library = library
        self.everywhere.append(self)

    def learn(self, key: Any, again: Again) -> None:
        """Remembers a call."""
        if len(self) >= MOST:
            self.clear()
        self[key] = again


def forget() -> None:
    """Forgets all calls."""
    for known in Known.everywhere:
        known.clear()


# A plan may be another one in a fork.
os.register_at_fork(after_in_child=forget)


_buffer: Any = None
"""The type `max.driver.Buffer`, from when somebody passes one."""


def know_buffers() -> None:
    """Has calls with `max.driver.Buffer`s remembered, now that there is one."""
    global _buffer  # noqa: PLW0603 (it is found out once)
    _buffer = sys.modules["max.driver"].Buffer


def of_buffers(given: Sequence[Any], device: Any, others: Any) -> Any:
    """Returns what tells a call with buffers apart from others, or None if there are arrays of another kind.

    Args:
        given: The arrays.
        device: Where to compute, as the caller has it.
        others: What else there is.
    """
    if device is not None or others is None or not all(type(x) is _buffer and x.is_contiguous for x in given):
        return None
    return (others, *[(x.dtype, x.shape, x.device) for x in given])


def spelled(axis: Any) -> Any:
    """Returns an axis as it is looked for: one integer, several, or None for all; what is none of these is itself.

    True equals 1, and is refused all the same.
    """
    if type(axis) is tuple or are_several(axis):
        found = [a if type(a) is int else _integer(a) for a in axis]
        return ("all of", *found)
    return _integer(axis)


def _integer(axis: Any) -> Any:
    with contextlib.suppress(TypeError):
        if type(axis) is not bool:
            return operator.index(axis)
    return "never"


def is_home(device: Any) -> bool:
    """Returns whether an argument names the CPU, where arrays of NumPy are anyway."""
    return type(device) is str and device == "cpu"


def discard(error: int) -> None:
    """Releases the text of an error that will be met again, and told better, on the long way."""
    with contextlib.suppress(ValueError, RuntimeError):
        _native.fail(error)


def along(plan: _native.Plan, dtype: str, size: int, out: Any = None) -> Again:
    """Returns what computes an op like softmax: one array in, one of the same shape and layout out.

    Args:
        plan: What computes it.
        dtype: The name of the dtype of the array.
        size: Bytes of the result.
        out: The result's dtype, None for the same.
    """
    run, call, fail, odd = plan.run, plan.call, _native.fail, SIZES[dtype] - 1
    at, empty_like = address, like(out, size)

    def again(x: np.ndarray) -> np.ndarray | None:
        _ = plan
        source = at(x)
        if source & odd:
            return None
        y = empty_like(x)
        error = run(call, 0, at(y), source, 0)
        if error:
            fail(error)
        return y

    return again


def like(out: Any, size: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns what makes an array like another one.

    Args:
        out: Its dtype, None for the same.
        size: Bytes of each.
    """
    make: Callable[..., np.ndarray] = np.empty_like if size < reused.LARGE else reused.array_like
    return make if out is None else functools.partial(make, dtype=out)


def buffers(plan: _native.Plan, outs: Sequence[Array], ins: Sequence[Array], order: Sequence[int]) -> Again:
    """Returns what computes any op of buffers of MAX.

    Args:
        plan: What computes it.
        outs: The results of the call before.
        ins: What it computed them of; a result that is also here is written to where it is.
        order: For each pointer after those of results, which of the arguments it is, counted from 0; -1 for none.

    Returns:
        A function of the arguments that returns all results.
    """
    from max.driver import Buffer

    run, call, number = plan.run, plan.call, ins[0].device
    place, scratch = devices.of(number), plan.scratch
    stream = 0 if number == HOST else devices.queue(number)
    main, byte = place.default_queue, devices.dtype("uint8")
    makers = [
        None if any(out is array for array in ins) else devices.maker(out.owner.dtype, out.shape, number)
        for out in outs
    ]
    odds = [SIZES[array.dtype] - 1 for array in ins]

    def again(*given: Any) -> Any:
        _ = plan
        places = [x._data_ptr() for x in given]
        if any(where & odd for where, odd in zip(places, odds, strict=True)):
            return None
        if number == HOST:
            devices.settle()
        elif any(x.stream != main for x in given):
            return None
        made = [given[0] if maker is None else maker() for maker in makers]
        memory = Buffer(byte, (scratch,), place) if scratch else None
        told = [*[y._data_ptr() for y in made], *[0 if i < 0 else places[i] for i in order]]
        error = run(call, stream, *told, memory._data_ptr() if memory is not None else 0)
        return tuple(made) if not error else discard(error)

    return again


def first(again: Again) -> Again:
    """Returns what returns the only result of another one."""

    def alone(*given: Any) -> Any:
        found = again(*given)
        return None if found is None else found[0]

    return alone


def backward(plan: _native.Plan, dtype: str, size: int) -> Again:
    """Returns what computes a gradient: two arrays in, one of the same shape and layout and as many bytes out."""
    run, call, fail, odd = plan.run, plan.call, _native.fail, SIZES[dtype] - 1
    at, empty_like = address, like(None, size)

    def again(y: np.ndarray, dy: np.ndarray) -> np.ndarray | None:
        _ = plan
        first, second = at(y), at(dy)
        if (first | second) & odd:
            return None
        dx = empty_like(y)
        error = run(call, 0, at(dx), first, second, 0)
        if error:
            fail(error)
        return dx

    return again


def maker(dtype: Any, shape: Sequence[int], order: Sequence[int]) -> Callable[[], np.ndarray]:
    """Returns what makes arrays whose dimensions lie in an order."""
    laid, back = tuple(shape[i] for i in order), inverse(order)
    dtype = np.dtype(dtype)
    if product(laid) * dtype.itemsize >= reused.LARGE:
        return lambda: reused.array(shape, dtype, order)
    if back == tuple(range(len(back))):
        return lambda: np.empty(laid, dtype)
    return lambda: np.empty(laid, dtype).transpose(back)


def reduced(plan: _native.Plan, dtype: str, empty: Callable[[], np.ndarray], planes: bool) -> Again:
    """Returns what computes one value a row, or with `planes` two, one array after the other."""
    run, call, fail, odd = plan.run, plan.call, _native.fail, SIZES[dtype] - 1
    at = address
    whole = (Ellipsis,) if empty().ndim > planes else ()

    def again(x: np.ndarray) -> Any:
        _ = plan
        source = at(x)
        if source & odd:
            return None
        out = empty()
        error = run(call, 0, at(out), source, 0)
        if error:
            fail(error)
        if planes:
            return out[0], out[1]
        return out if whole else out[()]

    return again
