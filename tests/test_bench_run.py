import importlib.util
import os
import shlex
import sys
from itertools import count

import pytest
from fakes import CASE, fake, one_off, raising, softmax, spoilt, went
from max.driver import CPU
from max.dtype import DType
from maxsoftmax._bench import run
from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.protocol import record
from maxsoftmax._bench.providers import PROVIDERS, Unsupported

LIBRARIES = {
    "torch": "torch",
    "torch.compile": "torch",
    "jax": "jax",
    "maxsoftmax.jax": "jax",
    "onnxruntime": "onnxruntime",
}


def test_one_that_fails_does_not_keep_the_next_from_its_turn(bench, provider):
    ways = [
        provider("a"),
        provider("b", fake(prepare=raising(RuntimeError("out of luck")))),
        provider("c", spoilt(one_off)),
        provider("d", fake(__init__=raising(ImportError("No module named 'd'")))),
        provider("e", fake(__init__=raising(OSError("libe.so is broken")))),
        provider("f", fake(version=raising(ValueError("no version")))),
        provider("g", fake(devices=("gpu",), __init__=raising(AssertionError("was made")))),
        provider("h", fake(share=raising(Unsupported("takes no such case")))),
        provider("i"),
    ]
    assert went(bench, [CASE], ways) == [
        ("a", "ok", ""),
        ("b", "failed", "RuntimeError: out of luck"),
        ("c", "wrong", ""),
        ("d", "missing", "not installed: No module named 'd'"),
        ("e", "missing", "cannot be used: OSError: libe.so is broken"),
        ("f", "missing", "cannot be used: ValueError: no version"),
        ("g", "missing", "does not compute on a CPU"),
        ("h", "missing", "takes no such case"),
        ("i", "ok", ""),
    ]


def test_a_library_is_imported_once_and_only_when_its_turn_comes(bench, provider):
    made = []
    ways = [
        provider("a", fake(__init__=lambda self, device, threads: made.append((device, threads)))),
        provider("b", fake(__init__=lambda self, device, threads: made.append("b") or raising(ImportError("b"))())),
    ]
    provider("c", fake(__init__=raising(AssertionError("was made"))))
    assert made == []
    went(bench, [CASE, Case((2, 3))], ways)
    assert made == [(CPU(), 1), "b"]
    assert bench.results.versions["a"] == "1.2.3"
    assert not {"b", "c"} & set(bench.results.versions)


def test_every_entry_on_every_case_and_progress_before_each(bench, provider):
    cases, ways = [CASE, Case((2, 3))], [provider("a"), provider("b")]
    told = []
    bench.run("suite", cases, ways, lambda *what: told.append((*what, len(bench.results.records))))
    assert told == [(case, entry, 2 * i + j) for i, case in enumerate(cases) for j, entry in enumerate(ways)]
    assert [(r.shape, r.provider) for r in bench.results.records] == [(c.shape, e.provider) for c, e, _ in told]


def test_providers_are_told_first_what_will_be_asked_of_them(bench, provider):
    told = []

    def foresee(self, ways):
        told.append(list(ways))
        raise RuntimeError("does not compile")

    a, b = provider("a", fake(foresee=foresee)), provider("b", fake(foresee=foresee))
    other = a._replace(algorithm="naive")
    cases = [CASE, Case((2, 3)), Case((4, 5))]
    assert [status for _, status, _ in went(bench, cases, [a, b, other])] == ["ok"] * 9
    assert told == [[(case, entry) for case in cases for entry in mine] for mine in ((a, other), (b,))]


def test_an_interruption_leaves_what_was_measured(bench, provider):
    numbers = count()

    def prepare(self, case, entry):
        if next(numbers) == 2:
            raise KeyboardInterrupt
        return softmax

    entry = provider("a", fake(prepare=prepare))
    with pytest.raises(KeyboardInterrupt):
        went(bench, [Case((n, 3)) for n in (2, 3, 4, 5)], [entry])
    assert [r.shape for r in bench.results.records] == [(2, 3), (3, 3)]


def test_who_was_hopeless_on_a_smaller_case_is_spared_the_larger_ones(bench, provider):
    a, b = provider("a"), provider("b")
    past = {"median_s": 60.0, "gbps": 1.0}
    bench.results.records = [
        record("suite", Case((4, 8)), a, "ok", **past),
        record("suite", Case((4, 8)), b._replace(algorithm="naive"), "ok", **past),
        record("another", Case((4, 8)), b, "ok", **past),
    ]
    before = len(bench.results.records)
    cases = [
        Case((8, 8)),
        Case((4, 8)),
        Case((2, 3)),
        Case((8, 8), DType.float64),
        Case((8, 8), axis=0),
    ]
    found = went(bench, cases, [a, b])[before:]
    assert found[0] == ("a", "missing", "not run: 4×8 took 60.00 s")
    assert [status for _, status, _ in found[1:]] == ["ok"] * (2 * len(cases) - 1)


def test_slow_is_not_hopeless(bench, provider):
    a = provider("a")
    bench.results.records = [record("suite", CASE, a, "ok", median_s=run.HOPELESS_S * 0.9)]
    assert went(bench, [Case((8, 8))], [a])[1] == ("a", "ok", "")


def test_results_say_where_and_when_and_how(bench):
    found = bench.results
    assert found.device == run.processor() != ""
    assert found.threads == 1
    assert shlex.split(found.command) == ["maxsoftmax", "bench", "a b"]
    assert found.date.endswith("+00:00")
    assert set(found.versions) == {"python", "max", "mojo"}
    assert all(version[0].isdigit() for version in found.versions.values())


@pytest.mark.parametrize("name", [name for name in PROVIDERS if name not in ("maxsoftmax", "max")])
def test_every_provider_computes_or_says_why_not(bench, name, monkeypatch):
    for variable in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        # Set by the provider; undone at the end.
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
        monkeypatch.delenv(variable)
    ((_, status, note),) = went(bench, [CASE], [Entry(name)])
    if "cpu" not in PROVIDERS[name].devices:
        assert (status, note) == ("missing", "does not compute on a CPU")
    elif name in LIBRARIES and importlib.util.find_spec(LIBRARIES[name]) is None:
        assert status == "missing"
        assert note.startswith("not installed: ")
    else:
        assert (status, note) == ("ok", "")
        assert bench.results.versions[name][0].isdigit()
        # The other axis, and what the library does not claim.
        assert went(bench, [Case((2, 3, 4), axis=1)], [Entry(name)])[-1][1] == "ok"


@pytest.mark.parametrize(
    "name", [name for name, library in LIBRARIES.items() if library != "torch"] + ["scipy", "numpy"]
)
def test_a_library_that_is_not_there_is_missing(bench, name, monkeypatch):
    # What None stands for in sys.modules: import fails.
    for library in ("jax", "onnxruntime", "onnx", "scipy.special"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(PROVIDERS["numpy"], "__init__", raising(ImportError("No module named 'numpy'")))
    ((_, status, note),) = went(bench, [CASE], [Entry(name)])
    assert status == "missing"
    assert note.startswith("not installed: ")
