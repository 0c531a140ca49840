import os
from pathlib import Path

import max.driver
import pytest

ROOT = Path(__file__).parents[1]

DEVICES = ["cpu"] + (["gpu"] if max.driver.accelerator_count() else [])


def pytest_generate_tests(metafunc):
    """Runs every test that takes a `device` on each kind of device present."""
    if "device" in metafunc.fixturenames:
        marks = {"cpu": (), "gpu": (pytest.mark.gpu,)}
        metafunc.parametrize("device", [pytest.param(d, marks=marks[d]) for d in DEVICES], scope="session")


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and "gpu" not in DEVICES:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def environment():
    """The environment for a subprocess: this checkout first, a narrow terminal."""
    return {**os.environ, "COLUMNS": "120", "TERM": "dumb"}
