"""Memory of large results on a CPU: used again once nobody has them, and not before."""

import functools
import gc
import os
import subprocess
import sys
import threading

import maxsoftmax
import numpy as np
import pytest
from maxsoftmax._arrays import reused

SHAPE = (2100, 1024)
"""Of a little more than `LARGE` bytes of float32."""


@pytest.fixture(autouse=True)
def nothing_is_free():
    gc.collect()
    reused._free.clear()


def logits(seed=0, shape=SHAPE):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def kept():
    return sum(block.nbytes for block in tuple(reused._free))


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "sparsemax"])
def test_the_next_result_lies_where_one_was_that_is_gone(op):
    x = logits()
    compute = getattr(maxsoftmax, op)
    y = compute(x)
    expected, place = y.copy(), y.ctypes.data
    assert y.flags.writeable
    assert place % 64 == 0
    other = compute(x)
    assert other.ctypes.data != place
    np.testing.assert_array_equal(y, expected)
    # A part keeps all of it.
    part = y[3]
    del y
    assert compute(x).ctypes.data != place
    np.testing.assert_array_equal(part, expected[3])
    del part
    found = [compute(x) for _ in range(3)]
    assert place in {y.ctypes.data for y in found}
    for y in found:
        np.testing.assert_array_equal(y, expected)


def test_a_result_of_another_size_lies_elsewhere():
    y = maxsoftmax.softmax(logits())
    size = y.nbytes
    del y
    assert kept() >= size
    larger = maxsoftmax.softmax(logits(shape=(2 * SHAPE[0], 1024)))
    much_smaller = maxsoftmax.softmax(logits()[:, :768].copy())
    assert larger.base is not None
    assert much_smaller.nbytes < reused.LARGE
    assert kept() >= size


def test_gradients_and_scaled_rows_too():
    x = logits()
    y = maxsoftmax.softmax(x, scale=0.5)
    dx = maxsoftmax.softmax_backward(y, x)
    place = dx.ctypes.data
    del dx
    assert maxsoftmax.softmax_backward(y, x).ctypes.data == place
    np.testing.assert_array_equal(maxsoftmax.softmax(x, scale=0.5), y)


def test_no_more_is_kept_than_the_limit(monkeypatch):
    size = logits().nbytes + reused.ALIGNMENT
    monkeypatch.setattr(reused, "_limit", lambda: 2 * size)
    held = [maxsoftmax.softmax(logits(seed)) for seed in range(5)]
    assert kept() == 0
    held.clear()
    assert kept() == 2 * size


def test_nothing_is_kept_of_small_results():
    maxsoftmax.softmax(logits(shape=(100, 1024)))
    assert not reused._free


def test_threads_have_memory_of_their_own():
    rows = [logits(seed) for seed in range(4)]
    expected = [maxsoftmax.softmax(x) for x in rows]
    wrong = []

    def work(i):
        for _ in range(20):
            y = maxsoftmax.softmax(rows[i])
            if not np.array_equal(y, expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tensors_too():
    torch = pytest.importorskip("torch")
    import maxsoftmax.torch as ours

    x = torch.from_numpy(logits()).requires_grad_()
    z = x.detach()
    functions = maxsoftmax.softmax, lambda z: ours.softmax(z, 1), lambda z: torch.ops.maxsoftmax.softmax(z, 1)
    for compute in (functools.partial(function, z) for function in functions):
        y = compute()
        expected, place = y.clone(), y.data_ptr()
        assert compute().data_ptr() != place
        row = y[3]
        del y
        assert compute().data_ptr() != place
        del row
        found = [compute() for _ in range(3)]
        assert place in {y.data_ptr() for y in found}
        assert all(torch.equal(y, expected) for y in found)
        # As another result of torch.
        found[0].add_(1).share_memory_()
        del found
    y = ours.softmax(x, 1)
    y.backward(torch.ones_like(y))
    assert float(x.grad.abs().max()) < 1e-6
    turned = ours.softmax(z.t(), 0)
    assert turned.stride() == (1, SHAPE[1])
    assert torch.equal(turned.t(), y.detach())


@pytest.mark.parametrize(
    ("value", "answer"), [("0", "0"), ("1e3", "MAXSOFTMAX_KEEP_MB is '1e3'; it is a number of megabytes, 0 for none")]
)
def test_the_limit_is_the_users(value, answer):
    code = (
        "import numpy, maxsoftmax; from maxsoftmax._arrays import reused;"
        "y = maxsoftmax.softmax(numpy.zeros((2100, 1024), 'f')); del y; print(len(reused._free))"
    )
    told = {**os.environ, "MAXSOFTMAX_KEEP_MB": value}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=told)
    assert (done.stdout or done.stderr).strip().endswith(answer)
