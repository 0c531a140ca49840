"""Fixtures of the tests of libraries, which build one of them once."""

import contextlib
import os
import shutil
import time

import numpy as np
import pytest
from libraries import ALONE, SOFTMAX
from maxsoftmax import _cache as cache
from maxsoftmax import _native
from maxsoftmax._native import build, load, precompiled, progress


@pytest.fixture(scope="session")
def x():
    return np.random.default_rng(0).standard_normal((6, 5), dtype=np.float32)


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """A library, built by the compiler."""
    path = tmp_path_factory.mktemp("real") / build.FILE
    folder = cache.entry(build.key(SOFTMAX), build.FILE, _copy_built)
    shutil.copy(folder, path)
    return path


def _copy_built(path):
    with build.built(SOFTMAX) as built:
        shutil.copy(built, path)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A process that has loaded nothing yet, with an empty cache, whose folder this is."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(precompiled.VARIABLE, raising=False)
    monkeypatch.setattr(load, "_libraries", {})
    cached = (_native.plan, load.functions)
    for function in cached:
        function.cache_clear()
    yield tmp_path / "cache"
    for function in cached:
        function.cache_clear()


@pytest.fixture
def compiler(monkeypatch, real):
    """The libraries that were built, by a compiler that always makes the same."""
    made = []

    @contextlib.contextmanager
    def built(library, target_cpu=""):
        with progress.shown(library):
            made.append(library)
            time.sleep(0.2)
            path = real.with_name(f"{len(made)}-{os.getpid()}.so")
            shutil.copy(real, path)
            yield path
            path.unlink()

    monkeypatch.setattr(build, "built", built)
    return made


@pytest.fixture
def alone(root):
    """A script that loads libraries with as little else as can be."""
    from maxsoftmax import __version__

    return ALONE.format(path=str(root / "python" / "maxsoftmax"), version=__version__)
