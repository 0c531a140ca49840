"""A small language model, trained in a MAX graph whose loss never has all logits, and in torch if that is there.

It predicts the next word of what Python's own modules say of themselves, from the words before. A step is one graph:
forward, `maxsoftmax.ops.linear_cross_entropy_backward`, backward and gradient descent. Both begin with the same weights
and see the same words:

    python examples/language_model.py
    python examples/language_model.py --vocabulary 8192 --width 256 --rows 2048 --steps 200
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import re
from collections import Counter

import maxsoftmax
import numpy as np
from max.driver import CPU, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue
from max.graph import ops as max_ops
from maxsoftmax._graph import runtime

CONTEXT = 3
"""Words that the next one is predicted from."""

MODULES = """
    argparse asyncio collections csv datetime decimal difflib email enum functools heapq http inspect io ipaddress
    itertools json logging math os pathlib random re shutil socket statistics string subprocess textwrap threading
    time tokenize typing unittest urllib.parse uuid zipfile
"""


def corpus(vocabulary: int) -> np.ndarray:
    """Returns the words of the modules' docstrings, the most frequent ones by their rank and all others as the last."""
    words: list[str] = []
    for name in MODULES.split():
        module = importlib.import_module(name)
        for value in [module, *(member for _, member in inspect.getmembers(module) if callable(member))]:
            words += re.findall(r"[a-z']+|[.,:;()]", (inspect.getdoc(value) or "").lower())
    ranks = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1))}
    return np.array([ranks.get(word, vocabulary - 1) for word in words])


def batches(options: argparse.Namespace) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns, for each step, (rows, CONTEXT) words and the (rows,) words that follow them."""
    words, random = corpus(options.vocabulary), np.random.default_rng(1)
    found = []
    for _ in range(options.steps):
        places = random.integers(0, len(words) - CONTEXT, (options.rows, 1))
        taken = words[places + np.arange(CONTEXT + 1)]
        found.append((np.ascontiguousarray(taken[:, :-1]), np.ascontiguousarray(taken[:, -1])))
    return found


def weights(options: argparse.Namespace) -> list[np.ndarray]:
    """Returns the embedding and the head, (vocabulary, width), and between them the layer, (CONTEXT · width, width)."""
    random, width = np.random.default_rng(0), options.width
    shapes = (options.vocabulary, width), (CONTEXT * width, width), (options.vocabulary, width)
    return [(random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32) for shape in shapes]


def graph(options: argparse.Namespace, place: DeviceRef) -> Graph:
    """Returns a step: words and weights in, the loss and the next weights out."""
    types = [
        TensorType(DType.int64, (options.rows, CONTEXT), place),
        TensorType(DType.int64, (options.rows,), place),
        *(TensorType(DType.float32, w.shape, place) for w in weights(options)),
    ]
    with Graph("language_model", input_types=types, custom_extensions=[maxsoftmax.extension()]) as result:
        words, target, embedding, layer, head = (value.tensor for value in result.inputs)
        rows, wide = options.rows, CONTEXT * options.width
        x = max_ops.reshape(max_ops.gather(embedding, words, axis=0), (rows, wide))
        hidden = max_ops.tanh(max_ops.matmul(x, layer))
        given = hidden, head, target
        loss, dhidden, dhead, _ = maxsoftmax.ops.linear_cross_entropy_backward(*given, chunk=options.chunk)
        dlayer_out = dhidden * (1.0 - hidden * hidden)
        dx = max_ops.matmul(dlayer_out, max_ops.transpose(layer, 0, 1))
        dlayer = max_ops.matmul(max_ops.transpose(x, 0, 1), dlayer_out)
        places = max_ops.reshape(words, (rows * CONTEXT, 1))
        rate = -options.rate
        changed = max_ops.scatter_nd_add(embedding, max_ops.reshape(dx, (rows * CONTEXT, options.width)) * rate, places)
        result.output(loss, changed, _stepped(layer, dlayer, rate), _stepped(head, dhead, rate))
    return result


def train(options: argparse.Namespace, device: Device) -> list[float]:
    """Returns the loss of each step in the graph."""
    model = InferenceSession(devices=[device]).load(graph(options, DeviceRef.from_device(device)))
    state = [Buffer.from_numpy(w).to(device) for w in weights(options)]
    losses = []
    for batch in batches(options):
        loss, *state = model.execute(*(Buffer.from_numpy(a).to(device) for a in batch), *state)
        losses.append(float(loss.to(CPU()).to_numpy()))
    return losses


def train_in_torch(options: argparse.Namespace) -> list[float]:
    """Returns the loss of each step by functions of torch alone, on the CPU."""
    import torch

    embedding, layer, head = (torch.from_numpy(w).requires_grad_() for w in weights(options))
    optimizer = torch.optim.SGD([embedding, layer, head], lr=options.rate)
    losses = []
    for words, target in batches(options):
        hidden = torch.tanh(embedding[torch.from_numpy(words)].flatten(1) @ layer)
        loss = torch.nn.functional.cross_entropy(hidden @ head.T, torch.from_numpy(target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _stepped(weight: TensorValue, gradient: TensorValue, rate: float) -> TensorValue:
    return weight + gradient * rate


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description="A small language model in a MAX graph")
    for name, value in {"vocabulary": 2048, "width": 64, "rows": 512, "steps": 60, "chunk": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"({value})")
    parser.add_argument("--rate", type=float, default=2.0, metavar="X", help="of the steps (2)")
    parser.add_argument("--device", default="cpu", help="cpu, gpu, gpu:1, … (cpu)")
    return parser.parse_args(arguments)


def main() -> None:
    """Trains, and prints the losses."""
    options = parse()
    columns = {"MAX": train(options, runtime.device(options.device))}
    if importlib.util.find_spec("torch"):
        columns["torch"] = train_in_torch(options)
    print("step", *(f"{name:>8}" for name in columns))
    for step in sorted({*range(0, options.steps, max(options.steps // 10, 1)), options.steps - 1}):
        print(f"{step:4}", *(f"{losses[step]:8.4f}" for losses in columns.values()))


if __name__ == "__main__":
    main()
