"""SciPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from max.driver import Device

from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.providers.base import ArrayProvider


class Scipy(ArrayProvider):
    """`scipy.special.softmax` and `log_softmax`."""

    name = "scipy"
    ops = ("softmax", "log_softmax")

    def __init__(self, device: Device, threads: int) -> None:
        super().__init__(device, threads)
        import scipy.special

        self.scipy = scipy

    def version(self) -> str:
        """Returns SciPy's version."""
        return str(self.scipy.__version__)

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns SciPy's function."""
        function = getattr(self.scipy.special, case.op)
        return lambda x: function(x, axis=case.axis)
