"""Vectors in memory: widened as they are loaded, rounded as they are stored."""

from std.math import iota
from std.memory import bitcast
from std.sys import CompilationTarget, PrefetchOptions, prefetch, size_of
from std.sys.intrinsics import llvm_intrinsic, masked_load, masked_store
from std.utils.numerics import neg_inf

from ..math.online import accumulator
from ..io.rounding import rounded
from ..io.rows import Source, Target

comptime LINE = 64
"""Bytes that memory is fetched by."""


@inline(.always)
def before_line[dtype: DType, //](y: Target[dtype]) -> Int:
    """Returns how many elements there are from `y` on before a line begins."""
    # A signed remainder would take as long as a vector or two, and rows ask for this.
    return (-Int(y) & (LINE - 1)) // size_of[dtype]()


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
    dtype: DType, accum: DType, width: SIMDLength, //
](
    y: Target[dtype],
    values: SIMD[accum, width],
    count: Int,
    scale: Float64 = 1,
):
    """Stores the first `count` of `values`, or all, as `rounded` has them."""
    var results = rounded[dtype](values, scale)
    store_plain(
        y.unsafe_bitcast[Scalar[carried[dtype]()]](),
        bitcast[carried[dtype]()](results),
        count,
    )


def carried[dtype: DType]() -> DType:
    """Returns what results travel as: integers where LLVM would take vectors of `dtype` apart.
    """
    if size_of[dtype]() == 1:
        return DType.uint8
    return DType.uint16 if dtype == DType.bfloat16 else dtype


@inline(.always)
def stream[
    dtype: DType, accum: DType, width: SIMDLength, //
](y: Target[dtype], values: SIMD[accum, width], scale: Float64 = 1):
    """Stores `values` past the caches, as `store` rounds them, at an address that is a multiple of `LINE`, or of their size if that is less:
    a line that is written as a whole is not read before. Others may see them once the core has called `end_streams`.
    """
    comptime alignment = min(LINE, Int(width) * size_of[dtype]())
    var results = rounded[dtype](values, scale)
    y.unsafe_bitcast[Scalar[carried[dtype]()]]().unsafe_store[
        alignment=alignment, non_temporal=True
    ](bitcast[carried[dtype]()](results))


@inline(.always)
def end_streams():
    """Makes what this core has stored past the caches visible, before anything that it stores from now on.
    """
    comptime if CompilationTarget.is_x86():
        llvm_intrinsic["llvm.x86.sse.sfence", NoneType]()


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
def first_lanes[width: SIMDLength](count: Int) -> SIMD[DType.bool, width]:
    """Returns a mask of the first `count` lanes."""
    return iota[DType.int32, width]().lt(Int32(count))
