"""Libraries as the compiler makes them."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from maxsoftmax import _cache as cache
from maxsoftmax import _files as files
from maxsoftmax._graph.extension import (
    KERNELS,
    NATIVE,
    CompilerError,
    compiler,
    distribution_version,
    python_sources,
    run_mojo,
    source,
    sources,
)
from maxsoftmax._native import bundle, progress
from maxsoftmax._native.description import BUNDLE, Library
from maxsoftmax._native.machine import processor

FILE = "library.so"
"""The name of a library in its entry of the cache."""

SOURCES = ("_native/build.py", "_native/bundle.py", "_native/description.py")
"""The modules that say what the compiler is given."""


def key(library: Library) -> str:
    """Returns the name of the cache's entry for a library: it changes with everything that shapes it.

    Raises:
        CompilerError: If there is no compiler.
    """
    told = [f"{name}={value}" for name, value in library.defines().items()]
    if library.name == BUNDLE:
        told.append(bundle.text())
    return f"native-{_digest(*_surroundings(), library.name, library.target.architecture, *told)}"


def versions() -> dict[str, str]:
    """Returns what a library has to be built by, and of, to be called from here."""
    from maxsoftmax import __version__

    return {
        "maxsoftmax": __version__,
        "sources": _digest(sources(KERNELS), sources(NATIVE), python_sources(*SOURCES)),
        "max": distribution_version("max", "modular"),
        "machine": platform.machine(),
    }


@functools.cache
def _surroundings() -> tuple[str, ...]:
    return (compiler(), *versions().values(), processor())


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@contextmanager
def built(library: Library, target_cpu: str = "") -> Iterator[Path]:
    """Builds a library (seconds) and yields it, a temporary file.

    Args:
        library: What to build.
        target_cpu: The CPU to build it for; this machine's if "".

    Raises:
        CompilerError: If that fails, or there is no room for it anywhere; the message is the compiler's.
    """
    # Without one, that is the whole sentence.
    compiler()
    arguments = [argument for name, value in library.defines().items() for argument in ("-D", f"{name}={value}")]
    if library.target.architecture:
        arguments += ["--target-accelerator", library.target.architecture]
    if target_cpu:
        arguments += ["--target-cpu", target_cpu]
    with ExitStack() as stack:
        with progress.shown(library):
            kept = cache.trusted()
            places = files.roomy(*kept)
            for place in places:
                prefix = cache.NEW if place in kept else "maxsoftmax-"
                made = tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True)
                folder = Path(stack.enter_context(made))
                try:
                    _build(library, arguments, folder)
                    break
                except (CompilerError, OSError) as error:
                    if not cache.is_full(folder, error) or place == places[-1]:
                        # What the compiler prints has lines of its own.
                        separator = "\n" if "\n" in str(error) else " "
                        raise CompilerError(f"{library} cannot be built:{separator}{error}") from None
        yield folder / FILE


def _build(library: Library, arguments: list[str], folder: Path) -> None:
    package = source(NATIVE)
    mojo = package / f"{library.name}.mojo"
    if library.name == BUNDLE:
        mojo = folder / mojo.name
        mojo.write_text(bundle.text(), encoding="utf-8")
    run_mojo(
        *("build", "--emit", "shared-lib", "--disable-warnings", "-I", str(package.parent)),
        *("-I", str(package / library.target.kind), *arguments, str(mojo), "-o", str(folder / FILE)),
        temporary=folder,
    )


def features(target_cpu: str = "") -> list[str]:
    """Returns the features of a CPU, by LLVM's names; of this machine's if it is "".

    Raises:
        CompilerError: If the compiler does not know it.
    """
    given = ["--target-cpu", target_cpu] if target_cpu else []
    told = re.search(r"--target-features (\S+)", run_mojo("build", "--print-effective-target", *given))
    return sorted(name[1:] for name in told[1].split(",") if name.startswith("+")) if told else []
