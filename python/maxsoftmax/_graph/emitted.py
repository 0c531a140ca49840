"""Which kernels compute the softmaxes of a graph: read in the Mojo that MAX makes of the graph, before it is built."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    # Calls on arrays need no graph, whose import takes a quarter of a second.
    from max.graph import Graph

CALL = re.compile(
    r'Trace\[[^"\n]*StaticString\("(?P<device>\w+)"\)\]\("(?P<fused>[^"]+)"[^\n]*\n\s*(?P<name>[\w.]+)\.execute\['
)
"""A kernel in emitted Mojo: where it runs, what MAX calls it in traces, and the struct that it calls."""

COMPUTES_SOFTMAX = re.compile(r"softmax|attention|mla|mha", re.IGNORECASE)
"""Names of kernels of MAX in which softmaxes are computed."""

CHILD = f"import json, sys; from {__name__} import _emit; _emit(**json.loads(sys.argv[1]))"
"""What the process runs that has MAX compile a graph as far as Mojo."""


class SoftmaxKernel(NamedTuple):
    """A kernel of a graph that computes softmaxes: its Mojo struct, its device, and what is computed with it.

    Example:
        >>> kernel = maxsoftmax.SoftmaxKernel("builtin_kernels.reductions.Softmax", "cpu", "reduce.softmax")
        >>> kernel.ours
        False
    """

    name: str
    """The Mojo struct that is called, such as `maxsoftmax_dropin.registry.Softmax`."""

    device: str
    """`cpu` or `gpu`."""

    fused: str
    """What is computed in the same kernel, as MAX's traces call it: `reduce.softmax` is softmax alone."""

    @property
    def ours(self) -> bool:
        """Whether the kernel is one of this package."""
        return self.name.startswith("maxsoftmax")


def softmax_kernels(graph: Graph) -> list[SoftmaxKernel]:
    """Returns the kernels that compute the softmaxes of a graph, and says which of them are of this package.

    A process of its own has MAX compile the graph as far as Mojo, which takes some ten seconds. No kernel is built, and
    the graph is left as it is.

    Args:
        graph: Any graph with outputs, whether or not it loads `dropin()`. Weights need no values.

    Returns:
        One `SoftmaxKernel(name, device, fused)` for each kernel, with a property `ours`. Layers that are alike share a
        kernel. A softmax that MAX makes part of an attention kernel of its own is listed as that kernel.

    Raises:
        TypeError: If it is no graph.
        RuntimeError: If MAX refuses the graph; the message is the compiler's.

    Example:
        >>> from max.dtype import DType
        >>> from max.graph import DeviceRef, Graph, TensorType, ops
        >>> scores = TensorType(DType.float32, ("rows", 100), DeviceRef.CPU())
        >>> with Graph("theirs", input_types=[scores], custom_extensions=[maxsoftmax.dropin()]) as graph:
        ...     graph.output(ops.softmax(graph.inputs[0].tensor))
        >>> [kernel] = maxsoftmax.softmax_kernels(graph)
        >>> kernel.ours, kernel.name, kernel.device, kernel.fused
        (True, 'maxsoftmax_dropin.registry.Softmax', 'cpu', 'reduce.softmax')
    """
    return [kernel for kernel in kernels(emitted(graph)) if kernel.ours or COMPUTES_SOFTMAX.search(kernel.name)]


def kernels(mojo: str) -> list[SoftmaxKernel]:
    """Returns every kernel that emitted Mojo calls by name, those that compute no softmax included."""
    return [SoftmaxKernel(call["name"], call["device"], call["fused"]) for call in CALL.finditer(mojo)]


def emitted(graph: Graph) -> str:
    """Returns the Mojo that MAX makes of a graph.

    What stops the compiler there is a setting of the whole process, and it prints the names of files, so that it has a
    process of its own.

    Raises:
        TypeError: If it is no graph.
        RuntimeError: If MAX refuses the graph; the message is the compiler's.
    """
    import subprocess

    from max import driver
    from max.graph import Graph

    if not isinstance(graph, Graph):
        raise TypeError(f"graph must be a max.graph.Graph, not {graph!r}")
    virtual = (
        driver.get_virtual_device_api(),
        driver.get_virtual_device_target_arch(),
        driver.get_virtual_device_count(),
    )
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    with TemporaryDirectory() as folder:
        source = Path(folder) / "graph"
        source.write_bytes(graph.module.mlir_module.bytecode)
        asked = {"folder": folder, "extensions": [str(file) for file in graph.kernel_libraries_paths]}
        done = subprocess.run(
            [sys.executable, "-P", "-c", CHILD, json.dumps({**asked, "virtual": virtual})],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"MAX does not compile the graph:\n{done.stderr.strip()}")
        # Another file may have what is computed once, when the model is loaded.
        return "".join(file.read_text(encoding="utf-8") for file in sorted(Path(folder).glob("*.mojo")))


def _emit(folder: str, extensions: list[str], virtual: tuple[str, str, int]) -> None:
    """Writes the Mojo of the graph in a folder beside it."""
    from max import driver
    from max.engine import CompilationStopped, InferenceSession
    from max.graph import Module

    from maxsoftmax._graph import runtime

    api, architecture, count = virtual
    if count:
        driver.set_virtual_device_api(api)
        driver.set_virtual_device_count(count)
        driver.set_virtual_device_target_arch(architecture)
    session = InferenceSession(devices=runtime.devices())
    session.debug.pre_jit = True
    session.debug.ir_output_dir = folder
    empty = Module().mlir_module
    module = Module(empty.from_bytecode((Path(folder) / "graph").read_bytes(), empty.context))
    with contextlib.suppress(CompilationStopped):
        session.compile(module, custom_extensions=[Path(file) for file in extensions])
    # Without MAX's own end, in which threads that it has not joined may stop the process with an error.
    os._exit(0)
