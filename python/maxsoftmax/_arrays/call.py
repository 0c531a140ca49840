"""One call: its arrays taken where they lie or brought to where they are computed with, and its results given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxsoftmax import _native
from maxsoftmax._arguments import Out, check_algorithm, check_block_size, check_out, check_unroll
from maxsoftmax._arrays import convert, devices, kinds, shortcuts
from maxsoftmax._arrays.layout import Layout, Rows, lay_out, order_to_copy, same_steps
from maxsoftmax._arrays.memory import HOST, Array, view


class Chosen(NamedTuple):
    """A caller's choice of algorithm."""

    algorithm: Any = "auto"
    block_size: Any = None
    unroll: Any = None


AUTO = Chosen()


class Call:
    """What is computed of arrays, the first of which says what kind of array comes back, and where."""

    def __init__(self, x: Any, name: str, device: Any) -> None:
        """Takes the first array.

        Args:
            x: What the caller passed.
            name: The argument's name.
            device: Where to compute; where `x` is if None.

        Raises:
            TypeError: If `x` is not an array of real numbers, or `device` not of its type.
            ValueError: If there is no such device.
        """
        self.given = x
        self.kind = kinds.of(x)
        if self.kind is kinds.BUFFERS:
            shortcuts.know_buffers()
        self.reader = self.kind.reader(x)
        self.x = convert.floats(x, name, self.reader)
        self.home = HOST if self.kind is kinds.NUMPY else convert.device(x)
        self.place = devices.number(device, self.home)
        self.is_away = self.place != self.home
        if self.is_away:
            self.reader = convert.MAX
        self._worker = kinds.at(self.place) if self.is_away else self.kind
        self._out: Out | None = None
        self._waits = False
        self._kept: list[Any] = []

    def write(self, out_dtype: Any, out_scale: Any, algorithm: str) -> None:
        """Takes how results are to be written, which are otherwise of the dtype of the first array.

        Args:
            out_dtype: What the caller passed.
            out_scale: What the caller passed.
            algorithm: The algorithm, checked.

        Raises:
            TypeError: If there is no such dtype, here or at all, or `out_scale` is not a number.
            ValueError: If one of them is not allowed.
        """
        self._out = check_out(out_dtype, out_scale, self.x.dtype, algorithm)
        if self._out is not None:
            self.kind.check_dtype(self._out.dtype)

    @property
    def out_dtype(self) -> str:
        """The dtype of the results."""
        return self.x.dtype if self._out is None else self._out.dtype

    def made(self, result: Any) -> Any:
        """Returns the dtype of a result of NumPy, None if it is that of the first array."""
        return None if self._out is None else result.dtype

    @property
    def out_options(self) -> tuple[int, ...]:
        """What a library is told, after all else, that writes another dtype."""
        return () if self._out is None else (_native.bits(self._out.scale),)

    def floats(self, x: Any, name: str) -> Array:
        """Takes another array of floats."""
        self._mix(x)
        return convert.floats(x, name, self.reader)

    def classes(self, x: Any, name: str = "target") -> Array:
        """Takes targets, or tokens."""
        self._mix(x)
        return convert.classes(x, name, self.reader)

    def operand(self, x: Any, name: str) -> Array:
        """Takes what is computed with logits."""
        self._mix(x)
        return convert.operand(x, name, self.reader)

    def _mix(self, x: Any) -> None:
        """Notes what is of another kind than the first: its owner may take the memory back once the call returns."""
        self._waits |= self.place != HOST and kinds.of(x) is not self.kind

    def walked(self, array: Array, axes: Sequence[int]) -> tuple[Array, Layout]:
        """Returns an array where it is computed with, laid out so that a kernel can walk it, and how it lies."""
        layout = lay_out(array, axes)
        if layout is None:
            array = devices.copied(array, order_to_copy(array, axes))
            layout = lay_out(array, axes)
            assert layout is not None
        return self.sent(array), layout

    def alike(self, array: Array, model: Array, layout: Layout) -> Array:
        """Returns an array of the shape of another one where that one is, and walked as it is."""
        if not same_steps(array, model):
            array = devices.copied(array, layout.order)
        return self.sent(array)

    def laid(self, array: Array, order: Sequence[int]) -> Array:
        """Returns an array where it is computed with, without gaps, its dimensions in an order."""
        if array.size and not same_steps(array, array._replace(strides=devices.strides(array.shape, order))):
            array = devices.copied(array, order)
        return self.sent(array)

    def sent(self, array: Array) -> Array:
        """Returns an array where it is computed with."""
        if array.device == self.place:
            return array
        sent = devices.sent(array, self.place)
        if self.place != HOST and self.reader.stream is not None:
            # It went there on MAX's queue, and is read on another one.
            devices.of(self.place).synchronize()
        return sent

    def empty(self, dtype: str, shape: Sequence[int], order: Sequence[int]) -> Array:
        """Returns new memory for a result, with its dimensions in an order."""
        return self._worker.empty(self.x._replace(device=self.place), dtype, shape, order)

    def run(
        self,
        name: str,
        rows: Rows,
        options: tuple[int, ...],
        arrays: Sequence[Array | None],
        chosen: Chosen = AUTO,
    ) -> _native.Plan:
        """Computes.

        Args:
            name: The library.
            rows: How the memory is divided into rows.
            options: What the library takes beside.
            arrays: Its arrays, None for those that there are not.
            chosen: The algorithm, checked.

        Returns:
            What computes the same of other arrays.
        """
        dtype = self.x.dtype
        if self._out is not None:
            plan = _native.plan(name, dtype, self.place, tuple(rows), options, out_dtype=self._out.dtype)
        elif chosen is AUTO:
            plan = _native.plan(name, dtype, self.place, tuple(rows), options)
        else:
            plan = _native.plan(name, dtype, self.place, tuple(rows), options, **chosen._asdict())
        stream = 0
        scratch: Any = None
        if self.place != HOST:
            stream = devices.queue(self.place) if self.reader.stream is None else self.reader.stream
            if plan.scratch:
                scratch = self.empty("uint8", (plan.scratch,), (0,))
        pointers = [0 if array is None else array.address for array in arrays]
        error = plan.run(plan.call, stream, *pointers, scratch and scratch.address)
        if error:
            _native.fail(error)
        if self._waits:
            devices.finish(self.place, self.reader.stream)
        return plan

    def written(self, x: Any) -> Any:
        """Returns the first array, which was written to, once whoever reads it next finds what was written."""
        if self.kind is kinds.FOREIGN and self.place != HOST:
            devices.finish(self.place, self.reader.stream)
        return x

    def nothing(self) -> Any:
        """Returns what an op that keeps the shape makes of an array without elements."""
        shape = self.x.shape
        return self.result(self.empty(self.out_dtype, shape, range(len(shape))))

    def scalar(self, value: float) -> Any:
        """Returns a number as a result of the dtype of the first array."""
        host = np.full((), value, np.float64)
        if self.x.dtype == "bfloat16":
            # Of what is asked for, the bits are the upper half of float32's.
            host = (host.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            host = host.astype(self.x.dtype)
        return self.kind.convert(self.given, host, self.x.dtype, self.home)

    def part(self, whole: Array, i: int) -> Array:
        """Returns a part of a result along its first dimension, which lies first."""
        return (
            self._worker.part(whole, i)
            if whole.size
            else self.empty(whole.dtype, whole.shape[1:], range(len(whole.shape) - 1))
        )

    def is_plain(self, *arrays: tuple[Any, Array]) -> bool:
        """Returns whether arrays were taken as they lie, so that others like them need not be looked at again."""
        numpy = self.kind is kinds.NUMPY and self.place == HOST and bool(self.x.shape)
        whole = numpy or (self.kind is kinds.BUFFERS and not self.is_away)
        return whole and all(array.owner is given for given, array in arrays)

    def maker(self, dtype: str, shape: Sequence[int], order: Sequence[int]) -> Callable[[], np.ndarray]:
        """Returns what makes arrays of NumPy as `empty` does."""
        known = self.x.owner.dtype if dtype == self.x.dtype else np.dtype(dtype)
        return shortcuts.maker(known, shape, order)

    def result(self, array: Array) -> Any:
        """Returns a result as the kind of array that the first was, where that was."""
        if not self.is_away:
            return self.kind.give(self.given, array)
        return self.kind.convert(self.given, view(devices.fetched(array)), array.dtype, self.home)

    def chosen(self, chosen: Chosen) -> Chosen:
        """Returns the choice of an algorithm with all that was left open, or refuses it."""
        algorithm = check_algorithm(chosen.algorithm, "cpu" if self.place == HOST else "gpu")
        if algorithm == "auto" and chosen.block_size is None and chosen.unroll is None:
            return AUTO
        if self.place == HOST:
            sizes = check_block_size(chosen.block_size, algorithm, "cpu"), check_unroll(chosen.unroll, algorithm, "cpu")
            return Chosen(algorithm, *sizes)
        # What was found best is a question for MAX.
        from maxsoftmax._graph import tuning

        best = tuning.choice(
            devices.of(self.place), algorithm, devices.dtype(self.x.dtype), chosen.block_size, chosen.unroll
        )
        return Chosen(algorithm, *best)


def check_like(value: Array, name: str, dtype: str, shape: tuple[int, ...], whose: str) -> None:
    """Refuses an array that does not go with another one."""
    if value.dtype != dtype:
        raise TypeError(f"{name} has dtype {value.dtype}, but that {whose} is {dtype}")
    if value.shape != shape:
        raise ValueError(f"{name} has shape {value.shape}, but that {whose} is {shape}")
