"""maxsoftmax itself, through its array API."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from max.driver import Buffer
from max.dtype import DType

import maxsoftmax
from maxsoftmax._arguments import BLOCK_SIZE, UNROLL
from maxsoftmax._arrays.call import Call, Chosen
from maxsoftmax._arrays.layout import Rows
from maxsoftmax._bench import reference
from maxsoftmax._bench.cases import OPS, SPELLED, Case, Entry
from maxsoftmax._bench.providers.base import Provider, Unsupported
from maxsoftmax._bench.providers.max_builtin import of_graph
from maxsoftmax._native.description import SEARCHED
from maxsoftmax._native.plan import NoPlan

HOPELESS = 4e13
"""Elements read, twice each, from which `elementwise` takes too long: 2e13 take an H200 20 s."""


class OfArrays(Provider):
    """Functions of NumPy's arrays, and of MAX's on a GPU and where NumPy has no such array."""

    name = "maxsoftmax"

    def version(self) -> str:
        """Returns the package's version."""
        return maxsoftmax.__version__

    def share(self, x: Buffer) -> Any:
        """Returns `x` as NumPy sees it, if it does."""
        return x if x.dtype == DType.bfloat16 or not self.device.is_host else x.to_numpy()

    def result(self, y: Any) -> Buffer:
        """Returns the memory of `y`, which may be a scalar."""
        return y if isinstance(y, Buffer) else Buffer.from_numpy(np.asarray(y, order="C"))


class MaxSoftmax(OfArrays):
    """`maxsoftmax.softmax` and its relatives."""

    ops = tuple(OPS)

    def foresee(self, ways: Sequence[tuple[Case, Entry]]) -> None:
        """Builds all libraries at once, one a core."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda way: self.prepare(*way), ways))

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns the op's function, for softmax with the entry's choices."""
        if case.op in SPELLED:
            return self._dropped_in(case.like)
        if case.op == "masked_softmax":
            return self._masked(case)
        if case.op != "softmax":
            return self._relative(case)
        if entry.algorithm.startswith(SEARCHED):
            return self._searched(case, entry)
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
        # Builds the library, so that the first call that counts does not.
        softmax(Buffer.zeros((2,) * len(case.shape), case.dtype, device=self.device))
        return softmax

    @functools.cache  # noqa: B019 (a provider lives as long as the run)
    def _dropped_in(self, like: Case) -> Callable[[Any], Any]:
        """Returns MAX's graph as it is, computed by the drop-in."""
        graph = of_graph(like, self.device, maxsoftmax.drop_into)
        return lambda x: graph(x if isinstance(x, Buffer) else Buffer.from_numpy(x))

    def _searched(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns `auto` along the last axis by a configuration that no table has."""

        def softmax(x: Buffer) -> Any:
            call = Call(x, "x", None)
            y = call.empty(call.out_dtype, call.x.shape, range(len(call.x.shape)))
            rows = Rows.of(call.x.shape, (len(call.x.shape) - 1,))
            call.run("softmax", rows, (), (y, call.x), Chosen(entry.algorithm, BLOCK_SIZE, UNROLL))
            return call.result(y)

        try:
            softmax(Buffer.zeros((1, case.shape[-1]), case.dtype, device=self.device))
        except NoPlan as error:
            raise Unsupported("has no room for such rows") from error
        return softmax

    def _relative(self, case: Case) -> Callable[[Any], Any]:
        """Returns the function of another op than softmax."""
        functions: dict[str, Callable[[Any], Any]] = {
            "log_softmax": functools.partial(maxsoftmax.log_softmax, axis=case.axis),
            "softmax_backward": lambda given: maxsoftmax.softmax_backward(given[0], given[1], case.axis),
            "cross_entropy": lambda given: maxsoftmax.cross_entropy(*given),
            "cross_entropy_gradient": loss_and_gradient,
        }
        function = functions[case.op]
        x = Buffer.zeros((2,) * len(case.shape), case.dtype, device=self.device)
        others = [x] * (OPS[case.op].reads - 1)
        if OPS[case.op].losses:
            others = [Buffer.zeros((2,), DType.int64, device=self.device)]
        function((x, *others) if others else x)
        return function

    def _masked(self, case: Case) -> Callable[[Any], Any]:
        """Returns softmax with a mask of queries and keys."""
        mask = self.share(Buffer.from_numpy(reference.mask(case)).to(self.device))
        function = functools.partial(maxsoftmax.softmax, mask=mask)
        function(Buffer.zeros(case.shape[-2:], case.dtype, device=self.device))
        return function


def loss_and_gradient(given: tuple[Any, Any]) -> tuple[Any, Any]:
    """Returns the loss and the gradient of the logits, of logits and targets."""
    loss, pairs = maxsoftmax.cross_entropy_forward(*given)
    return loss, maxsoftmax.cross_entropy_backward(*given, pairs)
