"""What is computed as it is read, on a CPU, of rows in which nothing takes part: probabilities of 0, and logarithms of that.
"""

from std.math import exp, log
from std.testing import TestSuite, assert_almost_equal, assert_equal
from std.utils import IndexList
from std.utils.numerics import neg_inf
from max.gpu.host import DeviceContext
from extensibility.managed_tensor_slice import InputFusion, OutputFusion

from maxsoftmax import Cpu
from maxsoftmax.io.logits import Logits
from maxsoftmax.io.results import Results
from maxsoftmax.io.rows import Rows, Source
from maxsoftmax.ops.finish import Finish

comptime F = DType.float32


@fieldwise_init
struct Halved(InputFusion, TrivialRegisterPassable):
    """What MAX would write for logits that are half of what lies in memory."""

    var memory: Source[F]
    """Where that is: row-major, of three dimensions."""
    var shape: IndexList[3]
    """Its shape."""

    @inline(.always)
    def load[
        dtype: DType, rank: Int, simd_width: Int, element_alignment: Int = 1
    ](self, idx: IndexList[rank]) -> SIMD[dtype, simd_width]:
        """Returns logits along the last axis."""
        var place = (idx[0] * self.shape[1] + idx[1]) * self.shape[2] + idx[2]
        return rebind[SIMD[dtype, simd_width]](
            self.memory.unsafe_load[width=simd_width, alignment=4](place) / 2
        )


@fieldwise_init
struct Nothing(OutputFusion, TrivialRegisterPassable):
    """Results go to memory."""

    @inline(.always)
    def store[
        dtype: DType,
        rank: Int,
        simd_width: SIMDLength,
        element_alignment: Int = 1,
    ](self, idx: IndexList[rank], value: SIMD[dtype, simd_width]):
        """Takes nothing."""
        pass


def check[axis: Int, finish: Finish](n: Int) raises:
    """Compares three rows along an axis: one of nothing but -inf, and one that has it in places.
    """
    comptime others = 3
    var shape = IndexList[3](
        2, n if axis == 1 else others, n if axis == 2 else others
    )
    var x = List[Float32](length=2 * n * others, fill=0)
    var y = List[Float32](length=2 * n * others, fill=7)

    def at(outer: Int, row: Int, i: Int) {imm} -> Int:
        comptime if axis == 1:
            return (outer * n + i) * others + row
        else:
            return (outer * others + row) * n + i

    for outer in range(2):
        for i in range(n):
            x[at(outer, 0, i)] = Float32((i * 7919 + outer) % 100) / 10
            x[at(outer, 1, i)] = neg_inf[F]()
            x[at(outer, 2, i)] = neg_inf[F]() if i % 3 == 1 else Float32(i % 5)
    var memory = x.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var load = Halved(memory.unsafe_mut_cast[False](), shape)
    Cpu.fused[has_sink=False, finish=finish](
        Results[Nothing, F, 3, axis, False](
            Nothing(),
            y.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
            shape,
        ),
        Logits[Halved, F, 3, axis, False](load, shape, True),
        Logits[Halved, F, 3, axis, False](load, shape, True),
        Rows.of[axis](shape),
        DeviceContext(api="cpu"),
    )
    for outer in range(2):
        for row in range(others):
            var sum = Float64(0)
            for i in range(n):
                sum += exp(Float64(x[at(outer, row, i)]) / 2)
            for i in range(n):
                var logit = Float64(x[at(outer, row, i)]) / 2
                var found = Float64(y[at(outer, row, i)])
                comptime if finish == Finish.LOGARITHMS:
                    if logit == neg_inf[DType.float64]():
                        assert_equal(found, logit)
                    else:
                        assert_almost_equal(
                            found, logit - log(sum), atol=1e-5, rtol=1e-6
                        )
                else:
                    var expected = Float64(0) if row == 1 else exp(logit) / sum
                    assert_almost_equal(found, expected, atol=1e-30, rtol=1e-5)
    _ = x^
    _ = y^


def test_rows_of_nothing() raises:
    for n in [1, 3, 40, 500, 5000, 70_001]:
        comptime for axis in [1, 2]:
            comptime for finish in [Finish.PROBABILITIES, Finish.LOGARITHMS]:
                check[axis, finish](n)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
