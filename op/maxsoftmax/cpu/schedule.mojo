"""Spreads the rows of a softmax over the cores."""

from std.math import ceildiv

from ..math.online import MaxSum
from ..queue import Queue
from ..io.rows import Target
from .memory import before_line, LINE
from .shares import Shares, parallel, share_tasks, workers_for
from .tuning import SHARES, SPAN

comptime Pairs[dtype: DType, lanes: SIMDLength] = Pointer[
    MaxSum[dtype, lanes], MutUntrackedOrigin
]
"""Where the pairs of a bundle's rows are, `lanes` in each element."""

comptime Room[dtype: DType] = Optional[Target[dtype]]
"""Memory of a core's own, where exponentials of the whole bundle can wait for their sum; none where another core may
be the one that writes the results."""


@fieldwise_init
struct Reduced[dtype: DType, lanes: SIMDLength](TrivialRegisterPassable):
    """What a core knows of a bundle between its reduction and its results."""

    var bundle: Int
    """Its number."""
    var parts: Pairs[Self.dtype, Self.lanes]
    """The pairs of each span, one after the other."""
    var total: Pairs[Self.dtype, Self.lanes]
    """The pairs of the whole rows: those of the only span, if there is one."""
    var room: Target[Self.dtype]
    """Where exponentials wait."""
    var open: Target[Self.dtype]
    """Where results wait that begin a line: the same place for all bundles of a core."""


trait Bundles(TrivialRegisterPassable):
    """Rows in bundles: the same part of all rows of a bundle is reduced at once, and written once all parts are known.
    """

    comptime accum: DType
    """Dtype of the arithmetic."""
    comptime lanes: SIMDLength
    """Rows that share a `MaxSum`."""

    comptime reduces: Bool
    """Whether anything is reduced before results are written."""
    comptime rooms: Int = 1
    """How many rooms bundles take in turn where one is written while the next is reduced."""

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

    def overlaps(self) -> Bool:
        """Returns whether a bundle is best written while its core reduces the next one, so that memory is at work all the time.
        """
        return False

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

    def reduce_one_ahead(
        self,
        bundle: Int,
        first: Int,
        end: Int,
        part: Pairs[Self.accum, Self.lanes],
        room: Room[Self.accum],
    ) -> Bool:
        """Does what `reduce` does with the spans from `first` to `end`, to the pairs of one after the other from `part` on, with a look at each while the one before is
        reduced. Returns whether that is done: if not, nothing is.
        """
        return False

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

    def write_beside(
        self,
        written: Reduced[Self.accum, Self.lanes],
        start: Int,
        end: Int,
        joins: Bool,
        next: Optional[Reduced[Self.accum, Self.lanes]],
    ) -> Bool:
        """Writes a span of a bundle as `write` does, and reduces that of another one meanwhile, as `reduce` does. A core calls it for the spans of a bundle
        in order.

        Args:
            written: The bundle that is written.
            start: The first element of the span.
            end: The one after the last.
            joins: What this returned last.
            next: The bundle that is reduced, if there is one, which lies behind.

        Returns:
            Whether results that begin a line wait in `open` for the next call.
        """
        return False


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
        # The only span of a row has the pair of the row.
        var before_total = spans * pairs if spans > 1 else 0
        var apart = before_total + pairs
        var overlaps = bundles.overlaps()
        var room_size = bundles.room()

        @inline(.always)
        def whole(shares: Shares) {imm}:
            var parts = List[Pair](
                length=(1 + Int(overlaps)) * apart, fill=Pair()
            )
            # The first line for the alignment, and one of results, which has at most so many elements.
            var memory = List[Scalar[B.accum]](
                unsafe_uninit_length=B.rooms * room_size + 2 * LINE
            )
            var part_of_first = parts.unsafe_ptr().unsafe_origin_cast[
                MutUntrackedOrigin
            ]()
            # Vectors that lie in two lines take twice as long.
            var first_room = memory.unsafe_ptr().unsafe_origin_cast[
                MutUntrackedOrigin
            ]()
            first_room = first_room.unsafe_offset(before_line(first_room))

            var open = first_room.unsafe_offset(B.rooms * room_size)
            var before: Optional[Reduced[B.accum, B.lanes]] = None
            var joins = False
            var turn = 0
            for bundle in shares:
                if before and bundle < before.value().bundle:
                    # What another core has left lies before.
                    _write_alone(bundles, before.value(), joins)
                    before = None
                    joins = False
                var part = part_of_first.unsafe_offset(turn * apart)
                var total = part.unsafe_offset(before_total)
                var room = first_room.unsafe_offset(turn % B.rooms * room_size)
                var now = Reduced[B.accum, B.lanes](
                    bundle, part, total, room, open
                )
                if before:
                    for span in range(spans):
                        joins = bundles.write_beside(
                            before.value(),
                            span * SPAN,
                            min((span + 1) * SPAN, n),
                            joins,
                            now,
                        )
                elif B.reduces:
                    _reduce(bundles, bundle, 0, spans, part, room)
                if spans > 1:
                    _merge(part, spans, pairs, total)
                if overlaps:
                    before = now
                    turn = 1 - turn
                    continue
                for span in range(spans):
                    bundles.write(
                        bundle,
                        span * SPAN,
                        min((span + 1) * SPAN, n),
                        part.unsafe_offset(span * pairs),
                        total,
                        room,
                    )
            if before:
                _write_alone(bundles, before.value(), joins)
            _ = parts^
            _ = memory^

        parallel(whole, count, elements, queue)
        return

    # Few long rows: their spans are shared out, and the pairs meet in between.
    var parts = List[Pair](length=count * (spans + 1) * pairs, fill=Pair())
    var part = parts.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var totals = part.unsafe_offset(count * spans * pairs)

    # As many spans to a task as leave each core its shares.
    var together = max(1, min(spans, count * spans // (workers * SHARES)))
    var tasks = ceildiv(spans, together)

    @inline(.always)
    def reduce(task: Int) {imm}:
        var bundle, some = divmod(task, tasks)
        var first = some * together
        _reduce(
            bundles,
            bundle,
            first,
            min(first + together, spans),
            part.unsafe_offset((bundle * spans + first) * pairs),
            None,
        )

    comptime if B.reduces:
        share_tasks(reduce, count * tasks, elements, queue)
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
def _reduce[
    B: Bundles
](
    bundles: B,
    bundle: Int,
    first: Int,
    end: Int,
    part: Pairs[B.accum, B.lanes],
    room: Room[B.accum],
):
    """Reduces the spans from `first` to `end` of a bundle, to the pairs of one after the other from `part` on.
    """
    if bundles.reduce_one_ahead(bundle, first, end, part, room):
        return
    for span in range(first, end):
        bundles.reduce(
            bundle,
            span * SPAN,
            min((span + 1) * SPAN, bundles.length()),
            part.unsafe_offset((span - first) * bundles.pairs()),
            room,
        )


def _write_alone[
    B: Bundles
](bundles: B, written: Reduced[B.accum, B.lanes], var joins: Bool):
    """Writes a bundle that no other one is reduced beside: arguments are as of `write_beside`.
    """
    var n = bundles.length()
    for span in range(spans_of(n)):
        joins = bundles.write_beside(
            written, span * SPAN, min((span + 1) * SPAN, n), joins, None
        )


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
