import warnings

import maxsoftmax
import numpy as np
import pytest
from contract import check, logits
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from maxsoftmax import _arguments, _native


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
        (np.zeros(3, complex), {}, TypeError, r"x has dtype complex128, but the kernels take float16"),
        (np.array(["a"]), {}, TypeError, r"x has dtype <U1"),
        (np.array([None]), {}, TypeError, r"x has dtype object"),
        ([[1, 2], [3]], {}, ValueError, r"x is not an array, but a sequence of others that differ in shape"),
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
    monkeypatch.setattr(_native, "plan", None)
    with pytest.raises(error, match=message) as raised:
        maxsoftmax.softmax(x, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("function", ["softmax_backward", "log_softmax_backward", "sparsemax_backward"])
def test_gradients_name_their_own_argument(function):
    y = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"axis 2 is out of bounds for y of rank 2"):
        getattr(maxsoftmax, function)(y, y, axis=2)
    with pytest.raises(ValueError, match=r"axis \(0, -2\) names an axis of y twice"):
        getattr(maxsoftmax, function)(y, y, axis=(0, -2))


def test_gradients_in_graphs_name_their_own_argument():
    kind = TensorType(DType.float32, (2, 3), DeviceRef.CPU())
    with Graph("refused", input_types=[kind]) as graph:
        y = graph.inputs[0].tensor
        with pytest.raises(ValueError, match=r"axis 2 is out of bounds for y of rank 2"):
            maxsoftmax.ops.softmax_backward(y, y, axis=2)
        with pytest.raises(TypeError, match="causal must be True or False, not 1"):
            maxsoftmax.ops.softmax(y, causal=1)


X = logits((3, 4)).astype(np.float32)


def test_any_sequence_of_axes_is_taken_and_told_from_others():
    for axis in (range(2), np.array([0, 1]), [0, np.int64(1)], (0, 1)):
        np.testing.assert_array_equal(maxsoftmax.softmax(X, axis=axis), maxsoftmax.softmax(X, axis=None))
    np.testing.assert_array_equal(maxsoftmax.softmax(X, axis=range(1)), maxsoftmax.softmax(X, axis=0))
    for axis in ({0, 1}, 1.0, np.True_, np.array([0.5]), "01"):
        with pytest.raises(TypeError, match="axis must be an integer, a tuple of integers or None, not "):
            maxsoftmax.softmax(X, axis=axis)


@pytest.mark.parametrize("given", [np.True_, np.bool_(0)])
def test_bools_of_numpy_are_bools(given):
    np.testing.assert_array_equal(maxsoftmax.softmax(X, causal=given), maxsoftmax.softmax(X, causal=bool(given)))
    found = maxsoftmax.token_log_probs(X, [0, 1, 2], entropy=given)
    assert isinstance(found, tuple) == bool(given)


def test_numbers_of_numpy_and_lists_of_integers_are_numbers():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for share in (np.float16(0.5), np.float32(0.5), np.array(0.5), 0.5):
            found = maxsoftmax.cross_entropy(X, [0, 1, 2], label_smoothing=share)
            assert found == maxsoftmax.cross_entropy(X, [0, 1, 2], label_smoothing=0.5)
        assert _arguments.check_out("float8_e5m2", np.float16(2), "float32").scale == 2
    expected = maxsoftmax.softmax(X, scale=np.array([1.0, 2, 3, 4]), temperature=[[1.0], [2], [3]], sink=[0.0])
    found = maxsoftmax.softmax(X, scale=[1, 2, 3, 4], temperature=[[1], [2], [3]], sink=[0])
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(TypeError, match="mask has dtype int64, but must be of floats or bools"):
        maxsoftmax.softmax(X, mask=[0, 1, 1, 0])


def test_what_is_no_list_of_names_is_refused_in_one_sentence():
    with pytest.raises(TypeError, match="ops must be several names, not 5"):
        maxsoftmax.warm_up(ops=5)


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
        ("warp", {"block_size": 16}, "block_size 16 does not exist for .*: choose from 32, 64, 128, 256, 512, 1024"),
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
    [
        ("tree", {"block_size": 32}),
        ("warp", {"block_size": 32}),
        ("vector", {"block_size": 1024, "unroll": 8}),
        ("online", {"block_size": 256}),
    ],
)
def test_other_choices(algorithm, choice):
    for shape in [(5, 1), (5, 129), (3, 50257), (2, 1000, 7)]:
        x = logits(shape)
        for axis in range(len(shape)):
            check(maxsoftmax.softmax(x, axis=axis, device="gpu", algorithm=algorithm, **choice), x, axis=axis)
