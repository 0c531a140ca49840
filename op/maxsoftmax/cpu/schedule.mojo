"""Spreads the rows of a softmax over the cores."""

from std.math import ceildiv
from std.runtime import parallelism_level
from max.gpu.host import DeviceContext

from ..online import MaxSum
from ..rows import Rows, Target

comptime SPAN = 4096
"""Elements of a row that one pair is made of before pairs merge: in float32 half of a core's first cache, since they are
read twice. Constant, so that the same input gives the same bits whatever the number of cores."""

comptime GRAIN = 1 << 17
"""Fewest elements worth another thread: a core computes as many float32 in 62 us, and a thread that went to sleep, as MAX's
do after about as long, was awake only after 210 us in a virtual machine."""

comptime Pairs[dtype: DType, lanes: SIMDLength] = Pointer[
    MaxSum[dtype, lanes], MutUntrackedOrigin
]
"""Where the pairs of a bundle's rows are, `lanes` in each element."""

comptime Room[dtype: DType] = Optional[Target[dtype]]
"""Memory of a core's own, where exponentials of the whole bundle can wait for their sum; none where another core may
be the one that writes the results."""


trait Bundles(TrivialRegisterPassable):
    """Rows in bundles: the same part of all rows of a bundle is reduced at once, and written once all parts are known.
    """

    comptime accum: DType
    """Dtype of the arithmetic."""
    comptime lanes: SIMDLength
    """Rows that share a `MaxSum`."""

    def count(self) -> Int:
        """Returns the number of bundles."""
        ...

    def length(self) -> Int:
        """Returns n, the length of each row."""
        ...

    def pairs(self) -> Int:
        """Returns how many `MaxSum` hold the pairs of a bundle."""
        ...

    def room(self) -> Int:
        """Returns how many elements of `accum` a bundle has use for between `reduce` and `write`, besides `y`.
        """
        ...

    def reduce(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        room: Room[Self.accum],
    ):
        """Writes the pairs of elements `start` to `end`, one span, of the rows of `bundle` to `part`.
        """
        ...

    def write(
        self,
        bundle: Int,
        start: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        total: Pairs[Self.accum, Self.lanes],
        room: Room[Self.accum],
    ):
        """Writes the probabilities of elements `start` to `end`, which have been reduced to `part`, given the pairs of
        the whole rows. Leaves both as they are.
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
    comptime Pair = MaxSum[B.accum, B.lanes]
    var count = bundles.count()
    var n = bundles.length()
    var pairs = bundles.pairs()
    var spans = spans_of(n)
    var workers = workers_for(count * n * pairs * Int(B.lanes))

    # By whole bundles, each written while its rows are still in the core's cache: where there are enough to balance,
    # or too few elements to share out otherwise. The pairs merge in the same order as below.
    if spans == 1 or workers == 1 or count >= 4 * workers:

        @inline(.always)
        def whole(start: Int, end: Int) {imm}:
            var parts = List[Pair](length=(spans + 1) * pairs, fill=Pair())
            var part = parts.unsafe_ptr().unsafe_origin_cast[
                MutUntrackedOrigin
            ]()
            # The only span of a row has the pair of the row.
            var total = part
            if spans > 1:
                total = part.unsafe_offset(spans * pairs)
            var memory = List[Scalar[B.accum]](
                unsafe_uninit_length=bundles.room()
            )
            var room = memory.unsafe_ptr().unsafe_origin_cast[
                MutUntrackedOrigin
            ]()
            for bundle in range(start, end):
                for span in range(spans):
                    bundles.reduce(
                        bundle,
                        span * SPAN,
                        min((span + 1) * SPAN, n),
                        part.unsafe_offset(span * pairs),
                        room,
                    )
                if spans > 1:
                    _merge(part, spans, pairs, total)
                for span in range(spans):
                    bundles.write(
                        bundle,
                        span * SPAN,
                        min((span + 1) * SPAN, n),
                        part.unsafe_offset(span * pairs),
                        total,
                        room,
                    )
            _ = parts^
            _ = memory^

        _parallel(whole, count, workers, ctx)
        return

    # Few long rows: their spans are shared out, and the pairs meet in between.
    var parts = List[Pair](length=count * (spans + 1) * pairs, fill=Pair())
    var part = parts.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var totals = part.unsafe_offset(count * spans * pairs)

    @inline(.always)
    def reduce(start: Int, end: Int) {imm}:
        for task in range(start, end):
            var bundle, span = divmod(task, spans)
            bundles.reduce(
                bundle,
                span * SPAN,
                min((span + 1) * SPAN, n),
                part.unsafe_offset(task * pairs),
                None,
            )

    _parallel(reduce, count * spans, workers, ctx)
    for bundle in range(count):
        _merge(
            part.unsafe_offset(bundle * spans * pairs),
            spans,
            pairs,
            totals.unsafe_offset(bundle * pairs),
        )

    @inline(.always)
    def write(start: Int, end: Int) {imm}:
        for task in range(start, end):
            var bundle, span = divmod(task, spans)
            bundles.write(
                bundle,
                span * SPAN,
                min((span + 1) * SPAN, n),
                part.unsafe_offset(task * pairs),
                totals.unsafe_offset(bundle * pairs),
                None,
            )

    _parallel(write, count * spans, workers, ctx)
    _ = parts^


@inline(.always)
def _merge[
    dtype: DType, lanes: SIMDLength, //
](
    parts: Pairs[dtype, lanes],
    spans: Int,
    pairs: Int,
    total: Pairs[dtype, lanes],
):
    """Writes the pairs of whole rows to `total`, given those of each span."""
    for pair in range(pairs):
        var merged = parts[unsafe_offset=pair]
        for span in range(1, spans):
            merged.merge(parts[unsafe_offset=span * pairs + pair])
        total[unsafe_offset=pair] = merged


@inline(.always)
def share_rows[
    F: def(Int) -> None
](task: F, rows: Rows, ctx: DeviceContext) raises:
    """Calls task(row) for every row, on as many cores as there is work for."""
    share_tasks(task, rows.count(), workers_for(rows.count() * rows.n), ctx)


@inline(.always)
def share_tasks[
    F: def(Int) -> None
](task: F, count: Int, workers: Int, ctx: DeviceContext) raises:
    """Calls task(0) … task(count - 1), each worker a contiguous share."""

    @inline(.always)
    def share(start: Int, end: Int) {imm}:
        for i in range(start, end):
            task(i)

    _parallel(share, count, min(workers, count), ctx)


def spans_of(n: Int) -> Int:
    """Returns in how many spans a row of `n` is reduced; one of nothing is one of nothing.
    """
    return max(1, ceildiv(n, SPAN))


def workers_for(elements: Int) -> Int:
    """Returns on how many cores to compute so many."""
    return min(parallelism_level(), ceildiv(elements, GRAIN))


@inline(.always)
def _parallel[
    F: def(Int, Int) -> None
](task: F, count: Int, workers: Int, ctx: DeviceContext) raises:
    """Calls task(start, end) with each worker's contiguous share of 0 … count; inline when there is one worker.
    """
    if workers <= 1:
        task(0, count)
        return

    @inline(.always)
    def share(worker: Int) {imm}:
        task(worker * count // workers, (worker + 1) * count // workers)

    ctx.enqueue_cpu_range(share, count=workers)
    ctx.synchronize()
