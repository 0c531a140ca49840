"""The terminal, as every command of `maxsoftmax` writes to it."""

from __future__ import annotations

import rich.console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column


class Console(rich.console.Console):
    """Prints text as it is: file names may look like markup or emoji codes."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = True, width: int | None = None) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, width=width, highlight=False, markup=False, emoji=False)

    def working(self, what: str) -> Progress:
        """Returns what shows `what` and the time since it began while it is entered, where there is a terminal."""
        shown = self.progress(SpinnerColumn(), TimeElapsedColumn(), room=12)
        shown.add_task(what, total=None)
        return shown

    def progress(self, *columns: ProgressColumn, room: int) -> Progress:
        """Returns a line of columns, the first of them before what is going on, which is cut to leave them `room`."""
        fitting = Column(no_wrap=True, overflow="ellipsis", max_width=max(1, self.width - room))
        what = TextColumn("{task.description}", table_column=fitting)
        return Progress(*columns[:1], what, *columns[1:], console=self, transient=True, disable=not self.is_terminal)

    def on_broken_pipe(self) -> None:
        """Leaves it to whoever runs the command, where rich would exit with status 1."""
        raise  # noqa: PLE0704 (called while BrokenPipeError is handled)
