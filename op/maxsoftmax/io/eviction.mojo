"""What the L2 gives up first, and what last.

What is read is given up after what is written, so that memory writes while it reads: tensors that are larger than the L2 take 0.96 to 0.99 of the time. Where one row
is longer than the L2, what is read twice stays there if what is read or written once does not take its place.
"""

from std.memory import bitcast
from std.sys import inlined_assembly, is_nvidia_gpu, size_of
from std.sys.info import _is_sm_9x, _is_sm_9x_or_newer
from std.sys.intrinsics import _RegisterPackType

from .rows import Source, Target, VECTOR_BYTES

comptime Policy = UInt64
"""What the GPU is told about an access: what `createpolicy.fractional` makes, which as an instruction of its own would be in the way of conditional loads."""

comptime GONE_FIRST: Policy = 0x12F0000000000000
"""Nobody will read a line again."""

comptime GONE_LAST: Policy = 0x14F0000000000000
"""Somebody will; or what is written is to be given up before what was read: 16384×4096 of float32 take 126 µs instead of 131 (H200)."""


def has_policies[past_l1: Bool = False]() -> Bool:
    """Returns whether the GPU that is compiled for is of a kind that was seen to gain by them, or may be.

    Parameters:
        past_l1: Of loads as of `load_aligned`: those of the kernels that the whole GPU takes part in.
    """
    comptime if past_l1:
        return is_nvidia_gpu() and _is_sm_9x_or_newer()
    else:
        return is_nvidia_gpu() and _is_sm_9x()


@inline(.always)
def load_aligned[
    dtype: DType, //, width: Int, past_l1: Bool = False, told: Bool = True
](source: Source[dtype], policy: Policy = GONE_LAST) -> SIMD[dtype, width]:
    """Returns elements of memory, which are aligned.

    Parameters:
        dtype: Dtype of the elements.
        width: How many they are.
        past_l1: Whether they are not kept in the L1, where loads under way would need the room.
        told: Whether the GPU is told of the policy, of 2 to 16 bytes: only where they surely are in the GPU's memory, not a block's.

    Args:
        source: Where they are.
        policy: What is to become of them in the L2.
    """
    comptime bytes = width * size_of[dtype]()
    comptime load = "ld.global" + (
        ".L1::no_allocate" if past_l1 else ""
    ) + ".L2::cache_hint"
    comptime if not (
        told and has_policies[past_l1]()
    ) or bytes > VECTOR_BYTES or bytes < 2:
        return source.unsafe_load[width=width, alignment=bytes]()
    elif bytes == 16:
        var words = inlined_assembly[
            load + ".v4.b32 {$0, $1, $2, $3}, [$4], $5;",
            _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
            constraints="=r,=r,=r,=r,l,l,~{memory}",
        ](UInt64(Int(source)), policy)
        return bitcast[dtype, width](
            SIMD[DType.uint32, 4](words[0], words[1], words[2], words[3])
        )
    elif bytes == 8:
        var words = inlined_assembly[
            load + ".v2.b32 {$0, $1}, [$2], $3;",
            _RegisterPackType[UInt32, UInt32],
            constraints="=r,=r,l,l,~{memory}",
        ](UInt64(Int(source)), policy)
        return bitcast[dtype, width](SIMD[DType.uint32, 2](words[0], words[1]))
    elif bytes == 4:
        var word = inlined_assembly[
            load + ".b32 $0, [$1], $2;",
            UInt32,
            constraints="=r,l,l,~{memory}",
        ](UInt64(Int(source)), policy)
        return bitcast[dtype, width](SIMD[DType.uint32, 1](word))
    else:
        var word = inlined_assembly[
            load + ".b16 $0, [$1], $2;",
            UInt16,
            constraints="=h,l,l,~{memory}",
        ](UInt64(Int(source)), policy)
        return bitcast[dtype, width](SIMD[DType.uint16, 1](word))


@inline(.always)
def store_vector[
    dtype: DType, width: SIMDLength, //
](to: Target[dtype], values: SIMD[dtype, width]):
    """Writes a vector that nobody will read soon, to where it is aligned."""
    comptime bytes = Int(width) * size_of[dtype]()
    comptime if is_nvidia_gpu() and bytes == VECTOR_BYTES:
        var words = bitcast[DType.uint32, 4](values)
        inlined_assembly[
            "st.global.cs.v4.b32 [$0], {$1, $2, $3, $4};",
            NoneType,
            constraints="l,r,r,r,r,~{memory}",
        ](UInt64(Int(to)), words[0], words[1], words[2], words[3])
    else:
        to.unsafe_store[alignment=bytes](values)
