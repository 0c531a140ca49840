"""Reduction of one value a thread by warp shuffles, with shared memory between the warps of a block."""

from std.bit import log2_ceil
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from max.gpu import WARP_SIZE
from max.gpu.primitives import warp
from max.gpu.sync import barrier

from ...math.online import MaxSum, Sum
from .tree_reduction import Shared, larger, plus


@inline(.always)
def lanes_reduce[
    T: TrivialRegisterPassable,
    //,
    combine: def(T, T) thin -> T,
    lanes: Int = WARP_SIZE,
    stride: Int = 1,
    neighbours_first: Bool = False,
](value: T) -> T:
    """Combines the values of each group of neighbouring lanes by a butterfly, in registers.

    Parameters:
        combine: The operation, commutative up to rounding.
        lanes: Lanes a group, a power of two up to `WARP_SIZE`.
        stride: A power of two; only lanes that are a multiple of it apart are combined.
        neighbours_first: Whether the nearest are combined first, not those farthest apart.

    Returns:
        The combined value of its group; its bits are those of the group's first lane only up to rounding.
    """
    var result = value
    comptime first = log2_ceil(stride)
    comptime end = log2_ceil(lanes)
    comptime for i in range(first, end):
        comptime bit = i if neighbours_first else first + end - 1 - i
        result = combine(result, _exchange(result, UInt32(1 << bit)))
    return result


@inline(.always)
def values_reduce[
    T: TrivialRegisterPassable, count: Int, //, combine: def(T, T) thin -> T
](values: Array[T, count]) -> T:
    """Combines values of one thread as `lanes_reduce` combines those of as many lanes, with the same bits.

    Parameters:
        count: How many, a power of two.
        combine: The operation, commutative up to rounding.
    """
    var left = values.copy()
    comptime for i in reversed(range(log2_ceil(count))):
        comptime for j in range(1 << i):
            left[j] = combine(left[j], left[j + (1 << i)])
    return left[0]


@inline(.always)
def block_reduce[
    T: TrivialRegisterPassable,
    //,
    block_size: Int,
    combine: def(T, T) thin -> T,
](scratch: Shared[T], thread: Int, value: T) -> T:
    """Combines the values of a block's threads and hands the result to each, with the same bits.

    Every thread of the block must call this.

    Parameters:
        block_size: Threads a block, a power of two from 32; where a warp has more, they are a part of one.
        combine: The operation, commutative and associative up to rounding.

    - `scratch`: Memory for one element a warp; free again when this returns.

    Returns:
        The combined value of the block.
    """
    comptime assert block_size >= 32
    comptime warps = max(1, block_size // WARP_SIZE)
    var of_warp = lanes_reduce[combine, min(block_size, WARP_SIZE)](value)
    if thread % WARP_SIZE == 0:
        scratch[unsafe_offset=thread // WARP_SIZE] = of_warp
    barrier()
    # In the same order by every thread: 31 more operations at most, and no second exchange.
    var result = scratch[unsafe_offset=0]
    for i in range(1, warps):
        result = combine(result, scratch[unsafe_offset=i])
    # Nobody may write the next value before everybody has read this one.
    barrier()
    return result


@inline(.always)
def pair_reduce[
    dtype: DType, width: SIMDLength, //, block_size: Int
](thread: Int, pair: MaxSum[dtype, width]) -> MaxSum[dtype, 1]:
    """Merges the pairs of a block's threads and hands the result to each, with the same bits.

    The maxima first, then the sums in the unit of the largest: one exponential a lane. Merging pair by pair takes
    two at each of the twenty steps, which was most of the time of rows of 1024 (43 µs for 1024 of them on an H200).
    Every thread of the block must call this.

    Parameters:
        dtype: The accumulator's dtype.
        width: Lanes of each thread's pair.
        block_size: Threads a block, a power of two from 32.

    Returns:
        The pair of the block.
    """
    var maxima = unsafe_stack_allocation[
        max(1, block_size // WARP_SIZE),
        Scalar[dtype],
        address_space=AddressSpace.SHARED,
    ]()
    var sums = unsafe_stack_allocation[
        max(1, block_size // WARP_SIZE),
        Sum[dtype, 1],
        address_space=AddressSpace.SHARED,
    ]()
    var m = block_reduce[block_size, larger[dtype]](
        maxima, thread, pair.m.reduce_max()
    )
    var d = block_reduce[block_size, plus[dtype]](
        sums, thread, pair.collapse(m)
    )
    return {m, d}


@inline(.always)
def _exchange[T: TrivialRegisterPassable, //](value: T, offset: UInt32) -> T:
    """Returns the value of the lane whose index differs by the bit `offset`, word by word.
    """
    comptime assert size_of[T]() % 4 == 0
    var mine = value
    var theirs = value
    var source = Pointer(to=mine).unsafe_bitcast[UInt32]()
    var target = Pointer(to=theirs).unsafe_bitcast[UInt32]()
    comptime for word in range(size_of[T]() // 4):
        target[unsafe_offset=word] = warp.shuffle_xor(
            source[unsafe_offset=word], offset
        )
    return theirs
