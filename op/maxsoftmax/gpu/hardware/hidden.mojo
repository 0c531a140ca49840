"""Elements that a mask of bools hides, by the bits of both: on a GPU fewer than two operations an element, of 16 bits, where a
comparison and a selection take five.
"""

from std.memory import bitcast
from std.sys import is_nvidia_gpu, size_of
from std.utils.numerics import neg_inf

from .packed import bytes_of


@inline(.always)
def hidden[
    dtype: DType, width: SIMDLength, //
](
    elements: SIMD[dtype, width],
    takes: SIMD[DType.uint8, width],
    filler: Scalar[dtype] = neg_inf[dtype](),
) -> SIMD[dtype, width]:
    """Returns elements, fillers where they take no part.

    Parameters:
        dtype: Their dtype, of 4 bytes or 2.
        width: How many.

    Args:
        elements: The elements.
        takes: For each of them a byte, 0 if it takes no part.
        filler: What is there instead.
    """
    var nothing = SIMD[dtype, width](filler)
    comptime if is_nvidia_gpu() and Int(width) % 4 == 0:
        comptime words = Int(width) * size_of[dtype]() // 4
        var bytes = bitcast[DType.uint32, Int(width) // 4](takes)
        # The highest bit of each byte says whether any is set.
        var set = ((bytes & 0x7F7F7F7F) + 0x7F7F7F7F) | bytes
        var mask = SIMD[DType.uint32, words]()
        comptime for i in range(words):
            comptime first = i * 4 // size_of[dtype]()
            # Copies of the highest bits of the bytes of one element, or of two.
            comptime low = 8 + first % 4
            comptime high = low + 4 // size_of[dtype]() - 1
            mask[i] = bytes_of[high * 0x1100 + low * 0x11](
                set[first // 4], set[first // 4]
            )
        var bits = bitcast[DType.uint32, words](elements)
        var instead = bitcast[DType.uint32, words](nothing)
        return bitcast[dtype, width]((bits & mask) | (instead & ~mask))
    else:
        return takes.ne(0).select(elements, nothing)


@inline(.always)
def any_bits[
    dtype: DType, width: SIMDLength, //
](values: SIMD[dtype, width]) -> Bool:
    """Returns whether any bit of some values is set."""
    comptime bytes = Int(width) * size_of[dtype]()
    comptime if bytes % 4 == 0:
        return bitcast[DType.uint32, bytes // 4](values).reduce_or() != 0
    else:
        return bitcast[DType.uint8, bytes](values).reduce_or() != 0
