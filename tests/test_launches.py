"""What the host has a GPU do, looked at without one; see `launches/record.py`."""

import re
import shutil
import subprocess
import sys

import pytest
from maxsoftmax import _native
from maxsoftmax._native import build

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler here")


@pytest.fixture(scope="module")
def library():
    """Softmax of an H200."""
    with build.built(_native.Library("softmax", "float32", _native.Target("gpu", "sm_90a"))) as path:
        yield path


@pytest.fixture(scope="module")
def calls(root, environment, library):
    """What softmax launches on an H200, and the bytes it counts, by (outer, n, inner) and whether memory is aligned."""
    command = [sys.executable, str(root / "tests" / "launches" / "record.py"), "softmax", "float32", str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, launches = {}, []
    for line in done.stdout.splitlines():
        if line.startswith("launch"):
            launches.append(line)
            continue
        told = re.fullmatch(r"call softmax float32 \((\d+), (\d+), (\d+)\) \(\) shift=(\d): scratch=(\d+)", line)
        assert told, line
        found[(*map(int, told.groups()[:3]), told[4] == "0")] = launches, int(told[5])
        launches = []
    assert len(found) > 1000
    return found


def numbers(launch, name):
    return [int(number) for number in re.search(rf" {name}=([\d,]+)", launch)[1].split(",")]


def kernel(launch):
    """Returns what rows take their bits from: which kernel it is, and how many threads share them."""
    name = launch.split()[1]
    if "resident_grid" in name:
        # Its units are a warp's, however many of them a block has.
        return name
    return name, numbers(launch, "lines"), numbers(launch, "block")


def test_every_launch_is_one_that_the_gpu_accepts(calls):
    for launches, _ in calls.values():
        assert 1 <= len(launches) <= 2
        for launch in launches:
            grid, block = numbers(launch, "grid"), numbers(launch, "block")
            assert 1 <= grid[0] < 1 << 31
            assert all(1 <= blocks <= 65535 for blocks in grid[1:])
            assert block[0] % 32 == 0
            assert 32 <= block[0] <= 1024
            assert block[1:] == [1, 1]
            assert numbers(launch, "bytes")[0] <= 227 << 10
            assert "dependent=1" in launch
            if "cluster" in launch:
                blocks, *others = numbers(launch, "cluster")
                assert blocks <= 16
                assert grid[0] % blocks == 0
                assert others == [1, 1]


def test_logits_are_read_with_a_hint_that_is_a_constant(library):
    code = library.read_bytes()
    first, last = (str(policy).encode() for policy in (0x12F0000000000000, 0x14F0000000000000))
    for load in (
        b"ld.global.L2::cache_hint.v4",
        b"ld.global.L2::cache_hint.b32",
        b"ld.global.L1::no_allocate.L2::cache_hint.v4",
        b"cp.async.cg.shared.global.L2::cache_hint",
    ):
        assert load in code
    assert code.count(last) > code.count(first) > 0
    # An instruction that makes it is in the way of loads that have a condition.
    assert b"createpolicy" not in code


def test_no_launch_uses_more_scratch_memory_than_was_counted(calls):
    for shape, (launches, scratch) in calls.items():
        first = launches[0]
        used = 0
        if "hardware_board" in first:
            # Two words a thread are cleared.
            used = 16 * numbers(first, "block")[0] * (numbers(first, "grid")[0] - 1) + 1
        elif "streaming_strid" in first:
            # A pair of floats for each column, an eighth as many as there are threads.
            used = numbers(first, "block")[0] * numbers(first, "grid")[0]
        assert used <= scratch, shape


def test_which_kernel_a_row_has_is_not_a_matter_of_how_many_there_are(calls):
    kernels = {}
    for (outer, n, inner, aligned), (launches, _) in calls.items():
        if inner == 1:
            kernels.setdefault((n, aligned), {})[outer] = [kernel(launch) for launch in launches]
    for of_counts in kernels.values():
        assert all(names == of_counts[1] for names in of_counts.values())
