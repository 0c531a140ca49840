"""The GPU kernels of softmax's relatives and gradients at the edges of every choice, against the CPU's."""

from std.testing import TestSuite, assert_true
from max.gpu.host import DeviceBuffer, DeviceContext

from maxsoftmax import Cpu, Gpu
from maxsoftmax.ops.finish import Finish
from maxsoftmax.math.loss import LossOptions, Reduction, Targets
from maxsoftmax.math.online import accumulator
from maxsoftmax.ops.sparsemax import sparsemax, sparsemax_backward
from maxsoftmax.io.rows import Rows, Source, Target


struct Tensor[dtype: DType](Movable):
    """A buffer on each side, the GPU's starting `offset` elements after an aligned address.
    """

    var device: DeviceBuffer[Self.dtype]
    var host: List[Scalar[Self.dtype]]
    var offset: Int

    def __init__(out self, size: Int, offset: Int, ctx: DeviceContext) raises:
        """Memory that a kernel is to write: it holds -7."""
        self.device = ctx.enqueue_create_buffer[Self.dtype](size + offset)
        self.device.enqueue_fill(-7)
        self.host = List[Scalar[Self.dtype]](length=size, fill=-7)
        self.offset = offset

    def fill(mut self, prime: Int, low: Float32, high: Float32) raises:
        """Puts the same values between `low` and `high` into both."""
        with self.device.map_to_host() as values:
            for i in range(len(self.host)):
                var share = Float32((i * prime) % 1009) / 1008
                self.host[i] = (low + (high - low) * share).cast[Self.dtype]()
                values[i + self.offset] = self.host[i]

    def there(mut self) -> Target[Self.dtype]:
        return (
            self.device.unsafe_ptr()
            .unsafe_origin_cast[MutUntrackedOrigin]()
            .unsafe_offset(self.offset)
        )

    def here(mut self) -> Target[Self.dtype]:
        return self.host.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()

    def compare(
        mut self, relative: Float64, absolute: Float64, what: String
    ) raises:
        """Asserts that both hold the same, up to rounding."""
        with self.device.map_to_host() as values:
            for i in range(len(self.host)):
                var a = values[i + self.offset].cast[DType.float64]()
                var b = self.host[i].cast[DType.float64]()
                if not abs(a - b) <= relative * abs(b) + absolute:
                    print(t"{what} offset {self.offset} at {i}: {a}, not {b}")
                    assert_true(False)


def check[
    dtype: DType, contiguous: Bool
](rows: Rows, device: DeviceContext, host: DeviceContext) raises:
    """Compares every kernel of these rows."""
    comptime accum = accumulator[dtype]()
    comptime fine = 1e-13 if dtype == DType.float64 else 1e-6
    comptime step = fine if dtype.is_floating_point() and accum == dtype else 9e-3
    var size = rows.count() * rows.n
    for offset in [0, 1]:
        var name = String(
            t"{dtype} rows {rows.count()} n {rows.n} inner {rows.inner}"
        )
        var x = Tensor[dtype](size, offset, device)
        var dy = Tensor[dtype](size, offset, device)
        x.fill(7919, -5, 5)
        dy.fill(104729, -1, 2)

        var y = Tensor[dtype](size, 0, device)
        Gpu.auto[dtype, Finish.LOGARITHMS, contiguous](
            y.there(), x.there(), rows, device
        )
        Cpu.auto[dtype, Finish.LOGARITHMS, contiguous](
            y.here(), x.here(), rows, host
        )
        y.compare(step, fine, "log_softmax " + name)

        sparsemax["gpu", contiguous](y.there(), x.there(), rows, device)
        sparsemax["cpu", contiguous](y.here(), x.here(), rows, host)
        y.compare(step, fine, "sparsemax " + name)
        # Of so many that are near the maximum, all are above the threshold.
        var near = Tensor[dtype](size, offset, device)
        near.fill(7919, 0, 0.5 / Float32(rows.n))
        sparsemax["gpu", contiguous](y.there(), near.there(), rows, device)
        sparsemax["cpu", contiguous](y.here(), near.here(), rows, host)
        y.compare(step, fine / Float64(rows.n), "sparsemax near " + name)
        _ = near^
        var chosen = Tensor[dtype](size, offset, device)
        chosen.fill(7919, -2, 1)
        sparsemax_backward["gpu", contiguous](
            y.there(), chosen.there(), dy.there(), rows, device
        )
        sparsemax_backward["cpu", contiguous](
            y.here(), chosen.here(), dy.here(), rows, host
        )
        y.compare(step, 4 * fine, "sparsemax_backward " + name)
        _ = chosen^

        var pairs = Tensor[accum](2 * rows.count(), 0, device)
        Gpu.auto[dtype, Finish.PAIR, contiguous](
            pairs.there().unsafe_bitcast[Scalar[dtype]](),
            x.there(),
            rows,
            device,
        )
        Cpu.auto[dtype, Finish.PAIR, contiguous](
            pairs.here().unsafe_bitcast[Scalar[dtype]](), x.here(), rows, host
        )
        pairs.compare(2e-5 if accum != dtype else fine, 0, "max_sum " + name)

        comptime for log in [False, True]:
            var results = Tensor[dtype](size, offset, device)
            comptime if log:
                results.fill(7919, -9, 0)
            else:
                results.fill(7919, 0, 1)
            var dx = Tensor[dtype](size, 0, device)
            Gpu.backward[dtype, log, contiguous](
                dx.there(), results.there(), dy.there(), rows, device
            )
            Cpu.backward[dtype, log, contiguous](
                dx.here(), results.here(), dy.here(), rows, host
            )
            _ = results^
            # The sum is as large as half the row.
            var sum = Float64(rows.n)
            dx.compare(step, fine * sum, String(t"backward log {log} ") + name)

        for smoothing in [Float64(0), Float64(0.1)]:
            var targets = Tensor[DType.int64](rows.count(), 0, device)
            with targets.device.map_to_host() as values:
                for row in range(rows.count()):
                    values[row] = Int64(
                        -100 if row % 5 == 3 else (row * 31) % rows.n
                    )
                    targets.host[row] = values[row]
            var dx = Tensor[dtype](size, 0, device)
            for reduction in [Reduction.NONE, Reduction.SUM, Reduction.MEAN]:
                var options = LossOptions(-100, smoothing, reduction, False, 0)
                var each = rows.count() if reduction == Reduction.NONE else 1
                var loss = Tensor[dtype](each, 0, device)
                Gpu.losses[contiguous=contiguous, smoothed=True](
                    loss.there(),
                    pairs.there(),
                    x.there(),
                    Targets(Source[DType.int64](targets.there())),
                    rows,
                    options,
                    device,
                )
                Cpu.losses[dtype, dtype, contiguous, True](
                    loss.here(),
                    pairs.here(),
                    x.here(),
                    Targets(Source[DType.int64](targets.here())),
                    rows,
                    options,
                    host,
                )
                loss.compare(
                    max(2e-5 if accum != dtype else fine, step),
                    fine,
                    "losses " + name,
                )
                _ = loss^
                var dloss = Tensor[accum](each, 0, device)
                dloss.fill(13, 1, 2)
                Gpu.gradients[contiguous=contiguous](
                    dx.there(),
                    x.there(),
                    pairs.there(),
                    Targets(Source[DType.int64](targets.there())),
                    Optional(Source[accum](dloss.there())),
                    rows,
                    options,
                    device,
                )
                Cpu.gradients[contiguous=contiguous](
                    dx.here(),
                    x.here(),
                    pairs.here(),
                    Targets(Source[DType.int64](targets.here())),
                    Optional(Source[accum](dloss.here())),
                    rows,
                    options,
                    host,
                )
                _ = dloss^
                dx.compare(
                    step,
                    1e-4 if accum != dtype else fine,
                    "cross entropy backward " + name,
                )
            # Pointers do not keep what they point to.
            _ = targets^
        _ = x^
        _ = dy^
        _ = pairs^


def test_contiguous_rows_around_every_threshold() raises:
    var device = DeviceContext()
    var host = DeviceContext(api="cpu")
    for vectors in [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
        512,
        1024,
        1536,
        2048,
        3300,
        20352,
        42880,
        85888,
    ]:
        for n in [4 * vectors - 1, 4 * vectors, 4 * vectors + 1]:
            check[DType.float32, True](Rows(3, n, 1), device, host)
    # Of 16 bits only, eight elements a vector.
    for vectors in [24, 48, 96, 192, 384, 768]:
        for n in [
            8 * vectors - 1,
            8 * vectors,
            8 * vectors + 1,
            8 * vectors + 7,
        ]:
            check[DType.bfloat16, True](Rows(3, n, 1), device, host)
    for n in [1, 5, 63, 65, 127, 129, 1023, 4099, 50257, 151936, 700001]:
        check[DType.bfloat16, True](Rows(3, n, 1), device, host)
    for n in [1, 130, 50257]:
        check[DType.float64, True](Rows(3, n, 1), device, host)


def test_any_number_of_rows() raises:
    var device = DeviceContext()
    var host = DeviceContext(api="cpu")
    for rows in [1, 131, 133, 1057]:
        for n in [3, 30, 100, 2100]:
            check[DType.float32, True](Rows(rows, n, 1), device, host)
    # More than the blocks that leave a part of the losses have threads.
    check[DType.float32, True](Rows(300000, 3, 1), device, host)


def test_other_axes() raises:
    var device = DeviceContext()
    var host = DeviceContext(api="cpu")
    for n in [1, 9, 65, 129, 1025, 30000]:
        for inner in [2, 3, 8, 33]:
            check[DType.float32, False](Rows(2, n, inner), device, host)
            check[DType.bfloat16, False](Rows(2, n, inner), device, host)
    check[DType.float64, False](Rows(2, 300, 5), device, host)
    check[DType.float32, False](Rows(600, 3, 500), device, host)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
