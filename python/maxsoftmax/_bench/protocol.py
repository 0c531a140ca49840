"""How one way of computing one case is measured.

A result is compared with float64 before anything is timed; a wrong one is not timed. Time depends on where in memory
the buffers lie, even that of a copy, so it is taken over several fresh placements of input and output, with the
copy of the same bytes beside each, and the median of the placements is the figure. Where one input would stay
in the cache, several take turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from max.driver import Device

from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.clock import Clock, HostClock
from maxsoftmax._bench.data import Check, Inputs, check
from maxsoftmax._bench.providers import Provider, Unsupported
from maxsoftmax._bench.results import Record

PLACEMENTS = 5
"""Fresh allocations of input and output."""

REPEATS = 20
"""Repetitions in each, where a call is short enough."""

ROTATION = 4
"""How many times the device's cache the inputs that take turns exceed."""

MOST_INPUTS = 256
"""Inputs that take turns at most."""

TINY_INPUTS = 32
"""Inputs that take turns where it would take more than `MOST_INPUTS`: then all stay in the cache, for everybody."""

LAP_S = 0.1
"""Seconds that a lap of all inputs may take: of slower calls, which no cache makes faster, fewer inputs take turns."""

BUDGET_S = 2.0
"""Seconds of timed calls: of longer calls there are fewer repetitions, of a call longer than this only one."""

HELD = 24 * 2**30
"""Bytes of earlier placements that are kept, so that the next does not get the same memory."""


class Machine(NamedTuple):
    """Where it is measured."""

    device: Device
    clock: Clock


def rotated(case: Case, cache: int) -> int:
    """Returns how many inputs take turns: together they exceed `ROTATION` times the cache, unless they are tiny."""
    wanted = ROTATION * cache // max(1, case.nbytes) + 1 if cache else 1
    return wanted if wanted <= MOST_INPUTS else TINY_INPUTS


def measure(suite: str, case: Case, entry: Entry, provider: Provider, machine: Machine) -> Record:
    """Returns what `provider` does on `case`. Never raises for what the provider does wrong."""
    return guarded(suite, case, entry, lambda: _measure(suite, case, entry, provider, machine))


def guarded(suite: str, case: Case, entry: Entry, measuring: Callable[[], Record]) -> Record:
    """Returns what `measuring` does, or a record of what was raised there."""
    try:
        return measuring()
    except Unsupported as error:
        return record(suite, case, entry, "missing", note=str(error))
    except Exception as error:  # Whatever a library may raise is its result.
        text = " ".join(str(error).split())
        return record(suite, case, entry, "failed", note=f"{type(error).__name__}: {text[:300]}")


def record(suite: str, case: Case, entry: Entry, status: str, **measured: Any) -> Record:
    """Returns a record of `entry` on `case`."""
    what = (suite, case.op, case.dtype.name, case.shape, case.axis)
    return Record(*what, *entry, status, **measured)


def _measure(suite: str, case: Case, entry: Entry, provider: Provider, machine: Machine) -> Record:
    check_op(case, provider)
    count = rotated(case, machine.clock.cache)
    inputs = Inputs.place(case, count, machine.device)
    xs = shared(inputs, provider)
    function = provider.prepare(case, entry)

    y, seconds = _timed(function, xs[0], machine)
    if provider.lazy or LAP_S / count < seconds <= BUDGET_S:
        if case.op in provider.in_place:
            inputs = Inputs.place(case, count, machine.device)
            xs = shared(inputs, provider)
        # The first call compiled, or may have loaded what the others find.
        y, seconds = _timed(function, xs[0], machine)
    found = check(inputs, 0, *(provider.result(part) for part in (y if isinstance(y, tuple) else (y,))))
    if not found.correct:
        return wrong(suite, case, entry, found)
    del y

    turns = max(1, min(count, int(LAP_S / seconds)))
    clock = HostClock() if provider.own_stream else machine.clock
    copies: list[float] = []
    samples: list[list[float]] = []
    notes: list[str] = []
    if seconds > BUDGET_S:
        # The call that was checked has to do.
        copies.append(median(copies_of(inputs, machine)))
        samples.append([seconds])
        notes.append("timed by the host's clock")
    held: list[Any] = []
    for placement in range(0 if samples else PLACEMENTS):
        if placement:
            # While the last placement's memory is taken, this one lies elsewhere.
            inputs = Inputs.place(case, count, machine.device)
            xs = shared(inputs, provider)
            while held and (len(held) + 1) * case.moved * count > HELD:
                held.pop(0)
        copies.append(median(copies_of(inputs, machine)))
        lap = provider.lap(function, xs[:turns])
        repeats = max(1, min(REPEATS, int(BUDGET_S / PLACEMENTS / (seconds * turns))))
        samples.append(clock.seconds(lap, repeats, replay=turns > 1))
        held.append((inputs, xs, lap()))
        notes += [clock.note] * (placement == 0)
    if provider.own_stream and not machine.device.is_host:
        notes.append("timed by the host's clock, several calls at once")
    if case.op in provider.in_place:
        notes.append("overwrites the logits")
    median_s = median(median(sample) for sample in samples)
    return record(
        suite,
        case,
        entry,
        "ok",
        median_s=median_s,
        min_s=min(min(sample) for sample in samples),
        repeats=sum(map(len, samples)),
        gbps=case.moved / median_s * 1e-9,
        copy_gbps=2 * case.nbytes / median(copies) * 1e-9,
        max_rel_error=found.error,
        note="; ".join(filter(None, notes)),
    )


def check_op(case: Case, provider: Provider) -> None:
    """Refuses an op that a provider does not compute.

    Raises:
        Unsupported: If it does not.
    """
    if case.op not in provider.ops:
        raise Unsupported(f"has no {case.op} here")


def wrong(suite: str, case: Case, entry: Entry, found: Check) -> Record:
    """Returns a record of a result that is not right."""
    # JSON has no other numbers.
    if not math.isfinite(found.error):
        return record(suite, case, entry, "wrong", note="not a finite number where it should be one")
    return record(suite, case, entry, "wrong", max_rel_error=found.error)


def shared(inputs: Inputs, provider: Provider) -> list[Any]:
    """Returns the arguments of each call: the logits, or a tuple where an op takes more."""
    if not inputs.others:
        return [provider.share(x) for x in inputs.buffers]
    return [
        tuple(provider.share(given) for given in (x, *others))
        for x, others in zip(inputs.buffers, inputs.others, strict=True)
    ]


def _timed(function: Callable[[Any], Any], x: Any, machine: Machine) -> tuple[Any, float]:
    """Returns an output, and about how long it took."""
    start = time.perf_counter()
    y = function(x)
    machine.device.synchronize()
    return y, time.perf_counter() - start


def copies_of(inputs: Inputs, machine: Machine) -> list[float]:
    """Returns how long copies of the inputs take, each on the average of them."""
    return machine.clock.seconds(machine.clock.copy(inputs.buffers), REPEATS, replay=len(inputs.buffers) > 1)
