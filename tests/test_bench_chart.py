import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import raising, results, timed
from matplotlib import colors
from matplotlib.figure import Figure
from max.dtype import DType
from maxsoftmax._bench import chart, tune
from maxsoftmax._bench.cases import SUITES, Case, Entry, entries
from maxsoftmax._bench.protocol import record
from maxsoftmax._bench.table import duration
from PIL import Image

pytestmark = pytest.mark.usefixtures("own_folder")


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
