"""Large results that are buffers of MAX: in pages of 2 MB, and in memory of their own while MAX copies from it."""

from pathlib import Path

import maxsoftmax
import numpy as np
import pytest
from max.driver import CPU, Buffer
from maxsoftmax._arrays import pages

SHAPE = (4096, 1024)


def logits(seed=0):
    return np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)


def flags(address):
    """Returns what Linux says of the mapping that an address is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and ":" not in first:
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return rest.split()
    return []


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="only Linux has them")
def test_large_buffers_are_in_pages_of_2_mb():
    x = Buffer.from_numpy(logits())
    # By the call that finds out what to do, and by those after it.
    for _ in range(3):
        y = maxsoftmax.softmax(x)
        assert "hg" in flags(y._data_ptr() + pages.LARGE // 2)


def test_whole_pages_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(pages, "_advise", lambda: lambda *said: asked.append(said))
    page = pages.PAGESIZE
    pages.advise(10 * page, 3 * page)
    pages.advise(10 * page + 16, 3 * page)
    pages.advise(10 * page + 16, page)
    assert asked == [(10 * page, 3 * page, 14), (11 * page, 2 * page, 14)]
    monkeypatch.setattr(pages, "_advise", lambda: None)
    pages.advise(10 * page, 3 * page)


def test_what_max_still_copies_is_not_overwritten():
    xs = [logits(seed) for seed in range(3)]
    expected = [maxsoftmax.softmax(x) for x in xs]
    buffers = [Buffer.from_numpy(x) for x in xs]
    for turn in range(60):
        y = maxsoftmax.softmax(buffers[turn % 3])
        copy = Buffer(y.dtype, y.shape, CPU())
        copy.inplace_copy_from(y)
        other = y.copy()
        del y
        # Large results of NumPy lie where others were that are gone.
        maxsoftmax.softmax(xs[(turn + 1) % 3])
        np.testing.assert_array_equal(other.to_numpy(), expected[turn % 3])
        np.testing.assert_array_equal(copy.to_numpy(), expected[turn % 3])
