import os
import signal
from collections import Counter
from pathlib import Path

import max.driver

# At its first import MAX builds a library into its own folder, and a process that comes by meanwhile loads half of it:
# this is the one process that there is before pytest-xdist starts the others.
import max.nn
import pytest
from maxsoftmax._arguments import ALGORITHMS

ROOT = Path(__file__).parents[1]

pytest_plugins = ("bench_fixtures", "native_fixtures")

DEVICES = ["cpu"] + (["gpu"] if max.driver.accelerator_count() else [])


MARKS = {"cpu": (), "gpu": (pytest.mark.gpu,)}


def pytest_generate_tests(metafunc):
    """Runs every test that takes a `device` on each kind present, and one that takes `how` by each algorithm there."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", [pytest.param(d, marks=MARKS[d]) for d in DEVICES], scope="session")
    if "how" in metafunc.fixturenames:
        ways = [
            pytest.param(
                {"device": device, "algorithm": algorithm},
                marks=(*MARKS[device], pytest.mark.xdist_group(f"{device}-{algorithm}")),
                id=f"{device}-{algorithm}",
            )
            for device in DEVICES
            for algorithm in ALGORITHMS[device]
        ]
        metafunc.parametrize("how", ways, scope="session")


LONGEST = {
    *("test_cross_compile", "test_ops", "test_ops_sharded", "test_fusion", "test_graphs", "test_readme", "test_cli"),
    *("test_bench_call", "test_bfloat16", "test_dropin", "test_kernels", "test_launches", "test_tasks", "test_train"),
    *("test_jax_sharded", "test_out_dtype", "test_torch_distributed", "test_torch_dtensor"),
}
"""Files that compile for half a minute and more."""


def pytest_configure(config):
    # For pytest-xdist: files are taken in the order below, and not those of most tests first.
    config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if {"model", "models"} & set(item.fixturenames):
            # For pytest-xdist's `--dist loadgroup`: one process compiles the model for all.
            given = item.callspec.params if hasattr(item, "callspec") else {}
            name = "-".join(str(given.get(of, "")) for of in ("device", "model", "models"))
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{name}"))
        if "gpu" in item.keywords and "gpu" not in DEVICES:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
    yield
    # None of the files that take longest is to begin when others end.
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.stem not in LONGEST, -counts[item.path]))


@pytest.fixture(autouse=True)
def _signals():
    """Undoes what the command does to the process that it runs in."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def environment():
    """The environment for a subprocess: this checkout first, a narrow terminal."""
    return {**os.environ, "COLUMNS": "120", "TERM": "dumb"}


@pytest.fixture
def place_of_jax(device):
    """Where JAX computes, as by default: the device that the test takes."""
    jax = pytest.importorskip("jax")
    try:
        found = jax.devices(device)[0]
    except RuntimeError:
        pytest.skip("this build of jax has no GPU")
    with jax.default_device(found):
        yield found
