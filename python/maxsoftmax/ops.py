"""Softmax for the values of a `max.graph.Graph`."""

from __future__ import annotations

from max.graph import Graph, TensorValue, TensorValueLike
from max.graph import ops as max_ops

from maxsoftmax import tuning
from maxsoftmax.arguments import check_algorithm, check_dtype, normalize_axis
from maxsoftmax.extension import extension


def softmax(
    x: TensorValueLike,
    axis: int = -1,
    *,
    algorithm: str = "auto",
    block_size: int | None = None,
    unroll: int | None = None,
) -> TensorValue:
    """Adds softmax along one axis to the graph that is being built.

    Computes exp(x - max x) / Σ exp(x - max x) along `axis`, in float32 or wider. The kernel runs where `x` lives. The
    graph should be given `maxsoftmax.extension()` in its `custom_extensions`; one that was not is given it here.

    Args:
        x: Logits: any rank from 1, any dimensions (static or symbolic, 0 included); float32, bfloat16, float16 or
            float64.
        axis: The axis that will sum to 1; negative counts from the last.
        algorithm: "auto", or the name of a kernel that the device has.
        block_size: Threads a block, where a GPU kernel was named: a power of two up to 1024; 128 if None.
        unroll: Vectors that a thread has under way at a time, for "vector" and "online": 1, 2, 4 or 8; 4 if None.
            Where neither is given, these two use what `maxsoftmax tune` found for the GPU, if it was run.

    Returns:
        Probabilities, of the shape, dtype and device of `x`.

    Raises:
        TypeError: If the dtype of `x` or the type of another argument is not one of these.
        ValueError: If `x` is a scalar, or there is no such axis, algorithm, block size or unroll.
        LookupError: If no graph is being built.
    """
    graph = Graph.current
    try:
        x = TensorValue(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"x must be a tensor of the graph, not {x!r}") from error
    device = "gpu" if x.device.is_gpu() else "cpu"
    check_dtype(x.dtype)
    if x.rank == 0:
        raise ValueError("x has rank 0, but softmax needs an axis: reshape it to rank 1 first")
    algorithm = check_algorithm(algorithm, device)
    parameters: dict[str, bool | int | float | str] = {
        "algorithm": algorithm,
        "axis": normalize_axis(axis, x.rank),
        **tuning.choice(x.device, algorithm, x.dtype, block_size, unroll)._asdict(),
    }
    _load_extension(graph)
    (y,) = max_ops.custom("softmax", device=x.device, values=[x], out_types=[x.type], parameters=parameters)
    return y.tensor


def _load_extension(graph: Graph) -> None:
    """Gives `graph` the kernels unless it has them."""
    if "softmax" not in graph._kernel_library:
        graph._import_kernels([extension()])
