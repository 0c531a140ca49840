"""One pass after another, one element at a time, on one core: the fallback that the published systems have."""

from std.utils.numerics import neg_inf

from ..math.exponential import Unit
from ..math.online import Normalizer, Sum, accumulator
from ..io.rows import Rows, Source, Target
from ..io.rounding import rounded


def naive[dtype: DType](y: Target[dtype], x: Source[dtype], rows: Rows):
    """Writes the softmax of every row of `x` to `y`.

    Parameters:
        dtype: Dtype of both tensors.

    Args:
        y: Probabilities; may be the same memory as `x`.
        x: Logits.
        rows: Rows along any axis.
    """
    comptime accum = accumulator[dtype]()
    for row in range(rows.count()):
        var start = row // rows.inner * rows.n * rows.inner + row % rows.inner
        var logits = x.unsafe_offset(start)
        var probabilities = y.unsafe_offset(start)
        var m = neg_inf[accum]()
        for i in range(rows.n):
            m = max(m, logits[unsafe_offset=i * rows.inner].cast[accum]())
        var unit = Unit(m)
        var d = Sum[accum, 1]()
        for i in range(rows.n):
            d.add(unit.exp(logits[unsafe_offset=i * rows.inner].cast[accum]()))
        var normalizer = Normalizer(unit, d.value)
        for i in range(rows.n):
            probabilities[unsafe_offset=i * rows.inner] = rounded[dtype](
                normalizer.probability(
                    logits[unsafe_offset=i * rows.inner].cast[accum]()
                )
            )
