"""Every op that MAX can call: unpack, choose, launch."""

import extensibility as compiler
from extensibility import InputTensor, OutputTensor
from extensibility import _FusedInputTensor as FusedInputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from . import cpu, fused, gpu
from .rows import Rows


@compiler.register("softmax")
struct Softmax:
    """The op `softmax`: exp(x - max x) / Σ exp(x - max x) along one axis."""

    @staticmethod
    def execute[
        target: StaticString,
        algorithm: StaticString,
        axis: Int,
        block_size: Int,
        unroll: Int,
    ](
        y: OutputTensor,
        x: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            algorithm: "auto", or the name of a kernel that the device has.
            axis: Which axis sums to 1, counted from 0.
            block_size: Threads a block on a GPU, a power of two up to 1024; ignored on a CPU.
            unroll: Vectors that a GPU thread has under way at a time, where the kernel has that choice.

        Args:
            y: Probabilities, of the shape and dtype of `x`.
            x: Logits: float32, bfloat16, float16 or float64.
            ctx: The device.
        """
        comptime contiguous = axis == x.rank - 1
        var rows = Rows.of[axis](x.shape())
        if rows.is_empty():
            return
        var target_ptr = y.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
        var source_ptr = x.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
        comptime if is_cpu[target]():
            cpu.softmax[algorithm, y.dtype, contiguous](
                target_ptr, source_ptr, rows, ctx
            )
        else:
            gpu.softmax[algorithm, y.dtype, block_size, unroll, contiguous](
                target_ptr, source_ptr, rows, ctx
            )


@compiler.register("softmax_fused")
struct FusedSoftmax:
    """The op `softmax` by `auto`, together with what computes its input."""

    @staticmethod
    def execute[
        target: StaticString, axis: Int, has_prologue_fusion: Bool
    ](
        y: OutputTensor,
        x: FusedInputTensor[dtype=y.dtype, rank=y.rank, ...],
        ctx: DeviceContext,
    ) capturing raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: Which axis sums to 1, counted from 0.
            has_prologue_fusion: Whether MAX, which passes this, fused anything into the input.

        Args:
            y: Probabilities, of the shape and dtype of `x`.
            x: Logits: float32, bfloat16, float16 or float64.
            ctx: The device.
        """
        fused.softmax[target, axis, has_prologue_fusion](y, x, ctx)


@compiler.register("softmax_masked")
struct MaskedSoftmax:
    """Softmax as attention has it, of logits that are computed as they are read.
    """

    @staticmethod
    def execute[
        target: StaticString, axis: Int, causal: Bool, masked: Bool
    ](
        y: OutputTensor,
        x: FusedInputTensor[rank=y.rank, ...],
        ctx: DeviceContext,
    ) capturing raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: Which axis sums to 1, counted from 0.
            causal: Whether an element of the axis before `axis` sees only what is not after it, counted from the end.
            masked: Whether a row of nothing but -inf gives 0, not NaN.

        Args:
            y: Probabilities, of the shape of `x`.
            x: Logits: float32 or float64.
            ctx: The device.
        """
        fused.masked_softmax[target, axis, causal, masked, False](y, x, x, ctx)


@compiler.register("softmax_sink")
struct SinkSoftmax:
    """The op `softmax_masked` with one more logit a row, in the denominator only.
    """

    @staticmethod
    def execute[
        target: StaticString, axis: Int, causal: Bool, masked: Bool
    ](
        y: OutputTensor,
        x: FusedInputTensor[rank=y.rank, ...],
        sink: FusedInputTensor[dtype=x.dtype, rank=y.rank, ...],
        ctx: DeviceContext,
    ) capturing raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: Which axis sums to 1, counted from 0.
            causal: Whether an element of the axis before `axis` sees only what is not after it, counted from the end.
            masked: Whether a row of nothing but -inf gives 0, not NaN.

        Args:
            y: Probabilities, of the shape of `x`.
            x: Logits: float32 or float64.
            sink: The additional logits, of length 1 along `axis`.
            ctx: The device.
        """
        fused.masked_softmax[target, axis, causal, masked, True](
            y, x, sink, ctx
        )
