"""The command `maxsoftmax` in this process, called in ways that it has to refuse."""

import re
from pathlib import Path

import pytest
from maxsoftmax._commands import cli


def fails(capsys, *arguments):
    """Runs the command, which fails and changes nothing in the current folder, and returns its one sentence."""
    before = _contents()
    assert cli.main(arguments) == 1
    printed, message = capsys.readouterr()
    assert printed == ""
    assert re.fullmatch(r"maxsoftmax: [^\n]+\n", message)
    assert _contents() == before
    return message


def misused(capsys, *arguments):
    """Runs the command, which does not understand its arguments, and returns how it is to be used."""
    before = _contents()
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(arguments)
    printed, message = capsys.readouterr()
    assert printed == ""
    assert message.startswith("usage: maxsoftmax")
    assert _contents() == before
    return message


def _contents():
    return {path: path.read_bytes() if path.is_file() else None for path in Path().iterdir()}


def cells(printed):
    """Returns the cells of every row of the tables printed, headers left out."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if line[:1] == "│"]
