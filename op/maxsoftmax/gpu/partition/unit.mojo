"""What one lane takes of a unit of a row: what a warp holds, 16 bytes a lane at a time, without a word to anybody else.

Units have the same number of elements, counted from the row's first. Where the row begins between two multiples of 16 bytes, a unit's first granule
has elements of the unit before, and the granule after its last has elements of this one: both are the first lane's.
"""

from std.utils.numerics import neg_inf
from max.gpu import WARP_SIZE

from ...io.eviction import GONE_LAST, load_aligned, Policy
from ...io.rows import Source, VECTOR_BYTES, unseen
from ...io.source import RowSource, SourceLine
from ...io.target import TargetLine
from ..hardware.hidden import any_bits
from ..tuning import Tuned
from .granules import Granule, Granules


def unit_elements[dtype: DType](rounds: Int) -> Int:
    """Returns how many elements a unit has.

    Args:
        rounds: Vectors of it that each lane takes.
    """
    return Granules[dtype].width * WARP_SIZE * rounds


def lies[S: RowSource]() -> Bool:
    """Returns whether logits are what lies in memory, maybe times a factor and with a mask in memory; others are computed.
    """
    return (
        S.Line.in_memory
        and S.Line.elements == S.Line.held
        and not S.Line.transformed
    )


@inline(.always)
def granules_of[
    S: RowSource, //
](x: S, row: Int, n: Int) -> Granules[S.Line.held]:
    """Returns the granules of a row: where they would begin, if it is computed.

    Parameters:
        S: Where logits come from.

    Args:
        x: Logits.
        row: Which row.
        n: Length of each row.
    """
    comptime G = Granules[S.Line.held]
    comptime if lies[S]():
        return G(rebind[Source[S.Line.held]](x.address(0, n)), row, n)
    else:
        return G(Int(UInt64(x.line(row, n).place()) % UInt64(G.width)), n)


struct Unit[dtype: DType, rounds: Int](TrivialRegisterPassable):
    """What a lane has of a unit.

    - `rounds`: Vectors of a unit that each lane takes.
    """

    comptime G = Granules[Self.dtype]
    comptime Values = Granule[Self.dtype]
    comptime width = Self.G.width

    var g: Self.G
    """The row."""
    var first: Int
    """Which granule the lane's first is; the others are `WARP_SIZE` apart."""
    var left: Int32
    """Of the granules from that one on, those that do not reach beyond the row."""
    var whole: Bool
    """Whether no lane has one that does."""
    var filler: Scalar[Self.dtype]
    """What is there instead of elements where there are none."""
    var shared: Bool
    """Whether the lane's first granule has elements of the unit before, and the one after its last has elements of this one."""

    @inline(.always)
    def __init__(out self, g: Self.G, unit: Int, lane: Int):
        """A lane's part of unit `unit`."""
        self.g = g
        self.filler = neg_inf[Self.dtype]()
        self.first = unit * Self.rounds * WARP_SIZE + lane
        self.left = g.count - Int32(self.first)
        self.whole = (unit + 1) * Self.rounds * WARP_SIZE <= Int(g.count)
        self.shared = g.shift != 0 and lane == 0 and self.left >= 0

    @inline(.always)
    def distance(self) -> Int:
        """Returns which element of the row the lane's first granule begins with: before the row, a negative number.
        """
        return self.first * Self.width - Int(self.g.shift)

    @staticmethod
    @inline(.always)
    def place(j: Int) -> Int:
        """Returns how many elements after the lane's first granule its granule j is.
        """
        return j * WARP_SIZE * Self.width

    @inline(.always)
    def address(self, j: Int) -> Source[Self.dtype]:
        """Returns where the lane's granule j is."""
        return self.g.first.unsafe_offset(
            self.first * Self.width
        ).unsafe_offset(Self.place(j))

    @inline(.always)
    def has[all: Bool](self, j: Int) -> Bool:
        """Returns whether the lane's granule j is there, and does not reach beyond the row.

        Parameters:
            all: Whether all are.
        """
        return all or Int32(j * WARP_SIZE) < self.left

    @inline(.always)
    def tail_round(self) -> Int:
        """Returns which of the lane's granules reaches beyond the row, `rounds` or more if none does.
        """
        var is_mine = (
            not self.whole
            and self.left >= 0
            and self.left % Int32(WARP_SIZE) == 0
            and self.g.tail > 0
        )
        return Int(self.left) // WARP_SIZE if is_mine else Self.rounds

    @inline(.always)
    def load[told: Bool = True](self, j: Int) -> Self.Values:
        """Returns the lane's granule j, fillers for what is beyond the row.

        Parameters:
            told: As of `load_aligned`.
        """
        return self.g.load[told](self.first + j * WARP_SIZE, self.filler)

    @inline(.always)
    def read[
        edged: Bool, past_l1: Bool = False
    ](
        self,
        mut raw: Array[Self.Values, Self.rounds],
        policy: Policy = GONE_LAST,
    ) -> Self.Values:
        """Reads the lane's granules, all at once, and returns what is in the unit of the granule after the last.

        Parameters:
            edged: Whether rows may begin or end between two multiples of 16 bytes.
            past_l1: As of `load_aligned`.

        Args:
            raw: Where they go: what there is none of is left as it is, or filled up to a granule.
            policy: As of `load_aligned`, of those that do not reach beyond the row and are not computed.
        """
        self.ask[past_l1](raw, policy)
        return self.edges[edged](raw)

    @inline(.always)
    def ask[
        past_l1: Bool = False, told: Bool = True
    ](
        self,
        mut raw: Array[Self.Values, Self.rounds],
        policy: Policy = GONE_LAST,
    ):
        """Reads those of the lane's granules that do not reach beyond the row: parameters and arguments are as of `read` and `load`.
        """
        comptime for all in [True, False]:
            if self.whole == all:
                comptime for j in range(Self.rounds):
                    if self.has[all](j):
                        raw[j] = load_aligned[Self.width, past_l1, told](
                            self.address(j), policy
                        )

    @inline(.always)
    def compute[
        Line: SourceLine, //
    ](
        self,
        line: Line,
        aligned: Bool,
        mut raw: Array[Self.Values, Self.rounds],
    ) -> Self.Values:
        """Computes the lane's granules instead of reading them: `raw` and result are as of `read`.

        Parameters:
            Line: Which computes elements, held in the unit's dtype.

        Args:
            line: The row from the lane's first granule on.
            aligned: Whether granules can be had at a time.
            raw: As of `read`.
        """
        # Of the granule that begins before the row, and of those that reach beyond it, elements are computed one by one.
        var begins = self.first == 0 and self.g.shift != 0
        # What is computed in place of those that are not there: a branch for each would have them wait for each other.
        var spare = Self.width if begins else 0
        # Hidden from the compiler, which would else wait for the first granule of whole units before it asks for the others.
        var whole_spare = unseen(spare)
        var lane = Int32(self.first % WARP_SIZE)

        @inline(.always)
        def compute_granules[
            at_once: Bool, all: Bool
        ](mut raw: Array[Self.Values, Self.rounds]) {imm}:
            # Hidden, too: the compiler would find an address for each granule before it knows which of these functions needs them.
            var start = unseen(0)
            comptime for j in range(Self.rounds):
                var at: Int
                comptime if all:
                    at = whole_spare if j == 0 else Self.place(j)
                else:
                    at = self.place(j) if j > 0 and self.has[all](j) else spare
                var values = _computed[Self.dtype, Self.width, at_once](
                    line, start + at
                )
                if self.has[all](j):
                    raw[j] = values

        # Whole units go first: what the others need is then found only there.
        if Int32(Self.rounds * WARP_SIZE) <= self.left + lane and (
            aligned or Line.sums
        ):
            if aligned:
                compute_granules[True, True](raw)
            else:
                comptime if Line.sums:
                    compute_granules[False, True](raw)
        elif self.left > Int32(begins):
            if aligned:
                compute_granules[True, False](raw)
            else:
                compute_granules[False, False](raw)
        if begins:
            raw[0] = self.some(line, 0)
        if not self.whole:
            var tail_round = self.tail_round()
            if tail_round < Self.rounds and not (tail_round == 0 and begins):
                var tail = self.some(line, tail_round)
                comptime for j in range(Self.rounds):
                    if j == tail_round:
                        raw[j] = tail
        var after = Self.Values(self.filler)
        if self.shared:
            var end = self.some(line, Self.rounds)
            comptime for v in range(Self.width):
                if Int32(v) < self.g.shift:
                    after[v] = end[v]
                    raw[0][v] = self.filler
        return after

    @inline(.always)
    def some[Line: SourceLine, //](self, line: Line, j: Int) -> Self.Values:
        """Returns the lane's granule j, of which only a part may be of the row, computed one by one: arguments are as of `compute`.
        """
        var values = Self.Values(self.filler)
        var begin, end = self.of_row(j)
        comptime for v in range(Self.width):
            var i = self.place(j) + v
            if begin <= Int32(v) < end and i < line.length(Int.MAX):
                values[v] = _computed[Self.dtype, 1, False](line, i)[0]
        return values

    @inline(.always)
    def of_row(self, j: Int) -> Tuple[Int32, Int32]:
        """Returns the first element of the lane's granule j that is the row's, and the one after the last.
        """
        var index = Int32(self.first + j * WARP_SIZE)
        var end = Int32(Self.width)
        if index >= self.g.count:
            end = self.g.tail if index == self.g.count else 0
        return self.g.shift if index == 0 else 0, end

    @inline(.always)
    def edges[
        edged: Bool, told: Bool = True
    ](self, mut raw: Array[Self.Values, Self.rounds]) -> Self.Values:
        """Reads the others, of which parts are the unit's: parameters, arguments and result are as of `read` and `load`.
        """
        var after = Self.Values(self.filler)
        comptime if edged:
            # All are asked for before any is looked at, which is waited for.
            var tail_round = Self.rounds
            var tail = Self.Values(self.filler)
            if not self.whole:
                tail_round = self.tail_round()
                if tail_round < Self.rounds:
                    tail = self.load[told](tail_round)
            if self.shared:
                after = self.load[told](Self.rounds)
            if not self.whole:
                comptime for j in range(Self.rounds):
                    if j == tail_round:
                        raw[j] = tail
            if self.shared:
                comptime for v in range(Self.width):
                    if Int32(v) < self.g.shift:
                        raw[0][v] = self.filler
                    else:
                        after[v] = self.filler
        return after

    @inline(.always)
    def beside[
        Line: SourceLine,
        of: DType,
        Combined: def(
            elements: Self.Values, beside: SIMD[of, Self.width]
        ) -> Self.Values,
        //,
        edged: Bool,
    ](
        self,
        line: Line,
        mut raw: Array[Self.Values, Self.rounds],
        mut after: Self.Values,
        none: Scalar[of],
        combined: Combined,
    ):
        """Combines the lane's granules with what of a mask is beside their elements.

        Parameters:
            Line: Which has the mask.
            of: The dtype of the mask.
            Combined: Makes one of a granule of both.
            edged: As of `read`.

        Args:
            line: The row from the lane's first granule on.
            raw: The granules, as `read` reads them; those that are not there are left alone.
            after: What it returned, as well.
            none: What is beside fillers.
            combined: See `Combined`.
        """
        comptime Beside = SIMD[of, Self.width]
        comptime group = max(1, Tuned.mask_bytes // Self.width)
        # Of the granule that begins before the row, and of those that reach beyond it, masks are read by the element.
        var begins = edged and self.first == 0 and self.g.shift != 0
        comptime for aligned in [True, False]:
            if line.is_mask_aligned[of, Self.width]() == aligned:
                comptime for first in range(0, Self.rounds, group):
                    # As many at a time as there are registers for, all under way at once.
                    comptime end = min(Self.rounds, first + group)
                    var masks = Array[Beside, group](fill=none)
                    comptime for j in range(first, end):
                        if self.has[False](j) and not (j == 0 and begins):
                            masks[j - first] = line.mask_of[
                                of, Self.width, aligned
                            ](self.place(j))
                    comptime if of == DType.uint8:
                        # Often nothing is hidden. Nor is anything where no granule is, and one branch costs less than one for each: of bfloat16 1024×128256
                        # takes 231 µs, with eight 280 (H100).
                        var hides = Beside(0)
                        comptime for j in range(group):
                            hides |= masks[j] ^ none
                        if any_bits(hides):
                            comptime for j in range(first, end):
                                raw[j] = combined(raw[j], masks[j - first])
                    else:
                        comptime for j in range(first, end):
                            if self.has[False](j) and not (j == 0 and begins):
                                raw[j] = combined(raw[j], masks[j - first])
        comptime if edged:
            if begins:
                raw[0] = combined(raw[0], self._mask(line, 0, none))
            if self.shared:
                after = combined(after, self._mask(line, Self.rounds, none))
            var tail_round = self.tail_round()
            if tail_round < Self.rounds and not (tail_round == 0 and begins):
                var mask = self._mask(line, tail_round, none)
                comptime for j in range(Self.rounds):
                    if j == tail_round:
                        raw[j] = combined(raw[j], mask)

    @inline(.always)
    def _mask[
        Line: SourceLine, of: DType, //
    ](self, line: Line, j: Int, none: Scalar[of]) -> SIMD[of, Self.width]:
        """Returns the mask of the lane's granule j, of which only a part may be of the row: arguments are as of `beside`.
        """
        var begin, end = self.of_row(j)
        var values = SIMD[of, Self.width](none)
        comptime for v in range(Self.width):
            if begin <= Int32(v) < end:
                values[v] = line.mask_of[of, 1, True](self.place(j) + v)[0]
        return values

    @inline(.always)
    def make[
        Of: def(values: Self.Values, there: Bool) -> Self.Values
    ](self, mut raw: Array[Self.Values, Self.rounds], of: Of):
        """Makes something else of the lane's granules, fillers in them included.

        Parameters:
            Of: Returns what is made of a granule; the same, if it is not there.

        - `raw`: The granules, as `read` reads them.
        """
        var reach = self.left + Int32(self.g.tail > 0)
        comptime for j in range(Self.rounds):
            raw[j] = of(raw[j], Int32(j * WARP_SIZE) < reach)

    @inline(.always)
    def store[
        Line: TargetLine,
        //,
        edged: Bool,
        Plain: def(j: Int) -> SIMD[DType.float32, Self.width],
        Any: def(j: Int) -> SIMD[DType.float32, Self.width],
        Some: def(j: Int) -> SIMD[DType.float32, Self.width],
    ](self, target: Line, are_plain: Bool, plain: Plain, any: Any, some: Some):
        """Stores results of the lane's granules.

        Parameters:
            Line: Where they go.
            edged: As of `read`.
            Plain: Returns those of granule j, if `are_plain`.
            Any: Returns those of granule j.
            Some: Returns those of granule j, which others may have a part of, and which may not be in the lane's registers.

        - `target`: Where those of the lane's first granule go.
        """
        var aligned = target.is_aligned[Self.width]()
        if self.whole and aligned and are_plain:
            comptime for j in range(Self.rounds):
                if not (edged and j == 0 and self.shared):
                    target.store[True](self.place(j), plain(j))
        else:
            comptime for j in range(Self.rounds):
                if self.has[False](j) and not (
                    edged and j == 0 and self.shared
                ):
                    if aligned:
                        target.store[True](self.place(j), any(j))
                    else:
                        target.store[False](self.place(j), any(j))

        @inline(.always)
        def store_some(j: Int, begin: Int32, end: Int32) {imm}:
            """Stores some results of the lane's granule j."""
            var all = some(j)
            comptime for v in range(Self.width):
                if begin <= Int32(v) < end:
                    target.store[True](
                        self.place(j) + v, SIMD[DType.float32, 1](all[v])
                    )

        comptime if edged:
            if self.shared:
                store_some(
                    0,
                    self.g.shift,
                    Int32(Self.width) if self.left > 0 else self.g.tail,
                )
                comptime beyond = Int32(Self.rounds * WARP_SIZE)
                if self.left >= beyond:
                    store_some(
                        Self.rounds,
                        0,
                        self.g.shift if self.left
                        > beyond else min(self.g.shift, self.g.tail),
                    )
            if not self.whole:
                var tail_round = self.tail_round()
                if tail_round < Self.rounds and not (
                    self.shared and tail_round == 0
                ):
                    store_some(tail_round, 0, self.g.tail)


@inline(.always)
def _computed[
    Line: SourceLine, //, dtype: DType, width: Int, at_once: Bool
](line: Line, i: Int) -> SIMD[dtype, width]:
    """Returns logits that are computed, from element `i` on.

    Parameters:
        Line: Which computes them, held in `dtype`.
        dtype: What they are had as.
        width: How many.
        at_once: Whether they are aligned.

    Args:
        line: The row.
        i: The first.
    """
    comptime if at_once:
        return rebind[SIMD[dtype, width]](line.load[width](i))
    else:
        return rebind[SIMD[dtype, width]](line.load_from_any[width](i))
