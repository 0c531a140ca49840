"""NumPy, as one writes softmax by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.providers.base import ArrayProvider


class Numpy(ArrayProvider):
    """Maximum, exponentials, sum and quotient, in place after the first."""

    name = "numpy"
    ops = ("softmax", "log_softmax")

    def version(self) -> str:
        """Returns NumPy's version."""
        return np.__version__

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns the four ufuncs, for the logarithm one more."""

        def softmax(x: np.ndarray) -> np.ndarray:
            y: np.ndarray = x - x.max(axis=case.axis, keepdims=True)
            np.exp(y, out=y)
            y /= y.sum(axis=case.axis, keepdims=True)
            return y

        def log_softmax(x: np.ndarray) -> np.ndarray:
            y: np.ndarray = x - x.max(axis=case.axis, keepdims=True)
            y -= np.log(np.exp(y).sum(axis=case.axis, keepdims=True))
            return y

        return {"softmax": softmax, "log_softmax": log_softmax}[case.op]
