"""What is told while a library is built: to whoever observes, or else on stderr."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from maxsoftmax._native import fork
from maxsoftmax._native.description import Library

if TYPE_CHECKING:
    from rich.progress import Progress

Observer = Callable[[Library], AbstractContextManager[Any]]

_observers: list[Observer] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Enters what `observer` returns around every build meanwhile, in place of what is written on stderr.

    It may be called from several threads at once.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextmanager
def shown(library: Library, waiting: bool = False) -> Iterator[None]:
    """Tells that a library is being built, or that another process is waited for, which builds it."""
    with ExitStack() as stack:
        for observer in list(_observers):
            stack.enter_context(observer(library))
        if not _observers:
            told = "waiting for the process that builds" if waiting else "building"
            stack.enter_context(_stderr.showing(f"maxsoftmax: {told} {library}, once: it takes seconds"))
        yield


class Display:
    """Lines about what is going on, in one status line on a terminal, and one after another elsewhere."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all lines, and the threads that showed them."""
        self._lines: list[str] = []
        self._status: Progress | None = None
        self._lock = threading.Lock()

    @contextmanager
    def showing(self, line: str) -> Iterator[None]:
        """Shows a line meanwhile. Safe to call from several threads."""
        with self._lock:
            self._lines.append(line)
            self._show()
        try:
            yield
        finally:
            with self._lock:
                self._lines.remove(line)
                self._show(done=True)

    def _show(self, done: bool = False) -> None:
        if sys.stderr is None:
            return
        if sys.stderr.isatty():
            self._show_status()
        elif not done:
            print(self._lines[-1], file=sys.stderr, flush=True)

    def _show_status(self) -> None:
        from maxsoftmax._commands.console import Console

        if self._lines and self._status is None:
            self._status = Console(stderr=True).working(self._lines[-1])
            self._status.start()
        elif self._lines and self._status:
            more = f" (and {len(self._lines) - 1} more)" if len(self._lines) > 1 else ""
            self._status.update(self._status.task_ids[0], description=self._lines[-1] + more)
        elif self._status:
            self._status.stop()
            self._status = None


_stderr = Display()

fork.forget_in_child(_stderr.reset)
