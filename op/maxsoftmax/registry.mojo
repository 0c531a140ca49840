"""Every op that MAX can call: unpack, choose, launch."""

import extensibility as compiler
from extensibility import InputTensor, OutputTensor
from extensibility import _FusedInputTensor as FusedInputTensor
from extensibility import _FusedOutputTensor as FusedOutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.memory import bitcast, unsafe_memcpy
from std.utils import IndexList
from std.utils.numerics import inf

from . import fused
from .gpu.copy import copy
from .direct import (
    cross_entropy,
    cross_entropy_backward,
    logsumexp,
    softmax,
    softmax_backward,
    statistics,
)
from .ops.finish import Finish
from .ops.forms import Class, Forms, Kind, Operand, spread
from .fused import KernelsOf
from .math.loss import LossOptions, Reduction, Targets
from .math.online import accumulator
from .ops.kl_divergence import kl_divergence, kl_divergence_backward
from .ops.sparsemax import sparsemax, sparsemax_backward
from .ops.token_log_probs import (
    Asked,
    token_log_probs,
    token_log_probs_backward,
)
from .io.fusion import rows_of
from .io.rows import Rows, Source, Target, check_row_major


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
        softmax[
            KernelsOf[target],
            axis == x.rank - 1,
            algorithm=algorithm,
            block_size=block_size,
            unroll=unroll,
        ](_target(y), _source(x), Rows.of[axis](x.shape()), ctx)


@compiler.register("softmax_fused")
struct FusedSoftmax:
    """The op `softmax` by `auto`, together with what computes its input."""

    @staticmethod
    def execute[
        target: StaticString,
        axis: Int,
        has_prologue_fusion: Bool,
        has_epilogue_fusion: Bool,
        out_scale: Int,
    ](
        y: FusedOutputTensor,
        x: FusedInputTensor[rank=y.rank, ...],
        ctx: DeviceContext,
    ) capturing raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: Which axis sums to 1, counted from 0.
            has_prologue_fusion: Whether MAX, which passes this, fused anything into the input.
            has_epilogue_fusion: Whether MAX, which passes this, fused anything into the output.
            out_scale: What results of float8 are multiplied by, as the bits of a Float64.

        Args:
            y: Probabilities, of the shape of `x`.
            x: Logits: float32, bfloat16, float16 or float64.
            ctx: The device.
        """
        fused.softmax[target, axis, has_prologue_fusion, has_epilogue_fusion](
            y, x, ctx, _float(out_scale)
        )


@compiler.register("softmax_formed")
struct FormedSoftmax:
    """The op `softmax_fused` of logits as attention has them, scaled and masked by what lies in memory.
    """

    @staticmethod
    def execute[
        target: StaticString,
        axis: Int,
        causal: Bool,
        from_start: Bool,
        beyond: Int,
        masked: Bool,
        has_scale: Bool,
        has_mask: Bool,
        has_temperature: Bool,
        has_sink: Bool,
        scale: Int,
        temperature: Int,
        out_scale: Int,
        has_epilogue_fusion: Bool,
    ](
        y: FusedOutputTensor,
        x: InputTensor[rank=y.rank, ...],
        scales: InputTensor[rank=y.rank, ...],
        mask: InputTensor[rank=y.rank, ...],
        temperatures: InputTensor[rank=y.rank, ...],
        sink: InputTensor[rank=y.rank, ...],
        ctx: DeviceContext,
    ) capturing raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: Which axis sums to 1, counted from 0, one of the first five, with at most one after it.
            causal: Whether an element of the axis before `axis` sees only what is not after it.
            from_start: Whether both are counted from the start, not from the end.
            beyond: How many elements after it it sees, too.
            masked: Whether a row of nothing but -inf gives 0, not NaN.
            has_scale: Whether logits are multiplied by `scales`, and not by the number `scale`.
            has_mask: Whether there is a mask.
            has_temperature: Whether they are then divided by `temperatures`, and not by the number `temperature`.
            has_sink: Whether there is one more logit a row, in the denominator only.
            scale: The bits of a Float64.
            temperature: The bits of a Float64.
            out_scale: What results of float8 are multiplied by, as the bits of a Float64.
            has_epilogue_fusion: Whether MAX, which passes this, fused anything into the output.

        Args:
            y: Probabilities, of the shape of `x`.
            x: Logits: float32, bfloat16, float16 or float64.
            scales: Of the dtype of `x` or its accumulator, and of its shape or of length 1 along an axis, as all that follow.
            mask: The same or bools.
            temperatures: The same.
            sink: The same, of length 1 along `axis`.
            ctx: The device.
        """
        # As `Forms.factor` has it, so that both know of the same class.
        comptime accum = accumulator[x.dtype]()
        comptime factor = _float(scale).cast[accum]() / _float(
            temperature
        ).cast[accum]()
        comptime scaled = factor > 0 and factor < inf[accum]() and not (
            has_scale or has_temperature
        )
        # A mask of bools that is the same along each row is of none of these: its rows are read twice.
        comptime by_bools = Class.HIDDEN if scaled else Class.MASKED
        comptime by_floats = Class.BIASED if mask.dtype == accum else Class.BIASED_NARROW
        comptime by_mask = by_bools if mask.dtype == DType.bool else by_floats
        comptime of_numbers = (
            Class.CUT if causal or has_sink else Class.SCALED
        ) if scaled else Class.ROWS
        comptime known = by_mask if has_mask else of_numbers
        var scale_of = Operand[x.dtype].of(_float(scale))
        comptime if has_scale:
            scale_of = _operand[x.dtype, axis](scales)
        var mask_of = Operand[x.dtype].of_nothing()
        comptime if has_mask:
            mask_of = _operand[x.dtype, axis](mask)
        var temperature_of = Operand[x.dtype].of(_float(temperature))
        comptime if has_temperature:
            temperature_of = _operand[x.dtype, axis](temperatures)
        var sink_of = Operand[x.dtype].of_nothing()
        comptime if has_sink:
            sink_of = _operand[x.dtype, axis](sink)
        var shape = spread[axis](x.shape(), 1)
        fused.formed_softmax[target, axis, known, has_epilogue_fusion](
            y,
            x,
            _source(x),
            Forms[x.dtype](
                shape,
                causal,
                beyond if from_start else beyond
                + Forms[x.dtype].from_end(shape),
                masked,
                scale_of,
                mask_of,
                temperature_of,
                sink_of,
            ),
            _float(out_scale),
            ctx,
        )


@compiler.register("softmax_masked")
struct MaskedSoftmax:
    """Softmax as attention has it, of logits that are computed as they are read.
    """

    @staticmethod
    def execute[
        target: StaticString,
        axis: Int,
        causal: Bool,
        masked: Bool,
        has_epilogue_fusion: Bool,
        out_scale: Int,
    ](
        y: FusedOutputTensor,
        x: FusedInputTensor[rank=y.rank, ...],
        ctx: DeviceContext,
    ) capturing raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: Which axis sums to 1, counted from 0.
            causal: Whether an element of the axis before `axis` sees only what is not after it, counted from the end.
            masked: Whether a row of nothing but -inf gives 0, not NaN.
            has_epilogue_fusion: Whether MAX, which passes this, fused anything into the output.
            out_scale: What results of float8 are multiplied by, as the bits of a Float64.

        Args:
            y: Probabilities, of the shape of `x`.
            x: Logits: float32 or float64.
            ctx: The device.
        """
        fused.masked_softmax[
            target, axis, causal, masked, False, has_epilogue_fusion
        ](y, x, x, ctx, _float(out_scale))


@compiler.register("softmax_sink")
struct SinkSoftmax:
    """The op `softmax_masked` with one more logit a row, in the denominator only.
    """

    @staticmethod
    def execute[
        target: StaticString,
        axis: Int,
        causal: Bool,
        masked: Bool,
        has_epilogue_fusion: Bool,
        out_scale: Int,
    ](
        y: FusedOutputTensor,
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
            has_epilogue_fusion: Whether MAX, which passes this, fused anything into the output.
            out_scale: What results of float8 are multiplied by, as the bits of a Float64.

        Args:
            y: Probabilities, of the shape of `x`.
            x: Logits: float32 or float64.
            sink: The additional logits, of length 1 along `axis`.
            ctx: The device.
        """
        fused.masked_softmax[
            target, axis, causal, masked, True, has_epilogue_fusion
        ](y, x, sink, ctx, _float(out_scale))


@compiler.register("in_memory")
struct InMemory:
    """The op `in_memory`: its input, computed before whoever reads its output.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor,
        x: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".

        Args:
            y: A copy of `x`.
            x: Anything.
            ctx: The device.
        """
        var size = x.shape().flattened_length()
        if size == 0:
            return
        comptime if is_cpu[target]():
            unsafe_memcpy(dest=_target(y), src=_source(x), count=size)
        else:
            copy(_target(y), _source(x), size, ctx)


@compiler.register("log_softmax")
struct LogSoftmax:
    """The op `log_softmax`: (x - max x) - ln Σ exp(x - max x) along one axis, together with what computes its input.
    """

    @staticmethod
    def execute[
        target: StaticString,
        axis: Int,
        has_prologue_fusion: Bool,
        has_epilogue_fusion: Bool,
        out_scale: Int,
    ](
        y: FusedOutputTensor,
        x: FusedInputTensor[rank=y.rank, ...],
        ctx: DeviceContext,
    ) capturing raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: Along which axis probabilities sum to 1, counted from 0.
            has_prologue_fusion: Whether MAX, which passes this, fused anything into the input.
            has_epilogue_fusion: Whether MAX, which passes this, fused anything into the output.
            out_scale: What results of float8 are multiplied by, as the bits of a Float64.

        Args:
            y: Logarithms of probabilities, of the shape of `x`.
            x: Logits: float32, bfloat16, float16 or float64.
            ctx: The device.
        """
        fused.softmax[
            target,
            axis,
            has_prologue_fusion,
            has_epilogue_fusion,
            Finish.LOGARITHMS,
        ](y, x, ctx, _float(out_scale))


@compiler.register("max_sum")
struct MaxSum:
    """The op `max_sum`: m = max x and d = Σ exp(x - m) along one axis."""

    @staticmethod
    def execute[
        target: StaticString, axis: Int
    ](
        pairs: OutputTensor[rank=2, ...],
        x: InputTensor,
        ctx: DeviceContext,
    ) raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: The axis that is reduced, counted from 0.

        Args:
            pairs: (rows, 2), m and d of each row, the dimensions beside `axis` being one; float64 for float64, else
                float32.
            x: Logits: float32, bfloat16, float16 or float64.
            ctx: The device.
        """
        statistics[KernelsOf[target], axis == x.rank - 1](
            _sums[x.dtype](pairs),
            _source(x),
            Rows.of[axis](x.shape()),
            ctx,
        )


@compiler.register("logsumexp")
struct LogSumExp:
    """The op `logsumexp`: ln Σ exp x along one axis."""

    @staticmethod
    def execute[
        target: StaticString, axis: Int
    ](
        y: OutputTensor[rank=1, ...],
        x: InputTensor[dtype=y.dtype, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: The axis that is reduced, counted from 0.

        Args:
            y: (rows,), the dimensions beside `axis` being one.
            x: Logits: float32, bfloat16, float16 or float64.
            ctx: The device.
        """
        logsumexp[KernelsOf[target], axis == x.rank - 1](
            _target(y), _source(x), Rows.of[axis](x.shape()), ctx
        )


@compiler.register("softmax_backward")
struct SoftmaxBackward:
    """The op `softmax_backward`: the gradient of the logits of softmax or of its logarithm.
    """

    @staticmethod
    def execute[
        target: StaticString, axis: Int, log: Bool
    ](
        dx: OutputTensor,
        y: InputTensor[dtype=dx.dtype, rank=dx.rank, ...],
        dy: InputTensor[dtype=dx.dtype, rank=dx.rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: The axis of the forward op, counted from 0.
            log: Whether that was log_softmax.

        Args:
            dx: Either y · (dy - Σ y·dy) or dy - e^y · Σ dy; of the shape and dtype of `y`.
            y: What the forward op returned.
            dy: Its gradient.
            ctx: The device.
        """
        softmax_backward[KernelsOf[target], axis == y.rank - 1, log=log](
            _target(dx),
            _source(y),
            _source(dy),
            rows_of[y.static_spec, axis](y.shape()),
            ctx,
        )


@compiler.register("sparsemax")
struct Sparsemax:
    """The op `sparsemax`: the nearest probabilities to logits along one axis.
    """

    @staticmethod
    def execute[
        target: StaticString, axis: Int
    ](
        y: OutputTensor,
        x: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: Which axis sums to 1, counted from 0.

        Args:
            y: Probabilities, of the shape and dtype of `x`.
            x: Logits: float32, bfloat16, float16 or float64.
            ctx: The device.
        """
        sparsemax["cpu" if is_cpu[target]() else "gpu", axis == x.rank - 1](
            _target(y), _source(x), Rows.of[axis](x.shape()), ctx
        )


@compiler.register("sparsemax_backward")
struct SparsemaxBackward:
    """The op `sparsemax_backward`: the gradient of the logits of sparsemax."""

    @staticmethod
    def execute[
        target: StaticString, axis: Int
    ](
        dx: OutputTensor,
        y: InputTensor[dtype=dx.dtype, rank=dx.rank, ...],
        dy: InputTensor[dtype=dx.dtype, rank=dx.rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: The axis of the forward op, counted from 0.

        Args:
            dx: dy less its mean over what is above 0 in `y`, and 0 elsewhere; of the shape and dtype of `y`.
            y: What the forward op returned.
            dy: Its gradient.
            ctx: The device.
        """
        sparsemax_backward[
            "cpu" if is_cpu[target]() else "gpu", axis == y.rank - 1
        ](_target(dx), _source(y), _source(dy), Rows.of[axis](y.shape()), ctx)


@compiler.register("token_log_probs")
struct TokenLogProbs:
    """The op `token_log_probs`: the logarithms of some tokens' probabilities, and the entropy of each row.
    """

    @staticmethod
    def execute[
        target: StaticString, axis: Int, temperature: Int, has_entropy: Bool
    ](
        log_probs: OutputTensor[rank=2, ...],
        entropy: OutputTensor[rank=1, ...],
        sums: OutputTensor[rank=2, ...],
        x: InputTensor,
        tokens: InputTensor[rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: The axis of the tokens' probabilities, counted from 0.
            temperature: What logits are divided by, as the bits of a Float64.
            has_entropy: Whether the entropy is wanted.

        Args:
            log_probs: (rows, k), the dimensions beside `axis` being one; float64 for float64, else float32. NaN of what
                is no token of the row.
            entropy: (rows,), -Σ p ln p; not written to if it is not wanted.
            sums: (rows, 3), memory for what logarithms are computed from.
            x: Logits.
            tokens: (rows · k,), int32 or int64.
            ctx: The device.
        """
        comptime accum = accumulator[x.dtype]()
        var entropies: Optional[Target[accum]] = None
        comptime if has_entropy:
            entropies = _sums[x.dtype](entropy)
        token_log_probs[
            "cpu" if is_cpu[target]() else "gpu", axis == x.rank - 1
        ](
            _sums[x.dtype](log_probs),
            entropies,
            _sums[x.dtype](sums),
            _source(x),
            Asked(
                Targets(_source(tokens)),
                log_probs.shape()[1],
                _float(temperature),
            ),
            Rows.of[axis](x.shape()),
            ctx,
        )


@compiler.register("token_log_probs_backward")
struct TokenLogProbsBackward:
    """The op `token_log_probs_backward`: the gradient of the logits."""

    @staticmethod
    def execute[
        target: StaticString, axis: Int, temperature: Int, has_entropy: Bool
    ](
        dx: OutputTensor,
        x: InputTensor[dtype=dx.dtype, rank=dx.rank, ...],
        sums: InputTensor[rank=2, ...],
        tokens: InputTensor[rank=1, ...],
        dlog_probs: InputTensor[rank=2, ...],
        dentropy: InputTensor[rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: The axis of the tokens' probabilities, counted from 0.
            temperature: What logits are divided by, as the bits of a Float64.
            has_entropy: Whether there are gradients of entropies.

        Args:
            dx: The gradient, of the shape and dtype of `x`.
            x: Logits.
            sums: What `token_log_probs` wrote, with the entropy if it has a gradient.
            tokens: (rows · k,), int32 or int64.
            dlog_probs: (rows, k), the gradients of the logarithms.
            dentropy: (rows,), those of the entropies; not read if there are none.
            ctx: The device.
        """
        comptime accum = accumulator[dx.dtype]()
        var of_entropies: Optional[Source[accum]] = None
        comptime if has_entropy:
            of_entropies = _sums[dx.dtype](dentropy)
        token_log_probs_backward[
            "cpu" if is_cpu[target]() else "gpu", axis == dx.rank - 1
        ](
            _target(dx),
            _source(x),
            _sums[dx.dtype](sums),
            Asked(
                Targets(_source(tokens)),
                dlog_probs.shape()[1],
                _float(temperature),
            ),
            _sums[dx.dtype](dlog_probs),
            of_entropies,
            Rows.of[axis](dx.shape()),
            ctx,
        )


@compiler.register("kl_divergence")
struct KlDivergence:
    """The op `kl_divergence`: Σ p (ln p - ln q) of the rows of two tensors of logits.
    """

    @staticmethod
    def execute[
        target: StaticString, axis: Int, temperature: Int
    ](
        kl: OutputTensor[rank=1, ...],
        sums: OutputTensor[rank=2, ...],
        p: InputTensor,
        q: InputTensor[dtype=p.dtype, rank=p.rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: The axis of the probabilities, counted from 0.
            temperature: What logits are divided by, as the bits of a Float64.

        Args:
            kl: (rows,), the dimensions beside `axis` being one; float64 for float64, else float32.
            sums: (rows, 5), what the gradient needs.
            p: Logits of p.
            q: Logits of q, of the same shape.
            ctx: The device.
        """
        kl_divergence["cpu" if is_cpu[target]() else "gpu", axis == p.rank - 1](
            _sums[p.dtype](kl),
            _sums[p.dtype](sums),
            _source(p),
            _source(q),
            _float(temperature),
            Rows.of[axis](p.shape()),
            ctx,
        )


@compiler.register("kl_divergence_backward")
struct KlDivergenceBackward:
    """The op `kl_divergence_backward`: the gradient of the logits of p, or of q.
    """

    @staticmethod
    def execute[
        target: StaticString, axis: Int, temperature: Int, of_p: Bool
    ](
        dx: OutputTensor,
        p: InputTensor[dtype=dx.dtype, rank=dx.rank, ...],
        q: InputTensor[dtype=dx.dtype, rank=dx.rank, ...],
        sums: InputTensor[rank=2, ...],
        dkl: InputTensor[rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: The axis of the probabilities, counted from 0.
            temperature: What logits are divided by, as the bits of a Float64.
            of_p: Whether the gradient is that of p.

        Args:
            dx: The gradient, of the shape and dtype of both.
            p: Logits of p.
            q: Logits of q.
            sums: What `kl_divergence` wrote.
            dkl: (rows,), the gradients of the divergences.
            ctx: The device.
        """
        kl_divergence_backward[
            "cpu" if is_cpu[target]() else "gpu", axis == dx.rank - 1
        ](
            _target(dx),
            _source(p),
            _source(q),
            _sums[dx.dtype](sums),
            Optional(_sums[dx.dtype](dkl)),
            of_p,
            _float(temperature),
            Rows.of[axis](dx.shape()),
            ctx,
        )


@compiler.register("cross_entropy")
struct CrossEntropy:
    """The op `cross_entropy`: the loss of each row, or what the losses come to, and the pair of each row.
    """

    @staticmethod
    def execute[
        target: StaticString,
        axis: Int,
        ignore_index: Int,
        smoothing: Int,
        reduction: StaticString,
        classes: Int,
    ](
        loss: OutputTensor[rank=1, ...],
        pairs: OutputTensor[rank=2, ...],
        x: InputTensor,
        targets: InputTensor[rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: The axis of the classes, counted from 0.
            ignore_index: The class of rows that do not count.
            smoothing: Share of the target that is spread over all classes, as the bits of a Float64.
            reduction: What becomes of the losses: "none", "sum" or "mean".
            classes: How many classes whole rows have, if `x` is a shard of them, as of `LossOptions`; else 0.

        Args:
            loss: (rows,), the dimensions beside `axis` being one, for "none", else (1,); of the dtype of `x`, or its
                accumulator's.
            pairs: (rows, 2), as of `max_sum`.
            x: Logits.
            targets: (rows,), int32 or int64.
            ctx: The device.

        Raises:
            Error: On a CPU, if a target is neither a class nor `ignore_index`. On a GPU its loss is NaN.
        """
        cross_entropy[
            KernelsOf[target], axis == x.rank - 1, smoothed=smoothing != 0
        ](
            _target(loss),
            _sums[x.dtype](pairs),
            _source(x),
            Targets(_source(targets)),
            Rows.of[axis](x.shape()),
            _options[ignore_index, smoothing, reduction, classes](),
            ctx,
        )


@compiler.register("cross_entropy_backward")
struct CrossEntropyBackward:
    """The op `cross_entropy_backward`: the gradient of the logits."""

    @staticmethod
    def execute[
        target: StaticString,
        axis: Int,
        ignore_index: Int,
        smoothing: Int,
        reduction: StaticString,
        classes: Int,
    ](
        dx: OutputTensor,
        x: InputTensor[dtype=dx.dtype, rank=dx.rank, ...],
        targets: InputTensor[rank=1, ...],
        pairs: InputTensor[rank=2, ...],
        dloss: InputTensor[dtype=pairs.dtype, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: The axis of the classes, counted from 0.
            ignore_index: The class of rows that do not count.
            smoothing: Share of the target that is spread over all classes, as the bits of a Float64.
            reduction: What became of the losses: "none", "sum" or "mean".
            classes: How many classes whole rows have, if `x` is a shard of them, as of `LossOptions`; else 0.

        Args:
            dx: (softmax x - target) · dloss, of the shape and dtype of `x`.
            x: Logits.
            targets: (rows,), int32 or int64.
            pairs: (rows, 2), as of `max_sum`.
            dloss: (rows,), the gradient of each row's loss, or (1,), that of what became of all.
            ctx: The device.
        """
        cross_entropy_backward[KernelsOf[target], axis == x.rank - 1](
            _target(dx),
            _source(x),
            _sums[x.dtype](pairs),
            Targets(_source(targets)),
            Optional(_source(dloss)),
            Rows.of[axis](x.shape()),
            _options[ignore_index, smoothing, reduction, classes](),
            ctx,
        )


@compiler.register("cross_entropy_backward_in_place")
struct CrossEntropyBackwardInPlace:
    """The op `cross_entropy_backward_in_place`: logits become their gradient.
    """

    @staticmethod
    def execute[
        target: StaticString,
        axis: Int,
        ignore_index: Int,
        smoothing: Int,
        reduction: StaticString,
        classes: Int,
    ](
        x: MutableInputTensor,
        targets: InputTensor[rank=1, ...],
        pairs: InputTensor[rank=2, ...],
        dloss: InputTensor[dtype=pairs.dtype, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the op.

        Parameters:
            target: Where to compute: "cpu" or "gpu".
            axis: The axis of the classes, counted from 0.
            ignore_index: The class of rows that do not count.
            smoothing: Share of the target that is spread over all classes, as the bits of a Float64.
            reduction: What became of the losses: "none", "sum" or "mean".
            classes: How many classes whole rows have, if `x` is a shard of them, as of `LossOptions`; else 0.

        Args:
            x: Logits, and afterwards (softmax x - target) · dloss.
            targets: (rows,), int32 or int64.
            pairs: (rows, 2), as of `max_sum`.
            dloss: (rows,), the gradient of each row's loss, or (1,), that of what became of all.
            ctx: The device.
        """
        var logits = x.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
        cross_entropy_backward[KernelsOf[target], axis == x.rank - 1](
            logits,
            logits,
            _sums[x.dtype](pairs),
            Targets(_source(targets)),
            Optional(_source(dloss)),
            Rows.of[axis](x.shape()),
            _options[ignore_index, smoothing, reduction, classes](),
            ctx,
        )


def _options[
    ignore_index: Int, smoothing: Int, reduction: StaticString, classes: Int
]() -> LossOptions:
    """Returns what a graph chose of a loss."""
    comptime assert (
        reduction == "none" or reduction == "sum" or reduction == "mean"
    )
    return {
        ignore_index,
        _float(smoothing),
        Reduction.NONE if reduction
        == "none" else (
            Reduction.SUM if reduction == "sum" else Reduction.MEAN
        ),
        False,
        classes,
    }


def _operand[
    dtype: DType, axis: Int
](tensor: InputTensor) raises -> Operand[dtype]:
    """Returns what logits of `dtype` are scaled or masked by along `axis`, of a tensor.
    """
    comptime kind = Kind.BOOL if tensor.dtype == DType.bool else (
        Kind.WIDE if tensor.dtype == accumulator[dtype]() else Kind.NARROW
    )
    var shape = tensor.shape()
    var strides = IndexList[tensor.rank]()
    var step = 1
    comptime for i in reversed(range(tensor.rank)):
        strides[i] = step if shape[i] != 1 else 0
        step *= shape[i]
    return {
        kind,
        _source(tensor).unsafe_bitcast[UInt8](),
        0,
        spread[axis](strides, 0),
    }


@inline(.always)
def _float(bits: Int) -> Float64:
    """Returns the number of these bits: as a float it would have been rounded to Float32 on its way here.
    """
    return bitcast[DType.float64](Int64(bits))


def _target(y: OutputTensor) raises -> Target[y.dtype]:
    """Returns where the first element of a result goes."""
    check_row_major(y.shape(), y.strides())
    return y.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()


def _source(x: InputTensor) raises -> Source[x.dtype]:
    """Returns where the first element of an input is."""
    check_row_major(x.shape(), x.strides())
    return x.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()


def _sums[dtype: DType](y: OutputTensor) raises -> Target[accumulator[dtype]()]:
    """Returns where results in the accumulator of `dtype` go."""
    comptime assert y.dtype == accumulator[dtype]()
    return _target(y).unsafe_bitcast[Scalar[accumulator[dtype]()]]()


def _sums[dtype: DType](x: InputTensor) raises -> Source[accumulator[dtype]()]:
    """Returns where inputs in the accumulator of `dtype` are."""
    comptime assert x.dtype == accumulator[dtype]()
    return _source(x).unsafe_bitcast[Scalar[accumulator[dtype]()]]()
