import os
import shutil
import subprocess
import sys
import threading

import filelock
import pytest
from contract import check
from libraries import SOFTMAX, cache_names, computed, entry, run
from maxsoftmax import _cache as cache
from maxsoftmax._graph.extension import CompilerError
from maxsoftmax._native import build, load


@pytest.mark.parametrize("i", range(6))
def test_what_is_around_it_makes_another_library(monkeypatch, i):
    before = build.key(SOFTMAX)
    changed = list(build._surroundings())
    changed[i] += "x"
    monkeypatch.setattr(build, "_surroundings", lambda: tuple(changed))
    assert build.key(SOFTMAX) != before


def test_a_library_is_built_once(fresh, compiler, x, capfd):
    check(computed(x), x)
    check(computed(x[:3]), x[:3])
    assert compiler == [SOFTMAX]
    assert capfd.readouterr().err == "maxsoftmax: building softmax of float32 for the CPU, once: it takes seconds\n"
    load._libraries.clear()
    load.load(SOFTMAX)
    assert compiler == [SOFTMAX]
    assert capfd.readouterr().err == ""
    assert os.listdir(fresh) == [entry(fresh).parent.name]


def test_threads_build_it_once(fresh, compiler, x):
    together = threading.Barrier(8, timeout=60)
    found = []

    def get():
        together.wait()
        found.append(computed(x))

    threads = [threading.Thread(target=get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler == [SOFTMAX]
    assert len(found) == 8
    for y in found:
        check(y, x)


def test_processes_build_it_once(tmp_path, environment, alone):
    code = alone + "check()"
    env = {**environment, cache.VARIABLE: str(tmp_path / "cache")}
    command = [sys.executable, "-W", "error", "-c", code]
    processes = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, encoding="utf-8") for _ in range(8)]
    told = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, told
    assert "".join(told).count("maxsoftmax: building softmax of float32 for the CPU") == 1
    waiting = "maxsoftmax: waiting for the process that builds softmax of float32 for the CPU, once: it takes seconds\n"
    assert all(line in ("", waiting) or "building" in line for line in told)
    assert len(cache_names(tmp_path / "cache")) == 1


def test_a_corrupt_library_is_built_anew(fresh, compiler, x):
    load.load(SOFTMAX)
    for damage in (lambda path: path.write_bytes(b"evil"), lambda path: path.chmod(0o666)):
        damage(entry(fresh))
        load._libraries.clear()
        with pytest.warns(RuntimeWarning, match="damaged or is not private"):
            load.load(SOFTMAX)
    assert compiler == [SOFTMAX] * 3
    check(computed(x), x)


def test_a_library_that_cannot_be_loaded_is_built_anew(fresh, compiler, x):
    cache.entry(build.key(SOFTMAX), build.FILE, lambda path: path.write_bytes(b"no library"))
    with pytest.warns(RuntimeWarning, match="is built anew, because it cannot be loaded"):
        check(computed(x), x)
    assert compiler == [SOFTMAX]


def test_what_cannot_be_kept_is_a_warning(fresh, compiler, x, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "entry", full)
    with pytest.warns(RuntimeWarning, match="not kept for the next process: .*No space left") as warned:
        check(computed(x), x)
    assert len(warned) == 1
    assert compiler == [SOFTMAX]
    assert os.listdir(fresh) == []


def test_a_cache_that_others_may_write_to_is_a_warning(fresh, compiler, x, monkeypatch):
    fresh.mkdir()
    fresh.chmod(0o777)
    cache.temporary.cache_clear()
    with pytest.warns(RuntimeWarning, match="cannot keep compiled code.*others may write to it") as warned:
        check(computed(x), x)
    assert len(warned) == 1
    assert os.listdir(fresh) == []


def test_a_cache_that_cannot_be_made_is_a_warning(fresh, compiler, x, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="cannot keep compiled code") as warned:
        check(computed(x), x)
    assert len(warned) == 1


def test_a_compiler_that_fails_is_quoted(real):
    message = r"(?s)nothing of float32 for the CPU cannot be built:[ \n].*error.*nothing\.mojo"
    with pytest.raises(CompilerError, match=message), build.built(SOFTMAX._replace(name="nothing")):
        pass


def test_without_a_compiler_the_error_says_what_to_do(fresh, monkeypatch):
    def missing(*names):
        raise sys.modules["maxsoftmax._graph.extension"].PackageNotFoundError(names[-1])

    monkeypatch.setattr(sys.modules["maxsoftmax._graph.extension"], "distribution_version", missing)
    build._surroundings.cache_clear()
    with pytest.raises(RuntimeError, match=r"compiler is not installed.*maxsoftmax compile"):
        load.load(SOFTMAX)
    assert not fresh.exists()


# Locks


def held(folder, key):
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = filelock.FileLock(folder / f"{cache.LOCK}{key}", thread_local=False)
    lock.acquire()
    return lock


def test_who_waits_says_so_and_finds_what_was_built(fresh, compiler, x, capfd, real):
    key = build.key(SOFTMAX)
    lock = held(fresh, key)

    def finish():
        cache.entry(key, build.FILE, lambda path: shutil.copy(real, path))
        lock.release()

    timer = threading.Timer(0.5, finish)
    timer.start()
    check(computed(x), x)
    timer.join()
    assert compiler == []
    assert capfd.readouterr().err.startswith("maxsoftmax: waiting for the process that builds softmax of float32")


def test_who_has_waited_long_enough_builds(fresh, compiler, x, monkeypatch):
    monkeypatch.setattr(cache, "WAIT_S", 0.1)
    lock = held(fresh, build.key(SOFTMAX))
    check(computed(x), x)
    lock.release()
    assert compiler == [SOFTMAX]


@pytest.mark.parametrize("error", [OSError(95, "Operation not supported"), NotImplementedError()])
def test_a_lock_that_cannot_be_had_is_no_reason_to_fail(fresh, compiler, x, monkeypatch, error):
    def refuse(*_, **options):
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    check(computed(x), x)
    assert compiler == [SOFTMAX]
    assert entry(fresh).exists()


def test_what_a_killed_process_has_locked_is_cleared(fresh):
    held(fresh, "native-1").release()
    assert os.listdir(fresh) == [".lock-native-1"]
    cache.clear()
    assert os.listdir(fresh) == []


# Processes


def test_the_next_process_starts_quickly_without_graphs(real, environment, alone):
    code = f"""
import time
start = time.perf_counter()
{alone}
check()
print(time.perf_counter() - start)
assert [name for name in sys.modules if name.startswith(("max.", "mojo", "filelock", "rich"))] == []
"""
    done = run(code, environment, "-X", "dev", "-W", "error")
    assert done.stderr == ""
    # A quarter of that, where nothing else is running.
    assert float(done.stdout) < 2
