import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from maxsoftmax import _cache as cache
from maxsoftmax._interrupt import interruptible

WORK = {
    "a library": "maxsoftmax.softmax([0.0])",
    "libraries": "maxsoftmax.warm_up(ops=['softmax', 'log_softmax', 'sparsemax'])",
    "the package": "maxsoftmax.extension()",
    "a model": """
from max.graph import DeviceRef
from maxsoftmax._commands import demo
from maxsoftmax._graph import runtime

def made():
    built = demo.graph(DeviceRef.CPU(), (f"rows_{time.time_ns()}", "n"))
    timer.start()
    return built

runtime.model(runtime.device("cpu"), "rows", made)
""",
}

# A timer of the process itself sends the signal, to it alone: of a model once the graph is made.
SCRIPT = """
import maxsoftmax, os, signal, sys, threading, time

def interrupt():
    global sent
    sent = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)

# A shell has what runs in the background ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
timer = threading.Timer(1.0, interrupt)
timer.daemon = True
if "timer.start()" not in {work!r}:
    timer.start()
try:
{indented}
except KeyboardInterrupt:
    print(time.monotonic() - sent)
"""


@pytest.mark.parametrize("work", WORK)
def test_ctrl_c_ends_a_compile_within_a_second(tmp_path, environment, work):
    (tmp_path / "tmp").mkdir()
    own = {cache.VARIABLE: str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
    indented = "\n".join(f"    {line}" for line in WORK[work].splitlines())
    script = SCRIPT.format(work=WORK[work], indented=indented)
    process = subprocess.Popen(
        [sys.executable, "-c", script], env={**environment, **own}, stdout=subprocess.PIPE, encoding="utf-8"
    )
    told = process.stdout.readline()
    start = time.monotonic()
    process.stdout.close()
    # A thread of MAX is in the middle of something, and is not waited for.
    process.wait(timeout=60)
    assert float(told) < 1
    assert time.monotonic() - start < 5
    left = os.listdir(tmp_path / "cache")
    assert [name for name in left if not (work == "a model" and name.startswith("mojo-"))] == []
    assert os.listdir(tmp_path / "tmp") == []


def test_what_is_interruptible_returns_and_raises_as_it_does():
    def fail():
        raise ValueError("no")

    assert interruptible(lambda: 7) == 7
    with pytest.raises(ValueError, match="no"):
        interruptible(fail)


def test_who_gets_no_signals_runs_it_itself():
    found = []
    thread = threading.Thread(target=lambda: found.append(interruptible(threading.current_thread) is thread))
    thread.start()
    thread.join()
    assert found == [True]


SENT = {
    "to the process": lambda: os.kill(os.getpid(), signal.SIGINT),
    # Which does not wake the main thread.
    "to another thread": lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT),
}


@pytest.mark.parametrize("sent", SENT)
def test_an_interrupted_function_goes_on_in_a_thread_that_is_not_waited_for(sent):
    # A shell has what runs in the background ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    ended = threading.Event()
    threading.Timer(0.2, SENT[sent]).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interruptible(lambda: ended.wait(20))
    signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 1
    ended.set()
