"""What a warp of a grid holds of rows: units in shared memory, until it is known what their rows sum to."""

from std.sys import size_of
from max.gpu import WARP_SIZE, block_idx, grid_dim, thread_idx

from ...io.eviction import Policy
from ...io.source import RowSource
from ...io.target import RowTarget
from ...math.exponential import Scale
from ...ops.finish import Finish
from ..hardware.pair import Pair
from ..hardware.slots import Slots
from .unit import Unit, granules_of, lies
from .unit_result import factors
from .unit_sum import multiplied, UnitSum

comptime ROUNDS = 16
"""Vectors of a unit that each lane takes: a row's bits follow from it."""

comptime NO_UNIT = UInt32.MAX
"""What is said to be parked where nothing is."""


@inline(.always)
def first_unit() -> UInt32:
    """Returns which unit of a row a warp takes first: the units are spread over the GPU.
    """
    return UInt32(
        Int(thread_idx.x) // WARP_SIZE * Int(grid_dim.x) + Int(block_idx.x)
    )


struct Held[
    S: RowSource,
    T: RowTarget,
    finish: Finish,
    parked: Int,
    warps: Int,
    edged: Bool,
](Movable):
    """Units in shared memory, the oldest of which makes room for the next.

    - `S`: Where logits come from: memory, of 4 bytes or 2, maybe with a factor that is the same for all; or computed, and held in as many.
    - `T`: Where results go.
    - `finish`: What of each element is written.
    - `parked`: How many units there is room for.
    - `warps`: Warps of a block, each with room of its own.
    - `edged`: Whether rows may begin or end between two multiples of 16 bytes: with or without it results are the same.
    """

    comptime lies = lies[Self.S]()
    comptime dtype = Self.S.Line.held
    comptime scaled = Self.S.Line.scaled
    comptime U = Unit[Self.dtype, ROUNDS]
    comptime Raw = Array[Self.U.Values, ROUNDS]
    comptime Vector = SIMD[DType.float32, Self.U.width]
    comptime sums = Self.S.Line.sums
    # Sums are held as float32, whatever their elements are.
    comptime elements = Self.S.Line.elements if Self.sums else Self.dtype
    comptime exact = size_of[Self.elements]() > 2 or size_of[
        Self.T.Line.stored
    ]() > 2 or Self.S.has_sink
    # Exponentials are kept in place of the logits, unless that takes twice the room.
    comptime keeps = Self.finish == Finish.PROBABILITIES and Self.dtype == DType.float32
    comptime Sum = UnitSum[
        Self.dtype,
        ROUNDS,
        Self.exact,
        Self.keeps,
        Self.edged,
        scaled=Self.scaled,
        sums=Self.sums,
    ]
    comptime Scale = Scale[Self.exact, sums=Self.sums]

    var y: Self.T
    """Results, not in the memory of the logits."""
    var x: Self.S
    """Logits."""
    var n: Int
    """Length of each row."""
    var units: UInt32
    """How many units each of them has."""
    var aligned: Bool
    """Whether what is computed can be had by the vector."""
    var lane: Int
    """This thread's index in its warp."""
    var slots: Slots[Self.dtype, WARP_SIZE * Self.warps, Self.U.width]
    """All of the room."""
    var first: Int
    """The first slot of the oldest unit."""
    var ids: Array[UInt32, Self.parked]
    """Which units there are, counted through all rows, the oldest first, `NO_UNIT` where there is room."""
    var maxima: Array[Float32, Self.parked]
    """Their largest logits."""

    @inline(.always)
    def __init__(out self, y: Self.T, x: Self.S, n: Int, units: UInt32):
        """Nothing yet."""
        self.y = y
        self.x = x
        self.n = n
        self.units = units
        self.aligned = x.is_aligned[Self.U.width]()
        self.lane = Int(thread_idx.x) % WARP_SIZE
        self.slots = {}
        self.first = 0
        self.ids = Array[UInt32, Self.parked](fill=NO_UNIT)
        self.maxima = Array[Float32, Self.parked](fill=0)

    @inline(.always)
    def unit(self, id: UInt32) -> Self.U:
        """Returns what of a unit is this lane's."""
        var row = id // self.units
        return Self.U(
            granules_of(self.x, Int(row), self.n),
            Int(id - row * self.units),
            self.lane,
        )

    @inline(.always)
    def read[
        past_l1: Bool
    ](
        self, id: UInt32, u: Self.U, mut raw: Self.Raw, policy: Policy
    ) -> Self.U.Values:
        """Returns what `Unit.read` or `Unit.compute` does: parameters and arguments are as of these.

        - `id`: Which unit it is.
        - `u`: What of it is this lane's.
        """
        comptime if Self.lies:
            return u.read[Self.edged, past_l1=past_l1](raw, policy)
        else:
            return u.compute(self._line(id, u), self.aligned, raw)

    @inline(.always)
    def _line(self, id: UInt32, u: Self.U) -> Self.S.Line:
        """Returns the row of a unit from this lane's first granule on."""
        return self.x.line(Int(id // self.units), self.n).onwards(u.distance())

    @inline(.always)
    def factor(self) -> Float32:
        """Returns what elements are multiplied by, if they are scaled."""
        return self.x.line(0, self.n).factor()

    @inline(.always)
    def oldest(self) -> UInt32:
        """Returns which unit makes room for the next, `NO_UNIT` if there is room.
        """
        return self.ids[0]

    @inline(.always)
    def keep(mut self, raw: Self.Raw, id: UInt32, m: Float32):
        """Puts a unit in the place of the oldest.

        Args:
            raw: What `UnitSum` has made of it.
            id: Which unit it is.
            m: Its largest logit.
        """
        comptime for j in range(ROUNDS):
            self.slots.keep(self.first + j, raw[j])
        self._advance(id, m)

    @inline(.always)
    def forget(mut self):
        """Leaves the place of the oldest unit empty."""
        self._advance(NO_UNIT, 0)

    @inline(.always)
    def _advance(mut self, id: UInt32, m: Float32):
        """Makes the second oldest unit the oldest, and the oldest the last one.
        """
        comptime for i in range(Self.parked - 1):
            self.ids[i] = self.ids[i + 1]
            self.maxima[i] = self.maxima[i + 1]
        self.ids[Self.parked - 1] = id
        self.maxima[Self.parked - 1] = m
        self.first = (self.first + ROUNDS) % (Self.parked * ROUNDS)

    @inline(.always)
    def write(self, pair: Pair[]):
        """Writes the results of the oldest unit, which is there.

        Args:
            pair: That of its row.
        """
        var id = self.ids[0]
        var m = self.maxima[0]
        var u = self.unit(id)
        var row = Int(id // self.units)
        var whole = pair
        comptime if Self.S.has_sink:
            var sink = self.x.sink[1](row, 0)[0]
            whole = pair.joined[Self.exact](sink.cast[DType.float32]())
        var scale = Self.Scale(m)
        var of_row = Self.Scale(whole.m)
        comptime if Self.scaled and not Self.exact:
            of_row.slope *= self.factor()
        var last, rest = factors[
            Self.finish, Self.keeps and Self.exact, Self.keeps
        ](m, scale, of_row, whole, self.x.is_masked())

        @inline(.always)
        def finished(values: Self.U.Values, rest: Float32) {imm} -> Self.Vector:
            """Returns results of what is kept."""
            comptime if Self.finish == Finish.LOGARITHMS:
                var z = multiplied[Self.scaled](values, self.factor())
                return (rebind[Self.Vector](z) - whole.m) - last
            elif Self.keeps:
                return rebind[Self.Vector](values) * rest * last
            else:
                var z = multiplied[Self.scaled and Self.exact](
                    values, self.factor()
                )
                return rebind[Self.Vector](of_row.quick(z)) * last

        @inline(.always)
        def plain(j: Int) {imm} -> SIMD[DType.float32, Self.U.width]:
            return finished(self.slots.take(self.first + j), 1)

        @inline(.always)
        def any(j: Int) {imm} -> SIMD[DType.float32, Self.U.width]:
            return finished(self.slots.take(self.first + j), rest)

        @inline(.always)
        def some(j: Int) {imm} -> SIMD[DType.float32, Self.U.width]:
            if j < ROUNDS:
                return any(j)
            # Of the granule after the last, no slot has anything.
            var logits: Self.U.Values
            comptime if Self.lies:
                logits = u.load(j)
            else:
                logits = u.some(self._line(id, u), j)
            comptime if Self.keeps:
                return finished(self._exponentials(scale, logits), rest)
            else:
                return finished(logits, rest)

        u.store[Self.edged](
            self.y.line(row, self.n).onwards(u.distance()),
            rest == 1,
            plain,
            any,
            some,
        )

    @inline(.always)
    def keep_again(mut self, mut raw: Self.Raw, id: UInt32, m: Float32):
        """Puts a unit in the place of the oldest that is read once more: arguments are as of `keep`.

        - `raw`: Its logits.
        """
        comptime if Self.keeps:
            var scale = Self.Scale(m)
            comptime for j in range(ROUNDS):
                raw[j] = self._exponentials(scale, raw[j])
        self.keep(raw, id, m)

    @inline(.always)
    def _exponentials(
        self, scale: Self.Scale, elements: Self.U.Values
    ) -> Self.U.Values:
        """Returns e^x in a unit's scale, as `UnitSum` keeps it."""
        var z = multiplied[Self.scaled](elements, self.factor())
        return rebind[Self.U.Values](scale.quick(z))
