"""Every op of MAX that is replaced. A registration in a graph's own extension comes before the built-in one."""

import extensibility as compiler
from extensibility import _FusedInputTensor as FusedInputTensor
from extensibility import _FusedOutputTensor as FusedOutputTensor
from max.gpu.host import DeviceContext

from maxsoftmax import fused
from maxsoftmax.ops.finish import Finish


@compiler.register("mo.reduce.softmax")
struct Softmax:
    """What `max.graph.ops.softmax` puts into a graph."""

    @staticmethod
    def execute[
        target: StaticString,
        axis: Int,
        has_prologue_fusion: Bool,
        has_epilogue_fusion: Bool,
    ](
        y: FusedOutputTensor,
        x: FusedInputTensor[dtype=y.dtype, rank=y.rank, ...],
        ctx: DeviceContext,
    ) capturing raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: Which axis sums to 1; a negative one counts from the last.
            has_prologue_fusion: Whether MAX, which passes this, fused anything into the input.
            has_epilogue_fusion: Whether MAX, which passes this, fused anything into the output.

        Args:
            y: Probabilities, of the shape and dtype of `x`.
            x: Logits.
            ctx: The device.
        """
        comptime place = axis if axis >= 0 else axis + x.rank
        fused.softmax[target, place, has_prologue_fusion, has_epilogue_fusion](
            y, x, ctx
        )


@compiler.register("mo.reduce.logsoftmax")
struct LogSoftmax:
    """What `max.graph.ops.logsoftmax` puts into a graph."""

    @staticmethod
    def execute[
        target: StaticString,
        axis: Int,
        has_prologue_fusion: Bool,
        has_epilogue_fusion: Bool,
    ](
        y: FusedOutputTensor,
        x: FusedInputTensor[dtype=y.dtype, rank=y.rank, ...],
        ctx: DeviceContext,
    ) capturing raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: Along which axis probabilities sum to 1; a negative one counts from the last.
            has_prologue_fusion: Whether MAX, which passes this, fused anything into the input.
            has_epilogue_fusion: Whether MAX, which passes this, fused anything into the output.

        Args:
            y: Logarithms of probabilities, of the shape and dtype of `x`.
            x: Logits.
            ctx: The device.
        """
        comptime place = axis if axis >= 0 else axis + x.rank
        fused.softmax[
            target,
            place,
            has_prologue_fusion,
            has_epilogue_fusion,
            Finish.LOGARITHMS,
        ](y, x, ctx)
