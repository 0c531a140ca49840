"""The classifier of `network` in JAX: a step is one function under `jax.jit`, with gradients by `jax.grad`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from max.driver import Device

from maxsoftmax import jax as ours
from maxsoftmax._commands.network import BETAS, EPSILON, Samples, Shape, Step, first_weights


class Training:
    """A network, Adam's moments of it, and the function that does one step with both. All stays on the device.

    Args:
        learn: What to learn from.
        held_out: What the network is tried on.
        classes: How many there are.
        rate: Adam's.
        seed: Of the first weights, which are those of `network.Training`.
        device: Where to compute.

    Raises:
        ValueError: If this build of JAX has no such device.
    """

    def __init__(
        self, learn: Samples, held_out: Samples, *, classes: int, rate: float, seed: int, device: Device
    ) -> None:
        shape = Shape(learn.x.shape[1], classes, len(learn.x), len(held_out.x), rate)
        weights = first_weights(shape, seed)
        place = _device(device)
        self._samples = jax.device_put([(s.x, s.target.astype(np.int32)) for s in (learn, held_out)], place)
        state = np.float32(0), weights, [np.zeros_like(w) for w in weights], [np.zeros_like(w) for w in weights]
        self._state = jax.device_put(state, place)
        self._step = jax.jit(functools.partial(_step, rate))

    @property
    def weights(self) -> list[np.ndarray]:
        """The network, as of `network.Training`."""
        return [np.asarray(value) for value in self._state[1]]

    def steps(self, count: int) -> Iterator[Step]:
        """Does `count` steps and yields what each found; the last one that is yielded only looks."""
        for number in range(count + 1):
            loss, right, state = self._step(*self._samples, self._state)
            if number < count:
                self._state = state
            yield Step(float(loss), float(right))


def _device(device: Device) -> Any:
    """Returns a device as JAX has it.

    Raises:
        ValueError: If it has it not.
    """
    try:
        return jax.devices("cpu" if device.is_host else "gpu")[0 if device.is_host else device.id]
    except (RuntimeError, IndexError):
        raise ValueError(f"device gpu:{device.id} is not among those of this build of JAX") from None


def loss(weights: list[Any], x: Any, target: Any) -> Any:
    """Returns the mean cross entropy of a network."""
    return ours.cross_entropy(logits(weights, x), target).mean()


def logits(weights: list[Any], x: Any) -> Any:
    """Returns the logits of a network."""
    return jax.nn.relu(x @ weights[0] + weights[1]) @ weights[2] + weights[3]


def _step(rate: float, learn: Any, held_out: Any, state: Any) -> tuple[Any, Any, Any]:
    """Returns the loss, the share held out that is right, and the next state, by Adam (arXiv 1412.6980)."""
    before, weights, firsts, seconds = state
    found, gradients = jax.value_and_grad(loss)(weights, *learn)
    x, target = held_out
    right = (logits(weights, x).argmax(axis=-1) == target).mean()
    number = before + 1
    firsts = [m * BETAS[0] + g * (1 - BETAS[0]) for m, g in zip(firsts, gradients, strict=True)]
    seconds = [v * BETAS[1] + g * g * (1 - BETAS[1]) for v, g in zip(seconds, gradients, strict=True)]
    # Moments start at 0, which is divided out.
    of_first, of_second = (1 - beta**number for beta in BETAS)
    weights = [
        w - rate * (m / of_first) / (jnp.sqrt(v / of_second) + EPSILON)
        for w, m, v in zip(weights, firsts, seconds, strict=True)
    ]
    return found, right, (number, weights, firsts, seconds)
