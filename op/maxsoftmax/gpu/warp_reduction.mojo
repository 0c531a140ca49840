"""Reduction of one value a thread by warp shuffles, with shared memory between the warps of a block."""

from max.gpu import WARP_SIZE
from max.gpu.primitives import warp
from max.gpu.sync import barrier

from .tree_reduction import Shared


@inline(.always)
def lanes_reduce[
    dtype: DType,
    //,
    combine: def(Scalar[dtype], Scalar[dtype]) thin -> Scalar[dtype],
    lanes: Int = WARP_SIZE,
](value: Scalar[dtype]) -> Scalar[dtype]:
    """Combines the values of each group of neighbouring lanes by a butterfly: every lane gets the same bits.

    Parameters:
        dtype: Dtype of the values.
        combine: The operation, commutative.
        lanes: Lanes a group, a power of two up to `WARP_SIZE`.

    Args:
        value: This lane's value.

    Returns:
        The combined value of its group.
    """
    var result = value
    var offset = lanes // 2
    while offset > 0:
        result = combine(result, warp.shuffle_xor(result, UInt32(offset)))
        offset //= 2
    return result


@inline(.always)
def block_reduce[
    dtype: DType,
    //,
    block_size: Int,
    combine: def(Scalar[dtype], Scalar[dtype]) thin -> Scalar[dtype],
](scratch: Shared[dtype], thread: Int, value: Scalar[dtype]) -> Scalar[dtype]:
    """Combines the values of a block's threads and hands the result to each. Every thread of the block must call this.

    Parameters:
        dtype: Dtype of the values.
        block_size: Threads a block, a power of two and at least `WARP_SIZE`.
        combine: The operation, commutative and associative up to rounding.

    Args:
        scratch: Memory for one element a warp; free again when this returns.
        thread: This thread's index in the block.
        value: This thread's value.

    Returns:
        The combined value of the block.
    """
    comptime assert block_size >= WARP_SIZE
    comptime warps = block_size // WARP_SIZE
    var of_warp = lanes_reduce[combine](value)
    comptime if warps == 1:
        return of_warp
    if thread % WARP_SIZE == 0:
        scratch[unsafe_offset=thread // WARP_SIZE] = of_warp
    barrier()
    var result = lanes_reduce[combine, warps](
        scratch[unsafe_offset=thread % warps]
    )
    # Nobody may write the next value before everybody has read this one.
    barrier()
    return result
