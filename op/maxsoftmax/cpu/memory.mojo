"""Vectors in memory: widened as they are loaded, rounded as they are stored."""

from std.math import iota
from std.memory import bitcast
from std.sys import PrefetchOptions, prefetch, size_of
from std.sys.intrinsics import masked_load, masked_store
from std.utils.numerics import neg_inf

from ..math.online import accumulator
from ..io.rows import Source, Target

comptime LINE = 64
"""Bytes that memory is fetched by."""


@inline(.always)
def fetch[dtype: DType, //, count: Int, ahead: Int = 0](x: Source[dtype]):
    """Announces that `count` elements, `ahead` bytes behind `x`, will be read. They need not exist.
    """
    comptime for byte in range(0, count * size_of[dtype](), LINE):
        prefetch[PrefetchOptions().for_read().medium_locality()](
            x.unsafe_bitcast[UInt8]().unsafe_offset(ahead + byte)
        )


@inline(.always)
def fetch_to_write[
    dtype: DType, //, count: Int, ahead: Int = 0
](y: Target[dtype]):
    """Announces that `count` elements, `ahead` bytes behind `y`, will be written, for which they are fetched too. They need
    not exist.
    """
    comptime for byte in range(0, count * size_of[dtype](), LINE):
        prefetch[PrefetchOptions().for_write().medium_locality()](
            y.unsafe_bitcast[UInt8]().unsafe_offset(ahead + byte)
        )


@inline(.always)
def load[
    dtype: DType, //, width: SIMDLength
](x: Source[dtype], count: Int) -> SIMD[accumulator[dtype](), width]:
    """Loads `count` logits, or `width`, followed by -inf: the logit that adds nothing to a softmax.
    """
    comptime if dtype == DType.bfloat16:
        # LLVM takes vectors of bfloat16 apart where the hardware has none, so they travel as the integers they are.
        var bits = load_plain[width](
            x.unsafe_bitcast[UInt16](),
            count,
            bitcast[DType.uint16](neg_inf[DType.bfloat16]()),
        )
        return bitcast[accumulator[dtype]()](bits.cast[DType.uint32]() << 16)
    else:
        return load_plain[width](x, count, neg_inf[dtype]()).cast[
            accumulator[dtype]()
        ]()


@inline(.always)
def store[
    dtype: DType, width: SIMDLength, //
](y: Target[dtype], values: SIMD[accumulator[dtype](), width], count: Int):
    """Stores the first `count` of `values`, or all, rounded to nearest and ties to even.
    """
    comptime if dtype == DType.bfloat16:
        store_plain(
            y.unsafe_bitcast[UInt16](),
            bitcast[DType.uint16](rounded[dtype](values)),
            count,
        )
    else:
        store_plain(y, rounded[dtype](values), count)


@inline(.always)
def load_plain[
    dtype: DType, //, width: SIMDLength
](x: Source[dtype], count: Int, filler: Scalar[dtype] = 0) -> SIMD[
    dtype, width
]:
    """Loads `count` elements, or `width`, as they are, followed by the filler.
    """
    if count >= Int(width):
        return x.unsafe_load[width=width]()
    return masked_load(x, first_lanes[width](count), SIMD[dtype, width](filler))


@inline(.always)
def store_plain[
    dtype: DType, width: SIMDLength, //
](y: Target[dtype], values: SIMD[dtype, width], count: Int):
    """Stores the first `count` of `values`, or all, as they are."""
    if count >= Int(width):
        y.unsafe_store(values)
    else:
        masked_store(values, y, first_lanes[width](count))


@inline(.always)
def rounded[
    accum: DType, width: SIMDLength, //, dtype: DType
](x: SIMD[accum, width]) -> SIMD[dtype, width]:
    """Returns `x` rounded to nearest and ties to even, subnormal results included; of bfloat16, the quiet NaN for any NaN.
    What a CPU rounds to bfloat16, it rounds here.
    """
    comptime if dtype == DType.bfloat16:
        # A cast would be `vcvtneps2bf16` where a CPU has that, which takes every subnormal for 0.
        comptime assert accum == DType.float32
        var bits = bitcast[DType.uint32](x)
        var nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        var nan = SIMD[DType.uint32, width](0x7FC0)
        return bitcast[dtype](x.eq(x).select(nearest, nan).cast[DType.uint16]())
    else:
        return x.cast[dtype]()


@inline(.always)
def first_lanes[width: SIMDLength](count: Int) -> SIMD[DType.bool, width]:
    """Returns a mask of the first `count` lanes."""
    return iota[DType.int32, width]().lt(Int32(count))
