"""Warnings that point at the line of whoever called this package."""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import warnings
from types import FrameType

_LIBRARY = os.path.dirname(contextlib.__file__)
_BETWEEN = (
    os.path.join(os.path.dirname(__file__), ""),
    *(os.path.join(_LIBRARY, name) for name in ("contextlib.py", "functools.py", "threading.py", "concurrent")),
)
"""How the names of files begin whose frames are not the caller's."""


PASSING = ("jax", "torch")
"""Packages that call what was given to them: their lines tell a user nothing."""

_caller: contextvars.ContextVar[FrameType | None] = contextvars.ContextVar("_caller", default=None)
"""Whoever started a thread that warns, if that is known."""


def warn(message: str) -> None:
    """Warns of what does no harm to results, at the innermost line outside of this package."""
    frame = _caller.get() or _outside(sys._getframe(1))
    # Not by a `stacklevel`, which does not count the frames of imports.
    warnings.warn_explicit(
        message,
        RuntimeWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def for_threads() -> contextvars.Context:
    """Returns a context, of which each thread needs a copy, whose warnings point at whoever calls this package now."""
    context = contextvars.copy_context()
    context.run(_caller.set, _caller.get() or _outside(sys._getframe(1)))
    return context


def _outside(frame: FrameType) -> FrameType:
    """Returns the innermost frame from `frame` on that is a user's, or the outermost."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in PASSING)
    passing = (*_BETWEEN, *(os.path.join(os.path.dirname(file), "") for file in files if file))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(passing):
        frame = frame.f_back
    return frame
