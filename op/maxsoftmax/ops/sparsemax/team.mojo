"""What the threads of a GPU that share a row read, write and tell each other."""

from std.bit import log2_ceil
from std.sys import size_of
from std.utils.numerics import neg_inf
from max.gpu import WARP_SIZE
from max.gpu.sync import barrier

from ...cpu.lanes import fold_sum
from ...gpu.hardware.tree_reduction import Shared
from ...gpu.hardware.warp_reduction import block_reduce
from ...math.online import Sum
from ...io.rows import Source, Target
from .threshold import Support, positive

comptime TOGETHER = 32
"""Most rows along an axis that is not the last that a block takes."""


@inline(.always)
def vector_of[dtype: DType, contiguous: Bool]() -> Int:
    """Returns how many neighbours in a row a thread takes: 16 bytes of them, or one where they are not neighbours in memory.
    """
    return 16 // size_of[dtype]() if contiguous else 1


struct RowPlace[dtype: DType, contiguous: Bool](TrivialRegisterPassable):
    """Where on a GPU the elements of a row are that a thread takes.

    Parameters:
        dtype: Dtype of the tensors.
        contiguous: Whether rows are along the last axis.
    """

    comptime width = vector_of[Self.dtype, Self.contiguous]()
    comptime Values = SIMD[Self.dtype, Self.width]

    var start: Int
    """Where the row begins."""
    var n: Int
    """How long it is; 0 if it is none."""
    var inner: Int
    """From one element to the next."""

    @inline(.always)
    def __init__(out self, start: Int, n: Int, inner: Int):
        self.start = start
        self.n = n
        self.inner = inner

    @inline(.always)
    def load(self, x: Source[Self.dtype], i: Int) -> Self.Values:
        """Returns the element `i` and its neighbours, -inf for those that there are not.
        """
        var values = Self.Values(neg_inf[Self.dtype]())
        comptime if Self.contiguous:
            var at = x.unsafe_offset(self.start + i)
            if i + Self.width <= self.n and Int(at) % 16 == 0:
                return at.unsafe_load[width=Self.width, alignment=16]()
            comptime for j in range(Self.width):
                if i + j < self.n:
                    values[j] = at[unsafe_offset=j]
        else:
            if i < self.n:
                values[0] = x[unsafe_offset=self.start + i * self.inner]
        return values

    @inline(.always)
    def store(self, y: Target[Self.dtype], i: Int, values: Self.Values):
        """Writes the element `i` and its neighbours, as far as there are such.
        """
        comptime if Self.contiguous:
            var at = y.unsafe_offset(self.start + i)
            if i + Self.width <= self.n and Int(at) % 16 == 0:
                at.unsafe_store[alignment=16](0, values)
                return
            comptime for j in range(Self.width):
                if i + j < self.n:
                    at[unsafe_offset=j] = values[j]
        else:
            if i < self.n:
                y[unsafe_offset=self.start + i * self.inner] = values[0]


@inline(.always)
def meet[
    T: TrivialRegisterPassable,
    //,
    contiguous: Bool,
    threads: Int,
    combine: def(T, T) thin -> T,
](scratch: Shared[T], thread: Int, columns: Int, value: T) -> T:
    """Combines the values of the threads of a row, and hands the result to each, with the same bits.

    Parameters:
        T: Type of the values, whole words of 4 bytes.
        contiguous: Whether the row has a block of its own.
        threads: Threads a row, a power of two.
        combine: The operation, commutative.

    Args:
        scratch: Memory for `meeting` values; free again when this returns.
        thread: This thread's index in the block.
        columns: Rows a block.
        value: This thread's value.

    Returns:
        The combined value of this thread's row.
    """
    comptime if contiguous:
        return block_reduce[threads, combine](scratch, thread, value)
    else:
        scratch[unsafe_offset=thread] = value
        barrier()
        comptime for level in reversed(range(log2_ceil(threads))):
            var half = (1 << level) * columns
            if thread < half:
                scratch[unsafe_offset=thread] = combine(
                    scratch[unsafe_offset=thread],
                    scratch[unsafe_offset=thread + half],
                )
            barrier()
        var result = scratch[unsafe_offset=thread % columns]
        # Nobody may write the next value before everybody has read this one.
        barrier()
        return result


@inline(.always)
def meeting[contiguous: Bool, threads: Int]() -> Int:
    """Returns how many values `meet` has memory for: one a warp, or one a thread.
    """
    comptime if contiguous:
        return max(1, threads // WARP_SIZE)
    else:
        return threads * TOGETHER


@inline(.always)
def most_threads[contiguous: Bool, threads: Int]() -> Int:
    """Returns the threads of a block, at most."""
    return threads if contiguous else threads * TOGETHER


struct Chain[dtype: DType](TrivialRegisterPassable):
    """The support among the elements of a thread, added one vector after the other.

    Parameters:
        dtype: The accumulator's dtype.
    """

    var sum: Sum[Self.dtype, 1]
    var count: Int32

    @inline(.always)
    def __init__(out self):
        self.sum = Sum[Self.dtype, 1]()
        self.count = 0

    @inline(.always)
    def add[width: SIMDLength, //](mut self, excess: SIMD[Self.dtype, width]):
        """Adds what is above 0 of some elements."""
        self.add(positive(excess), excess)

    @inline(.always)
    def add[
        width: SIMDLength, //
    ](
        mut self,
        terms: SIMD[Self.dtype, width],
        values: SIMD[Self.dtype, width],
    ):
        """Adds terms, and counts the values that are above 0."""
        self.sum.add(fold_sum[1](terms)[0])
        comptime for j in range(Int(width)):
            self.count += Int32(Int(values[j] > 0))

    @inline(.always)
    def found(self) -> Support[Self.dtype]:
        """Returns the support of all of them."""
        return {self.sum.value - self.sum.excess, Int64(self.count)}
