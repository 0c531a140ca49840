"""Reduction of one value a thread by a binary tree in shared memory."""

from max.gpu.sync import barrier

from ...math.online import Sum

comptime MAX_GRID = 1 << 20
"""Most blocks that are launched: they loop over the rest. Times 1024 threads it is within every GPU's limit."""

comptime Shared[T: TrivialRegisterPassable] = Pointer[
    T, MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
"""A block's scratch memory."""


@inline(.always)
def tree_reduce[
    T: TrivialRegisterPassable,
    //,
    block_size: Int,
    combine: def(T, T) thin -> T,
](scratch: Shared[T], thread: Int, value: T, columns: Int = 1) -> T:
    """Combines the values of a block's threads and hands the result to each.

    Seen as a matrix of `block_size // columns` × `columns` threads, every column is reduced on its own: the lower
    half of the rows is folded onto the upper half until one row is left. Every thread of the block must call this.

    Parameters:
        block_size: Threads a block, a power of two.
        combine: The operation, commutative and associative up to rounding.

    - `scratch`: Memory for `block_size` elements; free again when this returns.
    - `columns`: A power of two up to `block_size`.

    Returns:
        The combined value of this thread's column.
    """
    scratch[unsafe_offset=thread] = value
    barrier()
    var half = block_size // 2
    while half >= columns:
        if thread < half:
            scratch[unsafe_offset=thread] = combine(
                scratch[unsafe_offset=thread],
                scratch[unsafe_offset=thread + half],
            )
        barrier()
        half //= 2
    var result = scratch[unsafe_offset=thread % columns]
    # Nobody may write the next value before everybody has read this one.
    barrier()
    return result


@inline(.always)
def larger[dtype: DType](a: Scalar[dtype], b: Scalar[dtype]) -> Scalar[dtype]:
    """Returns the larger of two values; of a number and NaN, either."""
    return max(a, b)


@inline(.always)
def plus[dtype: DType](a: Sum[dtype, 1], b: Sum[dtype, 1]) -> Sum[dtype, 1]:
    """Returns the sum of two sums, compensated as they are: ten levels of plain ones would cost five roundings.
    """
    var result = a
    result.add(b)
    return result
