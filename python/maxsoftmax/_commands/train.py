"""`maxsoftmax train`: small classifiers, trained in a MAX graph, or in JAX, with the cross entropy of this package.

The first task is the published one: 256 samples of 24 features, whose label is whether the first is positive, a
network of 24, 96 and 2, and Adam at a rate of 0.1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from max.driver import Device

from maxsoftmax import _files as files
from maxsoftmax._bench import chart, published
from maxsoftmax._bench.run import processor
from maxsoftmax._commands import figures
from maxsoftmax._commands.console import Console
from maxsoftmax._commands.network import Samples, Training
from maxsoftmax._graph import runtime
from maxsoftmax._graph.extension import distribution_version

out = Console()
log = Console(stderr=True)


class Task(NamedTuple):
    """What is to be learnt, and how."""

    learn: Samples
    held_out: Samples
    """Samples that it is only tried on."""
    classes: int
    rate: float
    """Adam's."""
    steps: int
    """How many, unless told otherwise: each sees all samples."""

    def training(self, seed: int, device: Device, compiling: AbstractContextManager[Any] | None = None) -> Training:
        """Returns a network at its start, as `Training` does."""
        return Training(*self._samples, **self._choices(seed, device), compiling=compiling)

    def training_in_jax(self, seed: int, device: Device) -> Any:
        """Returns the same network at its start in JAX.

        Raises:
            ValueError: If JAX is not installed, or does not have the device.
        """
        if importlib.util.find_spec("jax") is None:
            raise ValueError("framework 'jax' needs JAX: pip install 'maxsoftmax[jax]'")
        from maxsoftmax._commands import network_jax

        return network_jax.Training(*self._samples, **self._choices(seed, device))

    @property
    def _samples(self) -> tuple[Samples, Samples]:
        return self.learn, self.held_out

    def _choices(self, seed: int, device: Device) -> dict[str, Any]:
        return {"classes": self.classes, "rate": self.rate, "seed": seed, "device": device}


def sign(seed: int) -> Task:
    """Returns the published task, normal features whose first one's sign is the class, and as many samples held out."""
    x = np.random.default_rng((seed, 0)).standard_normal((512, 24), dtype=np.float32)
    target = (x[:, 0] > 0).astype(np.int64)
    return Task(Samples(x[:256], target[:256]), Samples(x[256:], target[256:]), classes=2, rate=0.1, steps=15)


def digits(seed: int) -> Task:
    """Returns scikit-learn's 1797 handwritten digits of 8×8 pixels, every fifth of them held out, whatever the seed.

    Raises:
        ValueError: If scikit-learn is not installed.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError("task 'digits' needs scikit-learn: pip install scikit-learn")
    from sklearn.datasets import load_digits

    found = load_digits()
    x, target = (found.data / 16).astype(np.float32), found.target.astype(np.int64)
    held_out = np.arange(len(x)) % 5 == 4
    learn = Samples(x[~held_out], target[~held_out])
    return Task(learn, Samples(x[held_out], target[held_out]), classes=10, rate=0.01, steps=100)


FRAMEWORKS = ("max", "jax")
"""What a step of training may be compiled by."""

TASKS: dict[str, Callable[[int], Task]] = {"sign": sign, "digits": digits}
"""Each by its name, made from a seed."""


def add(commands: Any) -> None:
    """Adds the command to those of the parser."""
    parser = commands.add_parser(
        "train",
        help="trains a small classifier in a MAX graph, or in JAX",
        description="Trains a network of one hidden layer, forward, backward and Adam in one compiled MAX graph, or in "
        "one function of JAX.",
    )
    parser.add_argument(
        "--task",
        choices=TASKS,
        default="sign",
        help="sign, whether the first of 24 features is positive; or digits, scikit-learn's (default: sign)",
    )
    parser.add_argument("--framework", choices=FRAMEWORKS, default="max", help="what trains it (default: max)")
    parser.add_argument("--steps", type=_count, metavar="N", help="(default: 15 for sign, 100 for digits)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="S", help="of weights and samples (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu, gpu, gpu:1, … (default: cpu)")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="where the loss goes as a chart, of 'sign' beside the published one: .svg, .png, or both without a suffix",
    )
    figures.add(parser, "the losses")
    parser.set_defaults(command=_train)


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0")
    return int(text)


def _train(options: argparse.Namespace) -> int:
    if options.plot:
        chart.check(options.plot)
    if options.json:
        files.check(options.json)
    device = runtime.device(options.device)
    task = TASKS[options.task](options.seed)
    count = options.steps or task.steps
    if options.framework == "jax":
        training = task.training_in_jax(options.seed, device)
    else:
        with log.working("compiling the graph of a step: a minute or more the first time") as compiling:
            training = task.training(options.seed, device, compiling)
    found = []
    for number, step in enumerate(training.steps(count)):
        found.append(step)
        if number < count:
            out.print(f"step {number + 1:>{len(str(count))}} of {count}: loss {step.loss:.6f}")
    last = found[-1]
    out.print(
        f"after {count} step{'s' * (count > 1)}: loss {last.loss:.6f}, "
        f"{last.right:.1%} of {len(task.held_out.x)} samples held out are right"
    )
    losses = [step.loss for step in found]
    if options.json:
        files.replace(options.json, _json(losses, device, options).encode(errors="backslashreplace"))
        out.print(f"{figures.name(options.json)}: the loss")
    if options.plot:
        theirs = published.losses() if options.task == "sign" else ()
        for path in plot(losses, options.plot, f"{options.task}, seed {options.seed}", theirs):
            out.print(f"{path}: the loss")
    return 0


def _json(losses: Sequence[float], device: Device, options: argparse.Namespace) -> str:
    kept = {
        "device": processor() if device.is_host else device.model_name,
        "versions": _versions(options.framework),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["maxsoftmax", *sys.argv[1:]]),
        "task": options.task,
        "seed": options.seed,
        "losses": losses,
    }
    return json.dumps(kept, indent=1, ensure_ascii=False) + "\n"


def _versions(framework: str) -> dict[str, str]:
    found = {"max": distribution_version("max", "modular")}
    return found if framework == "max" else {**found, framework: distribution_version(framework)}


def plot(losses: Sequence[float], path: Path, title: str, theirs: Sequence[float] = ()) -> list[Path]:
    """Draws the loss before each step, and after the last, and returns the files written.

    Args:
        losses: What was found here.
        path: Where the chart goes.
        title: What it is called.
        theirs: The published losses of the same task, of another start.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If a file cannot be written.
        ValueError: If the suffix of `path` is of another format than SVG or PNG.
    """
    with chart.styled() as figure:
        figure.set_size_inches(7, 4)
        axes = figure.subplots()
        axes.plot(range(len(losses)), losses, color=chart.OURS, marker="o", markersize=3, label="here")
        if theirs:
            axes.plot(range(len(theirs)), theirs, color=chart.PEER, marker="s", markersize=3, label="published")
            axes.legend(frameon=False)
        axes.set_yscale("log")
        axes.set_xlabel("steps")
        axes.set_ylabel("mean cross entropy")
        figure.suptitle(title, fontsize=11)
    return chart.save(figure, path)
