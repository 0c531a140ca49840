"""The kernels of a CPU, by the names that all kinds of devices have."""

from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from ..ops.finish import Finish
from ..ops.forms import Class, Forms
from ..ops.made import InMemory, made_softmax
from ..kernels import Kernels
from ..io.logits import Logits
from ..math.loss import LossOptions, Targets, log_of_sum
from ..math.online import accumulator
from ..queue import Queue
from ..io.results import Results
from ..io.rows import Rows, Source, Target
from .cross_entropy import gradients, losses, wrong_target
from .forms import formed
from .memory import store
from .naive import naive
from .operations import (
    LogSoftmax,
    Operation,
    Softmax,
    SoftmaxGradient,
    Statistics,
)
from .sources import Computed, Memory
from .targets import HandedOn, ToMemory
from .walk import lanes_of, walk


struct Cpu(Kernels):
    """What a CPU has."""

    @staticmethod
    def softmax[
        algorithm: StaticString,
        dtype: DType,
        block_size: Int,
        unroll: Int,
        contiguous: Bool,
    ](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
        """Writes softmax, by an algorithm: "auto" or "naive"."""
        comptime assert algorithm == "auto" or algorithm == "naive"
        comptime if algorithm == "naive":
            naive(y, x, rows)
        else:
            Self.auto[dtype, Finish.PROBABILITIES, contiguous](
                y, x, rows, queue
            )

    @staticmethod
    def auto[
        dtype: DType, finish: Finish, contiguous: Bool
    ](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
        """Writes softmax, or what else `finish` says."""
        comptime if finish == Finish.PAIR:
            comptime accum = accumulator[dtype]()
            var pairs = y.unsafe_bitcast[Scalar[accum]]()
            _statistics[contiguous](pairs, 2, 1, x, rows, queue)
        else:
            Self.converted[dtype, dtype, finish, contiguous](
                y, x, rows, 1, queue
            )

    @staticmethod
    def converted[
        dtype: DType, out_dtype: DType, finish: Finish, contiguous: Bool
    ](
        y: Target[out_dtype],
        x: Source[dtype],
        rows: Rows,
        scale: Float64,
        queue: Queue,
    ) raises:
        """Writes softmax, or its logarithm, in another dtype; of float8 times a scale.
        """
        var source = Memory[dtype, contiguous](x, x, rows)
        var target = ToMemory[out_dtype, contiguous](y, rows, scale)
        comptime lanes = lanes_of[dtype, contiguous]
        comptime if finish == Finish.LOGARITHMS:
            var operation = LogSoftmax[dtype, lanes](False)
            walk[contiguous](source, operation, target, rows, queue)
        else:
            var operation = Softmax[dtype, lanes](False)
            walk[contiguous](source, operation, target, rows, queue)

    @staticmethod
    def max_sum_apart[
        dtype: DType, contiguous: Bool
    ](
        result: Target[accumulator[dtype]()],
        x: Source[dtype],
        rows: Rows,
        queue: Queue,
    ) raises:
        """Writes all m, and then all d."""
        _statistics[contiguous](result, 1, rows.count(), x, rows, queue)

    @staticmethod
    def logsumexp[
        dtype: DType, contiguous: Bool
    ](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
        """Writes ln Σ exp x."""
        comptime accum = accumulator[dtype]()
        var memory = List[Scalar[accum]](unsafe_uninit_length=2 * rows.count())
        var pairs = memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
        _statistics[contiguous](pairs, 2, 1, x, rows, queue)
        for row in range(rows.count()):
            var value = log_of_sum(memory[2 * row], memory[2 * row + 1])
            store(y.unsafe_offset(row), SIMD[accum, 1](value), 1)

    @staticmethod
    def backward[
        dtype: DType, log: Bool, contiguous: Bool
    ](
        dx: Target[dtype],
        y: Source[dtype],
        dy: Source[dtype],
        rows: Rows,
        queue: Queue,
    ) raises:
        """Writes the gradient of logits."""
        walk[contiguous](
            Memory[dtype, contiguous, True](y, dy, rows),
            SoftmaxGradient[dtype, lanes_of[dtype, contiguous], log](),
            ToMemory[dtype, contiguous](dx, rows),
            rows,
            queue,
        )

    @staticmethod
    def losses[
        dtype: DType, out: DType, contiguous: Bool, smoothed: Bool
    ](
        loss: Target[out],
        pairs: Target[accumulator[dtype]()],
        x: Source[dtype],
        targets: Targets,
        rows: Rows,
        options: LossOptions,
        queue: Queue,
    ) raises:
        """Writes the pairs of rows, and losses."""
        if rows.count() != 0:
            _statistics[contiguous](pairs, 2, 1, x, rows, queue)
        losses(loss, pairs, x, targets, rows, options, queue)

    @staticmethod
    def wrong_target(
        targets: Targets, rows: Rows, ignored: Int
    ) -> Optional[Int]:
        """Returns the first row whose target is neither a class nor ignored, if there is one, where the host can look at them.
        """
        return wrong_target(targets, rows, ignored)

    @staticmethod
    def gradients[
        dtype: DType, up: DType, contiguous: Bool
    ](
        dx: Target[dtype],
        x: Source[dtype],
        pairs: Source[accumulator[dtype]()],
        targets: Targets,
        dloss: Optional[Source[up]],
        rows: Rows,
        options: LossOptions,
        queue: Queue,
    ) raises:
        """Writes the gradient of logits of losses."""
        gradients[dtype, up, contiguous](
            dx, x, pairs, targets, dloss, rows, options, queue
        )

    @staticmethod
    def formed[
        dtype: DType,
        Out: OutputFusion,
        out_dtype: DType,
        rank: Int,
        axis: Int,
        epilogue: Bool,
        //,
        contiguous: Bool,
        known: Class = Class.ANY,
    ](
        y: Results[Out, out_dtype, rank, axis, epilogue],
        x: Source[dtype],
        forms: Forms[dtype],
        rows: Rows,
        queue: Queue,
    ) raises:
        """Writes softmax of what is made of logits."""
        comptime if epilogue:
            var logits = InMemory[dtype, axis](x, forms.shape)
            made_softmax[Self, axis](y, logits, forms, rows, queue)
        else:
            formed[Self, contiguous](y.memory, x, forms, rows, y.scale, queue)

    @staticmethod
    def fused[
        Fusion: InputFusion,
        Sink: InputFusion,
        Out: OutputFusion,
        in_dtype: DType,
        out_dtype: DType,
        rank: Int,
        axis: Int,
        causal: Bool,
        epilogue: Bool,
        //,
        has_sink: Bool,
        finish: Finish,
    ](
        y: Results[Out, out_dtype, rank, axis, epilogue],
        x: Logits[Fusion, in_dtype, rank, axis, causal],
        sink: Logits[Sink, in_dtype, rank, axis, False],
        rows: Rows,
        queue: Queue,
    ) raises:
        """Writes softmax of logits that are computed as they are read, or its logarithm.
        """
        comptime contiguous = axis == rank - 1
        var source = Computed[
            Fusion, Sink, in_dtype, rank, axis, causal, has_sink
        ](x, sink)
        comptime lanes = lanes_of[in_dtype, contiguous]
        var line = x.shape[rank - 1]

        @inline(.always)
        def by(operation: Some[Operation]) raises {imm}:
            comptime if epilogue:
                var results = rebind[Results[Out, out_dtype, rank, axis, True]](
                    y
                )
                var target = HandedOn[Out, out_dtype, rank, axis](
                    results, results.row(0, 0)
                )
                walk[contiguous](source, operation, target, rows, queue, line)
            else:
                var target = ToMemory[out_dtype, contiguous](
                    y.memory, rows, y.scale
                )
                walk[contiguous](source, operation, target, rows, queue, line)

        comptime if finish == Finish.LOGARITHMS:
            by(LogSoftmax[in_dtype, lanes](x.masked))
        else:
            by(Softmax[in_dtype, lanes](x.masked))


def _statistics[
    dtype: DType, //, contiguous: Bool
](
    y: Target[accumulator[dtype]()],
    step: Int,
    apart: Int,
    x: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes what there is one of for each row, if there are rows: see `Statistics`.
    """
    if rows.count() != 0:
        walk[contiguous](
            Memory[dtype, contiguous](x, x, rows),
            Statistics[dtype, lanes_of[dtype, contiguous]](
                y, step, apart, x, rows
            ),
            ToMemory[dtype, contiguous](
                y.unsafe_bitcast[Scalar[dtype]](), rows
            ),
            rows,
            queue,
        )
