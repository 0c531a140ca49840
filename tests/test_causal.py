"""Causal masks that graphs spell out, which `drop_into` says to the kernel, and what only looks like one."""

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from buffers import array_of, buffer_of
from emitted import load
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
from maxsoftmax._graph import runtime
from maxsoftmax._graph.spelled import take_over

SHAPES = [(3, 5, 5), (2, 7, 4), (2, 4, 9), (1, 70, 70), (1, 300, 1023), (2, 3, 40_001), (1, 2, 700_001)]


COUNT = 9
"""How many softmaxes `spelled_out` has."""


def places(x, axis, start=0, dtype=DType.int32):
    dim = x.shape[axis]
    return ops.range(start, dim + start if start else dim, 1, out_dim=dim, dtype=dtype, device=x.device)


def low(x, number=-np.inf):
    return ops.constant(number, x.dtype, x.device)


def whole(x):
    """The positions of queries and keys, of the shape of `x`."""
    return ops.broadcast_to(ops.unsqueeze(places(x, -2), 1), x.shape), ops.broadcast_to(places(x, -1), x.shape)


def apart(x, **options):
    return ops.unsqueeze(places(x, -2, **options), 1), places(x, -1, **options)


def spelled_out(x):
    """Masked as graphs have it, what logits are multiplied by, how far beyond itself a query sees, and what follows.

    Of what is None queries are counted from the last.
    """
    (queries, keys), (column, row) = whole(x), apart(x, dtype=DType.int64)
    yield ops.softmax(ops.where(queries >= keys, x, low(x))), 1, 0, 1
    yield ops.softmax(ops.where(queries >= keys, x * 0.125, low(x))), 0.125, 0, 1
    yield ops.softmax(ops.where(keys > queries, low(x), x / 3.0)), 1 / 3, 0, 1
    yield ops.softmax(ops.where(keys <= queries + 1, x, low(x)) * 2.0), 2, 1, 1
    yield ops.softmax(ops.where(ops.logical_not(row > column), x * 0.5 * 4.0, low(x))) * 3.0, 2, 0, 3
    yield ops.softmax(ops.where(ops.unsqueeze(column + 3 > row, 0), x * 0.25, low(x))), 0.25, 2, 1
    count = x.shape[-1] - x.shape[-2]
    last = ops.range(count, x.shape[-1], 1, out_dim=x.shape[-2], dtype=DType.int64, device=DeviceRef.CPU())
    yield ops.softmax(ops.where(ops.unsqueeze(last.to(x.device), 1) >= row, x * 2.0, low(x))), 2, None, 1
    yield ops.softmax(ops.where(row <= column + ops.shape_to_tensor([count]).to(x.device), x, low(x))), 1, None, 1
    yield ops.softmax(ops.where(places(x, -1, 5) <= ops.unsqueeze(places(x, -2, 4), 1), x, low(x))), 1, -1, 1


def not_causal(x):
    """What looks like it."""
    (queries, keys), (column, row) = whole(x), apart(x, dtype=DType.int64)
    yield ops.softmax(ops.where(queries >= keys, x, low(x, -1e9)))
    yield ops.softmax(ops.where(queries >= keys, x, low(x)), axis=-2)
    yield ops.softmax(ops.where(queries <= keys, x, low(x)))
    yield ops.softmax(ops.where(queries >= keys, low(x), x))
    yield ops.softmax(ops.where(keys >= keys + 1, x, low(x)))
    yield ops.softmax(ops.where(x >= ops.cast(keys, x.dtype), x, low(x)))
    yield ops.softmax(ops.where(2 * column >= row, x, low(x)))
    small = apart(x, dtype=DType.int8)
    yield ops.softmax(ops.where(small[0] >= small[1], x, low(x)))
    yield ops.softmax(ops.where(column + x.shape[0] >= row, x, low(x)))
    yield ops.softmax(x * 0.5)
    # One position for all queries, and for all keys.
    single = ops.range(0, 1, 1, out_dim=1, dtype=DType.int64, device=x.device)
    wide = ops.broadcast_to(column, x.shape), ops.broadcast_to(row, x.shape)
    yield ops.softmax(ops.where(wide[0] >= single, x, low(x)))
    yield ops.softmax(ops.where(ops.reshape(single, (1, 1)) >= wide[1], x, low(x)))
    first = ops.reshape(places(x, 0, dtype=DType.int64), (x.shape[0], 1, 1))
    yield ops.softmax(ops.where(first >= row, x, low(x)))
    yield ops.logsoftmax(ops.where(queries >= keys, x, low(x)))


def graph_of(build, dtype=DType.float32, device="cpu", shape=("batch", "queries", "keys")):
    place = DeviceRef(device)
    with Graph("attention", input_types=[TensorType(dtype, shape, place)]) as graph:
        graph.output(*build(graph.inputs[0].tensor))
    return graph


@pytest.fixture(scope="module", params=[DType.float32, pytest.param(DType.bfloat16, marks=pytest.mark.slow)], ids=str)
def model(request, device):
    graph = graph_of(lambda x: (y for y, *_ in spelled_out(x)), request.param, device)
    assert maxsoftmax.drop_into(graph) == COUNT
    return request.param, *load(graph, device)


@pytest.mark.parametrize("shape", SHAPES)
def test_they_mask_as_before(model, device, shape):
    dtype, loaded, _ = model
    kind = np.float32 if dtype == DType.float32 else ml_dtypes.bfloat16
    x = (np.random.default_rng(1).standard_normal(shape) * 3).astype(kind)
    found = [y.to(runtime.device("cpu")) for y in loaded.execute(buffer_of(x).to(runtime.device(device)))]
    graph = graph_of(lambda x: (y for y, *_ in spelled_out(x)))
    with graph:
        said = [options for _, *options in spelled_out(graph.inputs[0].tensor)]
    query, key = np.arange(shape[1])[:, None], np.arange(shape[2])
    for i, (result, (scale, beyond, factor)) in enumerate(zip(found, said, strict=True)):
        with np.errstate(invalid="ignore"):
            last = query + (shape[2] - shape[1] if beyond is None else beyond)
            logits = np.where(key <= last, x.astype(np.float64) * scale, -np.inf)
            expected = scipy.special.softmax(logits, axis=-1) * factor
        rtol = 5e-6 if dtype == DType.float32 else 8.1e-3
        np.testing.assert_allclose(array_of(result).astype(np.float64), expected, rtol, 1e-30, err_msg=f"graph {i}")


def test_none_of_them_is_computed(model):
    _, _, emitted = model
    launches = emitted.launches()
    assert len(launches) == COUNT
    assert all("softmax_formed" in launch for launch in launches), launches
    assert not any("select" in launch or "greater" in launch for launch in launches), launches


def test_numbers_and_positions_may_come_from_the_host():
    # No GPU is needed to build a graph.
    assert take_over(graph_of(lambda x: (y for y, *_ in spelled_out(x)), device="gpu")) == COUNT


def test_nothing_else_is_taken_for_one():
    assert take_over(graph_of(not_causal)) == 0
    # Kernels count at most four dimensions before the axis.
    shape = ("a", "b", "c", "d", "queries", "keys")
    assert (
        take_over(graph_of(lambda x: [ops.softmax(ops.where(whole(x)[0] >= whole(x)[1], x, low(x)))], shape=shape)) == 0
    )


def test_it_says_so_once():
    graph = graph_of(lambda x: (y for y, *_ in spelled_out(x)))
    assert take_over(graph) == COUNT
    assert take_over(graph) == 0
