"""Masks of bools and casts that graphs spell out around a softmax, and what only looks like them."""

import re
from types import SimpleNamespace

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from buffers import array_of, buffer_of
from emitted import load
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
from maxsoftmax._graph import runtime, spelled
from maxsoftmax._graph.spelled import take_over
from maxsoftmax._graph.values import constant

BF16, F16, F32 = DType.bfloat16, DType.float16, DType.float32
BFLOAT_TENTH = ml_dtypes.bfloat16(0.1)
SHAPES = [(3, 5, 5), (2, 7, 4), (2, 3, 1023), (1, 40, 2048), (1, 2, 40_001)]
INPUTS = {
    "x": (BF16, "bqk"),
    "f": (F32, "bqk"),
    "keep": (DType.bool, "qk"),
    "padding": (DType.bool, "bk"),
    "bias": (F32, "qk"),
}


def low(x, number=-np.inf):
    return ops.constant(number, x.dtype, x.device)


def where(keep, x):
    return ops.where(keep, x, low(x))


def seen(x):
    """Keys that are not after their query, of the shape of `x`."""
    query, key = (
        ops.range(0, dim, 1, out_dim=dim, dtype=DType.int64, device=x.device) for dim in (x.shape[1], x.shape[2])
    )
    return ops.broadcast_to(ops.unsqueeze(query, 1), x.shape) >= ops.broadcast_to(key, x.shape)


def spelled_out(x, f, keep, padding, bias):
    """Softmaxes as graphs have them, and as NumPy has them of the same arguments and of what is causal."""
    wide = ops.cast(x, F32)
    yield ops.cast(ops.softmax(wide), BF16), lambda x, f, keep, padding, bias, seen: (x, True)
    yield ops.cast(ops.softmax(wide * 0.125), BF16), lambda x, f, keep, padding, bias, seen: (x / 8, True)
    yield ops.cast(ops.softmax(where(keep, wide * 0.5)), BF16), lambda x, f, keep, padding, bias, seen: (x / 2, keep)
    yield ops.cast(ops.softmax(ops.cast(where(keep, x), F32)), F16), lambda x, f, keep, padding, bias, seen: (x, keep)
    yield ops.softmax(where(keep, f)), lambda x, f, keep, padding, bias, seen: (f, keep)
    tenth = ops.cast(ops.cast(ops.constant(0.1, F32, x.device), BF16), F32)
    yield (
        ops.softmax(where(keep, wide * tenth)),
        lambda x, f, keep, padding, bias, seen: (x * float(BFLOAT_TENTH), keep),
    )
    yield ops.softmax(where(keep, wide) * 0.25), lambda x, f, keep, padding, bias, seen: (x / 4, keep)
    rows = ops.unsqueeze(padding, 1)
    yield ops.softmax(where(rows, x * 0.5)), lambda x, f, keep, padding, bias, seen: (x / 2, padding[:, None])
    spread = ops.broadcast_to(rows, f.shape)
    yield ops.softmax(where(spread, f)), lambda x, f, keep, padding, bias, seen: (f, padding[:, None])
    dropped = ops.logical_not(keep)
    yield ops.softmax(ops.where(dropped, low(f), f / 2.0)) * 3.0, lambda x, f, keep, padding, bias, seen: (f / 2, keep)
    both = ops.logical_and(ops.broadcast_to(keep, x.shape), seen(x))
    yield ops.softmax(where(both, wide)), lambda x, f, keep, padding, bias, seen: (x, keep & seen)
    either = ops.logical_or(ops.logical_not(seen(x)), ops.broadcast_to(dropped, x.shape))
    yield ops.softmax(ops.where(either, low(f), f * 2.0)), lambda x, f, keep, padding, bias, seen: (f * 2, keep & seen)
    yield ops.softmax(where(ops.logical_not(either), f)), lambda x, f, keep, padding, bias, seen: (f, keep & seen)
    nested = where(spread, ops.where(seen(x), wide, low(wide)) * 0.5)
    yield ops.softmax(nested), lambda x, f, keep, padding, bias, seen: (x / 2, padding[:, None] & seen)
    yield ops.cast(ops.softmax(wide, axis=1), BF16), lambda x, f, keep, padding, bias, seen: (x, "axis 1")
    first = ops.softmax(where(keep, f))
    yield ops.cast(first, BF16) + ops.cast(first, BF16), lambda x, f, keep, padding, bias, seen: (f, keep, 2)
    yield ops.softmax(f * 0.3), lambda x, f, keep, padding, bias, seen: (f * float(np.float32(0.3)), True)
    yield ops.softmax(x / 2.0) * 3.0, lambda x, f, keep, padding, bias, seen: (x / 2, True, 3)
    yield ops.softmax(wide * 0.5, axis=1), lambda x, f, keep, padding, bias, seen: (x / 2, "axis 1")
    yield ops.softmax(f * 0.125 + bias), lambda x, f, keep, padding, bias, seen: (f / 8 + bias, True)
    added = ops.broadcast_to(bias, x.shape) + wide
    yield ops.cast(ops.softmax(added * 0.25), BF16), lambda x, f, keep, padding, bias, seen: ((x + bias) / 4, True)
    yield ops.softmax((f / 2.0 + bias) * 1.5), lambda x, f, keep, padding, bias, seen: ((f / 2 + bias) * 1.5, True)


COUNT = 22
"""How many softmaxes `spelled_out` has."""


FEW = [2, 3, 9, 12, 13, 14, 15, 16, 20]
"""Those of them that are compiled where all, which take minutes, are not. One that is in no result is not taken over,
but for 15, of which there are casts."""


ON_GPU = 15
"""How many have masks in memory and no other, or a factor and nothing else, which are left alone on a CPU."""


def others(x, f, keep, padding, bias):
    """What looks like them."""
    wide = ops.cast(x, F32)
    yield ops.softmax(ops.where(keep, f, low(f, -1e9)))
    yield ops.softmax(ops.where(keep, low(f), f))
    yield ops.softmax(where(f > 0.0, f))
    yield ops.softmax(where(ops.cast(ops.cast(keep, DType.uint8), DType.bool), f))
    yield ops.softmax(where(ops.logical_or(ops.broadcast_to(keep, f.shape), f > 0.0), f))
    yield ops.softmax(where(keep, f), axis=1)
    yield ops.softmax(where(ops.unsqueeze(padding, 2)[:, :1], f))
    yield ops.softmax(where(keep, where(ops.unsqueeze(padding, 1), f)))
    both = ops.logical_and(ops.broadcast_to(keep, f.shape), ops.broadcast_to(ops.unsqueeze(padding, 1), f.shape))
    yield ops.softmax(where(both, f))
    # Results that are used in float32, or are of other numbers than the logits.
    yield ops.softmax(wide)
    yield ops.cast(ops.softmax(wide), F16)
    some = ops.softmax(wide)
    yield some * ops.cast(ops.cast(some, BF16), F32)
    yield ops.cast(ops.softmax(f), BF16)
    yield ops.softmax(ops.cast(f, BF16))
    yield ops.cast(ops.softmax(wide * -0.5), BF16)
    yield ops.cast(ops.softmax(ops.cast(x + x, F32) * 0.5), BF16)
    # Constants that are another number when they have been cast.
    for number, dtype in [(300, DType.uint8), (2.5, DType.int32)]:
        factor = ops.cast(ops.cast(ops.constant(number, F32, x.device), dtype), F32)
        yield ops.cast(ops.softmax(wide * factor), BF16)
    yield ops.softmax(where(keep, f + f))
    yield ops.softmax((f + f) * 0.5)
    yield ops.softmax(f * 0.0)
    yield ops.softmax(f * f)
    yield ops.cast(ops.logsoftmax(wide), BF16)
    yield ops.softmax(f + f)
    yield ops.softmax(f * 0.5 + f)
    yield ops.softmax(f + ops.exp(bias))
    yield ops.softmax(f + ops.unsqueeze(bias, 2)[:, :, 0])
    yield ops.softmax(f + bias, axis=1)
    yield ops.softmax(f + ops.cast(ops.cast(bias, BF16), F32))
    yield ops.softmax(where(keep, f + bias))
    yield ops.softmax(where(keep, f) + bias)
    yield ops.softmax(ops.cast(x, F16) + ops.constant(-1.0, F16, x.device))


def graph_of(build, device="cpu"):
    types = [TensorType(dtype, tuple(dims), DeviceRef(device)) for dtype, dims in INPUTS.values()]
    with Graph("attention", input_types=types) as graph:
        graph.output(*build(*(value.tensor for value in graph.inputs)))
    return graph


def results(*inputs):
    return [y for y, _ in spelled_out(*inputs)]


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.slow)])
def model(request, device):
    """Which of `spelled_out` are compiled, their model and its Mojo."""
    chosen = FEW if request.param == "few" else range(COUNT)
    graph = graph_of(lambda *inputs: [y for i, y in enumerate(results(*inputs)) if i in chosen], device)
    with pytest.MonkeyPatch.context() as patch:
        # A CPU can do so, too.
        patch.setattr(spelled, "takes_alone", lambda device: True)
        assert maxsoftmax.drop_into(graph) == len(chosen)
    return chosen, *load(graph, device)


@pytest.mark.parametrize("shape", SHAPES)
def test_they_are_as_before(model, device, shape):
    chosen, loaded, _ = model
    random = np.random.default_rng(1)
    x = (random.standard_normal(shape) * 3).astype(ml_dtypes.bfloat16)
    bias = (random.standard_normal(shape[1:]) * 3).astype(np.float32)
    f = (random.standard_normal(shape) * 3).astype(np.float32)
    keep, padding = (random.random(dims) < 0.7 for dims in (shape[1:], (shape[0], shape[2])))
    # A row that is masked as a whole is NaN.
    keep[0] = False
    bias[1] = -np.inf
    given = [buffer_of(array).to(runtime.device(device)) for array in (x, f, keep, padding, bias)]
    found = [y.to(runtime.device("cpu")) for y in loaded.execute(*given)]
    last = np.arange(shape[2]) <= np.arange(shape[1])[:, None]
    inputs = x.astype(np.float64), f.astype(np.float64), keep, padding, bias.astype(np.float64), last
    said = []
    graph_of(lambda *values: [said.append(expected) or y for y, expected in spelled_out(*values)])
    for i, result in zip(chosen, found, strict=True):
        expected = said[i]
        y = array_of(result).astype(np.float64)
        logits, mask, *factor = expected(*inputs)
        axis = 1 if isinstance(mask, str) else -1
        with np.errstate(invalid="ignore"):
            masked = np.where(True if isinstance(mask, str) else mask, logits, -np.inf)
            reference = scipy.special.softmax(masked, axis=axis) * (factor[0] if factor else 3 if i == 9 else 1)
        rtol, atol = {F32: (5e-6, 1e-30), BF16: (8.1e-3, 1e-30), F16: (1.1e-3, 6e-8)}[result.dtype]
        np.testing.assert_allclose(y, reference, rtol, atol, err_msg=f"graph {i}")


def test_nothing_around_them_is_computed(model):
    chosen, _, emitted = model
    launches = emitted.launches()
    softmaxes = [launch for launch in launches if "softmax" in launch]
    assert len(softmaxes) == len(chosen)
    computed = [launch for launch in launches if re.search(r"\b(cast|select|greater|Prologue)\b", launch)]
    assert computed == [], launches


def test_no_gpu_is_needed_to_find_them():
    assert take_over(graph_of(results, "gpu")) == COUNT
    assert take_over(graph_of(results, "cpu")) == COUNT - ON_GPU


def test_nothing_else_is_taken_for_one():
    assert take_over(graph_of(lambda *inputs: list(others(*inputs)), "gpu")) == 0


def test_they_are_found_once():
    graph = graph_of(results, "gpu")
    assert take_over(graph) == COUNT
    assert take_over(graph) == 0


def test_constants_that_take_long_to_print_are_not_looked_at():
    with Graph("constants", input_types=[]):
        few, many = (ops.constant(np.full(n, 0.5, np.float32), F32, DeviceRef.CPU()) for n in (1 << 16, 1 << 17))
        assert constant(few._mlir_value) == 0.5
        assert constant(many._mlir_value) is None


@pytest.mark.parametrize(("architecture", "found"), [("sm_90a", 1), ("sm_100a", 1), ("sm_80", 0), ("sm_120a", 0)])
def test_masks_that_are_added_are_taken_over_where_rows_share_them(monkeypatch, architecture, found):
    monkeypatch.setattr(spelled, "accelerator_count", lambda: 1)
    monkeypatch.setattr(spelled, "Accelerator", lambda index: SimpleNamespace(architecture_name=architecture))
    types = [TensorType(F32, shape, DeviceRef.GPU()) for shape in (("rows", "keys"), ("keys",))]
    with Graph("added", input_types=types) as graph:
        x, bias = (value.tensor for value in graph.inputs)
        graph.output(ops.softmax(x + bias))
    assert take_over(graph) == found


@pytest.mark.parametrize(("kind", "computed"), [("cpu", False), ("gpu", True)])
def test_casts_are_found_where_a_mask_is_not(kind, computed):
    types = [TensorType(BF16, shape, DeviceRef(kind)) for shape in (("rows", "keys"), ("keys",))]
    with Graph("cast", input_types=types) as graph:
        x, bias = (value.tensor for value in graph.inputs)
        logits = x * x if computed else x
        graph.output(ops.cast(ops.softmax(ops.cast(logits + bias, F32)), BF16))
    assert take_over(graph) == 1
    assert 'symbol = "softmax_fused"' in str(graph)


@pytest.mark.parametrize(("dtype", "keys"), [(F16, 1024), (F32, 256)])
def test_masks_that_are_added_are_left_to_max(dtype, keys):
    types = [TensorType(dtype, shape, DeviceRef.GPU()) for shape in (("rows", keys), (keys,))]
    with Graph("added", input_types=types) as graph:
        x, bias = (value.tensor for value in graph.inputs)
        graph.output(ops.softmax(x + bias))
    assert take_over(graph) == 0


@pytest.mark.parametrize(("factor", "op"), [(0.5, "softmax_formed"), (2.0, "softmax_fused")])
def test_what_float16_has_no_number_for_stays_infinite(factor, op):
    with Graph("narrow", input_types=[TensorType(F16, ("rows", "n"), DeviceRef.CPU())]) as graph:
        graph.output(ops.cast(ops.softmax(ops.cast(graph.inputs[0].tensor * factor, F32)), F16))
    assert take_over(graph) == 1
    assert f'symbol = "{op}"' in str(graph)


@pytest.mark.slow
def test_what_follows_a_softmax_may_have_one():
    def twice(x, f, keep, padding, bias):
        inner = ops.cast(ops.softmax(ops.cast(x, F32)), BF16)
        return [ops.cast(ops.softmax(ops.cast(inner, F32)), BF16)]

    graph = graph_of(twice)
    assert maxsoftmax.drop_into(graph) == 2
    loaded, emitted = load(graph, "cpu")
    # MAX writes one function for both.
    assert emitted.launches() == ["custom__softmax_fused"]
    x = np.random.default_rng(2).standard_normal((2, 3, 5)).astype(ml_dtypes.bfloat16)
    rest = np.zeros((2, 3, 5), np.float32), np.zeros((3, 5), bool), np.zeros((2, 5), bool), np.zeros((3, 5), np.float32)
    (y,) = loaded.execute(Buffer.from_numpy(x.view(np.uint16)).view(BF16, x.shape), *rest)
    inner = scipy.special.softmax(x.astype(np.float64), axis=-1).astype(ml_dtypes.bfloat16)
    expected = scipy.special.softmax(inner.astype(np.float64), axis=-1)
    np.testing.assert_allclose(y.view(DType.uint16).to_numpy().view(ml_dtypes.bfloat16).astype(float), expected, 2e-2)
