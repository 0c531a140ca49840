import re
from pathlib import Path

import pytest
from maxsoftmax.bench.results import Results
from maxsoftmax.bench.table import markdown, overview

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = r"<!-- (table|overview): (\S+)((?: (?!-->)\S+)*) -->\n\n(.*?)\n\n"
TABLES = [
    pytest.param(document, *found, id=f"{document.name}-{found[1]}")
    for document in DOCUMENTS
    for found in re.findall(MARK, document.read_text(), re.S)
]


@pytest.mark.parametrize(("document", "kind", "source", "only", "table"), TABLES)
def test_tables_are_what_was_measured(document, kind, source, only, table):
    results = Results.read(ROOT / source)
    assert table == {"table": markdown, "overview": overview}[kind](results, only.split() or None)


def test_every_document_with_figures_has_tables():
    found = {document.name for document, *_ in (param.values for param in TABLES)}
    assert found == {"README.md", "dropin.md", "kernels.md"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_what_is_linked_is_there(document):
    text = document.read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r'(?:src|srcset)="([^":]+)"', text)
    assert links
    for link in links:
        assert (document.parent / link).exists(), link
