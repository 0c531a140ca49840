"""The reference of the Mojo package as a page: what `mojo doc` says of what the package exports to programs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxsoftmax import _cache as cache
from maxsoftmax._graph import extension

INTRODUCTION = """# Mojo reference

What a Mojo program can import from `maxsoftmax`: [an example](mojo.md). Values in square brackets are compile-time
parameters. The structs that are registered as ops of MAX graphs are in
[`registry.mojo`](../op/maxsoftmax/registry.mojo).
"""

EXPORTED = re.compile(r"^from \.(\S+) import (\([^)]*\)|[^\n(]+)", re.M)
"""A line of `__init__.mojo`: a module, and the names that the package hands on."""


def page() -> str:
    """Returns the page, in Markdown."""
    sources = extension.source()
    described = json.loads(_described(sources).read_text(encoding="utf-8"))["decl"]
    declared = dict(_declarations(described))
    exported = EXPORTED.findall((sources / "__init__.mojo").read_text(encoding="utf-8"))
    sections: dict[str, list[str]] = {"Functions": [], "Structs": [], "Traits": [], "Aliases": []}
    for module, names in exported:
        if module != "registry":
            for name in re.findall(r"\w+", names):
                kind, declaration = _find(declared, module, name)
                sections[kind].append(_entry(declaration))
    parts = [f"## {kind}\n\n" + "\n".join(entries) for kind, entries in sections.items() if entries]
    return "\n".join([INTRODUCTION, *parts])


def _described(sources: Path) -> Path:
    """Returns what `mojo doc` writes about the package, which takes ten seconds, from the cache if it is there."""

    def build(output: Path) -> None:
        extension.run_mojo("doc", "-I", str(sources.parent), str(sources), "-o", str(output))

    return cache.made_once(f"mojo-doc-{extension.key()}", "doc.json", build)


def _declarations(package: dict[str, Any], path: str = "") -> Iterator[tuple[tuple[str, str], tuple[str, Any]]]:
    """Yields every declaration below a package, by its module and its name."""
    for module in package["modules"]:
        for kind in ("functions", "structs", "traits", "aliases"):
            for declaration in module[kind]:
                yield (f"{path}{module['name']}", declaration["name"]), (kind.capitalize(), declaration)
    for inner in package["packages"]:
        yield from _declarations(inner, f"{path}{inner['name']}.")


def _find(declared: dict[tuple[str, str], tuple[str, Any]], module: str, name: str) -> tuple[str, Any]:
    """Returns a declaration of a module, or of one that the package of this name hands on."""
    if (module, name) in declared:
        return declared[module, name]
    (found,) = (each for (where, what), each in declared.items() if what == name and where.startswith(f"{module}."))
    return found


def _entry(declaration: dict[str, Any]) -> str:
    lines = [f"### {declaration['name']}", ""]
    for overload in declaration.get("overloads") or [declaration]:
        lines += _signature(overload)
        lines += [_text(overload[part]) + "\n" for part in ("summary", "description") if overload.get(part)]
        lines += _listed("Parameters", overload.get("parameters"))
        lines += _listed("Arguments", overload.get("args"))
        lines += _listed("Fields", overload.get("fields"))
        lines += _listed("Values", [alias for alias in overload.get("aliases", ()) if alias["summary"]])
        for name, value in (("Returns", overload.get("returns", {})), ("Raises", overload.get("raisesDoc"))):
            text = value.get("doc") if isinstance(value, dict) else value
            lines += [f"**{name}:** {_text(text)}\n"] if text else []
    methods = [method for method in declaration.get("functions", ()) if method["overloads"][0]["summary"]]
    lines += _listed("Methods", [{"name": each["name"], **each["overloads"][0]} for each in methods])
    return "\n".join(lines)


def _signature(declaration: dict[str, Any]) -> list[str]:
    text = declaration.get("signature")
    if not text:
        return []
    # A parameter or an argument a line.
    head = re.sub(r"(?<=[\[(])(?=\w+: )", "\n    ", text)
    head = re.sub(r", (?=\w+: |\*, |//, )", ",\n    ", head)
    return ["```mojo", head, "```", ""]


def _listed(title: str, members: list[dict[str, Any]] | None) -> list[str]:
    described = [(each["name"], each.get("description") or each.get("summary")) for each in members or ()]
    lines = [f"- `{name}`: {_text(text)}" for name, text in described if text]
    return [f"**{title}:**", "", *lines, ""] if lines else []


def _text(text: str) -> str:
    """Returns a docstring in one line, with no angle that HTML would take for a tag."""
    return " ".join(text.split()).replace("<", "&lt;")
