"""What only a GPU can get wrong."""

import threading
from contextlib import contextmanager

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
from contract import check, logits

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gpu-auto")]


@contextmanager
def another_kernel():
    """Keeps part of the GPU busy, on a stream of its own."""
    torch = pytest.importorskip("torch")
    matrix = torch.rand(1024, 1024, device="cuda")
    stream, done = torch.cuda.Stream(), threading.Event()

    def work():
        with torch.cuda.stream(stream):
            while not done.is_set():
                for _ in range(20):
                    torch.mm(matrix, matrix)
                stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        *[(999, 7), (999, 100), (300, 3000), (40, 50257), (9, 300_001), (3, 1_000_003)],
        *[(99, 5, 64), (9, 100, 33), (3, 3000, 64), (2, 30_000, 40), (1, 60_000, 33)],
    ],
)
def test_a_hundred_reruns_beside_another_kernel_give_the_same_bits(shape, dtype):
    x = logits(shape, dtype)
    first = maxsoftmax.softmax(x, axis=1, device="gpu")
    check(first, x, axis=1)
    with another_kernel():
        for _ in range(100):
            again = maxsoftmax.softmax(x, axis=1, device="gpu")
            np.testing.assert_array_equal(again.view(np.uint8), first.view(np.uint8))


def at(rows, shift):
    """Returns rows that begin so many elements after an address that torch's allocator returns."""
    import torch

    room = torch.empty(rows.numel() + 24, dtype=rows.dtype, device=rows.device)
    return room[shift : shift + rows.numel()].view(rows.shape).copy_(rows)


def computed(what, x, dy, target):
    """Returns what an op makes of rows along the last axis."""
    import maxsoftmax.torch as ours
    import torch

    if what in {"cross_entropy", "smoothed"}:
        return ours.cross_entropy(x, target, reduction="none", label_smoothing=0.1 if what == "smoothed" else 0.0)
    if what == "cross_entropy_backward":
        _, pairs = maxsoftmax.cross_entropy_forward(x, target, reduction="none")
        return maxsoftmax.cross_entropy_backward(x, target, pairs, reduction="none")
    if what in {"softmax_backward", "log_softmax_backward"}:
        return getattr(torch.ops.maxsoftmax, what)(x, dy, 1)
    if what == "scaled":
        return maxsoftmax.softmax(x, axis=-1, scale=0.3)
    return getattr(ours, what)(x, -1)


def softmax_of(what, row):
    """Returns the same of one row of float64."""
    import torch

    return torch.softmax(row * 0.3, 0) if what == "scaled" else getattr(torch, what)(row, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("what", "n"),
    [
        *[(what, n) for what in ("cross_entropy", "smoothed") for n in (24_577, 50_257, 131_072, 151_937)],
        *[(what, n) for what in ("softmax", "log_softmax", "softmax_backward") for n in (2**20, 2**20 + 3)],
    ],
)
def test_long_rows_have_the_same_bits_in_every_batch_and_at_every_address(what, n, dtype):
    torch = pytest.importorskip("torch")

    generator = torch.Generator("cuda").manual_seed(n)
    # So many pairs that each row has a block of its own, and none of the slices has.
    count = 700 if n < 2**16 else 40
    x = torch.randn(count, n, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
    target = torch.arange(count, device="cuda") % n

    dy = torch.randn(n, device="cuda", generator=generator).to(x.dtype).expand(count, n).contiguous()
    y = computed(what, x, dy, target)
    for start, stop in ((0, 1), (5, 6), (3, 9), (1, 34), (7, count)):
        for shift in range(4):
            rows = at(x[start:stop], shift)
            part = computed(what, rows, at(dy[start:stop], shift), target[start:stop])
            assert torch.equal(part, y[start:stop]), (start, stop, shift)


def tolerance(what, dtype):
    """Returns how far results of kernels that take the whole GPU may be from float64's."""
    return {
        # A product is rounded: an error of up to 2^-24 · |x · factor|.
        "float32": {"rtol": 2e-5 if what == "scaled" else 4e-6, "atol": 1e-6 if what == "log_softmax" else 0},
        "bfloat16": {"rtol": 2**-8, "atol": 1e-6 if what == "log_softmax" else 1e-38},
        "float16": {"rtol": 2**-10, "atol": 2**-24},
    }[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("what", ["softmax", "log_softmax", "scaled"])
@pytest.mark.parametrize(
    "n",
    [
        *[200_001, 311_297, 400_000, 400_001, 600_000, 2**20 + 5, 2**22, 2**22 + 8, 5_000_003, 2**23],
        # Of which a part is read again, in one of both widths.
        *[2**24 - 3, 2**24 + 3, 20_971_520, 2**25 - 5],
    ],
)
def test_rows_that_take_the_whole_gpu_are_those_of_float64(n, what, dtype):
    torch = pytest.importorskip("torch")

    generator = torch.Generator("cuda").manual_seed(n)
    rows = max(6, min(9, (1 << 26) // n))
    x = torch.randn(rows, n, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
    x[0] += 500
    x[-1, : n // 2] = -10_000
    x[1, n // 2 :] = -torch.inf
    x[2, n - 1] = torch.nan
    x[3] = -torch.inf
    x[4, 0] = torch.inf
    for shift in (0, 1, 3):
        rows = at(x, shift)
        found = computed(what, rows, None, None)
        for one in (slice(1), slice(len(x) - 1, None)):
            alone = computed(what, rows[one].clone(), None, None)
            assert torch.equal(alone.nan_to_num(), found[one].nan_to_num())
        for row, y in zip(x, found, strict=True):
            expected = softmax_of(what, row.double())
            torch.testing.assert_close(y.double(), expected, equal_nan=True, **tolerance(what, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [114_689, 262_145, 2**24 + 3])
def test_computed_rows_that_take_the_whole_gpu_are_those_of_float64_at_every_place(n, dtype):
    torch = pytest.importorskip("torch")
    from max.driver import Accelerator, Buffer
    from max.dtype import DType
    from max.engine import InferenceSession
    from max.graph import DeviceRef, Graph, TensorType, ops

    # A row that begins at every place between two multiples of 16 bytes, and rows of special values.
    copies = 9
    of_rows = TensorType(getattr(DType, dtype), (copies + 5, n), DeviceRef.GPU())
    of_row = TensorType(getattr(DType, dtype), (n,), DeviceRef.GPU())
    with Graph("computed", input_types=[of_rows, of_row]) as graph:
        x, bias = (value.tensor for value in graph.inputs)
        graph.output(
            maxsoftmax.ops.log_softmax(ops.negate(x)),
            maxsoftmax.ops.softmax(x + bias, sink=9.0),
        )
    model = InferenceSession(devices=[Accelerator()]).load(graph)
    generator = torch.Generator("cuda").manual_seed(n)
    # Whole numbers, whose sums are exact in 16 bits.
    row, bias = (torch.randint(-20, 21, (n,), device="cuda", generator=generator) for _ in range(2))
    x = row.to(getattr(torch, dtype)).repeat(copies + 5, 1)
    bias = bias.to(x.dtype)
    x[copies, 0] = torch.nan
    x[copies + 1] = torch.inf
    x[copies + 2, n // 2 :] = torch.inf
    x[copies + 3, -1] = -torch.inf
    x[copies + 4, : n // 2] = 10_000
    torch.cuda.synchronize()
    results = [torch.from_dlpack(y) for y in model.execute(*(Buffer.from_dlpack(tensor) for tensor in (x, bias)))]
    logarithms, with_sink = results
    assert all(y.equal(found[0]) for found in results for y in found[1:copies])
    for i in range(copies - 1, len(x)):
        expected = softmax_of("log_softmax", -x[i].double())
        torch.testing.assert_close(logarithms[i].double(), expected, equal_nan=True, **tolerance("log_softmax", dtype))
        z = (x[i] + bias).double()
        expected = torch.cat((z, z.new_tensor([9.0]))).softmax(0)[:-1]
        torch.testing.assert_close(with_sink[i].double(), expected, equal_nan=True, **tolerance("softmax", dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("n", [200_001, 600_000, 2**20 + 5, 2**24 + 8])
def test_long_rows_of_any_forms_are_those_of_float64_at_every_address(n, dtype):
    torch = pytest.importorskip("torch")

    generator = torch.Generator("cuda").manual_seed(n)
    rows = 8 if n < 2**21 else 2
    x = torch.randn(rows, n, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
    scale = torch.rand(n, device="cuda", generator=generator)
    bias = torch.randn(2 * n, device="cuda", generator=generator)[::2]
    narrow = torch.randn(n, device="cuda", generator=generator).to(x.dtype)
    taken = torch.rand(rows, n, device="cuda", generator=generator) < 0.7
    taken[1] = False
    wide, floor = x.double(), torch.full((), -torch.inf, dtype=torch.float64, device="cuda")
    sink = torch.full((rows, 1), 9.0, device="cuda", dtype=torch.float64)
    beyond = torch.arange(n, device="cuda") > n - rows + torch.arange(rows, device="cuda")[:, None]
    near = {"rtol": 2e-5 if dtype == "float32" else 2**-8, "atol": 2**-24 if dtype == "float16" else 1e-38}
    for options, z in (
        ({"scale": scale, "sink": 9.0}, wide * scale),
        ({"mask": bias, "causal": True}, (wide + bias).where(~beyond, floor)),
        ({"mask": taken, "scale": scale}, (wide * scale).where(taken, floor)),
        ({"mask": narrow}, wide + narrow.double()),
    ):
        y = maxsoftmax.softmax(x, **options)
        expected = torch.cat((z, sink), 1).softmax(1)[:, :-1] if "sink" in options else z.softmax(1)
        torch.testing.assert_close(y.double(), expected.nan_to_num(), **near)
        if "causal" not in options:
            for row in range(rows):
                of_row = {name: value[row : row + 1] if value is taken else value for name, value in options.items()}
                alone = maxsoftmax.softmax(at(x[row : row + 1], row), **of_row)
                assert alone.equal(y[row : row + 1]), (row, options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("what", ["softmax", "log_softmax", "scaled"])
def test_short_rows_are_those_of_float64_in_every_batch_and_at_every_address(what, dtype):
    torch = pytest.importorskip("torch")

    for n in range(1, 130):
        generator = torch.Generator("cuda").manual_seed(n)
        x = torch.randn(300, n, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
        x[0] += 500
        x[1, n // 2 :] = -torch.inf
        x[2, n - 1] = torch.nan
        x[3] = -torch.inf
        x[4, 0] = torch.inf
        y = computed(what, x, None, None)
        expected = torch.stack([softmax_of(what, row) for row in x[:8].double()])
        near = {**tolerance(what, dtype), "msg": lambda text, n=n: f"{n} columns: {text}"}
        torch.testing.assert_close(y[:8].double(), expected, equal_nan=True, **near)
        whole = (x.double() * (0.3 if what == "scaled" else 1)).log_softmax(1)
        whole = whole if what == "log_softmax" else whole.exp()
        torch.testing.assert_close(y.double(), whole, equal_nan=True, **near)
        for start, stop, shift in ((0, 1, 1), (5, 6, 0), (7, 140, 3), (33, 300, 5)):
            part = computed(what, at(x[start:stop], shift), None, None)
            assert torch.equal(part.nan_to_num(), y[start:stop].nan_to_num()), (n, start, stop, shift)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("what", ["softmax_backward", "log_softmax_backward"])
def test_gradients_of_short_rows_are_those_of_float64_in_every_batch_and_at_every_address(what, dtype):
    torch = pytest.importorskip("torch")
    # It has the operators.
    pytest.importorskip("maxsoftmax.torch")

    backward = getattr(torch.ops.maxsoftmax, what)
    for n in range(1, 130):
        generator = torch.Generator("cuda").manual_seed(n)
        x, dy = torch.randn(2, 300, n, device="cuda", generator=generator).mul(3)
        y = x.softmax(1) if what == "softmax_backward" else x.log_softmax(1)
        y, dy = y.to(getattr(torch, dtype)), dy.to(getattr(torch, dtype))
        y[0, n // 2] = dy[1, -1] = torch.nan
        y[2] = 0
        wide, upstream = y.double(), dy.double()
        sums = (upstream if what == "log_softmax_backward" else wide * upstream).sum(1, keepdim=True)
        expected = upstream - wide.exp() * sums if what == "log_softmax_backward" else wide * (upstream - sums)
        dx = backward(y, dy, 1)
        # Of a difference of numbers of about 10.
        near = {"rtol": {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-10}[dtype], "atol": 2e-5}
        near["msg"] = lambda text, n=n: f"{n} columns: {text}"
        torch.testing.assert_close(dx.double(), expected, equal_nan=True, **near)
        for start, stop, shift in ((0, 1, 1), (5, 6, 0), (7, 140, 3), (33, 300, 5)):
            part = backward(at(y[start:stop], shift), at(dy[start:stop], shift), 1)
            assert torch.equal(part.nan_to_num(), dx[start:stop].nan_to_num()), (n, start, stop, shift)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("what", ["softmax", "log_softmax", "scaled"])
@pytest.mark.parametrize("n", [9999, 10_000, 16_385, 24_001, 50_257, 133_121, 200_000, 262_144, 270_001])
def test_columns_that_take_the_whole_gpu_are_those_of_float64_in_every_batch(n, what, dtype):
    torch = pytest.importorskip("torch")
    import maxsoftmax.torch as ours

    def op(x, axis):
        if what == "scaled":
            return maxsoftmax.softmax(x, axis=axis, scale=0.75)
        return getattr(ours, what)(x, axis)

    generator = torch.Generator("cuda").manual_seed(n)
    x = torch.randn(2, n, 137, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
    x[0, :, :40] += 500
    x[1, : n // 2, 60] = -10_000
    x[1, n // 2 :, 70] = -torch.inf
    x[0, n - 1, 71] = x[1, 0, 8] = torch.nan
    x[1, :, 72] = -torch.inf
    x[0, 0, 73] = torch.inf
    y = op(x, 1)
    expected = x.double().mul(0.75).softmax(1) if what == "scaled" else getattr(torch, what)(x.double(), 1)
    torch.testing.assert_close(y.double(), expected, equal_nan=True, **tolerance(what, dtype))
    # By the vector and by the element, in strips that are full or not.
    for start, columns in ((0, 137), (0, 136), (0, 128), (5, 2), (8, 24), (33, 17), (40, 96)):
        for shift in (0, 1):
            alone = op(at(x[1:, :, start : start + columns].contiguous(), shift), 1)
            part = y[1:, :, start : start + columns]
            torch.testing.assert_close(alone, part, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("n", [3, 100, 1000, 1001, 5000, 16_384, 30_001, 128_256, 400_001, 2**20, 2**24 + 1])
def test_a_peak_of_a_row_of_any_length_leaves_its_logarithm_exact(n, axis):
    torch = pytest.importorskip("torch")

    others = 7 if n > 2**20 else 257
    peaks = torch.linspace(0.1, 70.3, others, device="cuda")
    x = torch.empty((others, n) if axis else (n, others), device="cuda").copy_((peaks - 200).unsqueeze(axis))
    x.select(axis, n // 2).copy_(peaks)
    y = maxsoftmax.log_softmax(x, axis=axis).select(axis, n // 2)
    assert y.eq(0).all(), (peaks[y != 0], y[y != 0])


def test_rows_and_columns_that_take_the_whole_gpu_may_share_it():
    torch = pytest.importorskip("torch")
    import maxsoftmax.torch as ours

    shapes = [((1 << 25) // n, n) for n in (400_001, 2**20, 2**22, 2**23)] + [
        (70, 700_001),
        (40_000, 512),
        (200_000, 65),
    ]
    tensors = [torch.randn(shape, device="cuda") for shape in shapes]
    axes = [0 if n < 1000 else 1 for _, n in shapes]
    alone = [ours.softmax(x, axis) for x, axis in zip(tensors, axes, strict=True)]
    streams = [torch.cuda.Stream(priority=-(i % 2)) for i in range(len(tensors))]
    torch.cuda.synchronize()
    results = [[] for _ in tensors]
    for _ in range(10):
        for x, axis, stream, found in zip(tensors, axes, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(ours.softmax(x, axis))
    torch.cuda.synchronize()
    for y, found in zip(alone, results, strict=True):
        assert all(torch.equal(y, each) for each in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "what",
    [
        *("softmax", "log_softmax", "softmax_backward", "log_softmax_backward"),
        *("cross_entropy", "smoothed", "cross_entropy_backward"),
    ],
)
@pytest.mark.parametrize(
    "n",
    [
        *(33, 64, 80, 129, 150, 184, 300, 304, 333, 600, 777, 1000, 1023, 1300, 2401),
        *(4097, 5203, 7001, 8192, 10_001, 14_000, 16_381, 50_257, 50_264, 128_257, 262_144, 262_208),
    ],
)
def test_rows_on_the_chip_have_the_same_bits_in_every_batch_and_at_every_address(n, what, dtype):
    torch = pytest.importorskip("torch")

    generator = torch.Generator("cuda").manual_seed(n)
    x, dy = torch.randn(2, 64, n, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
    target = torch.arange(64, device="cuda") % n
    y = computed(what, x, dy, target)
    # Of odd lengths rows of a batch begin anywhere between two multiples of 16 bytes; alone they are put elsewhere.
    for row in range(64):
        part = slice(row, row + 1)
        # Of a gradient, one of the two begins as its results do, or both begin alike.
        shifts = [(row % 8, row % 8), (0, row % 8), (row % 8, 0)][row % 3]
        alone = computed(what, at(x[part], shifts[0]), at(dy[part], shifts[1]), target[part])
        assert torch.equal(alone, y[part]), row
    for shift in range(1, 16 // x.element_size()):
        assert torch.equal(computed(what, at(x, shift), at(dy, shift), target), y), shift


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [3001, 4001, 66_001])
def test_gradients_of_many_losses_have_the_bits_of_those_of_a_few(n, dtype):
    torch = pytest.importorskip("torch")

    generator = torch.Generator("cuda").manual_seed(n)
    x = torch.randn(2300, n, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
    target = torch.randint(0, n, (2300,), device="cuda", generator=generator)
    target[::7] = n - 1
    target[1::7] = 0
    # Whatever is in a row that does not count.
    target[5] = -100
    x[5, ::3] = torch.nan
    y = computed("cross_entropy_backward", x, None, target)
    for part in (slice(0, 10), slice(1000, 2000), slice(2295, 2300)):
        assert torch.equal(computed("cross_entropy_backward", x[part], None, target[part]), y[part]), part
    wide = x[:10].double().softmax(1)
    wide[range(10), target[:10].clamp_min(0)] -= 1
    wide[5] = 0
    near = {"rtol": 1e-5 if dtype == "float32" else 2**-7, "atol": 1e-9 if dtype == "float32" else 1e-7}
    torch.testing.assert_close(y[:10].double(), wide, **near)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [1, 65, 1000, 1023, 1024, 1025, 2047, 5001, 50_257, 128_256, 2**21 + 5])
def test_smoothed_losses_are_those_of_float64_of_masked_rows_too(n, dtype):
    torch = pytest.importorskip("torch")
    import maxsoftmax.torch as ours

    generator = torch.Generator("cuda").manual_seed(n)
    x = torch.randn(8, n, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
    x[1] += 500
    x[2, : n // 2] = -10_000
    x[3, n // 2 :] = -1e30
    x[4, n // 3] = -torch.inf
    x[5] = -torch.inf
    x[6, n - 1] = torch.nan
    x[7, : n // 2 + 1] = -torch.inf
    target = torch.full((8,), n - 1, device="cuda")
    for share in (0.1, 1.0):
        # Rows begin at every place between two multiples of 16 bytes.
        for shift in (0, 1, 3):
            rows = at(x, shift).requires_grad_()
            found = ours.cross_entropy(rows, target, reduction="none", label_smoothing=share)
            wide = x.double().requires_grad_()
            logs = torch.log_softmax(wide, 1)
            spread = share * logs.mean(1)
            expected = -((1 - share) * logs[:, n - 1] + spread if share < 1 else spread)
            tolerance = {"rtol": 3e-6 if dtype == "float32" else 2**-8, "atol": 2e-6 if n > 1 else 1e-9}
            others = torch.arange(8, device="cuda") != 5
            torch.testing.assert_close(found.double()[others], expected[others], equal_nan=True, **tolerance)
            assert not found[5].isfinite()
            found[:3].sum().backward()
            expected[:3].sum().backward()
            near = {
                "rtol": 1e-5 if dtype == "float32" else 2**-7,
                "atol": 1e-9 if dtype == "float32" and n > 1 else 1e-7,
            }
            torch.testing.assert_close(rows.grad[:3].double(), wide.grad[:3], **near)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [65, 150, 300, 333, 601, 1023, 1025, 2048, 50_257, 50_264])
def test_logits_as_attention_has_them_have_the_same_bits_at_every_address(n, dtype):
    torch = pytest.importorskip("torch")
    import maxsoftmax

    generator = torch.Generator("cuda").manual_seed(n)
    x = torch.randn(32, n, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
    mask = torch.rand(n, device="cuda", generator=generator) < 0.7
    bias = torch.randn(n, device="cuda", generator=generator).to(x.dtype)
    expected = (x.double() * 0.3 + bias.double()).softmax(1)
    near = {"rtol": 4e-6 if dtype == "float32" else 2**-7, "atol": 1e-7}
    torch.testing.assert_close(maxsoftmax.softmax(x, axis=1, scale=0.3, mask=bias).double(), expected, **near)
    # Where x or the mask is between two multiples of 16 bytes, other kernels read them.
    moved = {"scale": 0.3, "mask": at(bias[None], 1)[0]}
    assert maxsoftmax.softmax(x, axis=1, **moved).equal(maxsoftmax.softmax(x, axis=1, scale=0.3, mask=bias))
    for options in (
        {"scale": 0.3},
        {"scale": 0.3, "sink": 0.7},
        {"scale": 0.3, "mask": mask},
        {"scale": 0.3, "mask": bias},
    ):
        y = maxsoftmax.softmax(x, axis=1, **options)
        for row in range(32):
            alone = maxsoftmax.softmax(at(x[row : row + 1], row % 8), axis=1, **options)
            assert torch.equal(alone, y[row : row + 1]), (row, options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "edge",
    [
        *[12288, 16384, 24576, 32768, 40960, 49152, 53248, 65536, 81920, 90112],
        *[122880, 131072, 155648, 163840, 212992, 262144, 294912],
    ],
)
def test_rows_of_units_with_a_factor_have_the_same_bits_at_every_address(edge, dtype):
    torch = pytest.importorskip("torch")
    factors = torch.tensor([[1.0], [0.3], [-0.5], [-2], [0], [1e-3], [3], [-1e-3]], device="cuda")
    # The product is rounded: an error of up to 2^-24 · |x · factor|.
    near = {"rtol": 1e-5 if dtype == "float32" else 2**-7, "atol": 1e-30}
    factor = 0.3
    for n in (edge - 8, edge - 3, edge, edge + 1):
        generator = torch.Generator("cuda").manual_seed(n)
        x = torch.randn(8, n, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
        # Of no effect where the factor is positive, NaN where it is negative.
        x[0, 5] = x[3, -1] = -torch.inf
        for options in ({"scale": factors}, {"scale": factor}, {"temperature": 2 - factors.clamp(-1, 1)}):
            y = maxsoftmax.softmax(x, **options)
            z = x.double() * options.get("scale", 1)
            z = z / options["temperature"] if "temperature" in options else z
            torch.testing.assert_close(y.double(), z.softmax(1), equal_nan=True, **near)
            for row in range(8):
                one = {name: value if value is factor else value[row : row + 1] for name, value in options.items()}
                alone = maxsoftmax.softmax(at(x[row : row + 1], row), **one)
                torch.testing.assert_close(alone, y[row : row + 1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("edge", [12288, 24576, 40960, 53248, 65536, 98304, 131072, 163840, 262144])
def test_rows_of_units_with_a_mask_have_the_same_bits_at_every_address(edge, dtype):
    torch = pytest.importorskip("torch")
    temperatures = torch.tensor([1.0, 0.3, -0.5, 2, 0.7, 1, -1, 1], device="cuda")[:, None]
    near = {"rtol": 1e-5 if dtype == "float32" else 2**-7, "atol": 1e-30}
    for n in (edge - 8, edge - 3, edge, edge + 1):
        generator = torch.Generator("cuda").manual_seed(n)
        x = torch.randn(8, n, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
        taken = torch.rand(8, n, device="cuda", generator=generator) < 0.7
        # A row, all of it but the last element, and whole units.
        taken[4] = taken[6, :-1] = taken[5, 512:8192] = False
        taken[6, -1] = True
        bias = torch.randn(8, n, device="cuda", generator=generator).masked_fill(~taken, -torch.inf)
        bools = [
            {"mask": taken},
            {"mask": taken[3]},
            {"mask": taken, "temperature": temperatures},
            {"mask": taken[:1], "scale": 0.3},
        ]
        floats = [
            {"mask": bias},
            {"mask": bias[3], "temperature": temperatures},
            {"mask": bias[:1], "temperature": 0.3},
        ]
        for options in bools + floats:
            mask = options["mask"]
            z = x.double() * options.get("scale", 1)
            z = z + mask.double() if mask.is_floating_point() else z.masked_fill(~mask, -torch.inf)
            z = z / options.get("temperature", 1)
            # Hidden whatever they are divided by, if by bools; so are NaNs then.
            if mask.dtype == torch.bool:
                z = z.masked_fill(~mask, -torch.inf)
            expected = z.softmax(1)
            expected[z.isneginf().all(1)] = 0
            y = maxsoftmax.softmax(x, **options)
            torch.testing.assert_close(y.double(), expected, equal_nan=True, **near)
            for row in range(8):
                of_row = (
                    {"temperature": temperatures[row : row + 1]} if options.get("temperature") is temperatures else {}
                )
                of_row["mask"] = at(mask[row : row + 1] if mask.shape == x.shape else mask, row)
                alone = maxsoftmax.softmax(at(x[row : row + 1], row), **options | of_row)
                torch.testing.assert_close(alone, y[row : row + 1], rtol=0, atol=0, equal_nan=True)
        x[1, 7] = torch.nan
        taken[1, 7] = False
        assert not maxsoftmax.softmax(x, mask=taken).isnan().any()


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize(
    "n",
    [257, 511, 512, 1000, 1023, 1024, 1025, 4097, 16_384, 100_001, 196_609, 300_000, 300_002, 393_217, 400_008],
)
def test_rows_that_share_a_mask_are_those_of_float64_in_every_batch(n, dtypes):
    torch = pytest.importorskip("torch")
    generator = torch.Generator("cuda").manual_seed(n)
    dtype, mask_dtype = (getattr(torch, name) for name in dtypes)
    # Several for each cluster that is at work at a time.
    whole = (2, 3, max(5, 2_700_000 // n), n)
    x = torch.randn(whole, device="cuda", generator=generator).mul(3).to(dtype)
    factors = torch.randn(*whole[:3], 1, device="cuda", generator=generator)
    # The product is rounded: an error of up to 2^-24 · |x · factor|.
    near = {"rtol": 2e-5 if dtype == torch.float32 else 2**-7, "atol": 1e-30}
    for shape in (
        (n,),
        *((*(whole[i] if i in kept else 1 for i in range(3)), n) for kept in [(2,), (0,), (1,), (0, 2), (0, 1, 2)]),
    ):
        mask = torch.randn(shape, device="cuda", generator=generator).to(mask_dtype)
        mask[torch.rand(shape, device="cuda", generator=generator) < 0.2] = -torch.inf
        mask.view(-1, n)[-1] = -torch.inf
        for options in ({"scale": 0.3}, {"scale": factors, "temperature": 0.7}):
            y = maxsoftmax.softmax(x, mask=mask, **options)
            z = (x.double() * options["scale"] + mask.double()) / options.get("temperature", 1)
            expected = z.softmax(3)
            expected[z.isneginf().all(3)] = 0
            torch.testing.assert_close(y.double(), expected, **near)
            for at_row in [(0, 0, 0), (1, 2, 3), (0, 1, whole[2] - 1), (1, 2, whole[2] - 1)]:
                place = tuple(slice(i, i + 1) for i in at_row)
                alone = {name: value[place] if value is factors else value for name, value in options.items()}
                of_row = mask.broadcast_to(whole)[place]
                row = maxsoftmax.softmax(at(x[place].view(1, n), at_row[2] % 8).view(1, 1, 1, n), mask=of_row, **alone)
                assert row.equal(y[place]), (shape, at_row)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("n", [400_001, 400_008])
def test_long_rows_beside_a_mask_show_what_is_no_number(n, dtype):
    torch = pytest.importorskip("torch")
    x = torch.randn(5, n, device="cuda").mul(3).to(getattr(torch, dtype))
    x[1, n // 2], x[2, 5], x[3] = torch.nan, torch.inf, -torch.inf
    x[4, n - 1] = 1e4
    mask = torch.randn(n, device="cuda").to(x.dtype)
    near = {"rtol": 2e-5 if dtype == "float32" else 2**-7, "atol": 1e-7}
    for options in ({}, {"scale": 0.0}, {"scale": -2.0}, {"temperature": 0.7}):
        y = maxsoftmax.softmax(x, mask=mask, **options)
        z = (x.double() * options.get("scale", 1) + mask.double()) / options.get("temperature", 1)
        expected = z.softmax(1)
        expected[z.isneginf().all(1)] = 0
        torch.testing.assert_close(y.double(), expected, equal_nan=True, **near)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_odd_rows_beside_a_mask_have_the_same_bits_among_many_and_alone(dtype):
    torch = pytest.importorskip("torch")
    # So many that another kernel takes them than takes a few.
    x = torch.randn(400, 100_001, device="cuda").mul(3).to(getattr(torch, dtype))
    mask = torch.randn(100_001, device="cuda").to(x.dtype)
    y = maxsoftmax.softmax(x, mask=mask)
    for row in (0, 1, 2, 3, 200, 399):
        assert maxsoftmax.softmax(at(x[row : row + 1], row % 8), mask=mask).equal(y[row : row + 1]), row


@pytest.mark.parametrize("n", [1024, 2048, 50_257, 400_008])
@pytest.mark.parametrize("low", [-2e5, -1e6, -1e7, 1e8, 1e9, -1e30])
def test_rows_beside_a_mask_of_large_numbers_are_those_of_float64(n, low):
    torch = pytest.importorskip("torch")
    generator = torch.Generator("cuda").manual_seed(n)
    x = torch.randn(3, n, device="cuda", generator=generator).mul(30).bfloat16()
    mask = torch.full((n,), low, device="cuda")
    mask[: n // 2] += 8
    y = maxsoftmax.softmax(x, mask=mask)
    # Sums are numbers of float32.
    expected = (x.float() + mask).double().softmax(1)
    # Of the largest, whose neighbours are 32 and more apart, next to nothing is left.
    atol = 1e-30 if abs(low) < 2**28 else 2**-31
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=atol)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [40_001, 128_256, 400_001])
def test_masked_rows_of_units_have_the_same_bits_in_a_graph(n, dtype):
    torch = pytest.importorskip("torch")
    from max.driver import Accelerator, Buffer
    from max.dtype import DType
    from max.engine import InferenceSession
    from max.graph import DeviceRef, Graph, TensorType

    def masked(module, x, taken, *others):
        bias, narrow, temperature = others
        if n < 2**18:
            yield module.softmax(x, mask=taken, scale=0.5)
            yield module.softmax(x, mask=taken, temperature=temperature)
        yield module.softmax(x, mask=bias, temperature=temperature)
        yield module.softmax(x, mask=narrow)

    shapes = [(dtype, (5, n)), ("bool", (5, n)), ("float32", (5, n)), (dtype, (n,)), ("float32", (5, 1))]
    types = [TensorType(getattr(DType, name), shape, DeviceRef.GPU()) for name, shape in shapes]
    with Graph("masked", input_types=types) as graph:
        graph.output(*masked(maxsoftmax.ops, *(value.tensor for value in graph.inputs)))
    model = InferenceSession(devices=[Accelerator()]).load(graph)
    generator = torch.Generator("cuda").manual_seed(n)
    x, bias = torch.randn(2, 5, n, device="cuda", generator=generator).mul(3)
    x, taken = x.to(getattr(torch, dtype)), bias > -2
    temperature = torch.tensor([1.0, 0.3, -0.5, 2, 0.7], device="cuda")[:, None]
    narrow = bias[2].to(x.dtype)
    torch.cuda.synchronize()
    results = model.execute(*(Buffer.from_dlpack(tensor) for tensor in (x, taken, bias, narrow, temperature)))
    alone = masked(maxsoftmax, x, taken, bias, narrow, temperature)
    for result, direct in zip(results, alone, strict=True):
        assert torch.from_dlpack(result).equal(direct)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [3, 7, 13, 50, 100, 400, 1023, 1500, 2000, 3000, 5000, 8000, 11_000, 60_000])
@pytest.mark.parametrize("inner", [264, 265])
@pytest.mark.parametrize("what", ["softmax", "log_softmax", "gradient"])
def test_rows_along_another_axis_have_the_same_bits_in_every_batch_and_at_every_address(what, n, inner, dtype):
    torch = pytest.importorskip("torch")
    import maxsoftmax.torch as ours

    def along(y, dy):
        return torch.ops.maxsoftmax.softmax_backward(y, dy, 1) if what == "gradient" else getattr(ours, what)(y, 1)

    generator = torch.Generator("cuda").manual_seed(n)
    y, dy = torch.randn(2, 2, n, inner, device="cuda", generator=generator).to(getattr(torch, dtype))
    # A NaN stays in its row.
    y[1, n // 2, 16] = np.nan
    dx = along(y, dy)
    assert torch.isnan(dx).any(1).nonzero().tolist() == [[1, 16]]
    # As many as can be read by the vector, and others, some of them from an address at which they cannot.
    for start, columns in ((0, 8), (24, 16), (33, 17), (inner - 2, 2), (3, 131), (8, 256)):
        part = (slice(1), slice(None), slice(start, start + columns))
        for shift in (0, 1):
            alone = along(at(y[part].contiguous(), shift), at(dy[part].contiguous(), shift))
            assert torch.equal(alone, dx[part]), (start, columns, shift)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("inner", [2, 3, 4, 5, 7, 8, 9, 15, 31, 63])
@pytest.mark.parametrize("what", ["softmax", "log_softmax"])
def test_columns_in_panels_have_the_bits_of_others(what, inner, dtype):
    torch = pytest.importorskip("torch")
    op = getattr(maxsoftmax, what)
    for outer, n in ((1, 8), (1000, 3), (777, 8), (50, 16), (333, 50), (41, 64), (100, 65), (9, 128)):
        generator = torch.Generator("cuda").manual_seed(n)
        x = torch.randn(outer, n, inner, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
        x[0, 0] = x[-1, -1] = -torch.inf
        x[outer // 2, 1, -1] = torch.nan
        y = op(x, axis=1)
        expected = getattr(torch, what)(x.double(), 1)
        torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=1e-6, equal_nan=True)
        # As many columns more that the kernel is another one.
        wide = torch.nn.functional.pad(x, (0, 264 - inner))
        torch.testing.assert_close(op(wide, axis=1)[..., :inner], y, rtol=0, atol=0, equal_nan=True)
        for shift in (1, 3, 4):
            torch.testing.assert_close(op(at(x, shift), axis=1), y, rtol=0, atol=0, equal_nan=True)
        rest = op(x[outer // 3 :], axis=1)
        torch.testing.assert_close(rest, y[outer // 3 :], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("n", "inner"), [(200, 30_001), (1000, 9001), (3000, 6001)])
def test_many_odd_columns_of_16_bits_have_the_bits_of_few(n, inner):
    torch = pytest.importorskip("torch")
    generator = torch.Generator("cuda").manual_seed(n)
    x = torch.randn(2, n, inner, device="cuda", generator=generator).mul(3).bfloat16()
    y = maxsoftmax.softmax(x, axis=1)
    expected = x[..., :64].double().softmax(1)
    torch.testing.assert_close(y[..., :64].double(), expected, rtol=2**-8, atol=1e-30)
    for start in (0, 5, inner - 200):
        few = slice(start, start + 200)
        assert maxsoftmax.softmax(x[..., few].contiguous(), axis=1).equal(y[..., few])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", ["softmax", "log_softmax", "gradient", "scaled", "scaled with a sink"])
@pytest.mark.parametrize(
    ("outer", "n", "inner"),
    [
        # Held in registers, in slots, by clusters of two, four, five and eight blocks.
        *[
            (3, 50, 1025),
            (70, 64, 514),
            (5, 100, 2047),
            (5, 128, 1001),
            (60, 129, 1003),
            (130, 300, 301),
            (420, 480, 53),
        ],
        *[(40, 513, 1027), (9, 1023, 2045), (400, 1000, 101), (10, 1500, 1031), (9, 2000, 1003), (5, 3000, 1025)],
        *[(3, 5000, 4099), (2, 9900, 4001)],
        # By the whole GPU, but for gradients, and beside a sink.
        *[(2, 15_000, 1004), (1, 17_001, 6005), (2, 50_257, 513)],
    ],
)
def test_columns_by_the_granule_have_the_bits_of_others(what, outer, n, inner, dtype):
    torch = pytest.importorskip("torch")
    generator = torch.Generator("cuda").manual_seed(n)
    x, dy = torch.randn(2, outer, n, inner, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
    sink = torch.randn(outer, 1, inner, device="cuda", generator=generator).to(x.dtype)

    def along(x, dy, columns):
        if what == "gradient":
            return torch.ops.maxsoftmax.softmax_backward(x, dy, 1)
        if what == "scaled":
            return maxsoftmax.softmax(x, axis=1, temperature=2.0)
        if what == "scaled with a sink":
            return maxsoftmax.softmax(x, axis=1, temperature=2.0, sink=sink[..., columns].contiguous())
        return getattr(maxsoftmax, what)(x, axis=1)

    import maxsoftmax.torch

    x[0, :, 0] = x[-1, :, -1] = 1 if what == "gradient" else -torch.inf
    x[outer // 2, n - 1, 8] = torch.nan
    y = along(x, dy, slice(None))
    assert y.isnan().any(1).nonzero().tolist() == sorted(
        [[outer // 2, 8], *([[0, 0], [outer - 1, inner - 1]] if what in ("softmax", "log_softmax", "scaled") else [])]
    )
    # Both ends, and the middle, of columns of which so few are another kernel's.
    for start in (0, 13, inner // 2, inner - 31):
        columns = slice(start, start + 31)
        few = along(x[..., columns].contiguous(), dy[..., columns].contiguous(), columns)
        torch.testing.assert_close(y[..., columns], few, rtol=0, atol=0, equal_nan=True)
    if what == "softmax" or "scaled" in what:
        logits = x[-1:].double() / (2 if "scaled" in what else 1)
        if "sink" in what:
            logits = torch.cat((logits, sink[-1:].double()), 1)
        expected = logits.softmax(1)[:, :n]
        rtol = 1e-5 if dtype == "float32" else 2**-7
        torch.testing.assert_close(y[-1:].double(), expected, rtol=rtol, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "n"),
    [
        *[("float64", "float64", n) for n in (1, 2, 33, 1000, 1001, 4097, 50_258)],
        # Of which the last take the whole GPU.
        *[(dtype, "float16", n) for dtype in ("float32", "bfloat16") for n in (33, 300_000, 600_000)],
    ],
)
def test_other_dtypes_have_the_same_bits_in_every_batch_and_at_every_address(dtype, out_dtype, n):
    torch = pytest.importorskip("torch")
    import maxsoftmax

    generator = torch.Generator("cuda").manual_seed(n)
    x = torch.randn(9, n, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
    for op in (maxsoftmax.softmax, maxsoftmax.log_softmax):
        y = op(x, axis=1, out_dtype=out_dtype)
        expected = getattr(torch, op.__name__)(x.double(), 1)
        near = {"rtol": 1e-12, "atol": 1e-12} if dtype == "float64" else {"rtol": 2**-9, "atol": 2**-24}
        torch.testing.assert_close(y.double(), expected, **near)
        for row in range(9):
            alone = op(at(x[row : row + 1], row % 5), axis=1, out_dtype=out_dtype)
            assert torch.equal(alone, y[row : row + 1]), (op, row)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("what", ["softmax", "log_softmax"])
@pytest.mark.parametrize(
    "n",
    [
        *[10_240, 12_288, 16_384, 16_392, 24_576, 32_000, 32_001, 36_864, 40_959, 49_152, 50_257, 50_304],
        *[57_352, 65_536, 80_001, 90_112, 98_304, 100_352, 128_256, 128_257, 151_936, 151_937, 155_648, 163_840],
        *[200_064, 201_088, 220_000, 256_000, 262_144, 262_208],
    ],
)
def test_units_of_long_rows_have_the_same_bits_in_every_batch_and_at_every_address(n, what, dtype):
    torch = pytest.importorskip("torch")

    generator = torch.Generator("cuda").manual_seed(n)
    # Few rows of 16 bits have another kernel than many.
    x = torch.randn(110, n, device="cuda", generator=generator).mul(3).to(getattr(torch, dtype))
    x[7, 1:] = -torch.inf
    x[8, n // 2] = torch.nan
    x[9] = 60000 * x[9].sign()
    y = computed(what, x, x, None)
    expected = getattr(torch, what)(x[:12].double(), 1)
    if what == "softmax" and dtype == "float32":
        check(y[:12].cpu().numpy(), x[:12].cpu().numpy())
    else:
        one = torch.finfo(x.dtype).eps
        near = {"rtol": one, "atol": max(1e-6 * (dtype == "float32"), one * 2**-14)}
        torch.testing.assert_close(y[:12].double(), expected.to(x.dtype).double(), equal_nan=True, **near)
    for start, stop in ((0, 1), (5, 21), (3, 80)):
        for shift in range(16 // x.element_size()):
            part = computed(what, at(x[start:stop], shift), None, None)
            assert part.equal(y[start:stop]) or part.nan_to_num(7).equal(y[start:stop].nan_to_num(7)), (
                start,
                stop,
                shift,
            )


def test_maxima_of_units_may_lie_on_both_sides_of_what_is_a_small_logit():
    torch = pytest.importorskip("torch")

    x = torch.zeros(2, 128_256, device="cuda")
    x[0, :1000], x[0, 100_000:] = 63.9, 64.1
    x[1, :1000], x[1, 100_000:] = -63.9, -64.1
    check(computed("softmax", x, None, None).cpu().numpy(), x.cpu().numpy())
