"""What callers may pass: every argument is checked here, before anything is compiled or launched."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.exceptions import AxisError

if TYPE_CHECKING:
    from max.dtype import DType

    DTYPES: tuple[DType, ...]
    """What the kernels compute; anything else has to be converted first."""

    TARGET_DTYPES: tuple[DType, ...]
    """What the targets of a loss may be."""

FLOATS = ("float32", "bfloat16", "float16", "float64")
"""The names of `DTYPES`."""

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
"""The names of the dtypes of 8 bits that softmax may be written in."""

OUT = ("float32", "bfloat16", "float16", *FLOAT8)
"""The names of all that it may be written in, whatever the logits are of."""

CLASSES = ("int32", "int64")
"""The names of `TARGET_DTYPES`."""


def __getattr__(name: str) -> Any:
    """Makes dtypes of MAX of their names only when they are asked for: calls on arrays need no import of MAX."""
    names = {"DTYPES": FLOATS, "TARGET_DTYPES": CLASSES}
    if name not in names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from max.dtype import DType

    return tuple(getattr(DType, dtype) for dtype in names[name])


BLOCK_SIZE = 128
"""Threads a block unless told otherwise, as in the published kernels."""

UNROLL = 4
"""Vectors that a thread has under way at a time unless told otherwise."""


class Choices(NamedTuple):
    """What a caller may choose beside an algorithm's name."""

    block_sizes: tuple[int, ...] = ()
    """Threads a block."""
    unrolls: tuple[int, ...] = ()
    """Vectors that a thread has under way at a time."""


_ANY = tuple(2**i for i in range(11))
# Where warps work together, a block is at least one, or half of one where a GPU's warps have 64 threads.
_WARPS = tuple(2**i for i in range(5, 11))

ALGORITHMS: dict[str, dict[str, Choices]] = {
    "cpu": {"auto": Choices(), "naive": Choices()},
    "gpu": {
        "auto": Choices(),
        "elementwise": Choices(_ANY),
        "naive": Choices(_ANY),
        "tree": Choices(_ANY),
        "tree_blocked": Choices(_ANY),
        "warp": Choices(_WARPS),
        "vector": Choices(_WARPS, (1, 2, 4, 8)),
        "online": Choices(_WARPS, (1, 2, 4, 8)),
        "multipass": Choices(_WARPS),
        "split": Choices(_WARPS),
    },
}
"""The algorithms of each kind of device, and what each leaves to the caller."""


def accumulator(dtype: DType) -> DType:
    """Returns the dtype of the arithmetic: float64 for itself, float32 for the rest."""
    from max.dtype import DType

    return dtype if dtype == DType.float64 else DType.float32


REDUCTIONS = ("mean", "sum", "none")
"""What may become of the losses of all rows."""


def check_dtype(dtype: DType, name: str = "x") -> None:
    """Refuses a dtype that no kernel computes.

    Raises:
        TypeError: If it is not one of `DTYPES`.
    """
    if dtype.name not in FLOATS:
        raise TypeError(f"{name} has dtype {dtype.name}, but the kernels take {', '.join(FLOATS)}")


LEAST, MOST = 2.0**-126, 2.0**127
"""What results of float8 may be multiplied by in float32."""


class Out(NamedTuple):
    """How results are written that are not of the dtype of the logits."""

    dtype: str
    """The name of their dtype."""
    scale: float
    """What those of float8 are multiplied by."""


def check_out(dtype: Any, scale: Any, of: str, algorithm: str = "auto") -> Out | None:
    """Returns how results are to be written, None if as they always are.

    Args:
        dtype: A dtype, or its name, or None for that of the logits.
        scale: A number, or None.
        of: The name of the dtype of the logits.
        algorithm: The algorithm that was asked for.

    Raises:
        TypeError: If there is no such dtype, or `scale` is not a number.
        ValueError: If results of this dtype have no scale, the number is not allowed, or the algorithm has no choice.
    """
    name = of if dtype is None else dtype_name(dtype)
    if name != of and name not in OUT:
        raise TypeError(f"out_dtype must be {', '.join(OUT)} or that of x, {of}, not {dtype!r}")
    if scale is not None:
        if name not in FLOAT8:
            raise ValueError(f"out_scale {scale!r} needs out_dtype {' or '.join(FLOAT8)}, but results are {name}")
        if not is_number(scale):
            raise TypeError(f"out_scale must be a number, not {scale!r}")
        if not LEAST <= float(scale) <= MOST:
            raise ValueError(f"out_scale must be a positive number that float32 has, up to 2**127, not {scale!r}")
    if name == of:
        return None
    if algorithm != "auto":
        raise ValueError(
            f"algorithm {algorithm!r} writes the dtype of x, {of}: with out_dtype {name} it must be 'auto'"
        )
    return Out(name, 1.0 if scale is None else float(scale))


def told_out(dtype: Any, scale: Any) -> Any:
    """Returns what tells calls apart by how their results are written, None if as they always are."""
    if dtype is None and scale is None:
        return None
    return dtype_name(dtype), type(scale), scale if isinstance(scale, numbers.Real) else None


def dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype of MAX, NumPy or torch, or "" of anything else; a name is returned as it is."""
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, type):
        # NumPy's float16, and bfloat16 of ml_dtypes.
        return dtype.__name__
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def normalize_axis(axis: Any, rank: int, allowed: str = "an integer", name: str = "x") -> int:
    """Returns `axis` of the argument `name`, counted from 0.

    What the caller allows beside an integer is for it to take out first.

    Raises:
        TypeError: If it is not an integer.
        numpy.exceptions.AxisError: If a tensor of this rank has no such axis (a ValueError and an IndexError).
    """
    index = _integer("axis", axis, allowed)
    # As in NumPy's reductions, a scalar may be asked for its first or last axis.
    last = max(rank - 1, 0)
    if not -last - 1 <= index <= last:
        raise AxisError(
            f"axis {index} is out of bounds for {name} of rank {rank}: it must be from {-last - 1} to {last}"
        )
    return index % max(rank, 1)


def normalize_axes(axis: Any, rank: int, name: str = "x") -> tuple[int, ...]:
    """Returns the axes of the argument `name` that `axis` names, counted from 0 and ascending.

    They are an integer, a sequence or an array of NumPy of them, or None for all.

    Raises:
        TypeError: If it is none of these.
        ValueError: If an axis is named twice.
        numpy.exceptions.AxisError: If a tensor of this rank has no such axis.
    """
    if axis is None:
        return tuple(range(rank))
    given = tuple(axis) if are_several(axis) else (axis,)
    axes = sorted(normalize_axis(a, rank, "an integer, a tuple of integers or None", name) for a in given)
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis ({', '.join(map(str, given))}) names an axis of {name} twice")
    return tuple(axes) if rank else ()


def are_several(axis: Any) -> bool:
    """Returns whether `axis` is a sequence, or an array of NumPy, of axes."""
    return (isinstance(axis, Sequence) and not isinstance(axis, str)) or (
        isinstance(axis, np.ndarray) and axis.ndim > 0
    )


def check_algorithm(algorithm: Any, device: str) -> str:
    """Returns `algorithm` if a `device` ("cpu" or "gpu") has it.

    Raises:
        TypeError: If it is not a string.
        ValueError: If there is no such algorithm.
    """
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm must be a string, not {algorithm!r}")
    if algorithm not in ALGORITHMS[device]:
        allowed = ", ".join(repr(a) for a in ALGORITHMS[device])
        raise ValueError(f"algorithm {algorithm!r} does not exist on the {device.upper()}: choose from {allowed}")
    return algorithm


def check_block_size(block_size: Any, algorithm: str, device: str) -> int:
    """Returns the threads a block, `BLOCK_SIZE` for None.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If the algorithm has no such choice.
    """
    allowed = ALGORITHMS[device][algorithm].block_sizes
    return _check_choice("block_size", block_size, BLOCK_SIZE, allowed, f"{algorithm!r} on the {device.upper()}")


def check_unroll(unroll: Any, algorithm: str, device: str) -> int:
    """Returns the vectors under way at a time, `UNROLL` for None.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If the algorithm has no such choice.
    """
    allowed = ALGORITHMS[device][algorithm].unrolls
    return _check_choice("unroll", unroll, UNROLL, allowed, f"{algorithm!r} on the {device.upper()}")


def check_target_dtype(dtype: DType, name: str = "target") -> None:
    """Refuses targets, or tokens, that are not classes.

    Raises:
        TypeError: If it is not one of `TARGET_DTYPES`.
    """
    if dtype.name not in CLASSES:
        raise TypeError(f"{name} has dtype {dtype.name}, but classes are {' or '.join(CLASSES)}")


def class_axis(rank: int) -> int:
    """Returns the axis of the classes, where PyTorch has it: 1, or 0 for a single row.

    Raises:
        ValueError: If there is no axis.
    """
    if rank == 0:
        raise ValueError("x has rank 0, but logits need an axis of classes: reshape it to rank 1 first")
    return min(1, rank - 1)


def check_target_shape(target: Iterable[Any], x: Iterable[Any], axis: str = "axis") -> int:
    """Returns the axis of the classes of logits if there is a target for each of their rows.

    Args:
        target: The shape of the targets, in numbers or in dimensions of a graph.
        x: That of the logits.
        axis: What an axis is called.

    Raises:
        ValueError: If the shapes do not fit.
    """
    found, logits = tuple(target), tuple(x)
    place = class_axis(len(logits))
    expected = logits[:place] + logits[place + 1 :]
    if found != expected:
        raise ValueError(
            f"target has shape {words(found)}, but x of {words(logits)} needs {words(expected)}: "
            f"the classes are along {axis} {place}"
        )
    return place


def check_tokens_shape(tokens: Iterable[Any], x: Iterable[Any], place: int) -> bool:
    """Returns whether there are several tokens for each row of logits, along the axis, or one without it.

    Args:
        tokens: The shape of the tokens, in numbers or in dimensions of a graph.
        x: That of the logits.
        place: The axis, counted from 0.

    Raises:
        ValueError: If the shapes do not fit.
    """
    found, logits = tuple(tokens), tuple(x)
    rows = logits[:place] + logits[place + 1 :]
    several = len(found) == len(logits)
    if (found[:place] + found[place + 1 :] if several else found) != rows:
        many = words((*logits[:place], "k", *logits[place + 1 :]))
        raise ValueError(
            f"tokens has shape {words(found)}, but x of {words(logits)} needs {words(rows)}, or {many} for k a row"
        )
    return several


def check_temperature(temperature: Any) -> float:
    """Returns what logits are divided by, 1 for None.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is not positive and finite.
    """
    if temperature is None:
        return 1.0
    return _positive("temperature", temperature)


def check_softcap(softcap: Any) -> float | None:
    """Returns what bounds logits, if anything does.

    Raises:
        TypeError: If it is neither a number nor None.
        ValueError: If it is not positive and finite.
    """
    return None if softcap is None else _positive("softcap", softcap)


def check_z_loss(factor: Any) -> float:
    """Returns what the squares of rows' logsumexp are multiplied by.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is negative or not finite.
    """
    factor = _alone(factor)
    if not is_number(factor):
        raise TypeError(f"z_loss must be a number, not {factor!r}")
    number = float(factor)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"z_loss must be 0 or a positive, finite number, not {factor!r}")
    return number


def check_chunk(chunk: Any) -> int | None:
    """Returns how many rows are taken at a time, if that is not left open.

    Raises:
        TypeError: If it is neither an integer nor None.
        ValueError: If it is not positive.
    """
    if chunk is None:
        return None
    rows = _integer("chunk", chunk, "an integer or None")
    if rows < 1:
        raise ValueError(f"chunk must be a positive number of rows, not {rows}")
    return rows


def is_number(value: Any) -> bool:
    """Returns whether `value` is one real number, of Python or NumPy, and neither a bool nor a tensor."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _alone(value: Any) -> Any:
    """Returns the number in an array of NumPy without dimensions; any other value as it is."""
    return value.item() if isinstance(value, np.ndarray) and not value.ndim else value


def _positive(name: str, value: Any) -> float:
    value = _alone(value)
    if not is_number(value):
        raise TypeError(f"{name} must be a number, not {value!r}")
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a positive, finite number, not {value!r}")
    return number


def check_flag(name: str, value: Any) -> bool:
    """Returns what an argument says that is True or False.

    Raises:
        TypeError: If it is a bool neither of Python nor of NumPy.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def words(shape: Iterable[Any]) -> str:
    """Returns a shape as Python writes a tuple, symbolic dimensions by their names."""
    dims = [str(dim) for dim in shape]
    return "(" + ", ".join(dims) + ("," if len(dims) == 1 else "") + ")"


def check_ignore_index(index: Any) -> int:
    """Returns `index` if it is an integer of 64 bits.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it has more bits.
    """
    number = _integer("ignore_index", index)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"ignore_index {number} has more than 64 bits")
    return number


def check_label_smoothing(share: Any) -> float:
    """Returns `share` if it is one.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is not from 0 to 1.
    """
    share = _alone(share)
    if not is_number(share):
        raise TypeError(f"label_smoothing must be a number from 0 to 1, not {share!r}")
    if not 0 <= float(share) <= 1:
        raise ValueError(f"label_smoothing {share} is not from 0 to 1")
    return float(share)


def check_reduction(reduction: Any) -> str:
    """Returns `reduction` if there is such a one.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it is not one of `REDUCTIONS`.
    """
    if not isinstance(reduction, str):
        raise TypeError(f"reduction must be a string, not {reduction!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} does not exist: choose from {', '.join(map(repr, REDUCTIONS))}")
    return reduction


def _check_choice(name: str, value: Any, default: int, allowed: tuple[int, ...], algorithm: str) -> int:
    if value is None:
        return default
    number = _integer(name, value)
    if not allowed:
        raise ValueError(f"{name} {number} has no meaning for algorithm {algorithm}, which leaves no such choice")
    if number not in allowed:
        choices = ", ".join(map(str, allowed))
        raise ValueError(f"{name} {number} does not exist for algorithm {algorithm}: choose from {choices}")
    return number


def _integer(name: str, value: Any, allowed: str = "an integer") -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be {allowed}, not the bool {value}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {allowed}, not {value!r}") from None
