"""What one thread takes of a row that a team shares, read and written 16 bytes at a time.

A row of odd length starts at an address that is no multiple of 16. It is peeled: a head, aligned vectors, and a tail of
fewer elements than one. Where there are threads enough, the head reaches to the next line of 128 bytes, so that no
warp's access touches a line more than it must (3 % of the time at 20001 columns). The blocks of a cluster take a share of the vectors
each; the threads of a block take their block's in turn, so that neighbours read neighbours, and the first few of them
an element of the head and one of the tail.
"""

from std.memory import bitcast
from std.sys import inlined_assembly, is_nvidia_gpu, size_of
from std.utils.numerics import neg_inf

from ...io.rows import Source, Target
from .stripe import VECTOR_BYTES

comptime LINE_BYTES = 128
"""What the GPU's caches move at most at a time."""


struct Part[
    dtype: DType,
    team: Int,
    width: Int = VECTOR_BYTES // size_of[dtype](),
](TrivialRegisterPassable):
    """The vectors and the two edges of a row that are this thread's.

    Parameters:
        dtype: Dtype of the row, of 4 bytes or 2.
        team: Threads of a block that share a row, at least `width` of them unless rows are known to be aligned.
        width: Elements a vector; where it is 1 there are no edges.
    """

    comptime bytes = Self.width * size_of[Self.dtype]()
    comptime Raw = SIMD[Self.dtype, Self.width]
    comptime Edges = SIMD[DType.float32, 2]

    var source: Source[Self.dtype]
    """This thread's first vector."""
    var target: Target[Self.dtype]
    """Where its probabilities go."""
    var count: Int32
    """Vectors of the block."""
    var ahead: Int32
    """How many of them are not before this thread's first."""
    var edge: SIMD[DType.bool, 2]
    """Whether this thread has an element of the head, and one of the tail."""
    var edges: SIMD[DType.int64, 2]
    """Where in x and y they are."""
    var aligned: Bool
    """Whether the vectors of y are aligned as those of x are."""

    @inline(.always)
    def __init__(
        out self,
        y: Target[Self.dtype],
        x: Source[Self.dtype],
        row: Int,
        n: Int,
        lane: Int,
        rank: Int,
        share: Int,
    ):
        """A thread's part of row `row`.

        Args:
            y: Probabilities of the first row.
            x: Logits of the first row.
            row: Which row.
            n: Length of a row.
            lane: This thread's index in its team.
            rank: The block's, among those that share the row.
            share: Vectors that each of them takes, as long as there are any.
        """
        var source = x.unsafe_offset(row * n)
        var target = y.unsafe_offset(row * n)
        comptime line = UInt64(
            LINE_BYTES if Self.width > 1
            and Self.team * size_of[Self.dtype]() >= LINE_BYTES else Self.bytes
        )
        # Unsigned, so that a division is a shift: the first load waits for all of this.
        var address = UInt64(Int(source))
        var head = Int(
            min(
                (0 - address) % line // UInt64(size_of[Self.dtype]()), UInt64(n)
            )
        )
        self.aligned = (UInt64(Int(target)) - address) % UInt64(Self.bytes) == 0
        var body = UInt64(n - head)
        var all = Int(body // UInt64(Self.width))
        var tail = Int(body % UInt64(Self.width))
        var first = rank * share
        self.count = Int32(max(0, min(share, all - first)))
        self.ahead = self.count - Int32(lane)
        var start = head + (first + lane) * Self.width
        self.source = source.unsafe_offset(start)
        self.target = target.unsafe_offset(start)
        self.edge = SIMD[DType.bool, 2](
            rank == 0 and lane < head, rank == 0 and lane < tail
        )
        self.edges = SIMD[DType.int64, 2](
            Int64(row * n + lane), Int64(row * n + n - tail + lane)
        )

    @inline(.always)
    def clear(mut self):
        """Makes it a part of nothing."""
        self.count = 0
        self.ahead = 0
        self.edge = SIMD[DType.bool, 2](fill=False)

    @inline(.always)
    def rounds(self) -> Int:
        """Returns how many vectors every thread of the team has; some have one more.
        """
        return Int(self.count) // Self.team

    @inline(.always)
    def has(self, i: Int) -> Bool:
        """Returns whether this thread has a vector `i`."""
        return Int32(i * Self.team) < self.ahead

    @staticmethod
    @inline(.always)
    def place(i: Int) -> Int:
        """Returns how many elements after a thread's first vector its vector `i` is.
        """
        return i * Self.team * Self.width

    @inline(.always)
    def load(self, i: Int) -> Self.Raw:
        """Returns this thread's vector `i` of logits."""
        return self.source.unsafe_load[width=Self.width, alignment=Self.bytes](
            self.place(i)
        )

    @inline(.always)
    def store[aligned: Bool](self, i: Int, values: Self.Raw):
        """Stores this thread's vector `i` of probabilities.

        Parameters:
            aligned: Whether the vectors of y are aligned as those of x are, which is for the caller to look at: outside of its loops.
        """
        var at = self.place(i)
        comptime if aligned:
            self.target.unsafe_store[alignment=Self.bytes](at, values)
        else:
            comptime for j in range(Self.width):
                self.target[unsafe_offset=at + j] = values[j]

    @inline(.always)
    def load_edges(
        self,
        x: Source[Self.dtype],
        filler: Float32 = neg_inf[DType.float32](),
    ) -> Self.Edges:
        """Returns this thread's elements of head and tail, `filler` where it has none.
        """
        var values = Self.Edges(filler)
        comptime for i in range(2 if Self.width > 1 else 0):
            if self.edge[i]:
                values[i] = x[unsafe_offset=Int(self.edges[i])].cast[
                    DType.float32
                ]()
        return values

    @inline(.always)
    def store_edges(self, y: Target[Self.dtype], values: Self.Edges):
        """Stores the probabilities of what `load_edges` returned."""
        comptime for i in range(2 if Self.width > 1 else 0):
            if self.edge[i]:
                y[unsafe_offset=Int(self.edges[i])] = values[i].cast[
                    Self.dtype
                ]()


@inline(.always)
def again[
    dtype: DType, width: SIMDLength, //
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns `x` so that the compiler does not see that it is: what is computed of it anew is not kept instead, in
    twice the registers.
    """
    comptime words = width * size_of[dtype]() // 4
    comptime if is_nvidia_gpu() and words > 0:
        var bits = bitcast[DType.uint32, words](x)
        comptime for i in range(words):
            bits[i] = inlined_assembly[
                "mov.b32 $0, $1;", UInt32, constraints="=r,r"
            ](bits[i])
        return bitcast[dtype, width](bits)
    else:
        return x


@inline(.always)
def anew[
    dtype: DType, width: SIMDLength, //
](x: SIMD[dtype, width], zero: UInt32) -> SIMD[dtype, width]:
    """Returns `x` so that not even the assembler sees that it is, as it does through a move: what is computed of it
    anew is not kept instead, in twice the registers.

    Args:
        x: Anything.
        zero: What nobody but the caller knows to be 0.
    """
    comptime words = width * size_of[dtype]() // 4
    comptime if words > 0:
        return bitcast[dtype, width](bitcast[DType.uint32, words](x) ^ zero)
    else:
        return bitcast[dtype, width](
            bitcast[DType.uint16, width](x) ^ zero.cast[DType.uint16]()
        )
