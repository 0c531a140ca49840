import subprocess
import sys
import threading

import array_api_strict
import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from contract import check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from max.driver import Buffer
from max.dtype import DType
from maxsoftmax import runtime

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, np.float64]
LENGTHS = [0, 1, 2, 31, 32, 33, 127, 128, 129, 1000, 1023, 1024, 1025, 50257, 131072]


def logits(shape, dtype=np.float32, scale=4.0, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def spare(how, n):
    """Skips rows that take a teaching kernel minutes: its work grows with n², or a single thread does all of it."""
    limit = {"elementwise": 1 << 18, "naive": 1 << 22 if how["device"] == "gpu" else None}.get(how["algorithm"])
    if limit and n > limit:
        pytest.skip(f"rows of {n} take {how['algorithm']} minutes")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_every_length_along_the_last_axis(how, dtype, n):
    x = logits((3, n), dtype)
    y = maxsoftmax.softmax(x, **how)
    assert y.dtype == x.dtype
    check(y, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_every_length_along_a_strided_axis(how, dtype, n):
    x = logits((2, n, 3), dtype)
    check(maxsoftmax.softmax(x, axis=1, **how), x, axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (5, 9), (4, 33, 5), (2, 3, 17, 4), (2, 3, 2, 5, 3)])
def test_every_axis_of_every_rank(how, dtype, shape):
    x = logits(shape, dtype)
    for axis in range(-len(shape), len(shape)):
        check(maxsoftmax.softmax(x, axis=axis, **how), x, axis=axis)


@pytest.mark.parametrize("inner", [1, 2, 3, 15, 16, 17, 31, 32, 33, 100])
def test_every_width_beside_a_strided_axis(how, inner):
    x = logits((3, 40, inner))
    check(maxsoftmax.softmax(x, axis=1, **how), x, axis=1)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 100, 4097])
def test_every_number_of_rows(how, rows):
    x = logits((rows, 65))
    check(maxsoftmax.softmax(x, **how), x)


@pytest.mark.parametrize("shape", [(3, 100_003), (2, 70_001, 2), (1, 1 << 21)])
def test_few_long_rows_are_shared_out_and_merge(how, shape):
    spare(how, shape[1])
    x = logits(shape)
    check(maxsoftmax.softmax(x, axis=1, **how), x, axis=1)


def test_a_row_of_2_to_the_24(how):
    spare(how, 1 << 24)
    x = logits((1 << 24,))
    y = maxsoftmax.softmax(x, **how)
    check(y, x)
    assert abs(y.sum(dtype=np.float64) - 1) < 1e-6


@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 1), (1, 2), (0, 2), (2, 0), (-1, -3), None, ()])
def test_axes_as_scipy_has_them(how, axis):
    x = logits((3, 4, 5))
    check(maxsoftmax.softmax(x, axis=axis, **how), x, axis=axis)


def test_axis_may_be_a_list_or_a_numpy_integer():
    x = logits((3, 4))
    np.testing.assert_array_equal(maxsoftmax.softmax(x, axis=[0, 1]), maxsoftmax.softmax(x, axis=None))
    np.testing.assert_array_equal(maxsoftmax.softmax(x, axis=np.int64(1)), maxsoftmax.softmax(x))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_become_what_scipy_makes_of_them(dtype):
    x = np.array([[1, 2, 3], [3, 5, 4]], dtype)
    y = maxsoftmax.softmax(x)
    # SciPy's own difference of unsigned integers wraps around, so only its dtype can be compared.
    with np.errstate(all="ignore"):
        assert y.dtype == scipy.special.softmax(x, axis=-1).dtype
    check(y, x.astype(np.float64))


def test_bools_become_float64():
    y = maxsoftmax.softmax(np.array([True, False]))
    assert y.dtype == np.float64
    check(y, np.array([1.0, 0.0]))


def test_lists_and_scalars():
    np.testing.assert_allclose(maxsoftmax.softmax([1000, 0, 0, 0]), [1, 0, 0, 0])
    np.testing.assert_allclose(maxsoftmax.softmax([[1.0, 1.0]]), [[0.5, 0.5]])
    for scalar in (1000, 2.5, np.float32(3), np.array(3.0)):
        for axis in (-1, 0, None):
            y = maxsoftmax.softmax(scalar, axis=axis)
            assert isinstance(y, np.floating)
            assert y == 1


def test_other_memory_orders(how):
    x = logits((6, 7, 8))
    for view in (
        x.T,
        np.asfortranarray(x),
        x[::2, ::-1, 1::3],
        np.moveaxis(x, 0, 1),
        np.broadcast_to(x[0], x.shape),
        x[:, :, :1],
        x.astype(">f4"),
    ):
        for axis in range(3):
            check(maxsoftmax.softmax(view, axis=axis, **how), view, axis=axis)


def test_the_input_is_shared_not_copied(monkeypatch):
    seen = []
    original = Buffer.from_numpy

    def record(array):
        buffer = original(array)
        seen.append(buffer._data_ptr())
        return buffer

    monkeypatch.setattr(Buffer, "from_numpy", staticmethod(record))
    x = logits((4, 5, 6))
    for view in (x, x.T, x.transpose(0, 2, 1)):
        maxsoftmax.softmax(view)
    assert seen == [x.ctypes.data] * 3


def test_the_input_is_not_changed_and_may_be_read_only(how):
    x = logits((3, 65))
    before = x.copy()
    x.flags.writeable = False
    maxsoftmax.softmax(x, **how)
    np.testing.assert_array_equal(x, before)


def test_memory_at_odd_addresses(how):
    for offset in range(1, 9):
        x = np.frombuffer(b"\0" * offset + logits((3, 67)).tobytes(), np.uint8)[offset:].view(np.float32)
        check(maxsoftmax.softmax(x, **how), x)
        x = logits((3 * 67 + offset,))[offset:].reshape(3, 67)
        check(maxsoftmax.softmax(x, **how), x)


SPECIAL = {
    "nan poisons its row": [[np.nan, 0, 1], [1, 2, 3]],
    "inf turns its row to nan": [[np.inf, 0, 1], [np.inf, np.inf, -np.inf]],
    "all -inf is nan": [[-np.inf] * 3, [0, -np.inf, -np.inf]],
    "-inf beside numbers is 0": [[-np.inf, 1, 2], [3, -np.inf, -np.inf]],
    "nan beside infinities": [[np.nan, np.inf, -np.inf], [np.nan, -np.inf, -np.inf]],
    "subnormals": [[1e-40, -1e-40, 0], [1e-45, 1e-45, 1e-38]],
    "largest": [[3e38, -3e38, 0], [3e38, 3e38, 2.9999e38]],
    "smallest": [[-3e38, -3e38, -3e38], [-3e38, -2.9e38, 0]],
    "signed zeros": [[0.0, -0.0, 0.0], [-0.0, -0.0, -0.0]],
}


@pytest.mark.parametrize("case", SPECIAL)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("padding", [0, 40, 20_000])
def test_special_values(how, case, dtype, padding):
    x = np.array(SPECIAL[case]).astype(dtype)
    # Among copies of their last element they meet every lane, thread and span.
    x = np.concatenate([np.repeat(x[:, -1:], padding, 1), x, np.repeat(x[:, -1:], padding, 1)], axis=1)
    check(maxsoftmax.softmax(x, **how), x)
    check(maxsoftmax.softmax(x.T, axis=0, **how), x.T, axis=0)
    strided = np.stack([x, x[::-1]], axis=-1)
    check(maxsoftmax.softmax(strided, axis=1, **how), strided, axis=1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_poisoned_row_leaves_its_neighbours_alone(how, value):
    x = logits((3, 4, 50))
    x[1, 2, 30] = value
    for axis in range(3):
        check(maxsoftmax.softmax(x, axis=axis, **how), x, axis=axis)


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e8, -1e30])
def test_a_common_offset_costs_nothing(how, offset):
    x = (logits((4, 1000)) + np.float32(offset)).astype(np.float32)
    check(maxsoftmax.softmax(x, **how), x)


@pytest.mark.parametrize("n", [1000, 50257, 1 << 20])
@pytest.mark.parametrize("low", [-0.1, -3.3, -7.07, -11.9])
@pytest.mark.parametrize("high", [0.0, 0.7, 3.3, 5.9])
def test_equal_terms_add_up(how, n, low, high):
    spare(how, n)
    # Rounding errors of equal terms all point the same way, in their exponents and in a plain running sum.
    x = np.full(n, low, np.float32)
    x[n // 2] = high
    check(maxsoftmax.softmax(x, **how), x)


def test_what_evolution_found_to_be_hardest(how):
    # A dominant term and smaller ones that all round the same way.
    x = np.array([33.27418, 20.567358, 19.468746, 19.468746, 19.468746, 19.343584, 19.579973, 19.468746], np.float32)
    check(maxsoftmax.softmax(x, **how), x)
    check(maxsoftmax.softmax(np.tile(x[:, None], (1, 2)), axis=0, **how), np.tile(x[:, None], (1, 2)), axis=0)
    x = np.full(128, 19.41884232, np.float32)
    x[77] = 24.27646255
    check(maxsoftmax.softmax(x, **how), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_too_small_for_a_normal_number(how, dtype):
    low = {"float32": -104.5, "bfloat16": -93.0, "float16": -18.0, "float64": -746.0}[np.dtype(dtype).name]
    x = np.concatenate([[0.0], np.linspace(low, low * 0.8, 300)]).astype(dtype)
    y = maxsoftmax.softmax(x, **how)
    check(y, x)
    assert np.count_nonzero((y > 0) & (y < ml_dtypes.finfo(y.dtype).smallest_normal)) > 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_sum_to_one(how, dtype):
    tolerance = {2: 2e-2, 4: 2e-6, 8: 1e-14}[np.dtype(dtype).itemsize]
    y = maxsoftmax.softmax(logits((100, 300), dtype), **how)
    np.testing.assert_allclose(y.astype(np.float64).sum(axis=-1), 1, atol=tolerance)


@pytest.mark.parametrize("shape", [(64, 1000), (2, 70_001, 2), (1, 500_001)])
def test_reruns_give_the_same_bits(how, shape):
    spare(how, shape[1])
    x = logits(shape)
    first = maxsoftmax.softmax(x, axis=1, **how)
    for _ in range(20):
        np.testing.assert_array_equal(maxsoftmax.softmax(x, axis=1, **how), first)


def test_the_number_of_cores_does_not_matter(environment):
    program = """
import hashlib, os, sys
import numpy as np
if sys.argv[1] == "one":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import maxsoftmax
random = np.random.default_rng(0)
digest = hashlib.sha256()
for shape, axis in [((3, 100_000), 1), ((7, 40_000), 1), ((40_000, 112), 0), ((2, 30_000, 5), 1)]:
    x = np.float32(random.standard_normal(shape) * 5 + random.uniform(0, 20, shape))
    digest.update(maxsoftmax.softmax(x, axis=axis).tobytes())
print(digest.hexdigest())
"""
    digests = {
        subprocess.run(
            [sys.executable, "-c", program, cores], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for cores in ("one", "all")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


def test_rows_do_not_depend_on_their_company(how):
    x = logits((300, 20_000))
    y = maxsoftmax.softmax(x, **how)
    for i in (0, 150, 299):
        np.testing.assert_array_equal(maxsoftmax.softmax(x[i], **how), y[i])


finite = {"allow_nan": False, "allow_infinity": False}


@given(
    x=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=1, max_dims=5, min_side=0, max_side=9),
        elements=st.one_of(
            st.floats(-30, 30, width=32, **finite),
            st.floats(width=32, **finite),
            st.sampled_from([np.nan, np.inf, -np.inf, 0.0]),
        ),
    ),
    data=st.data(),
)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_array_any_axis_any_strides(how, x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1), label="axis")
    order = data.draw(st.permutations(range(x.ndim)), label="order")
    steps = data.draw(st.tuples(*[st.sampled_from([1, 2, -1]) for _ in range(x.ndim)]), label="steps")
    view = x.transpose(order)[tuple(slice(None, None, s) for s in steps)]
    check(maxsoftmax.softmax(view, axis=axis, **how), view, axis=axis)


@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_axes_as_scipy(how, data):
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=5, max_side=6))
    axes = data.draw(hnp.valid_tuple_axes(len(shape), min_size=1))
    x = logits(shape, seed=data.draw(st.integers(0, 99)))
    check(maxsoftmax.softmax(x, axis=axes, **how), x, axis=axes)


def test_one_model_serves_every_shape(device):
    for n in (3, 50, 700):
        maxsoftmax.softmax(logits((2, n)), device=device)
    before = dict(runtime._models)
    for shape in [(5,), (1, 9), (3, 4, 5), (2, 2, 2, 2)]:
        maxsoftmax.softmax(logits(shape), device=device)
    assert runtime._models == before


def test_threads_share_models_and_get_their_own_results(device):
    inputs = [logits((50, 100 + i), seed=i) for i in range(16)]
    results = [None] * len(inputs)
    start = threading.Barrier(len(inputs))

    def work(i):
        start.wait()
        for _ in range(10):
            results[i] = maxsoftmax.softmax(inputs[i], device=device)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, y in zip(inputs, results, strict=True):
        check(y, x)


def test_a_first_call_from_many_threads_compiles_once(monkeypatch, device):
    compiled = []
    original = runtime._graph
    monkeypatch.setattr(runtime, "_graph", lambda s: compiled.append(s) or original(s))
    monkeypatch.setattr(runtime, "_models", {})
    x = logits((4, 30))
    threads = [threading.Thread(target=maxsoftmax.softmax, args=(x,), kwargs={"device": device}) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 1 << 30), ((1 << 31) + 5, 1), (2, 1 << 30, 2)])
def test_more_than_2_to_the_31_elements(device, shape):
    # bfloat16 takes the least memory; rows repeat one period, so that their softmax is known.
    period = logits((64,), ml_dtypes.bfloat16)
    x = np.resize(period, shape)
    y = maxsoftmax.softmax(x, axis=1, device=device)
    flat, rows = y.reshape(-1), shape[1] if len(shape) == 2 else shape[1] * shape[2]
    for start in (0, (1 << 31) - 64, x.size - 64 - x.size % 64):
        part = np.resize(period, x.size % 64 + 64)[:64].astype(np.float64) if rows > 1 else np.zeros(64)
        if len(shape) == 2:
            repeats = shape[1] / 64 if shape[1] > 1 else None
            want = np.exp(part) / (np.exp(part).sum() * repeats) if repeats else np.ones(64)
        else:
            sums = [np.exp(part[i::2]).sum() * shape[1] / 32 for i in range(2)]
            want = np.exp(part) / np.resize(sums, 64)
        np.testing.assert_allclose(flat[start : start + 64].astype(np.float64), want, rtol=1e-2)


# Arrays of other libraries


def test_max_buffers_stay_where_they_are(device):
    x = logits((3, 50))
    where = runtime.device(device)
    y = maxsoftmax.softmax(Buffer.from_numpy(x).to(where))
    assert isinstance(y, Buffer)
    assert y.device == where
    check(y.to_numpy(), x)
    buffer = Buffer.from_numpy(logits((3, 4, 5))).to(where)
    check(maxsoftmax.softmax(buffer, axis=(0, 2)).to_numpy(), buffer.to_numpy(), axis=(0, 2))
    check(maxsoftmax.softmax(buffer, axis=1).to_numpy(), buffer.to_numpy(), axis=1)


def test_max_buffers_of_bfloat16(device):
    x = logits((3, 50), ml_dtypes.bfloat16)
    y = maxsoftmax.softmax(Buffer.from_numpy(x.view(np.uint16)).view(DType.bfloat16).to(runtime.device(device)))
    assert y.dtype == DType.bfloat16
    check(y.view(DType.uint16).to_numpy().view(ml_dtypes.bfloat16), x)


def test_any_dlpack_array_comes_back_as_its_kind():
    xp = array_api_strict
    x = logits((3, 4, 50))
    y = maxsoftmax.softmax(xp.asarray(x))
    assert isinstance(y, type(xp.asarray(x)))
    check(np.from_dlpack(y), x)
    turned = xp.permute_dims(xp.asarray(x), (2, 0, 1))
    check(np.from_dlpack(maxsoftmax.softmax(turned, axis=0)), x.transpose(2, 0, 1), axis=0)
    integers = maxsoftmax.softmax(xp.asarray([1, 2, 3]))
    assert integers.dtype == xp.float64


def test_torch_tensors(device):
    torch = pytest.importorskip("torch")
    where = {"cpu": "cpu", "gpu": "cuda"}[device]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for shape, axis in (((3, 50), -1), ((3, 4, 5), 1), ((3, 4, 5), (0, 2)), ((0, 5), -1)):
            x = (torch.randn(shape) * 4).to(dtype).to(where)
            for t in (x, x.transpose(0, 1)):
                y = maxsoftmax.softmax(t, axis=axis)
                assert isinstance(y, torch.Tensor)
                assert (y.dtype, y.device, y.shape) == (t.dtype, t.device, t.shape)
                if dtype == torch.bfloat16:
                    as_bits = lambda a: a.cpu().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # noqa: E731
                    check(as_bits(y), as_bits(t), axis=axis)
                else:
                    check(y.cpu().numpy(), t.cpu().numpy(), axis=axis)
    with pytest.raises(TypeError, match="cannot be shared"):
        maxsoftmax.softmax(torch.randn(3, device=where, requires_grad=True))


@pytest.mark.gpu
def test_torch_work_that_is_still_queued_is_waited_for():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            x = torch.full((4000, 4000), 7.0, device="cuda")
            torch.cuda._sleep(20_000_000)
            x.copy_(torch.arange(4000, device="cuda", dtype=torch.float32) / 1000)
            y = maxsoftmax.softmax(x)
            torch.testing.assert_close(y, torch.softmax(x, -1))
            del x, y


# Bad arguments


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (np.zeros(3), {"axis": 1}, ValueError, r"axis 1 is out of bounds for x of rank 1: it must be from -1 to 0"),
        (np.zeros(3), {"axis": -2}, IndexError, r"axis -2 is out of bounds"),
        (np.zeros((2, 3)), {"axis": (0, 0)}, ValueError, r"axis \(0, 0\) names an axis of x twice"),
        (np.zeros((2, 3)), {"axis": (0, -2)}, ValueError, r"names an axis of x twice"),
        (np.zeros(3), {"axis": 1.5}, TypeError, r"axis must be an integer, a tuple of integers or None, not 1.5"),
        (np.zeros(3), {"axis": "last"}, TypeError, r"axis must be an integer, .* not 'last'"),
        (np.zeros(3), {"axis": True}, TypeError, r"axis must be an integer, .* not the bool True"),
        (np.zeros(3), {"axis": (0.0,)}, TypeError, r"axis must be an integer, .* not 0.0"),
        (np.float32(1), {"axis": 1}, ValueError, r"axis 1 is out of bounds for x of rank 0: it must be from -1 to 0"),
        (np.zeros(3, complex), {}, TypeError, r"x has dtype complex128, but softmax takes float16"),
        (np.array(["a"]), {}, TypeError, r"x has dtype <U1"),
        (np.array([None]), {}, TypeError, r"x has dtype object"),
        (np.zeros(3, "V2"), {}, TypeError, r"x has dtype \|V2, .* view it as ml_dtypes.bfloat16"),
        (np.zeros(3, "M8[s]"), {}, TypeError, r"x has dtype datetime64"),
        (np.zeros(3, np.longdouble), {}, TypeError, r"x has dtype float128|x has dtype longdouble"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), {}, TypeError, r"x is a masked array"),
        (np.zeros(3), {"device": "tpu"}, ValueError, r"device 'tpu' is not on this machine, which has 'cpu'"),
        (np.zeros(3), {"device": 0}, TypeError, r"device must be a string such as 'cpu'"),
        (np.zeros(3), {"algorithm": "fastest"}, ValueError, r"algorithm 'fastest' does not exist on the CPU: .*'auto'"),
        (np.zeros(3), {"algorithm": None}, TypeError, r"algorithm must be a string, not None"),
        (
            np.zeros(3),
            {"block_size": 128},
            ValueError,
            r"block_size 128 has no meaning for algorithm 'auto' on the CPU",
        ),
        (np.zeros(0), {"algorithm": "fastest"}, ValueError, r"algorithm 'fastest'"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(monkeypatch, x, options, error, message):
    monkeypatch.setattr(runtime, "model", None)
    with pytest.raises(error, match=message) as raised:
        maxsoftmax.softmax(x, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [0, 3, 48, 2048, -128])
def test_block_sizes_that_do_not_exist(block_size):
    with pytest.raises(
        ValueError, match=rf"block_size {block_size} does not exist .* 'tree' on the GPU: choose from 1, 2"
    ):
        maxsoftmax.softmax(np.zeros(3), device="gpu", algorithm="tree", block_size=block_size)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("algorithm", "choice", "message"),
    [
        ("warp", {"block_size": 32}, "block_size 32 does not exist for .*: choose from 128, 256, 512, 1024"),
        ("vector", {"unroll": 3}, "unroll 3 does not exist for algorithm 'vector' on the GPU: choose from 1, 2, 4, 8"),
        ("tree", {"unroll": 2}, "unroll 2 has no meaning for algorithm 'tree' on the GPU"),
        ("auto", {"block_size": 512}, "block_size 512 has no meaning for algorithm 'auto' on the GPU"),
    ],
)
def test_choices_that_an_algorithm_does_not_have(algorithm, choice, message):
    with pytest.raises(ValueError, match=message):
        maxsoftmax.softmax(np.zeros(3), device="gpu", algorithm=algorithm, **choice)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("algorithm", "choice"),
    [("tree", {"block_size": 32}), ("vector", {"block_size": 1024, "unroll": 8}), ("online", {"block_size": 256})],
)
def test_other_choices(algorithm, choice):
    for shape in [(5, 1), (5, 129), (3, 50257), (2, 1000, 7)]:
        x = logits(shape)
        for axis in range(len(shape)):
            check(maxsoftmax.softmax(x, axis=axis, device="gpu", algorithm=algorithm, **choice), x, axis=axis)
