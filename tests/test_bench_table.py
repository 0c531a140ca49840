import re

import pytest
from commands import cells
from fakes import results, timed
from max.dtype import DType
from maxsoftmax._bench import command
from maxsoftmax._bench.cases import Case, Entry
from maxsoftmax._bench.protocol import record
from maxsoftmax._bench.table import duration, markdown, overview, tables


def shown(capsys, *records, **where):
    command.show(results(*records, **where))
    return capsys.readouterr().out


def test_a_table_a_case(capsys):
    case = Case((8, 1000))
    printed = shown(
        capsys,
        timed(case, Entry("maxsoftmax", "naive", 512), 4e-3, copy=0.064),
        timed(case, Entry("maxsoftmax", "online", 512, 4), 1e-3, copy=0.064),
        timed(case, Entry("torch"), 5e-3, copy=0.064),
        timed(Case((2, 3, 5), DType.bfloat16, 1), Entry("torch"), 1.5),
    )
    assert "A processor, 4 threads; python 3.12.0, max 26.7.0; 2026-01-01T00:00:00+00:00\n" in printed
    assert re.findall(r"^\w+: softmax of .*\S", printed, re.M) == [
        "custom: softmax of 8×1000 float32",
        "custom: softmax of 2×3×5 axis 1 bfloat16",
    ]
    # 64 000 bytes and 40 000 operations.
    assert cells(printed) == [
        ["maxsoftmax:naive,512", "4 ms", "0.0", "25%", "0.01", "1.00", "0.0%", "1.0e-07", ""],
        ["maxsoftmax:online,512,4", "1 ms", "0.1", "100%", "0.04", "4.00", "75.0%", "1.0e-07", ""],
        ["torch", "5 ms", "0.0", "20%", "0.008", "0.80", "-25.0%", "1.0e-07", ""],
        ["torch", "1.5 s", "0.0", "0%", "1e-07", "", "", "1.0e-07", ""],
    ]


def test_what_was_not_timed_says_why(capsys):
    case = Case((4, 8))
    printed = shown(
        capsys,
        record("custom", case, Entry("torch"), "missing", note="not installed: [red]no[/red] :cat: [/]"),
        record("custom", case, Entry("jax"), "failed", note="MemoryError: no"),
        record("custom", case, Entry("scipy"), "wrong", max_rel_error=0.0123),
        record("custom", case, Entry("numpy"), "wrong", note="not a finite number"),
    )
    assert cells(printed) == [
        ["torch", "MISSING", "", "", "", "", "", "", "not installed: [red]no[/red] :cat: [/]"],
        ["jax", "FAILED", "", "", "", "", "", "", "MemoryError: no"],
        ["scipy", "WRONG", "", "", "", "", "", "1.2e-02", ""],
        ["numpy", "WRONG", "", "", "", "", "", "", "not a finite number"],
    ]


def test_a_long_note_is_not_cut(capsys):
    note = "x" * 250
    printed = shown(capsys, record("custom", Case((4, 8)), Entry("torch"), "failed", note=note))
    assert "".join(row[-1] for row in cells(printed)) == note


def test_an_overview_has_a_row_a_case_and_a_column_for_each_who_was_timed():
    case, other = Case((8, 1000)), Case((3, 9), DType.bfloat16)
    given = results(
        timed(case, Entry("maxsoftmax", "auto"), 1e-3, copy=0.128),
        record("custom", case, Entry("liger"), "failed", note="no"),
        record("custom", case, Entry("jax"), "missing", note="not installed"),
        timed(case, Entry("torch"), 2e-3, copy=0.128),
        record("custom", other, Entry("liger"), "wrong", max_rel_error=1.0),
        timed(other, Entry("torch"), 1.5),
    )
    assert overview(given) == (
        "| | auto | torch |\n|---|---:|---:|\n"
        "| 8×1000 float32 | 1 ms, 50% | 2 ms, 25% |\n"
        "| 3×9 bfloat16 |  | 1.5 s, 0% |"
    )
    given.records.append(timed(other, Entry("liger"), 1.5))
    assert overview(given, ["liger", "jax"]).splitlines()[2:] == [
        "| 8×1000 float32 | FAILED |",
        "| 3×9 bfloat16 | 1.5 s, 0% |",
    ]


def test_an_improvement_is_on_naive_in_blocks_of_the_same_size(capsys):
    case = Case((8, 1000))
    given = [
        timed(case, Entry("maxsoftmax", name, size), t)
        for name, size, t in (
            ("naive", 32, 8e-3),
            ("naive", 64, 4e-3),
            ("tree", 32, 2e-3),
            ("tree", 64, 2e-3),
            ("auto", None, 1e-3),
        )
    ]
    assert [(row[5], row[6]) for row in cells(shown(capsys, *given))] == [
        ("1.00", "0.0%"),
        ("1.00", "0.0%"),
        ("4.00", "75.0%"),
        ("2.00", "50.0%"),
        ("8.00", "87.5%"),
    ]


def test_ways_that_differ_in_what_was_chosen_have_names_that_do():
    case = Case((8, 1000))
    given = results(
        timed(case, Entry("maxsoftmax", "tree", 32), 1e-3),
        timed(case, Entry("maxsoftmax", "tree", 64), 2e-3),
        timed(case, Entry("maxsoftmax", "online", 64, 4), 3e-3),
    )
    assert [line.split(" | ")[0] for line in markdown(given).splitlines()[2:]] == ["| tree,32", "| tree,64", "| online"]
    assert overview(given).splitlines()[0] == "| | tree,32 | tree,64 | online |"
    assert "1 ms, " in overview(given)


def test_tables_follow_the_records():
    one, other = Case((4, 8)), Case((4, 8), DType.float16)
    found = list(tables(results(timed(one), timed(one), timed(other), timed(other, suite="cpu"))))
    assert [len(table.rows) for table in found] == [2, 1, 1]
    assert list(tables(results())) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.3456, "12.35 s"),
        (1.0, "1 s"),
        (0.9994, "999.4 ms"),
        (1.23456e-3, "1.235 ms"),
        (1e-3, "1 ms"),
        (9.994e-4, "999.4 µs"),
        (1.5e-6, "1.5 µs"),
        (2.5e-8, "0.025 µs"),
    ],
)
def test_times_have_a_unit_that_suits(seconds, text):
    assert duration(seconds) == text
