"""What the site has beside docs/: the README as its first page, the notebook, the Mojo reference, and linked files."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

import mojo_reference
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

LINK = re.compile(r"\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")

TEXT = re.compile(r"\[(?P<text>[^\[\]]+)\]\((?P<path>\.\./[^)#:\s]+)(?P<anchor>#[^)]*)?\)")
"""A link to what lies outside of docs/, in a page."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the first page, and whatever pages link to outside of docs/."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    # As if it lay in docs/.
    moved = LINK.sub(lambda link: f"]({posixpath.relpath(link['path'], 'docs')}{link['anchor'] or ''})", readme)
    files.append(File.generated(config, "index.md", content=moved))
    files.append(File.generated(config, "tour.md", content=_notebook(ROOT / "examples" / "tour.ipynb")))
    files.append(File.generated(config, "mojo-reference.md", content=mojo_reference.page()))
    texts = [page.content_string for page in files if page.is_documentation_page()]
    found = {link["path"] for text in texts for link in LINK.finditer(text)}
    for path in sorted(path for path in found if path.startswith("../")):
        source = (ROOT / "docs" / path).resolve()
        if source.is_file() and source.name != "README.md":
            files.append(File.generated(config, _place(path), abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Has links to what lies outside of docs/ lead into the site, and shows folders as what they are called."""

    def moved(link: re.Match[str]) -> str:
        path = link["path"]
        if path == "../README.md":
            return f"[{link['text']}](index.md{link['anchor'] or ''})"
        if (ROOT / "docs" / path).resolve().is_dir():
            return link["text"]
        return f"[{link['text']}]({_place(path)})"

    return TEXT.sub(moved, markdown)


def _place(path: str) -> str:
    """Returns where in the site a file is, which a browser is to show and not to save."""
    inside = path.removeprefix("../")
    return inside if inside.endswith(".svg") else f"source/{inside}.txt"


def _notebook(path: Path) -> str:
    """Returns a notebook as a page: its text, its code, and what its cells returned."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            parts.append("```text\n" + "".join(output["data"]["text/plain"]) + "\n```")
    return "\n\n".join(parts) + "\n"
