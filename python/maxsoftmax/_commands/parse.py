"""What words on the command line mean, to every command that takes them."""

from __future__ import annotations

import argparse

from max.dtype import DType

from maxsoftmax._arguments import DTYPES


def shape(text: str) -> tuple[int, ...]:
    """Returns the shape that an argument names.

    Raises:
        argparse.ArgumentTypeError: If it names none.
    """
    try:
        dims = tuple(int(n) for n in text.replace("×", "x").split("x"))
    except ValueError:
        dims = ()
    if not dims or min(dims) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 8192x50257, of positive lengths")
    return dims


def dtype(text: str) -> DType:
    """Returns the dtype that an argument names.

    Raises:
        argparse.ArgumentTypeError: If it names none.
    """
    aliases = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
    names = {dtype.name: dtype for dtype in DTYPES}
    if aliases.get(text, text) not in names:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype: choose from {', '.join(names)}")
    return names[aliases.get(text, text)]
