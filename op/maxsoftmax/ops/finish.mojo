"""What becomes of a row once its (max, sum) pair is known."""


struct Finish(Equatable, TrivialRegisterPassable):
    """What a kernel writes of each row: a parameter of all of them."""

    var value: Int

    comptime PROBABILITIES = Self(0)
    """(e^(x - m)) / d for each x: softmax."""
    comptime LOGARITHMS = Self(1)
    """(x - m) - ln d for each x: log_softmax."""
    comptime PAIR = Self(2)
    """(m, d) alone, d = Σ e^(x - m): two accumulators a row, the one after the other."""

    @inline(.always)
    def __init__(out self, value: Int):
        self.value = value

    @inline(.always)
    def __eq__(self, other: Self) -> Bool:
        return self.value == other.value
