"""The Mojo package as MAX loads it: found, and compiled once."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from maxsoftmax import cache


def source() -> Path:
    """Returns the folder of the Mojo package: in a wheel beside this file, in a checkout under op/."""
    installed = Path(__file__).parent / "op" / "maxsoftmax"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "op" / "maxsoftmax"


@functools.cache
def extension() -> Path:
    """Returns what to pass to `max.graph.Graph(..., custom_extensions=[...])`.

    The Mojo package is compiled the first time (two seconds) and kept in the user's cache folder until its sources
    or the version of Mojo change.

    Returns:
        Path of a `.mojoc` file.

    Raises:
        RuntimeError: If it does not compile; the message is the compiler's.
    """
    package = source()
    return cache.entry(f"mojo-{key()}", f"{package.name}.mojoc", functools.partial(_precompile, package))


def distribution_version(*names: str) -> str:
    """Returns the version of the first installed distribution of these names: pip's and conda's differ.

    Raises:
        importlib.metadata.PackageNotFoundError: If none is installed.
    """
    for name in names[:-1]:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return version(names[-1])


@functools.cache
def key() -> str:
    """Returns what changes with the sources of the package and the version of the compiler.

    Raises:
        RuntimeError: If there is no compiler.
    """
    package = source()
    try:
        compiler = distribution_version("mojo-compiler", "mojo")
    except PackageNotFoundError:
        raise RuntimeError(
            "Mojo's compiler is not installed, and this was not compiled ahead of time: see `maxsoftmax compile --help`"
        ) from None
    digest = hashlib.sha256(compiler.encode())
    for path in sorted(package.rglob("*.mojo")):
        digest.update(f"\0{path.relative_to(package).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _precompile(package: Path, output: Path) -> None:
    # Only who compiles needs the compiler.
    from mojo.run import subprocess_run_mojo

    try:
        subprocess_run_mojo(
            ["precompile", str(package), "-o", str(output)],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{package} does not compile:\n{error.stdout}") from error
