"""The largest of a row's elements, found while its core is at something else, a step at a time."""

from std.utils.numerics import neg_inf

from .dividing import Beside
from .lanes import fold_max, larger
from .sources import SourceRow
from .tuning import READ_AHEAD


struct Largest[X: SourceRow, accum: DType, size: Int, width: Int](
    Beside, TrivialRegisterPassable
):
    """The largest element of a span that is not NaN.

    Parameters:
        X: What is read.
        accum: Dtype of the arithmetic.
        size: Elements of a step.
        width: Elements that are taken at a time where there are less.
    """

    comptime reads_ahead = True
    comptime Values = SIMD[Self.accum, Self.size]

    var x: Self.X
    """The row."""
    var i: Int
    """The next element."""
    var end: Int
    """The element after the last."""
    var most: Self.Values
    """The largest so far, of so many chains."""

    @inline(.always)
    def __init__(out self, x: Self.X, start: Int, end: Int):
        """Nothing of the elements from `start` to `end` yet."""
        self.x = x
        self.i = start
        self.end = end
        self.most = Self.Values(neg_inf[Self.accum]())

    @inline(.always)
    def step(mut self):
        if self.i + Self.size <= self.end:
            self.x.prefetch[Self.size, READ_AHEAD](self.i, 0)
            self._raise()

    @inline(.always)
    def finish(mut self) -> Scalar[Self.accum]:
        """Does the steps that are left, and returns the largest; -inf of no elements.
        """
        # In the order of all other maxima, on which the sign of 0 depends.
        while self.i + Self.size <= self.end:
            self._raise()
        var rest = SIMD[Self.accum, Self.width](neg_inf[Self.accum]())
        while self.i < self.end:
            var values = self.x.load[Self.accum, SIMDLength(Self.width)](
                self.i, 0, self.end - self.i
            )
            rest = larger(values, rest)
            self.i += Self.width
        return fold_max[1](larger(rest, fold_max[Self.width](self.most)))

    @inline(.always)
    def _raise(mut self):
        """Takes the elements of a step."""
        var values = self.x.load[Self.accum, SIMDLength(Self.size)](
            self.i, 0, Self.size
        )
        self.most = larger(values, self.most)
        self.i += Self.size
