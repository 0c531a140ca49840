"""Warnings that point at the line of whoever called this package."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

_LIBRARY = os.path.dirname(contextlib.__file__)
_BETWEEN = (
    os.path.join(os.path.dirname(__file__), ""),
    *(os.path.join(_LIBRARY, name) for name in ("contextlib.py", "functools.py", "threading.py", "concurrent")),
)
"""How the names of files begin whose frames are not the caller's."""


def warn(message: str) -> None:
    """Warns of what does no harm to results, at the innermost line outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    # Not by a `stacklevel`, which does not count the frames of imports.
    warnings.warn_explicit(
        message,
        RuntimeWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
