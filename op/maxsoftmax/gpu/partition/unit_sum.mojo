"""What a unit of a row sums to: its largest logit, and the sum of its exponentials, of a warp that holds it in registers."""

from std.memory import bitcast
from max.gpu import WARP_SIZE

from ...io.widening import widened
from ...math.exponential import Scale
from ...math.online import Sum
from ..hardware.packed import Packed
from ..hardware.team import largest_lane, largest_of_lanes, maximum, total
from ..hardware.warp_reduction import lanes_reduce
from .pair import add
from .granules import caught_up, turned
from .row import again, product
from .unit import Unit

comptime TOGETHER = 4
"""Vectors whose exponentials are added up before they are added to a lane's sum."""


struct UnitSum[
    dtype: DType,
    rounds: Int,
    exact: Bool,
    keeps: Bool,
    edged: Bool,
    packs: Bool = False,
    scaled: Bool = False,
    sums: Bool = False,
](Movable):
    """What a unit sums to, and what is kept of its exponentials.

    - `exact`: Of the scale of the sum.
    - `keeps`: Whether exponentials take the place of logits, of float32.
    - `edged`: As of `Unit.read`.
    - `packs`: Whether they are kept beside the logits, in three bytes each.
    - `scaled`: Whether logits are what is read times a factor.
    - `sums`: Of the scale of the sum.
    """

    comptime U = Unit[Self.dtype, Self.rounds]
    comptime width = Self.U.width
    comptime Vector = SIMD[DType.float32, Self.width]

    var m: Float32
    """The largest logit."""
    var d: Float32
    """The sum of exponentials, in the scale of m."""
    var scale: Scale[Self.exact, sums=Self.sums]
    """This scale."""
    var packed: Array[Packed[Self.width], Self.rounds if Self.packs else 1]
    """Exponentials, if they are packed."""

    @inline(.always)
    def __init__(
        out self,
        u: Self.U,
        mut raw: Array[Self.U.Values, Self.rounds],
        var after: Self.U.Values,
        lane: Int,
        zero: UInt32,
        factor: Float32 = 1,
    ):
        """Sums up a unit, in the order of the elements, whatever lane has them.

        Args:
            u: What of the unit is this lane's.
            raw: What is read, as `Unit.read` does, or made of it by `Unit.make`.
            after: What it returns.
            lane: This thread's index in its warp.
            zero: What nobody but the caller knows to be 0.
            factor: What they are multiplied by, no negative number, if they are `scaled`.
        """
        comptime F = DType.float32
        var largest = after
        comptime for j in range(Self.rounds):
            largest = maximum(largest, raw[j])
        self.m = largest_of_lanes[WARP_SIZE](largest_lane(largest).cast[F]())
        comptime if Self.scaled:
            self.m *= factor
        self.scale = Scale[Self.exact, sums=Self.sums](self.m)
        comptime if Self.scaled and not Self.exact:
            self.scale.slope *= factor
        # Where exponentials replace the logits, those of the next vector are found first: of the first lane they are a part of this one.
        var sum = Sum[F, Self.width]()
        self.packed = Array[
            Packed[Self.width], Self.rounds if Self.packs else 1
        ](fill=Packed[Self.width]())
        var scale = self.scale
        var behind = u.g.behind(lane)

        @inline(.always)
        def exponentials(values: Self.U.Values) {imm} -> Self.Vector:
            """Returns e^x in the unit's scale."""
            return rebind[Self.Vector](
                scale.quick(
                    multiplied[Self.scaled and Self.exact](values, factor)
                )
            )

        comptime if Self.keeps:
            raw[0] = rebind[Self.U.Values](exponentials(raw[0]))
        comptime for k in range(0, Self.rounds, TOGETHER):
            var terms = Self.Vector(0)
            comptime for j in range(k, min(k + TOGETHER, Self.rounds)):
                comptime if Self.keeps and j + 1 < Self.rounds:
                    raw[j + 1] = rebind[Self.U.Values](exponentials(raw[j + 1]))
                elif Self.keeps and Self.edged:
                    after = rebind[Self.U.Values](exponentials(after))
                var e: Self.Vector
                comptime if Self.keeps:
                    e = rebind[Self.Vector](raw[j])
                    comptime if Self.edged:
                        e = rebind[Self.Vector](
                            caught_up(
                                raw[j],
                                raw[j + 1] if j + 1 < Self.rounds else after,
                                behind,
                            )
                        )
                else:
                    # What is computed of the logits later is not to be kept instead.
                    var logits = again(raw[j])
                    comptime if Self.edged:
                        # In shorter types the logits are what is put together.
                        logits = caught_up(
                            logits,
                            raw[j + 1] if j + 1 < Self.rounds else after,
                            behind,
                        )
                    e = exponentials(logits)
                    comptime if Self.packs:
                        self.packed[j] = Packed[Self.width](e)
                        comptime if Self.edged:
                            if u.g.shift != 0:
                                self.packed[j] = Packed[Self.width](
                                    exponentials(again(raw[j]))
                                )
                terms = e if j == k else terms + e
            add[Self.exact](sum, terms)
            # Exponentials wait for those before them, which the assembler does not see: all at once are more than it has registers for.
            scale.intercept = bitcast[F](
                bitcast[DType.uint32](scale.intercept)
                ^ (bitcast[DType.uint32](terms[0]) & zero)
            )
        self.scale = scale
        var chains = sum.value - sum.excess
        comptime if Self.edged:
            chains = turned[WARP_SIZE](chains, u.g.shift, lane)
        self.d = lanes_reduce[total](chains.reduce_add()) * scale.quick_factor()


@inline(.always)
def multiplied[
    dtype: DType, width: SIMDLength, //, scaled: Bool
](elements: SIMD[dtype, width], factor: Float32) -> SIMD[DType.float32, width]:
    """Returns elements, times a factor, rounded, if they are `scaled`."""
    var values = widened(elements)
    comptime if scaled:
        return product(values, SIMD[DType.float32, width](factor))
    return values
