"""A row as it lies in memory: granules of 16 bytes, of which the first may begin before the row, and the last end after it.

What is added to what must not depend on the address of a row. Lane v of the granules that a thread takes, every `team`-th of
them, has elements of one chain, as the elements are called whose indices differ by multiples of the `team` granules' length. If the row
begins `shift` elements after a multiple of 16 bytes, the first `shift` lanes of the team's first thread are behind: there the
thread takes the elements of its next granule instead. Then all lanes have the same elements of their chains at the
same time, and which chains these are is only turned by `shift`, which `turned` undoes.
"""

from std.memory import bitcast
from std.sys import inlined_assembly, is_nvidia_gpu, size_of
from max.gpu import lane_id
from max.gpu.primitives import warp

from ...io.eviction import load_aligned
from ...io.rows import Source, VECTOR_BYTES, nowhere

comptime Granule[dtype: DType] = SIMD[dtype, VECTOR_BYTES // size_of[dtype]()]
"""16 bytes of a row."""

comptime WORDS = VECTOR_BYTES // 4
"""Words of a granule."""

comptime Words = SIMD[DType.uint32, WORDS]
"""Their bits."""


struct Granules[dtype: DType](TrivialRegisterPassable):
    """The granules of a row.

    Parameters:
        dtype: Dtype of the row, of 4 bytes or 2.
    """

    comptime width = VECTOR_BYTES // size_of[Self.dtype]()

    var first: Source[Self.dtype]
    """Where the first one begins."""
    var shift: Int32
    """How many of its elements are before the row."""
    var count: Int32
    """Those that do not reach beyond the row."""
    var tail: Int32
    """Elements of the row in the one after them."""

    @inline(.always)
    def __init__(out self, x: Source[Self.dtype], row: Int, n: Int):
        """The granules of row `row`.

        - `x`: The first row.
        """
        var start = x.unsafe_offset(row * n)
        var shift = Int(
            UInt32(Int(start) % VECTOR_BYTES) // UInt32(size_of[Self.dtype]())
        )
        self = Self(shift, n, start.unsafe_offset(-shift))

    @inline(.always)
    def __init__(
        out self,
        shift: Int,
        n: Int,
        first: Source[Self.dtype] = nowhere[Self.dtype](),
    ):
        """The granules of a row of `n` elements.

        Args:
            shift: How many elements of the first one are before the row.
            n: Elements of the row.
            first: Where the first one begins, if it is in memory.
        """
        self.first = first
        self.shift = Int32(shift)
        self.count = Int32((n + shift) // Self.width)
        self.tail = Int32((n + shift) % Self.width)

    @inline(.always)
    def whole[told: Bool = True](self, i: Int) -> Granule[Self.dtype]:
        """Returns granule `i`, which does not reach beyond the row.

        Parameters:
            told: As of `load_aligned`.
        """
        return load_aligned[Self.width, told=told](
            self.first.unsafe_offset(i * Self.width)
        )

    @inline(.always)
    def load[
        told: Bool = True
    ](self, i: Int, filler: Scalar[Self.dtype]) -> Granule[Self.dtype]:
        """Returns granule `i`, fillers from the end of the row on.

        Parameters:
            told: As of `load_aligned`.

        Args:
            i: Which one.
            filler: What is there instead of elements.
        """
        var at = self.first.unsafe_offset(i * Self.width)
        if Int32(i) < self.count:
            return self.whole[told](i)
        var values = Granule[Self.dtype](filler)
        if Int32(i) == self.count:
            comptime for j in range(Self.width - 1):
                if Int32(j) < self.tail:
                    values[j] = at[unsafe_offset=j]
        return values

    @inline(.always)
    def behind(self, lane: Int) -> Words:
        """Returns bits in those elements of a thread's granules that are behind.

        Args:
            lane: The thread's index in its team.
        """
        var words = Words(0)
        if lane == 0:
            var bits = 8 * size_of[Self.dtype]() * Int(self.shift)
            comptime for i in range(WORDS):
                words[i] = UInt32(
                    (UInt64(1) << UInt64(max(0, min(32, bits - 32 * i)))) - 1
                )
        return words


@inline(.always)
def caught_up[
    dtype: DType, width: SIMDLength, //
](granule: SIMD[dtype, width], next: SIMD[dtype, width], behind: Words) -> SIMD[
    dtype, width
]:
    """Returns a thread's granule with the elements of its next one where it is behind.

    Parameters:
        width: Elements of a granule.

    Args:
        granule: The one.
        next: The other.
        behind: As of `Granules.behind`.
    """
    return bitcast[dtype, width](
        _either(
            bitcast[DType.uint32, WORDS](next),
            bitcast[DType.uint32, WORDS](granule),
            behind,
        )
    )


@inline(.always)
def _either(a: Words, b: Words, bits: Words) -> Words:
    """Returns the bits of `a` where those of `bits` are set, and else those of `b`.
    """
    comptime if is_nvidia_gpu():
        # In one operation, which the compiler takes apart to use a part of it twice.
        var words = Words()
        comptime for i in range(WORDS):
            words[i] = inlined_assembly[
                "lop3.b32 $0, $1, $2, $3, 0xca;",
                UInt32,
                constraints="=r,r,r,r",
                has_side_effect=False,
            ](bits[i], a[i], b[i])
        return words
    else:
        return (b & ~bits) | (a & bits)


@inline(.always)
def turned[
    width: SIMDLength, //, lanes: Int
](chains: SIMD[DType.float32, width], shift: Int32, lane: Int) -> SIMD[
    DType.float32, width
]:
    """Returns the chains that a thread has where rows begin at a multiple of 16 bytes.

    Parameters:
        width: Elements of a granule.
        lanes: Threads of the team, neighbouring lanes of a warp.

    - `chains`: What this thread has.
    - `shift`: Of the row.
    """
    if shift == 0:
        return chains
    return straightened[lanes](chains, shift, lane)


@inline(.always)
def straightened[
    width: SIMDLength, //, lanes: Int
](values: SIMD[DType.float32, width], shift: Int32, lane: Int) -> SIMD[
    DType.float32, width
]:
    """Returns the values that a thread has where none are shifted: all but the first `shift` of its own, and those of the next thread. All of a warp call this.

    Parameters:
        width: Elements of a granule.
        lanes: As of `turned`.

    - `values`: What this thread has.
    - `shift`: How many of its values belong to the thread before it.
    """
    # The team may be a part of a warp.
    var next = (lane_id() & ~(lanes - 1)) + ((lane + 1) & (lanes - 1))
    var all = values.join(values)
    comptime for i in range(Int(width)):
        all[Int(width) + i] = warp.shuffle_idx(values[i], UInt32(next))
    comptime for bit in reversed(range(3 if Int(width) == 8 else 2)):
        comptime step = 1 << bit
        if Int(shift) & step != 0:
            comptime for i in range(Int(width) + step - 1):
                all[i] = all[i + step]
    return all.slice[Int(width)]()


@inline(.always)
def slanted[
    width: SIMDLength, //, lanes: Int
](values: SIMD[DType.float32, width], shift: Int32, lane: Int) -> SIMD[
    DType.float32, width
]:
    """Returns the values that a thread has where they are shifted: the last `shift` of the thread before it, and the first of its own. All of a warp call this.

    Parameters:
        width: Elements of a granule.
        lanes: As of `turned`.

    - `values`: What this thread has.
    - `shift`: How many of its values are to belong to the thread before it.
    """
    var of_next = straightened[lanes](values, Int32(Int(width)) - shift, lane)
    var before = (lane_id() & ~(lanes - 1)) + ((lane - 1) & (lanes - 1))
    var mine = values
    comptime for i in range(Int(width)):
        mine[i] = warp.shuffle_idx(of_next[i], UInt32(before))
    return values if shift == 0 else mine
