"""A small transformer of `max.nn` with random weights, with and without maxsoftmax's drop-in.

Nothing in the model knows of maxsoftmax: attention and the sampler call `max.graph.ops.softmax`. The same weights are
run both ways, results compared and calls timed, at each length of the prompt:

    python examples/transformer.py --gpu --width 1024 --heads 16 --layers 4 1024 4096 16384
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import maxsoftmax
import numpy as np
from max.driver import CPU, Accelerator, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.nn import MLP, Embedding, LayerList, Linear, Module, RMSNorm

FLOAT = DType.float32


class Sizes(NamedTuple):
    """The dimensions of the model."""

    vocabulary: int = 1000
    width: int = 64
    heads: int = 4
    layers: int = 2
    top_k: int = 10


class Attention(Module):
    """Causal self-attention of one sequence."""

    def __init__(self, sizes: Sizes, device: DeviceRef) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.device = device
        self.inputs = Linear(sizes.width, 3 * sizes.width, FLOAT, device)
        self.output = Linear(sizes.width, sizes.width, FLOAT, device)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Returns what each token takes from itself and those before it, for `x` of (length, width)."""
        length, width = x.shape
        depth = int(width) // self.heads
        parts = ops.reshape(self.inputs(x), (length, 3, self.heads, depth))
        query, key, value = (ops.transpose(parts[:, i], 0, 1) for i in range(3))
        scores = query @ ops.transpose(key, 1, 2) * depth**-0.5
        place = ops.range(0, length, 1, out_dim=length, dtype=DType.int32, device=self.device)
        # In one step each: MAX 26.7 computes wrongly what is broadcast, compared and broadcast again.
        seen = ops.broadcast_to(ops.unsqueeze(place, 1), scores.shape) >= ops.broadcast_to(place, scores.shape)
        nothing = ops.constant(float("-inf"), FLOAT, self.device)
        heads = ops.softmax(ops.where(seen, scores, nothing)) @ value
        return self.output(ops.reshape(ops.transpose(heads, 0, 1), (length, width)))


class Layer(Module):
    """Attention and an MLP, each added to what it is given."""

    def __init__(self, sizes: Sizes, device: DeviceRef) -> None:
        super().__init__()
        self.before_attention = RMSNorm(sizes.width, FLOAT)
        self.attention = Attention(sizes, device)
        self.before_mlp = RMSNorm(sizes.width, FLOAT)
        self.mlp = MLP(FLOAT, None, sizes.width, 2 * sizes.width, [device])

    def __call__(self, x: TensorValue) -> TensorValue:
        """Returns the next `x`, of (length, width)."""
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Transformer(Module):
    """Tokens to the probabilities of the next one."""

    def __init__(self, sizes: Sizes, device: DeviceRef) -> None:
        super().__init__()
        self.top_k = sizes.top_k
        self.embedding = Embedding(sizes.vocabulary, sizes.width, FLOAT, device)
        self.layers = LayerList([Layer(sizes, device) for _ in range(sizes.layers)])
        self.norm = RMSNorm(sizes.width, FLOAT)
        self.logits = Linear(sizes.width, sizes.vocabulary, FLOAT, device)

    def __call__(self, tokens: TensorValue, temperature: TensorValue) -> tuple[TensorValue, TensorValue]:
        """Returns the probabilities of the likeliest tokens after the last, and these tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        likeliest, chosen = ops.top_k(self.logits(self.norm(x[-1:])), self.top_k)
        return ops.softmax(likeliest / temperature), chosen


def load(sizes: Sizes, device: Device, dropin: bool) -> Model:
    """Returns the model with weights of one seed, compiled for prompts of any length."""
    place = DeviceRef.from_device(device)
    network = Transformer(sizes, place)
    random = np.random.default_rng(0)
    weights = {
        # What goes through a matrix keeps its size.
        name: np.ones(weight.shape.static_dims, np.float32)
        if len(weight.shape) == 1
        else random.standard_normal(weight.shape.static_dims, np.float32) / np.float32(sizes.width**0.5)
        for name, weight in network.raw_state_dict().items()
    }
    network.load_state_dict(weights)
    types = [TensorType(DType.int64, ("length",), place), TensorType(FLOAT, (1,), place)]
    with Graph("transformer", input_types=types) as graph:
        graph.output(*network(*(value.tensor for value in graph.inputs)))
    if dropin:
        maxsoftmax.drop_into(graph)
    return InferenceSession(devices=[device]).load(graph, weights_registry=network.state_dict())


class Step(NamedTuple):
    """What comes of a prompt."""

    probabilities: np.ndarray
    tokens: np.ndarray
    seconds: float
    """The median call."""


def run(model: Model, sizes: Sizes, device: Device, length: int, calls: int = 1) -> Step:
    """Runs a prompt of random tokens, after a first time that is not counted."""
    tokens = np.random.default_rng(1).integers(0, sizes.vocabulary, length)
    inputs = [Buffer.from_numpy(array).to(device) for array in (tokens, np.array([0.8], np.float32))]
    times = []
    for _ in range(calls + 1):
        begin = time.perf_counter()
        results = model.execute(*inputs)
        device.synchronize()
        times.append(time.perf_counter() - begin)
    probabilities, chosen = (result.to(CPU()).to_numpy() for result in results)
    return Step(probabilities, chosen, float(np.median(times[1:])))


def main() -> None:
    """Runs the model both ways and compares."""
    parser = argparse.ArgumentParser(description="A transformer with and without maxsoftmax's drop-in")
    parser.add_argument("lengths", type=int, nargs="*", default=[32, 512], help="tokens of the prompt (32 512)")
    parser.add_argument("--gpu", action="store_true", help="on the GPU")
    parser.add_argument("--calls", type=int, default=20, metavar="N", help="calls that are timed (20)")
    for name, value in Sizes()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, metavar="N")
    options = vars(parser.parse_args())
    lengths, calls = options.pop("lengths"), options.pop("calls")
    device = Accelerator() if options.pop("gpu") else CPU()
    sizes = Sizes(**options)
    without, with_it = (load(sizes, device, dropin) for dropin in (False, True))
    for length in lengths:
        before, after = (run(model, sizes, device, length, calls) for model in (without, with_it))
        difference = np.abs(before.probabilities - after.probabilities).max()
        same = "the same" if np.array_equal(before.tokens, after.tokens) else "other"
        print(
            f"{length} tokens: {before.seconds * 1e3:.2f} ms without the drop-in, {after.seconds * 1e3:.2f} ms with; "
            f"probabilities differ by {difference:.0e} at most, {same} tokens are the likeliest"
        )


if __name__ == "__main__":
    main()
