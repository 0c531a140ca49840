"""All that computes bfloat16 on a CPU, to be compiled and not run: `test_bfloat16.py` reads the assembly."""

from std.utils import IndexList
from max.gpu.host import DeviceContext
from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from maxsoftmax import Cpu
from maxsoftmax.ops.finish import Finish
from maxsoftmax.ops.sparsemax import sparsemax, sparsemax_backward
from maxsoftmax.io.logits import Logits
from maxsoftmax.math.loss import LossOptions, Targets
from maxsoftmax.math.online import accumulator
from maxsoftmax.io.results import Results
from maxsoftmax.io.rows import Rows, Source, Target

comptime dtype = DType.bfloat16
comptime From = Source[dtype]
comptime To = Target[dtype]
comptime accum = accumulator[dtype]()
comptime Wide = Source[accum]
comptime WideTo = Target[accum]
comptime Classes = Source[DType.int64]


@fieldwise_init
struct Loaded[source: DType](InputFusion, TrivialRegisterPassable):
    """What MAX would write to compute the logits of an op, here as they lie in memory.

    Parameters:
        source: Dtype of the logits.
    """

    var memory: Source[Self.source]
    """Where the logits are."""

    @inline(.always)
    def load[
        dtype: DType, rank: Int, simd_width: Int, element_alignment: Int = 1
    ](self, idx: IndexList[rank]) -> SIMD[dtype, simd_width]:
        """Returns elements along the last axis."""
        return rebind[SIMD[dtype, simd_width]](
            self.memory.unsafe_load[width=simd_width](idx[0] + idx[rank - 1])
        )


@fieldwise_init
struct Stored(OutputFusion, TrivialRegisterPassable):
    """What MAX would write to take the results of an op, here into memory."""

    var memory: Target[dtype]
    """Where the results go."""

    @inline(.always)
    def store[
        dtype: DType,
        rank: Int,
        simd_width: SIMDLength,
        element_alignment: Int = 1,
    ](self, idx: IndexList[rank], value: SIMD[dtype, simd_width]):
        """Takes elements along the last axis."""
        self.memory.unsafe_bitcast[Scalar[dtype]]().unsafe_store(
            idx[0] + idx[rank - 1], value
        )


@export
def plain_cast(y: To, x: Wide) abi("Mojo"):
    """What no other function here may do."""
    y[] = x[].cast[dtype]()


@export
def plain_cast_of_vectors(y: To, x: Wide) abi("Mojo"):
    """The same of many."""
    y.unsafe_store(x.unsafe_load[width=16]().cast[dtype]())


@export
def naive(y: To, x: From, rows: Rows[], ctx: DeviceContext) abi("Mojo"):
    try:
        Cpu.softmax["naive", dtype, 128, 4, True](y, x, rows, ctx)
        Cpu.softmax["naive", dtype, 128, 4, False](y, x, rows, ctx)
    except:
        pass


def all_of[
    contiguous: Bool
](y: To, x: From, dy: From, rows: Rows[], ctx: DeviceContext) raises:
    Cpu.auto[dtype, Finish.PROBABILITIES, contiguous](y, x, rows, ctx)
    Cpu.auto[dtype, Finish.LOGARITHMS, contiguous](y, x, rows, ctx)
    Cpu.auto[dtype, Finish.PAIR, contiguous](y, x, rows, ctx)
    Cpu.backward[dtype, False, contiguous](y, x, dy, rows, ctx)
    Cpu.backward[dtype, True, contiguous](y, x, dy, rows, ctx)


@export
def contiguous(
    y: To, x: From, dy: From, rows: Rows[], ctx: DeviceContext
) abi("Mojo"):
    try:
        all_of[True](y, x, dy, rows, ctx)
    except:
        pass


@export
def strided(
    y: To, x: From, dy: From, rows: Rows[], ctx: DeviceContext
) abi("Mojo"):
    try:
        all_of[False](y, x, dy, rows, ctx)
    except:
        pass


@export
def cross_entropy(
    dx: To,
    x: From,
    pairs: WideTo,
    targets: Classes,
    rows: Rows[],
    options: LossOptions,
    ctx: DeviceContext,
) abi("Mojo"):
    try:
        comptime for contiguous in [True, False]:
            Cpu.losses[contiguous=contiguous, smoothed=True](
                dx, pairs, x, Targets(targets), rows, options, ctx
            )
            Cpu.gradients[contiguous=contiguous](
                dx, x, pairs, Targets(targets), Optional(x), rows, options, ctx
            )
    except:
        pass


@export
def sparse(
    dx: To, x: From, dy: From, rows: Rows[], ctx: DeviceContext
) abi("Mojo"):
    try:
        comptime for contiguous in [True, False]:
            sparsemax["cpu", contiguous](dx, x, rows, ctx)
            sparsemax_backward["cpu", contiguous](dx, x, dy, rows, ctx)
    except:
        pass


def fused_along[
    source: DType, axis: Int, epilogue: Bool, finish: Finish
](y: To, x: Source[source], shape: IndexList[3], ctx: DeviceContext) raises:
    var load = Loaded[source](x)
    Cpu.fused[has_sink=True, finish=finish](
        Results[Stored, dtype, 3, axis, epilogue](Stored(y), y, shape),
        Logits[Loaded[source], source, 3, axis, True](load, shape, True),
        Logits[Loaded[source], source, 3, axis, False](load, shape, True),
        Rows.of[axis](shape),
        ctx,
    )


@export
def fused(
    y: To, x: From, wide: Wide, shape: IndexList[3], ctx: DeviceContext
) abi("Mojo"):
    try:
        comptime for epilogue in [True, False]:
            comptime for axis in [1, 2]:
                comptime for finish in [
                    Finish.PROBABILITIES,
                    Finish.LOGARITHMS,
                ]:
                    fused_along[dtype, axis, epilogue, finish](y, x, shape, ctx)
                    fused_along[accum, axis, epilogue, finish](
                        y, wide, shape, ctx
                    )
    except:
        pass


def main():
    pass
