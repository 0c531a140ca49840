"""maxsoftmax itself, through its array API."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from max.driver import Buffer

import maxsoftmax
from maxsoftmax.bench.cases import Case, Entry
from maxsoftmax.bench.providers.base import Provider, Unsupported
from maxsoftmax.eager import Rows

HOPELESS = 4e13
"""Elements read, twice each, from which `elementwise` takes too long: 2e13 take an H200 20 s."""


class MaxSoftmax(Provider):
    """`maxsoftmax.softmax`."""

    name = "maxsoftmax"

    def version(self) -> str:
        """Returns the package's version."""
        return maxsoftmax.__version__

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns `maxsoftmax.softmax` with the entry's choices."""
        rows = Rows.of(case.shape, (case.place,))
        if entry.algorithm == "elementwise" and case.size * rows.n > HOPELESS:
            raise Unsupported("not run: every element reads its row, which takes minutes here")
        softmax = functools.partial(
            maxsoftmax.softmax,
            axis=case.axis,
            algorithm=entry.algorithm or "auto",
            block_size=entry.block_size,
            unroll=entry.unroll,
        )
        # Compiles, so that the first call that counts does not.
        softmax(Buffer.zeros((2,) * len(case.shape), case.dtype, device=self.device))
        return softmax
