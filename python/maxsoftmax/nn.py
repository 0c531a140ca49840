"""Softmax as a layer, for models of `max.nn`."""

from __future__ import annotations

from max.graph import TensorValue, TensorValueLike
from max.nn import Module

from maxsoftmax import ops


class Softmax(Module):  # type: ignore[misc]  # MAX ships without type information.
    """A layer without weights that applies `maxsoftmax.ops.softmax`.

    Args:
        axis: The axis that will sum to 1; negative counts from the last.
        scale: What logits are multiplied by; nothing if None.
        causal: Whether `axis` is that of keys, after one of queries, and a query sees no key after it.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType
        >>> scores = TensorType(DType.float32, ("heads", "queries", "keys"), DeviceRef.CPU())
        >>> graph = Graph("attention", maxsoftmax.nn.Softmax(scale=0.125, causal=True), [scores])
        >>> graph.output_types[0].shape
        [Dim('heads'), Dim('queries'), Dim('keys')]
    """

    def __init__(self, axis: int = -1, *, scale: float | None = None, causal: bool = False) -> None:
        super().__init__()
        self.axis = axis
        self.scale = scale
        self.causal = causal

    def __call__(self, x: TensorValueLike, mask: TensorValueLike | None = None) -> TensorValue:
        """Adds softmax of `x` to the graph that is being built.

        Args:
            x: Logits.
            mask: A tensor that broadcasts to `x`: of bools, True where an element takes part, or of floats to be added.

        Returns:
            Probabilities, of the shape, dtype and device of `x`.

        Raises:
            TypeError: If `x` or `mask` is not a tensor of a dtype that the kernels take.
            ValueError: If `x` is a scalar, there is no such axis, or `mask` does not broadcast to it.
        """
        return ops.softmax(x, self.axis, scale=self.scale, mask=mask, causal=self.causal)
