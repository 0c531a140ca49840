"""Reduction of one (max, sum) pair a thread, by warp shuffles and shared memory between the warps."""

from max.gpu import WARP_SIZE
from max.gpu.primitives import warp
from max.gpu.sync import barrier

from ..online import MaxSum
from .tree_reduction import Shared


@inline(.always)
def lanes_merge[
    dtype: DType, //, lanes: Int = WARP_SIZE
](pair: MaxSum[dtype, 1]) -> MaxSum[dtype, 1]:
    """Merges the pairs of each group of neighbouring lanes by a butterfly.

    Parameters:
        dtype: The accumulator's dtype.
        lanes: Lanes a group, a power of two up to `WARP_SIZE`.

    Args:
        pair: This lane's pair.

    Returns:
        The pair of its group.
    """
    var result = pair
    var offset = lanes // 2
    while offset > 0:
        result.merge(
            MaxSum(
                warp.shuffle_xor(result.m, UInt32(offset)),
                warp.shuffle_xor(result.d.value, UInt32(offset)),
            )
        )
        offset //= 2
    return result


@inline(.always)
def pair_reduce[
    dtype: DType, //, block_size: Int
](scratch: Shared[dtype], thread: Int, pair: MaxSum[dtype, 1]) -> MaxSum[
    dtype, 1
]:
    """Merges the pairs of a block's threads and hands the result to each. Every thread of the block must call this.

    Parameters:
        dtype: The accumulator's dtype.
        block_size: Threads a block, a power of two and at least `WARP_SIZE`.

    Args:
        scratch: Memory for two elements a warp; free again when this returns.
        thread: This thread's index in the block.
        pair: This thread's pair.

    Returns:
        The pair of the block.
    """
    comptime assert block_size >= WARP_SIZE
    comptime warps = block_size // WARP_SIZE
    var of_warp = lanes_merge(pair)
    if thread % WARP_SIZE == 0:
        scratch[unsafe_offset=thread // WARP_SIZE] = of_warp.m
        scratch[unsafe_offset=warps + thread // WARP_SIZE] = of_warp.d.value
    barrier()
    # Merged in the same order by every warp, so that all threads have the same bits.
    var result = MaxSum(scratch[unsafe_offset=0], scratch[unsafe_offset=warps])
    for i in range(1, warps):
        result.merge(
            MaxSum(scratch[unsafe_offset=i], scratch[unsafe_offset=warps + i])
        )
    # Nobody may write the next pairs before everybody has read these.
    barrier()
    return result
