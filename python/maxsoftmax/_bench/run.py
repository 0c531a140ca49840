"""Runs a suite: every entry on every case, one after the other."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from max.driver import Device

from maxsoftmax._bench import call
from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.clock import DeviceClock, HostClock
from maxsoftmax._bench.protocol import Machine, measure, record
from maxsoftmax._bench.providers import CALLERS, PROVIDERS, Provider
from maxsoftmax._bench.results import Record, Results
from maxsoftmax._graph.extension import distribution_version

HOPELESS_S = 0.5
"""A call on a smaller case that took longer than this spares an entry the larger ones of the same kind."""

Progress = Callable[[Case, Entry], None]


class Bench:
    """One run on one device. Results grow as they come, so an interruption leaves what was measured.

    Args:
        device: Where to compute.
        command: What was typed.
        threads: Of the processor, where that computes.
        calls: Whether whole calls are timed.
        count: How many calls of each kind; None for as many as fit.
    """

    rounds = 1
    """How often everything is measured."""

    def __init__(
        self, device: Device, command: Sequence[str], threads: int, calls: bool = False, *, count: int | None = None
    ) -> None:
        clock = HostClock() if device.is_host else DeviceClock(device)
        self.machine = Machine(device, clock)
        self.threads = threads
        self.calls = calls
        self.count = count
        self.measured = 0
        """How many measurements were made, over all rounds."""
        self.providers: dict[str, Provider | str] = {}
        """Each that took part so far, or why it could not."""
        self._done: set[tuple[Any, ...]] = set()
        versions = {
            "python": platform.python_version(),
            "max": distribution_version("max", "modular"),
            "mojo": distribution_version("mojo-compiler", "mojo"),
        }
        self.results = Results(
            device=processor() if device.is_host else f"{device.model_name} ({device.architecture_name})",
            versions=versions,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            command=shlex.join(command),
            threads=threads if device.is_host else None,
            processor=None if device.is_host else processor(),
        )

    def resume(self, earlier: Results, suite: str, cases: Sequence[Case], entries: Sequence[Entry]) -> None:
        """Takes over what an earlier run measured; what is asked for again `run` then leaves out.

        Raises:
            ValueError: If that was on another device, or with other versions.
        """
        self._check_versions(earlier, entries)
        now = self.results
        now.date, now.versions = earlier.date, {**earlier.versions, **now.versions}
        now.records = list(earlier.records)
        if now.rounds and earlier.rounds:
            now.rounds = min(now.rounds, earlier.rounds)
        found = {of_record(r) for r in earlier.records}
        self._done = found.intersection(of_way(suite, *way) for way in itertools.product(cases, entries))

    def _check_versions(self, earlier: Results, entries: Sequence[Entry]) -> None:
        """Refuses an earlier run with other versions of what `entries` name."""
        for entry in entries:
            self._provider(entry.provider)
        self._compare(earlier)

    def _compare(self, earlier: Results) -> None:
        """Refuses an earlier run that was on another device, or with other versions of what has taken part so far."""
        now = self.results
        then = {"device": earlier.device, "threads": earlier.threads, **earlier.versions}
        here = {"device": now.device, "threads": now.threads, **now.versions}
        for what, value in here.items():
            if then.get(what, "missing") != value:
                raise ValueError(f"cannot resume a run whose {what} was {then.get(what, 'missing')}, not {value}")

    @property
    def done(self) -> int:
        """How many of the measurements that were asked for were taken over."""
        return len(self._done)

    def describe(self, case: Case, entry: Entry) -> str:
        """Returns what `progress` is told, in words."""
        return f"{case}: {entry}"

    def run(self, suite: str, cases: Sequence[Case], entries: Sequence[Entry], progress: Progress) -> None:
        """Measures all of it, telling `progress` what comes next."""
        ways = list(itertools.product(cases, entries))
        missing = [way for way in ways if of_way(suite, *way) not in self._done]
        for name in dict.fromkeys(entry.provider for _, entry in missing):
            provider = self._provider(name)
            if not isinstance(provider, str):
                # Who fails at it will fail again when it is measured, and say so there.
                with contextlib.suppress(Exception):
                    provider.foresee([(case, entry) for case, entry in missing if entry.provider == name])
        try:
            for case, entry in missing:
                progress(case, entry)
                self.results.records.append(self._measure(suite, case, entry))
                self.measured += 1
        finally:
            if self._done:
                self._sort(suite, cases, entries)

    def _sort(self, suite: str, cases: Sequence[Case], entries: Sequence[Entry]) -> None:
        """Puts the records of what was asked for in its order, after all others."""
        place = {of_way(suite, *way): i for i, way in enumerate(itertools.product(cases, entries))}
        self.results.records.sort(key=lambda r: place.get(of_record(r), -1))

    def _measure(self, suite: str, case: Case, entry: Entry) -> Record:
        provider = self._provider(entry.provider)
        if isinstance(provider, str):
            return record(suite, case, entry, "missing", note=provider)
        if self.calls:
            return call.measure(suite, case, entry, provider, self.machine, count=self.count)
        if reason := self._hopeless(suite, case, entry):
            return record(suite, case, entry, "missing", note=reason)
        return measure(suite, case, entry, provider, self.machine)

    def _provider(self, name: str) -> Provider | str:
        if name not in self.providers:
            self.providers[name] = self._start((CALLERS if self.calls else PROVIDERS)[name])
        return self.providers[name]

    def _start(self, kind: type[Provider]) -> Provider | str:
        label = self.machine.device.label
        if label not in kind.devices:
            return f"does not compute on a {label.upper()}"
        try:
            provider = kind(self.machine.device, self.threads)
            self.results.versions[kind.name] = provider.version()
        except ImportError as error:
            return f"not installed: {error}"
        except Exception as error:  # A broken installation is no reason to lose the others.
            return f"cannot be used: {type(error).__name__}: {error}"
        return provider

    def _hopeless(self, suite: str, case: Case, entry: Entry) -> str:
        """Returns why a case would take too long, or nothing."""
        for other in self.results.records:
            same = (suite, case.op, entry.provider, entry.algorithm, case.dtype.name, case.axis)
            if same != (other.suite, other.op, other.provider, other.algorithm, other.dtype, other.axis):
                continue
            if other.median_s and other.median_s > HOPELESS_S and other.size < case.size:
                return f"not run: {other.case} took {other.median_s:.2f} s"
        return ""


def of_record(r: Record) -> tuple[Any, ...]:
    """Returns what tells a record from others."""
    return r.suite, r.op, r.dtype, r.shape, r.axis, r.provider, r.algorithm, r.block_size, r.unroll


def of_way(suite: str, case: Case, entry: Entry) -> tuple[Any, ...]:
    """Returns what will tell the record of an entry on a case from others."""
    return suite, case.op, case.dtype.name, case.shape, case.axis, *entry


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Returns the name of the CPU."""
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
