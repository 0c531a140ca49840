"""The pairs of all rows, on their way to what becomes of them."""

from std.math import ceildiv
from std.utils.numerics import inf, neg_inf
from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.host.info import is_cpu

from . import cpu
from .exponential import logarithm
from .gpu.overlap import follow, overlapped
from .online import accumulator
from .queue import Queue, Scratch
from .rows import Source, Target

comptime BLOCK_SIZE = 256
"""Threads a block."""


struct RowPairs[target: StaticString, accum: DType](Movable):
    """Memory for pairs: (rows, 2).

    Parameters:
        target: "cpu" or "gpu".
        accum: The accumulator's dtype.
    """

    var rows: Int
    var _kept: List[Scalar[Self.accum]]
    var _scratch: Optional[Scratch[Self.accum]]

    def __init__(out self, rows: Int, queue: Queue) raises:
        """Memory for so many."""
        self.rows = rows
        self._kept = List[Scalar[Self.accum]]()
        self._scratch = None
        comptime if is_cpu[Self.target]():
            self._kept = List[Scalar[Self.accum]](unsafe_uninit_length=2 * rows)
        else:
            self._scratch = queue.scratch[Self.accum](2 * rows)

    def pointer(mut self) -> Target[Self.accum]:
        """Returns where they are."""
        comptime if is_cpu[Self.target]():
            return self._kept.unsafe_ptr().unsafe_origin_cast[
                MutUntrackedOrigin
            ]()
        else:
            return self._scratch.value().pointer

    def split(mut self, result: Target[Self.accum], queue: Queue) raises:
        """Writes all m, and then all d."""
        var pairs = self.pointer()
        comptime if is_cpu[Self.target]():
            for row in range(self.rows):
                result[unsafe_offset=row] = pairs[unsafe_offset=2 * row]
                result[unsafe_offset=self.rows + row] = pairs[
                    unsafe_offset=2 * row + 1
                ]
        else:
            if self.rows != 0:
                queue.launch[split_kernel[Self.accum]](
                    result,
                    pairs,
                    Int64(self.rows),
                    grid_dim=ceildiv(self.rows, BLOCK_SIZE),
                    block_dim=BLOCK_SIZE,
                    attributes=overlapped(),
                )

    def logarithms[
        dtype: DType, //
    ](mut self, result: Target[dtype], queue: Queue) raises:
        """Writes ln Σ exp x of each row."""
        var pairs = self.pointer()
        comptime if is_cpu[Self.target]():
            for row in range(self.rows):
                cpu.store(
                    result.unsafe_offset(row),
                    rebind[SIMD[accumulator[dtype](), 1]](
                        _logarithm(
                            pairs[unsafe_offset=2 * row],
                            pairs[unsafe_offset=2 * row + 1],
                        )
                    ),
                    1,
                )
        else:
            if self.rows != 0:
                queue.launch[logarithms_kernel[Self.accum, dtype]](
                    result,
                    pairs,
                    Int64(self.rows),
                    grid_dim=ceildiv(self.rows, BLOCK_SIZE),
                    block_dim=BLOCK_SIZE,
                    attributes=overlapped(),
                )


def split_kernel[
    accum: DType
](result: Target[accum], pairs: Source[accum], rows: Int64):
    """Writes all m, and then all d, a thread a row.

    Parameters:
        accum: Dtype of both.

    Args:
        result: (2, rows).
        pairs: (rows, 2).
        rows: How many.
    """
    var row = Int(block_idx.x) * Int(block_dim.x) + Int(thread_idx.x)
    follow()
    if row < Int(rows):
        result[unsafe_offset=row] = pairs[unsafe_offset=2 * row]
        result[unsafe_offset=Int(rows) + row] = pairs[unsafe_offset=2 * row + 1]


def logarithms_kernel[
    accum: DType, dtype: DType
](result: Target[dtype], pairs: Source[accum], rows: Int64):
    """Writes ln Σ exp x of each row, a thread a row.

    Parameters:
        accum: Dtype of the pairs.
        dtype: Dtype of the results.

    Args:
        result: (rows,).
        pairs: (rows, 2).
        rows: How many.
    """
    var row = Int(block_idx.x) * Int(block_dim.x) + Int(thread_idx.x)
    follow()
    if row < Int(rows):
        result[unsafe_offset=row] = _logarithm(
            pairs[unsafe_offset=2 * row], pairs[unsafe_offset=2 * row + 1]
        ).cast[dtype]()


@inline(.always)
def _logarithm[
    accum: DType, //
](m: Scalar[accum], d: Scalar[accum]) -> Scalar[accum]:
    """Returns m + ln d; m where that is infinite, which d then says nothing of.
    """
    if m == inf[accum]() or m == neg_inf[accum]():
        # NaN beside -inf only is in d.
        return m if m == inf[accum]() or d == 0 else d
    return m + logarithm(d)
