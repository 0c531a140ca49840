import re
import runpy
from pathlib import Path

import maxsoftmax
import pytest
from maxsoftmax._bench import published
from maxsoftmax._commands import cli

ROOT = Path(__file__).parents[1]
WRITE = runpy.run_path(str(ROOT / "benchmarks" / "write.py"))
DOCUMENTS = WRITE["DOCUMENTS"]
TABLES = [
    pytest.param(document, *found, id=f"{document.name}-{found[1]}")
    for document in DOCUMENTS
    for found in WRITE["MARK"].findall(document.read_text())
]


@pytest.mark.parametrize(("document", "kind", "what", "table"), TABLES)
def test_tables_are_what_was_measured(document, kind, what, table):
    assert table == WRITE["table"](kind, what)


def test_every_document_with_figures_has_tables():
    found = {document.name for document, *_ in (param.values for param in TABLES)}
    assert found == {
        *("README.md", "dropin.md", "jax.md", "kernels.md", "linear.md", "models.md", "performance.md", "published.md"),
        "sharding.md",
    }


def test_documents_are_rewritten_with_their_tables():
    mark = "<!-- beside: pocket benchmarks/results/h200-ladder.json -->"
    new = WRITE["table"]("beside", "pocket benchmarks/results/h200-ladder.json")
    text = f"before\n\n{mark}\n\n| old |\n|---|\n\nbetween\n\n{mark}\n\nold\n\nafter\n"
    assert WRITE["rewritten"](text) == f"before\n\n{mark}\n\n{new}\n\nbetween\n\n{mark}\n\n{new}\n\nafter\n"


def test_every_chart_is_drawn_from_records():
    charts = {path.stem for path in WRITE["CHARTS"].iterdir()}
    assert charts == {*WRITE["DRAWN"], "cpu-train"}
    for file, *_ in WRITE["DRAWN"].values():
        assert (WRITE["RESULTS"] / file).exists()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_published_figures_stand_in_tables_only(document):
    text = WRITE["MARK"].sub("", document.read_text())
    assert [figure for figure in figures() if figure in text] == []


def figures():
    """Returns every published figure with its unit, and every loss."""
    units = {"time": "ms", "gflops": "GFLOP/s", "improvement": "%", "speedup": "×"}
    for write_up in published._data()["write-ups"].values():
        for figure in write_up["figures"]:
            for column, unit in units.items():
                if figure.get(column):
                    yield from (f"{figure[column]} {unit}", f"{figure[column]}{unit}")
        yield from map(str, write_up.get("losses", ()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_what_is_linked_is_there(document):
    text = document.read_text()
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text) + re.findall(r'(?:src|srcset)="([^":]+)"', text)
    assert links
    for link in links:
        assert (document.parent / link).exists(), link


def test_every_page_is_in_the_site_s_menu():
    menu = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r"[\w-]+\.md", menu)) == pages | {"index.md", "tour.md", "mojo-reference.md"}


def test_every_function_is_in_the_reference():
    (listed,) = re.findall(r"members: \[(.*?)\]", (ROOT / "docs" / "api.md").read_text(), re.S)
    modules = {"ops"}
    assert set(re.findall(r"\w+", listed)) == {name for name in maxsoftmax.__all__ if name not in modules}


def test_every_environment_variable_is_in_its_table():
    code = "".join(path.read_text() for path in (ROOT / "python").rglob("*.py"))
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "environment.md").read_text(), re.M)
    assert set(re.findall(r"MAXSOFTMAX_[A-Z_]+", code)) == {name for name in rows if name.startswith("MAXSOFTMAX_")}


def test_every_command_is_on_its_page():
    (choices,) = (action.choices for action in cli._parser()._actions if action.choices)
    text = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in choices if not re.search(rf"^\| .*`{name}`.* \|", text, re.M)] == []
