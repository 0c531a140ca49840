import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings

import maxsoftmax
import platformdirs
import pytest
from maxsoftmax import _cache as cache
from maxsoftmax._graph.extension import CompilerError

CODE = b"compiled" * 1000


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache folder, not yet made; temporary ones appear beside it."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "cache"


def write(path):
    path.write_bytes(CODE)


def forbidden(path):
    pytest.fail("built again")


def silently(build, key="key"):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return cache.entry(key, "file", build)


def check_rebuilt(folder):
    """Asserts that the entry is refused with a warning, made anew, and then trusted."""
    with pytest.warns(RuntimeWarning, match="damaged or is not private"):
        path = cache.entry("key", "file", write)
    assert path == folder / "key" / "file"
    assert path.read_bytes() == CODE
    assert silently(forbidden) == path
    assert os.listdir(folder) == ["key"]


def check_temporary(folder, reason):
    with pytest.warns(RuntimeWarning, match=f"{reason}.*a temporary folder is used"):
        path = cache.entry("key", "file", write)
    assert path.is_relative_to(folder.parent / "tmp")
    assert path.read_bytes() == CODE
    assert silently(forbidden) == path


def test_an_entry_is_built_once(folder):
    path = silently(write)
    assert path == folder / "key" / "file"
    assert silently(forbidden) == path
    assert path.read_bytes() == CODE


def test_an_entry_is_built_on_the_file_system_where_it_will_be(folder):
    places = []
    path = silently(lambda path: (places.append(path), write(path)))
    assert places[0] != path
    assert places[0].parent.parent == folder


def test_entries_are_apart(folder):
    first = silently(write)
    second = silently(lambda path: path.write_bytes(b"other"), "another key")
    assert (first.read_bytes(), second.read_bytes()) == (CODE, b"other")
    assert sorted(os.listdir(folder)) == ["another key", "key"]


def test_everything_is_private(folder):
    path = silently(write)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_a_permissive_umask_does_not_make_entries_suspect(folder):
    before = os.umask(0o002)
    try:
        path = silently(write)
    finally:
        os.umask(before)
    assert silently(forbidden) == path


def test_the_variable_moves_the_folder(folder, tmp_path, monkeypatch):
    assert cache.location() == folder
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cache.VARIABLE, "elsewhere")
    assert cache.location() == tmp_path / "elsewhere"
    assert silently(write) == tmp_path / "elsewhere" / "key" / "file"


@pytest.mark.parametrize("empty", [True, False])
def test_without_the_variable_it_is_the_users_cache_folder(monkeypatch, empty):
    if empty:
        monkeypatch.setenv(cache.VARIABLE, "")
    else:
        monkeypatch.delenv(cache.VARIABLE, raising=False)
    assert cache.location() == platformdirs.user_cache_path("maxsoftmax")


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(CODE[:-1]),
        lambda path: path.write_bytes(b"C" + CODE[1:]),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: (path.parent / "sha256").unlink(),
        lambda path: (path.parent / "sha256").write_text(""),
        lambda path: (path.parent / "sha256").write_bytes(b"\xff"),
    ],
    ids=["truncated", "altered", "emptied", "missing", "no digest", "empty digest", "digest not text"],
)
def test_a_damaged_entry_is_rebuilt(folder, damage):
    damage(silently(write))
    check_rebuilt(folder)


@pytest.mark.parametrize("mode", [0o770, 0o702])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_an_entry_that_others_may_write_to_is_rebuilt(folder, what, mode):
    path = silently(write)
    (path if what == "file" else path.parent).chmod(mode)
    check_rebuilt(folder)
    assert path.stat().st_mode & 0o022 == 0


def test_a_link_in_place_of_the_file_is_rebuilt(folder, tmp_path):
    path = silently(write)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    check_rebuilt(folder)
    assert not path.is_symlink()
    assert (tmp_path / "elsewhere").read_bytes() == CODE


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_in_place_of_the_folder_is_rebuilt(folder, tmp_path, dangling):
    path = silently(write)
    path.parent.rename(tmp_path / "elsewhere")
    path.parent.symlink_to(tmp_path / ("nowhere" if dangling else "elsewhere"))
    check_rebuilt(folder)
    assert not path.parent.is_symlink()
    assert (tmp_path / "elsewhere" / "file").read_bytes() == CODE


def test_a_file_in_place_of_the_folder_is_rebuilt(folder):
    folder.mkdir(mode=0o700)
    (folder / "key").write_bytes(CODE)
    check_rebuilt(folder)


def test_a_damaged_entry_that_cannot_be_removed_does_no_harm(folder, monkeypatch):
    damaged = silently(write)
    damaged.write_bytes(b"damaged")
    monkeypatch.setattr(cache, "_remove", lambda path: None)
    with pytest.warns(RuntimeWarning, match="damaged"):
        path = cache.entry("key", "file", write)
    assert path != damaged
    assert path.read_bytes() == CODE


def test_an_entry_that_was_repaired_meanwhile_is_kept(folder):
    silently(write).write_bytes(b"damaged")

    inode = []

    def overtaken(path):
        inode.append(cache.entry("key", "file", write).stat().st_ino)
        write(path)

    with pytest.warns(RuntimeWarning, match="damaged") as warned:
        path = cache.entry("key", "file", overtaken)
    assert len(warned) == 1
    assert path.stat().st_ino == inode[0]
    assert os.listdir(folder) == ["key"]


def test_what_is_already_gone_is_no_reason_to_fail(folder):
    folder.mkdir()
    cache._remove(folder / "key")
    assert os.listdir(folder) == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_root_that_others_may_write_to_is_not_used(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    check_temporary(folder, "others may write")
    assert os.listdir(folder) == []


def test_a_root_that_belongs_to_another_is_not_used(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.warns(RuntimeWarning, match="belongs to another user.*a temporary folder is used"):
        path = cache.entry("key", "file", write)
    assert path.read_bytes() == CODE
    assert os.listdir(folder) == []


def test_a_link_in_place_of_the_root_is_not_used(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    check_temporary(folder, "it is a link")
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_file_in_place_of_the_root_is_left_alone(folder):
    folder.write_text("mine")
    check_temporary(folder, "File exists")
    assert folder.read_text() == "mine"


def test_a_root_that_cannot_be_made_is_replaced(folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "cache"))
    check_temporary(folder, "Not a directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_root_that_is_read_only_is_replaced(folder):
    folder.mkdir(mode=0o500)
    check_temporary(folder, "Permission denied")


FULL = [OSError(28, "No space left on device"), OSError(27, "File too large"), OSError(122, "Disk quota exceeded")]


@pytest.mark.parametrize("error", FULL)
def test_without_room_a_temporary_folder_is_used(folder, error):
    def build(path):
        write(path)
        if path.is_relative_to(folder):
            raise error

    cache.temporary.cache_clear()
    with pytest.warns(RuntimeWarning, match=f"{error.strerror}.*a temporary folder is used: make room") as warned:
        path = cache.entry("key", "file", build)
    assert len(warned) == 1
    assert path.is_relative_to(folder.parent / "tmp")
    assert path.read_bytes() == CODE
    assert os.listdir(folder) == []


def test_a_compiler_without_room_compiles_elsewhere(folder, monkeypatch):
    def build(path):
        if path.is_relative_to(folder):
            raise CompilerError("LLVM ERROR: IO failure on output stream")
        write(path)

    with pytest.raises(CompilerError, match="IO failure"):
        cache.entry("key", "file", build)
    monkeypatch.setattr(cache, "ROOM", 2**62)
    with pytest.warns(RuntimeWarning, match="No space left on device.*a temporary folder is used"):
        assert cache.entry("key", "file", build).read_bytes() == CODE


def test_a_fork_leaves_the_temporary_folder_of_its_parent(tmp_path):
    script = """
import os, sys, warnings
from maxsoftmax import _cache as cache
from maxsoftmax._graph.extension import CompilerError
warnings.simplefilter("ignore")
path = cache.entry("key", "file", lambda path: path.write_bytes(b"code"))
number = os.fork()
if not number:
    sys.exit()
assert os.waitpid(number, 0)[1] == 0
assert path.read_bytes() == b"code"
print(path)
"""
    (tmp_path / "file").touch()
    elsewhere = {**os.environ, cache.VARIABLE: str(tmp_path / "file" / "cache"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=elsewhere, check=True, timeout=60, stdout=subprocess.PIPE, encoding="utf-8")
    assert done.stdout.startswith(str(tmp_path))
    assert os.listdir(tmp_path) == ["file"]


def test_a_root_that_was_cleared_is_made_again(folder):
    silently(write)
    shutil.rmtree(folder)
    assert silently(write).read_bytes() == CODE


def test_packages_are_compiled_again_once_the_cache_was_cleared(folder, monkeypatch):
    # The package has a function of the same name.
    extension = sys.modules["maxsoftmax._graph.extension"]
    monkeypatch.setattr(extension, "_found", {})
    monkeypatch.setattr(extension, "_precompile", lambda package, output: output.write_bytes(CODE))
    for path in (maxsoftmax.extension(), maxsoftmax.dropin()):
        assert path.read_bytes() == CODE
    cache.clear()
    for path in (maxsoftmax.extension(), maxsoftmax.dropin()):
        assert path.read_bytes() == CODE


RACE = """
import sys
from pathlib import Path
from maxsoftmax._graph import extension as function
extension = sys.modules["maxsoftmax._graph.extension"]
precompile = extension._precompile

def counted(package, output):
    with Path(sys.argv[1]).open("a") as file:
        file.write("once")
    precompile(package, output)

extension._precompile = counted
assert extension.extension().stat().st_size > 10**5
"""


def test_of_processes_that_want_the_package_one_compiles_it(folder, environment, tmp_path):
    command = [sys.executable, "-W", "error", "-c", RACE, str(tmp_path / "compiled")]
    processes = [subprocess.Popen(command, env={**environment, cache.VARIABLE: str(folder)}) for _ in range(8)]
    assert [process.wait(timeout=120) for process in processes] == [0] * 8
    assert (tmp_path / "compiled").read_text() == "once"
    assert [name.partition("-")[0] for name in os.listdir(folder)] == ["mojo"]


def test_an_entry_is_made_once_with_all_that_is_beside_it(folder):
    def build(path):
        write(path)
        path.with_name("other").write_bytes(b"other")

    path = cache.made_once("key", "file", build, "other")
    assert cache.made_once("key", "file", forbidden, "other") == path
    path.with_name("other").write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert cache.made_once("key", "file", build, "other") == path
    assert path.with_name("other").read_bytes() == b"other"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_build_that_fails_leaves_nothing_behind(folder, error):
    def fail(path):
        path.write_bytes(CODE[:10])
        raise error("on the way")

    with pytest.raises(error, match="on the way"):
        cache.entry("key", "file", fail)
    assert os.listdir(folder) == []
    assert silently(write).read_bytes() == CODE


def test_a_build_that_writes_nothing_is_an_error(folder):
    with pytest.raises(FileNotFoundError):
        cache.entry("key", "file", lambda path: None)
    assert os.listdir(folder) == []


def test_threads_that_build_the_same_entry_all_get_it(folder):
    together = threading.Barrier(4, timeout=60)
    found = []

    def build(path):
        together.wait()
        write(path)

    def get():
        path = cache.entry("key", "file", build)
        found.append((path, path.read_bytes()))

    threads = [threading.Thread(target=get) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(folder / "key" / "file", CODE)] * 4
    assert os.listdir(folder) == ["key"]


def slowly(path):
    time.sleep(0.5)
    write(path)


def get_in_a_process(together, found):
    together.wait(timeout=60)
    path = cache.entry("key", "file", slowly)
    found.put((path, path.read_bytes()))


def test_processes_that_build_the_same_entry_all_get_it(folder):
    spawn = multiprocessing.get_context("spawn")
    together, found = spawn.Barrier(3), spawn.Queue()
    processes = [spawn.Process(target=get_in_a_process, args=(together, found)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [found.get(timeout=60) for _ in processes] == [(folder / "key" / "file", CODE)] * 3
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert os.listdir(folder) == ["key"]


def kept(folder, key, age=0, size=100):
    """Makes an entry that was last used `age` seconds ago."""
    cache.entry(key, "file", lambda path: path.write_bytes(b"x" * (size - 64)))
    then = time.time() - age
    os.utime(folder / key, (then, then))


def test_an_entry_is_found_where_it_is(folder):
    assert cache.find("key", "file") is None
    assert not folder.exists()
    path = silently(write)
    assert cache.find("key", "file") == path
    assert cache.find("key", "other") is None
    assert cache.find("other", "file") is None
    path.write_bytes(b"damaged")
    assert cache.find("key", "file") is None
    assert path.read_bytes() == b"damaged"


def test_nothing_is_found_where_others_may_write(folder):
    silently(write)
    folder.chmod(0o770)
    assert cache.find("key", "file") is None


def test_a_removed_entry_is_gone(folder):
    kept(folder, "model-1")
    kept(folder, "model-2")
    cache.remove("model-1")
    cache.remove("model-3")
    assert list(cache.entries()) == ["model-2"]


def test_entries_are_listed_by_age_and_cleared(folder, tmp_path):
    assert cache.entries() == {}
    assert cache.clear() == 0
    assert not folder.exists()
    kept(folder, "model-new", 1)
    kept(folder, "mojo-old", 100, 300)
    (folder / "not ours").mkdir()
    (folder / "model-file").write_text("nor this")
    (folder / "model-link").symlink_to(tmp_path)
    assert cache.entries() == {"mojo-old": 300, "model-new": 100}
    (folder / ".new-1").mkdir()
    assert cache.clear() == 400
    assert sorted(os.listdir(folder)) == ["model-file", "model-link", "not ours"]


def test_what_was_not_used_for_longest_makes_room(folder, monkeypatch):
    monkeypatch.setattr(cache, "LIMIT", 350)
    for key, age in [("model-1", 300), ("mojo-2", 200), ("model-3", 100)]:
        kept(folder, key, age)
    # Both ways to use an entry count.
    assert cache.find("model-1", "file")
    kept(folder, "model-4", 50)
    assert sorted(cache.entries()) == ["model-1", "model-3", "model-4"]
    cache.entry("model-3", "file", forbidden)
    os.utime(folder / "model-1", (1, 1))
    kept(folder, "model-5", size=200)
    assert sorted(cache.entries()) == ["model-3", "model-5"]


def test_an_entry_larger_than_the_limit_is_kept_alone(folder, monkeypatch):
    monkeypatch.setattr(cache, "LIMIT", 350)
    kept(folder, "model-1", 5)
    kept(folder, "model-2", size=1000)
    assert cache.entries() == {"model-2": 1000}


def test_only_abandoned_work_is_swept_away(folder):
    silently(write)
    for name, age in [(".new-old", cache.DAY_S + 60), (".new-now", 60), (".other", cache.DAY_S + 60)]:
        (folder / name).mkdir()
        then = time.time() - age
        os.utime(folder / name, (then, then))
    silently(write, "another key")
    assert sorted(os.listdir(folder)) == [".new-now", ".other", "another key", "key"]
