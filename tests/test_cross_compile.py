import math
import re
import subprocess
import sys

import pytest
from maxsoftmax import _native
from maxsoftmax._native import build
from maxsoftmax._native.description import SEARCHED

# Up to eleven minutes each; of what is slow, `few` and the library below take the ways.
SLOW = [
    pytest.param(architecture, what, marks=pytest.mark.slow)
    for architecture in ("sm_90a", "gfx942", "sm_80", "sm_86", "sm_100a")
    for what in ("softmax", "relatives")
]


@pytest.mark.parametrize(("architecture", "what"), [("sm_90a", "known"), ("sm_90a", "few"), *SLOW])
def test_ops_compile_for_gpus_that_are_not_here(root, environment, architecture, what):
    command = [sys.executable, str(root / "tests" / "cross_compile.py"), architecture, what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    name, size = done.stdout.split()
    assert name == architecture
    # Of any length it is more than two million.
    assert 10_000 < int(size) < (400_000 if what == "known" else math.inf)


def test_a_library_is_built_for_a_gpu_that_is_not_here():
    # test_launches has one for sm_90a. This one has all that asks a warp of 64 lanes.
    library = _native.Library("softmax", "float32", _native.Target("gpu", "gfx942"))
    with build.built(library) as path:
        assert path.stat().st_size > 50_000


def test_streams_that_are_searched_have_kernels_of_their_own_names():
    # By its name MAX finds a kernel that it has loaded, of whatever library.
    found = []
    for block_size in (128, 512):
        algorithm = f"{SEARCHED}streaming {block_size} 1024 4 0 16"
        library = _native.Library("softmax", "float32", _native.Target("gpu", "sm_90a"), algorithm)
        with build.built(library) as path:
            found.append(set(re.findall(rb"\.entry (maxsoftmax_gpu_streaming\w+)", path.read_bytes())))
    assert [len(names) for names in found] == [2, 2]
    assert not found[0] & found[1]
