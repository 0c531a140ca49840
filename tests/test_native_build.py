import itertools
import os
import shutil
import subprocess
import sys

import pytest
from contract import check
from libraries import SOFTMAX, computed
from maxsoftmax import _cache as cache
from maxsoftmax._graph.extension import CompilerError
from maxsoftmax._native import build, load

DISKS = [("ro", "cache"), *itertools.product(["size=64k", "noexec"], ["cache", "tmp", "cache tmp"])]
"""How a file system is mounted, and where."""

# Instead of the compiler a copy, which needs as much room as a library does.
COPYING = """
import shutil, sys
from maxsoftmax._native import build

def copy(library, arguments, folder):
    print("building in", folder.parent, flush=True)
    shutil.copy({real!r}, folder / build.FILE)

build._build = copy
build.cache.files.TEMPORARY = ({other!r},)
check()
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("unshare") is None, reason="needs Linux's namespaces")
@pytest.mark.parametrize("disk", DISKS, ids=" ".join)
def test_on_a_disk_that_takes_nothing_the_result_comes_with_one_warning(tmp_path, environment, alone, real, disk):
    """The disk is full or read-only, or nothing that lies there may be executed."""
    places = {name: tmp_path / name for name in ("cache", "tmp", "other")}
    for place in places.values():
        place.mkdir(mode=0o700)
    script = tmp_path / "script.py"
    script.write_text(alone + COPYING.format(real=str(real), other=str(places["other"])))
    flags, bad = disk
    mounts = " && ".join(f"mount -t tmpfs -o mode=700,{flags} tmpfs {places[name]}" for name in bad.split())
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", f"{mounts} || exit 77; exec $0 {script}"]
    done = subprocess.run(
        [*command, sys.executable],
        env={**environment, cache.VARIABLE: str(places["cache"]), "TMPDIR": str(places["tmp"])},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this user may mount nothing")
    if disk == ("noexec", "cache tmp"):
        assert done.returncode == 1
        assert "was built, but cannot be loaded: " in done.stderr.splitlines()[-1]
        return
    assert done.returncode == 0, done.stderr
    unkept = flags != "noexec" and "cache" in bad
    assert done.stderr.count("Warning: ") == unkept
    assert (f"{places['cache']} cannot keep compiled code" in done.stderr) == unkept
    built = {"tmp": "cache", "cache tmp": "other"}.get(bad, "tmp") if flags != "noexec" else "tmp"
    assert done.stdout == f"building in {places[built]}\n"


def test_a_compiler_without_room_builds_where_there_is_some(fresh, monkeypatch, real, tmp_path, x):
    tried = []

    def build_where_room_is(library, arguments, folder):
        tried.append(folder.parent)
        if len(tried) < 3:
            raise CompilerError("LLVM ERROR: IO failure on output stream: No space left on device")
        shutil.copy(real, folder / build.FILE)

    places = [tmp_path / name for name in "abc"]
    for place in places:
        place.mkdir()
    monkeypatch.setattr(build, "_build", build_where_room_is)
    monkeypatch.setattr(build.files, "roomy", lambda *others: places[: len(places)])
    check(computed(x), x)
    assert tried == places
    assert [os.listdir(place) for place in places] == [[]] * 3
    load._libraries.clear()
    cache.clear()
    places.pop()
    tried.clear()
    with pytest.raises(CompilerError, match=r"softmax of float32 for the CPU cannot be built: .*No space left"):
        load.load(SOFTMAX)
