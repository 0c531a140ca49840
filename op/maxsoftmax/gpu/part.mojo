"""What one thread takes of a row that a team shares, read and written 16 bytes at a time.

A row of odd length starts at an address that is no multiple of 16. It is peeled: a head of fewer elements than a
vector, aligned vectors, and a tail of fewer again. The blocks of a cluster take a share of the vectors each; the threads
of a block take their block's in turn, so that neighbours read neighbours, and the first few of them an element of the
head and one of the tail.
"""

from std.math import ceildiv
from std.sys import size_of
from std.utils.numerics import neg_inf
from max.gpu import thread_idx

from ..rows import Source, Target
from .stripe import VECTOR_BYTES


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
    """The block's first vector."""
    var target: Target[Self.dtype]
    """Where its probabilities go."""
    var lane: Int32
    """This thread's index in its team."""
    var count: Int32
    """Vectors of the block."""
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
        blocks: Int,
    ):
        """A thread's part of row `row`.

        Args:
            y: Probabilities of the first row.
            x: Logits of the first row.
            row: Which row.
            n: Length of a row.
            lane: This thread's index in its team.
            rank: The block's in its cluster.
            blocks: Blocks that share the row.
        """
        var source = x.unsafe_offset(row * n)
        var target = y.unsafe_offset(row * n)
        var misplaced = Int(source) % Self.bytes
        self.aligned = Int(target) % Self.bytes == misplaced
        var head = min(
            (Self.bytes - misplaced) % Self.bytes // size_of[Self.dtype](), n
        )
        var all = (n - head) // Self.width
        var tail = n - head - all * Self.width
        var share = ceildiv(all, blocks)
        var first = rank * share
        self.lane = Int32(lane)
        self.count = Int32(max(0, min(share, all - first)))
        self.source = source.unsafe_offset(head + first * Self.width)
        self.target = target.unsafe_offset(head + first * Self.width)
        self.edge = SIMD[DType.bool, 2](
            rank == 0 and lane < head, rank == blocks - 1 and lane < tail
        )
        self.edges = SIMD[DType.int64, 2](
            Int64(row * n + lane), Int64(row * n + n - tail + lane)
        )

    @inline(.always)
    def clear(mut self):
        """Makes it a part of nothing."""
        self.count = 0
        self.edge = SIMD[DType.bool, 2](fill=False)

    @inline(.always)
    def rounds(self) -> Int:
        """Returns how many vectors the thread with the most has."""
        return ceildiv(Int(self.count), Self.team)

    @inline(.always)
    def has(self, i: Int) -> Bool:
        """Returns whether this thread has a vector `i`."""
        return self.lane + Int32(i * Self.team) < self.count

    @inline(.always)
    def place(self, i: Int) -> Int:
        """Returns how many elements after the first vector this thread's vector `i` is.
        """
        return Int(self.lane + Int32(i * Self.team)) * Self.width

    @inline(.always)
    def load(self, i: Int) -> Self.Raw:
        """Returns this thread's vector `i` of logits."""
        return self.source.unsafe_load[width=Self.width, alignment=Self.bytes](
            self.place(i)
        )

    @inline(.always)
    def store(self, i: Int, values: Self.Raw):
        """Stores this thread's vector `i` of probabilities."""
        var at = self.place(i)
        if self.aligned:
            self.target.unsafe_store[alignment=Self.bytes](at, values)
        else:
            comptime for j in range(Self.width):
                self.target[unsafe_offset=at + j] = values[j]

    @inline(.always)
    def load_edges(self, x: Source[Self.dtype]) -> Self.Edges:
        """Returns this thread's elements of head and tail, -inf where it has none.
        """
        var values = Self.Edges(neg_inf[DType.float32]())
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
