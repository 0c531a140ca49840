"""The kernels of a GPU, by the names that all kinds of devices have: which of them takes what. See `kernels.Kernels` for what each
function takes.
"""

from extensibility.managed_tensor_slice import InputFusion, OutputFusion
from std.sys import size_of

from ..ops.finish import Finish
from ..ops.formed import FormedSource
from ..ops.forms import AXIS, Class, Forms
from ..ops.made import InMemory, made_softmax
from ..ops.scaled_columns import ScaledSource
from ..kernels import Kernels
from ..io.less_target import LessTarget
from ..io.logits import Logits
from ..io.memory import MemorySource, MemoryTarget
from ..math.loss import LossOptions, Targets
from ..math.online import accumulator
from ..queue import Queue
from ..io.results import into_memory, Results
from ..io.rows import Rows, Source, Target, VECTOR_BYTES
from ..io.sink import WithSink
from ..io.source import RowSource
from .copy import copy
from .cross_entropy import losses
from .cross_entropy_backward import gradients
from .dispatch import auto, converted, resident_fits, surely_fits
from .dispatch_computed import computed
from .dispatch_formed import formed
from .dispatch_strided import strided
from .fallback import fallback
from .ladder import rung
from .statistics import of_pairs
from .streaming import streaming
from .streaming_computed import streaming_computed
from .streaming_operations import Products


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
        """Writes softmax, by "auto" or a kernel of the ladder, which along another axis than the last is the fallback.
        """
        comptime assert block_size.is_power_of_two() and block_size <= 1024
        comptime if algorithm == "auto":
            auto[dtype, Finish.PROBABILITIES, contiguous](y, x, rows, queue)
        elif not contiguous:
            fallback[Finish.PROBABILITIES, block_size](
                MemoryTarget(y), MemorySource(x), rows, queue
            )
        else:
            rung[algorithm, dtype, block_size, unroll](y, x, rows, queue)

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
        comptime if not contiguous:
            strided[finish](
                into_memory(y, rows, scale), MemorySource(x), rows, queue
            )
        elif in_memory[out_dtype, False]():
            converted[finish](
                MemoryTarget(y),
                MemoryTarget[passing=True](y),
                MemorySource(x),
                rows,
                queue,
            )
        else:
            var target = into_memory(y, rows, scale)
            converted[finish](target, target, MemorySource(x), rows, queue)

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
        of_pairs[contiguous, apart=True](result, x, rows, queue)

    @staticmethod
    def logsumexp[
        dtype: DType, contiguous: Bool
    ](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
        """Writes ln Σ exp x."""
        of_pairs[contiguous, apart=False](y, x, rows, queue)

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
        """Writes the gradient of logits, not in the memory of `y` or `dy`: one of them may be moved there.
        """
        comptime finish = Finish.GRADIENT_OF_LOGARITHMS if log else Finish.GRADIENT

        @inline(.always)
        def compute[
            contiguous: Bool
        ](y: Source[dtype], dy: Source[dtype]) raises {imm}:
            var to, of_y = MemoryTarget(dx), MemorySource(y)
            comptime if not contiguous:
                strided[finish](to, of_y, rows, queue, dy)
            else:
                comptime if dtype != DType.float64:
                    if resident_fits[finish](to, of_y, rows, queue, dy):
                        return
                    comptime if not surely_fits[
                        MemorySource[dtype], MemoryTarget[dtype]
                    ](finish, rows.length):
                        streaming[Products[dtype, log], finish](
                            dx, y, dy, rows, queue
                        )

        comptime if not contiguous:
            compute[False](y, dy)
        else:
            # What is read by the vector begins alike: where it does not, what the results will take the place of is moved first.
            var size = rows.count() * rows.n
            if dtype == DType.float64:
                fallback[finish](
                    MemoryTarget(dx), MemorySource(y), rows, queue, dy
                )
            elif (Int(y) - Int(dy)) % VECTOR_BYTES == 0:
                compute[True](y, dy)
            elif (Int(y) - Int(dx)) % VECTOR_BYTES == 0:
                copy(dx, dy, size, queue)
                compute[True](y, dx)
            elif (Int(dy) - Int(dx)) % VECTOR_BYTES == 0:
                copy(dx, y, size, queue)
                compute[True](dx, dy)
            else:
                fallback[finish](
                    MemoryTarget(dx), MemorySource(y), rows, queue, dy
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
        comptime finish = Finish.PROBABILITIES
        comptime Formed[are: Class] = FormedSource[
            dtype, contiguous=contiguous, forms_are=are
        ]
        var are = forms.are()
        comptime if epilogue and not contiguous:
            # Columns that are dealt, as those in memory may be, have to be written there.
            var logits = InMemory[dtype, axis](x, forms.shape)
            made_softmax[Self, axis](y, logits, forms, rows, queue)
        elif not contiguous:
            comptime if dtype != DType.float64:
                # What is cut and not causal has a sink.
                comptime for with_sink in [False, True]:
                    comptime of = Class.CUT if with_sink else Class.SCALED
                    comptime if known.may_be(of):
                        if are == of and not forms.causal:
                            strided[finish](
                                y,
                                ScaledSource[dtype, with_sink](
                                    x, forms.scaled()
                                ),
                                rows,
                                queue,
                            )
                            return
            strided[finish](y, Formed[Class.ANY](x, forms), rows, queue)
        else:
            comptime if in_memory[out_dtype, epilogue]():
                formed[known](
                    MemoryTarget(y.memory),
                    MemoryTarget[passing=True](y.memory),
                    x,
                    forms,
                    rows,
                    queue,
                )
            else:
                formed[known](y, y, x, forms, rows, queue)

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

        @inline(.always)
        def by[S: RowSource](source: S) raises {imm}:
            comptime if axis != rank - 1:
                strided[finish](y, source, rows, queue)
            elif in_dtype == DType.float64:
                # Not worth kernels of its own.
                streaming_computed[finish](y, source, rows, queue)
            else:
                computed[finish](y, source, rows, queue)

        comptime if has_sink:
            by(WithSink(x, sink))
        else:
            by(x)


def in_memory[dtype: DType, epilogue: Bool]() -> Bool:
    """Returns whether results go to memory as they are, and are not multiplied before, as those of float8 are.
    """
    return not epilogue and size_of[dtype]() > 1
