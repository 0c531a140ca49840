"""The bits of a row on a CPU: they depend on the row alone, not on its batch, its place, its address or the threads."""

import itertools

import maxsoftmax
import numpy as np
import pytest
from maxsoftmax._native import bits, fail, plan

THREADS = 4
"""The index in a call of the most threads to use."""

LENGTHS = (1, 63, 777, 4096, 4097, 50257, 400001, 1 << 20)


def run(name, rows, threads, options, *pointers):
    # A plan of its own, whose words can be changed.
    made = plan.__wrapped__(name, "float32", -1, rows, options)
    made._words[THREADS] = threads
    error = made.run(made.call, 0, *(array.ctypes.data for array in pointers), None)
    if error:
        fail(error)


def at(array, offset):
    """Returns a copy that begins `offset` bytes behind a cache line."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def results(x, dy, target, threads, offset):
    """Returns what every op makes of rows along axis 1 of (outer, n, inner), by row."""
    x, dy, y = at(x, offset), at(dy, offset), at(np.zeros_like(x), offset)
    count = x.shape[0] * x.shape[2]
    found = {}

    def keep(name):
        found[name] = np.moveaxis(y, 1, 2).reshape(count, -1).copy()

    for name in ("softmax", "log_softmax", "sparsemax"):
        run(name, x.shape, threads, (), y, x)
        keep(name)
    for name in ("softmax_backward", "log_softmax_backward", "sparsemax_backward"):
        run(name, x.shape, threads, (), y, x, dy)
        keep(name)
    options = (-100, bits(0.1), 0, 1, 0)
    loss, pairs, logsumexp = np.empty(count, np.float32), np.empty((count, 2), np.float32), np.empty(count, np.float32)
    run("statistics", x.shape, threads, (1,), logsumexp, x)
    run("cross_entropy", x.shape, threads, options, loss, pairs, x, target)
    run("cross_entropy_backward", x.shape, threads, options, y, x, pairs, target, np.ones(count, np.float32))
    keep("cross_entropy_backward")
    sums, log_probs, entropy = (
        np.empty((count, 3), np.float32),
        np.empty(count, np.float32),
        np.empty(count, np.float32),
    )
    asked = (1, 1, bits(0.7))
    run("token_log_probs", x.shape, threads, asked, log_probs, entropy, sums, x, target)
    run("token_log_probs_backward", x.shape, threads, asked, y, x, sums, target, log_probs, entropy)
    keep("token_log_probs_backward")
    kl, both = np.empty(count, np.float32), np.empty((count, 5), np.float32)
    run("kl_divergence", x.shape, threads, asked[2:], kl, both, x, dy)
    for of_p in (0, 1):
        run("kl_divergence_backward", x.shape, threads, (asked[2], of_p), y, x, dy, both, log_probs)
        keep(f"kl_divergence_backward of {of_p}")
    per_row = {"loss": loss, "pairs": pairs, "logsumexp": logsumexp, "log_probs": log_probs, "entropy": entropy}
    return {**found, **per_row, "kl": kl}


def slice_of(along, array, start, end):
    """Returns some rows of a matrix as rows along axis 1 of (outer, n, inner): one after the other, or side by side."""
    part = array[start:end]
    return part[:, :, None] if along == "rows" else np.ascontiguousarray(part.T)[None]


@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize("n", LENGTHS)
def test_bits_of_a_row_are_its_own(n, along):
    random = np.random.default_rng(n)
    count = min(300, max(3, (1 << 21) // n))
    x, dy = (random.standard_normal((count, n), dtype=np.float32) * scale for scale in (4, 1))
    target = random.integers(0, n, count)
    # A maximum of 0, of either sign.
    x[2] = -np.abs(x[2])
    x[2, -min(n, 1000)], x[2, -1] = 0.0, -0.0

    whole = results(slice_of(along, x, 0, count), slice_of(along, dy, 0, count), target, 0, 0)
    # One column alone is a row along the last axis.
    fewest = 1 if along == "rows" else 2
    for start, end in {(0, fewest), (1, 1 + fewest), (count - fewest, count), (1, count // 2 + 2), (0, count)}:
        for threads, offset in ((1, 4), (2, 0), (0, 20)):
            part = results(
                slice_of(along, x, start, end),
                slice_of(along, dy, start, end),
                target[start:end].copy(),
                threads,
                offset,
            )
            for name, found in part.items():
                expected = whole[name][start:end]
                same = np.array_equal(found.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))
                assert same, (name, start, end, threads, offset)


@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize("n", [3, 130, 777, 4096, 4097, 50257])
def test_results_that_no_cache_holds_have_the_same_bits(n, along):
    # 20 MB and more may be written past the caches; a few rows of them are not.
    random = np.random.default_rng(n)
    # The last rows that a core takes together are fewer.
    count = -(-(5 << 20) // n // 16) * 16 + 7
    x, dy = (random.standard_normal((count, n), dtype=np.float32) * scale for scale in (4, 1))
    target = random.integers(0, n, count)

    ends = [0, 5, count // 3, 2 * count // 3 + 1, count]
    places = list(itertools.pairwise(ends))
    parts = [results(slice_of(along, x, *p), slice_of(along, dy, *p), target[slice(*p)].copy(), 1, 0) for p in places]
    for threads, offset in ((0, 0), (1, 4)):
        whole = results(slice_of(along, x, 0, count), slice_of(along, dy, 0, count), target, threads, offset)
        for (start, end), part in zip(places, parts, strict=True):
            for name, found in part.items():
                expected = np.ascontiguousarray(whole[name][start:end])
                assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)), (name, start, threads, offset)


@pytest.mark.parametrize("shape", [(300_000, 5, 7), (40, 301, 601), (4, 301, 8197)])
def test_computed_logits_of_results_that_no_cache_holds_have_the_same_bits(shape):
    random = np.random.default_rng(0)
    x = random.standard_normal(shape, dtype=np.float32)
    mask = random.random(shape) < 0.7
    for causal in (False, True):
        options = {"scale": 0.5, "causal": causal, "sink": np.float32(0.3)}
        whole = maxsoftmax.softmax(x, mask=mask, **options)
        # Parts that are written as a cache holds them.
        ends = sorted({1, *(shape[0] * i // 4 for i in range(5))})
        for part in itertools.starmap(slice, itertools.pairwise(ends)):
            alone = maxsoftmax.softmax(x[part], mask=mask[part], **options)
            assert np.array_equal(alone.view(np.uint32), whole[part].view(np.uint32)), (causal, part)


@pytest.mark.parametrize("shape", [(97, 65537, 1), (1, 5000, 1040)])
def test_results_may_go_where_logits_were(shape):
    random = np.random.default_rng(0)
    x = at(random.standard_normal(shape, dtype=np.float32), 4 if shape[2] == 1 else 0)
    rows = shape[0] * shape[2]
    target = random.integers(0, shape[1], rows)
    options = (-100, bits(0.1), 0, 1, 0)
    loss, pairs, one = np.empty(rows, np.float32), np.empty((rows, 2), np.float32), np.ones(rows, np.float32)
    run("cross_entropy", shape, 0, options, loss, pairs, x, target)
    for name, told, given in (
        ("softmax", (), ()),
        ("log_softmax", (), ()),
        ("cross_entropy_backward", options, (pairs, target, one)),
    ):
        apart, place = np.empty_like(x), at(x, 8 if shape[2] == 1 else 0)
        run(name, shape, 0, told, apart, x, *given)
        run(name, shape, 0, told, place, place, *given)
        assert np.array_equal(apart.view(np.uint32), place.view(np.uint32)), name
