import contextlib
import ctypes
import io
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings

import filelock
import numpy as np
import pytest
from contract import check
from maxsoftmax import _cache as cache
from maxsoftmax import _native
from maxsoftmax._graph.extension import CompilerError
from maxsoftmax._native import build, description, devices, fork, load, machine, precompiled, progress, warm
from maxsoftmax._native.description import Library, Target, library

CPU = Target("cpu")
SOFTMAX = Library("softmax", "float32", CPU)
ROWS = (6, 5, 1)

# Of the package itself only what is wanted: its own imports are tested elsewhere.
ALONE = """
import sys, types
package = types.ModuleType("maxsoftmax")
package.__path__, package.__version__ = [{path!r}], {version!r}
sys.modules["maxsoftmax"] = package
import numpy as np
from maxsoftmax import _native

def softmax(x):
    plan = _native.plan("softmax", "float32", -1, (x.shape[0], x.shape[1], 1))
    y = np.empty_like(x)
    error = plan.run(plan.call, 0, y.ctypes.data, x.ctypes.data, None)
    if error:
        _native.fail(error)
    return y

def check():
    for shape in ((6, 4), (2000, 1024)):
        assert (softmax(np.zeros(shape, np.float32)) == 1 / shape[1]).all()
"""


def computed(x, **options):
    made = _native.plan("softmax", "float32", -1, (x.shape[0], x.shape[1], 1), **options)
    y = np.empty_like(x)
    error = made.run(made.call, 0, y.ctypes.data, x.ctypes.data, None)
    assert not error
    return y


@pytest.fixture(scope="session")
def x():
    return np.random.default_rng(0).standard_normal((6, 5), dtype=np.float32)


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """A library, built by the compiler."""
    path = tmp_path_factory.mktemp("real") / build.FILE
    folder = cache.entry(build.key(SOFTMAX), build.FILE, _copy_built)
    shutil.copy(folder, path)
    return path


def _copy_built(path):
    with build.built(SOFTMAX) as built:
        shutil.copy(built, path)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A process that has loaded nothing yet, with an empty cache, whose folder this is."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(precompiled.VARIABLE, raising=False)
    monkeypatch.setattr(load, "_libraries", {})
    cached = (_native.plan, load.functions)
    for function in cached:
        function.cache_clear()
    yield tmp_path / "cache"
    for function in cached:
        function.cache_clear()


@pytest.fixture
def compiler(monkeypatch, real):
    """The libraries that were built, by a compiler that always makes the same."""
    made = []

    @contextlib.contextmanager
    def built(library, target_cpu=""):
        with progress.shown(library):
            made.append(library)
            time.sleep(0.2)
            path = real.with_name(f"{len(made)}-{os.getpid()}.so")
            shutil.copy(real, path)
            yield path
            path.unlink()

    monkeypatch.setattr(build, "built", built)
    return made


@pytest.fixture
def alone(root):
    """A script that loads libraries with as little else as can be."""
    from maxsoftmax import __version__

    return ALONE.format(path=str(root / "python" / "maxsoftmax"), version=__version__)


def run(code, environment, *options, **more):
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**environment, **more},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def entry(folder):
    (found,) = (path for path in folder.iterdir() if path.name.startswith("native-"))
    return found / build.FILE


# Calls


def test_a_call_computes(x):
    check(computed(x), x)


def test_a_plan_is_made_once():
    made = _native.plan("softmax", "float32", -1, ROWS)
    assert _native.plan("softmax", "float32", -1, ROWS) is made
    assert made.scratch == 0
    others = {_native.plan("softmax", "float32", -1, (6, 5, i)).call for i in range(10)}
    assert len(others) == 10
    assert made.call in others


def test_a_call_says_what_it_was_told():
    made = _native.plan("softmax", "float32", -1, (2, 3, 4), (7, _native.bits(0.5), -(2**63)))
    told = (ctypes.c_int64 * 8).from_address(made.call)
    assert list(told) == [load._contexts[-1], 2, 3, 4, 0, 7, 0x3FE0000000000000, -(2**63)]


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -1e-300, float("inf")])
def test_bits_are_those_of_a_double(number):
    assert _native.bits(number) == int(np.float64(number).view(np.int64))


@pytest.mark.parametrize(("status", "kind"), [("V", ValueError), ("R", RuntimeError)])
def test_an_error_is_raised_and_released(monkeypatch, status, kind):
    freed = []
    free = load._free
    monkeypatch.setattr(load, "_free", lambda address: (freed.append(address), free(address)))
    duplicate = ctypes.CDLL(None).strdup
    duplicate.restype = ctypes.c_void_p
    address = duplicate(f"{status}target[3] is 7 × 1".encode())
    with pytest.raises(kind, match=r"^target\[3\] is 7 × 1$"):
        _native.fail(address)
    assert freed == [address]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("what", "float32"), {}),
        (("softmax", "int8"), {}),
        (("statistics", "float32"), {"algorithm": "naive"}),
    ],
)
def test_what_there_is_no_library_for_is_refused(arguments, options):
    with pytest.raises(ValueError, match=r"there is no library|is one of softmax"):
        _native.plan(*arguments, -1, ROWS, **options)


# Devices


def test_a_device_has_an_index(device):
    assert _native.index(device) == {"cpu": -1, "gpu": 0}[device]


def test_a_device_of_max_has_an_index():
    from max.driver import CPU

    assert _native.index(CPU()) == -1


@pytest.mark.parametrize("name", ["tpu", "gpu:01", "gpu:9999", "cpu:0", ""])
def test_an_unknown_device_is_refused_with_those_present(name):
    with pytest.raises(ValueError, match=rf"device '{name}' is not on this machine, which has 'cpu'"):
        _native.index(name)


def test_what_is_no_device_is_refused():
    with pytest.raises(TypeError, match="device must be a string"):
        _native.index(0)


def test_a_gpu_that_is_not_here_is_refused():
    with pytest.raises(ValueError, match="there is no GPU 99"):
        _native.plan("softmax", "float32", 99, ROWS)


# Libraries


def test_what_a_kernel_does_not_leave_to_its_caller_makes_no_other_library():
    gpu = Target("gpu", "sm_90a")
    for target, algorithm in ((CPU, "auto"), (CPU, "naive"), (gpu, "auto")):
        one, other = (library("softmax", "float32", target, algorithm, block_size=size) for size in (128, 256))
        assert one == other
        assert one.defines().keys() - {"ALGORITHM"} == {"DTYPE", "TARGET"}
    online = library("softmax", "bfloat16", gpu, "online", block_size=512, unroll=2)
    assert online.defines() == {
        **{"DTYPE": "bfloat16", "TARGET": "gpu"},
        **{"ALGORITHM": "online", "BLOCK_SIZE": "512", "UNROLL": "2"},
    }


def test_libraries_have_names_of_their_own():
    made = [
        library(name, dtype, target)
        for name in description.POINTERS
        for dtype in description.DTYPES
        for target in (CPU, Target("gpu", "sm_90a"), Target("gpu", "gfx942"))
    ]
    names = [each.file_name(cpu) for each in made for cpu in ("", "x86-64-v4")]
    assert len(set(names)) == len(names) == len(set(map(build.key, made))) * 2
    assert "softmax-float32-gpu-sm_90a-x86-64-v4.so" in names


def test_every_function_has_its_libraries():
    assert {name for names in description.OPS.values() for name in names} == set(description.POINTERS)


def test_a_bundle_has_all_that_is_for_a_cpu():
    bundle = Library("all", "float32", CPU)
    assert SOFTMAX.bundle() == Library("statistics", "float32", CPU).bundle() == bundle
    assert SOFTMAX._replace(dtype="float16").bundle() != bundle
    for other in (bundle, SOFTMAX._replace(algorithm="naive"), SOFTMAX._replace(target=Target("gpu", "sm_90a"))):
        assert other.bundle() is None
    text = build.bundle.text()
    assert {name for name in description.POINTERS if f'@export("maxsoftmax_run_{name}")' in text} == {
        *description.WHOLE
    }
    assert Library("shard", "float32", CPU).bundle() is None
    assert "def run_cross_entropy(call: Int, stream: Int, p0: Int, p1: Int, p2: Int, p3: Int, scratch: Int)" in text
    assert str(bundle) == "every op of float32 for the CPU"


def test_many_libraries_are_built_together():
    gpu = [library(name, "float32", Target("gpu", "sm_90a")) for name in description.POINTERS]
    every = [library(name, dtype, CPU) for dtype in ("float32", "float64") for name in description.WHOLE]
    assert warm.together(gpu + every) == [*gpu, every[0].bundle(), every[-1].bundle()]
    assert warm.together(every[: warm.WORTH - 1]) == every[: warm.WORTH - 1]
    assert warm.together([]) == []


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


def cache_names(folder):
    """What is in a cache, which is to be entries alone."""
    names = os.listdir(folder)
    assert all(name.startswith("native-") for name in names), names
    return names


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


def test_a_full_disk_is_a_warning(fresh, compiler, x, monkeypatch):
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
    cache._temporary.cache_clear()
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


# What is told


def test_an_observer_sees_each_build_and_nothing_is_written(fresh, compiler, capfd):
    seen = []

    @contextlib.contextmanager
    def observer(library):
        seen.append(str(library))
        yield
        seen.append("built")

    with _native.observing(observer):
        load.load(SOFTMAX)
    assert seen == ["softmax of float32 for the CPU", "built"]
    assert capfd.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_it_is_wiped_in_the_end(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setattr(sys, "stderr", terminal)
    display = progress.Display()
    with display.showing("building this"):
        with display.showing("building that"):
            time.sleep(0.2)
        time.sleep(0.2)
    shown = terminal.getvalue()
    assert "building this" in shown
    assert "building that (and 1 more)" in shown
    assert shown.rstrip().endswith("\x1b[2K")
    assert display._status is None


def test_without_stderr_nothing_is_told(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress.shown(SOFTMAX):
        pass


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


# Processors

ZEN5 = (
    "adx aes avx avx2 avx512bf16 avx512bitalg avx512bw avx512cd avx512dq avx512f avx512ifma avx512vbmi avx512vbmi2 "
    "avx512vl avx512vnni avx512vp2intersect avx512vpopcntdq avxvnni bmi bmi2 clflushopt clwb clzero crc32 cx16 cx8 "
    "f16c fma fsgsbase fxsr gfni invpcid lzcnt mmx movbe pclmul popcnt prfchw rdpid rdrnd rdseed sahf sha shstk sse "
    "sse2 sse3 sse4.1 sse4.2 sse4a ssse3 vaes vpclmulqdq x87 xsave xsavec xsaveopt xsaves"
)
FLAGS = (
    "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 ht syscall nx "
    "mmxext fxsr_opt pdpe1gb rdtscp lm constant_tsc rep_good nopl xtopology nonstop_tsc cpuid extd_apicid "
    "tsc_known_freq pni pclmulqdq ssse3 fma cx16 pcid sse4_1 sse4_2 x2apic movbe popcnt tsc_deadline_timer aes xsave "
    "avx f16c rdrand hypervisor lahf_lm cmp_legacy cr8_legacy abm sse4a misalignsse 3dnowprefetch osvw topoext "
    "vmmcall fsgsbase tsc_adjust bmi1 avx2 smep bmi2 erms invpcid avx512f avx512dq rdseed adx smap avx512ifma "
    "clflushopt clwb avx512cd sha_ni avx512bw avx512vl xsaveopt xsavec xgetbv1 xsaves avx_vnni avx512_bf16 clzero "
    "xsaveerptr arat avx512vbmi umip avx512_vbmi2 gfni vaes vpclmulqdq avx512_vnni avx512_bitalg avx512_vpopcntdq "
    "rdpid fsrm avx512_vp2intersect"
)


def test_a_processor_has_what_linux_says(monkeypatch):
    monkeypatch.setattr(machine, "processor", lambda: f"model name\t: AMD EPYC\nflags\t\t: {FLAGS}")
    assert machine.missing(ZEN5.split()) == []
    assert machine.missing(["avx512fp16", "amx-tile", "avx"]) == ["avx512fp16", "amx-tile"]
    older = re.sub(r"avx512_bf16|avx_vnni", "", FLAGS)
    monkeypatch.setattr(machine, "processor", lambda: f"flags\t\t: {older}")
    assert machine.missing(ZEN5.split()) == ["avx512bf16", "avxvnni"]


def test_an_unknown_processor_has_nothing(monkeypatch):
    monkeypatch.setattr(machine, "processor", lambda: "arm")
    assert machine.missing(["neon"]) == ["neon"]


def test_arm_has_names_of_its_own(monkeypatch):
    monkeypatch.setattr(machine, "processor", lambda: "Features\t: fp asimd aes sha2 crc32 atomics asimdrdm lrcpc")
    assert machine.missing(["fp-armv8", "neon", "aes", "sha2", "crc", "lse", "rdm", "rcpc", "perfmon"]) == []
    assert machine.missing(["neon", "sve"]) == ["sve"]


@pytest.mark.skipif(not os.path.exists("/proc/cpuinfo"), reason="no Linux")
def test_this_processor_has_what_the_compiler_uses_here():
    features = build.features()
    assert features
    assert machine.missing(features) == []


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


def test_all_of_it_serves_every_op_and_the_next_process(tmp_path, environment, alone, monkeypatch):
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
    env = {**environment, cache.VARIABLE: str(tmp_path / "cache")}
    first = run(f"{alone}_native.warm_up(dtypes=['float64']){code}", env)
    assert first.stderr == "maxsoftmax: building every op of float64 for the CPU, once: it takes seconds\n"
    assert len(cache_names(tmp_path / "cache")) == 1
    again = run(alone + code, env, "-W", "error")
    assert again.stderr == ""
    assert len(cache_names(tmp_path / "cache")) == 1


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
