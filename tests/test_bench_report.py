import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from commands import fails, misused
from fakes import Fake, fake, raising, results, softmax, spoilt, timed
from matplotlib import colors
from matplotlib.figure import Figure
from max.dtype import DType
from maxsoftmax._commands import cli, parse
from maxsoftmax._graph import runtime
from maxsoftmax.bench import chart, command, tune
from maxsoftmax.bench.cases import CALL_OPS, PEERS, SUITES, Case, Entry, entries
from maxsoftmax.bench.protocol import record
from maxsoftmax.bench.providers import CALLERS, PROVIDERS
from maxsoftmax.bench.results import Results
from maxsoftmax.bench.run import Bench
from maxsoftmax.bench.table import duration, markdown, overview, tables
from PIL import Image

# The command with a provider that waits to be interrupted on its second case.
WAITING = """
import sys, time
from fakes import Fake
from maxsoftmax._commands import cli
from maxsoftmax.bench.providers import PROVIDERS

class Waiting(Fake):
    name = "waiting"

    def prepare(self, case, entry):
        if case.shape == (3, 3):
            open("ready", "w").close()
            # A signal just before a long sleep would not be noticed until its end.
            for _ in range(600):
                time.sleep(0.1)
        return super().prepare(case, entry)

PROVIDERS["waiting"] = Waiting
sys.exit(cli.main())
"""

NO_GPU = pytest.mark.skipif(len(runtime.devices()) > 1, reason="there is a GPU here")


@pytest.fixture(autouse=True)
def _process():
    """Undoes what the command does to the process that it runs in."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    environment = dict(os.environ)
    yield
    if cores:
        os.sched_setaffinity(0, cores)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def provider(monkeypatch):
    """Registers a provider by a name."""

    def register(name, kind=Fake):
        monkeypatch.setitem(PROVIDERS, name, type("Named", (kind,), {"name": name}))

    return register


@pytest.fixture
def no_measuring(monkeypatch):
    monkeypatch.setattr(Bench, "_measure", lambda *what: pytest.fail(f"measures {what}"))


def bench(*arguments):
    """Runs the command in this process, on the CPU and with all providers in it, unless it shows a report."""
    where = [] if arguments[0] == "report" else ["--device", "cpu", "--together"]
    return cli.main(["bench", *arguments, *where])


def read(path):
    return Results.read(Path(path))


def cells(printed):
    """Returns the cells of every row of the tables printed, headers left out."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if line[:1] == "│"]


# Tables.


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


# Charts.


def one_case(device="gpu"):
    ways = entries(SUITES["ladder"], device)
    return results(*(timed(Case((8, 1024)), way, 1e-4 * 1.7**i) for i, way in reversed([*enumerate(ways)])))


def rows_of_all_lengths():
    ways = entries(SUITES["sweep"], "gpu")
    cases = SUITES["sweep"].cases
    return results(
        *(
            timed(c, way, c.size * 1e-10 * (i + 1), copy=80.0, suite="sweep")
            for c in cases
            for i, way in enumerate(ways)
        )
    )


def block_sizes():
    (case,) = SUITES["blocks"].cases
    ways = enumerate(SUITES["blocks"].ways)
    return results(*(timed(case, way, 1e-3 * (i + 1), copy=4e3, suite="blocks") for i, way in ways))


def widths():
    """Each kernel's last configuration is its best."""
    suite = SUITES["widths"]
    times = {way: 1e-9 * (100 - i) for i, way in enumerate(suite.ways)}
    return results(
        *(timed(c, way, c.size * times[way], copy=80.0, suite="widths") for c in suite.cases for way in times)
    )


def search():
    ways = tune.candidates(tune.TUNED)
    return results(*(timed(Case((8, 100)), way, 1e-3 / (i + 1), copy=1.0, suite="tune") for i, way in enumerate(ways)))


def several_cases():
    cases = SUITES["cpu"].cases
    ways = entries(SUITES["cpu"], "cpu")
    return results(
        *(timed(c, way, c.size * 1e-9 * (i + 1), copy=10.0, suite="cpu") for c in cases for i, way in enumerate(ways))
    )


CHARTS = [one_case, rows_of_all_lengths, several_cases, block_sizes, widths]


def ink(path, page, *, crop=1.0):
    """Returns the share of pixels that stand out from a page of this brightness, in the upper part of an image."""
    image = np.asarray(Image.open(path).convert("RGBA"), dtype=float) / 255
    image = image[: int(len(image) * crop)]
    opaque = image[..., 3:]
    on_page = image[..., :3] * opaque + page * (1 - opaque)
    return float((np.abs(on_page - page).max(axis=-1) > 0.2).mean())


@pytest.mark.parametrize("make", CHARTS)
def test_charts_can_be_seen_on_a_white_page_and_on_a_black_one(make):
    assert chart.write(make(), Path("chart.png")) == [Path("chart.png")]
    shares = [ink("chart.png", page) for page in (0, 1)]
    assert 0.01 < min(shares) < max(shares) < 0.5
    # The title too.
    assert min(ink("chart.png", page, crop=0.1) for page in (0, 1)) > 0.005
    # The page itself shines through.
    assert np.asarray(Image.open("chart.png"))[0, 0, 3] == 0


def luminance(colour):
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colors.to_rgb(colour))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrasts(colour):
    """Returns the contrast to a white page and to a black one, as WCAG counts it: from 1 to 21."""
    return 1.05 / (luminance(colour) + 0.05), (luminance(colour) + 0.05) / 0.05


@pytest.mark.parametrize("make", CHARTS)
def test_no_colour_vanishes_on_a_page(make):
    (axes, *_) = chart.draw(make()).axes
    used = {colors.to_hex(line.get_color()) for line in axes.lines} | {
        colors.to_hex(p.get_facecolor()) for p in axes.patches
    }
    assert {colour: contrasts(colour) for colour in used if min(contrasts(colour)) < 2} == {}


def test_one_case_makes_bars_the_slowest_on_top():
    given = one_case()
    given.records += [
        record("custom", Case((8, 1024)), Entry("scipy"), "wrong", max_rel_error=1.0),
        record("custom", Case((4, 4)), Entry("numpy"), "missing"),
    ]
    (axes,) = chart.draw(given).axes
    expected = sorted((r.median_s, r.who) for r in given.records if r.status == "ok")
    assert [bar.get_width() for bar in axes.patches] == [seconds for seconds, _ in expected]
    assert [label.get_text() for label in axes.get_yticklabels()] == [who for _, who in expected]
    assert [bar.get_y() for bar in axes.patches] == sorted(bar.get_y() for bar in axes.patches)
    ours = {
        label
        for bar, (_, label) in zip(axes.patches, expected, strict=True)
        if colors.to_hex(bar.get_facecolor()) == chart.OURS
    }
    assert ours == {r.who for r in given.records if r.ours}
    assert axes.get_xscale() == "log"
    # All bars end where they can be seen, and so does the copy: 8 × 1024 × 4 × 2 bytes at 100 GB/s.
    low, high = axes.get_xlim()
    assert low < expected[0][0]
    assert expected[-1][0] < high
    (copy,) = axes.lines
    assert copy.get_xdata()[0] == pytest.approx(65536 / 100e9)
    assert low < 65536 / 100e9 < high
    texts = [text.get_text() for text in axes.texts]
    assert "a copy: 0.6554 µs" in texts
    assert "100 µs, 1 GB/s" in texts
    assert "8×1024 float32" in axes.get_xlabel()


def test_a_single_bar_will_do():
    (axes,) = chart.draw(results(timed())).axes
    assert len(axes.patches) == 1


def test_rows_of_all_lengths_make_lines():
    given = rows_of_all_lengths()
    (axes,) = chart.draw(given).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    *lines, limit = axes.lines
    whos = list(dict.fromkeys(r.who for r in given.records))
    assert [line.get_label() for line in lines] == whos
    for line in lines:
        mine = [r for r in given.records if r.who == line.get_label()]
        np.testing.assert_array_equal(line.get_xdata(), [r.size for r in mine])
        np.testing.assert_allclose(line.get_ydata(), [5e-9 * r.size / r.median_s for r in mine])
    # 80 GB/s are 10 · 10⁹ elements of float32 a second, read and written, and five operations each: 5/8 of it.
    assert limit.get_ydata()[0] == pytest.approx(50)
    assert limit.get_label() == "limit: 50, at a copy's\n80 GB/s"
    looks = {(colors.to_hex(line.get_color()), line.get_marker()) for line in lines}
    assert len(looks) == len(lines)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [*whos, limit.get_label()]


def test_lines_may_show_times():
    given = rows_of_all_lengths()
    (axes,) = chart.draw(given, times=True).axes
    assert axes.get_ylabel() == "seconds"
    assert len(axes.lines) == len({r.who for r in given.records})
    for line in axes.lines:
        np.testing.assert_array_equal(
            line.get_ydata(), [r.median_s for r in given.records if r.who == line.get_label()]
        )


def test_widths_make_lines_of_each_kernel_at_its_best():
    given = widths()
    (axes,) = chart.draw(given).axes
    *lines, limit = axes.lines
    whos = list(dict.fromkeys(r.who for r in given.records))
    assert [line.get_label() for line in lines] == whos
    for line in lines:
        np.testing.assert_array_equal(line.get_xdata(), [case.shape[-1] for case in SUITES["widths"].cases])
        best = min(r.median_s / r.size for r in given.records if r.who == line.get_label())
        np.testing.assert_allclose(line.get_ydata(), 5e-9 / best)
    assert limit.get_ydata()[0] == pytest.approx(50)


def test_block_sizes_make_lines_of_rates():
    given = block_sizes()
    (axes,) = chart.draw(given).axes
    *lines, copy = axes.lines
    assert [line.get_label() for line in lines] == ["naive", "tree", "tree_blocked", "warp", "vector", "online"]
    for line in lines:
        np.testing.assert_array_equal(line.get_xdata(), [32, 64, 128, 256, 512, 1024])
        np.testing.assert_array_equal(line.get_ydata(), [r.gbps for r in given.records if r.who == line.get_label()])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["32", "64", "128", "256", "512", "1024"]
    assert (copy.get_ydata()[0], copy.get_label()) == (4000, "copy, 4000 GB/s")


def test_a_search_makes_a_map_for_each_kernel_and_case_and_frames_the_best():
    given = search()
    given.records += [replace(r, shape=(8, 200)) for r in given.records if r.who == "online" and r.unroll == 1]
    given.records[5] = record("tune", Case((8, 100)), tune.candidates(["vector"])[5], "failed", note="no")
    panels = chart.draw(given).axes
    assert [axes.get_title() for axes in panels] == [
        f"{kernel}, 8×{n} float32" for n in (100, 200) for kernel in ("vector", "online")
    ]
    vector, online, nothing, one = panels
    # As many cells as were timed, each with its share and its time.
    assert [len(axes.texts) for axes in panels] == [15, 16, 0, 4]
    last = given.records[31]
    assert f"{last.gbps:.0%}\n{duration(last.median_s)}" in [text.get_text() for text in online.texts]
    assert np.isnan(vector.collections[0].get_array().filled(np.nan)[1, 1])
    # The last is the fastest.
    (frame,) = online.patches
    assert (round(frame.get_x()), round(frame.get_y())) == (3, 3)
    assert len(one.patches) == 1
    assert len(nothing.patches) == 0


def test_a_search_can_be_seen_on_a_white_page_and_on_a_black_one():
    chart.write(search(), Path("chart.png"))
    assert min(ink("chart.png", page, crop=0.1) for page in (0, 1)) > 0.005
    for name in ("a.svg", "b.svg"):
        chart.write(search(), Path(name))
    assert Path("a.svg").read_bytes() == Path("b.svg").read_bytes()


def test_several_cases_make_points_in_a_panel_for_each_dtype():
    given = several_cases()
    figure = chart.draw(given)
    assert [axes.get_ylabel().split(":")[0] for axes in figure.axes] == ["float32", "bfloat16"]
    for axes, dtype in zip(figure.axes, ("float32", "bfloat16"), strict=True):
        mine = [r for r in given.records if r.dtype == dtype]
        cases = list(dict.fromkeys(r.case for r in mine))
        assert [label.get_text() for label in axes.get_xticklabels()] == cases
        *lines, copy = axes.lines
        assert [line.get_label() for line in lines] == list(dict.fromkeys(r.who for r in mine))
        for line in lines:
            np.testing.assert_array_equal(line.get_xdata(), range(len(cases)))
            rates = [r.gbps / 10 for r in mine if r.who == line.get_label()]
            np.testing.assert_allclose(line.get_ydata(), rates)
        assert set(copy.get_ydata()) == {1}


@pytest.mark.parametrize(
    "others",
    [[Case((2, 16))], [Case((1, 16)), Case((1, 8), DType.float16)], [Case((16,))], [Case((1, 1, 16))]],
    ids=str,
)
def test_only_single_rows_of_one_dtype_make_lines(others):
    given = results(timed(Case((1, 8))), *map(timed, others))
    assert all(axes.get_xscale() == "linear" for axes in chart.draw(given).axes)


def test_a_chart_says_what_and_where():
    figure = chart.draw(several_cases())
    assert figure.get_suptitle() == f"{SUITES['cpu'].title}\nA processor, 4 threads"
    assert chart.draw(results(timed(), device="A GPU", threads=None)).get_suptitle() == "softmax, custom\nA GPU"


def test_charts_change_nothing_for_other_figures():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    chart.draw(one_case())
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("make", [*CHARTS, lambda: results(timed())])
def test_the_same_results_are_the_same_bytes(make):
    form = "svg" if make in CHARTS else "png"
    for name in ("a", "b"):
        chart.write(make(), Path(f"{name}.{form}"))
    assert Path(f"a.{form}").read_bytes() == Path(f"b.{form}").read_bytes()
    # These were drawn in the same second.
    assert b"<dc:date>" not in Path(f"a.{form}").read_bytes()


def test_formats_are_chosen_by_the_name():
    given = results(timed())
    assert chart.write(given, Path("both")) == [Path("both.svg"), Path("both.png")]
    assert chart.write(given, Path("one.SVG")) == [Path("one.SVG")]
    assert sorted(os.listdir()) == ["both.png", "both.svg", "one.SVG"]
    assert "<svg" in Path("both.svg").read_text()
    assert "<svg" in Path("one.SVG").read_text()
    assert Image.open("both.png").format == "PNG"


@pytest.mark.parametrize("name", ["chart.pdf", "chart.json", "v1.2"])
def test_other_formats_are_refused(name):
    with pytest.raises(ValueError, match=f"a chart is written as svg or png, not .*{name}"):
        chart.write(results(timed()), Path(name))
    assert os.listdir() == []


@pytest.mark.parametrize("given", [results(), results(record("cpu", Case((4, 8)), Entry("torch"), "wrong"))])
def test_nothing_timed_is_nothing_to_draw(given):
    with pytest.raises(ValueError, match="nothing was timed"):
        chart.write(given, Path("chart.svg"))
    assert os.listdir() == []


def test_a_chart_that_cannot_be_drawn_leaves_the_old_one(monkeypatch):
    Path("chart.svg").write_text("mine")
    monkeypatch.setattr(Figure, "savefig", raising(RuntimeError("no")))
    with pytest.raises(RuntimeError):
        chart.write(results(timed()), Path("chart.svg"))
    assert os.listdir() == ["chart.svg"]
    assert Path("chart.svg").read_text() == "mine"


# The command.


def test_a_run_prints_tables_and_keeps_records(capsys, monkeypatch):
    arguments = ["--shape", "4x8", "--shape", "2×3×4", "--dtype", "f32", "--dtype", "float64", "--axis", "-2"]
    arguments += ["--providers", "numpy,scipy", "--json", "results.json"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/maxsoftmax", "bench", *arguments])
    assert bench(*arguments) == 0
    printed, message = capsys.readouterr()
    assert message == ""
    assert printed.endswith("results.json: 8 records\n")
    assert [(row[0], row[-1]) for row in cells(printed)] == [("numpy", ""), ("scipy", "")] * 4
    found = read("results.json")
    assert shlex.split(found.command) == ["maxsoftmax", "bench", *arguments]
    assert (found.rounds, found.processor) == (None, None)
    assert [(r.suite, r.shape, r.dtype, r.axis, r.provider, r.status) for r in found.records] == [
        ("custom", shape, dtype, -2, provider, "ok")
        for shape in [(4, 8), (2, 3, 4)]
        for dtype in ("float32", "float64")
        for provider in ("numpy", "scipy")
    ]
    assert {"python", "max", "mojo", "numpy", "scipy"} == set(found.versions)


@pytest.mark.parametrize("size", ["512x1000"])
def test_ours_and_max_s_own(capsys, device, size):
    # The one test that compiles, so that the rest is quick.
    providers = "maxsoftmax:auto,maxsoftmax:naive,max"
    where = ["--device", device, "--together"]
    assert cli.main(["bench", "--shape", size, "--providers", providers, *where, "--json", "x.json"]) == 0
    found = read("x.json").records
    assert [(r.who, r.status, r.note) for r in found] == [("auto", "ok", ""), ("naive", "ok", ""), ("max", "ok", "")]
    for r in found:
        assert 0 < r.min_s <= r.median_s < 1
        assert r.repeats > 5
        assert r.gbps == pytest.approx(2 * 512 * 1000 * 4 / r.median_s * 1e-9)
        assert r.copy_gbps > 0
        assert r.max_rel_error < 1e-5
    naive = cells(capsys.readouterr().out)[1]
    assert naive[5] == "1.00"


def test_a_suite_runs_with_the_providers_asked_for(monkeypatch, capsys, provider):
    small = SUITES["cpu"]._replace(cases=(Case((4, 8)), Case((2, 3), DType.bfloat16)))
    monkeypatch.setitem(SUITES, "cpu", small)
    provider("mine")
    assert bench("cpu", "--providers", "numpy,mine,numpy", "--json", "x.json") == 0
    assert [(r.suite, r.provider, r.status) for r in read("x.json").records] == [
        ("cpu", "numpy", "ok"),
        ("cpu", "mine", "ok"),
        ("cpu", "numpy", "missing"),
        ("cpu", "mine", "ok"),
    ]


def planned(monkeypatch, *arguments):
    """Returns what the command would run."""
    plans = []
    monkeypatch.setattr(Bench, "run", lambda self, suite, cases, ways, progress: plans.append((suite, cases, ways)))
    assert cli.main(["bench", *arguments, "--together"]) == 0
    return plans[0]


@NO_GPU
def test_without_a_gpu_the_suite_is_the_processor_s(monkeypatch):
    assert planned(monkeypatch) == ("cpu", SUITES["cpu"].cases, entries(SUITES["cpu"], "cpu"))


def test_a_suite_for_gpus_may_be_tried_on_a_processor(monkeypatch):
    name, cases, ways = planned(monkeypatch, "ladder", "--device", "cpu")
    assert (name, cases) == ("ladder", SUITES["ladder"].cases)
    assert [way.provider for way in ways] == ["maxsoftmax", "maxsoftmax", *PEERS["cpu"]]


def test_algorithms_are_chosen_by_name(monkeypatch):
    arguments = ["--shape", "4x8", "--device", "cpu", "--providers"]
    assert planned(monkeypatch, *arguments, "maxsoftmax")[2] == [Entry("maxsoftmax", a) for a in ("auto", "naive")]
    assert planned(monkeypatch, *arguments, "scipy,maxsoftmax:naive")[2] == [
        Entry("scipy"),
        Entry("maxsoftmax", "naive"),
    ]


def test_a_shape_given_twice_is_measured_once(monkeypatch):
    _, cases, _ = planned(monkeypatch, "--shape", "4x8", "--shape", "4x8", "--device", "cpu")
    assert cases == (Case((4, 8)),)


def test_block_size_and_unroll_go_where_they_mean_something():
    parser = cli._parser()
    options = parser.parse_args(["bench", "sweep", "--block-size", "256", "--unroll", "8"])
    ways = command._ways(options, SUITES["sweep"], "gpu")
    assert {(way.algorithm, way.block_size, way.unroll) for way in ways if way.provider == "maxsoftmax"} >= {
        ("auto", None, None),
        ("tree", 256, None),
        ("vector", 256, 8),
        ("online", 256, 8),
        ("split", 256, None),
    }
    assert [way for way in ways if way.provider != "maxsoftmax"] == [Entry(name) for name in PEERS["gpu"]]


def test_a_block_size_that_was_asked_for_is_measured_once():
    options = cli._parser().parse_args(["bench", "blocks", "--block-size", "256", "--providers", "maxsoftmax:tree"])
    assert command._ways(options, SUITES["blocks"], "gpu") == [Entry("maxsoftmax", "tree", 256)]
    options = cli._parser().parse_args(["bench", "blocks", "--providers", "maxsoftmax:tree"])
    assert [way.block_size for way in command._ways(options, SUITES["blocks"], "gpu")] == [32, 64, 128, 256, 512, 1024]


def test_threads_are_kept_to(capsys):
    assert bench("--shape", "4x8", "--providers", "numpy", "--threads", "1", "--json", "x.json") == 0
    assert read("x.json").threads == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) == 1


def test_a_provider_is_told_how_many_threads(provider, capsys):
    told = []
    provider("mine", fake(__init__=lambda self, device, threads: told.append(threads)))
    cores = command.usable_cores()
    for arguments in ([], ["--threads", "1"]):
        assert bench("--shape", "4x8", "--providers", "mine", *arguments) == 0
    assert told == [cores, 1]


def test_a_wrong_result_is_said_and_is_status_1(provider, capsys):
    provider("mine", spoilt(lambda y: y * 2))
    assert bench("--shape", "4x8", "--providers", "mine,numpy", "--json", "x.json") == 1
    printed, message = capsys.readouterr()
    assert message == ""
    assert cells(printed)[0][:2] == ["mine", "WRONG"]
    assert [r.status for r in read("x.json").records] == ["wrong", "ok"]


def test_a_provider_that_fails_is_said_and_the_rest_is_measured(provider, capsys):
    provider("mine", fake(prepare=raising(RuntimeError("out of [luck]"))))
    provider("gone", fake(__init__=raising(ImportError("No module named 'gone'"))))
    assert bench("--shape", "4x8", "--providers", "mine,gone,numpy", "--json", "x.json", "--plot", "x.svg") == 0
    rows = cells(capsys.readouterr().out)
    assert rows[0][:2] + rows[0][-1:] == ["mine", "FAILED", "RuntimeError: out of [luck]"]
    assert rows[1][:2] + rows[1][-1:] == ["gone", "MISSING", "not installed: No module named 'gone'"]
    assert rows[2][0] == "numpy"
    assert [r.status for r in read("x.json").records] == ["failed", "missing", "ok"]
    assert Path("x.svg").exists()


def interrupted_at(number):
    numbers = count()

    def prepare(self, case, entry):
        if next(numbers) == number:
            raise KeyboardInterrupt
        return softmax

    return fake(prepare=prepare)


SEVERAL = ["--shape", "2x3", "--shape", "3x3", "--shape", "4x3", "--providers", "mine"]


def test_an_interrupted_run_keeps_what_was_measured(provider, capsys):
    provider("mine", interrupted_at(1))
    assert bench(*SEVERAL, "--json", "x.json", "--plot", "x") == 130
    printed, message = capsys.readouterr()
    assert message == "interrupted after 1 measurement\n"
    assert [row[0] for row in cells(printed)] == ["mine"]
    assert [(r.shape, r.status) for r in read("x.json").records] == [((2, 3), "ok")]
    assert sorted(os.listdir()) == ["x.json", "x.png", "x.svg"]


def test_an_interrupted_run_can_be_resumed(provider, capsys):
    provider("mine", interrupted_at(2))
    assert bench(*SEVERAL[:-1], "mine,numpy", "--json", "x.json") == 130
    first = read("x.json")
    # One of the first case is to be measured again, and of the third one is there.
    first.records.append(replace(first.records.pop(1), shape=(4, 3)))
    first.write(Path("x.json"))
    told = []
    provider("mine", fake(foresee=lambda self, ways: told.extend(ways)))
    capsys.readouterr()
    assert bench(*SEVERAL[:-1], "mine,numpy", "--json", "x.json", "--resume") == 0
    assert capsys.readouterr().err == ""
    whole = read("x.json")
    assert [shape for (shape, *_), _ in told] == [(4, 3)]
    assert [whole.records[i] for i in (0, 2, 3, 5)] == first.records
    assert [(r.shape, r.provider) for r in whole.records] == [
        ((rows, 3), name) for rows in (2, 3, 4) for name in ("mine", "numpy")
    ]
    assert (whole.date, whole.versions) == (first.date, first.versions)


def test_a_resumed_run_keeps_what_it_does_not_ask_for(provider, capsys):
    provider("mine", fake())
    assert bench(*SEVERAL[:-1], "mine", "--json", "x.json") == 0
    kept = read("x.json")
    # A dtype of another version is nothing to be afraid of.
    kept.records[0] = replace(kept.records[0], dtype="float4")
    kept.write(Path("x.json"))
    first = kept.records
    assert bench("--shape", "7x3", "--device", "cpu", "--providers", "mine", "--json", "x.json", "--resume") == 0
    assert capsys.readouterr().out.endswith("x.json: 4 records\n")
    records = read("x.json").records
    assert records[:3] == first
    assert records[3].shape == (7, 3)


@pytest.mark.parametrize(("field", "change"), [("device", "another"), ("threads", 77), ("mine", "0"), ("numpy", "0")])
def test_other_runs_are_not_resumed(provider, capsys, field, change):
    provider("mine", fake())
    arguments = ["bench", *SEVERAL[:-1], "mine,numpy", "--device", "cpu", "--together", "--json", "x.json"]
    assert bench(*arguments[1:]) == 0
    capsys.readouterr()
    run = read("x.json")
    fields = run.versions if field in run.versions else vars(run)
    now, fields[field] = fields[field], change
    run.write(Path("x.json"))
    message = fails(capsys, *arguments, "--resume")
    assert message == f"maxsoftmax: cannot resume a run whose {field} was {change}, not {now}\n"
    assert read("x.json") == run


def test_a_run_without_a_library_is_not_resumed_with_it(provider, capsys):
    arguments = ["bench", *SEVERAL[:-1], "mine", "--device", "cpu", "--json", "x.json"]
    provider("mine", fake(__init__=raising(ImportError("No module named 'mine'"))))
    assert bench(*arguments[1:]) == 0
    provider("mine", fake())
    capsys.readouterr()
    message = fails(capsys, *arguments, "--resume")
    assert message == "maxsoftmax: cannot resume a run whose mine was missing, not 1.2.3\n"


def test_what_cannot_be_resumed(capsys):
    message = fails(capsys, "bench", "--shape", "4x8", "--device", "cpu", "--resume")
    assert message == "maxsoftmax: --resume needs --json FILE, the records of the run to resume\n"
    message = fails(capsys, "bench", "--shape", "4x8", "--device", "cpu", "--resume", "--json", "x.json")
    assert message.endswith("x.json: No such file or directory\n")
    message = fails(capsys, "bench", "report", "x.json", "--resume")
    assert message == "maxsoftmax: --resume is not for 'maxsoftmax bench report', which measures nothing\n"
    assert os.listdir() == []


def test_a_run_interrupted_before_anything_was_measured(provider, capsys):
    provider("mine", interrupted_at(0))
    assert bench(*SEVERAL, "--json", "x.json", "--plot", "x.svg") == 130
    assert read("x.json").records == []
    assert os.listdir() == ["x.json"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_was_measured(root, environment, number):
    arguments = ["bench", *SEVERAL[:-1], "waiting", "--device", "cpu", "--json", "x.json"]
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, *arguments],
        env={**environment, "PYTHONPATH": str(root / "tests")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    deadline = time.monotonic() + 60
    while not Path("ready").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    printed, message = process.communicate(timeout=60)
    assert message == "interrupted after 1 measurement\n"
    assert process.returncode == 130
    assert printed.endswith("x.json: 1 record\n")
    assert [(r.shape, r.status) for r in read("x.json").records] == [((2, 3), "ok")]


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--json", "nowhere/x.json"], "nowhere/x.json: No such file or directory"),
        (["--json", "x.json", "--plot", "nowhere/x.svg"], "nowhere/x.svg: No such file or directory"),
        (["--json", "x.json", "--plot", "nowhere/x"], "nowhere/x.svg: No such file or directory"),
        (["--json", "folder"], "folder exists and is not a file"),
        (["--plot", "chart"], "chart.png exists and is not a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_could_not_be_written_is_never_measured(capsys, arguments, name):
    Path("folder").mkdir()
    Path("chart.png").mkdir()
    Path("x.json").write_text("mine")
    message = fails(capsys, "bench", "--shape", "4x8", "--device", "cpu", "--providers", "numpy", *arguments)
    assert message.endswith(f"/{name}\n")
    assert Path("x.json").read_text() == "mine"


@pytest.mark.usefixtures("no_measuring")
def test_a_chart_without_matplotlib_is_never_measured(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = fails(capsys, "bench", "--shape", "4x8", "--device", "cpu", "--json", "x.json", "--plot", "x.svg")
    assert message == "maxsoftmax: a chart needs matplotlib: pip install 'maxsoftmax[bench]'\n"


def test_names_of_files_are_printed_as_they_are(capsys):
    name = "[red]x :cat:"
    assert bench("--shape", "4x8", "--providers", "numpy", "--json", f"{name}.json", "--plot", name) == 0
    printed = capsys.readouterr().out
    assert f"\n{name}.json: 1 record\n{name}.svg, {name}.png: chart\n" in printed


# Reports.


def test_a_report_prints_what_the_run_printed(capsys, monkeypatch, provider):
    provider("mine", spoilt(lambda y: y * 2))
    assert bench(*SEVERAL[:-1], "numpy,scipy,mine", "--json", "x.json") == 1
    printed, _ = capsys.readouterr()
    monkeypatch.setattr(Bench, "_measure", lambda *what: pytest.fail(f"measures {what}"))
    monkeypatch.setattr(command, "PROVIDERS", {})
    assert bench("report", "x.json") == 0
    assert capsys.readouterr() == (printed.removesuffix("x.json: 9 records\n"), "")


@pytest.mark.usefixtures("no_measuring")
def test_a_report_draws_and_copies(capsys):
    given = results(timed(), timed(entry=Entry("scipy")))
    given.write(Path("x.json"))
    assert bench("report", "x.json", "--plot", "x", "--json", "y.json") == 0
    assert capsys.readouterr().out.endswith("y.json: 2 records\nx.svg, x.png: chart\n")
    assert read("y.json") == read("x.json")
    chart.write(given, Path("z"))
    for form in chart.FORMATS:
        assert Path(f"x.{form}").read_bytes() == Path(f"z.{form}").read_bytes()


@pytest.mark.usefixtures("no_measuring")
def test_a_report_of_several_files(capsys):
    results(timed(Case((1, 8)))).write(Path("a.json"))
    results(timed(Case((1, 16)))).write(Path("b.json"))
    results(timed(Case((1, 32))), device="A GPU", threads=None).write(Path("c.json"))
    assert bench("report", "a.json", "b.json", "--plot", "x.svg") == 0
    printed = capsys.readouterr().out
    assert printed.index("1×8 float32") < printed.index("1×16 float32")
    assert Path("x.svg").exists()
    assert bench("report", "a.json", "c.json") == 0
    printed = capsys.readouterr().out
    assert printed.index("A processor, 4 threads;") < printed.index("A GPU;")
    assert "several" in fails(capsys, "bench", "report", "a.json", "c.json", "--plot", "y.svg")
    assert "which file" in fails(capsys, "bench", "report", "a.json", "b.json", "--json", "y.json")


@pytest.mark.usefixtures("no_measuring")
def test_a_report_of_what_cannot_be_read(capsys):
    assert "needs the JSON files" in fails(capsys, "bench", "report")
    assert fails(capsys, "bench", "report", "x.json") == "maxsoftmax: x.json: No such file or directory\n"
    Path("x.json").write_text("{")
    assert "x.json is not a file of benchmark results" in fails(capsys, "bench", "report", "x.json")
    # A good file beside it does not help.
    results(timed()).write(Path("y.json"))
    assert "x.json" in fails(capsys, "bench", "report", "y.json", "x.json")


@pytest.mark.usefixtures("no_measuring")
def test_a_report_of_nothing_timed_cannot_be_drawn(capsys):
    results(record("cpu", Case((4, 8)), Entry("torch"), "missing", note="not installed: torch")).write(Path("x.json"))
    assert bench("report", "x.json", "--plot", "x.svg") == 1
    printed, message = capsys.readouterr()
    assert cells(printed)[0][:2] == ["torch", "MISSING"]
    assert message == "maxsoftmax: nothing was timed, so there is nothing to draw\n"
    assert os.listdir() == ["x.json"]


# Refusals.

SHAPE = ["--shape", "4x8"]


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["everything"], ["'everything'", *SUITES, "report"]),
        ([*SHAPE, "--providers", "numpy,cupy"], ["'cupy'", *PROVIDERS]),
        ([*SHAPE, "--providers", ""], ["''", "numpy"]),
        ([*SHAPE, "--providers", "maxsoftmax:best"], ["'best'", "'auto'", "'naive'"]),
        ([*SHAPE, "--providers", "maxsoftmax:tree", "--device", "cpu"], ["'tree'", "CPU", "'naive'"]),
        ([*SHAPE, "--providers", "numpy:auto"], ["'numpy'", "no algorithms", "'numpy:auto'"]),
        (["cpu", *SHAPE], ["--shape", "'cpu'"]),
        (["cpu", "--dtype", "f32"], ["--dtype", "--shape"]),
        (["--axis", "0"], ["--axis", "--shape"]),
        ([*SHAPE, "--axis", "2"], ["axis 2", "rank 2"]),
        ([*SHAPE, "--shape", "8", "--axis", "1"], ["axis 1", "rank 1"]),
        ([*SHAPE, "--threads", "0"], ["--threads 0", "cores"]),
        ([*SHAPE, "--threads", "-1"], ["--threads -1", "cores"]),
        ([*SHAPE, "--threads", "1000000"], ["--threads 1000000", "cores"]),
        ([*SHAPE, "--device", "tpu"], ["'tpu'", "'cpu'"]),
        (["cpu", "x.json"], ["x.json", "report"]),
        ([*SHAPE, "--plot", "x.pdf"], ["svg or png", "x.pdf"]),
        (["report", "x.json", "--plot", "x.pdf"], ["svg or png", "x.pdf"]),
        ([*SHAPE, "--providers", "maxsoftmax:naive", "--device", "cpu", "--block-size", "64"], ["block_size 64"]),
        ([*SHAPE, "--rounds", "0"], ["--rounds 0", "at least 1"]),
        ([*SHAPE, "--rounds", "2", "--together"], ["--rounds 2", "together"]),
        (["call", "--providers", "cudnn"], ["'cudnn'", *CALLERS]),
        (["call", "--providers", "maxsoftmax:naive"], ["no algorithms", "'maxsoftmax:naive'"]),
        (["call", "--calls", "0"], ["--calls 0", "at least 1"]),
        ([*SHAPE, "--calls", "10"], ["--calls 10", "'call'"]),
        ([*SHAPE, "--beside", "pocket"], ["--beside", "report"]),
        (["call", "--op", "softmax_backward"], ["softmax_backward", *CALL_OPS]),
        (["call", "--op", "cross_entropy", "--shape", "2x3x4"], ["cross_entropy", "2x3x4"]),
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_refused_in_one_sentence(capsys, arguments, words):
    message = fails(capsys, "bench", *arguments)
    assert [word for word in words if word not in message] == []


@NO_GPU
@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize("suite", [name for name, suite in SUITES.items() if suite.device == "gpu" and not suite.host])
def test_a_suite_for_gpus_needs_one(capsys, suite):
    message = fails(capsys, "bench", suite)
    assert f"'{suite}'" in message
    assert "'cpu'" in message


@NO_GPU
@pytest.mark.usefixtures("no_measuring")
def test_a_gpu_that_is_not_there_is_refused(capsys):
    assert "'gpu'" in fails(capsys, "bench", "ladder", "--device", "gpu")


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize(
    "arguments",
    [
        *(["--shape", text] for text in ("", "4x", "4xa", "0x3", "4x-1", "4.5", "4,8", "x")),
        *(["--dtype", text] for text in ("int8", "float8", "", "F32")),
        ["--axis", "last"],
        ["--threads", "all"],
        ["--block-size", "big"],
        ["--providers"],
        ["--calls", "ten"],
        ["report", "x.json", "--beside", "nobody"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(capsys, arguments):
    assert misused(capsys, "bench", *arguments).startswith("usage: maxsoftmax bench")
    assert os.listdir() == []


@pytest.mark.parametrize(("text", "found"), [("8192x50257", (8192, 50257)), ("2×3×4", (2, 3, 4)), ("7", (7,))])
def test_shapes(text, found):
    assert parse.shape(text) == found


@pytest.mark.parametrize("text", ["bf16", "bfloat16"])
def test_dtypes(text):
    assert parse.dtype(text) == DType.bfloat16
    assert [parse.dtype(t) for t in ("f16", "f32", "f64")] == [DType.float16, DType.float32, DType.float64]


def test_help_names_the_suites_and_the_providers(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["bench", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert [word for word in (*SUITES, *PROVIDERS, "report", "--json", "--plot") if word not in printed] == []


def test_the_json_of_a_run_is_json(capsys):
    assert bench("--shape", "4x8", "--providers", "numpy", "--json", "x.json") == 0
    given = json.loads(Path("x.json").read_text(encoding="utf-8"))
    assert set(given) == {"device", "versions", "date", "command", "threads", "processor", "rounds", "records"}
    (found,) = given["records"]
    assert (found["op"], found["shape"], found["provider"]) == ("softmax", [4, 8], "numpy")


def test_whoever_reads_may_stop_early(root, environment):
    records = root / "benchmarks" / "results" / "h200-sweep.json"
    command = [sys.executable, "-m", "maxsoftmax", "bench", "report", str(records)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
