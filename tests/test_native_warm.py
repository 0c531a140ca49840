import time
import warnings

import pytest
from contract import check
from libraries import CPU, SOFTMAX, computed, run
from maxsoftmax import _native
from maxsoftmax._native import description, devices, load, warm
from maxsoftmax._native.description import Library, Target, library


def test_many_libraries_are_built_together():
    gpu = [library(name, "float32", Target("gpu", "sm_90a")) for name in description.POINTERS]
    every = [library(name, dtype, CPU) for dtype in ("float32", "float64") for name in description.WHOLE]
    assert warm.together(gpu + every) == [*gpu, every[0].bundle(), every[-1].bundle()]
    assert warm.together(every[: warm.WORTH - 1]) == every[: warm.WORTH - 1]
    assert warm.together([]) == []


# Warming up


@pytest.fixture
def warmed(fresh, monkeypatch):
    """The libraries that are loaded, none of which is built."""
    made = []
    monkeypatch.setattr(load, "load", made.append)
    monkeypatch.setattr(load, "load_bundle", made.append)
    monkeypatch.setattr(load, "is_there", lambda library: library.name == "log_softmax_backward")
    monkeypatch.setattr(load, "functions", lambda *_, **options: None)
    return made


def test_what_is_wanted_is_made_ready(warmed):
    ops = ["logsumexp", "max_sum", "log_softmax", "log_softmax_backward"]
    _native.warm_up(ops=ops, dtypes=["float64", "bfloat16"], device="cpu")
    assert sorted((each.name, each.dtype) for each in warmed) == [
        ("log_softmax", "bfloat16"),
        ("log_softmax", "float64"),
        ("statistics", "bfloat16"),
        ("statistics", "float64"),
    ]


def test_what_writes_another_dtype_is_made_ready(warmed):
    _native.warm_up(dtypes=["float32", "bfloat16"], out_dtype="bfloat16")
    assert {(each.name, each.dtype, each.out_dtype) for each in warmed} == {
        (name, dtype, to)
        for name in description.CONVERTING
        for dtype, to in (("float32", "bfloat16"), ("bfloat16", ""))
    }


def test_all_of_it_is_made_ready(warmed):
    _native.warm_up()
    assert warmed == [Library("all", "float32", CPU)]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"ops": "softmax"}, TypeError, "ops must be several names, not the string 'softmax'"),
        ({"ops": ["what"]}, ValueError, "ops has 'what': choose from 'softmax', "),
        ({"out_dtype": "int8"}, ValueError, "out_dtype has 'int8': choose from 'float32', "),
        (
            {"ops": ["sparsemax"], "out_dtype": "float16"},
            ValueError,
            "out_dtype float16 goes with softmax and log_softmax, and sparsemax has none",
        ),
        ({"dtypes": "float32"}, TypeError, "dtypes must be several names"),
        ({"dtypes": ["int8"]}, ValueError, "dtypes has 'int8': choose from 'float32', "),
        ({"device": "tpu"}, ValueError, "device 'tpu' is not on this machine"),
    ],
)
def test_what_cannot_be_made_ready_is_refused(warmed, options, kind, message):
    with pytest.raises(kind, match=message):
        _native.warm_up(**options)
    assert warmed == []


def test_what_was_made_ready_is_there(fresh, compiler, x, monkeypatch):
    monkeypatch.setattr(warm, "libraries", lambda *_: ["softmax"])
    _native.warm_up()
    assert compiler == [SOFTMAX]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(computed(x), x)
    assert compiler == [SOFTMAX]


def test_all_of_it_serves_every_op_and_the_next_process(environment, alone):
    code = """
x = np.random.default_rng(0).standard_normal((6, 5))
target, pairs, loss, y = np.zeros(6, np.int64), np.empty((6, 2)), np.empty(1), np.empty((6, 5))

def call(name, *arrays, options=()):
    plan = _native.plan(name, "float64", -1, (6, 5, 1), options)
    error = plan.run(plan.call, 0, *(array.ctypes.data for array in arrays), None)
    if error:
        _native.fail(error)

expected = np.exp(x) / np.exp(x).sum(1, keepdims=True)
call("softmax", y, x)
np.testing.assert_allclose(y, expected)
call("log_softmax", y, x)
np.testing.assert_allclose(np.exp(y), expected)
call("cross_entropy", loss, pairs, x, target, options=(-100, 0, 2, 1))
np.testing.assert_allclose(loss, -y[:, 0].mean())
"""
    # In the cache of all tests, where it may be: it takes a minute.
    run(f"{alone}_native.warm_up(dtypes=['float64']){code}", environment)
    # Building says so.
    assert run(alone + code, environment, "-W", "error").stderr == ""


def test_one_that_fails_ends_it():
    def work(i):
        if i == 0:
            raise RuntimeError("cannot be built")
        time.sleep(0.05)
        done.append(i)

    done = []
    with pytest.raises(RuntimeError, match="cannot be built"):
        warm.parallel(work, range(1000))
    assert len(done) < 100


def test_results_are_in_order():
    assert warm.parallel(lambda i: i * i, range(20)) == [i * i for i in range(20)]
    assert devices.target(-1) == CPU
