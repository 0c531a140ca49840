"""Ops in graphs, beside the calls on arrays and float64."""

import maxsoftmax
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from buffers import array_of, buffer_of
from contract import DTYPES, check, logits
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType
from max.graph import ops as max_ops
from maxsoftmax import ops
from maxsoftmax._graph import runtime
from test_forms import attention as formed
from test_gradients import backward, close, losses
from test_kl_divergence import pair, same
from test_token_log_probs import tokens_of


def attention(scores, wide):
    """Weights: an elementwise producer, three axes, a static length and a consumer."""
    weights = ops.softmax(scores * 0.5)
    static = ops.softmax(wide, axis=1, algorithm="auto")
    assert weights.type == scores.type
    assert static.shape == wide.shape
    over = [ops.softmax(scores, axis=axis) for axis in (1, -4)]
    return weights + 0.0, *over, static, ops.softmax(max_ops.cast(wide, DType.float16), axis=0)


FORMS = {"scale": 0.3, "causal": True, "temperature": 0.7}


def numbers(x):
    """Logits that the graph computes, results that it computes with, and another axis."""
    used = max_ops.negate(ops.softmax(x, scale=-0.3))
    return ops.softmax(max_ops.negate(x), **FORMS), used, ops.softmax(x, axis=1, scale=0.3)


def masked(x):
    """By a mask that the graph computes by broadcasting."""
    queries, keys = (max_ops.range(0, n, 1, out_dim=n, dtype=DType.int32, device=x.device) for n in x.shape[-2:])
    return [ops.softmax(x, mask=max_ops.unsqueeze(queries, 1) >= keys)]


def step(x, target):
    """Gradients of what other ops compute, for other ops to use."""
    scores = x * 2
    loss, pairs = ops.cross_entropy_forward(scores, target)
    dscores = ops.cross_entropy_backward(scores, target, pairs)
    return (
        loss,
        dscores * 2,
        ops.softmax_backward(ops.softmax(scores), dscores),
        ops.log_softmax_backward(ops.log_softmax(scores), dscores),
        ops.logsumexp(scores, axis=0),
        ops.logsumexp(scores, axis=0, keepdims=True),
        *ops.max_sum(scores, keepdims=np.True_),
    )


def sparse(*values):
    """Of what other ops compute, for other ops to use: along any axis of the first dtype, along one of the others."""
    results = []
    for x, axes in zip(values, SPARSE, strict=True):
        for axis in axes:
            y = ops.sparsemax(x * 0.5, axis=axis)
            results += [y, ops.sparsemax_backward(y, x, axis)]
    return results


def of_tokens(*given):
    *values, several, single, first, second, third = given
    results = []
    for x in values:
        results += ops.token_log_probs(x, several, 1, temperature=0.7, entropy=True)
        results.append(ops.token_log_probs(x, single))
        results.append(ops.token_log_probs_backward(x, several, first, second, 1, temperature=0.7))
        results.append(ops.token_log_probs_backward(x, single, third))
    return results


def divergence(x, teacher, dkl):
    return (
        ops.kl_divergence(x, teacher, 1, temperature=0.7),
        *ops.kl_divergence_backward(x, teacher, dkl, temperature=0.7, reverse=True),
        *ops.kl_divergence_backward(x, teacher),
    )


SPARSE = ((0, 1, -1), (1,), (1,), (1,))
"""Axes of sparsemax, of each dtype."""
DIMS = ("a", "b", "c")
FLOAT, HALF, WIDE = DType.float32, DType.bfloat16, DType.float64
TYPES = {
    attention: [(FLOAT, ("batch", "heads", "queries", "keys")), (FLOAT, ("rows", 1000))],
    numbers: [(FLOAT, (3, 37, 1001))],
    masked: [(FLOAT, ("heads", "queries", "keys"))],
    step: [(FLOAT, ("rows", "classes")), (DType.int64, ("rows",))],
    sparse: [(kind, DIMS) for kind in (FLOAT, HALF, DType.float16, WIDE)],
    of_tokens: [
        *[(kind, DIMS) for kind in (FLOAT, HALF, WIDE)],
        *[(DType.int64, ("a", "k", "c")), (DType.int32, ("a", "b"))],
        *[(FLOAT, dims) for dims in (("a", "k", "c"), ("a", "c"), ("a", "b"))],
    ],
    divergence: [(FLOAT, DIMS), (FLOAT, DIMS), (FLOAT, ("a", "b"))],
}


@pytest.fixture(scope="module")
def models(device):
    """The graphs above, by name, in one module: MAX takes 20 seconds for each module, and few for another graph."""
    module, where = Module(), runtime.device(device)
    for build, types in TYPES.items():
        given = [TensorType(kind, dims, DeviceRef.from_device(where)) for kind, dims in types]
        with Graph(build.__name__, input_types=given, module=module) as graph:
            graph.output(*build(*(value.tensor for value in graph.inputs)))
        assert maxsoftmax.extension() in graph.kernel_libraries_paths
    # It compiles the whole module of a graph, with the extension that the ops gave to that.
    return InferenceSession(devices=[where]).load_all(graph)


def run(model, device, *arrays):
    results = model.execute(*(buffer_of(x).to(runtime.device(device)) for x in arrays))
    return [array_of(result.to(CPU())) for result in results]


@pytest.mark.parametrize("shape", [(2, 3, 5, 129), (1, 1, 1, 1), (4, 8, 1, 33), (0, 2, 3, 4), (2, 2, 3, 0)])
def test_symbolic_and_static_dims(models, device, shape):
    x, w = logits(shape), logits((7, 1000), seed=1)
    results = run(models["attention"], device, x, w)
    check(results[0], x * np.float32(0.5))
    check(results[1], x, axis=1)
    check(results[2], x, axis=0)
    check(results[3], w)
    check(results[4], w.astype(np.float16), axis=0)


def test_numbers(models, device):
    x = logits((3, 37, 1001))
    wanted = [
        formed(-x, **FORMS),
        -formed(x, scale=-0.3),
        formed(x, 1, scale=0.3),
    ]
    for y, reference in zip(run(models["numbers"], device, x), wanted, strict=True):
        np.testing.assert_allclose(y, reference, rtol=4e-6, atol=1e-30)


@pytest.mark.parametrize("shape", [(2, 6, 40), (3, 40, 6), (0, 3, 4), (2, 0, 4)])
def test_a_mask_that_the_graph_computes(models, device, shape):
    x = logits(shape)
    (y,) = run(models["masked"], device, x)
    expected = formed(x, mask=np.tri(*shape[1:], dtype=bool)) if x.size else x
    np.testing.assert_allclose(y, expected, rtol=4e-6, atol=1e-30)


def test_gradients(models, device):
    x, target = logits((20, 5)), np.arange(20) % 5
    loss, double, dx, dlog_x, sums, kept, m, d = run(models["step"], device, x, target)
    scores = x.astype(np.float64) * 2
    expected, gradient = losses(scores, target, -100, 0)
    gradient /= 20
    close(loss, expected.mean())
    close(double, gradient * 2)
    close(dx, backward(scipy.special.softmax(scores, axis=1), gradient, 1, False))
    close(dlog_x, backward(scipy.special.log_softmax(scores, axis=1), gradient, 1, True))
    close(sums, scipy.special.logsumexp(scores, axis=0), scale=4)
    np.testing.assert_array_equal(kept, sums[None, :])
    np.testing.assert_array_equal(m, scores.max(1, keepdims=True))
    close(d, np.exp(scores - m).sum(1, keepdims=True), scale=4)


# With a last dimension of 1, rows of another axis are contiguous.
@pytest.mark.parametrize("shape", [(5, 70, 9), (3, 3000, 1)])
def test_sparsemax_has_the_bits_of_arrays(models, device, shape):
    arrays = [logits(shape, dtype) for dtype in DTYPES]
    results = iter(run(models["sparse"], device, *arrays))
    for x, axes in zip(arrays, SPARSE, strict=True):
        half = (x.astype(np.float64) * 0.5).astype(x.dtype)
        for axis in axes:
            y = maxsoftmax.sparsemax(half, axis, device=device)
            same(next(results), y)
            same(next(results), maxsoftmax.sparsemax_backward(y, x, axis, device=device))


def test_log_probs_of_tokens_have_the_bits_of_arrays(models, device):
    shape = (3, 700, 9)
    arrays = [logits(shape, dtype) for dtype in (np.float32, ml_dtypes.bfloat16, np.float64)]
    tokens = tokens_of(shape, 1, 2), tokens_of(shape, 2, None, dtype=np.int32)
    given = [logits(dims, seed=2) for dims in (tokens[0].shape, (3, 9), (3, 700))]
    results = iter(run(models["of_tokens"], device, *arrays, *tokens, *given))
    options = {"temperature": 0.7, "device": device}
    for x in arrays:
        exact = [g.astype(np.float64 if x.dtype == np.float64 else np.float32) for g in given]
        for expected in (
            *maxsoftmax.token_log_probs(x, tokens[0], 1, entropy=True, **options),
            maxsoftmax.token_log_probs(x, tokens[1], device=device),
            maxsoftmax.token_log_probs_backward(x, tokens[0], *exact[:2], 1, **options),
            maxsoftmax.token_log_probs_backward(x, tokens[1], exact[2], device=device),
        ):
            same(next(results), expected)


def test_the_divergence_has_the_bits_of_arrays(models, device):
    x, teacher = pair((3, 700, 9))
    given = x, teacher, logits((3, 700), seed=3)
    references = [
        maxsoftmax.kl_divergence(x, teacher, 1, temperature=0.7, device=device),
        *maxsoftmax.kl_divergence_backward(*given, temperature=0.7, reverse=True, device=device),
        *maxsoftmax.kl_divergence_backward(x, teacher, device=device),
    ]
    for found, reference in zip(run(models["divergence"], device, *given), references, strict=True):
        same(found, reference)


@pytest.mark.parametrize(
    ("dtype", "shape", "options", "error", "message"),
    [
        (
            DType.int32,
            ("n",),
            {},
            TypeError,
            "x has dtype int32, but the kernels take float32, bfloat16, float16, float64",
        ),
        (DType.bool, ("n",), {}, TypeError, "x has dtype bool"),
        (DType.float32, (), {}, ValueError, "x has rank 0, but softmax needs an axis"),
        (DType.float32, ("a", "b"), {"axis": 2}, ValueError, "axis 2 is out of bounds for x of rank 2"),
        (DType.float32, ("a", "b"), {"axis": -3}, ValueError, "axis -3 is out of bounds"),
        (DType.float32, ("a", "b"), {"axis": None}, TypeError, "axis must be an integer, not None"),
        (DType.float32, ("a", "b"), {"axis": (0, 1)}, TypeError, "axis must be an integer"),
        (DType.float32, ("a",), {"algorithm": "best"}, ValueError, "algorithm 'best' does not exist on the CPU"),
        (DType.float32, ("a",), {"block_size": 64}, ValueError, "block_size 64 has no meaning"),
    ],
)
def test_bad_arguments_add_nothing_to_the_graph(dtype, shape, options, error, message):
    with Graph("bad", input_types=[TensorType(dtype, shape, DeviceRef.CPU())]) as graph:
        before = str(graph)
        with pytest.raises(error, match=message) as raised:
            maxsoftmax.ops.softmax(graph.inputs[0].tensor, **options)
        assert str(graph) == before
    assert "\n" not in str(raised.value)


def test_wrong_algorithms_name_the_right_ones_of_the_device():
    with (
        Graph("gpu", input_types=[TensorType(DType.float32, ("n",), DeviceRef.GPU())]) as graph,
        pytest.raises(
            ValueError, match="algorithm 'best' does not exist on the GPU: choose from 'auto', 'elementwise'"
        ),
    ):
        maxsoftmax.ops.softmax(graph.inputs[0].tensor, algorithm="best")


def test_what_is_not_a_tensor_of_the_graph():
    with Graph("odd", input_types=[TensorType(DType.float32, ("n",), DeviceRef.CPU())]) as graph:
        for x in ("logits", None, object()):
            with pytest.raises(TypeError, match="x must be a tensor of the graph, not "):
                maxsoftmax.ops.softmax(x)
        with pytest.raises(
            TypeError, match=r"x is a value of a graph, not an array: use the function of this name in maxsoftmax\.ops"
        ):
            maxsoftmax.softmax(graph.inputs[0].tensor)


def test_a_value_of_another_graph_is_refused():
    types = [TensorType(DType.float32, (2, 3), DeviceRef.CPU()), BufferType(DType.float32, (2, 3), DeviceRef.CPU())]
    targets = TensorType(DType.int64, (2,), DeviceRef.CPU())
    with Graph("other", input_types=types) as graph:
        x, buffer = graph.inputs[0].tensor, graph.inputs[1].buffer
        y = max_ops.exp(x)
    with Graph("mine", input_types=[types[0], targets]) as graph:
        mine, target = (value.tensor for value in graph.inputs)

        def refused(name):
            return pytest.raises(ValueError, match=rf"^{name} is a value of another graph than 'mine', which is being")

        for theirs in (x, y):
            with refused("x"):
                maxsoftmax.ops.softmax(theirs)
            with refused("dy"):
                maxsoftmax.ops.softmax_backward(mine, theirs)
            for name in ("scale", "mask", "temperature"):
                with refused(name):
                    maxsoftmax.ops.softmax(mine, **{name: theirs})
        with refused("x"):
            maxsoftmax.ops.cross_entropy_backward_(buffer, target, mine)


def test_values_of_a_graph_are_its_own_in_its_branches():
    type = TensorType(DType.float32, (2, 3), DeviceRef.CPU())
    with Graph("branches", input_types=[type, TensorType(DType.bool, (), DeviceRef.CPU())]) as graph:
        x, chosen = (value.tensor for value in graph.inputs)

        def branch():
            return maxsoftmax.ops.softmax(max_ops.exp(maxsoftmax.ops.softmax(x)))

        (y,) = max_ops.cond(chosen, [type], branch, lambda: x)
        graph.output(maxsoftmax.ops.softmax(y.tensor))


def test_outside_a_graph_it_says_so():
    with Graph("closed", input_types=[TensorType(DType.float32, ("n",), DeviceRef.CPU())]) as graph:
        x = graph.inputs[0].tensor
    with pytest.raises(LookupError, match="no graph is being built: use maxsoftmax"):
        maxsoftmax.ops.softmax(x)
