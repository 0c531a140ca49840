"""What a provider of softmax and its relatives is to the benchmark."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType

from maxsoftmax._bench.cases import Case, Entry


class Unsupported(Exception):
    """A case that the provider does not claim to compute; its text says what it would take."""


class Provider(ABC):
    """A way to compute softmax, and maybe other ops.

    Making one imports its library, and raises ImportError where that is absent.

    Args:
        device: Where to compute.
        threads: How many threads to use, where `device` is the CPU.
    """

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]] = ("cpu", "gpu")
    """The kinds of device it computes on."""
    own_stream: ClassVar[bool] = False
    """Whether it enqueues where nobody can put events, so that only the host's clock can time it."""

    lazy: ClassVar[bool] = False
    """Whether its first call compiles."""
    ops: ClassVar[tuple[str, ...]] = ("softmax",)
    """Which of the ops it computes."""
    in_place: ClassVar[tuple[str, ...]] = ()
    """Those that overwrite the logits."""
    late: ClassVar[bool] = False
    """Whether on a CPU, too, a call may return before its result is there."""

    def __init__(self, device: Device, threads: int) -> None:
        self.device = device
        self.threads = threads

    @abstractmethod
    def version(self) -> str:
        """Returns its library's version."""

    def share(self, x: Buffer) -> Any:
        """Returns `x` as the provider's kind of array, in the same memory: `x` itself unless it takes another."""
        return x

    @abstractmethod
    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns the function that `entry` names, which need not wait for a GPU.

        It takes logits and returns what the case's op makes of them, but for these: "softmax_backward" takes
        probabilities and their gradient as a tuple, the losses logits and targets; "cross_entropy_gradient" returns
        the loss and the gradient of the logits as a tuple.

        Raises:
            Unsupported: If the provider does not claim to compute this.
        """

    def foresee(self, ways: Sequence[tuple[Case, Entry]]) -> None:  # noqa: B027
        """Is told all that will be asked of `prepare`, before the first; what fails then may fail here."""

    def result(self, y: Any) -> Buffer:
        """Returns an output's memory."""
        return Buffer.from_dlpack(y)

    def wait(self, y: Any) -> None:
        """Returns when the output `y` is there."""
        self.device.synchronize()

    def calling(self, case: Case) -> contextlib.AbstractContextManager[object]:
        """Returns what its users surround calls with, such as `torch.no_grad`."""
        return contextlib.nullcontext()

    def lap(self, function: Callable[[Any], Any], xs: list[Any]) -> Callable[[], list[Any]]:
        """Returns what computes all of `xs` in turn and returns their outputs; this is what is timed."""
        return lambda: [function(x) for x in xs]


class ArrayProvider(Provider):
    """A provider that takes NumPy arrays."""

    devices = ("cpu",)

    def share(self, x: Buffer) -> np.ndarray:
        """Returns `x` as NumPy sees it."""
        if x.dtype == DType.bfloat16:
            raise Unsupported("takes no bfloat16")
        array: np.ndarray = x.to_numpy()
        return array

    def result(self, y: np.ndarray) -> Buffer:
        """Returns the memory of `y`."""
        return Buffer.from_numpy(np.ascontiguousarray(y))


def only_last_axis(case: Case) -> None:
    """Refuses every other axis.

    Raises:
        Unsupported: If it is another.
    """
    if case.place != len(case.shape) - 1:
        raise Unsupported("takes the last axis only")
