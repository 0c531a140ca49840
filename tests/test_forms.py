"""Scale, masks, temperature and sink, against float64 NumPy, as arrays and in graphs."""

import re

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from maxsoftmax import _native
from maxsoftmax._arrays import devices
from maxsoftmax.nn import Softmax

SHAPE = (2, 3, 5, 7)
OFF = np.random.default_rng(9).random(SHAPE[2:]) < 0.4
OFF[3] = True
BIAS = np.random.default_rng(8).standard_normal((2, 1, 5, 7)).astype(np.float16)
BIAS[1, 0, 2] = -np.inf


def attention(x, axis=-1, *, scale=1.0, mask=None, causal=False, temperature=1.0, sink=None):
    """Returns what the documentation says, in float64."""
    z = x.astype(np.float64) * scale
    if mask is not None and mask.dtype != bool:
        z = z + mask.astype(np.float64)
    z = z / temperature
    if mask is not None and mask.dtype == bool:
        z = np.where(mask, z, -np.inf)
    if causal:
        queries, keys = z.shape[axis - 1], z.shape[axis]
        seen = np.arange(keys) <= np.arange(queries)[:, None] + keys - queries
        z = np.where(seen.reshape(seen.shape + (1,) * (-1 - axis)), z, -np.inf)
    if sink is not None:
        column = np.broadcast_to(sink, [1 if i == axis % z.ndim else n for i, n in enumerate(z.shape)])
        z = np.concatenate([z, column.astype(np.float64)], axis=axis)
    with np.errstate(invalid="ignore"):
        e = np.exp(z - z.max(axis=axis, keepdims=True))
        y = e / e.sum(axis=axis, keepdims=True)
    if sink is not None:
        y = np.take(y, range(y.shape[axis] - 1), axis=axis)
    if mask is not None or causal:
        y = np.where(np.isnan(y).all(axis=axis, keepdims=True), 0, y)
    return y


def logits(shape, dtype=np.float32, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * 3).astype(dtype)


CASES = {
    "mask and causal": ({"mask": ~OFF, "causal": True}, -1, np.float32),
    "everything": (
        {
            "scale": 0.125,
            "mask": BIAS,
            "causal": True,
            "temperature": np.linspace(0.5, 2, 5, dtype=np.float32)[:, None],
            "sink": logits((3, 1, 1), seed=2),
        },
        -1,
        ml_dtypes.bfloat16,
    ),
    "along the keys of (queries, keys, heads)": (
        {"scale": np.float64(0.3), "causal": True, "temperature": 0.7, "sink": np.zeros((1, 7))},
        -2,
        np.float64,
    ),
}
TOLERANCE = {"float64": 1e-14, "float32": 1e-6, "float16": 1.1e-3, "bfloat16": 8.1e-3}


@pytest.mark.parametrize("case", CASES)
def test_against_numpy(device, case):
    options, axis, dtype = CASES[case]
    for shape in [SHAPE, (1, 3, 5, 7), (4, 3, 5, 7)][: 1 if "mask" in options and options["mask"].ndim > 2 else 3]:
        x = logits(shape, dtype)
        y = maxsoftmax.softmax(x, axis=axis, device=device, **options)
        assert y.dtype == x.dtype
        reference = attention(x, axis, **options)
        np.testing.assert_allclose(
            y.astype(np.float64), reference, rtol=TOLERANCE[y.dtype.name], atol=np.finfo(np.float16).smallest_subnormal
        )
        np.testing.assert_array_equal(y == 0, reference.astype(y.dtype) == 0)


def test_rows_with_more_queries_than_keys_and_long_ones(device):
    # Some queries see no key at all, others more than a block holds.
    for queries, keys in [(9, 4), (2, 70_001), (3, 40_000), (2, 1024)]:
        x = logits((1, 2, queries, keys))
        mask = np.random.default_rng(3).random((queries, keys)) < 0.7
        y = maxsoftmax.softmax(x, mask=mask, causal=True, device=device)
        np.testing.assert_allclose(y, attention(x, mask=mask, causal=True), rtol=4e-6, atol=1e-30)
    assert (maxsoftmax.softmax(logits((1, 2, 9, 4)), mask=np.ones((9, 4), bool), causal=True)[..., :5, :] == 0).all()


EDGES = [*(2**k for k in range(5, 15)), 12_288, 65_536, 249_856, 278_528, 466_944, 491_520]
"""Lengths at which one GPU kernel takes over from another, on a Hopper the last ones."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("beyond", [-1, 0, 1, 8])
def test_rows_around_every_edge(device, beyond, dtype):
    rtol, atol = (8.1e-3, 1e-35) if dtype == "bfloat16" else (4e-6, 1e-30)
    for keys in [edge + beyond for edge in EDGES]:
        x = logits((2, 2, 3, keys), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        mask = np.random.default_rng(3).random((3, keys)) < 0.7
        mask[1] = False
        # A mask of which nothing is hidden, one that ends where a causal one does not, and one for each of a batch.
        for other in [mask, np.ones_like(mask), np.stack([mask, mask[::-1]])[:, None]]:
            options = {"mask": other, "causal": other is not mask, "scale": 0.3}
            y = maxsoftmax.softmax(x, device=device, **options).astype(np.float64)
            np.testing.assert_allclose(y, attention(x, **options), rtol=rtol, atol=atol, err_msg=str(keys))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("beyond", [-1, 0, 3])
def test_each_row_may_have_its_own_factor(device, beyond, dtype):
    scale = np.array([0.5, -0.25, 0, -2, 1e-3], np.float32)[:, None]
    temperature = np.linspace(0.5, 2, 5, dtype=np.float32)[:, None]
    rtol, atol = (8.1e-3, 1e-35) if dtype == "bfloat16" else (4e-6, 1e-30)
    for keys in [edge + beyond for edge in EDGES]:
        x = logits((1, 2, 5, keys), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        for options in [
            {"temperature": temperature},
            {"scale": scale, "temperature": temperature, "sink": np.float32(0.3)},
            {"scale": scale, "causal": True},
            {"scale": -0.3},
        ]:
            y = maxsoftmax.softmax(x, device=device, **options)
            reference = attention(x, **options)
            np.testing.assert_allclose(y.astype(np.float64), reference, rtol=rtol, atol=atol, err_msg=str(keys))
            if "temperature" in options:
                one = {name: value[3:4] if np.ndim(value) else value for name, value in options.items()}
                alone = maxsoftmax.softmax(x[:, 1:, 3:4].copy(), device=device, **one)
                np.testing.assert_array_equal(alone.view(np.uint8), y[:, 1:, 3:4].view(np.uint8))


COLUMN_EDGES = [4, 8, 16, 64, 128, 384, 672, 1024, 3072, 5376]
"""The same along another axis."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [16, 13])
def test_columns_around_every_edge(device, heads, dtype):
    sink = logits((heads,), seed=2)
    rtol, atol = (8.1e-3, 1e-35) if dtype == "bfloat16" else (4e-6, 1e-30)
    for keys in [max(2, edge + beyond) for edge in COLUMN_EDGES for beyond in (-1, 0, 1)]:
        x = logits((2, 2, keys, heads), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        x[0, 0, -2, 3] = 90
        mask = np.random.default_rng(3).random((2, keys, 1)) < 0.7
        mask[1, :, 0] = False
        # Numbers leave elements as they are in memory; what else there is has its logits computed.
        for options in [
            {"mask": mask, "scale": 0.3, "causal": True, "sink": sink if heads == 16 else None},
            {"scale": 0.3},
            {"temperature": 0.7, "sink": sink},
        ]:
            y = maxsoftmax.softmax(x, axis=-2, device=device, **options).astype(np.float64)
            np.testing.assert_allclose(
                y, attention(x, -2, **options), rtol=rtol, atol=atol, err_msg=f"{keys} {options}"
            )


@pytest.mark.parametrize("beyond", [0, 1])
def test_rows_of_16_bits_with_a_sink_around_every_edge(device, beyond):
    options = {**CASES["everything"][0], "temperature": np.array([[0.5], [2]], np.float32)}
    for keys in [edge + beyond for edge in EDGES]:
        x = logits((2, 3, 2, keys), ml_dtypes.bfloat16)
        # The last key has nearly all of one row: all other blocks have next to nothing.
        x[0, 0, 1, -1] = 90
        options["mask"] = logits((2, 1, 2, keys), np.float16, seed=5)
        y = maxsoftmax.softmax(x, device=device, **options).astype(np.float64)
        np.testing.assert_allclose(y, attention(x, **options), rtol=8.1e-3, atol=1e-35, err_msg=str(keys))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaled_rows_around_every_edge(device, dtype):
    # Numbers, what is a number for each row, and one for each element.
    cases = [
        {"scale": 0.3, "temperature": 0.7, "causal": True, "sink": logits((2, 1, 1), seed=2)},
        {"scale": -0.3},
        {"scale": logits((3, 1), seed=5), "causal": True},
        {"temperature": np.linspace(0.5, 2, 3, dtype=np.float32)[:, None], "mask": logits((2, 1, 1), seed=4)},
    ]
    rtol, atol = (8.1e-3, 1e-35) if dtype == "bfloat16" else (4e-6, 1e-30)
    for keys in [edge + beyond for edge in [4, 8, 16, *EDGES] for beyond in (-1, 0, 1, 8)]:
        x = logits((2, 3, keys), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        x[0, 2, -1] = 90
        for i, options in enumerate(cases):
            y = maxsoftmax.softmax(x, device=device, **options)
            reference = attention(x, **options)
            np.testing.assert_allclose(
                y.astype(np.float64), reference, rtol=rtol, atol=atol, err_msg=f"{keys} elements, case {i}"
            )


def test_nan_is_not_hidden_by_a_mask_that_keeps_it(device):
    x = logits((1, 1, 3, 4))
    x[..., 1, 0] = np.nan
    mask = np.ones((3, 4), bool)
    y = maxsoftmax.softmax(x, mask=mask, causal=True, device=device)
    assert np.isnan(y[..., 1, :]).all()
    assert not np.isnan(y[..., [0, 2], :]).any()
    mask[:, 0] = False
    assert not np.isnan(maxsoftmax.softmax(x, mask=mask, causal=True, device=device)).any()


def lying(data, array):
    """Returns an array of the same elements whose dimensions lie in any order, maybe with gaps or backwards."""
    if array.ndim == 0:
        return array
    order = data.draw(st.permutations(range(array.ndim)), label="order")
    laid = np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))
    step = data.draw(st.sampled_from([1, 1, 1, 2, -1]), label="step")
    if step == 1:
        return laid
    return np.repeat(laid, 2, axis=-1)[..., ::2] if step == 2 else np.array(laid[..., ::-1])[..., ::-1]


def broadcasting(data, shape, dtype, name):
    """Returns an operand whose dimensions are those of logits, or 1, or missing."""
    own = [n if data.draw(st.booleans(), label=name) else 1 for n in shape]
    own = own[data.draw(st.integers(0, len(own)), label=f"{name} has not") :]
    values = np.random.default_rng(len(own)).standard_normal(own)
    if dtype is bool:
        values = values < 0.6
    elif name == "temperature":
        values = np.abs(values) + 0.5
    array = lying(data, np.asarray(values).astype(dtype))
    return np.broadcast_to(array, shape) if data.draw(st.integers(0, 9)) == 0 else array


KINDS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_operands_of_any_shape_layout_and_dtype(device, data):
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 19]), min_size=1, max_size=6), label="shape"))
    dtype = data.draw(st.sampled_from(KINDS), label="dtype")
    axis = data.draw(st.integers(-len(shape), -1), label="axis")
    x = lying(data, logits(shape, dtype))
    options = {}
    for name in ("scale", "mask", "temperature", "sink"):
        whole = [1 if name == "sink" and i == axis % len(shape) else n for i, n in enumerate(shape)]
        kind = data.draw(st.sampled_from([None, *KINDS, *([bool, bool] if name == "mask" else [float])]), label=name)
        if kind is not None:
            options[name] = 0.7 if kind is float and name != "sink" else broadcasting(data, whole, kind, name)
    options["causal"] = axis > -len(shape) and data.draw(st.booleans(), label="causal")
    y = maxsoftmax.softmax(x, axis=axis, device=device, **options)
    assert y.dtype == x.dtype
    wanted = {name: np.asarray(value) if name == "mask" else value for name, value in options.items()}
    for name in ("scale", "temperature"):
        if name in wanted:
            wanted[name] = np.asarray(wanted[name]).astype(np.float64)
    reference = attention(x, axis, **wanted)
    tolerance = {"float32": 4e-6, "float64": 1e-12, "float16": 2e-3, "bfloat16": 1.6e-2}[y.dtype.name]
    np.testing.assert_allclose(y.astype(np.float64), reference, rtol=tolerance, atol=1e-6)


def test_masks_are_not_copied(monkeypatch):
    monkeypatch.setattr(devices, "copied", lambda *_: pytest.fail("copied"))
    monkeypatch.setattr(devices, "expanded", lambda *_: pytest.fail("copied"))
    x = logits(SHAPE)
    for causal in (False, True):
        for mask in (~OFF, ~OFF[:1], ~OFF[:, :1], BIAS, np.broadcast_to(~OFF, SHAPE), ~np.repeat(OFF[None], 3, 0)):
            y = maxsoftmax.softmax(x, mask=mask, causal=causal, sink=np.zeros((3, 1, 1), np.float32))
            expected = attention(x, mask=mask, causal=causal, sink=np.zeros((3, 1, 1)))
            np.testing.assert_allclose(y, expected, rtol=4e-6, atol=1e-7)
        options = {
            "temperature": np.linspace(1, 2, 5, dtype=np.float32)[:, None],
            "scale": np.float32(0.5),
            "mask": ~OFF,
        }
        y = maxsoftmax.softmax(x, causal=causal, **options)
        np.testing.assert_allclose(y, attention(x, causal=causal, **options), rtol=4e-6, atol=1e-7)


def test_nothing_of_nothing():
    assert maxsoftmax.softmax(np.zeros((0, 3)), scale=2.0).shape == (0, 3)


BAD = [
    ({"scale": np.nan}, ValueError, "scale must be a finite number, not nan"),
    ({"scale": "0.5"}, TypeError, "scale must be a number or a tensor of numbers, not '0.5'"),
    ({"scale": True}, TypeError, "scale must be a number or a tensor of numbers, not True"),
    ({"temperature": 0}, ValueError, "temperature must be a positive, finite number, not 0"),
    ({"temperature": -1.5}, ValueError, "temperature must be a positive, finite number, not -1.5"),
    ({"causal": 1}, TypeError, "causal must be True or False, not 1"),
    ({"causal": True, "axis": 0}, ValueError, "causal True needs an axis of queries before the axis of keys"),
    ({"causal": True, "algorithm": "naive"}, ValueError, "algorithm 'naive' takes no scale, mask, causal"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_options_are_refused_in_one_sentence(monkeypatch, options, error, message):
    monkeypatch.setattr(_native, "plan", None)
    with pytest.raises(error, match=message) as raised:
        maxsoftmax.softmax(np.zeros((3, 4)), **options)
    assert "\n" not in str(raised.value)
    with Graph("bad", input_types=[TensorType(DType.float32, (3, 4), DeviceRef.CPU())]) as graph:
        before = str(graph)
        with pytest.raises(error, match=message):
            maxsoftmax.ops.softmax(graph.inputs[0].tensor, **options)
        assert str(graph) == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": np.zeros((4, 4))}, ValueError, r"mask has shape \(4, 4\), but must broadcast to \(3, 4\)"),
        ({"mask": np.zeros((1, 3, 4))}, ValueError, r"mask has shape \(1, 3, 4\), but must broadcast to \(3, 4\)"),
        ({"mask": np.zeros(4, int)}, TypeError, "mask has dtype int64, but must be of floats or bools"),
        ({"sink": np.zeros(4)}, ValueError, r"sink has shape \(4,\), but must broadcast to \(3, 1\)"),
        ({"sink": np.zeros((3, 1), bool)}, TypeError, "sink has dtype bool, but must be of floats"),
        ({"scale": np.zeros(3)}, ValueError, r"scale has shape \(3,\), but must broadcast to \(3, 4\)"),
        ({"scale": 2.0, "axis": None}, TypeError, "axis must be an integer where scale, .* is given, not None"),
        ({"scale": 2.0, "device": "tpu"}, ValueError, "device 'tpu' is not on this machine"),
        ({"scale": 2.0, "unroll": 4}, ValueError, "unroll 4 has no meaning"),
    ],
)
def test_bad_arrays_are_refused_in_one_sentence(monkeypatch, options, error, message):
    monkeypatch.setattr(_native, "plan", None)
    with pytest.raises(error, match=message) as raised:
        maxsoftmax.softmax(np.zeros((3, 4)), **options)
    assert "\n" not in str(raised.value)


def test_bad_tensors_add_nothing_to_the_graph():
    place = DeviceRef.CPU()
    types = [
        TensorType(DType.float32, ("q", "k"), place),
        TensorType(DType.bool, ("k", "q"), place),
        TensorType(DType.float32, ("k",), DeviceRef.GPU()),
    ]
    with Graph("bad", input_types=types) as graph:
        x, turned, elsewhere = (value.tensor for value in graph.inputs)
        before = str(graph)
        with pytest.raises(ValueError, match=r"mask has shape \(k, q\), but must broadcast to \(q, k\)"):
            maxsoftmax.ops.softmax(x, mask=turned)
        with pytest.raises(ValueError, match="mask is on gpu:0, but must be on cpu:0, where x is"):
            maxsoftmax.ops.softmax(x, mask=elsewhere)
        with pytest.raises(TypeError, match="sink must be a tensor of the graph, not 'all'"):
            maxsoftmax.ops.softmax(x, sink="all")
        assert str(graph) == before


def test_the_layer_adds_the_op():
    def built(softmax):
        types = [
            TensorType(DType.float32, ("q", "k"), DeviceRef.CPU()),
            TensorType(DType.bool, ("k",), DeviceRef.CPU()),
        ]
        with Graph("layer", input_types=types) as graph:
            graph.output(softmax(*(value.tensor for value in graph.inputs)))
        return re.sub(r"loc\(.*?\)|#loc.*", "", str(graph))

    layer = built(Softmax(scale=0.5, causal=True))
    assert layer == built(lambda x, mask: maxsoftmax.ops.softmax(x, scale=0.5, mask=mask, causal=True))
    assert layer != built(Softmax(scale=0.5))
    assert built(lambda x, mask: Softmax(axis=0)(x)) == built(lambda x, mask: maxsoftmax.ops.softmax(x, axis=0))
    assert Softmax().state_dict() == {}
