"""Devices, sessions, and models: compiled once for each way to call the op, then reused for every shape."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from max.driver import CPU, Accelerator, Device, accelerator_count
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession, Model
from max.graph import BufferType, BufferValue, DeviceRef, Graph, Module, TensorType

from maxsoftmax import artifacts, ops
from maxsoftmax.arguments import ALGORITHMS, BLOCK_SIZE, UNROLL, accumulator
from maxsoftmax.extension import extension


@dataclass(frozen=True)
class Signature:
    """All that a compiled model depends on."""

    device: Device
    """Where it runs."""
    dtype: DType
    """Of its input and output."""
    contiguous: bool
    """Whether it takes (rows, n), softmax along the last axis, or (outer, n, inner), along the middle one."""
    algorithm: str = "auto"
    block_size: int = BLOCK_SIZE
    unroll: int = UNROLL
    n: int | None = None
    """Length of the rows, where it is fixed; None if they may be of any."""
    op: str = "softmax"
    """The name of its function in `ops`."""
    options: tuple[tuple[str, Any], ...] = ()
    """What else that function is given; for a loss with the dtype of its targets."""

    def choices(self) -> dict[str, Any]:
        """Returns what the algorithm leaves to its caller, by name."""
        leaves = ALGORITHMS[self.device.label][self.algorithm]
        chosen = {"block_size": (leaves.block_sizes, self.block_size), "unroll": (leaves.unrolls, self.unroll)}
        return {name: value for name, (allowed, value) in chosen.items() if allowed}

    def parts(self) -> list[str]:
        """Returns all that a compiled model depends on, in words."""
        architecture = "" if self.device.is_host else self.device.architecture_name
        choices = [f"{choice}={value}" for choice, value in self.choices().items()]
        kind = "rows" if self.contiguous else "columns"
        fixed = [] if self.n is None else [f"n={self.n}"]
        options = [f"{option}={value}" for option, value in self.options]
        op = [] if self.op == "softmax" else [self.op]
        return [name(self.device), architecture, self.dtype.name, kind, *op, self.algorithm, *choices, *options, *fixed]

    def __str__(self) -> str:
        place = "the last axis" if self.contiguous else "an axis before it"
        return f"{self.op} of {self.dtype.name} along {place} on {name(self.device)}"


INPUTS = {
    "softmax": ("x",),
    "log_softmax": ("x",),
    "softmax_backward": ("x", "x"),
    "log_softmax_backward": ("x", "x"),
    "max_sum": ("x",),
    "logsumexp": ("x",),
    "cross_entropy_forward": ("x", "target"),
    "cross_entropy_backward": ("x", "target", "pairs", "dloss"),
    "cross_entropy_backward_": ("overwritten", "target", "pairs", "dloss"),
}
"""What each op takes: tensors of the shape and dtype of logits, or one value a row."""

Observer = Callable[[Signature], AbstractContextManager[Any]]

_observers: list[Observer] = []
_models: dict[Signature, Model] = {}
_others: dict[tuple[str, ...], Model] = {}
_compiling = threading.Lock()


def devices() -> list[Device]:
    """Returns the CPU and every GPU that MAX can use."""
    return [CPU(), *(Accelerator(i) for i in range(accelerator_count()))]


def name(device: Device) -> str:
    """Returns how `device` is called in the arguments of this package: "cpu", "gpu" or "gpu:1"."""
    return device.label if device.id == 0 else f"{device.label}:{device.id}"


def device(spec: Any) -> Device:
    """Returns the device that `spec` names: "cpu", "gpu", "gpu:1", or a `max.driver.Device`, which is itself.

    Raises:
        TypeError: If it is neither a string nor a device.
        ValueError: If this machine has no such device.
    """
    if isinstance(spec, Device):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"device must be a string such as 'cpu' or 'gpu', or a max.driver.Device, not {spec!r}")
    present = {name(d): d for d in devices()}
    if spec not in present:
        raise ValueError(f"device {spec!r} is not on this machine, which has {', '.join(map(repr, present))}")
    return present[spec]


def model(signature: Signature, n: int) -> Model:
    """Returns a model for `signature` and rows of `n`. Safe to call from several threads.

    It is compiled (seconds) unless this or an earlier process has done that, or it was compiled ahead of time.
    """
    folder = artifacts.folder()
    if folder:
        signature = _precompiled_for(signature, n, folder)
    if signature not in _models:
        # One lock for all: MAX compiles one graph at a time anyway.
        with _compiling:
            if signature not in _models:
                session, parts = _session(signature.device), signature.parts()
                found = artifacts.precompiled(folder, session, parts) if folder else None
                _models[signature] = found or artifacts.load(session, parts, functools.partial(compile, signature))
    return _models[signature]


def prepare(signatures: Iterable[Signature]) -> None:
    """Has models ready for `model`, all of one device: compiled together, each further one takes a tenth of the first.

    Those that earlier processes compiled together are loaded. What was compiled ahead of time is left to `model`.
    """
    if artifacts.folder():
        return
    with _compiling:
        missing = [signature for signature in dict.fromkeys(signatures) if signature not in _models]
        if len(missing) < 2:
            return
        session = _session(missing[0].device)
        names = [f"maxsoftmax{i}" for i in range(len(missing))]
        found = artifacts.load_all(
            session,
            ["together", *(part for signature in missing for part in signature.parts())],
            lambda: _compile_together(session, dict(zip(names, missing, strict=True))),
        )
        _models.update((signature, found[name]) for name, signature in zip(names, missing, strict=True))


def of_graph(device: Device, parts: tuple[str, ...], graph: Callable[[], Graph]) -> Model:
    """Returns the model of a graph of another kind, compiled unless this or an earlier process has done that.

    Args:
        device: Where it runs.
        parts: What makes it another one than others, in words, the device included.
        graph: Called for the graph when there is no model yet.

    Returns:
        The model. Safe to call from several threads.
    """
    if parts not in _others:
        with _compiling:
            if parts not in _others:
                session = _session(device)
                _others[parts] = artifacts.load(session, parts, lambda: session.compile(graph()))
    return _others[parts]


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Enters what `observer` returns around every compilation meanwhile, for whoever wants to show or time it."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@functools.lru_cache
def _precompiled_for(signature: Signature, n: int, folder: Path) -> Signature:
    """Returns the signature with its length fixed if there is a model for that length, or else as it is."""
    fixed = dataclasses.replace(signature, n=n)
    return fixed if artifacts.is_precompiled(folder, fixed.parts()) else signature


def compile(signature: Signature) -> CompiledModel:
    """Returns the compiled model for `signature`, which may be for a virtual device."""
    with ExitStack() as stack:
        for observer in _observers:
            stack.enter_context(observer(signature))
        return _session(signature.device).compile(_graph(signature))


def _compile_together(session: InferenceSession, signatures: dict[str, Signature]) -> CompiledModel:
    module: Module | None = None
    for name, signature in signatures.items():
        graph = _graph(signature, name, module)
        # The first one's: a module made by itself needs a context, which only MAX's main thread has.
        module = graph.module
    # Of a graph, everything in its module is compiled, and unlike a module it knows our kernels.
    return session.compile(graph)


@functools.cache
def _session(device: Device) -> InferenceSession:
    return InferenceSession(devices=[device])


def _graph(signature: Signature, name: str = "maxsoftmax", module: Module | None = None) -> Graph:
    n = "n" if signature.n is None else signature.n
    dims = ["rows", n] if signature.contiguous else ["outer", n, "inner"]
    place = DeviceRef.from_device(signature.device)
    options = dict(signature.options)
    reduced = [dim for dim in dims if dim is not n]
    kinds = {
        "x": TensorType(signature.dtype, dims, place),
        "overwritten": BufferType(signature.dtype, dims, place),
        "target": TensorType(options.pop("target", DType.int64), reduced, place),
        "pairs": TensorType(accumulator(signature.dtype), [*reduced, 2], place),
        "dloss": TensorType(signature.dtype, reduced if options.get("reduction") == "none" else [], place),
    }
    given = [kind for kind in INPUTS[signature.op] if options.pop(kind, True)]
    inputs = [kinds[kind] for kind in given]
    if signature.op == "softmax":
        options |= {"axis": 1, "algorithm": signature.algorithm, **signature.choices()}
    elif "target" not in INPUTS[signature.op]:
        options["axis"] = 1
    with Graph(name, input_types=inputs, custom_extensions=[extension()], module=module) as graph:
        values = [value if isinstance(value, BufferValue) else value.tensor for value in graph.inputs]
        results = getattr(ops, signature.op)(*values, **options)
        if results is None:
            graph.output()
        else:
            graph.output(*results if isinstance(results, tuple) else [results])
    return graph
