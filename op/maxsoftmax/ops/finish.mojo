"""What becomes of a row once it is known what it sums to."""


struct Finish(Equatable, TrivialRegisterPassable):
    """What a kernel writes of each row: a parameter of all of them."""

    var value: Int

    comptime PROBABILITIES = Self(0)
    """(e^(x - m)) / d for each x: softmax."""
    comptime LOGARITHMS = Self(1)
    """(x - m) - ln d for each x: log_softmax."""
    comptime PAIR = Self(2)
    """(m, d) alone, d = Σ e^(x - m): two accumulators a row, the one after the other."""
    comptime GRADIENT = Self(3)
    """y · (dy - Σ y·dy): that of the logits of softmax, of its results y and their gradients dy."""
    comptime GRADIENT_OF_LOGARITHMS = Self(4)
    """dy - e^y · Σ dy: that of the logits of log_softmax."""

    @inline(.always)
    def __init__(out self, value: Int):
        self.value = value

    @inline(.always)
    def __eq__(self, other: Self) -> Bool:
        return self.value == other.value

    @inline(.always)
    def is_gradient(self) -> Bool:
        """Returns whether it is a gradient."""
        return self == Self.GRADIENT or self == Self.GRADIENT_OF_LOGARITHMS

    @inline(.always)
    def inputs(self) -> Int:
        """Returns how many inputs there are."""
        return 2 if self.is_gradient() else 1
