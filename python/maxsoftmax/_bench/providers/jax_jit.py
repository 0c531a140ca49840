"""JAX, compiled by XLA: its own functions, and those of `maxsoftmax.jax`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from max.driver import CPU, Buffer, Device
from max.dtype import DType

import maxsoftmax
from maxsoftmax._bench import reference
from maxsoftmax._bench.cases import KEPT, OPS, SCALE, Case, Entry
from maxsoftmax._bench.providers.base import Provider, Unsupported

CHAIN = 32
"""Softmaxes in one executable at most: XLA compiles each."""

CALLS = 8
"""Calls that are dispatched before the host waits, where one executable computes one softmax."""


class Jax(Provider):
    """`jax.nn.softmax` and its relatives.

    XLA has streams of its own, so several calls are timed together by the host's clock.
    """

    name = "jax"
    ops = tuple(OPS)
    lazy = True
    own_stream = True
    late = True

    def __init__(self, device: Device, threads: int) -> None:
        super().__init__(device, threads)
        # The other libraries need memory too.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        if device.is_host:
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax

        self.jax, self.nn = jax, jax.nn
        self.where = jax.devices("cpu")[0]
        if not device.is_host:
            try:
                self.where = jax.devices("gpu")[device.id]
            except RuntimeError as error:
                raise ImportError("this build of jax has no GPU") from error

    def version(self) -> str:
        """Returns JAX's version."""
        return str(self.jax.__version__)

    def share(self, x: Buffer) -> Any:
        """Returns `x` as a JAX array."""
        if x.dtype == DType.int64:
            # JAX has no such integers unless configured, and converts them if it can.
            return self.jax.numpy.asarray(x.to(CPU()).to_numpy().astype(np.int32), device=self.where)
        if x.dtype == DType.float64 and not self.jax.config.jax_enable_x64:
            raise Unsupported("takes no float64 unless configured")
        # What is not aligned to XLA's liking is copied.
        return self.jax.dlpack.from_dlpack(x)

    def prepare(self, case: Case, entry: Entry) -> Callable[[Any], Any]:
        """Returns the jitted function."""
        nn, axis = self.nn, case.axis
        if case.op == "masked_softmax":
            return self._masked(case)
        functions: dict[str, Callable[[Any], Any]] = {
            "softmax": lambda x: nn.softmax(x, axis=axis),
            "scaled_softmax": lambda x: nn.softmax(x * SCALE, axis=axis),
            "rescaled_softmax": lambda x: nn.softmax(x * SCALE, axis=axis) * KEPT,
            "causal_softmax": self._causal,
            "log_softmax": lambda x: nn.log_softmax(x, axis=axis),
            "softmax_backward": lambda given: self._backward(given[0], given[1], axis),
            "cross_entropy": lambda given: self._loss(*given),
            "cross_entropy_gradient": lambda given: self.jax.value_and_grad(self._loss)(*given),
        }
        function: Callable[[Any], Any] = self.jax.jit(functions[case.op])
        return function

    def _causal(self, x: Any) -> Any:
        queries, keys = (self.jax.lax.iota(np.int32, size) for size in x.shape[-2:])
        return self.nn.softmax(self.jax.numpy.where(queries[:, None] >= keys, x, -np.inf), axis=-1)

    def _masked(self, case: Case) -> Callable[[Any], Any]:
        """Returns the jitted softmax with a mask of queries and keys."""
        mask = self.jax.device_put(reference.mask(case), self.where)
        function = self.jax.jit(lambda mask, x: self.nn.softmax(self.jax.numpy.where(mask, x, -np.inf), axis=-1))
        return functools.partial(function, mask)

    def _backward(self, y: Any, dy: Any, axis: int) -> Any:
        return y * (dy - (y * dy).sum(axis, keepdims=True))

    def _loss(self, x: Any, target: Any) -> Any:
        log_p = self.jax.nn.log_softmax(x, axis=-1)
        return -self.jax.numpy.take_along_axis(log_p, target[:, None], axis=-1).mean()

    def wait(self, y: Any) -> None:
        """Returns when `y` is there: JAX's streams are its own."""
        self.jax.block_until_ready(y)

    def lap(self, function: Callable[[Any], Any], xs: list[Any]) -> Callable[[], list[Any]]:
        """Returns several softmaxes, one after another, and a wait for the last."""
        if self.device.is_host:
            return lambda: [self.jax.block_until_ready(function(x)) for x in xs]
        if len(xs) == 1:
            return lambda: self._repeated(function, xs[0])
        chained, few = self.jax.jit(self._chain(function)), xs[:CHAIN]
        return lambda: list(self.jax.block_until_ready(chained(few)))

    def _repeated(self, function: Callable[[Any], Any], x: Any) -> list[Any]:
        for _ in range(CALLS):
            # Earlier outputs are let go of, so that one after another fits.
            y = function(x)
        return [self.jax.block_until_ready(y)] * CALLS

    def _chain(self, function: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
        def chain(xs: list[Any]) -> list[Any]:
            ys: list[Any] = []
            for x in xs:
                # Each waits for the one before, so that XLA cannot merge them into one kernel.
                ready = self.jax.lax.optimization_barrier((x, ys[-1]))[0] if ys else x
                ys.append(function(ready))
            return ys

        return chain


class OurJax(Jax):
    """`maxsoftmax.jax` under the same `jax.jit`."""

    name = "maxsoftmax.jax"

    def __init__(self, device: Device, threads: int) -> None:
        super().__init__(device, threads)
        from maxsoftmax import jax as ours
        from maxsoftmax.jax import _differentiable as differentiable

        self.nn, self.backward = ours, differentiable.softmax_backward

    def version(self) -> str:
        """Returns the package's version."""
        return maxsoftmax.__version__

    def _backward(self, y: Any, dy: Any, axis: int) -> Any:
        return self.backward(y, dy, axis % y.ndim)

    def _loss(self, x: Any, target: Any) -> Any:
        return self.nn.cross_entropy(x, target).mean()
