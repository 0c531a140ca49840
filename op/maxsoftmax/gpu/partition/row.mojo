"""What one thread takes of a row that a team shares, read and written 16 bytes at a time.

The blocks of a cluster take the elements from multiples of some number of vectors on, counted from the row's start. The threads of a block take
the vectors of their block's elements in turn, so that neighbours read neighbours.

Vectors begin at multiples of 16 bytes, elements may begin between two of them. What is before the first vector, the head, belongs
into the last lanes of the vector that the last thread would take a round before the first, and what is after the last one, the tail, into the first
lanes of the vector that follows: so each lane of each thread has one chain, as elements are called whose indices, counted from the block's first,
differ by multiples of a round's. Where the first vector begins some elements further on, other lanes have the same chains, and `Handover.total` finds them.
Head and tail are read and written by one lane an element, of the warp that they belong to.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import inlined_assembly, is_nvidia_gpu, size_of
from std.utils.numerics import neg_inf
from max.gpu import WARP_SIZE

from ...io.rows import Rows, VECTOR_BYTES
from ...io.memory import MemorySource, MemoryTarget
from ...io.source import RowSource
from ...io.target import RowTarget
from ...io.widening import widened
from ..hardware.hidden import any_bits, hidden
from ..tuning import Tuned

comptime LINE_BYTES = 128
"""What the GPU's caches move at most at a time."""


struct Part[
    S: RowSource, T: RowTarget, team: Int, width: Int, edged: Bool = True
](TrivialRegisterPassable):
    """The vectors and the elements of both edges of a row that are this thread's.

    - `S`: Where elements come from. A vector begins where that of its elements does, or would in memory.
    - `team`: Threads of a block that share a row.
    - `width`: Elements a vector; where it is 1 there are no edges.
    - `edged`: Whether rows may begin or end between two vectors.
    """

    comptime peeled = Self.edged and Self.width > 1
    comptime Raw = SIMD[Self.S.Line.held, Self.width]
    comptime lanes = min(Self.team, WARP_SIZE)
    """Lanes of a warp that share a row."""
    comptime of_edges = ceildiv(2 * Self.width, Self.lanes)
    """Elements of edges that one of them takes at most."""
    comptime Edges = SIMD[DType.float32, Self.of_edges]
    """A number for each of them."""
    comptime AskedEdges = SIMD[Self.S.Line.held, Self.of_edges]
    """The elements themselves."""
    comptime branchless = Self.of_edges <= 2
    """Whether edges are best read and written without a branch around it: it would keep large blocks waiting. What tiny teams do for their many
    elements of edges is better left out."""

    var source: Self.S.Line
    """The row from this thread's first vector on."""
    var target: Self.T.Line
    """Where its results go."""
    var count: Int32
    """Vectors of the block."""
    var ahead: Int32
    """How many of them are not before this thread's first."""
    var whole: Bool
    """Whether all of what the block has of the row takes part."""
    var read: Int32
    """How many vectors of the block have anything that takes part: fewer, where a row ends before the tensor does."""
    var reach: Int32
    """How many of them are not before this thread's first."""
    var edges: UInt32
    """How far the block's first vector is from its first element, and the lengths of head and tail, 8 bits each."""
    var aligned: Bool
    """Whether the vectors of y are aligned."""

    @inline(.always)
    def __init__(
        out self,
        y: Self.T,
        x: Self.S,
        row: Int,
        n: Int,
        lane: Int,
        begin: Int,
        length: Int,
    ):
        """A thread's part of row `row`.

        - `begin`: The block's first element of the row, a multiple of `width`.
        - `length`: How many it has.
        """
        # What a block has is counted in 32 bits: the first load waits for all of this.
        comptime lanes = UInt32(Self.width)
        var source = x.line(row, n)
        var target = y.line(row, n)
        var before = UInt32(0)
        comptime if Self.peeled:
            before = (0 - UInt32(Self._place(source))) % lanes
        var head = min(before, UInt32(length))
        var body = UInt32(length) - head
        var count = body // lanes
        var tail = body % lanes
        var first = begin + Int(before)
        var start = first + lane * Self.width
        self.count = Int32(count)
        self.ahead = self.count - Int32(lane)
        self.read = self.count
        self.whole = True
        comptime if Self.S.is_causal:
            var taking = source.length(n)
            self.whole = taking >= begin + length
            self.read = Int32(
                max(0, min(Int(count), ceildiv(taking - first, Self.width)))
            )
        self.reach = self.read - Int32(lane)
        self.source = source.onwards(start)
        self.target = target.onwards(start)
        self.aligned = self.target.is_aligned[Self.width]()
        self.edges = before | head << 8 | tail << 16

    @staticmethod
    @inline(.always)
    def of_share(
        y: Self.T,
        x: Self.S,
        row: Int,
        n: Int,
        lane: Int,
        rank: Int,
        share: Int,
    ) -> Self:
        """Returns a thread's part of row `row`, which several blocks share.

        - `rank`: The block's, among those that share the row.
        - `share`: As many vectors' elements each of them takes, as long as there are any.
        """
        var begin = rank * share * Self.width
        var length = max(0, min(n - begin, share * Self.width))
        return Self(y, x, row, n, lane, begin, length)

    @inline(.always)
    def clear(mut self):
        """Makes it a part of nothing."""
        self.ahead -= self.count
        self.count = 0
        self.read = 0
        self.reach = self.ahead
        self.edges = 0

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

    @inline(.always)
    def is_cut(self, i: Int) -> Bool:
        """Returns whether this thread's vector `i` may have anything that takes no part, where the block has.
        """
        return Int32(i * Self.team) + 1 >= self.reach

    @staticmethod
    @inline(.always)
    def place(i: Int) -> Int:
        """Returns how many elements after a thread's first vector its vector `i` is.
        """
        return i * Self.team * Self.width

    @inline(.always)
    def load[aligned: Bool = True](self, i: Int) -> Self.Raw:
        """Returns this thread's vector `i`, as it is kept.

        Parameters:
            aligned: Whether it can be read at a time; of logits in memory it always can.
        """
        comptime if aligned:
            return self.source.load[Self.width](self.place(i))
        else:
            return self.source.load_from_any[Self.width](self.place(i))

    @inline(.always)
    def ask[count: Int](self, first: Int) -> Array[Self.Raw, count]:
        """Returns `count` of this thread's vectors from `first` on, of logits in memory; 0 for those that it has not.
        """
        var raw = Array[Self.Raw, count](fill=Self.Raw(0))
        comptime for j in range(count):
            if self.has(first + j):
                raw[j] = self.load(first + j)
        return raw^

    @inline(.always)
    def rewrite[
        count: Int,
        //,
        Result: def(SIMD[DType.float32, Self.width]) -> SIMD[
            DType.float32, Self.width
        ],
    ](self, var raw: Array[Self.Raw, count], result: Result):
        """Stores what becomes of all of this thread's vectors, while as many as are looked at are on their way.

        Parameters:
            count: How many that is.
            Result: Returns what becomes of elements.

        Args:
            raw: The first, from `ask`: early, as they may be on their way while others are.
            result: As said.
        """
        comptime for aligned in [True, False]:
            if self.aligned == aligned:
                for i in range(0, self.rounds() + 1, count):
                    var following = self.ask[count](i + count)
                    comptime for j in range(count):
                        if self.has(i + j):
                            self.store[aligned](i + j, result(widened(raw[j])))
                    raw = following^

    @inline(.always)
    def logits(self, i: Int, kept: Self.Raw) -> SIMD[DType.float32, Self.width]:
        """Returns the logits of this thread's vector `i`, of which `kept` is what was loaded.
        """
        return self.source.logits(self.place(i), kept).cast[DType.float32]()

    @inline(.always)
    def hide[
        count: Int
    ](self, places: Array[Int, count], mut kept: Array[Self.Raw, count]):
        """Makes -inf of what a mask hides of vectors, and of what takes no part.

        - `places`: Which of this thread's vectors they are.
        - `kept`: The vectors, as they were loaded.
        """
        comptime Bytes = SIMD[DType.uint8, Self.width]
        comptime group = max(1, Tuned.mask_bytes // Self.width)
        comptime for aligned in [False, True]:
            if (
                self.source.is_mask_aligned[DType.uint8, Self.width]()
                == aligned
            ):
                comptime for first in range(0, count, group):
                    comptime end = min(count, first + group)
                    var masks = Array[Bytes, group](fill=1)
                    comptime for j in range(first, end):
                        if self.reads(places[j]):
                            masks[j - first] = self.source.mask_of[
                                DType.uint8, Self.width, aligned
                            ](self.place(places[j]))
                    # Often nothing is hidden; and as all of them are asked, all are under way at once.
                    var hides = Bytes(0)
                    comptime for j in range(group):
                        hides |= masks[j] ^ 1
                    if any_bits(hides):
                        comptime for j in range(first, end):
                            kept[j] = hidden(kept[j], masks[j - first])
        if not self.whole:
            comptime for j in range(count):
                if self.is_cut(places[j]):
                    kept[j] = self.source.limited(
                        self.place(places[j]), kept[j]
                    )

    @inline(.always)
    def store[
        aligned: Bool
    ](self, i: Int, values: SIMD[DType.float32, Self.width]):
        """Stores this thread's vector `i` of results.

        Parameters:
            aligned: Whether it is in whole vectors, which is for the caller to look at: outside of its loops.
        """
        self.target.store[aligned](self.place(i), values)

    @staticmethod
    @inline(.always)
    def _place(source: Self.S.Line) -> UInt64:
        """Returns the address, in elements, that says where vectors begin."""
        comptime if Self.S.Line.in_memory:
            # Unsigned, so that a division is a shift: the first load waits for all of this.
            return UInt64(Int(source.address(0))) // UInt64(
                size_of[Self.S.Line.elements]()
            )
        else:
            return UInt64(source.place())

    @staticmethod
    @inline(.always)
    def uneven(x: Self.S, n: Int) -> Bool:
        """Returns whether any row may have edges: the same for all threads."""
        comptime if not Self.peeled:
            return False
        var first_row = Self._place(x.line(0, n))
        return (first_row | UInt64(n)) % UInt64(Self.width) != 0

    @inline(.always)
    def before(self) -> Int32:
        """Returns how far the block's first vector is from its first element.
        """
        return Int32(self.edges & 255)

    @inline(.always)
    def tail_thread(self) -> Int:
        """Returns which thread would have the vector after the last one."""
        return Int(UInt32(self.count) % UInt32(Self.team))

    @inline(.always)
    def edge(self, i: Int) -> Int:
        """Returns which of the 2 · `width` lanes of the vectors of head and tail this thread's `i`-th is.
        """
        return Int(self.count - self.ahead) % Self.lanes + i * Self.lanes

    @inline(.always)
    def has_edge(self, i: Int) -> Bool:
        """Returns whether there is an element in that lane, of this thread's warp.
        """
        var edge = self.edge(i)
        var group = Int(self.count - self.ahead) // Self.lanes
        if edge < Self.width:
            var at = UInt32(edge - Self.width) + UInt32(self.before())
            return group == Self.team // Self.lanes - 1 and at < (
                self.edges >> 8 & 255
            )
        return (
            group == self.tail_thread() // Self.lanes
            and UInt32(edge - Self.width) < self.edges >> 16
        )

    @inline(.always)
    def edge_place(self, i: Int) -> Int:
        """Returns how many elements after this thread's first vector that lane is.
        """
        var edge = self.edge(i) - Self.width
        var lane = Int(self.count - self.ahead)
        return edge + (Int(self.ahead) if edge >= 0 else -lane) * Self.width

    @inline(.always)
    def load_edges(
        self, filler: Float32 = neg_inf[DType.float32]()
    ) -> Self.Edges:
        """Returns this thread's logits of head and tail, `filler` where it has none.
        """
        var values = Self.Edges(filler)
        comptime for i in range(Self.of_edges if Self.peeled else 0):
            if self.has_edge(i):
                var at = self.edge_place(i)
                var kept = self.source.with_sign(self.source.load[1](at))
                kept = self.source.limited(at, kept)
                comptime if Self.S.Line.hidden:
                    kept = hidden(
                        kept, self.source.mask_of[DType.uint8, 1, True](at)
                    )
                values[i] = self.source.logits(at, kept).cast[DType.float32]()[
                    0
                ]
        return values

    @inline(.always)
    def ask_edges(self) -> Self.AskedEdges:
        """Returns this thread's elements of head and tail of a row in memory, as they lie there, 0 where it has none. `edges_of` widens them: in the branch that loads them, elements of 16 bits would be
        waited for before others are asked for. 50257 columns' gradients of softmax took 215 µs, not 188, and of log_softmax 224, not 191, by the same instructions but for
        that (bfloat16, 8e8 bytes, H200).
        """
        var asked = Self.AskedEdges(0)
        comptime for i in range(Self.of_edges if Self.peeled else 0):
            if self.has_edge(i):
                asked[i] = self.source.load[1](self.edge_place(i))[0]
        return asked

    @staticmethod
    @inline(.always)
    def edges_of(asked: Self.AskedEdges) -> Self.Edges:
        """Returns what `ask_edges` did as numbers: each time that they are needed, so that the compiler does not compute them where they are loaded.
        """
        comptime held = Self.S.Line.held
        comptime if is_nvidia_gpu() and size_of[held]() * Self.of_edges == 2:
            return bitcast[held, Self.of_edges](
                inlined_assembly["mov.b16 $0, $1;", UInt16, constraints="=h,h"](
                    bitcast[DType.uint16, 1](asked[0])
                )
            ).cast[DType.float32]()
        else:
            return again(asked).cast[DType.float32]()

    @inline(.always)
    def store_edges(self, values: Self.Edges):
        """Stores the results of what `load_edges` returned."""
        comptime for i in range(Self.of_edges if Self.peeled else 0):
            if self.has_edge(i):
                self.target.store[True](
                    self.edge_place(i), SIMD[DType.float32, 1](values[i])
                )


comptime MemoryPart[
    dtype: DType,
    team: Int,
    width: Int = VECTOR_BYTES // size_of[dtype](),
    edged: Bool = True,
    outlasts: Bool = True,
] = Part[MemorySource[dtype, outlasts], MemoryTarget[dtype], team, width, edged]
"""A part of a row in memory, whose results go to memory."""

comptime LossPart[dtype: DType, team: Int] = MemoryPart[
    dtype, team, outlasts=size_of[dtype]() > 2
]
"""The same, of logits of which gradients of a loss are made. 8192×128256 of bfloat16 take 1620 µs with their losses, and 1641 where the L2 is told to give up
gradients first; 8192×32000 of float32 796 and 774 (H200)."""


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
def product[
    width: SIMDLength, //
](a: SIMD[DType.float32, width], b: SIMD[DType.float32, width]) -> SIMD[
    DType.float32, width
]:
    """Returns a · b, rounded: the assembler makes it no part of an addition, here or there, whose bits would be others.
    """
    comptime if is_nvidia_gpu():
        var result = a
        comptime for i in range(Int(width)):
            result[i] = inlined_assembly[
                "mul.rn.f32 $0, $1, $2;",
                Float32,
                constraints="=f,f,f",
                has_side_effect=False,
            ](a[i], b[i])
        return result
    else:
        return a * b


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


def vector_width[elements: DType, in_memory: Bool, stored: DType]() -> Int:
    """Returns how many elements are best taken at a time, or elements of neighbouring rows along another axis than the last: what has 16 bytes in memory,
    or as results, which are no more for float8 than for 16 bits, as 16 accumulators would be more registers than there are.

    - `elements`: Dtype of the logits.
    - `in_memory`: Whether they lie in memory.
    - `stored`: Dtype of the results.
    """
    return VECTOR_BYTES // (
        size_of[elements]() if in_memory else max(2, size_of[stored]())
    )


def whole_vectors[
    S: RowSource, T: RowTarget, //, width: Int
](y: T, x: S, rows: Rows) -> Bool:
    """Returns whether rows can be read and written by vectors of `width`."""
    return reads_vectors[width](x, rows) and y.in_vectors[width]()


def reads_vectors[S: RowSource, //, width: Int](x: S, rows: Rows) -> Bool:
    """Returns whether rows can be read by vectors of `width`."""
    return rows.n % width == 0 and x.in_vectors[width]()
