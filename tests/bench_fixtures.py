"""Fixtures of the tests of the benchmark."""

import pytest
from fakes import Fake
from max.driver import CPU
from maxsoftmax._bench.cases import Entry
from maxsoftmax._bench.providers import PROVIDERS
from maxsoftmax._bench.run import Bench


@pytest.fixture
def bench():
    return Bench(CPU(), ["maxsoftmax", "bench", "a b"], 1)


@pytest.fixture
def provider(monkeypatch):
    """Registers a provider by a name."""

    def register(name, kind=Fake):
        monkeypatch.setitem(PROVIDERS, name, type("Named", (kind,), {"name": name}))
        return Entry(name)

    return register


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Runs the test in an empty folder."""
    monkeypatch.chdir(tmp_path)
