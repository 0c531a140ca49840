"""What makes one library another than the next."""

from __future__ import annotations

import re
from typing import NamedTuple

from maxsoftmax._arguments import OUT

POINTERS = {
    "softmax": 3,
    "softmax_forms": 7,
    "log_softmax": 3,
    "statistics": 3,
    "softmax_backward": 4,
    "log_softmax_backward": 4,
    "sparsemax": 3,
    "sparsemax_backward": 4,
    "cross_entropy": 5,
    "cross_entropy_backward": 6,
    "cross_entropy_gradient": 5,
    "cross_entropy_speculative": 7,
    "cross_entropy_unforeseen": 8,
    "token_log_probs": 6,
    "token_log_probs_backward": 7,
    "kl_divergence": 5,
    "kl_divergence_backward": 6,
    "shard": 5,
    "shard_loss": 6,
}
"""The libraries, and how many pointers a call takes after its stream."""

SPECULATIVE = ("cross_entropy_speculative", "cross_entropy_unforeseen")
"""Those that XLA alone calls, on GPUs with clusters."""

WHOLE = tuple(name for name in POINTERS if name not in ("shard", "shard_loss", *SPECULATIVE))
"""Those of whole rows that all devices have: the others are for who splits rows, or trains in JAX."""

XLA = tuple(
    name
    for name in (*WHOLE, *SPECULATIVE)
    if name not in ("softmax_forms", "cross_entropy_gradient", "kl_divergence", "kl_divergence_backward")
)
"""Those that XLA may call."""

BUNDLE = "all"
"""The name of the library of all of `WHOLE`."""

_LINEAR = ("cross_entropy", "token_log_probs", "cross_entropy_backward", "cross_entropy_gradient")

OPS = {
    "softmax": ("softmax", "softmax_forms"),
    "log_softmax": ("log_softmax",),
    "logsumexp": ("statistics",),
    "max_sum": ("statistics",),
    "softmax_backward": ("softmax_backward",),
    "log_softmax_backward": ("log_softmax_backward",),
    "sparsemax": ("sparsemax",),
    "sparsemax_backward": ("sparsemax_backward",),
    "cross_entropy": ("cross_entropy",),
    "cross_entropy_forward": ("cross_entropy",),
    "cross_entropy_backward": ("cross_entropy_backward",),
    "cross_entropy_backward_": ("cross_entropy_backward",),
    "linear_cross_entropy": _LINEAR,
    "linear_cross_entropy_backward": _LINEAR,
    "linear_token_log_probs": ("token_log_probs", "token_log_probs_backward"),
    "linear_token_log_probs_backward": ("token_log_probs", "token_log_probs_backward"),
    "token_log_probs": ("token_log_probs", "token_log_probs_backward"),
    "token_log_probs_backward": ("token_log_probs_backward",),
    "kl_divergence": ("kl_divergence", "kl_divergence_backward"),
    "kl_divergence_backward": ("kl_divergence_backward",),
    "sharded": ("statistics", "shard", "shard_loss"),
    "jax.cross_entropy": ("cross_entropy", "cross_entropy_backward", *SPECULATIVE),
}
"""The functions of this package, and the libraries that each may call, or for tensors its gradient."""

SEARCHED = "auto by "
"""How algorithms begin that `maxsoftmax tune` builds; a configuration follows, in place of the tables of `auto`."""

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""What there are libraries for."""

CONVERTING = ("softmax", "softmax_forms", "log_softmax")
"""The libraries whose results may be of another dtype."""


class Target(NamedTuple):
    """What a library is for."""

    kind: str
    """Where it computes: "cpu" or "gpu"."""
    architecture: str = ""
    """Of the GPU, such as sm_90a; "" for a CPU."""

    def __str__(self) -> str:
        return "CPU" if self.kind == "cpu" else f"GPU ({self.architecture})"


class Library(NamedTuple):
    """A file of `op/maxsoftmax_native`, and what it is built with."""

    name: str
    """One of `POINTERS`, or `BUNDLE`."""
    dtype: str
    """One of `DTYPES`."""
    target: Target
    algorithm: str = "auto"
    """Of softmax, its kernel."""
    block_size: int | None = None
    """Threads a block, of a GPU's kernel other than "auto"."""
    unroll: int | None = None
    """Vectors that a thread has under way at a time, of the same."""
    out_dtype: str = ""
    """Of the results, if it is another one: of `OUT`."""

    def defines(self) -> dict[str, str]:
        """Returns what the compiler is told to define, by name."""
        told: dict[str, object] = {"DTYPE": self.dtype, "TARGET": self.target.kind}
        if self.algorithm.startswith(SEARCHED):
            kind, *numbers = self.algorithm.removeprefix(SEARCHED).split()
            told |= {"CONFIGURATION": kind, **{f"CONFIGURATION_{i}": number for i, number in enumerate(numbers)}}
        elif self.algorithm != "auto":
            told["ALGORITHM"] = self.algorithm
        if self.block_size is not None:
            told["BLOCK_SIZE"] = self.block_size
        if self.unroll is not None:
            told["UNROLL"] = self.unroll
        if self.out_dtype:
            told["OUT_DTYPE"] = self.out_dtype
        return {name: str(value) for name, value in told.items()}

    def bundle(self) -> Library | None:
        """Returns the library that has this one's functions among others, if there is such a one."""
        special = self.name not in WHOLE or self.algorithm != "auto" or self.out_dtype
        alone = special or self.target.kind != "cpu"
        return None if alone else Library(BUNDLE, self.dtype, self.target)

    def about(self) -> dict[str, object]:
        """Returns all of it, by name, for a file."""
        return {
            "library": self.name,
            "dtype": self.dtype,
            "device": self.target.kind,
            "architecture": self.target.architecture,
            "algorithm": self.algorithm,
            "block_size": self.block_size,
            "unroll": self.unroll,
            "out_dtype": self.out_dtype,
        }

    def file_name(self, target_cpu: str = "") -> str:
        """Returns what the library is called where it has no folder of its own.

        Args:
            target_cpu: The CPU that it was built for, if that was said.
        """
        algorithm = "" if self.algorithm == "auto" else self.algorithm
        place = [self.target.kind, self.target.architecture]
        parts = [self.name, self.dtype, self.out_dtype, *place, algorithm, target_cpu]
        return "-".join(re.sub(r"[^\w.-]", "_", part) for part in parts if part) + ".so"

    def __str__(self) -> str:
        algorithm = "" if self.algorithm == "auto" else f" by {self.algorithm}"
        name = "every op" if self.name == BUNDLE else self.name
        out = f" to {self.out_dtype}" if self.out_dtype else ""
        return f"{name} of {self.dtype}{out}{algorithm} for the {self.target}"


def is_for(name: str, target: Target) -> bool:
    """Returns whether there is a library for a target."""
    return target.kind == "gpu" or name not in SPECULATIVE


def library(
    name: str,
    dtype: str,
    target: Target,
    algorithm: str = "auto",
    *,
    block_size: int = 128,
    unroll: int = 4,
    out_dtype: str = "",
) -> Library:
    """Returns the library for a call; what its kernel does not leave to the caller makes no other one.

    Raises:
        ValueError: If there is no such library.
    """
    if name not in POINTERS or dtype not in DTYPES:
        raise ValueError(f"there is no library for {name!r} of {dtype!r}")
    if algorithm != "auto" and name != "softmax":
        raise ValueError(f"algorithm {algorithm!r} is one of softmax: {name} has none but 'auto'")
    if out_dtype:
        if name not in CONVERTING or out_dtype not in OUT or out_dtype == dtype or algorithm != "auto":
            raise ValueError(f"there is no library for {name!r} of {dtype!r} to {out_dtype!r} by {algorithm!r}")
        return Library(name, dtype, target, out_dtype=out_dtype)
    if algorithm == "auto" or algorithm.startswith(SEARCHED) or target.kind == "cpu":
        return Library(name, dtype, target, algorithm)
    return Library(name, dtype, target, algorithm, block_size, unroll)
