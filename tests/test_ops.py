import maxsoftmax
import numpy as np
import pytest
from contract import check
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType
from max.graph import ops as max_ops
from maxsoftmax._graph import runtime


def logits(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * 4


def place(device):
    return DeviceRef.from_device(runtime.device(device))


def load(graph, device):
    return InferenceSession(devices=[runtime.device(device)]).load(graph)


def test_a_larger_graph_with_symbolic_and_static_dims(device):
    """Attention weights: an elementwise producer, three axes, a static length and a consumer, in one graph."""
    types = [
        TensorType(DType.float32, ("batch", "heads", "queries", "keys"), place(device)),
        TensorType(DType.float32, ("rows", 1000), place(device)),
    ]
    with Graph("attention", input_types=types, custom_extensions=[maxsoftmax.extension()]) as graph:
        scores, wide = (value.tensor for value in graph.inputs)
        weights = maxsoftmax.ops.softmax(scores * 0.5)
        over_heads = maxsoftmax.ops.softmax(scores, axis=1)
        over_batch = maxsoftmax.ops.softmax(scores, axis=-4)
        static = maxsoftmax.ops.softmax(wide, axis=1, algorithm="auto")
        half = maxsoftmax.ops.softmax(max_ops.cast(wide, DType.float16), axis=0)
        graph.output(weights + 0.0, over_heads, over_batch, static, half)
        assert weights.type == types[0]
        assert static.shape == wide.shape
    model = load(graph, device)
    for shape in [(2, 3, 5, 129), (1, 1, 1, 1), (4, 8, 1, 33), (0, 2, 3, 4), (2, 2, 3, 0)]:
        x, w = logits(*shape), logits(7, 1000, seed=1)
        inputs = [Buffer.from_numpy(a).to(runtime.device(device)) for a in (x, w)]
        results = [result.to_numpy() for result in model.execute(*inputs)]
        check(results[0], x * np.float32(0.5))
        check(results[1], x, axis=1)
        check(results[2], x, axis=0)
        check(results[3], w)
        check(results[4], w.astype(np.float16), axis=0)


def test_a_graph_without_the_extension_is_given_it():
    with Graph("bare", input_types=[TensorType(DType.float32, ("n",), DeviceRef.CPU())]) as graph:
        graph.output(maxsoftmax.ops.softmax(graph.inputs[0].tensor))
    assert maxsoftmax.extension() in graph.kernel_libraries_paths
    x = logits(50)
    check(load(graph, "cpu").execute(x)[0].to_numpy(), x)


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
