"""What `maxsoftmax tune` found best on a device, kept in the user's configuration and used unless told otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
from max.driver import Device
from max.dtype import DType
from max.graph import DeviceRef

from maxsoftmax import _files as files
from maxsoftmax._arguments import ALGORITHMS, BLOCK_SIZE, UNROLL, check_block_size, check_unroll
from maxsoftmax._warnings import warn


class Choice(NamedTuple):
    """What an algorithm leaves to its caller."""

    block_size: int
    """Threads a block."""
    unroll: int
    """Vectors that a thread has under way at a time."""


def location() -> Path:
    """Returns the file that holds what was found."""
    return platformdirs.user_config_path("maxsoftmax") / "tuned.json"


def choice(device: Device | DeviceRef, algorithm: str, dtype: DType, block_size: Any, unroll: Any) -> Choice:
    """Returns what to launch `algorithm` with: the caller's choice, or where there is none the one found best.

    Raises:
        TypeError: If a choice is not an integer.
        ValueError: If the algorithm leaves no such choice.
    """
    label = "gpu" if (device.is_gpu() if isinstance(device, DeviceRef) else not device.is_host) else "cpu"
    given = Choice(check_block_size(block_size, algorithm, label), check_unroll(unroll, algorithm, label))
    if block_size is None and unroll is None and ALGORITHMS[label][algorithm].unrolls:
        return _found(device, algorithm, dtype) or given
    return given


def remember(device: Device, algorithm: str, dtype: DType, best: Choice) -> Path:
    """Keeps `best` for later calls and processes, and returns the file it is in.

    Raises:
        OSError: If the file cannot be written.
    """
    path = location()
    found = _read(path)
    here = found
    for key in (device.model_name, algorithm):
        # What somebody else wrote there is no use to anybody.
        if not isinstance(here.get(key), dict):
            here[key] = {}
        here = here[key]
    here[dtype.name] = best._asdict()
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, (json.dumps(found, indent=1, sort_keys=True) + "\n").encode())
    _loaded.clear()
    return path


_loaded: dict[Path, dict[str, Any]] = {}


def _found(device: Device | DeviceRef, algorithm: str, dtype: DType) -> Choice | None:
    path = location()
    if path not in _loaded:
        _loaded[path] = _read(path)
    if not _loaded[path]:
        return None
    try:
        present = device.to_device() if isinstance(device, DeviceRef) else device
        found = Choice(**_loaded[path][present.model_name][algorithm][dtype.name])
        return Choice(check_block_size(found[0], algorithm, "gpu"), check_unroll(found[1], algorithm, "gpu"))
    except (KeyError, RuntimeError, TypeError, ValueError):
        # A graph may be built for a GPU that is not here, and people edit files.
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
        reason = "it holds no object"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    # Speed is all that is lost.
    default = f"blocks of {BLOCK_SIZE} and unroll {UNROLL}"
    warn(f"{path} cannot be read, so {default} are used: {reason}")
    return {}
