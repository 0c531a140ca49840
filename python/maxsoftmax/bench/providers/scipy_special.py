"""SciPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from max.driver import Device

from maxsoftmax.bench.cases import Case, Entry
from maxsoftmax.bench.providers.base import ArrayProvider


class Scipy(ArrayProvider):
    """`scipy.special.softmax`."""

    name = "scipy"

    def __init__(self, device: Device, threads: int) -> None:
        super().__init__(device, threads)
        import scipy.special

        self.scipy = scipy

    def version(self) -> str:
        """Returns SciPy's version."""
        return str(self.scipy.__version__)

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns SciPy's function."""
        return lambda x: self.scipy.special.softmax(x, axis=case.axis)
