"""The Mojo packages as MAX loads them: found, and compiled once."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from maxsoftmax import _cache as cache

if TYPE_CHECKING:
    import subprocess

    # Calls on arrays need no graph, whose import takes a quarter of a second.
    from max.graph import Graph

KERNELS = "maxsoftmax"
"""The Mojo package of the kernels."""

DROPIN = "maxsoftmax_dropin"
"""The Mojo package that registers them under the names of MAX's own ops."""


NATIVE = "maxsoftmax_native"
"""The Mojo files that are built into libraries, which are called without a graph."""


class CompilerError(RuntimeError):
    """There is no compiler, or it refuses; the message may have several lines."""


def source(package: str = KERNELS) -> Path:
    """Returns the folder of a Mojo package: in a wheel beside this file, in a checkout under op/."""
    installed = Path(__file__).parents[1] / "op" / package
    return installed if installed.is_dir() else Path(__file__).parents[3] / "op" / package


_found: dict[str, Path] = {}
"""Packages that this process has compiled or found, by name."""


def extension() -> Path:
    """Returns what to pass to `max.graph.Graph(..., custom_extensions=[...])`.

    The Mojo package is compiled the first time (two seconds) and kept in the user's cache folder until its sources
    or the version of Mojo change.

    Returns:
        Path of a `.mojoc` file.

    Raises:
        CompilerError: If it does not compile; the message is the compiler's.

    Example:
        >>> from max.graph import Graph
        >>> with Graph("mine", input_types=[], custom_extensions=[maxsoftmax.extension()]) as graph:
        ...     pass  # maxsoftmax.ops
        >>> maxsoftmax.extension().name
        'maxsoftmax.mojoc'
    """
    package = source()
    name = f"{package.name}.mojoc"
    return _kept(name, lambda: cache.made_once(f"mojo-{key()}", name, functools.partial(_precompile, package)))


def dropin() -> Path:
    """Returns what makes MAX's own `ops.softmax` run on the kernels of this package, in any graph that loads it.

    To be passed to `max.graph.Graph(..., custom_extensions=[...])`; `drop_into` is for a graph that is there already.
    (MAX 26.7 prefers its own kernels to the extensions of an `InferenceSession`.) Compiled the first time and kept, as
    `extension()` is, with which it may share a graph.

    Returns:
        Path of a `.mojoc` file. The kernels are in another one beside it, where MAX looks for them.

    Raises:
        CompilerError: If it does not compile; the message is the compiler's.

    Example:
        >>> from max.graph import Graph
        >>> with Graph("theirs", input_types=[], custom_extensions=[maxsoftmax.dropin()]) as graph:
        ...     pass  # max.graph.ops.softmax
        >>> maxsoftmax.dropin().name
        'maxsoftmax_dropin.mojoc'
    """
    kernels = extension()
    name = f"{DROPIN}.mojoc"

    def build(output: Path) -> None:
        shutil.copy(kernels, output.parent)
        _precompile(source(DROPIN), output)

    return _kept(name, lambda: cache.made_once(f"mojo-{key(KERNELS, DROPIN)}", name, build, kernels.name))


def _kept(name: str, find: Callable[[], Path]) -> Path:
    """Returns a file that was found before, unless the cache has been cleared since, or what `find` does."""
    if name not in _found or not _found[name].exists():
        _found[name] = find()
    return _found[name]


def drop_into(graph: Graph) -> int:
    """Makes the softmaxes of a graph run on the kernels of this package, those that it has and those that it will have.

    Around those that it has already it looks for what the kernels can do themselves: causal masks, where nothing that
    is masked is read any more, masks of bools that lie in memory and constant factors, on a GPU, and casts to float32
    and back.

    Args:
        graph: Any graph; it may load `dropin()` already.

    Returns:
        Of how many softmaxes the kernels took over masks, factors or casts.

    Raises:
        TypeError: If it is no graph.
        CompilerError: If `dropin()` does not compile.

    Example:
        >>> from max.graph import Graph
        >>> graph = Graph("theirs", input_types=[])
        >>> maxsoftmax.drop_into(graph)
        0
    """
    if not hasattr(graph, "_import_kernels"):
        raise TypeError(f"graph must be a max.graph.Graph, not {graph!r}")
    # What looks into graphs is loaded by whoever has one.
    from maxsoftmax._graph.spelled import take_over

    graph._import_kernels([dropin()])
    return take_over(graph)


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
def key(*packages: str) -> str:
    """Returns what changes with the sources of packages, of the kernels if none is named, and the versions around them.

    Raises:
        CompilerError: If there is no compiler.
    """
    from maxsoftmax import __version__

    parts = [compiler(), __version__, *map(sources, packages or (KERNELS,))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def compiler() -> str:
    """Returns the version of the compiler.

    Raises:
        CompilerError: If there is none.
    """
    try:
        return distribution_version("mojo-compiler", "mojo")
    except PackageNotFoundError:
        raise CompilerError(
            "Mojo's compiler is not installed, and this was not compiled ahead of time: see `maxsoftmax compile --help`"
        ) from None


@functools.cache
def sources(package: str) -> str:
    """Returns what changes with the sources of a package."""
    return _digest(source(package), "**/*.mojo")


@functools.cache
def python_sources(*patterns: str) -> str:
    """Returns what changes with modules of this package, told by patterns of their paths in it."""
    return _digest(Path(__file__).parents[1], *patterns)


def _digest(folder: Path, *patterns: str) -> str:
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        digest.update(f"\0{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _precompile(package: Path, output: Path) -> None:
    try:
        run_mojo("precompile", "-I", str(package.parent), str(package), "-o", str(output), temporary=output.parent)
    except CompilerError as error:
        raise CompilerError(f"{package} does not compile:\n{error}") from error


_running: set[subprocess.Popen[str]] = set()
"""Compilers that have not ended."""

# They are the parent's.
os.register_at_fork(after_in_child=_running.clear)


def run_mojo(*arguments: str, temporary: Path | None = None) -> str:
    """Runs Mojo's command and returns what it printed.

    Args:
        arguments: Of the command.
        temporary: Where it puts files meanwhile; the system's own place if None.

    Raises:
        CompilerError: If it cannot be run, or fails; the message is what it printed.
    """
    compiler()
    try:
        # Only who compiles needs these.
        import subprocess

        from mojo import run

        environment = run._mojo_env()
        with subprocess.Popen(
            [environment.get("MODULAR_MOJO_MAX_DRIVER_PATH") or shutil.which("mojo") or "mojo", *arguments],
            env={**environment, "TMPDIR": str(temporary)} if temporary else environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as process:
            _running.add(process)
            try:
                printed = process.communicate()[0]
            except BaseException:
                process.kill()
                raise
            finally:
                _running.discard(process)
    except (ImportError, OSError, RuntimeError) as error:
        raise CompilerError(
            f"Mojo's compiler cannot be run ({str(error).strip()}): reinstall `max`, or compile ahead of time, as "
            "`maxsoftmax compile --help` says"
        ) from error
    if process.returncode:
        raise CompilerError(printed.strip() or f"it ended with status {process.returncode}")
    return printed


def stop_compilers() -> None:
    """Ends the compilers that other threads have started, whose calls of `run_mojo` fail then."""
    for process in list(_running):
        process.kill()
