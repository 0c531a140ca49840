"""Runs kernels on a GPU for compute-sanitizer to watch: python sanitize.py softmax|relatives [DEVICE [TOOL]].

Softmax has a shape for each kernel of `auto` along either axis, and the tree; its relatives have a few of each kind.
"""

import sys

import maxsoftmax
import ml_dtypes
import numpy as np
import scipy.special
from contract import check, logits
from test_forms import attention
from test_gradients import backward, losses, wide
from test_sparsemax import expected as sparsemax
from test_sparsemax import gradient

what, device, tool = [*sys.argv[1:], *("gpu", "")[len(sys.argv) - 2 :]]
BOTH = (np.float32, ml_dtypes.bfloat16)


def run(shape, axis, algorithm="auto", dtype=np.float32):
    x = logits(shape, dtype)
    check(maxsoftmax.softmax(x, axis=axis, device=device, algorithm=algorithm), x, axis=axis)


def softmax():
    for n in (1, 129, 1025, 50257):
        run((3, n), 1, "tree")
        run((2, n, 3), 1, "tree")
    for n in (5, 12, 30, 61, 101, 250, 500, 1001, 1500, 2001, 3001, 4001, 6001, 8001, 12001, 50257, 200001, 400001):
        for dtype in BOTH:
            run((3, n), 1, dtype=dtype)
    for n in (3, 10, 20, 33, 65, 80, 127, 150, 300, 600):
        for dtype in BOTH:
            # More rows than a block takes.
            run((300, n), 1, dtype=dtype)
    run((17, 50257), 1)
    # Units of the whole GPU's warps: asked for, all held at once, and in part read again.
    run((60, 200_001), 1)
    run((20, 700_001), 1, dtype=ml_dtypes.bfloat16)
    # One warp of a block looks for the others.
    run((6, 700_001), 1)
    run((2, 12_000_001), 1)
    for n in (3, 13, 60, 100, 300, 3001, 16001, 30001):
        for inner in (3, 8, 40):
            for dtype in BOTH:
                run((2, n, inner), 1, dtype=dtype)
    # Panels that are taken by the vector.
    run((300, 8, 4), 1)
    run((300, 8, 8), 1, dtype=ml_dtypes.bfloat16)
    for n, inner in ((13, 133), (3001, 133)):
        for dtype in BOTH:
            run((2, n, inner), 1, dtype=dtype)
    # Odd columns by the granule, those in slots only where there are many.
    for outer, n, inner in (
        (2, 100, 261),
        (2, 16001, 133),
        (420, 130, 53),
        (420, 130, 101),
        (150, 1001, 53),
        (150, 1001, 101),
        # Held by the whole GPU, and read twice.
        (2, 18_001, 65),
        (1, 270_001, 65),
    ):
        for dtype in BOTH:
            run((outer, n, inner), 1, dtype=dtype)


def close(found, expected, dtype):
    tolerance = 1e-5 if dtype == np.float32 else 2e-2
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance * scale)


def relatives():
    shapes = [(3, n) for n in (5, 101, 300, 600, 1001, 3001, 12001, 50257, 200001)]
    columns = [(2, n, inner) for n in (13, 300, 3001, 12001) for inner in (3, 40)] + [(1, 30_001, 65)]
    for shape in shapes + columns:
        along(logits(shape), logits(shape, seed=1), np.float32)
    for shape in shapes:
        along(logits(shape, BOTH[1]), logits(shape, BOTH[1], seed=1), BOTH[1])
    for n in (5, 1001, 12001, 50257):
        for dtype in BOTH:
            cross_entropy(logits((4, n), dtype), dtype)
    # So many that each row has a block of its own.
    cross_entropy(logits((600, 12001)), np.float32)
    for keys in (3, 31, 1001, 40000):
        for dtype in BOTH:
            forms(logits((2, 5, keys), dtype), dtype)
    # Beside a mask of floats: a warp a row, a block, clusters, the whole GPU; at both ends of a unit, and of memory.
    for keys in (300, 512, 1000, 1023, 1025, 4097, 16_384, 50_257, 200_001, 200_004, 400_001):
        # Under synccheck programs fail where many clusters of thirteen or sixteen blocks take turns, plain 64×128256
        # too (an illegal address), in which memcheck and racecheck find nothing.
        few = tool == "synccheck" and keys > 200_000
        for dtype in BOTH:
            for queries in (1,) if few else (1, 5):
                added(logits((2, queries, keys), dtype), dtype)
    for keys in (13, 300, 3001, 9001):
        for heads in (8, 13):
            forms(logits((2, keys, heads)), np.float32, -2)
    # Held by the whole GPU.
    for inner in (64, 65):
        multiplied(logits((1, 18_001, inner)), np.float32)
        multiplied(logits((1, 18_001, inner), BOTH[1]), BOTH[1])


def along(x, dy, dtype):
    log_y = scipy.special.log_softmax(wide(x), axis=1)
    y = np.exp(log_y).astype(dtype)
    close(maxsoftmax.log_softmax(x, 1, device=device), log_y, dtype)
    close(maxsoftmax.softmax_backward(y, dy, 1, device=device), backward(y, dy, 1, False), dtype)
    sparse = sparsemax(x, 1).astype(np.float64)
    close(maxsoftmax.sparsemax(x, 1, device=device), sparse, dtype)
    sparse = sparse.astype(dtype)
    close(maxsoftmax.sparsemax_backward(sparse, dy, 1, device=device), gradient(sparse, dy, 1), dtype)
    if dtype != np.float32:
        # Each is another model, and they share their kernels.
        return
    close(maxsoftmax.logsumexp(x, 1, device=device), scipy.special.logsumexp(wide(x), axis=1), dtype)
    log_y = log_y.astype(dtype)
    close(maxsoftmax.log_softmax_backward(log_y, dy, 1, device=device), backward(log_y, dy, 1, True), dtype)


def cross_entropy(x, dtype):
    target = np.resize([0, x.shape[1] - 1, -100, x.shape[1] // 2], len(x))
    counted = (target != -100).sum()
    expected, gradient = losses(x, target, -100, 0)
    loss, pairs = maxsoftmax.cross_entropy_forward(x, target, device=device)
    close(loss, expected.sum() / counted, dtype)
    close(maxsoftmax.cross_entropy_backward(x, target, pairs, device=device), gradient / counted, dtype)


def multiplied(x, dtype):
    close(maxsoftmax.softmax(x, 1, scale=0.25, device=device), scipy.special.softmax(wide(x) / 4, 1), dtype)


def added(x, dtype):
    for shape in (x.shape[2:], x.shape[1:], (x.shape[0], 1, x.shape[2]), x.shape):
        for kind in {np.float32, dtype}:
            options = {"scale": 0.5, "mask": logits(shape, kind, seed=2)}
            close(maxsoftmax.softmax(x, device=device, **options), attention(x, -1, **options), dtype)


def forms(x, dtype, axis=-1):
    options = {"scale": 0.5, "mask": np.random.default_rng(2).random(x.shape[1:]) < 0.7, "causal": True}
    close(maxsoftmax.softmax(x, axis=axis, device=device, **options), attention(x, axis, **options), dtype)
    if axis == -1:
        # One for each row, of which there are fewer than a block takes.
        options["scale"] = logits((2, 5, 1), seed=3)
        close(maxsoftmax.softmax(x, device=device, **options), attention(x, **options), dtype)
    else:
        # What stays as it is in memory.
        options = {"temperature": 2.0, "sink": logits(x.shape[2:], seed=3)}
        close(maxsoftmax.softmax(x, axis=axis, device=device, **options), attention(x, axis, **options), dtype)


{"softmax": softmax, "relatives": relatives}[what]()
print("all correct")
