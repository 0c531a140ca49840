"""Shards on a CPU: by the walk that softmax takes."""

from ...cpu.operations import Operation, Place
from ...cpu.sources import Memory
from ...cpu.targets import ToMemory
from ...cpu.walk import lanes_of, walk
from ...io.rows import Rows, Source, Target
from ...math.gradient import Gradient
from ...math.online import MaxSum, accumulator
from ...queue import Queue
from .rows import Finished, Second


@fieldwise_init
struct _Second[dtype: DType, rows: SIMDLength, what: Int](Operation):
    """The second pass.

    Parameters:
        dtype: Dtype of the tensors.
        rows: How many are side by side.
        what: One of `Second`.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = Self.rows
    comptime reduces = False
    comptime State = Finished[Self.what, Self.accum, Self.lanes]

    var numbers: Source[Self.accum]
    var count: Int
    """How many rows there are."""
    var devices: Int

    @inline(.always)
    def state(
        self, total: MaxSum[Self.accum, Self.lanes], place: Place
    ) -> Self.State:
        return Self.State.of(
            self.numbers, place.row, place.count, self.count, self.devices
        )

    @inline(.always)
    def result[
        n: SIMDLength, //
    ](
        self,
        state: Self.State,
        x: SIMD[Self.accum, n],
        other: SIMD[Self.accum, n],
    ) -> SIMD[Self.accum, n]:
        return state.result(x, other)


@fieldwise_init
struct _Sums[dtype: DType, rows: SIMDLength, log: Bool](Operation):
    """What the gradients of a row's logits share.

    Parameters:
        dtype: Dtype of the tensors.
        rows: How many are side by side.
        log: Whether results are logarithms of probabilities.
    """

    comptime accum = accumulator[Self.dtype]()
    comptime lanes = Self.rows
    comptime has_max = False
    comptime by_row = True
    comptime State = Bool

    var sums: Target[Self.accum]

    @inline(.always)
    def term[
        n: SIMDLength, //
    ](
        self,
        x: SIMD[Self.accum, n],
        other: SIMD[Self.accum, n],
        origin: SIMD[Self.accum, n],
    ) -> SIMD[Self.accum, n]:
        return Gradient[Self.log, True, Self.accum, Self.lanes].term(x, other)

    @inline(.always)
    def state(
        self, total: MaxSum[Self.accum, Self.lanes], place: Place
    ) -> Self.State:
        return True

    @inline(.always)
    def finish(self, total: MaxSum[Self.accum, Self.lanes], place: Place):
        for lane in range(min(place.count, Int(Self.lanes))):
            self.sums[unsafe_offset=place.row + lane] = total.d.value[lane]


def second_on_cpu[
    dtype: DType, what: Int, contiguous: Bool
](
    result: Target[dtype],
    x: Source[dtype],
    other: Source[dtype],
    numbers: Source[accumulator[dtype]()],
    devices: Int,
    rows: Rows,
    queue: Queue,
) raises:
    """Writes what `direct.second_pass` does."""
    walk[contiguous](
        Memory[dtype, contiguous, what > Second.LOGARITHMS](x, other, rows),
        _Second[dtype, lanes_of[dtype, contiguous], what](
            numbers, rows.count(), devices
        ),
        ToMemory[dtype, contiguous](result, rows),
        rows,
        queue,
    )


def sums_on_cpu[
    dtype: DType, log: Bool, contiguous: Bool
](
    sums: Target[accumulator[dtype]()],
    y: Source[dtype],
    dy: Source[dtype],
    rows: Rows,
    queue: Queue,
) raises:
    """Writes what `direct.sums_of_shard` does."""
    walk[contiguous](
        Memory[dtype, contiguous, True](y, dy, rows),
        _Sums[dtype, lanes_of[dtype, contiguous], log](sums),
        # Nothing is written there: the operation writes what there is one of for each row.
        ToMemory[accumulator[dtype](), contiguous](sums, rows),
        rows,
        queue,
    )
