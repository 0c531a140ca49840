"""The ops of graphs, of every dtype and in both layouts, beside the calls on arrays, whose kernels they share."""

import maxsoftmax
import numpy as np
import pytest
from buffers import array_of, buffer_of, known
from contract import DTYPES, check, logits
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType
from maxsoftmax._arguments import ALGORITHMS
from maxsoftmax._graph import runtime
from test_gradients import close
from test_numerics import SPECIAL

SMOOTHED = {"label_smoothing": 0.2, "reduction": "sum"}
FORMS = {"scale": 0.5, "causal": True}


def ops_of(given, device):
    """Yields the name of every op that takes logits, and its results, along axis 1."""
    ops = maxsoftmax.ops
    x, dy, target, pairs, dloss, sink, mask = given
    for algorithm in ALGORITHMS[device] if x.dtype == DType.float32 else ["auto"]:
        yield algorithm, ops.softmax(x, 1, algorithm=algorithm)
    yield "fused", ops.softmax(x * 0.5, 1)
    yield "scaled", ops.softmax(x, 1, scale=0.3)
    yield "masked", ops.softmax(x, 1, mask=mask, **FORMS)
    yield "sink", ops.softmax(x, 1, sink=sink)
    yield "log_softmax", ops.log_softmax(x, 1)
    yield "softmax_backward", ops.softmax_backward(x, dy, 1)
    yield "log_softmax_backward", ops.log_softmax_backward(x, dy, 1)
    yield "max_sum", *ops.max_sum(x, 1)
    yield "logsumexp", ops.logsumexp(x, 1)
    yield "none", *ops.cross_entropy_forward(x, target, reduction="none")
    yield "mean", *ops.cross_entropy_forward(x, target)
    yield "smoothed", *ops.cross_entropy_forward(x, target, **SMOOTHED)
    yield "gradient", ops.cross_entropy_backward(x, target, pairs)
    yield "gradient of each", ops.cross_entropy_backward(x, target, pairs, dloss, reduction="none")
    yield "gradient, smoothed", ops.cross_entropy_backward(x, target, pairs, **SMOOTHED)


def on_arrays(given, device):
    """Yields the same, computed of arrays."""
    where = {"device": device}
    x, dy, target, pairs, dloss, sink, mask = given
    for algorithm in ALGORITHMS[device] if x.dtype == np.float32 else ["auto"]:
        yield algorithm, maxsoftmax.softmax(x, 1, algorithm=algorithm, **where)
    yield "fused", maxsoftmax.softmax(x * x.dtype.type(0.5), 1, **where)
    yield "scaled", maxsoftmax.softmax(x, 1, scale=0.3, **where)
    yield "masked", maxsoftmax.softmax(x, 1, mask=mask, **FORMS, **where)
    yield "sink", maxsoftmax.softmax(x, 1, sink=sink, **where)
    yield "log_softmax", maxsoftmax.log_softmax(x, 1, **where)
    yield "softmax_backward", maxsoftmax.softmax_backward(x, dy, 1, **where)
    yield "log_softmax_backward", maxsoftmax.log_softmax_backward(x, dy, 1, **where)
    yield "max_sum", *maxsoftmax.max_sum(x, 1, **where)
    yield "logsumexp", maxsoftmax.logsumexp(x, 1, **where)
    yield "none", *maxsoftmax.cross_entropy_forward(x, target, reduction="none", **where)
    yield "mean", *maxsoftmax.cross_entropy_forward(x, target, **where)
    yield "smoothed", *maxsoftmax.cross_entropy_forward(x, target, **SMOOTHED, **where)
    yield "gradient", maxsoftmax.cross_entropy_backward(x, target, pairs, **where)
    yield "gradient of each", maxsoftmax.cross_entropy_backward(x, target, pairs, dloss, reduction="none", **where)
    yield "gradient, smoothed", maxsoftmax.cross_entropy_backward(x, target, pairs, **SMOOTHED, **where)


class Model:
    """A graph of all ops of a dtype, of rows and of columns."""

    def __init__(self, dtype, device):
        self.device, self.place = device, runtime.device(device)
        kind, where = known(dtype), DeviceRef.from_device(self.place)
        wide = DType.float64 if kind == DType.float64 else DType.float32
        types, self.names = [], []
        for dims in (["rows", "n"], ["outer", "m", "inner"]):
            kept = [dims[0], *dims[2:]]
            ones = [dims[0], 1, *dims[2:]]
            types += [
                *[TensorType(kind, dims, where)] * 2,
                TensorType(DType.int64, kept, where),
                TensorType(wide, [*kept, 2], where),
                TensorType(kind, kept, where),
                TensorType(kind, ones, where),
                TensorType(DType.bool, dims, where),
                BufferType(kind, dims, where),
            ]
        with Graph("all", input_types=types, custom_extensions=[maxsoftmax.extension()]) as graph:
            results = []
            for given in (graph.inputs[:8], graph.inputs[8:]):
                *tensors, buffer = given
                tensors = [value.tensor for value in tensors]
                for name, *values in ops_of(tensors, device):
                    results += values
                    self.names += [name] * len(values)
                maxsoftmax.ops.cross_entropy_backward_(buffer.buffer, tensors[2], tensors[3])
            graph.output(*results)
        self.model = InferenceSession(devices=[self.place]).load(graph)

    def __call__(self, *arrays):
        buffers = [buffer_of(array).to(self.place) for array in arrays]
        results = [array_of(result) for result in self.model.execute(*buffers)]
        written = [array_of(buffers[i]) for i in (7, 15)]
        half = len(results) // 2
        return [[*zip(self.names[:half], results[:half], strict=True), ("in place", written[0])],
                [*zip(self.names[half:], results[half:], strict=True), ("in place", written[1])]]  # fmt: skip


# A graph of all ops is compiled for more than a minute for each.
KINDS = [pytest.param(dtype, marks=[pytest.mark.slow] * (dtype != np.float32)) for dtype in DTYPES]


@pytest.fixture(scope="module", params=KINDS)
def model(request, device):
    return request.param, Model(request.param, device)


def given(x, seed=1):
    """Returns the arguments of all ops for logits."""
    kept = (x.shape[0], *x.shape[2:])
    random = np.random.default_rng(seed)
    target = random.integers(0, x.shape[1], kept)
    target.reshape(-1)[::5] = -100
    pairs = np.stack(maxsoftmax.max_sum(x, 1), axis=-1)
    dloss = random.standard_normal(kept).astype(x.dtype)
    sink = np.expand_dims(random.standard_normal(kept), 1).astype(x.dtype)
    mask = random.random(x.shape) < 0.8
    return x, logits(x.shape, x.dtype, seed=seed), target, pairs, dloss, sink, mask


@pytest.mark.parametrize("shapes", [((5, 9), (2, 7, 3)), ((3, 20_001), (2, 9000, 5)), ((300, 64), (3, 33, 70))])
def test_graphs_have_the_bits_of_arrays(model, device, shapes):
    dtype, compiled = model
    both = [given(logits(shape, dtype)) for shape in shapes]
    found = compiled(*(array for arrays in both for array in (*arrays, arrays[0])))
    for arrays, results in zip(both, found, strict=True):
        expected = [(name, value) for name, *values in on_arrays(arrays, device) for value in values]
        expected.append(("in place", maxsoftmax.cross_entropy_backward(*arrays[:1], *arrays[2:4], device=device)))
        check(results[0][1], arrays[0], axis=1)
        for (name, result), (_, want) in zip(results, expected, strict=True):
            assert result.dtype == want.dtype, name
            if name == "fused":
                # The product is rounded where it is stored, and not on its way.
                check(result, arrays[0] * np.asarray(0.5, dtype), axis=1)
            elif name == "logsumexp":
                # Of m and d, by ops of MAX.
                close(result, want)
            else:
                np.testing.assert_array_equal(result, want, err_msg=name)


@pytest.mark.parametrize("case", SPECIAL)
def test_special_values_in_graphs(model, case):
    dtype, compiled = model
    if dtype == np.float16:
        pytest.skip("has not all of them")
    rows = np.array(SPECIAL[case]).astype(dtype)
    columns = np.stack([rows, rows[::-1]] * 4, axis=-1)
    both = [given(x) for x in (rows, columns)]
    found = compiled(*(array for arrays in both for array in (*arrays, arrays[0])))
    for x, results in zip((rows, columns), found, strict=True):
        for name, y in results:
            if name in ALGORITHMS["cpu"]:
                check(y, x, axis=1)
