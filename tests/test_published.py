import os
import re
from decimal import Decimal
from pathlib import Path

import pytest
from fakes import results, timed
from maxsoftmax._bench import chart, published
from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.protocol import record
from maxsoftmax._bench.results import Results
from maxsoftmax._commands import cli

WRITE_UPS = published._data()["write-ups"]

POCKET = Case((8, 1024, 50257))
VECTOR = Case((1, 2**24))


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def ladder(device="NVIDIA H200 (sm_90a)"):
    """Returns records in which `naive` takes 40 ms, `tree` 10 and `warp` 8; `auto` failed."""
    times = {"naive": 40e-3, "tree": 10e-3, "warp": 8e-3}
    timings = [timed(POCKET, Entry("maxsoftmax", name, 512), seconds) for name, seconds in times.items()]
    failed = record("ladder", POCKET, Entry("maxsoftmax", "auto"), "failed", note="no")
    return results(*timings, failed, timed(POCKET, Entry("torch"), 1e-3), device=device, threads=None)


def rows(table):
    """Returns the cells of a table of Markdown, line by line, that under the heads left out."""
    head, _, *lines = table.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines)]


# The figures.


def test_every_write_up_says_where_it_is_and_what_of():
    assert published.names() == ["pocket", "fastsoftmax", "worklog", "puzzle", "pallas"]
    for write_up in WRITE_UPS.values():
        assert write_up["source"].startswith("https://")
        assert write_up["title"]
        assert all(n > 0 for n in write_up["shape"])
        assert write_up.get("gpu") in (None, *published._data()["rates"])
    for rate in published._data()["rates"].values():
        assert rate["source"].startswith("https://")


def test_improvements_follow_from_the_times():
    times = {figure["what"]: figure for figure in WRITE_UPS["pocket"]["figures"] if "what" in figure}
    assert list(times) == ["kernel 1", "kernel 2", "kernel 4"]
    for figure in times.values():
        share = 100 * (1 - figure["time"] / times["kernel 1"]["time"])
        assert round(share, 1) == figure["improvement"]


def test_the_limit_follows_from_the_rate():
    write_up = WRITE_UPS["fastsoftmax"]
    assert published._rate(write_up["gpu"]) * published.GFLOP_A_GB == write_up["limit"] == 625


def test_the_speedup_follows_from_times_that_were_rounded():
    jax, pallas, *_ = WRITE_UPS["pallas"]["figures"]
    half = Decimal("0.005")
    least = (jax["time"] - half) / (pallas["time"] + half)
    most = (jax["time"] + half) / (pallas["time"] - half)
    assert least < pallas["speedup"] < most


def test_there_are_fifteen_losses():
    assert len(published.losses()) == 15
    assert published.losses()[0] == 0.716370
    assert all(loss > 0 for loss in published.losses())


def test_every_figure_is_shown_as_it_was_published():
    shown = "".join(published.beside(name, [results()]) for name in published.names()) + published.compared([0.0] * 15)
    expected = [
        *("162.3272 ms", "48.6429 ms", "50.7793 ms", "0.0%", "70.0%", "68.7%", "NVIDIA T4", "of 320 GB/s"),
        *("| 8.9 |", "of 625 GFLOP/s", "128×1024 float32"),
        *("30.87 ms", "5.34 ms", "89.41 ms", "5.52 ms", "1.88 ms", "1×16777216 float32"),
        *("| 1e-5 |", "128 float32"),
        *("0.30 ms", "0.33 ms", "0.93×", "1024×1024 float32"),
        *("0.716370", "1.050450", "0.032370", "0.001420"),
        *(write_up["source"] for write_up in WRITE_UPS.values()),
    ]
    assert [text for text in expected if text not in shown] == []


# Beside them.


def test_ours_are_beside_theirs_each_with_the_share_of_its_own_memory_s_rate():
    head, *found = rows(published.beside("pocket", [ladder()]))
    assert head[1:] == [
        *("NVIDIA T4: time", "of 320 GB/s", "improvement"),
        *("here", "NVIDIA H200: time", "of 4800 GB/s", "improvement"),
    ]
    # 8 bytes for each of 411 705 344 elements.
    assert found == [
        ["kernel 1", "162.3272 ms", "6.3%", "0.0%", "naive", "40 ms", "1.7%", "0.0%"],
        ["kernel 2", "48.6429 ms", "21.2%", "70.0%", "tree", "10 ms", "6.9%", "75.0%"],
        ["kernel 4", "50.7793 ms", "20.3%", "68.7%", "warp", "8 ms", "8.6%", "80.0%"],
        ["", "", "", "", "auto", "FAILED", "", ""],
    ]


def test_a_gpu_whose_rate_is_not_known_has_no_share():
    head, first, *_ = rows(published.beside("pocket", [ladder("Another GPU")]))
    assert head[5:] == ["Another GPU: time", "", "improvement"]
    assert first[5:] == ["40 ms", "", "0.0%"]


def test_of_what_was_searched_the_best_is_shown():
    case = Case((128, 1024))
    ways = [Entry("maxsoftmax", "elementwise", size) for size in (128, 512, 256)]
    given = results(*(timed(case, way, t) for way, t in zip(ways, (4e-6, 2e-6, 3e-6), strict=True)), threads=None)
    _, first = rows(published.beside("fastsoftmax", [given]))
    # Five operations for each of 131 072 elements.
    assert first == ["initial kernel", "8.9", "1.4%", "elementwise", "328", ""]


def test_of_several_devices_each_is_named():
    given = [
        results(timed(Case((128,)), Entry("maxsoftmax.ops"), 1e-5), device=name) for name in ("A GPU (x)", "A CPU")
    ]
    head, *found = rows(published.beside("puzzle", given))
    assert head[2:] == ["here", "here: error"]
    assert found == [
        ["GPU and CPU, right to", "1e-5", "maxsoftmax.ops, A GPU", "1.0e-07"],
        ["", "", "maxsoftmax.ops, A CPU", "1.0e-07"],
    ]


def test_others_are_slanted_and_who_was_not_measured_is_left_out():
    case = Case((1024, 1024))
    given = results(timed(case, Entry("jax"), 1e-4), timed(case, Entry("maxsoftmax.torch"), 2e-5))
    _, *found = rows(published.beside("pallas", [given]))
    assert found == [
        ["jax.jit(jax.nn.softmax)", "0.30 ms", "", "*jax*", "100 µs", "1.00×"],
        ["Pallas kernel", "0.33 ms", "0.93×", "maxsoftmax.torch", "20 µs", "5.00×"],
    ]


def test_other_cases_are_not_taken_for_it():
    given = results(timed(Case((8, 1024, 50256)), Entry("maxsoftmax", "naive", 512)))
    _, first, *_ = rows(published.beside("pocket", [given]))
    assert first[4:] == ["", "", "", ""]


def test_an_improvement_that_was_named_is_worth_what_was_measured():
    one = results(
        timed(VECTOR, Entry("maxsoftmax", "tree", 512), 4e-3),
        timed(VECTOR, Entry("maxsoftmax", "warp", 512), 2e-3),
        timed(VECTOR, Entry("maxsoftmax", "vector", 512), 1e-3),
    )
    steps = {step["what"]: (step["from"], step["to"]) for step in WRITE_UPS["worklog"]["improvements"]}
    (name, size, *before), (_, _, *after) = (way.split(",") for way in steps["fewer registers"])
    way = Entry("maxsoftmax", name, int(size))
    two = results(
        timed(POCKET, way._replace(unroll=int(before[0])), 3e-3),
        timed(POCKET, way._replace(unroll=int(after[0])), 2e-3),
    )
    head, *found = rows(published.worth("worklog", [one, two]))
    assert head[1:] == ["here", "1×16777216 float32", "8×1024×50257 float32"]
    assert found == [
        ["warp reductions", "tree → warp", "4 ms → 2 ms, 2.00×", ""],
        ["vectors", "warp → vector", "2 ms → 1 ms, 2.00×", ""],
        ["fewer registers", " → ".join(steps["fewer registers"]), "", "3 ms → 2 ms, 1.50×"],
    ]


def test_losses_are_beside_the_published_ones():
    head, *found = rows(published.compared([0.5 - i / 100 for i in range(16)]))
    assert re.fullmatch(r"\[.*\]\(https://.*\)", head[1])
    assert len(found) == 15
    assert found[0] == ["1", "0.716370", "0.500000"]
    assert found[-1] == ["15", "0.001420", "0.360000"]


# The command.


def test_a_report_shows_and_draws_what_is_beside_a_write_up(capsys):
    cases = [Case((1, 2**i)) for i in (10, 24)]
    whos = ["auto", "tree", "warp", "split"]
    ways = [*(Entry("maxsoftmax", who) for who in whos), Entry("cudnn"), Entry("jax")]
    given = results(*(timed(case, way, 1e-9 * case.size, suite="sweep") for case in cases for way in ways))
    given.write(Path("x.json"))
    assert cli.main(["bench", "report", "x.json", "--beside", "worklog", "--plot", "x.svg"]) == 0
    printed = capsys.readouterr().out
    assert printed == published.beside("worklog", [given]) + "\nx.svg: chart\n"
    drawn = results(*published.shown("worklog", given))
    assert {r.who for r in drawn.records} == {"auto", "tree", "split", "cudnn"}
    chart.write(drawn, Path("y.svg"), times=True)
    assert Path("x.svg").read_bytes() == Path("y.svg").read_bytes()


def test_a_report_beside_a_write_up_keeps_all_records():
    ladder().write(Path("x.json"))
    assert cli.main(["bench", "report", "x.json", "--beside", "pocket", "--json", "y.json"]) == 0
    assert Results.read(Path("y.json")) == ladder()
    assert sorted(os.listdir()) == ["x.json", "y.json"]
