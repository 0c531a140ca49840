"""Runs kernels on a GPU for compute-sanitizer to watch: a shape for each of `auto` along either axis, and the tree."""

import maxsoftmax
import ml_dtypes
import numpy as np
from contract import check


def run(shape, axis, algorithm, dtype=np.float32):
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(dtype)
    check(maxsoftmax.softmax(x, axis=axis, device="gpu", algorithm=algorithm), x, axis=axis)


for n in (1, 129, 1025, 50257):
    run((3, n), 1, "tree")
    run((2, n, 3), 1, "tree")
for n in (5, 12, 30, 61, 101, 250, 500, 1001, 1500, 2001, 3001, 4001, 6001, 8001, 12001, 50257, 200001, 400001):
    run((3, n), 1, "auto")
    run((3, n), 1, "auto", ml_dtypes.bfloat16)
run((17, 50257), 1, "auto")
for n in (3, 13, 60, 100, 300, 3001, 16001, 30001):
    for inner in (3, 8, 40):
        run((2, n, inner), 1, "auto")
        run((2, n, inner), 1, "auto", ml_dtypes.bfloat16)
print("all correct")
