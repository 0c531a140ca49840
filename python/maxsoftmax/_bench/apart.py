"""Runs a suite with each provider in a process of its own, one after another, in several rounds.

Threads of another library that spin, waiting for work, take a core away from whoever computes; memory that it holds and
streams that it set do not go away either. So a provider's process has nothing else in it, and ends before the next
begins. What drifts meanwhile, such as the clock of a processor or the neighbours of a virtual machine, meets everybody
alike, since they take turns.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from max.driver import Device

from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.protocol import record
from maxsoftmax._bench.results import Record, Results
from maxsoftmax._bench.run import Bench, Progress, of_record, of_way

ROUNDS = 3
"""How often each provider has its turn, unless told otherwise."""

PROGRAM = (sys.executable, "-m", "maxsoftmax")
"""What the processes run."""

PATIENCE_S = 60.0
"""Seconds that an interrupted process has to keep what it measured."""

OWN = "maxsoftmax: "
"""How a sentence of ours begins, rather than something that a library wrote when it broke."""


class Apart(Bench):
    """As `Bench`, but each provider has its turns in a process of its own, which measures all cases.

    Args:
        device: Where to compute.
        command: What was typed.
        threads: Of the processor, where that computes.
        arguments: Returns what to tell `PROGRAM`, for entries of one provider: all but where records go.
        rounds: How often each provider has its turn; the median of the rounds is the figure.
    """

    def __init__(
        self,
        device: Device,
        command: Sequence[str],
        threads: int,
        arguments: Callable[[Sequence[Entry]], list[str]],
        rounds: int = ROUNDS,
    ) -> None:
        # Who measures calls, and how, is the processes' affair.
        super().__init__(device, command, threads)
        self.arguments = arguments
        self.rounds = rounds
        self.results.rounds = rounds
        self._round = 0

    def describe(self, case: Case, entry: Entry) -> str:
        """Returns whose turn it is."""
        return f"round {self._round} of {self.rounds}: {entry.provider}"

    def run(self, suite: str, cases: Sequence[Case], entries: Sequence[Entry], progress: Progress) -> None:
        """Measures all of it, telling `progress` whose turn comes next."""
        kept = list(self.results.records)
        turns: list[list[Record]] = []
        with tempfile.TemporaryDirectory() as folder:
            for number in range(1, self.rounds + 1):
                self._round = number
                for name in dict.fromkeys(entry.provider for entry in entries):
                    mine = [entry for entry in entries if entry.provider == name]
                    ways = self._left(suite, cases, mine, turns)
                    if not ways:
                        continue
                    progress(cases[0], mine[0])
                    try:
                        self._turn(suite, ways, mine, Path(folder) / "records.json", turns)
                    except KeyboardInterrupt:
                        self.results.rounds = max(1, self._round - 1)
                        raise
                    finally:
                        self.results.records = kept + merged(turns)
                        self._sort(suite, cases, entries)
                    self.measured += len(ways)

    def _check_versions(self, earlier: Results, entries: Sequence[Entry]) -> None:
        """Leaves the libraries' to their processes, which are given the earlier records."""
        self._compare(earlier)

    def _left(
        self, suite: str, cases: Sequence[Case], entries: Sequence[Entry], turns: Sequence[Sequence[Record]]
    ) -> list[tuple[Case, Entry]]:
        """Returns what to measure of a provider: nothing if it could do nothing when it was its turn before."""
        before = [r for turn in turns for r in turn if r.provider == entries[0].provider]
        if before and not any(r.status == "ok" for r in before):
            return []
        return [(case, entry) for case in cases for entry in entries if of_way(suite, case, entry) not in self._done]

    def _turn(
        self,
        suite: str,
        ways: Sequence[tuple[Case, Entry]],
        entries: Sequence[Entry],
        path: Path,
        turns: list[list[Record]],
    ) -> None:
        """Has a process measure `ways`, and appends what it did to `turns`."""
        command = [*PROGRAM, *self.arguments(entries), "--json", str(path)]
        path.unlink(missing_ok=True)
        done = [r for r in self.results.records if of_record(r) in self._done and r.provider == entries[0].provider]
        if done:
            # It finds them in its file, and leaves them out.
            replace(self.results, records=done).write(path)
            command.append("--resume")
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            # In a group of its own, so that it is interrupted once, by us.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, process_group=0
            )
            interrupted = None
            try:
                status = process.wait()
            except KeyboardInterrupt as error:
                interrupted, status = error, _interrupt(process)
            log.seek(0)
            lines = [line.strip() for line in log.read().splitlines() if line.strip()]
        wanted = {of_way(suite, *way) for way in ways}
        records: dict[object, Record] = {}
        if path.exists():
            found = Results.read(path)
            records = {of_record(r): r for r in found.records if of_record(r) in wanted}
            self.results.versions |= found.versions
        turns.append(list(records.values()))
        if interrupted or status == 128 + signal.SIGINT:
            raise interrupted or KeyboardInterrupt
        last = lines[-1] if lines else ""
        if status and not records and last.startswith(OWN):
            # It understood, and refuses.
            raise ValueError(last.removeprefix(OWN))
        note = f"its process ended with {_ending(status)}" + f": {last[:300]}" * bool(last)
        turns[-1] += [record(suite, *way, "failed", note=note) for way in ways if of_way(suite, *way) not in records]


def _interrupt(process: subprocess.Popen[bytes]) -> int:
    """Interrupts a process, and returns how it ended."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(PATIENCE_S)
    process.kill()
    return process.wait()


def _ending(status: int) -> str:
    """Returns in words how a process ended."""
    try:
        return f"status {status}" if status >= 0 else signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def merged(turns: Sequence[Sequence[Record]]) -> list[Record]:
    """Returns one record for all turns that each way had."""
    found: dict[object, list[Record]] = {}
    for turn in turns:
        for r in turn:
            found.setdefault(of_record(r), []).append(r)
    return [_together(records) for records in found.values()]


def _together(records: Sequence[Record]) -> Record:
    """Returns the median of what the rounds measured; one that went wrong is not made good by the others."""
    bad = next((r for r in records if r.status in ("wrong", "failed")), None)
    timed = [r for r in records if r.status == "ok"]
    if bad or not timed:
        return bad or records[0]
    first = timed[0]
    median_s = median(r.median_s or 0.0 for r in timed)
    return replace(
        first,
        median_s=median_s,
        min_s=min(r.min_s or 0.0 for r in timed),
        repeats=sum(r.repeats for r in timed),
        # The bytes are the same in every round.
        gbps=(first.gbps or 0.0) * (first.median_s or 0.0) / median_s,
        copy_gbps=median(r.copy_gbps or 0.0 for r in timed),
        max_rel_error=max(r.max_rel_error or 0.0 for r in timed),
        host_s=None if first.host_s is None else median(r.host_s or 0.0 for r in timed),
    )
