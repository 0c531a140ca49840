"""The GPU kernels at every block size, against the CPU's."""

from std.testing import TestSuite, assert_true
from max.gpu.host import DeviceContext

from maxsoftmax import cpu
from maxsoftmax.gpu.columns import columns
from maxsoftmax.gpu.tree import tree
from maxsoftmax.rows import Rows

comptime dtype = DType.float32


def check[
    block_size: Int, contiguous: Bool
](rows: Rows, gpu: DeviceContext, host: DeviceContext) raises:
    var size = rows.count() * rows.n
    var x = gpu.enqueue_create_buffer[dtype](size)
    var y = gpu.enqueue_create_buffer[dtype](size)
    var expected = List[Float32](length=size, fill=0)
    with x.map_to_host() as logits:
        for i in range(size):
            logits[i] = Float32((i * 7919) % 1000) / 100
        cpu.softmax["auto", dtype, contiguous](
            expected.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
            logits.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
            rows,
            host,
        )
    y.enqueue_fill(-1)
    var source = x.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var target = y.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    comptime if contiguous:
        tree[dtype, block_size](target, source, rows, gpu)
    else:
        columns[dtype, block_size](target, source, rows, gpu)
    with y.map_to_host() as actual:
        for i in range(size):
            var error = abs(actual[i] - expected[i])
            if not error <= 2e-6 * expected[i]:
                print(
                    t"block {block_size} rows {rows.count()} n {rows.n} inner"
                    t" {rows.inner} at {i}: {actual[i]}, not {expected[i]}"
                )
                assert_true(False)
    _ = x^


def test_every_block_size() raises:
    var gpu = DeviceContext()
    var host = DeviceContext(api="cpu")
    comptime for log_block in range(11):
        comptime block_size = 1 << log_block
        for n in [1, 2, 31, 129, 1025, 50257]:
            check[block_size, True](Rows(3, n, 1), gpu, host)
        for inner in [1, 2, 5, 31, 32, 33, 100]:
            check[block_size, False](Rows(2, 130, inner), gpu, host)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
