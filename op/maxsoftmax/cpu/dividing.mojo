"""Results of a row that are written while its core is at something else, a step at a time."""

from ..io.rows import Target
from .memory import load_plain, store_plain
from .portion import Portion
from .targets import RowTarget


trait Beside:
    """What is done beside something else."""

    comptime reads_ahead: Bool = False
    """Whether it reads what is behind that something, and has memory deliver it."""

    def step(mut self):
        """Does the next step of it, if there is one."""
        ...


@fieldwise_init
struct Nothing(Beside, TrivialRegisterPassable):
    """Nothing is done beside it."""

    @inline(.always)
    def step(mut self):
        pass


@fieldwise_init
struct Dividing[T: RowTarget, accum: DType, whole: Bool, least: Int](
    Beside, TrivialRegisterPassable
):
    """The probabilities of a span, of exponentials that wait in the core's own memory, past the caches.

    A line that has elements of several rows of one core is written with the last of them, as a whole; what is another core's is stored apart.

    Parameters:
        T: What is written.
        accum: Dtype of the arithmetic.
        whole: Whether it is known at compile time that the span is all of its row.
        least: Elements of a step at least: it is of whole lines.
    """

    comptime line = SIMDLength(Self.T.line)
    """Elements of a line."""
    comptime size = max(Self.least, Self.T.line)
    """Elements of a step."""

    var y: Self.T
    """The results, at the row."""
    var portion: Portion[Self.accum, Self.whole]
    """What exponentials are turned into probabilities by."""
    var kept: Target[Self.accum]
    """Where they wait."""
    var open: Target[Self.accum]
    """Where the probabilities wait that begin a line."""
    var i: Int
    """The next element."""
    var stop: Int
    """From where on there are no exponentials, and probabilities are those of -inf."""
    var end: Int
    """The element after the last."""
    var goes_on: Bool
    """Whether the same core writes next what comes behind it."""

    @inline(.always)
    def begin(mut self, joins: Bool) -> Bool:
        """Writes up to the first line that begins in the span.

        Args:
            joins: Whether the probabilities that begin it wait.

        Returns:
            Whether those will wait that begin the line after these.
        """
        var line = self.y.line_from(self.i)
        var end = min(line, self.end)
        var before = self.T.line - (line - self.i)
        if line > self.i and joins:
            self._leave(end, before)
            var waiting = self.open.unsafe_load[width=Self.line]()
            if end == line:
                self.y.stream(line - self.T.line, 0, waiting)
            elif not self.goes_on:
                self.y.store(self.i - before, 0, before + end - self.i, waiting)
        elif line > self.i:
            self._store(end)
        self.i = end
        return self.goes_on and (joins or end == line)

    @inline(.always)
    def step(mut self):
        if self.i + Self.size <= self.end:
            self._stream[SIMDLength(Self.size)]()
            return
        while self.i + Self.T.line <= self.end:
            self._stream[Self.line]()
        if self.i < self.end:
            if self.goes_on:
                self._leave(self.end, 0)
            else:
                self._store(self.end)
            self.i = self.end

    @inline(.always)
    def finish(mut self):
        """Does the steps that are left."""
        while self.i < self.end:
            self.step()

    @inline(.always)
    def _stream[n: SIMDLength](mut self):
        """Writes the next `n` elements, which are lines."""
        self.y.stream(self.i, 0, self._probabilities[n](self.i))
        self.i += Int(n)

    @inline(.always)
    def _store(self, end: Int):
        """Stores the next elements up to `end`, in a line that another core writes to as well.
        """
        self.y.store(
            self.i, 0, end - self.i, self._probabilities[Self.line](self.i)
        )

    @inline(.always)
    def _leave(self, end: Int, before: Int):
        """Has the next elements up to `end` wait, as the line's elements from `before` on.
        """
        store_plain(
            self.open.unsafe_offset(before),
            self._probabilities[Self.line](self.i),
            end - self.i,
        )

    @inline(.always)
    def _probabilities[n: SIMDLength](self, i: Int) -> SIMD[Self.accum, n]:
        """Returns those of `n` elements, of which those behind the row are of no meaning.
        """
        var e_x = load_plain[n](self.kept.unsafe_offset(i), self.stop - i)
        return self.portion.probability(e_x)
