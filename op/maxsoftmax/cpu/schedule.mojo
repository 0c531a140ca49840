"""Spreads the rows of a softmax over the cores."""

from std.math import ceildiv
from std.sys import size_of

from ..math.online import MaxSum
from ..queue import Queue
from ..io.rows import Target
from .memory import LINE
from .shares import Shares, parallel, share_tasks, workers_for
from .tuning import SHARES, SPAN

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

    comptime reduces: Bool
    """Whether anything is reduced before results are written."""

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

    def together(self) -> Int:
        """Returns how many bundles are best reduced before any of them is written.
        """
        return 1

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


def run[B: Bundles](bundles: B, queue: Queue) raises:
    """Computes every row, on as many cores as there is work for.

    Parameters:
        B: How rows are bundled and walked.

    Args:
        bundles: The rows.
        queue: The CPU to run on.
    """
    comptime Pair = MaxSum[B.accum, B.lanes]
    var count = bundles.count()
    var n = bundles.length()
    var pairs = bundles.pairs()
    var spans = spans_of(n)
    var elements = count * n * pairs * Int(B.lanes)
    var workers = workers_for(elements, queue)

    # By whole bundles, written while their rows are still in the core's cache: where there are enough to balance, or too few
    # elements to share out otherwise. The pairs merge in the same order as below.
    if spans == 1 or workers == 1 or count >= 4 * workers:
        var together = max(
            1, min(bundles.together(), count // (workers * SHARES))
        )
        # The only span of a row has the pair of the row.
        var before_total = spans * pairs if spans > 1 else 0
        var apart = before_total + pairs
        var room_size = bundles.room()

        @inline(.always)
        def whole(shares: Shares) {imm}:
            var parts = List[Pair](length=together * apart, fill=Pair())
            var memory = List[Scalar[B.accum]](
                unsafe_uninit_length=together * room_size + LINE
            )
            var part_of_first = parts.unsafe_ptr().unsafe_origin_cast[
                MutUntrackedOrigin
            ]()
            # Vectors that lie in two lines take twice as long.
            var room_of_first = memory.unsafe_ptr().unsafe_origin_cast[
                MutUntrackedOrigin
            ]()
            room_of_first = room_of_first.unsafe_offset(
                (-Int(room_of_first) % LINE) // size_of[B.accum]()
            )
            for group in shares:
                var first = group * together
                var some = min(together, count - first)
                for i in range(some if B.reduces else 0):
                    var part = part_of_first.unsafe_offset(i * apart)
                    var room = room_of_first.unsafe_offset(i * room_size)
                    for span in range(spans):
                        bundles.reduce(
                            first + i,
                            span * SPAN,
                            min((span + 1) * SPAN, n),
                            part.unsafe_offset(span * pairs),
                            room,
                        )
                    if spans > 1:
                        _merge(
                            part, spans, pairs, part.unsafe_offset(before_total)
                        )
                for i in range(some):
                    var part = part_of_first.unsafe_offset(i * apart)
                    var room = room_of_first.unsafe_offset(i * room_size)
                    for span in range(spans):
                        bundles.write(
                            first + i,
                            span * SPAN,
                            min((span + 1) * SPAN, n),
                            part.unsafe_offset(span * pairs),
                            part.unsafe_offset(before_total),
                            room,
                        )
            _ = parts^
            _ = memory^

        parallel(whole, ceildiv(count, together), elements, queue)
        return

    # Few long rows: their spans are shared out, and the pairs meet in between.
    var parts = List[Pair](length=count * (spans + 1) * pairs, fill=Pair())
    var part = parts.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var totals = part.unsafe_offset(count * spans * pairs)

    @inline(.always)
    def reduce(task: Int) {imm}:
        var bundle, span = divmod(task, spans)
        bundles.reduce(
            bundle,
            span * SPAN,
            min((span + 1) * SPAN, n),
            part.unsafe_offset(task * pairs),
            None,
        )

    comptime if B.reduces:
        share_tasks(reduce, count * spans, elements, queue)
        for bundle in range(count):
            _merge(
                part.unsafe_offset(bundle * spans * pairs),
                spans,
                pairs,
                totals.unsafe_offset(bundle * pairs),
            )

    @inline(.always)
    def write(task: Int) {imm}:
        var bundle, span = divmod(task, spans)
        bundles.write(
            bundle,
            span * SPAN,
            min((span + 1) * SPAN, n),
            part.unsafe_offset(task * pairs),
            totals.unsafe_offset(bundle * pairs),
            None,
        )

    share_tasks(write, count * spans, elements, queue)
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


def spans_of(n: Int) -> Int:
    """Returns in how many spans a row of `n` is reduced; one of nothing is one of nothing.
    """
    return max(1, ceildiv(n, SPAN))
