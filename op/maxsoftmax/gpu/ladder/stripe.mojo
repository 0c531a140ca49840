"""A thread's share of a row, read and written 16 bytes at a time.

A row of odd length starts at an address that is no multiple of 16. It is peeled: a head of fewer elements than a
vector, aligned vectors, and a tail of fewer again. The threads of a block take the vectors in turn, and the first
few of them one element of the head and one of the tail each.
"""

from std.sys import size_of
from std.utils.numerics import neg_inf

from ...math.online import accumulator
from ...io.rows import Source, Target, VECTOR_BYTES


struct Stripe[dtype: DType, block_size: Int](TrivialRegisterPassable):
    """What one thread of a block takes of a row.

    Parameters:
        dtype: Dtype of the row.
        block_size: Threads that share the row.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime width = VECTOR_BYTES // size_of[Self.dtype]()
    comptime Vector = SIMD[Self.accum, Self.width]

    var x: Source[Self.dtype]
    """The row."""
    var y: Target[Self.dtype]
    """Where its probabilities go."""
    var thread: Int
    """This thread's index in the block, and that of its first vector."""
    var head: Int
    """Elements before the first aligned vector."""
    var vectors: Int
    """Aligned vectors in the row."""
    var tail: Int
    """Elements after the last of them."""
    var aligned: Bool
    """Whether the vectors of y are aligned as well."""

    @inline(.always)
    def __init__(
        out self,
        y: Target[Self.dtype],
        x: Source[Self.dtype],
        n: Int,
        thread: Int,
    ):
        comptime assert Self.block_size >= Self.width
        self.x = x
        self.y = y
        self.thread = thread
        var misplaced = Int(x) % VECTOR_BYTES
        self.head = min(
            (VECTOR_BYTES - misplaced) % VECTOR_BYTES // size_of[Self.dtype](),
            n,
        )
        self.vectors = (n - self.head) // Self.width
        self.tail = n - self.head - self.vectors * Self.width
        self.aligned = Int(y) % VECTOR_BYTES == misplaced

    @inline(.always)
    def load[
        count: Int
    ](self, vector: Int) -> Array[SIMD[Self.accum, Self.width], count]:
        """Loads `count` vectors, block_size apart: all are under way before the first is used.
        """
        var raw = Array[SIMD[Self.dtype, Self.width], count](fill=0)
        comptime for i in range(count):
            raw[i] = self.x.unsafe_load[
                width=Self.width, alignment=VECTOR_BYTES
            ](self.head + (vector + i * Self.block_size) * Self.width)
        var wide = Array[SIMD[Self.accum, Self.width], count](fill=0)
        comptime for i in range(count):
            wide[i] = raw[i].cast[Self.accum]()
        return wide^

    @inline(.always)
    def store(self, vector: Int, values: SIMD[Self.accum, Self.width]):
        """Stores one vector of probabilities."""
        var y = self.y.unsafe_offset(self.head + vector * Self.width)
        if self.aligned:
            y.unsafe_store[alignment=VECTOR_BYTES](values.cast[Self.dtype]())
        else:
            comptime for i in range(Self.width):
                y[unsafe_offset=i] = values[i].cast[Self.dtype]()

    @inline(.always)
    def load_edges(self) -> SIMD[Self.accum, Self.width]:
        """Returns this thread's elements of head and tail in the first two lanes, -inf in those that it has not.
        """
        var edges = SIMD[Self.accum, Self.width](neg_inf[Self.accum]())
        if self.thread < self.head:
            edges[0] = self.x[unsafe_offset=self.thread].cast[Self.accum]()
        if self.thread < self.tail:
            edges[1] = self.x[unsafe_offset=self._tail()].cast[Self.accum]()
        return edges

    @inline(.always)
    def store_edges(self, values: SIMD[Self.accum, Self.width]):
        """Stores the probabilities of what `load_edges` returned."""
        if self.thread < self.head:
            self.y[unsafe_offset=self.thread] = values[0].cast[Self.dtype]()
        if self.thread < self.tail:
            self.y[unsafe_offset=self._tail()] = values[1].cast[Self.dtype]()

    @inline(.always)
    def _tail(self) -> Int:
        return self.head + self.vectors * Self.width + self.thread
