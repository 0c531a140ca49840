"""How a whole call is timed, as a library's users make it: what it costs its caller, and when its result is there.

A result is compared with float64 before anything is timed. The same logits are given to every call, as in a user's
loop, and what was computed is let go of before the next. Each process that a provider gets places them anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.data import Inputs, check
from maxsoftmax._bench.protocol import Machine, check_op, copies_of, guarded, record, shared, wrong
from maxsoftmax._bench.providers import Provider
from maxsoftmax._bench.results import Record

MOST = 1000
"""Calls of each kind that are timed, where they are short enough."""

LEAST = 3
"""Calls that are timed however long they take."""

BUDGET_S = 0.2
"""Seconds of timed calls of each kind."""

WARM_S = 0.05
"""Seconds of calls before the first that is timed: caches fill, and clocks rise."""

BATCH = 16
"""Calls that a GPU is given before the host waits for it: so few that its queue never fills, which would make it wait
within a call."""


def measure(
    suite: str, case: Case, entry: Entry, provider: Provider, machine: Machine, *, count: int | None = None
) -> Record:
    """Returns what a call of `provider` costs on `case`. Never raises for what the provider does wrong.

    Args:
        suite: Its name.
        case: What is computed.
        entry: How.
        provider: By whom.
        machine: Where.
        count: How many calls of each kind are timed, after the one that is checked; None for as many as fit, after
            warming up.
    """
    return guarded(suite, case, entry, lambda: _measure(suite, case, entry, provider, machine, count=count))


def _measure(
    suite: str, case: Case, entry: Entry, provider: Provider, machine: Machine, *, count: int | None
) -> Record:
    check_op(case, provider)
    inputs = Inputs.place(case, 1, machine.device)
    with provider.calling(case):
        (x,) = shared(inputs, provider)
        function = provider.prepare(case, entry)
        wait = provider.wait if provider.late or not machine.device.is_host else None

        y = function(x)
        provider.wait(y)
        found = check(inputs, 0, *(provider.result(part) for part in (y if isinstance(y, tuple) else (y,))))
        if not found.correct:
            return wrong(suite, case, entry, found)
        del y
        count = count or _warm(function, x, wait)
        finished = _finished(function, x, wait, count)
        # On a CPU, calls that are under way would take its cores from the next.
        batch = 1 if machine.device.is_host else BATCH
        returned = _returned(function, x, wait, count, batch) if wait else finished
    copy_s = median(copies_of(inputs, machine))
    median_s = median(finished)
    return record(
        suite,
        case,
        entry,
        "ok",
        median_s=median_s,
        min_s=min(finished),
        repeats=len(finished),
        gbps=case.moved / median_s * 1e-9,
        copy_gbps=2 * case.nbytes / copy_s * 1e-9,
        max_rel_error=found.error,
        note="overwrites the logits" if case.op in provider.in_place else "",
        host_s=median(returned),
    )


def _warm(function: Callable[[Any], Any], x: Any, wait: Callable[[Any], None] | None) -> int:
    """Makes calls that do not count, and returns how many of their kind fit the budget."""
    spent: list[float] = []
    while not spent or (sum(spent) < WARM_S and len(spent) < MOST):
        spent += _finished(function, x, wait, 1)
    return max(LEAST, min(MOST, int(BUDGET_S / min(spent))))


def _finished(function: Callable[[Any], Any], x: Any, wait: Callable[[Any], None] | None, count: int) -> list[float]:
    """Returns the seconds from each call to its result."""
    times, now = [], time.perf_counter_ns
    for _ in range(count):
        start = now()
        y = function(x)
        if wait:
            wait(y)
        times.append((now() - start) * 1e-9)
        # Its memory is for the next to take, and giving it back is no part of a call.
        del y
    return times


def _returned(
    function: Callable[[Any], Any], x: Any, wait: Callable[[Any], None], count: int, batch: int
) -> list[float]:
    """Returns the seconds that each call keeps its caller; after each batch it waits, which does not count."""
    times, now, y = [], time.perf_counter_ns, None
    for number in range(count):
        y = None
        start = now()
        y = function(x)
        times.append((now() - start) * 1e-9)
        if number % batch == batch - 1:
            wait(y)
    wait(y)
    return times
