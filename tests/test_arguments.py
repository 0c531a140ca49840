import maxsoftmax
import numpy as np
import pytest
from contract import check, logits
from maxsoftmax import _native


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
