"""Records of measurements, and the JSON files that keep them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from maxsoftmax import _files as files

STATUSES = ("ok", "wrong", "missing", "failed")
"""What can become of a measurement: timed; computed something else; not to be had here; gave up with an error."""


@dataclass(frozen=True)
class Record:
    """One provider on one case. Times in seconds, rates in 10⁹ bytes a second; None where nothing was measured."""

    suite: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    axis: int
    provider: str
    algorithm: str
    """Ours only; empty for others."""
    block_size: int | None
    """Threads a block, where it was chosen."""
    unroll: int | None
    """Vectors under way at a time, where it was chosen."""
    status: str
    """One of `STATUSES`."""
    median_s: float | None = None
    """Time of a call: the median of the placements, each the median of its repetitions."""
    min_s: float | None = None
    """The fastest repetition of all."""
    repeats: int = 0
    """Repetitions over all placements."""
    gbps: float | None = None
    """Bytes read once plus bytes written once, the least that the op moves, over `median_s`."""
    copy_gbps: float | None = None
    """The same of a copy of the logits, timed beside each placement."""
    max_rel_error: float | None = None
    """Largest relative error against float64, in the rows that were checked, where a normal number is exact."""
    note: str = ""
    host_s: float | None = None
    """Where calls are timed, how long one keeps its caller: `median_s` is then the time until its result is there."""

    @property
    def ours(self) -> bool:
        """Whether it is a way of this package."""
        return self.provider.split(".", maxsplit=1)[0] == "maxsoftmax"

    @property
    def size(self) -> int:
        """Elements of the input."""
        return math.prod(self.shape)

    @property
    def who(self) -> str:
        """What to call this way of computing it: our algorithm's name, or the provider's."""
        return self.algorithm or self.provider

    @property
    def case(self) -> str:
        """What to call what was computed."""
        last = self.axis % len(self.shape) == len(self.shape) - 1
        what = "" if self.op == "softmax" else f"{self.op} "
        return what + "×".join(map(str, self.shape)) + ("" if last else f" axis {self.axis}")

    @property
    def copy_s(self) -> float | None:
        """Time that a copy takes to move as many bytes."""
        return self.median_s * self.gbps / self.copy_gbps if self.median_s and self.gbps and self.copy_gbps else None

    @property
    def gflops(self) -> float | None:
        """10⁹ operations a second, as published sources count those of softmax: five an element."""
        return 5e-9 * self.size / self.median_s if self.median_s and self.op == "softmax" else None


@dataclass
class Results:
    """What one run of the benchmark measured, and where."""

    device: str
    versions: dict[str, str]
    date: str
    """UTC, ISO 8601."""
    command: str
    threads: int | None = None
    """Of the processor, where that is what computed."""
    processor: str | None = None
    """The name of the processor, where it called another device."""
    rounds: int | None = None
    """How often each provider, at least, had its turn in a process of its own; None where all shared one."""
    records: list[Record] = field(default_factory=list)

    @property
    def where(self) -> str:
        """What to call the place where it was measured."""
        threads = f", {self.threads} threads" if self.threads else ""
        processor = f", called by {self.processor}" if self.processor else ""
        rounds = f", {self.rounds} round{'s' * (self.rounds > 1)} of processes" if self.rounds else ""
        return f"{self.device}{threads}{processor}{rounds}"

    def write(self, path: Path) -> None:
        """Writes JSON, whole or not at all."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        # Bytes of the command that are no text become \u escapes, as JSON has them.
        files.replace(path, text.encode(errors="backslashreplace"))

    @classmethod
    def read(cls, path: Path) -> Results:
        """Returns what `write` wrote.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it is not such a file.
        """
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(given["versions"], dict):
                raise ValueError(f"versions is {given['versions']!r}")
            return cls(**{**given, "records": [_record(r) for r in given["records"]]})
        except KeyError as error:
            raise ValueError(f"{path} is not a file of benchmark results: it has no {error}") from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not a file of benchmark results: {error}") from error


def _record(given: dict[str, Any]) -> Record:
    known = {f.name for f in fields(Record)}
    if strange := set(given) - known:
        raise ValueError(f"unknown field {min(strange)!r}")
    shape = given["shape"]
    if not isinstance(shape, list) or not shape or not all(type(n) is int and n > 0 for n in shape):
        raise ValueError(f"shape is {shape!r}")
    record = Record(**{**given, "shape": tuple(shape)})
    if type(record.axis) is not int or not -len(shape) <= record.axis < len(shape):
        raise ValueError(f"axis is {record.axis!r}")
    if record.status not in STATUSES:
        raise ValueError(f"unknown status {record.status!r}")
    for name in ("suite", "op", "dtype", "provider", "algorithm", "note"):
        if not isinstance(getattr(record, name), str):
            raise ValueError(f"{name} is {getattr(record, name)!r}")
    for name in ("median_s", "min_s", "gbps", "copy_gbps", "max_rel_error"):
        value = getattr(record, name)
        if value is None and record.status != "ok":
            continue
        if type(value) is not float or not math.isfinite(value) or not (value > 0 or name == "max_rel_error"):
            raise ValueError(f"{name} is {value!r}")
    value = record.host_s
    if value is not None and (type(value) is not float or not math.isfinite(value) or value <= 0):
        raise ValueError(f"host_s is {value!r}")
    return record
