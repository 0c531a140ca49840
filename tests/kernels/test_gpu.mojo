"""The GPU kernels at every block size, against the CPU's."""

from std.testing import TestSuite, assert_true
from max.gpu.host import DeviceContext

from maxsoftmax import Cpu, Gpu
from maxsoftmax.io.rows import Rows

comptime dtype = DType.float32


def check[
    algorithm: StaticString,
    block_size: Int,
    contiguous: Bool = True,
    unroll: Int = 4,
](rows: Rows, device: DeviceContext, host: DeviceContext) raises:
    """Compares a kernel with the CPU's, on logits that start at each of several offsets from an aligned address.
    """
    for offset in [0, 1, 3]:
        var size = rows.count() * rows.n
        var x = device.enqueue_create_buffer[dtype](size + offset)
        var y = device.enqueue_create_buffer[dtype](size)
        var expected = List[Float32](length=size, fill=0)
        with x.map_to_host() as logits:
            for i in range(size):
                logits[i + offset] = Float32((i * 7919) % 1000) / 100
            Cpu.softmax["auto", dtype, 128, 4, contiguous](
                expected.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
                logits.unsafe_ptr()
                .unsafe_origin_cast[MutUntrackedOrigin]()
                .unsafe_offset(offset),
                rows,
                host,
            )
        y.enqueue_fill(-1)
        Gpu.softmax[algorithm, dtype, block_size, unroll, contiguous](
            y.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
            x.unsafe_ptr()
            .unsafe_origin_cast[MutUntrackedOrigin]()
            .unsafe_offset(offset),
            rows,
            device,
        )
        with y.map_to_host() as actual:
            for i in range(size):
                if not abs(actual[i] - expected[i]) <= 1e-6 * expected[i]:
                    print(
                        t"{algorithm} block {block_size} unroll {unroll} rows"
                        t" {rows.count()} n {rows.n} inner {rows.inner} offset"
                        t" {offset} at {i}: {actual[i]}, not {expected[i]}"
                    )
                    assert_true(False)
        _ = x^


def test_every_block_size() raises:
    var device = DeviceContext()
    var host = DeviceContext(api="cpu")
    comptime for log_block in range(11):
        comptime block_size = 1 << log_block
        for n in [1, 2, 31, 129, 1025, 50257]:
            check["tree", block_size](Rows(3, n, 1), device, host)
        for inner in [1, 2, 5, 31, 32, 33, 100]:
            check["tree", block_size, False](Rows(2, 130, inner), device, host)
        comptime if block_size >= 32:
            for n in [1, 31, 1025, 50257]:
                check["warp", block_size](Rows(3, n, 1), device, host)
                check["multipass", block_size](Rows(3, n, 1), device, host)
                check["split", block_size](Rows(3, n, 1), device, host)


def test_every_unroll() raises:
    var device = DeviceContext()
    var host = DeviceContext(api="cpu")
    comptime for log_unroll in range(4):
        comptime unroll = 1 << log_unroll
        comptime for block_size in [32, 64, 128, 1024]:
            for n in [1, 3, 4, 5, 129, 4097, 50257]:
                check["vector", block_size, unroll=unroll](
                    Rows(3, n, 1), device, host
                )
                check["online", block_size, unroll=unroll](
                    Rows(3, n, 1), device, host
                )


def test_auto_around_every_threshold() raises:
    """Every kernel of `auto` at its shortest and its longest row, aligned and not.
    """
    var device = DeviceContext()
    var host = DeviceContext(api="cpu")
    # Vectors of 16 bytes; thresholds in elements come to the same for float32.
    for vectors in [
        1,
        2,
        4,
        8,
        16,
        24,
        32,
        48,
        64,
        96,
        128,
        192,
        256,
        384,
        512,
        768,
        1024,
        1536,
        2048,
        2740,
        5480,
        19180,
        38784,
        87936,
    ]:
        for n in [
            4 * vectors - 1,
            4 * vectors,
            4 * vectors + 1,
            4 * vectors + 7,
        ]:
            check["auto", 1](Rows(3, n, 1), device, host)


def test_auto_with_any_number_of_rows() raises:
    """Blocks without a row, and more rows than a wave of blocks."""
    var device = DeviceContext()
    var host = DeviceContext(api="cpu")
    for rows in [1, 2, 131, 132, 133, 1057]:
        for n in [3, 5, 12, 30, 100, 1024, 2100]:
            check["auto", 1](Rows(rows, n, 1), device, host)
    for rows in [1, 2, 67, 133]:
        check["auto", 1](Rows(rows, 50257, 1), device, host)
    check["auto", 1](Rows(2, 1000003, 1), device, host)
    check["auto", 1](Rows(40, 400001, 1), device, host)


def test_auto_along_other_axes() raises:
    """Every kernel for columns at its edges: in whole vectors, in single elements, and with the last block partly full.
    """
    var device = DeviceContext()
    var host = DeviceContext(api="cpu")
    for n in [1, 2, 4, 5, 8, 9, 16, 17, 64, 65, 128, 129, 511, 512, 1024, 1025]:
        for inner in [2, 3, 4, 8, 33, 132, 1028]:
            check["auto", 1, False](Rows(2, n, inner), device, host)
    for n in [4088, 4089, 11256, 11257, 22520, 22521]:
        for inner in [3, 4, 36]:
            check["auto", 1, False](Rows(1, n, inner), device, host)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
