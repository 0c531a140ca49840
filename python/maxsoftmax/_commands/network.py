"""A classifier of one hidden layer, and the MAX graph that does a whole step of training it.

Forward, cross entropy, backward and Adam are in one graph. The gradients of the loss are this package's; those of the
layers are written out by hand.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from max.driver import CPU, Buffer, Device
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue
from max.graph import ops as max_ops

from maxsoftmax import ops
from maxsoftmax._graph import artifacts, runtime
from maxsoftmax._graph.extension import extension

HIDDEN = 96
"""Neurons between features and classes."""

BETAS = (0.9, 0.999)
"""How much Adam keeps of its first and its second moment."""

EPSILON = 1e-8
"""What Adam adds to the root of the second moment."""


class Samples(NamedTuple):
    """What a network learns from, or is tried on."""

    x: np.ndarray
    """Features, (samples, features) float32."""
    target: np.ndarray
    """The class of each, int64."""


class Step(NamedTuple):
    """What one step found, before it changed the network."""

    loss: float
    """Mean cross entropy of the samples that are learnt from."""
    right: float
    """Share of the samples held out whose class has the largest logit."""


class Shape(NamedTuple):
    """All that the graph of a step depends on."""

    features: int
    classes: int
    learn: int
    """Samples that are learnt from."""
    held_out: int
    """Samples that are not."""
    rate: float
    """Adam's."""

    @property
    def weights(self) -> list[tuple[int, ...]]:
        """The shapes of weights and biases, layer by layer."""
        return [(self.features, HIDDEN), (HIDDEN,), (HIDDEN, self.classes), (self.classes,)]


class Training:
    """A network, Adam's moments of it, and the compiled graph that does one step with both. All stays on the device.

    Args:
        learn: What to learn from.
        held_out: What the network is tried on.
        classes: How many there are.
        rate: Adam's.
        seed: Of the first weights, which are drawn as `torch.nn.Linear` draws them.
        device: Where to compute.
        compiling: Entered while the graph compiles, unless an earlier process has done that.
    """

    def __init__(
        self,
        learn: Samples,
        held_out: Samples,
        *,
        classes: int,
        rate: float,
        seed: int,
        device: Device,
        compiling: AbstractContextManager[Any] | None = None,
    ) -> None:
        shape = Shape(learn.x.shape[1], classes, len(learn.x), len(held_out.x), rate)
        session = InferenceSession(devices=[device])
        architecture = "" if device.is_host else device.architecture_name
        source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        parts = ["train", source, runtime.name(device), architecture, *map(str, shape)]
        with compiling or nullcontext():
            (self._model,) = artifacts.load(
                session, parts, functools.partial(_compile, session, shape, device)
            ).values()
        weights = first_weights(shape, seed)
        moments = [np.zeros_like(w) for w in weights] * 2
        self._samples = [_buffer(a, device) for a in (*learn, *held_out)]
        self._state = [_buffer(a, device) for a in (np.zeros(1, np.float32), *weights, *moments)]

    @property
    def weights(self) -> list[np.ndarray]:
        """The network: weights (features, hidden), biases (hidden), weights (hidden, classes), biases (classes)."""
        return [_array(value) for value in self._state[1:5]]

    @property
    def moments(self) -> list[np.ndarray]:
        """Adam's first moments of the weights, in their order."""
        return [_array(value) for value in self._state[5:9]]

    def steps(self, count: int) -> Iterator[Step]:
        """Does `count` steps and yields what each found; the last one that is yielded only looks."""
        for number in range(count + 1):
            loss, right, *state = self._model.execute(*self._samples, *self._state)
            if number < count:
                self._state = state
            yield Step(float(_array(loss)), float(_array(right)))


def _compile(session: InferenceSession, shape: Shape, device: Device) -> CompiledModel:
    step = graph(shape, DeviceRef.from_device(device))
    return runtime.compiled(session, step)


def graph(shape: Shape, device: DeviceRef) -> Graph:
    """Returns a step as a graph.

    It takes the samples to learn from, their classes, the same of the samples held out, and the state: how many steps
    there were, weights, and Adam's first and second moments of them. It returns loss, share held out that is right,
    and the next state.
    """

    def real(*dims: int) -> TensorType:
        return TensorType(DType.float32, dims, device)

    samples = [
        kind
        for count in (shape.learn, shape.held_out)
        for kind in (real(count, shape.features), TensorType(DType.int64, [count], device))
    ]
    state = [real(1), *(real(*dims) for dims in shape.weights * 3)]
    with Graph("train", input_types=[*samples, *state], custom_extensions=[extension()]) as result:
        x, target, x_held_out, target_held_out, before, *values = (value.tensor for value in result.inputs)
        weights, first, second = values[:4], values[4:8], values[8:]
        loss, gradients = loss_and_gradients(x, target, weights)
        _, _, logits = _forward(x_held_out, weights)
        chosen = max_ops.squeeze(max_ops.argmax(logits, axis=-1), -1)
        right = max_ops.cast(max_ops.equal(chosen, target_held_out), DType.float32)
        number = before + 1.0
        changed = [_adam(values, number, shape.rate) for values in zip(weights, gradients, first, second, strict=True)]
        after = [value for kind in zip(*changed, strict=True) for value in kind]
        result.output(loss, max_ops.squeeze(max_ops.mean(right, axis=0), 0), number, *after)
    return result


def loss_and_gradients(
    x: TensorValue, target: TensorValue, weights: list[TensorValue]
) -> tuple[TensorValue, list[TensorValue]]:
    """Returns the mean cross entropy of a network, and the gradient of each of its weights, written out by hand."""
    hidden, active, logits = _forward(x, weights)
    loss, pairs = ops.cross_entropy_forward(logits, target)
    dlogits = ops.cross_entropy_backward(logits, target, pairs)
    dactive = _product(dlogits, max_ops.transpose(weights[2], 0, 1))
    zero = max_ops.constant(0.0, hidden.dtype, hidden.device)
    dhidden = max_ops.where(max_ops.greater(hidden, zero), dactive, zero)
    gradients = [
        _product(max_ops.transpose(x, 0, 1), dhidden),
        max_ops.squeeze(max_ops.sum(dhidden, axis=0), 0),
        _product(max_ops.transpose(active, 0, 1), dlogits),
        max_ops.squeeze(max_ops.sum(dlogits, axis=0), 0),
    ]
    return loss, gradients


def _forward(x: TensorValue, weights: list[TensorValue]) -> tuple[TensorValue, TensorValue, TensorValue]:
    """Returns the hidden layer before and after relu, and the logits."""
    hidden = _product(x, weights[0]) + weights[1]
    active = max_ops.relu(hidden)
    return hidden, active, _product(active, weights[2]) + weights[3]


def _product(a: TensorValue, b: TensorValue) -> TensorValue:
    """Returns the product of two small matrices, as sums: to compile MAX's own takes as long as all else together."""
    return max_ops.squeeze(max_ops.sum(max_ops.unsqueeze(a, 2) * max_ops.unsqueeze(b, 0), axis=1), 1)


def _adam(values: tuple[TensorValue, ...], number: TensorValue, rate: float) -> tuple[TensorValue, ...]:
    """Returns a weight and its moments after step `number`, counted from 1 (Kingma and Ba 2014, arXiv 1412.6980).

    Args:
        values: The weight, its gradient, and its first and second moments before the step.
        number: Of the step.
        rate: How fast to go.
    """
    weight, gradient, first, second = values
    first = first * BETAS[0] + gradient * (1 - BETAS[0])
    second = second * BETAS[1] + gradient * gradient * (1 - BETAS[1])
    # Moments start at 0, which is divided out.
    mean, square = (
        moment / (1.0 - max_ops.exp(number * math.log(beta)))
        for moment, beta in zip((first, second), BETAS, strict=True)
    )
    return weight - mean / (max_ops.sqrt(square) + EPSILON) * rate, first, second


def first_weights(shape: Shape, seed: int) -> list[np.ndarray]:
    """Returns weights and biases as `torch.nn.Linear` draws them."""
    random = np.random.default_rng((seed, 1))
    # Weights and biases of a layer alike are uniform within 1 / √inputs.
    inputs = (shape.features, shape.features, HIDDEN, HIDDEN)
    return [
        random.uniform(-1 / math.sqrt(n), 1 / math.sqrt(n), dims).astype(np.float32)
        for n, dims in zip(inputs, shape.weights, strict=True)
    ]


def _buffer(array: np.ndarray, device: Device) -> Buffer:
    return Buffer.from_numpy(np.ascontiguousarray(array)).to(device)


def _array(value: Buffer) -> np.ndarray:
    array: np.ndarray = value.to(CPU()).to_numpy()
    return array
