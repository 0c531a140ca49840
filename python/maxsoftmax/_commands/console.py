"""The terminal, as every command of `maxsoftmax` writes to it."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """Prints text as it is: file names may look like markup or emoji codes."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = True, width: int | None = None) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, width=width, highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Leaves it to whoever runs the command, where rich would exit with status 1."""
        raise  # noqa: PLE0704 (called while BrokenPipeError is handled)
