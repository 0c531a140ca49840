"""Runs the tree kernels on a GPU, for compute-sanitizer to watch: rows of several lengths, along both axes."""

import maxsoftmax
import numpy as np
from contract import check

for n in (1, 129, 1025, 50257):
    for shape, axis in (((3, n), 1), ((2, n, 3), 1)):
        x = np.random.default_rng(n).standard_normal(shape, dtype=np.float32)
        check(maxsoftmax.softmax(x, axis=axis, device="gpu", algorithm="tree"), x, axis=axis)
print("all correct")
