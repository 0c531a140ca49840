"""Accumulators as they are written: rounded once, to nearest and ties to even, subnormal results included."""

from std.memory import bitcast
from std.sys import inlined_assembly, is_gpu, is_nvidia_gpu, size_of
from std.sys.info import _is_sm_9x_or_newer


@inline(.always)
def rounded[
    accum: DType, width: SIMDLength, //, dtype: DType
](x: SIMD[accum, width], scale: Float64 = 1) -> SIMD[dtype, width]:
    """Returns `x` rounded; of bfloat16 on a CPU one NaN for any.

    What is too large for float8_e4m3fn, infinity included, is 448, its largest number, as the format has no infinity. Of
    float8_e5m2 it is infinity. PyTorch 2.13 does the same; ml_dtypes has NaN in place of 448.

    Parameters:
        accum: Dtype of the arithmetic, or `dtype`.
        width: How many.
        dtype: Dtype of the results.

    Args:
        x: Accumulators.
        scale: What results of float8 are multiplied by before; others are not.
    """
    comptime if size_of[dtype]() == 1:
        comptime wide = DType.float64 if accum == DType.float64 else DType.float32
        var scaled = x.cast[wide]() * SIMD[wide, width](scale.cast[wide]())
        return bitcast[dtype](_float8[dtype](_to_odd(scaled)))
    elif accum == DType.float64 and size_of[dtype]() == 2:
        return rounded[dtype](_to_odd(x))
    elif dtype == DType.bfloat16 and accum != dtype and not is_gpu():
        # A cast would be `vcvtneps2bf16` where a CPU has that, which takes every subnormal for 0.
        var bits = bitcast[DType.uint32](x.cast[DType.float32]())
        var nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        var nan = SIMD[DType.uint32, width](0x7FC0)
        var found = x.eq(x).select(nearest, nan)
        comptime if width == 1:
            # LLVM may carry one bfloat16 from block to block as float32, and round it again on the way: not what comes from here.
            found = SIMD[DType.uint32, width](
                inlined_assembly[
                    "", UInt32, constraints="=r,0", has_side_effect=True
                ](found[0])
            )
        return bitcast[dtype](found.cast[DType.uint16]())
    else:
        return x.cast[dtype]()


@inline(.always)
def _to_odd[
    accum: DType, width: SIMDLength, //
](x: SIMD[accum, width]) -> SIMD[DType.float32, width]:
    """Returns float32 that round to anything narrower as `x` does, where a cast would round twice: cut off, with a last bit
    that says whether anything was.
    """
    var near = x.cast[DType.float32]()
    comptime if accum == DType.float32:
        return near
    var exact = abs(x)
    var back = abs(near).cast[accum]()
    var bits = bitcast[DType.uint32](near)
    var cut = back.gt(exact).select(bits - 1, bits)
    var inexact = back.gt(exact) | back.lt(exact)
    return bitcast[DType.float32](inexact.select(cut | 1, bits))


@inline(.always)
def _float8[
    width: SIMDLength, //, dtype: DType
](x: SIMD[DType.float32, width]) -> SIMD[DType.uint8, width]:
    """Returns the bits of `x` as float8_e4m3fn or float8_e5m2: by a few integer operations where there is no instruction.
    """
    comptime assert (
        dtype == DType.float8_e4m3fn or dtype == DType.float8_e5m2
    ), "float8 is float8_e4m3fn or float8_e5m2"
    comptime few = dtype == DType.float8_e5m2
    var sign = (bitcast[DType.uint32](x) >> 24) & 0x80
    comptime if is_nvidia_gpu() and _is_sm_9x_or_newer():
        var found = bitcast[DType.uint8](x.cast[dtype]())
        comptime if few:
            # The instruction knows no infinity.
            var beyond = (sign | 0x7C).cast[DType.uint8]()
            return abs(x).ge(61440).select(beyond, found)
        return found
    comptime mantissa = 2 if few else 3
    comptime bias = 15 if few else 7
    comptime cut = UInt32(23 - mantissa)
    # The largest number, or 2^16, whose bits come out as those of infinity.
    comptime most = Float32(65536 if few else 448)
    comptime smallest = bitcast[DType.float32](UInt32(128 - bias) << 23)
    # Neighbours here are as far apart as subnormals.
    comptime apart = bitcast[DType.float32](UInt32(128 - bias + Int(cut)) << 23)
    comptime Bits = SIMD[DType.uint32, width]
    var size = min(abs(x), SIMD[DType.float32, width](most))
    var bits = bitcast[DType.uint32](size)
    var normal = (
        (bits + ((UInt32(1) << (cut - 1)) - 1) + ((bits >> cut) & 1)) >> cut
    ) - (UInt32(127 - bias) << UInt32(mantissa))
    var subnormal = bitcast[DType.uint32](size + apart) - bitcast[DType.uint32](
        apart
    )
    var magnitude = size.lt(smallest).select(subnormal, normal)
    magnitude = x.eq(x).select(magnitude, Bits(0x7F))
    return (magnitude | sign).cast[DType.uint8]()
