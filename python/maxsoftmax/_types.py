"""What type checkers are told of arguments and results: names that exist, and the kind of array that comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, SupportsIndex, TypeVar, overload

import numpy as np

Algorithm = Literal[
    "auto", "elementwise", "naive", "tree", "tree_blocked", "warp", "vector", "online", "multipass", "split"
]
"""The names of all kernels; `maxsoftmax._arguments.ALGORITHMS` says which device has which."""

Reduction = Literal["mean", "sum", "none"]
"""What may become of the losses of all rows."""

DeviceName = Literal["cpu", "gpu", "gpu:0", "gpu:1", "gpu:2", "gpu:3", "gpu:4", "gpu:5", "gpu:6", "gpu:7"]
"""Where arrays may be computed; GPUs beyond these are named by a `max.driver.Device`."""


class SpeaksDLPack(Protocol):
    """An array of NumPy, torch, JAX, MAX or another library that can lend its memory."""

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Returns where the memory is."""


class Device(Protocol):
    """A `max.driver.Device`, of which MAX tells type checkers nothing."""

    @property
    def label(self) -> str:
        """Its kind."""

    @property
    def id(self) -> int:
        """Its number among those."""


Where = DeviceName | Device | None
"""Where to compute; None is where the array is."""

Axes = SupportsIndex | Sequence[SupportsIndex] | None
"""One axis, several of them, or None for all."""

Flag = bool | np.bool_
"""A bool of Python or of NumPy."""

Options = ParamSpec("Options")
Array = TypeVar("Array", bound=SpeaksDLPack)
Shape = TypeVar("Shape", bound=tuple[int, ...])


class Map(Protocol[Options]):
    """A function whose result is an array of the kind and shape of its first argument."""

    @overload
    def __call__(
        self, x: np.ndarray[Shape, Any], *args: Options.args, **kwargs: Options.kwargs
    ) -> np.ndarray[Shape, np.dtype[Any]]: ...
    @overload
    def __call__(self, x: Array, *args: Options.args, **kwargs: Options.kwargs) -> Array: ...
    @overload
    def __call__(self, x: object, *args: Options.args, **kwargs: Options.kwargs) -> Any: ...


class Gradient(Protocol[Options]):
    """A `Map` whose first argument is what was returned."""

    @overload
    def __call__(
        self, y: np.ndarray[Shape, Any], *args: Options.args, **kwargs: Options.kwargs
    ) -> np.ndarray[Shape, np.dtype[Any]]: ...
    @overload
    def __call__(self, y: Array, *args: Options.args, **kwargs: Options.kwargs) -> Array: ...
    @overload
    def __call__(self, y: object, *args: Options.args, **kwargs: Options.kwargs) -> Any: ...


class Reduce(Protocol[Options]):
    """A function whose result is of the kind of its first argument, where NumPy has scalars beside arrays."""

    @overload
    def __call__(self, x: np.ndarray[Any, Any], *args: Options.args, **kwargs: Options.kwargs) -> Any: ...
    @overload
    def __call__(self, x: Array, *args: Options.args, **kwargs: Options.kwargs) -> Array: ...
    @overload
    def __call__(self, x: object, *args: Options.args, **kwargs: Options.kwargs) -> Any: ...


class ReduceHidden(Protocol[Options]):
    """A `Reduce` of the logits that are made of its first argument."""

    @overload
    def __call__(self, hidden: np.ndarray[Any, Any], *args: Options.args, **kwargs: Options.kwargs) -> Any: ...
    @overload
    def __call__(self, hidden: Array, *args: Options.args, **kwargs: Options.kwargs) -> Array: ...
    @overload
    def __call__(self, hidden: object, *args: Options.args, **kwargs: Options.kwargs) -> Any: ...


class ReducePair(Protocol[Options]):
    """A function that returns two such results."""

    @overload
    def __call__(self, x: np.ndarray[Any, Any], *args: Options.args, **kwargs: Options.kwargs) -> tuple[Any, Any]: ...
    @overload
    def __call__(self, x: Array, *args: Options.args, **kwargs: Options.kwargs) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, x: object, *args: Options.args, **kwargs: Options.kwargs) -> tuple[Any, Any]: ...


def maps(function: Callable[Concatenate[Any, Options], Any]) -> Map[Options]:
    """Returns the function itself, with the type of a `Map`."""
    return function  # type: ignore[return-value]


def gradient(function: Callable[Concatenate[Any, Options], Any]) -> Gradient[Options]:
    """Returns the function itself, with the type of a `Gradient`."""
    return function  # type: ignore[return-value]


def reduces(function: Callable[Concatenate[Any, Options], Any]) -> Reduce[Options]:
    """Returns the function itself, with the type of a `Reduce`."""
    return function  # type: ignore[return-value]


def reduces_hidden(function: Callable[Concatenate[Any, Options], Any]) -> ReduceHidden[Options]:
    """Returns the function itself, with the type of a `ReduceHidden`."""
    return function  # type: ignore[return-value]


def reduces_to_pair(function: Callable[Concatenate[Any, Options], tuple[Any, Any]]) -> ReducePair[Options]:
    """Returns the function itself, with the type of a `ReducePair`."""
    return function  # type: ignore[return-value]
