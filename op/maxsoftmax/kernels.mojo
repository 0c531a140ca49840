"""What a device has to have for the ops: its kernels, behind one name for each.

A library for one kind of device imports the kernels of that kind only: the compiler takes seconds to read those of the other.
"""

from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from .ops.finish import Finish
from .ops.forms import Class, Forms
from .io.logits import Logits
from .math.loss import LossOptions, Targets
from .math.online import accumulator
from .queue import Queue
from .io.results import Results
from .io.rows import Rows, Source, Target


trait Kernels:
    """The kernels of a kind of device. Arguments are as of the functions of `direct`.
    """

    @staticmethod
    def softmax[
        algorithm: StaticString,
        dtype: DType,
        block_size: Int,
        unroll: Int,
        contiguous: Bool,
    ](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
        """Writes softmax, by an algorithm."""
        ...

    @staticmethod
    def auto[
        dtype: DType, finish: Finish, contiguous: Bool
    ](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
        """Writes softmax, or what else `finish` says."""
        ...

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
        ...

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
        ...

    @staticmethod
    def logsumexp[
        dtype: DType, contiguous: Bool
    ](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
        """Writes ln Σ exp x."""
        ...

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
        ...

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
        ...

    @staticmethod
    def wrong_target(
        targets: Targets, rows: Rows, ignored: Int
    ) -> Optional[Int]:
        """Returns the first row whose target is neither a class nor ignored, if there is one, where the host can look at them.
        """
        ...

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
        ...

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
        """Writes the gradients of logits by losses, and the pairs of rows, if it can with one read of the logits; returns whether it can.
        """
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
        """Writes softmax of what is made of logits, none of whose dimensions is 0, in a dtype of its own. Of forms of which it is `known` at compile
        time that they are of that class only the kernels for these are compiled.
        """
        ...

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
        ...
