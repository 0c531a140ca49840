"""What the tests of the functions for JAX share."""

import os
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
import scipy.special

# Other libraries need memory too, and nobody else's devices are asked for.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax = pytest.importorskip("jax")
jnp = jax.numpy
ours = pytest.importorskip("maxsoftmax.jax")

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
FUNCTIONS = ["softmax", "log_softmax", "logsumexp", "sparsemax"]


def same(a, b):
    """Asserts that two arrays have the same bits, but for those of NaN."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    # Which float64 has all of.
    np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))


def losses(x, target, axis=-1):
    """Returns a loss for each row in float64."""
    log_p = scipy.special.log_softmax(x.astype(np.float64), axis=axis)
    return -np.take_along_axis(log_p, np.expand_dims(target, axis), axis).squeeze(axis)


def gradient(y, dy, axis=-1):
    """Returns the gradient of the logits of softmax in float64."""
    y, dy = y.astype(np.float64), dy.astype(np.float64)
    return y * (dy - (y * dy).sum(axis, keepdims=True))


def tokens_of(shape, axis, each, seed=1):
    """Returns one token for each row, or `each` along the axis."""
    of = [each] if each else []
    return np.random.default_rng(seed).integers(0, shape[axis], (*shape[:axis], *of, *shape[axis + 1 :]), np.int32)


def run(program, environment, **more):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env={**environment, "JAX_PLATFORMS": "cpu", **more},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
