"""What tests of libraries share: calls, processes, and what lies in the cache."""

import os
import subprocess
import sys

import numpy as np
from maxsoftmax import _native
from maxsoftmax._native import build
from maxsoftmax._native.description import Library, Target

CPU = Target("cpu")
SOFTMAX = Library("softmax", "float32", CPU)
ROWS = (6, 5, 1)

ALONE = """
import sys, types
package = types.ModuleType("maxsoftmax")
package.__path__, package.__version__ = [{path!r}], {version!r}
sys.modules["maxsoftmax"] = package
import numpy as np
from maxsoftmax import _native

def softmax(x):
    plan = _native.plan("softmax", "float32", -1, (x.shape[0], x.shape[1], 1))
    y = np.empty_like(x)
    error = plan.run(plan.call, 0, y.ctypes.data, x.ctypes.data, None)
    if error:
        _native.fail(error)
    return y

def check():
    for shape in ((6, 4), (2000, 1024)):
        assert (softmax(np.zeros(shape, np.float32)) == 1 / shape[1]).all()
"""


def computed(x, **options):
    made = _native.plan("softmax", "float32", -1, (x.shape[0], x.shape[1], 1), **options)
    y = np.empty_like(x)
    error = made.run(made.call, 0, y.ctypes.data, x.ctypes.data, None)
    assert not error
    return y


def run(code, environment, *options, **more):
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**environment, **more},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def entry(folder):
    (found,) = (path for path in folder.iterdir() if path.name.startswith("native-"))
    return found / build.FILE


def cache_names(folder):
    """What is in a cache, which is to be entries alone."""
    names = os.listdir(folder)
    assert all(name.startswith("native-") for name in names), names
    return names
