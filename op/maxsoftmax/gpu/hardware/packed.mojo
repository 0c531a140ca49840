"""Exponentials in three bytes each: what of registers is left when there is no room for four."""

from std.memory import bitcast
from std.sys import inlined_assembly


struct Packed[width: Int](TrivialRegisterPassable):
    """Exponentials of 16-bit logits, in three bytes each: sign, exponent, and 15 bits.

    Parameters:
        width: How many, a multiple of 4.
    """

    comptime Values = SIMD[DType.float32, Self.width]
    comptime Words = SIMD[DType.uint32, Self.width]

    var words: Self.Words
    """Three for every four of them; the lowest bytes are those of the fourth. The rest is not looked at."""

    @inline(.always)
    def __init__(out self):
        self.words = 0

    @inline(.always)
    def __init__(out self, values: Self.Values):
        self = Self()
        var bits = bitcast[DType.uint32](values)
        comptime for i in range(Self.width // 4):
            comptime for j in range(3):
                self.words[3 * i + j] = bytes_of[0x3215 + j](
                    bits[4 * i + j], bits[4 * i + 3]
                )

    @inline(.always)
    def values(self) -> Self.Values:
        """Returns the exponentials, shortened."""
        var bits = Self.Words(0)
        comptime for i in range(Self.width // 4):
            comptime for j in range(3):
                bits[4 * i + j] = self.words[3 * i + j]
            bits[4 * i + 3] = bytes_of[0x4210](
                bytes_of[0x0400](self.words[3 * i], self.words[3 * i + 1]),
                self.words[3 * i + 2],
            )
        return Self.shortened(bitcast[DType.float32](bits))

    @staticmethod
    @inline(.always)
    def shortened(values: Self.Values) -> Self.Values:
        """Returns exponentials without their last byte."""
        return bitcast[DType.float32](
            bitcast[DType.uint32](values) & Self.Words(0xFFFFFF00)
        )


@inline(.always)
def bytes_of[which: Int](a: UInt32, b: UInt32) -> UInt32:
    """Returns four bytes of two words, each named by four bits, of which the highest says that all of it is the sign of the named byte.
    """
    return inlined_assembly[
        "prmt.b32 $0, $1, $2, $3;",
        UInt32,
        constraints="=r,r,r,n",
        has_side_effect=False,
    ](a, b, UInt32(which))
