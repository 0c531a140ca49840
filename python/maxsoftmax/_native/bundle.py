"""One library of all ops of a dtype: nine tenths of building a small library is what all of them have in common."""

from __future__ import annotations

import re

from maxsoftmax._graph.extension import NATIVE, CompilerError, source
from maxsoftmax._native.description import BUNDLE, POINTERS, WHOLE, XLA

WORTH = 4
"""How many libraries take as long as all of them together."""


def text() -> str:
    """Returns the Mojo file of the library: that of each op with its name in the names of its functions.

    Raises:
        CompilerError: If the sources are not what they should be.
    """
    parts = []
    imports = ["from maxsoftmax_native.border import Pointers, count, open, run"]
    imports.append("from maxsoftmax_native.xla import handle")
    for name in WHOLE:
        op = _op(name)
        imports.append(f"from maxsoftmax_native.{name} import {op}")
        # The last of the pointers is scratch memory.
        pointers = [f"p{i}" for i in range(POINTERS[name] - 1)]
        parts.append(_FUNCTIONS.format(name=name, op=op, taken=": Int, ".join(pointers), given=", ".join(pointers)))
        if name in XLA:
            parts.append(_HANDLER.format(name=name, op=op))
    return "\n".join([f'"""{BUNDLE}: every op of a dtype."""', *imports, _OPEN, *parts])


def _op(name: str) -> str:
    found = re.search(r"^struct (\w+)\(Op\)", (source(NATIVE) / f"{name}.mojo").read_text(encoding="utf-8"), re.M)
    if found is None:
        raise CompilerError(f"{source(NATIVE) / name}.mojo has no op")
    return found[1]


_OPEN = """
@export("maxsoftmax_open")
def open_device(device: Int, error: Int) abi("C") -> Int:
    return open(device, error)
"""

_FUNCTIONS = """
@export("maxsoftmax_scratch_{name}")
def scratch_{name}(call: Int) abi("C") -> Int:
    return count[{op}](call)


@export("maxsoftmax_run_{name}")
def run_{name}(call: Int, stream: Int, {taken}: Int, scratch: Int) abi("C") -> Int:
    return run[{op}](call, stream, scratch, Pointers({given}))
"""

_HANDLER = """
@export("maxsoftmax_xla_{name}")
def xla_{name}(frame: Int) abi("C") -> Int:
    return handle[{op}](frame)
"""
