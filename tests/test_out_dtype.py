"""Results of another dtype than that of the logits, against float64 rounded once."""

import itertools

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from maxsoftmax import _native
from maxsoftmax._arguments import FLOAT8, FLOATS, OUT
from maxsoftmax._graph import runtime
from test_forms import attention

torch = pytest.importorskip("torch")

SOME = [
    *[("float32", "bfloat16"), ("float32", "float8_e4m3fn"), ("bfloat16", "float32")],
    *[("float32", "float8_e5m2"), ("float16", "bfloat16"), ("float64", "float16")],
]
"""Every dtype is one of these and the other: each pair is another library to build."""


def others_slow(pairs, some):
    """Returns pairs to test, of which those that are not among some are slow."""
    return [pytest.param(*pair, marks=() if pair in some else pytest.mark.slow) for pair in pairs]


PAIRS = others_slow([pair for pair in itertools.product(FLOATS, OUT) if pair[0] != pair[1]], SOME)

SHAPES = [((4, 33), -1), ((3, 256), -1), ((2, 2051), -1), ((2, 37, 5), 1), ((3, 4, 16), 1), ((3, 4, 16), (0, 1))]


def known(name):
    """Returns NumPy's dtype."""
    return np.dtype(getattr(ml_dtypes, name, name))


def logits(shape, dtype="float32", seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * 3).astype(known(dtype))


def rounded(values, name):
    """Returns float64 rounded once, to nearest and ties to even; of float8_e4m3fn what is too large is the largest."""
    if name in ("float32", "float64"):
        return values.astype(name)
    dtype = known(name)
    bits = np.dtype(f"uint{8 * dtype.itemsize}")
    codes = np.arange(1 << (8 * dtype.itemsize - 1)).astype(bits)
    with np.errstate(invalid="ignore"):
        numbers = codes.view(dtype).astype(np.float64)
    numbers = numbers[: np.flatnonzero(np.isfinite(numbers))[-1] + 1]
    middles = (numbers[1:] + numbers[:-1]) / 2
    last = numbers[-1] + (numbers[-1] - middles[-1])
    size = np.abs(values)
    ends = np.append(middles, np.inf if name == "float8_e4m3fn" else last)
    place = np.searchsorted(ends, size)
    tie = (place < len(ends)) & (size == ends[np.minimum(place, len(ends) - 1)])
    code = place + (tie & (place % 2 == 1))
    code = np.minimum(code, len(numbers) - 1) if name == "float8_e4m3fn" else code
    result = (code.astype(bits) | (np.signbit(values).astype(bits) << (8 * bits.itemsize - 1))).view(dtype)
    return np.where(np.isnan(values), np.array(np.nan, dtype), result)


def check(y, reference, x, name, log=False):
    """Asserts that `y` is what is within the error of the accumulators of the reference, rounded once."""
    y = np.asarray(y)
    assert y.dtype == known(name)
    assert y.shape == reference.shape
    tolerance = 1e-13 if x.dtype == np.float64 else 4e-6 if name == "float32" else 2e-5
    # Logarithms are differences of logits.
    error = np.abs(reference) * tolerance + (tolerance / 4 if log else 0)
    low, high = (rounded(reference + sign * error, name).astype(np.float64) for sign in (-1, 1))
    found = y.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(high))
    wrong = ~((low <= found) & (found <= high)) & ~np.isnan(found)
    assert not wrong.any(), (name, found[wrong][:4], low[wrong][:4], high[wrong][:4])


def special(x, axis, log=False):
    with np.errstate(invalid="ignore", divide="ignore"):
        function = scipy.special.log_softmax if log else scipy.special.softmax
        return function(x.astype(np.longdouble), axis=axis).astype(np.float64)


@pytest.mark.parametrize(("of", "to"), PAIRS)
def test_softmax_is_rounded_once(device, of, to):
    for shape, axis in SHAPES:
        x = logits(shape, of)
        y = maxsoftmax.softmax(x, axis=axis, out_dtype=to, device=device)
        check(y, special(x, axis), x, to)


@pytest.mark.parametrize(("of", "to"), others_slow(SOME, (*SOME[:2], SOME[-1])))
def test_log_softmax_is_rounded_once(device, of, to):
    for shape, axis in SHAPES[::2]:
        x = logits(shape, of)
        y = maxsoftmax.log_softmax(x, axis=axis, out_dtype=to, device=device)
        check(y, special(x, axis, log=True), x, to, log=True)


@pytest.mark.parametrize(("of", "to"), SOME[1:3])
def test_forms_are_rounded_once(device, of, to):
    options = {"scale": 0.5, "causal": True, "sink": np.zeros((3, 1, 1), np.float32)}
    if to in FLOAT8:
        options["out_scale"] = 64.0
    for shape, axis in [((2, 3, 5, 33), -1), ((2, 3, 8, 64), -1), ((2, 3, 9, 8), -2)]:
        x = logits(shape, of)
        y = maxsoftmax.softmax(x, axis=axis, out_dtype=to, device=device, **options)
        again = maxsoftmax.softmax(x, axis=axis, out_dtype=to, device=device, **options)
        np.testing.assert_array_equal(y.view(np.uint8), again.view(np.uint8))
        wanted = {name: options[name] for name in ("scale", "causal", "sink")}
        check(y, attention(x, axis, **wanted) * options.get("out_scale", 1), x, to)


@pytest.mark.parametrize(
    ("of", "to"), others_slow([("float64", to) for to in ("bfloat16", "float16", *FLOAT8)], SOME[-1:])
)
def test_float64_does_not_go_by_way_of_float32(device, of, to):
    # Probabilities right beside the middle of two neighbours, nearer than float32 can tell.
    dtype = known(to)
    codes = np.arange(1, 1 << (8 * dtype.itemsize - 1)).astype(f"uint{8 * dtype.itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):
        numbers = codes.astype(np.float64)
    numbers = numbers[(numbers > 1e-3) & (numbers <= 1)]
    numbers = numbers[:: max(1, len(numbers) // 200)] if len(numbers) > 200 else numbers
    above = rounded(numbers * (1 + 2.0**-2 * float(ml_dtypes.finfo(dtype).eps)), to)
    np.testing.assert_array_equal(above.astype(np.float64), numbers)
    middles = numbers * (1 + float(ml_dtypes.finfo(dtype).eps) / 2)
    p = np.concatenate([middles * (1 + 1e-12), middles * (1 - 1e-12)])
    p = p[p < 0.999]
    x = np.stack([np.zeros_like(p), np.log((1 - p) / p)], axis=1)
    assert x.dtype == of
    y = maxsoftmax.softmax(x, out_dtype=to, device=device)[:, 0]
    np.testing.assert_array_equal(y.astype(np.float64), rounded(special(x, -1)[:, 0], to).astype(np.float64))


def test_wider_results_are_as_accurate_as_their_own_dtype(device):
    # Exponentials of 16-bit logits are computed to what 16 bits can hold, unless more is wanted.
    for shape, axis in [((2, 4096), -1), ((2, 40_000), -1), ((2, 600, 16), 1), ((2, 9000, 4), 1)]:
        x = logits(shape, "bfloat16")
        y = maxsoftmax.softmax(x, axis=axis, out_dtype="float32", device=device)
        reference = special(x, axis)
        wide = x.astype(np.float64)
        allowed = 4e-7 + 1.5e-7 * (wide.max(axis=axis, keepdims=True) - wide)
        assert (np.abs(y - reference) <= allowed * reference).all()


SPECIAL = np.array(
    [[0, -np.inf, 0, 1], [np.nan, 0, 0, 0], [np.inf, 0, 0, 0], [-np.inf] * 4, [1e4, -1e4, 0, 9990]], np.float32
)


@pytest.mark.parametrize("of", ["float32", "float64"])
def test_results_that_no_cache_holds_have_the_same_bits(of):
    # A line has more results than vectors that are under way at a time have elements.
    x = logits((106_111, 168), of)
    whole = maxsoftmax.softmax(x, out_dtype="float8_e4m3fn")
    for part in (slice(0, 53_000), slice(53_000, None)):
        alone = maxsoftmax.softmax(x[part], out_dtype="float8_e4m3fn")
        assert np.array_equal(alone.view(np.uint8), whole[part].view(np.uint8)), part


@pytest.mark.parametrize("to", ["bfloat16", *FLOAT8])
def test_special_values(device, to):
    y = maxsoftmax.softmax(SPECIAL, out_dtype=to, device=device)
    check(y, special(SPECIAL, -1), SPECIAL, to)
    assert y[0, 1] == 0


def test_logarithms_of_nothing(device):
    for to, nothing in [("bfloat16", -np.inf), ("float8_e4m3fn", -448)]:
        y = maxsoftmax.log_softmax(SPECIAL, out_dtype=to, device=device).astype(np.float64)
        assert y[0, 1] == nothing
        assert np.isnan(y[1:4]).all()


def test_what_is_too_large_for_float8(device):
    x = np.array([[0, -200], [0, 0], [0, -3]], np.float32)
    for scale in (448, 900, 57344, 2.0**17, 2.0**-8):
        for to in FLOAT8:
            y = maxsoftmax.softmax(x, out_dtype=to, out_scale=scale, device=device)
            check(y, special(x, -1) * scale, x, to)
            with np.errstate(over="ignore"):
                theirs = torch.from_numpy((special(x, -1) * scale).astype(np.float32)).to(getattr(torch, to))
            # Torch 2.13 saturates float8_e4m3fn; where another version has NaN, there is nothing to compare.
            there = ~torch.isnan(theirs.float()).numpy()
            np.testing.assert_array_equal(y.view(np.uint8)[there], theirs.view(torch.uint8).numpy()[there])


def fetched(result):
    """Returns a buffer as an array."""
    result = result.to(runtime.device("cpu"))
    if result.dtype.name == "float32":
        return result.to_numpy()
    bits = getattr(DType, f"uint{8 * result.dtype.size_in_bytes}")
    return result.view(bits, result.shape).to_numpy().view(known(result.dtype.name))


@pytest.fixture(scope="module")
def model(device):
    """Softmax and its logarithm of some pairs of dtypes, with something to fuse and without."""
    where = runtime.device(device)
    place = DeviceRef.from_device(where)
    # A CPU has no float8 in graphs, and its kernels take ten seconds a pair to compile.
    pairs = SOME if device == "gpu" else [("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float16")]
    with Graph(
        "out_dtype",
        input_types=[TensorType(getattr(DType, of), ("a", "n"), place) for of, _ in pairs],
        custom_extensions=[maxsoftmax.extension()],
    ) as graph:
        results = []
        for value, (_, to) in zip(graph.inputs, pairs, strict=True):
            x = value.tensor
            results += [
                maxsoftmax.ops.softmax(x, out_dtype=to),
                maxsoftmax.ops.softmax(x * 2, axis=0, out_dtype=getattr(DType, to)),
                maxsoftmax.ops.log_softmax(x, out_dtype=to),
            ]
        results.append(maxsoftmax.ops.softmax(graph.inputs[0].tensor, causal=True, out_dtype="float16"))
        graph.output(*results)
    return InferenceSession(devices=[where]).load(graph), where, pairs


def test_graphs_return_what_arrays_do(model):
    loaded, where, pairs = model
    for shape in [(3, 40), (5, 33)]:
        given = [logits(shape, of) for of, _ in pairs]
        buffers = [
            Buffer.from_dlpack(torch.from_numpy(x.astype(np.float32)).to(getattr(torch, x.dtype.name))) for x in given
        ]
        found = iter(loaded.execute(*(buffer.to(where) for buffer in buffers)))

        for x, (_, to) in zip(given, pairs, strict=True):
            check(fetched(next(found)), special(x, -1), x, to)
            doubled = (x.astype(np.float64) * 2).astype(x.dtype)
            check(fetched(next(found)), special(doubled, 0), x, to)
            check(fetched(next(found)), special(x, -1, log=True), x, to, log=True)
        check(fetched(next(found)), attention(given[0], causal=True), given[0], "float16")


def test_results_are_of_the_kind_that_came_in(device):
    x = logits((3, 40))
    y = maxsoftmax.softmax(x, out_dtype="float8_e4m3fn", device=device)
    tensor = maxsoftmax.softmax(torch.from_numpy(x), out_dtype=torch.float8_e4m3fn, device=device)
    assert tensor.dtype == torch.float8_e4m3fn
    np.testing.assert_array_equal(tensor.view(torch.uint8).numpy(), y.view(np.uint8))
    buffer = maxsoftmax.softmax(Buffer.from_numpy(x), out_dtype=DType.float8_e4m3fn, device=device)
    assert (type(buffer), buffer.dtype) == (Buffer, DType.float8_e4m3fn)
    np.testing.assert_array_equal(buffer.view(DType.uint8, buffer.shape).to_numpy(), y.view(np.uint8))
    # A second time they take the short way.
    for dtype in ("float8_e4m3fn", ml_dtypes.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)):
        again = maxsoftmax.softmax(x, out_dtype=dtype, device=device)
        np.testing.assert_array_equal(again.view(np.uint8), y.view(np.uint8))
    halves = maxsoftmax.softmax(x, out_dtype="float8_e4m3fn", out_scale=0.5, device=device)
    assert (halves.astype(np.float32) <= y.astype(np.float32)).all()


def test_order_and_scalars_are_kept():
    x = logits((3, 40, 2)).transpose(2, 0, 1)
    for _ in range(2):
        y = maxsoftmax.softmax(x, axis=1, out_dtype="float8_e4m3fn")
        assert [step * 4 for step in y.strides] == list(x.strides)
        check(y, special(x, 1), x, "float8_e4m3fn")
    assert maxsoftmax.softmax(np.float32(3), out_dtype="float8_e4m3fn") == 1
    assert maxsoftmax.softmax(np.zeros((0, 3), np.float32), out_dtype="bfloat16").dtype == ml_dtypes.bfloat16
    check(maxsoftmax.softmax([1, 2, 3], out_dtype="float16"), special(np.array([1, 2, 3]), -1), np.zeros(1), "float16")


def test_the_dtype_of_the_logits_is_the_plain_path(monkeypatch):
    plan, names = _native.plan, []
    monkeypatch.setattr(_native, "plan", lambda *given, **options: names.append(options) or plan(*given, **options))
    x = logits((3, 41))
    y = maxsoftmax.softmax(x, out_dtype="float32")
    np.testing.assert_array_equal(y, maxsoftmax.softmax(x))
    assert not any(options for options in names)


BAD = [
    ({"out_dtype": "float64"}, TypeError, "out_dtype must be float32, .* or that of x, float32, not 'float64'"),
    ({"out_dtype": "int8"}, TypeError, "out_dtype must be float32, .*, not 'int8'"),
    ({"out_dtype": 8}, TypeError, "out_dtype must be float32, .*, not 8"),
    ({"out_dtype": torch.int8}, TypeError, "out_dtype must be float32, .*, not torch.int8"),
    (
        {"out_scale": 2.0},
        ValueError,
        "out_scale 2.0 needs out_dtype float8_e4m3fn or float8_e5m2, but results are float32",
    ),
    ({"out_dtype": "bfloat16", "out_scale": 2.0}, ValueError, "out_scale 2.0 needs out_dtype .* are bfloat16"),
    ({"out_dtype": "float8_e5m2", "out_scale": "2"}, TypeError, "out_scale must be a number, not '2'"),
    ({"out_dtype": "float8_e5m2", "out_scale": True}, TypeError, "out_scale must be a number, not True"),
    ({"out_dtype": "float8_e5m2", "out_scale": 0}, ValueError, "out_scale must be a positive number .*, not 0"),
    ({"out_dtype": "float8_e5m2", "out_scale": np.nan}, ValueError, "out_scale must be a positive number .*, not nan"),
    (
        {"out_dtype": "float8_e5m2", "out_scale": 1e300},
        ValueError,
        "out_scale must be a positive number .*, not 1e\\+300",
    ),
    ({"out_dtype": "bfloat16", "algorithm": "naive"}, ValueError, "algorithm 'naive' writes the dtype of x, float32"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_options_are_refused_in_one_sentence(monkeypatch, options, error, message):
    monkeypatch.setattr(_native, "plan", None)
    x = np.zeros((3, 4), np.float32)
    for forms in ({}, {"scale": 2.0}) if "algorithm" not in options else ({},):
        with pytest.raises(error, match=message) as raised:
            maxsoftmax.softmax(x, **options, **forms)
        assert "\n" not in str(raised.value)
    with Graph("bad", input_types=[TensorType(DType.float32, (3, 4), DeviceRef.CPU())]) as graph:
        before = str(graph)
        with pytest.raises(error, match=message):
            maxsoftmax.ops.softmax(graph.inputs[0].tensor, **options)
        if "algorithm" not in options:
            with pytest.raises(error, match=message):
                maxsoftmax.log_softmax(x, **options)
            with pytest.raises(error, match=message):
                maxsoftmax.ops.log_softmax(graph.inputs[0].tensor, **options)
        assert str(graph) == before


def test_float8_in_a_graph_needs_a_gpu():
    with (
        Graph("bad", input_types=[TensorType(DType.float32, (3, 4), DeviceRef.CPU())]) as graph,
        pytest.raises(ValueError, match="out_dtype float8_e5m2 needs a GPU, as MAX has no float8 in graphs on a CPU"),
    ):
        maxsoftmax.ops.softmax(graph.inputs[0].tensor, out_dtype="float8_e5m2")


def test_without_ml_dtypes_numpy_has_none(monkeypatch):
    monkeypatch.setattr(_native, "plan", None)
    monkeypatch.setattr("maxsoftmax._arrays.kinds.find_spec", lambda name: None)
    with pytest.raises(TypeError, match="out_dtype bfloat16 of a NumPy array needs the package ml_dtypes"):
        maxsoftmax.softmax(np.zeros((3, 4), np.float32), out_dtype="bfloat16")


def test_libraries_of_another_dtype_are_others():
    target = _native.description.Target("cpu")
    plain, eight = (
        _native.description.library("softmax", "float32", target, out_dtype=to) for to in ("", "float8_e5m2")
    )
    assert eight.defines() == {**plain.defines(), "OUT_DTYPE": "float8_e5m2"}
    assert eight.file_name() == "softmax-float32-float8_e5m2-cpu.so"
    assert str(eight) == "softmax of float32 to float8_e5m2 for the CPU"
    assert (plain.bundle(), eight.bundle()) == (_native.description.Library("all", "float32", target), None)
    assert plain.about() != eight.about()
    for name, to in [("sparsemax", "bfloat16"), ("softmax", "float32"), ("softmax", "int8")]:
        with pytest.raises(ValueError, match="there is no library for"):
            _native.description.library(name, "float32", target, out_dtype=to)
