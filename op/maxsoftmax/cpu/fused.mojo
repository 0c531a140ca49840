"""Logits that are computed as they are read, on the CPU: twice, once for the pair and once for the probabilities."""

from std.math import ceildiv
from std.sys import simd_width_of
from std.utils.numerics import neg_inf

from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from ..queue import Queue
from ..logits import Logits, Row
from ..online import MaxSum, accumulator
from ..results import ResultRow, Results
from .memory import rounded
from .operations import Softmax
from .shares import share_tasks, workers_for
from .sources import Computed
from .targets import HandedOn, ToMemory
from .walk import walk

comptime SPAN = 16384
"""Elements of a row that are reduced in one go. Constant, so that the same input gives the same bits whatever the number
of cores."""

comptime UNROLL = 4
"""Vectors between two rescalings of d."""


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
](
    y: Results[Out, out_dtype, rank, axis, epilogue],
    x: Logits[Fusion, in_dtype, rank, axis, causal],
    sink: Logits[Sink, in_dtype, rank, axis, False],
    queue: Queue,
) raises:
    """Writes the softmax of every row of `x` to `y`.

    Parameters:
        Fusion: What computes the logits.
        Sink: What computes the sinks.
        Out: What takes the probabilities.
        in_dtype: Dtype of the logits.
        out_dtype: Dtype of the probabilities.
        rank: Number of dimensions.
        axis: The axis that sums to 1.
        causal: Whether rows end at the diagonal.
        epilogue: Whether something takes the probabilities.
        has_sink: Whether there is one more logit a row, in the denominator only.

    Args:
        y: Probabilities.
        x: Logits.
        sink: The additional logits, one a row.
        queue: The CPU to run on.
    """
    comptime if axis != rank - 1:
        var source = Computed[
            Fusion, Sink, in_dtype, rank, axis, causal, has_sink
        ](x, sink)
        var rows = x.rows()
        var line = x.shape[rank - 1]
        comptime if epilogue:
            walk[False](
                source,
                Softmax(x.masked),
                HandedOn[Out, out_dtype, rank, axis](
                    rebind[Results[Out, out_dtype, rank, axis, True]](y)
                ),
                rows,
                queue,
                line,
            )
        else:
            walk[False](
                source,
                Softmax(x.masked),
                ToMemory[out_dtype, False](y.memory, rows),
                rows,
                queue,
                line,
            )
        return
    comptime accum = accumulator[in_dtype]()
    var rows = x.rows()
    var tasks = rows.count()
    var spans = ceildiv(rows.n, SPAN)
    var elements = tasks * rows.n
    var workers = workers_for(elements, queue)

    @inline(.always)
    def compute(task: Int) {imm}:
        var row = x.row(task, 0)
        var pair = _span(row, 0, rows.n)
        for span in range(1, spans):
            pair.merge(_span(row, span * SPAN, rows.n))
        comptime if has_sink:
            pair.add(
                Array[SIMD[accum, 1], 1](fill=sink.row(task, 0).load[1](0))
            )
        _write(y.row(task, 0), row, 0, rows.n, pair, x.masked)

    if spans == 1 or workers == 1 or tasks >= 4 * workers:
        share_tasks(compute, tasks, elements, queue)
        return

    # Few long rows: their spans are shared out, and the pairs meet in between, in the same order as above.
    var pairs = List[MaxSum[accum, 1]](
        length=tasks * spans, fill=MaxSum[accum, 1]()
    )
    var slots = pairs.unsafe_ptr()

    @inline(.always)
    def reduce(task: Int) {imm}:
        var row, span = divmod(task, spans)
        slots[unsafe_offset=task] = _span(x.row(row, 0), span * SPAN, rows.n)

    share_tasks(reduce, tasks * spans, elements, queue)
    for row in range(tasks):
        for span in range(1, spans):
            pairs[row * spans].merge(pairs[row * spans + span])
        comptime if has_sink:
            pairs[row * spans].add(
                Array[SIMD[accum, 1], 1](fill=sink.row(row, 0).load[1](0))
            )

    @inline(.always)
    def write(task: Int) {imm}:
        var row, span = divmod(task, spans)
        _write(
            y.row(row, 0),
            x.row(row, 0),
            span * SPAN,
            min((span + 1) * SPAN, rows.n),
            slots[unsafe_offset=row * spans],
            x.masked,
        )

    share_tasks(write, tasks * spans, elements, queue)
    _ = pairs^


@inline(.always)
def _span(row: Row, start: Int, n: Int) -> MaxSum[row.accum, 1]:
    """Returns the pair of the row's elements from `start` on, a span of them.
    """
    comptime width = simd_width_of[row.accum]()
    comptime Vector = SIMD[row.accum, width]
    # Vectors may reach beyond what takes part, not beyond the tensor.
    var end = min(start + SPAN, n)
    var stop = min(end, row.length)
    var pair = MaxSum[row.accum, width]()
    var i = start
    while i + UNROLL * width <= end and i < stop:
        var logits = Array[Vector, UNROLL](fill=0)
        comptime for j in range(UNROLL):
            logits[j] = row.load[width](i + j * width)
        pair.add(logits)
        i += UNROLL * width
    while i + width <= end and i < stop:
        pair.add(Array[Vector, 1](fill=row.load[width](i)))
        i += width
    var result = pair.collapse()
    while i < stop:
        result.add(Array[SIMD[row.accum, 1], 1](fill=row.load[1](i)))
        i += 1
    return result


@inline(.always)
def _write(
    y: ResultRow,
    row: Row,
    start: Int,
    end: Int,
    pair: MaxSum[row.accum, 1],
    masked: Bool,
):
    """Writes the probabilities of a row's elements `start` to `end`."""
    comptime width = simd_width_of[row.accum]()
    var i = start
    if masked and _is_empty(pair):
        while i < end:
            y.store(i, Scalar[y.dtype](0))
            i += 1
        return
    var normalizer = pair.normalizer()
    while i + width <= end and i < row.length:
        y.store(i, rounded[y.dtype](normalizer.probability(row.load[width](i))))
        i += width
    while i < end:
        # Beyond what takes part: 0, or NaN where the row is.
        var logit = SIMD[row.accum, 1](neg_inf[row.accum]())
        if i < row.length:
            logit = row.load[1](i)
        y.store(i, rounded[y.dtype](normalizer.probability(logit)))
        i += 1


@inline(.always)
def _is_empty(pair: MaxSum[_, 1]) -> Bool:
    """Returns whether nothing took part but -inf."""
    return Bool(pair.m == neg_inf[pair.dtype]() and pair.d.value == 0)
