"""What one thread takes of a row that a team shares, read and written 16 bytes at a time.

A row of odd length starts at an address that is no multiple of 16. It is peeled: a head, aligned vectors, and a tail of
fewer elements than one. The blocks of a cluster take a share of the vectors each; the threads of a block take their block's in turn, so that neighbours read neighbours, and the first few of them
an element of the head and one of the tail.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import inlined_assembly, is_nvidia_gpu, size_of
from std.utils.numerics import neg_inf

from ...io.rows import Rows, VECTOR_BYTES
from ...io.memory import MemorySource, MemoryTarget
from ...io.source import RowSource
from ...io.target import RowTarget

comptime LINE_BYTES = 128
"""What the GPU's caches move at most at a time."""


struct Part[S: RowSource, T: RowTarget, team: Int, width: Int](
    TrivialRegisterPassable
):
    """The vectors and the two edges of a row that are this thread's.

    Parameters:
        S: Where elements come from; where they are computed there are no edges: rows are whole vectors.
        T: Where results go.
        team: Threads of a block that share a row, at least `width` of them unless rows are known to be aligned.
        width: Elements a vector; where it is 1 there are no edges.
    """

    comptime bytes = Self.width * size_of[Self.S.Line.elements]()
    comptime peeled = Self.S.Line.in_memory and Self.width > 1
    comptime Raw = SIMD[Self.S.Line.held, Self.width]
    comptime Edges = SIMD[DType.float32, 2]

    var source: Self.S.Line
    """The row from this thread's first vector on."""
    var target: Self.T.Line
    """Where its results go."""
    var count: Int32
    """Vectors of the block."""
    var ahead: Int32
    """How many of them are not before this thread's first."""
    var whole: Bool
    """Whether all of the row takes part."""
    var read: Int32
    """How many vectors of the block have anything that takes part: fewer, where a row ends before the tensor does."""
    var reach: Int32
    """How many of them are not before this thread's first."""
    var edge: SIMD[DType.bool, 2]
    """Whether this thread has an element of the head, and one of the tail."""
    var edges: SIMD[DType.int64, 2]
    """Where they are, counted from its first vector."""
    var aligned: Bool
    """Whether the vectors of y are aligned, as those of x are."""

    @inline(.always)
    def __init__(
        out self,
        y: Self.T,
        x: Self.S,
        row: Int,
        n: Int,
        lane: Int,
        rank: Int,
        share: Int,
    ):
        """A thread's part of row `row`.

        Args:
            y: Results.
            x: Logits.
            row: Which row.
            n: Length of a row.
            lane: This thread's index in its team.
            rank: The block's, among those that share the row.
            share: Vectors that each of them takes, as long as there are any.
        """
        comptime size = size_of[Self.S.Line.elements]()
        var source = x.line(row, n)
        var target = y.line(row, n)
        var head = 0
        comptime if Self.S.Line.in_memory:
            # Unsigned, so that a division is a shift: the first load waits for all of this. Vectors that begin at a line of 128 bytes would be
            # up to 1.7 % faster, but a row's bits would depend on which multiple of 16 bytes it begins at.
            var address = UInt64(Int(source.address(0)))
            var before = (0 - address) % UInt64(Self.bytes) // UInt64(size)
            head = Int(min(before, UInt64(n)))
        var body = UInt64(n - head)
        var all = Int(body // UInt64(Self.width))
        var tail = Int(body % UInt64(Self.width))
        var first = rank * share
        self.count = Int32(max(0, min(share, all - first)))
        self.ahead = self.count - Int32(lane)
        var start = head + (first + lane) * Self.width
        self.read = self.count
        self.whole = True
        comptime if Self.S.is_causal:
            var body_length = source.length(n) - head
            self.whole = body_length >= n - head
            self.read = Int32(
                max(
                    0,
                    min(
                        Int(self.count),
                        ceildiv(body_length, Self.width) - first,
                    ),
                )
            )
        self.reach = self.read - Int32(lane)
        self.source = source.onwards(start)
        self.target = target.onwards(start)
        self.aligned = self.target.is_aligned[Self.width]()
        self.edge = SIMD[DType.bool, 2](
            rank == 0 and lane < head, rank == 0 and lane < tail
        )
        self.edges = SIMD[DType.int64, 2](
            Int64(lane - start), Int64(n - tail + lane - start)
        )

    @inline(.always)
    def clear(mut self):
        """Makes it a part of nothing."""
        self.count = 0
        self.ahead = 0
        self.read = 0
        self.reach = 0
        self.edge = SIMD[DType.bool, 2](fill=False)

    @inline(.always)
    def rounds(self) -> Int:
        """Returns how many vectors every thread of the team has; some have one more.
        """
        return Int(self.count) // Self.team

    @inline(.always)
    def rounds_read(self) -> Int:
        """Returns how many rounds there are in which anything that takes part is read.
        """
        return ceildiv(Int(self.read), Self.team)

    @inline(.always)
    def has(self, i: Int) -> Bool:
        """Returns whether this thread has a vector `i`."""
        return Int32(i * Self.team) < self.ahead

    @inline(.always)
    def reads(self, i: Int) -> Bool:
        """Returns whether of this thread's vector `i` there is anything that takes part.
        """
        return Int32(i * Self.team) < self.reach

    @staticmethod
    @inline(.always)
    def place(i: Int) -> Int:
        """Returns how many elements after a thread's first vector its vector `i` is.
        """
        return i * Self.team * Self.width

    @inline(.always)
    def load(self, i: Int) -> Self.Raw:
        """Returns this thread's vector `i`, as it is kept."""
        return self.source.load[Self.width](self.place(i))

    @inline(.always)
    def logits(self, i: Int, kept: Self.Raw) -> SIMD[DType.float32, Self.width]:
        """Returns the logits of this thread's vector `i`, of which `kept` is what was loaded.
        """
        return self.source.logits(self.place(i), kept).cast[DType.float32]()

    @inline(.always)
    def store[
        aligned: Bool
    ](self, i: Int, values: SIMD[DType.float32, Self.width]):
        """Stores this thread's vector `i` of results.

        Parameters:
            aligned: Whether it is in whole vectors, which is for the caller to look at: outside of its loops.
        """
        self.target.store[aligned](self.place(i), values)

    @inline(.always)
    def load_edges(
        self, filler: Float32 = neg_inf[DType.float32]()
    ) -> Self.Edges:
        """Returns this thread's logits of head and tail, `filler` where it has none.
        """
        var values = Self.Edges(filler)
        comptime for i in range(2 if Self.peeled else 0):
            if self.edge[i]:
                var at = Int(self.edges[i])
                values[i] = self.source.logits(
                    at, self.source.limited(at, self.source.load[1](at))
                ).cast[DType.float32]()[0]
        return values

    @inline(.always)
    def store_edges(self, values: Self.Edges):
        """Stores the results of what `load_edges` returned."""
        comptime for i in range(2 if Self.peeled else 0):
            if self.edge[i]:
                self.target.store[True](
                    Int(self.edges[i]), SIMD[DType.float32, 1](values[i])
                )


comptime MemoryPart[
    dtype: DType,
    team: Int,
    width: Int = VECTOR_BYTES // size_of[dtype](),
] = Part[MemorySource[dtype], MemoryTarget[dtype], team, width]
"""A part of a row in memory, whose results go to memory."""


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


def vector_width[S: RowSource, T: RowTarget]() -> Int:
    """Returns how many elements are best taken at a time: what has 16 bytes in memory, or as results, which are no more for float8
    than for 16 bits, as 16 accumulators would be more registers than there are.
    """
    return VECTOR_BYTES // (
        size_of[S.Line.elements]() if S.Line.in_memory else max(
            2, size_of[T.Line.stored]()
        )
    )


def whole_vectors[
    S: RowSource, T: RowTarget, //, width: Int
](y: T, x: S, rows: Rows) -> Bool:
    """Returns whether rows can be read and written by vectors of `width`."""
    return (
        rows.n % width == 0 and x.in_vectors[width]() and y.in_vectors[width]()
    )
