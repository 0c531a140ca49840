"""Elements as they are computed with, in the dtype of the accumulator."""

from std.memory import bitcast
from std.sys import is_gpu, is_nvidia_gpu


@inline(.always)
def widened[
    dtype: DType, width: SIMDLength, //, accum: DType = DType.float32
](values: SIMD[dtype, width]) -> SIMD[accum, width]:
    """Returns values in another dtype, which has all of them.

    Parameters:
        dtype: Theirs.
        width: How many.
        accum: The other.

    Args:
        values: The values.
    """
    comptime narrow = dtype == DType.bfloat16 and accum == DType.float32
    comptime if narrow and not is_gpu():
        # LLVM may carry bfloat16 from block to block as float32, and round them again on the way.
        return bitcast[accum, width](
            bitcast[DType.uint16, width](values).cast[DType.uint32]() << 16
        )
    elif narrow and is_nvidia_gpu() and Int(width) % 2 == 0:
        # A cast takes two operations for the higher half of a word.
        comptime pairs = Int(width) // 2
        var words = bitcast[DType.uint32, pairs](values)
        var bits = SIMD[DType.uint32, width](0)
        comptime for i in range(pairs):
            bits[2 * i] = words[i] << 16
            bits[2 * i + 1] = words[i] & 0xFFFF0000
        return bitcast[accum, width](bits)
    else:
        return values.cast[accum]()
