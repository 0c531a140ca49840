"""The kernels of a GPU, by the names that all kinds of devices have."""

from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from ..ops.finish import Finish
from ..ops.forms import Class, Forms
from ..kernels import Kernels
from ..io.less_target import LessTarget
from ..io.logits import Logits
from ..io.memory import MemorySource
from ..math.loss import LossOptions, Targets
from ..math.online import accumulator
from ..queue import Queue
from ..io.results import Results
from ..io.rows import Rows, Source, Target
from .dispatch_backward import backward
from .dispatch import auto, resident_fits
from .dispatch_converted import converted
from .cross_entropy import losses
from .cross_entropy_backward import gradients
from .dispatch_computed import fused
from .dispatch_forms import formed
from .statistics import logsumexp, max_sum_apart
from .softmax import softmax as from_memory


struct Gpu(Kernels):
    """What a GPU has."""

    @staticmethod
    def softmax[
        algorithm: StaticString,
        dtype: DType,
        block_size: Int,
        unroll: Int,
        contiguous: Bool,
    ](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
        """Writes softmax, by an algorithm."""
        from_memory[algorithm, dtype, block_size, unroll, contiguous](
            y, x, rows, queue
        )

    @staticmethod
    def auto[
        dtype: DType, finish: Finish, contiguous: Bool
    ](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
        """Writes softmax, or what else `finish` says."""
        auto[dtype, finish, contiguous](y, x, rows, queue)

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
        converted[finish, contiguous](y, x, rows, scale, queue)

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
        max_sum_apart[contiguous=contiguous](result, x, rows, queue)

    @staticmethod
    def logsumexp[
        dtype: DType, contiguous: Bool
    ](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
        """Writes ln Σ exp x."""
        logsumexp[contiguous=contiguous](y, x, rows, queue)

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
        backward[dtype, log, contiguous](dx, y, dy, rows, queue)

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
        """Writes the pairs of rows, and losses, which may be smoothed if it says so.
        """
        losses[contiguous=contiguous, smoothed=smoothed](
            loss, pairs, x, targets, rows, options, queue
        )

    @staticmethod
    def wrong_target(
        targets: Targets, rows: Rows, ignored: Int
    ) -> Optional[Int]:
        """Returns the first row whose target is neither a class nor ignored, if there is one, where the host can look at them.
        """
        return None

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
        gradients[contiguous=contiguous](
            dx, x, pairs, targets, dloss, rows, options, queue
        )

    @staticmethod
    def pairs_with_gradients[
        dtype: DType, contiguous: Bool
    ](
        dx: Target[dtype],
        pairs: Target[accumulator[dtype]()],
        x: Source[dtype],
        targets: Targets,
        rows: Rows,
        ignored: Int,
        queue: Queue,
    ) raises -> Bool:
        """Writes the gradients of logits by losses, and the pairs of rows, if these fit on the chip.
        """
        comptime if contiguous and dtype != DType.float64:
            if not rows.is_empty():
                return resident_fits[Finish.PROBABILITIES](
                    LessTarget[dtype](
                        dx,
                        rebind[Target[DType.float32]](pairs),
                        targets,
                        Int64(ignored),
                    ),
                    MemorySource(x),
                    rows,
                    queue,
                )
        return False

    @staticmethod
    def formed[
        dtype: DType,
        out_dtype: DType,
        contiguous: Bool,
        known: Class = Class.ANY,
    ](
        y: Target[out_dtype],
        x: Source[dtype],
        forms: Forms[dtype],
        out_scale: Float64,
        queue: Queue,
    ) raises:
        """Writes softmax of what is made of logits."""
        formed[contiguous, known](y, x, forms, out_scale, queue)

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
        queue: Queue,
    ) raises:
        """Writes softmax of logits that are computed as they are read, or its logarithm.
        """
        fused[has_sink, finish](y, x, sink, queue)
