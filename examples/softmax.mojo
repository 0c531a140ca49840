"""Softmax in a Mojo program: mojo run -I op examples/softmax.mojo."""

from max.gpu.host import DeviceContext

from maxsoftmax import Cpu, Rows, softmax


def main() raises:
    comptime rows = 3
    comptime n = 5
    var logits = List[Float32](length=rows * n, fill=0)
    for i in range(rows * n):
        logits[i] = Float32(i % 7)
    var probabilities = List[Float32](length=rows * n, fill=0)

    var cpu = DeviceContext(api="cpu")
    softmax[Cpu](
        probabilities.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
        logits.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
        Rows(rows, n, 1),
        cpu,
    )
    # A list ends with its last use, and pointers to it are none.
    _ = logits^
    for row in range(rows):
        var sum = Float32(0)
        for i in range(n):
            sum += probabilities[row * n + i]
        print("row", row, "sums to", sum)
