"""What the values of all rows come to, and how many rows count: every block leaves its part, and a last one adds these.

A single block for all waits for memory again and again: that, and a launch for pairs that were whole already, took 29 of the
245 µs of 8192 rows of 50257 bfloat16 (H200), and would be most of the time of millions of short rows.
"""

from std.memory import unsafe_stack_allocation
from std.utils.static_tuple import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from ..math.loss import LossOptions, Reduction, Targets, Upstream
from ..math.online import Sum
from ..queue import Queue, Scratch
from ..io.rows import Source, Target
from .hardware.pdl import pdl_wait, pdl_attributes
from .hardware.tree_reduction import plus, tree_reduce

comptime BLOCK_SIZE = 256
"""Threads a block."""

comptime MAX_PARTS = 1024
"""Most blocks that leave a part: as many as the last one has threads."""


struct Total[accum: DType](TrivialRegisterPassable):
    """What some rows come to."""

    var sum: Sum[Self.accum, 1]
    """Of their values."""
    var count: Sum[Self.accum, 1]
    """How many of them count."""

    @inline(.always)
    def __init__(out self):
        """That of no rows."""
        self.sum = Sum[Self.accum, 1]()
        self.count = Sum[Self.accum, 1]()

    @inline(.always)
    def add(mut self, value: Scalar[Self.accum], counts: Bool):
        """Adds the value of a row, which counts or does not."""
        self.sum.add(value)
        if counts:
            self.count.add(1)

    @inline(.always)
    def collected[block_size: Int](self) -> Self:
        """Returns, to the first thread of a block, what those of all its threads come to. Every thread must call this.
        """
        var scratch = unsafe_stack_allocation[
            block_size, Sum[Self.accum, 1], address_space=AddressSpace.SHARED
        ]()
        var thread = Int(thread_idx.x)
        var result = Self()
        result.sum = tree_reduce[block_size, plus[Self.accum]](
            scratch, thread, self.sum
        )
        result.count = tree_reduce[block_size, plus[Self.accum]](
            scratch, thread, self.count
        )
        return result

    @inline(.always)
    def write[
        dtype: DType
    ](
        self,
        result: Target[dtype],
        reduction: Int64,
        counted: Target[Self.accum],
        is_counted: Int64,
    ):
        """Writes the sum or the mean, if there is a reduction, and into `counted` how many rows count, if that `is_counted`.
        """
        if Int(reduction) == Reduction.SUM.value:
            result[unsafe_offset=0] = self.sum.value.cast[dtype]()
        elif Int(reduction) == Reduction.MEAN.value:
            result[unsafe_offset=0] = (self.sum.value / self.count.value).cast[
                dtype
            ]()
        if is_counted != 0:
            counted[unsafe_offset=0] = self.count.value

    @inline(.always)
    def leave[block_size: Int](self, parts: Target[Self.accum]):
        """Writes what the totals of a block's threads come to, among the sums and the counts of all blocks. Every thread of the block must
        call this.
        """
        var total = self.collected[block_size]()
        if Int(thread_idx.x) == 0:
            var block = Int(block_idx.x)
            parts[unsafe_offset=2 * block] = total.sum.value
            parts[unsafe_offset=2 * block + 1] = total.count.value


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_SIZE))
)
def counts_kernel[
    accum: DType
](parts: Target[accum], targets: Targets, rows: Int64, ignored: Int64):
    """Leaves how many rows of each block count: those whose target is not `ignored`.
    """
    var total = Total[accum]()
    pdl_wait()
    for row in range(
        Int(block_idx.x) * BLOCK_SIZE + Int(thread_idx.x),
        Int(rows),
        Int(grid_dim.x) * BLOCK_SIZE,
    ):
        total.add(0, targets[row] != ignored)
    total.leave[BLOCK_SIZE](parts)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(MAX_PARTS))
)
def totals_kernel[
    accum: DType, dtype: DType
](
    result: Target[dtype],
    parts: Source[accum],
    blocks: Int64,
    reduction: Int64,
    counted: Target[accum],
    is_counted: Int64,
):
    """Writes the sum of what rows have, or its mean over those that count, as of `Total.write`: one block for the parts that at most
    `MAX_PARTS` blocks have left.
    """
    var total = _collected(parts, Int(blocks))
    if Int(thread_idx.x) == 0:
        total.write(result, reduction, counted, is_counted)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(MAX_PARTS))
)
def share_kernel[
    accum: DType, dtype: DType
](
    result: Target[accum],
    upstream: Upstream[dtype, accum],
    parts: Source[accum],
    blocks: Int64,
):
    """Writes the part of a value that each row has which counts: one block for all parts, as of `totals_kernel`.
    """
    var total = _collected(parts, Int(blocks))
    if Int(thread_idx.x) == 0:
        result[unsafe_offset=0] = upstream[0] / total.count.value


@inline(.always)
def _collected[
    accum: DType, //
](parts: Source[accum], blocks: Int) -> Total[accum]:
    """Returns, to the first thread of a block of `MAX_PARTS`, what the parts come to.
    """
    var thread = Int(thread_idx.x)
    pdl_wait()
    var total = Total[accum]()
    if thread < blocks:
        total.sum.add(parts[unsafe_offset=2 * thread])
        total.count.add(parts[unsafe_offset=2 * thread + 1])
    return total.collected[MAX_PARTS]()


struct Parts[accum: DType](Movable):
    """Room for what each block leaves."""

    var memory: Scratch[Self.accum]
    """Freed, in the stream's order, with this."""
    var blocks: Int
    """How many leave a part."""

    def __init__(out self, blocks: Int, queue: Queue) raises:
        """Room for as many of `blocks` as may be launched."""
        self.blocks = max(1, min(blocks, MAX_PARTS))
        self.memory = queue.scratch[Self.accum](2 * self.blocks)

    def pointer(self) -> Target[Self.accum]:
        """Returns where the parts are."""
        return self.memory.pointer

    def add[
        dtype: DType, //
    ](
        self,
        result: Target[dtype],
        options: LossOptions,
        counted: Target[Self.accum],
        queue: Queue,
    ) raises:
        """Enqueues what the parts come to, as of `totals_kernel`."""
        queue.launch[totals_kernel[Self.accum, dtype]](
            result,
            self.pointer(),
            Int64(self.blocks),
            Int64(options.reduction.value),
            counted,
            Int64(options.is_counted),
            grid_dim=1,
            block_dim=MAX_PARTS,
            attributes=pdl_attributes(),
        )

    def divide[
        dtype: DType, //
    ](
        self,
        result: Target[Self.accum],
        upstream: Upstream[dtype, Self.accum],
        queue: Queue,
    ) raises:
        """Enqueues what each row that counts has of a value, as of `share_kernel`.
        """
        queue.launch[share_kernel[Self.accum, dtype]](
            result,
            upstream,
            self.pointer(),
            Int64(self.blocks),
            grid_dim=1,
            block_dim=MAX_PARTS,
            attributes=pdl_attributes(),
        )
