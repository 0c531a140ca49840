"""What the L2 gives up first, and what last.

Where one row is longer than the L2, what is read twice stays there if what is read or written once does not take its place.
"""

from std.memory import bitcast
from std.sys import inlined_assembly, is_nvidia_gpu, size_of
from std.sys.intrinsics import _RegisterPackType

from .rows import Source, Target, VECTOR_BYTES

comptime Policy = UInt64
"""What the GPU is told about an access."""


@inline(.always)
def gone_first() -> Policy:
    """Returns what says that nobody will read a line again."""
    return _policy["evict_first"]()


@inline(.always)
def gone_last() -> Policy:
    """Returns what says that somebody will."""
    return _policy["evict_last"]()


@inline(.always)
def _policy[name: StaticString]() -> Policy:
    """Returns what the instruction set calls so."""
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            "createpolicy.fractional.L2::" + name + ".b64 $0, 1.0;",
            Policy,
            constraints="=l",
        ]()
    else:
        return 0


@inline(.always)
def load_vector[
    dtype: DType, //, width: Int
](source: Source[dtype], policy: Policy) -> SIMD[dtype, width]:
    """Returns 16 bytes of memory, which are aligned and are not kept in the L1, where loads under way would need the room.

    Parameters:
        dtype: Dtype of the elements.
        width: How many they are.

    Args:
        source: Where they are.
        policy: What is to become of them in the L2.
    """
    comptime if is_nvidia_gpu():
        var words = inlined_assembly[
            (
                "ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {$0, $1, $2,"
                " $3}, [$4], $5;"
            ),
            _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
            constraints="=r,=r,=r,=r,l,l,~{memory}",
        ](UInt64(Int(source)), policy)
        return bitcast[dtype, width](
            SIMD[DType.uint32, 4](words[0], words[1], words[2], words[3])
        )
    else:
        return source.unsafe_load[width=width, alignment=VECTOR_BYTES]()


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
