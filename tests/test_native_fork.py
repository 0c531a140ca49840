from libraries import run
from maxsoftmax._native import fork

FORKED = """
import os, signal, threading

def child():
    signal.alarm(60)
    try:
        {child}
    except BaseException as error:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

{parent}
number = os.fork()
if not number:
    child()
assert os.waitpid(number, 0)[1] == 0
check()
"""


def test_a_fork_computes_what_its_parent_did(real, environment, alone):
    parent = "check(); plan = _native.plan('softmax', 'float32', -1, (2000, 1024, 1))"
    child = """
        x = np.zeros((2000, 1024), np.float32); y = np.empty_like(x)
        assert not plan.run(plan.call, 0, y.ctypes.data, x.ctypes.data, None) and (y == 1 / 1024).all()
        check()
        assert _native.plan("softmax", "float32", -1, (2000, 1024, 1)) is not plan
        assert plan._words[4] == _native.plan("softmax", "float32", -1, (6, 4, 1))._words[4] == 1
"""
    run(alone + FORKED.format(parent=parent, child=child), environment)


def test_a_fork_of_a_process_that_has_not_computed_uses_all_cores(real, environment, alone):
    child = "check(); assert _native.plan('softmax', 'float32', -1, (6, 4, 1))._words[4] == 0"
    run(alone + FORKED.format(parent="", child=child), environment)


def test_a_fork_while_another_thread_builds_does_not_hang(real, environment, alone):
    parent = """
from maxsoftmax._native import load
lock = load._locks.setdefault(_native.Library("softmax", "float32", _native.Target("cpu")), threading.Lock())
lock.acquire()
threading.Timer(2, lock.release).start()
"""
    run(alone + FORKED.format(parent=parent, child="check()"), environment)


def test_a_fork_of_a_process_that_has_used_a_gpu_says_to_spawn(real, environment, alone):
    parent = """
from maxsoftmax._native import fork
from maxsoftmax._native.plan import Plan, _alive
import ctypes
plan = Plan(0, lambda *_: None, (ctypes.c_int64 * 5)(), 0)
_alive.add(plan)
fork.opened(0)
"""
    child = """
        for call in (
            lambda: plan.run(plan.call, 0, 0, 0, None),
            lambda: _native.plan("softmax", "float32", 0, (6, 4, 1)),
            lambda: _native.index("gpu"),
        ):
            try:
                call()
            except RuntimeError as error:
                assert "spawn" in str(error) and "\\n" not in str(error)
            else:
                raise AssertionError
        check()
"""
    run(alone + FORKED.format(parent=parent, child=child), environment)


def test_here_is_no_fork():
    assert fork.threads() == 0
    assert not fork.has_lost_gpu()


def test_threads_that_compute_at_exit_do_no_harm(real, environment, alone):
    code = (
        alone
        + """
import threading
x = np.zeros((2000, 1024), np.float32)
def forever():
    while True:
        softmax(x)
for _ in range(2):
    threading.Thread(target=forever, daemon=True).start()
check()
"""
    )
    done = run(code, environment, "-X", "dev")
    assert done.stderr == ""
