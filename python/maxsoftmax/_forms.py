"""What attention does to logits before it normalizes them: scale, masks, a temperature, a sink.

The same for graphs and for arrays: which of them there are, and what of that is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from maxsoftmax._arguments import is_number, words


class Forms(NamedTuple):
    """What was asked for beside softmax itself; None or False where nothing was."""

    scale: Any = None
    mask: Any = None
    causal: bool = False
    temperature: Any = None
    sink: Any = None

    @property
    def any(self) -> bool:
        """Whether anything was."""
        return self.causal or any(value is not None for value in (self.scale, self.mask, self.temperature, self.sink))

    @property
    def masked(self) -> bool:
        """Whether a row may be masked as a whole, and is then 0."""
        return self.causal or self.mask is not None


def check(forms: Forms, axis: int, algorithm: str) -> None:
    """Refuses what does not depend on the shapes of tensors.

    Args:
        forms: What was asked for.
        axis: The axis that sums to 1, counted from 0.
        algorithm: The algorithm that was asked for.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If it is, and still not allowed.
    """
    if forms.causal and axis == 0:
        raise ValueError("causal True needs an axis of queries before the axis of keys, but axis 0 is the first of x")
    for name, least in (("scale", -math.inf), ("temperature", 0.0)):
        value = getattr(forms, name)
        if isinstance(value, (bool, str)):
            raise TypeError(f"{name} must be a number or a tensor of numbers, not {value!r}")
        if is_number(value) and not (math.isfinite(value) and value > least):
            allowed = "a finite number" if least < 0 else "a positive, finite number"
            raise ValueError(f"{name} must be {allowed}, not {value!r}")
    if forms.any and algorithm != "auto":
        raise ValueError(
            f"algorithm {algorithm!r} takes no scale, mask, causal, temperature or sink: with these it must be 'auto'"
        )


def broadcasts(shape: Sequence[Any], whole: Sequence[Any]) -> bool:
    """Returns whether a shape broadcasts to another one as NumPy would."""
    return len(shape) <= len(whole) and all(
        mine in (1, theirs) for mine, theirs in zip(reversed(shape), reversed(whole), strict=False)
    )


def check_shape(name: str, shape: Sequence[Any], whole: Sequence[Any]) -> None:
    """Refuses a shape that does not broadcast to another one as NumPy would.

    Args:
        name: The argument's name.
        shape: Its dimensions.
        whole: Those to broadcast to.

    Raises:
        ValueError: If it does not.
    """
    if not broadcasts(shape, whole):
        raise ValueError(f"{name} has shape {words(shape)}, but must broadcast to {words(whole)}")
