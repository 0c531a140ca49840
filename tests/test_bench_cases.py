import pytest
from fakes import CASE
from max.dtype import DType
from maxsoftmax._arguments import ALGORITHMS, check_block_size, check_unroll
from maxsoftmax._bench.cases import PEERS, SUITES, Case, Entry, entries, searched
from maxsoftmax._bench.providers import PROVIDERS


@pytest.mark.parametrize("name", [name for name, suite in SUITES.items() if not suite.calls])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_suites_name_what_there_is(name, kind):
    ways = entries(SUITES[name], kind)
    assert len(set(ways)) == len(ways)
    for entry in ways:
        assert kind in PROVIDERS[entry.provider].devices
        if entry.provider == "maxsoftmax":
            assert entry.algorithm in ALGORITHMS[kind]
            check_block_size(entry.block_size, entry.algorithm, kind)
            check_unroll(entry.unroll, entry.algorithm, kind)
    assert len(set(SUITES[name].cases)) == len(SUITES[name].cases) > 0
    if SUITES[name].ways and kind == "gpu":
        assert ways == list(SUITES[name].ways)
        return
    ours = [entry.algorithm for entry in ways if entry.provider == "maxsoftmax"]
    assert ours == (list(ALGORITHMS[kind]) if SUITES[name].rungs else ["auto"])
    assert [entry.provider for entry in ways[len(ours) :]] == list(PEERS[kind])


def test_the_suite_of_block_sizes_has_the_published_kernels_at_every_block():
    ways = entries(SUITES["blocks"], "gpu")
    sizes = {name: [way.block_size for way in ways if way.algorithm == name] for name in ("naive", "tree", "warp")}
    assert set(map(tuple, sizes.values())) == {(32, 64, 128, 256, 512, 1024)}
    assert {way.algorithm for way in ways} == {*sizes, "tree_blocked", "vector", "online"}
    assert SUITES["blocks"].cases == SUITES["ladder"].cases


def test_the_suite_of_widths_searches_what_each_kernel_leaves():
    ways = entries(SUITES["widths"], "gpu")
    assert set(searched("online")) == {
        Entry("maxsoftmax", "online", block, unroll) for block in (128, 256, 512, 1024) for unroll in (1, 2, 4, 8)
    }
    assert {way for way in ways if way.algorithm == "online"} == set(searched("online"))
    assert [way.block_size for way in ways if way.algorithm == "tree"] == [128, 256, 512, 1024]
    assert [case.shape for case in SUITES["widths"].cases] == [(128, 2**i) for i in range(10, 18)]


def test_names_of_cases_and_entries():
    assert str(CASE) == "4×8 float32"
    assert (
        str(Case((2, 3, 5), DType.bfloat16, 1)) == str(Case((2, 3, 5), DType.bfloat16, -2)) == "2×3×5 bfloat16, axis 1"
    )
    assert str(Case((2, 3), axis=1)) == "2×3 float32"
    assert (CASE.size, CASE.nbytes, CASE.moved) == (32, 128, 256)
    assert Case((4, 8), DType.bfloat16).moved == 128
    assert str(Entry("torch")) == "torch"
    assert str(Entry("maxsoftmax", "auto")) == "maxsoftmax:auto"
    assert str(Entry("maxsoftmax", "online", 512, 4)) == "maxsoftmax:online,512,4"
