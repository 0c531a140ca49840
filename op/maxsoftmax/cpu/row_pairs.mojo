"""What there is one of for each row, made of the pairs of rows, on the CPU."""

from ..finish import Finish
from ..loss import log_of_sum
from ..online import accumulator
from ..queue import Queue
from ..rows import Rows, Source, Target
from .memory import store
from .softmax import auto


def max_sum_apart[
    dtype: DType, //, contiguous: Bool
](
    result: Target[accumulator[dtype]()],
    x: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes all m, and then all d.

    Parameters:
        dtype: Dtype of the logits.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        result: (2, rows).
        x: Logits.
        rows: How the memory is divided into rows.
        queue: The CPU to run on.
    """
    var count = rows.count()
    var kept = _pairs[contiguous](x, rows, queue)
    for row in range(count):
        result[unsafe_offset=row] = kept[2 * row]
        result[unsafe_offset=count + row] = kept[2 * row + 1]


def logsumexp[
    dtype: DType, //, contiguous: Bool
](y: Target[dtype], x: Source[dtype], rows: Rows, queue: Queue) raises:
    """Writes ln Σ exp x of each row.

    Parameters:
        dtype: Dtype of both tensors.
        contiguous: Whether it is known at compile time that `rows.inner` is 1.

    Args:
        y: (rows,).
        x: Logits.
        rows: How the memory is divided into rows.
        queue: The CPU to run on.
    """
    var kept = _pairs[contiguous](x, rows, queue)
    for row in range(rows.count()):
        store(
            y.unsafe_offset(row),
            SIMD[accumulator[dtype](), 1](
                log_of_sum(kept[2 * row], kept[2 * row + 1])
            ),
            1,
        )


def _pairs[
    dtype: DType, //, contiguous: Bool
](x: Source[dtype], rows: Rows, queue: Queue) raises -> List[
    Scalar[accumulator[dtype]()]
]:
    """Returns the pairs of all rows, one after the other."""
    var kept = List[Scalar[accumulator[dtype]()]](
        unsafe_uninit_length=2 * rows.count()
    )
    if rows.count() != 0:
        auto[dtype, Finish.PAIR, contiguous](
            kept.unsafe_ptr()
            .unsafe_origin_cast[MutUntrackedOrigin]()
            .unsafe_bitcast[Scalar[dtype]](),
            x,
            rows,
            queue,
        )
    return kept^
