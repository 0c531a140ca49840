"""What is measured: the cases of each suite, and which ways to compute them."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from max.dtype import DType

from maxsoftmax._arguments import ALGORITHMS


class Op(NamedTuple):
    """What can be computed, and what that moves at least, in tensors of the shape of the logits."""

    reads: int
    writes: int
    losses: bool = False
    """Whether it takes targets, one a row, and has the mean loss as its first result."""
    queries: bool = False
    """Whether rows are those of queries, which see some of the keys: the last axis of two or more."""


OPS = {
    "softmax": Op(1, 1),
    "log_softmax": Op(1, 1),
    "softmax_backward": Op(2, 1),
    "cross_entropy": Op(1, 0, losses=True),
    # The loss and then the gradient of the logits, which needs the sum of a row before it can begin.
    "cross_entropy_gradient": Op(2, 1, losses=True),
    # What attention does to its scores before, and to its probabilities after, as a graph or a program says it in
    # elementwise ops.
    "scaled_softmax": Op(1, 1),
    "causal_softmax": Op(1, 1, queries=True),
    "rescaled_softmax": Op(1, 1),
    # By a mask in memory, one for all heads.
    "masked_softmax": Op(1, 1, queries=True),
}
"""The ops by name."""

SPELLED = ("scaled_softmax", "causal_softmax", "rescaled_softmax")
"""What a graph says in several ops, and the drop-in takes from there."""

ATTENTION = (*SPELLED, "masked_softmax")
"""Those of attention."""

SCALE = 0.125
"""What "scaled_softmax" and "rescaled_softmax" multiply logits by."""

KEPT = 2.0
"""What "rescaled_softmax" multiplies probabilities by, as a dropout of one half does."""


class Case(NamedTuple):
    """One op: what everybody computes on the same data."""

    shape: tuple[int, ...]
    dtype: DType = DType.float32
    axis: int = -1
    op: str = "softmax"
    """One of `OPS`."""

    @property
    def size(self) -> int:
        """Elements of the logits."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the logits."""
        return self.size * int(self.dtype.size_in_bytes)

    @property
    def moved(self) -> int:
        """Bytes read once plus bytes written once, the least that any kernel moves."""
        return (OPS[self.op].reads + OPS[self.op].writes) * self.nbytes

    @property
    def place(self) -> int:
        """The axis, counted from 0."""
        return self.axis % len(self.shape)

    @property
    def like(self) -> Case:
        """What all cases are that one graph with symbolic dimensions computes."""
        return self._replace(shape=(1,) * len(self.shape), axis=self.place)

    def __str__(self) -> str:
        along = "" if self.place == len(self.shape) - 1 else f", axis {self.place}"
        what = "" if self.op == "softmax" else f"{self.op} "
        return f"{what}{'×'.join(map(str, self.shape))} {self.dtype.name}{along}"


class Entry(NamedTuple):
    """A way to compute it: a provider, and for ours the algorithm."""

    provider: str
    algorithm: str = ""
    block_size: int | None = None
    unroll: int | None = None

    def __str__(self) -> str:
        """Returns the provider's name, for ours with algorithm, block size and unroll: maxsoftmax:online,512,4."""
        chosen = [str(value) for value in (self.algorithm, self.block_size, self.unroll) if value]
        return ":".join([self.provider, *([",".join(chosen)] if chosen else [])])


class Suite(NamedTuple):
    """Cases that belong together."""

    title: str
    device: str
    """The kind of device it was made for: "cpu" or "gpu"."""
    cases: tuple[Case, ...]
    rungs: bool = False
    """Whether all our algorithms take part, or `auto` only."""
    ways: tuple[Entry, ...] = ()
    """The ways on a GPU, where they are not ours and all peers: what compares our block sizes has many."""
    host: tuple[Case, ...] = ()
    """The cases on a CPU, where a suite for a GPU has others there: a machine without a GPU has these."""
    calls: bool = False
    """Whether it times whole calls of libraries as their users make them, rather than what a device does."""

    def on(self, device: str) -> tuple[Case, ...]:
        """Returns the cases for a kind of device."""
        return self.host if device == "cpu" and self.host else self.cases


BLOCK_SIZE = 512
"""Threads a block of our rungs, in every suite that does not compare block sizes: the published benchmark's."""

BLOCK_SIZES = (128, 256, 512, 1024)
"""Threads a block among which the best is searched: FastSoftmax's."""

BLOCKS = "blocks"
"""The suite that compares block sizes."""

WIDTHS = "widths"
"""The suite that compares lengths of rows, each kernel at its best block size and unrolling."""

TUNE = "tune"
"""The suite of `maxsoftmax tune`."""

SEARCH = "search"
"""What that times of `auto`: configurations beside the one that it takes."""

PEERS = {
    "gpu": ("max", "torch", "torch.compile", "liger", "quack", "jax", "maxsoftmax.jax", "cudnn"),
    "cpu": ("max", "torch", "torch.compile", "jax", "maxsoftmax.jax", "onnxruntime", "scipy", "numpy"),
}
"""The providers beside ours, on each kind of device, in the order of their rows."""

_CALLERS = (
    "maxsoftmax",
    "maxsoftmax.torch",
    "maxsoftmax.torch+grad",
    "maxsoftmax.ops",
    "maxsoftmax.jax",
    "max",
    "torch",
    "torch+grad",
    "torch.compile",
)

CALLERS = {
    "gpu": (*_CALLERS, "liger", "quack", "jax"),
    "cpu": (*_CALLERS, "jax", "onnxruntime", "scipy", "numpy"),
}
"""Whose calls are timed, ours among them, on each kind of device, in the order of their rows."""

CALL = "call"
"""The suite of calls."""


def searched(algorithm: str) -> tuple[Entry, ...]:
    """Returns an algorithm at every block size of `BLOCK_SIZES` and every unrolling that it leaves to the caller."""
    unrolls = ALGORITHMS["gpu"][algorithm].unrolls or (None,)
    return tuple(Entry("maxsoftmax", algorithm, *pair) for pair in itertools.product(BLOCK_SIZES, unrolls))


CALL_OPS = {
    "softmax": ("softmax",),
    "log_softmax": ("log_softmax",),
    "cross_entropy": ("cross_entropy", "cross_entropy_gradient"),
}
"""What that suite may be asked for, and which ops it then times: of a loss, forward, and forward and backward."""

CALL_SHAPES = (
    (1, 64),
    (8, 64),
    (64, 128),
    (256, 256),
    (1, 151936),
    (256, 1024),
    (8, 128256),
    (1024, 1024),
    (4096, 1024),
    (256, 50257),
    (8192, 4096),
    (8192, 8192),
)
"""Its shapes, from 64 elements, where all is overhead, to 2²⁶, where none is."""

_BOTH = (DType.float32, DType.bfloat16)

_VOCABULARIES = (50257, 50304, 128256, 151936, 262144)

SUITES = {
    "ladder": Suite(
        "Every rung of the ladder, at the size of a GPT-2 batch of logits",
        "gpu",
        (Case((8, 1024, 50257)),),
        rungs=True,
    ),
    "sweep": Suite(
        "One row, from a thousand elements to sixteen million",
        "gpu",
        tuple(Case((1, 2**i)) for i in range(10, 25)),
        rungs=True,
    ),
    "vector": Suite("One row of sixteen million elements", "gpu", (Case((1, 2**24)),), rungs=True),
    "square": Suite("A matrix that fits in the cache", "gpu", (Case((1024, 1024)),), rungs=True),
    BLOCKS: Suite(
        "Threads a block, at the size of a GPT-2 batch of logits",
        "gpu",
        (Case((8, 1024, 50257)),),
        rungs=True,
        ways=tuple(
            Entry("maxsoftmax", algorithm, 2**i)
            for algorithm in ("naive", "tree", "tree_blocked", "warp", "vector", "online")
            for i in range(5, 11)
        ),
    ),
    WIDTHS: Suite(
        "128 rows of a thousand to a hundred thousand elements, each kernel at its best block size",
        "gpu",
        tuple(Case((128, 2**i)) for i in range(10, 18)),
        rungs=True,
        ways=(
            Entry("maxsoftmax", "auto"),
            # In it every element reads its row, in blocks of any size.
            Entry("maxsoftmax", "elementwise", BLOCK_SIZE),
            *(
                entry
                for algorithm in ("tree_blocked", "tree", "warp", "vector", "online")
                for entry in searched(algorithm)
            ),
            Entry("torch"),
        ),
    ),
    "llm": Suite(
        "Logits of language models, and rows of attention scores",
        "gpu",
        (
            *(Case((8192, n), dtype) for n in _VOCABULARIES for dtype in _BOTH),
            *(Case((2**28 // n, n), dtype) for n in (2**i for i in range(8, 16)) for dtype in _BOTH),
            *(Case((rows, n), dtype) for rows in (256, 2048) for n in _VOCABULARIES for dtype in _BOTH),
        ),
    ),
    "decode": Suite(
        "Logits of one step of decoding: few rows of long vocabularies",
        "gpu",
        tuple(
            Case((rows, n), dtype)
            for n in (128256, 151936, 262144)
            for dtype in _BOTH
            for rows in (1, 2, 4, 16, 48, 96, 160, 256)
        ),
    ),
    "grad": Suite(
        "What training computes: gradients and losses",
        "gpu",
        (
            *(Case((8192, n), dtype, op="softmax_backward") for n in _VOCABULARIES for dtype in _BOTH),
            *(Case((2**28 // n, n), dtype, op="softmax_backward") for n in (256, 1024, 4096, 32768) for dtype in _BOTH),
            *(Case((8192, n), DType.bfloat16, op="log_softmax") for n in _VOCABULARIES),
            *(
                Case((8192, n), dtype, op=op)
                for op in ("cross_entropy", "cross_entropy_gradient")
                for n, dtype in (
                    *((n, DType.bfloat16) for n in _VOCABULARIES),
                    (50257, DType.float32),
                    (128256, DType.float32),
                )
            ),
        ),
        host=(
            *(Case((512, 50257), dtype, op="softmax_backward") for dtype in _BOTH),
            Case((8192, 1024), op="softmax_backward"),
            Case((4096, 4096), axis=0, op="softmax_backward"),
            *(Case((512, 50257), dtype, op="log_softmax") for dtype in _BOTH),
            Case((8192, 1024), op="log_softmax"),
            Case((512, 50257), op="cross_entropy"),
            Case((512, 50257), op="cross_entropy_gradient"),
        ),
    ),
    "attention": Suite(
        "Attention scores, scaled or masked, and probabilities that are taken further",
        "gpu",
        (
            *(
                Case(shape, dtype, op=op)
                for op in ("scaled_softmax", "causal_softmax")
                for shape in (*((16, n, n) for n in (1024, 1023, 2048, 4096)), (4, 4096, 16384), (1, 2048, 50257))
                for dtype in _BOTH
            ),
            *(Case((16, n, n), dtype, op="rescaled_softmax") for n in (1024, 2048) for dtype in _BOTH),
            *(
                Case(shape, dtype, op="masked_softmax")
                for shape in ((16, 2048, 2048), (16, 2047, 2047))
                for dtype in _BOTH
            ),
            *(
                Case(shape, dtype, axis=1, op="scaled_softmax")
                for shape in ((16, 1024, 1024), (64, 1000, 4096), (8, 50257, 64))
                for dtype in _BOTH
            ),
        ),
        host=tuple(Case((4, n, n), op=op) for op in ATTENTION for n in (512, 1024)),
    ),
    "cpu": Suite(
        "What fits a processor",
        "cpu",
        (
            Case((128,)),
            Case((1024, 1024)),
            Case((32768, 256)),
            Case((8192, 1024)),
            Case((64, 128256)),
            Case((512, 50257)),
            Case((1, 2**24)),
            Case((4096, 4096), axis=0),
            Case((8192, 1024), DType.bfloat16),
            Case((512, 50257), DType.bfloat16),
        ),
        rungs=True,
    ),
    CALL: Suite(
        "What a call costs, from 64 elements to 67 million",
        "gpu",
        tuple(map(Case, CALL_SHAPES)),
        host=tuple(map(Case, CALL_SHAPES)),
        calls=True,
    ),
}
"""The suites by name; cases that were published keep their published sizes."""


def entries(suite: Suite, device: str) -> list[Entry]:
    """Returns the ways to compute the cases of `suite` on a kind of `device`: ours first, then the peers."""
    if suite.calls:
        return [Entry(name) for name in CALLERS[device]]
    if suite.ways and device == "gpu":
        return list(suite.ways)
    ours = ALGORITHMS[device] if suite.rungs else {"auto": ALGORITHMS[device]["auto"]}
    return [
        *(Entry("maxsoftmax", name, BLOCK_SIZE if leaves.block_sizes else None) for name, leaves in ours.items()),
        *map(Entry, PEERS[device]),
    ]
