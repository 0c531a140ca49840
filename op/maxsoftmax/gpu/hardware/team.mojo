"""Threads that share a row, and what they tell each other: lanes of a warp, warps of a block, blocks of a cluster."""

from std.memory import bitcast
from std.sys import inlined_assembly, llvm_intrinsic
from max.gpu import WARP_SIZE
from max.gpu.host import DeviceContext
from max.gpu.sync import barrier

from .warp_reduction import lanes_reduce
from .tree_reduction import Shared


@inline(.always)
def maximum[
    dtype: DType, width: SIMDLength, //
](a: SIMD[dtype, width], b: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns the larger of two values, lane by lane, and NaN where either is.
    """
    return llvm_intrinsic[
        "llvm.maximum", SIMD[dtype, width], has_side_effect=False
    ](a, b)


@inline(.always)
def largest_lane[
    dtype: DType, width: SIMDLength, //
](values: SIMD[dtype, width]) -> Scalar[dtype]:
    """Returns the largest lane, NaN if any is."""
    comptime if width == 1:
        return values[0]
    else:
        comptime half = width // 2
        return largest_lane(
            maximum(values.slice[half](), values.slice[half, offset=half]())
        )


@inline(.always)
def largest_of_lanes[lanes: Int](value: Float32) -> Float32:
    """Returns the largest value of so many neighbouring lanes, NaN if any is, to each of them.

    Parameters:
        lanes: How many: all of a warp of 32, or fewer of another.

    Args:
        value: This lane's, of which a NaN is `maximum`'s.
    """
    comptime gpu = DeviceContext.default_device_info
    comptime if gpu.api == "cuda" and gpu.compute >= 8.0 and lanes == 32:
        # Integers, of which there is a reduction in one instruction, in the order of the numbers.
        var ordered = inlined_assembly[
            "redux.sync.max.s32 $0, $1, 0xffffffff;",
            Int32,
            constraints="=r,r",
        ](_ordered(bitcast[DType.int32](value)))
        return bitcast[DType.float32](_ordered(ordered))
    else:
        return lanes_reduce[greater, lanes](value)


@inline(.always)
def _ordered(bits: Int32) -> Int32:
    """Returns integers that are in the order of the floats of these bits, or the bits of such an integer.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@inline(.always)
def greater(a: Float32, b: Float32) -> Float32:
    """Returns the larger of two values, NaN if either is."""
    return maximum(a, b)


@inline(.always)
def total(a: Float32, b: Float32) -> Float32:
    """Returns the sum of two values."""
    return a + b


@inline(.always)
def team_reduce[
    threads: Int, combine: def(Float32, Float32) thin -> Float32
](scratch: Shared[Float32], thread: Int, value: Float32) -> Float32:
    """Combines the values of a team of threads and hands the result to each, with the same bits.

    A team of a warp or less exchanges lane by lane; a larger one is a whole block, whose warps then exchange through
    `scratch`. Every thread of the block must call this.

    Parameters:
        threads: Threads a team, a power of two.
        combine: The operation, commutative.

    - `scratch`: Memory for one value a warp that no other call of this row uses; not looked at by teams of a warp.

    Returns:
        The combined value of the team.
    """
    comptime if threads <= WARP_SIZE:
        return lanes_reduce[combine, threads](value)
    else:
        comptime warps = threads // WARP_SIZE
        var of_warp = lanes_reduce[combine](value)
        if thread % WARP_SIZE == 0:
            scratch[unsafe_offset=thread // WARP_SIZE] = of_warp
        barrier()
        return lanes_reduce[combine, warps](
            scratch[unsafe_offset=thread % warps]
        )
