"""Softmax between what MAX may have fused into its input and into its output: from memory to memory where it has not, and
computed as it is read, or handed on as it is computed, elsewhere."""

from extensibility import InputTensor
from extensibility import _FusedInputTensor as FusedInputTensor
from extensibility import _FusedOutputTensor as FusedOutputTensor

from max.gpu.host.info import is_cpu

from .cpu.kernels import Cpu
from .ops.finish import Finish
from .ops.forms import Class, Forms
from .gpu.kernels import Gpu
from .kernels import Kernels
from .io.fusion import address, alignment, is_plain, rows_of
from .io.logits import Logits
from .io.results import into_memory, Results
from .queue import Queue
from .io.rows import Source

comptime KernelsOf[target: StaticString]: Kernels = Cpu if is_cpu[
    target
]() else Gpu
"""The kernels of what MAX calls "cpu" or "gpu"."""


@inline(.always)
def softmax[
    target: StaticString,
    axis: Int,
    has_prologue_fusion: Bool,
    has_epilogue_fusion: Bool,
    finish: Finish = Finish.PROBABILITIES,
](
    y: FusedOutputTensor,
    x: FusedInputTensor[rank=y.rank, ...],
    queue: Queue,
    out_scale: Float64 = 1,
) raises:
    """Computes softmax or its logarithm by `auto`, in one kernel together with what computes its input and what its output is for.

    Parameters:
        target: Where to compute: "cpu" or "gpu".
        axis: Which axis sums to 1, counted from 0.
        has_prologue_fusion: Whether MAX fused anything into the input.
        has_epilogue_fusion: Whether MAX fused anything into the output.
        finish: What of each row is written: an element for each of its own.

    Args:
        y: Probabilities, or their logarithms, of the shape of `x`; on a GPU of a dtype no wider than that of `x`, or than
            float32.
        x: Logits.
        queue: The device.
        out_scale: What results of float8 are multiplied by.
    """
    comptime plain = is_plain[x.InFusion, x.rank, has_prologue_fusion]()
    comptime contiguous = axis == x.rank - 1
    var rows = rows_of[x.static_spec, axis](x.shape())
    if rows.is_empty():
        return
    comptime if plain and not has_epilogue_fusion:
        var target_ptr = y.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
        var source_ptr = address[x.dtype, x.rank](x.in_fusion)
        comptime if x.dtype == y.dtype:
            KernelsOf[target].auto[y.dtype, finish, contiguous](
                target_ptr, rebind[Source[y.dtype]](source_ptr), rows, queue
            )
        else:
            KernelsOf[target].converted[x.dtype, y.dtype, finish, contiguous](
                target_ptr, source_ptr, rows, out_scale, queue
            )
    else:
        masked_softmax[
            target, axis, False, False, False, has_epilogue_fusion, finish
        ](y, x, x, queue, out_scale)


@inline(.always)
def formed_softmax[
    target: StaticString,
    axis: Int,
    known: Class,
    has_epilogue_fusion: Bool,
](
    y: FusedOutputTensor,
    x: InputTensor[rank=y.rank, ...],
    logits: Source[x.dtype],
    forms: Forms[x.dtype],
    out_scale: Float64,
    queue: Queue,
) raises:
    """Computes softmax of what `forms` makes of logits in memory.

    Parameters:
        target: Where to compute: "cpu" or "gpu".
        axis: Which axis sums to 1, counted from 0, as for `spread`.
        known: As for `Kernels.formed`.
        has_epilogue_fusion: Whether MAX fused anything into the output.

    Args:
        y: Probabilities, of the shape of `x`.
        x: Logits.
        logits: Where they are.
        forms: What is made of them.
        out_scale: What results of float8 are multiplied by.
        queue: The device.
    """
    if forms.is_empty():
        return
    comptime K = KernelsOf[target]
    comptime contiguous = axis == x.rank - 1
    var rows = rows_of[x.static_spec, axis](x.shape())
    var memory = y.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    comptime if has_epilogue_fusion:
        K.formed[contiguous, known](
            Results[y.OutFusion, y.dtype, y.rank, axis, True](
                y.out_fusion, memory, y.shape(), out_scale
            ),
            logits,
            forms,
            rows,
            queue,
        )
    else:
        K.formed[contiguous, known](
            into_memory(memory, rows, out_scale), logits, forms, rows, queue
        )


@inline(.always)
def masked_softmax[
    target: StaticString,
    axis: Int,
    causal: Bool,
    masked: Bool,
    has_sink: Bool,
    has_epilogue_fusion: Bool,
    finish: Finish = Finish.PROBABILITIES,
](
    y: FusedOutputTensor,
    x: FusedInputTensor[rank=y.rank, ...],
    sink: FusedInputTensor[dtype=x.dtype, rank=y.rank, ...],
    queue: Queue,
    out_scale: Float64 = 1,
) raises:
    """Computes softmax as attention has it, or its logarithm.

    Parameters:
        target: Where to compute: "cpu" or "gpu".
        axis: Which axis sums to 1, counted from 0.
        causal: Whether an element of the axis before `axis` sees only what is not after it, both counted from the end.
        masked: Whether a row of nothing but -inf gives 0, or the logarithm -inf, and not NaN.
        has_sink: Whether there is one more logit a row, in the denominator only.
        has_epilogue_fusion: Whether MAX fused anything into the output.
        finish: What of each row is written: an element for each of its own.

    Args:
        y: Probabilities, or their logarithms, of the shape of `x`.
        x: Logits.
        sink: The additional logits, of length 1 along `axis`; not looked at if there are none.
        queue: The device.
        out_scale: What results of float8 are multiplied by.
    """
    var rows = rows_of[x.static_spec, axis](x.shape())
    if rows.is_empty():
        return
    var results = Results[
        y.OutFusion, y.dtype, y.rank, axis, has_epilogue_fusion
    ](
        y.out_fusion,
        y.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
        y.shape(),
        out_scale,
    )
    var beyond = 0
    comptime if causal:
        beyond = x.shape()[axis] - x.shape()[axis - 1]
    var logits = Logits[x.InFusion, x.dtype, x.rank, axis, causal](
        x.in_fusion,
        x.shape(),
        masked,
        alignment=alignment(x.in_fusion, x.shape()),
        beyond=beyond,
    )
    var sinks = Logits[sink.InFusion, x.dtype, x.rank, axis, False](
        sink.in_fusion, sink.shape(), masked
    )
    KernelsOf[target].fused[has_sink=has_sink, finish=finish](
        results, logits, sinks, rows, queue
    )
