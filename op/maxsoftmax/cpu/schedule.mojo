"""Spreads the rows of a softmax over the cores."""

from std.math import ceildiv
from std.runtime import parallelism_level
from max.gpu.host import DeviceContext

from ..online import MaxSum
from ..rows import Rows

comptime SPAN = 16384
"""Elements of a row that are reduced by one core before pairs merge. Constant, so that the same input gives the same
bits whatever the number of cores."""

comptime UNROLL = 8
"""Vectors between two rescalings of d."""

comptime GRAIN = 32768
"""Fewest elements worth waking another thread for."""


trait Bundles(TrivialRegisterPassable):
    """Rows in bundles of `lanes`: each bundle is reduced to one `MaxSum` and written once that is known.
    """

    comptime accum: DType
    """Dtype of the arithmetic."""
    comptime lanes: Int
    """Rows a bundle."""

    def count(self) -> Int:
        """Returns the number of bundles."""
        ...

    def length(self) -> Int:
        """Returns n, the length of each row."""
        ...

    def reduce(
        self, bundle: Int, start: Int, end: Int
    ) -> MaxSum[Self.accum, Self.lanes]:
        """Returns the pairs of elements `start` to `end` of the rows of `bundle`.
        """
        ...

    def write(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        total: MaxSum[Self.accum, Self.lanes],
    ):
        """Writes the probabilities of elements `start` to `end`, given the pairs of the whole rows.
        """
        ...


def run[B: Bundles](bundles: B, ctx: DeviceContext) raises:
    """Computes every row, on as many cores as there is work for.

    Parameters:
        B: How rows are bundled and walked.

    Args:
        bundles: The rows.
        ctx: The CPU to run on.
    """
    var count = bundles.count()
    var n = bundles.length()
    # A row of nothing has one span of nothing.
    var spans = max(1, ceildiv(n, SPAN))
    var workers = min(parallelism_level(), ceildiv(count * n * B.lanes, GRAIN))

    @inline(.always)
    def span_pair(task: Int) {imm} -> MaxSum[B.accum, B.lanes]:
        var bundle, span = divmod(task, spans)
        return bundles.reduce(bundle, span * SPAN, min((span + 1) * SPAN, n))

    # By whole bundles, each written while its rows are still in the core's cache: where there are enough to balance,
    # or too few elements to share out otherwise. The pairs merge in the same order as below.
    if spans == 1 or workers == 1 or count >= 4 * workers:

        @inline(.always)
        def whole(bundle: Int) {imm}:
            var total = span_pair(bundle * spans)
            for span in range(1, spans):
                total.merge(span_pair(bundle * spans + span))
            bundles.write(bundle, 0, n, total)

        _parallel(whole, count, workers, ctx)
        return

    # Few long rows: their spans are shared out, and the pairs meet in between.
    var pairs = List[MaxSum[B.accum, B.lanes]](
        length=count * spans, fill=MaxSum[B.accum, B.lanes]()
    )
    var slots = pairs.unsafe_ptr()

    @inline(.always)
    def reduce(task: Int) {imm}:
        slots[unsafe_offset=task] = span_pair(task)

    _parallel(reduce, count * spans, workers, ctx)
    for bundle in range(count):
        for span in range(1, spans):
            pairs[bundle * spans].merge(pairs[bundle * spans + span])

    @inline(.always)
    def write(task: Int) {imm}:
        var bundle, span = divmod(task, spans)
        bundles.write(
            bundle,
            span * SPAN,
            min((span + 1) * SPAN, n),
            slots[unsafe_offset=bundle * spans],
        )

    _parallel(write, count * spans, workers, ctx)
    _ = pairs^


@inline(.always)
def share_rows[
    F: def(Int) -> None
](task: F, rows: Rows, ctx: DeviceContext) raises:
    """Calls task(row) for every row, on as many cores as there is work for."""
    var count = rows.count()
    var workers = min(
        parallelism_level(), count, ceildiv(count * rows.n, GRAIN)
    )
    _parallel(task, count, workers, ctx)


@inline(.always)
def _parallel[
    F: def(Int) -> None
](task: F, count: Int, workers: Int, ctx: DeviceContext) raises:
    """Calls task(0) … task(count - 1), each worker a contiguous share; inline when there is one worker.
    """
    if workers <= 1:
        for i in range(count):
            task(i)
        return

    @inline(.always)
    def share(worker: Int) {imm}:
        for i in range(
            worker * count // workers, (worker + 1) * count // workers
        ):
            task(i)

    ctx.enqueue_cpu_range(share, count=workers)
    ctx.synchronize()
