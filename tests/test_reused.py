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

LARGE_ROWS = reused.LARGE // 4 + 1000
"""Rows of which one float32 each has as many."""


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


@pytest.mark.parametrize("behind", [0, 16, 64, 1000, 2048, 4080])
def test_a_result_lies_half_a_page_off_what_it_is_made_of(behind):
    memory = np.empty(SHAPE[0] * SHAPE[1] + 2048, np.float32)
    start = (behind - memory.ctypes.data) % 4096 // 4
    x = memory[start : start + SHAPE[0] * SHAPE[1]].reshape(SHAPE)
    x[:] = logits()
    places = [maxsoftmax.softmax(x).ctypes.data for _ in range(2)]
    places += [maxsoftmax.softmax(x, scale=2.0).ctypes.data, maxsoftmax.softmax_backward(x, x).ctypes.data]
    for place in places:
        assert place % 64 == 0
        assert 2048 <= (place - x.ctypes.data) % 4096 < 2048 + 64


def test_a_tensor_s_result_lies_half_a_page_off_it():
    torch = pytest.importorskip("torch")
    import maxsoftmax.torch as ours

    x = torch.from_numpy(logits())
    for _ in range(2):
        assert 2048 <= (ours.softmax(x, -1).data_ptr() - x.data_ptr()) % 4096 < 2048 + 64


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


def test_results_that_do_not_lie_in_c_order_too():
    x = logits().T
    y = maxsoftmax.softmax(x, axis=0)
    expected, place = y.copy(), y.ctypes.data
    assert y.flags.f_contiguous
    for _ in range(3):
        del y
        y = maxsoftmax.softmax(x, axis=0)
        assert y.ctypes.data == place
        assert y.strides == x.strides
        np.testing.assert_array_equal(y, expected)


def test_one_value_a_row_too():
    x = logits(shape=(LARGE_ROWS, 2))
    places = set()
    for _ in range(4):
        y = maxsoftmax.logsumexp(x)
        places.add(y.ctypes.data)
        np.testing.assert_allclose(y, np.logaddexp(x[:, 0], x[:, 1]), rtol=1e-6, atol=1e-6)
        del y
    assert len(places) <= 2


def test_what_is_more_than_the_limit_drives_nothing_out(monkeypatch):
    monkeypatch.setattr(reused, "_limit", lambda: 2 * logits().nbytes)
    maxsoftmax.softmax(logits())
    before = kept()
    maxsoftmax.softmax(logits(shape=(3 * SHAPE[0], 1024)))
    assert kept() == before > 0


def test_a_thread_may_have_a_result_when_python_ends():
    code = (
        "import numpy, threading, time\n"
        "from maxsoftmax._arrays import reused\n"
        "def work():\n"
        "    y = reused.array((1 << 23,), numpy.dtype('f'), (0,))\n"
        "    y[:] = numpy.random.rand(y.size)\n"
        "    busy.set()\n"
        "    y.sort()\n"
        "busy = threading.Event()\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "busy.wait()\n"
        "time.sleep(0.05)\n"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_no_more_is_kept_than_the_limit(monkeypatch):
    size = logits().nbytes + reused.ALIASED
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
    room = torch.empty(z.numel() + 1)[1:].view(z.shape).copy_(z)
    y = ours.softmax(room, 1)
    place = y.data_ptr()
    del y
    assert ours.softmax(room, 1).data_ptr() == place
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
