"""Graphs that say how long rows are: the kernels for that length only are compiled, and have the bits of any length."""

import maxsoftmax
import numpy as np
import pytest
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from maxsoftmax._graph import runtime

ROWS = (31, 1001, 1025, 4096, 20_000, 50_257, 262_144, 400_001)
"""Lengths along the last axis."""

COLUMNS = ((33, 8), (1025, 5), (6000, 128))
"""Lengths along another axis, and neighbours."""


def results(x):
    axis = 1 if x.rank == 3 else -1
    softmax = maxsoftmax.ops.softmax
    return [
        softmax(x, axis),
        softmax(x * 0.5, axis) * 2.0,
        softmax(x, axis, scale=0.5, causal=True),
        softmax(x, axis, out_dtype="bfloat16"),
        maxsoftmax.ops.softmax_backward(x, x * 0.25, axis),
    ]


def compiled(name, shapes):
    types = [TensorType(DType.float32, shape, DeviceRef.GPU()) for shape in shapes]
    with Graph(name, input_types=types, custom_extensions=[maxsoftmax.extension()]) as graph:
        graph.output(*(y for value in graph.inputs for y in results(value.tensor)))
    return InferenceSession(devices=[runtime.device("gpu")]).load(graph)


def run(model, arrays):
    ys = model.execute(*(Buffer.from_numpy(x).to(runtime.device("gpu")) for x in arrays))
    return [y.to(runtime.device("cpu")).view(DType.uint8).to_numpy() for y in ys]


@pytest.mark.gpu
def test_bits_are_those_of_any_length():
    rng = np.random.default_rng(0)
    shapes = [(3, n) for n in ROWS] + [(2, *columns) for columns in COLUMNS]
    arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
    # The first two dimensions are not known here either.
    known = compiled("known", [("a", n) for n in ROWS] + [("b", n, inner) for n, inner in COLUMNS])
    found = run(known, arrays)
    rows, columns = compiled("rows", [("a", "n")]), compiled("columns", [("b", "n", "inner")])
    for i, x in enumerate(arrays):
        expected = run(rows if x.ndim == 2 else columns, [x])
        for part, whole in zip(found[5 * i : 5 * i + 5], expected, strict=True):
            np.testing.assert_array_equal(part, whole)
