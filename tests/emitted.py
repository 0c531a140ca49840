"""What the graph compiler makes of a graph: the Mojo that it writes, whose kernels can be counted unbuilt."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from max.engine import CompilationStopped, InferenceSession
from maxsoftmax._graph import runtime


class Emitted(str):
    """The Mojo of a graph."""

    def launches(self):
        """Returns the names of the kernels that it launches, each as a trace would have it."""
        return re.findall(r'Trace\[[^"]*"[^"]*"\)\]\("([^"]+)"', self)

    def calls(self):
        """Returns the registrations that it calls."""
        return re.findall(r"([\w.]+)\.execute\[", self)


def emit(graph, device="cpu"):
    """Returns the Mojo of `graph`."""
    return load(graph, device, stop=True)[1]


def load(graph, device, stop=False):
    """Returns the model of `graph`, or None where MAX is to stop before it has one, and the Mojo that it wrote."""
    session, model = InferenceSession(devices=[runtime.device(device)]), None
    # The files of the stages before it are large.
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        # Of a model that is in its cache already MAX writes nothing.
        patch.setenv(runtime.MAX_CACHE, f"{folder}/cache")
        session.debug.pre_jit = stop
        session.debug.ir_output_dir = folder
        try:
            model = session.load(graph)
        except CompilationStopped:
            pass
        finally:
            session.debug.pre_jit = False
            session.debug.ir_output_dir = ""
        # Beside it may be what is computed once, when the model is loaded.
        (path,) = (path for path in Path(folder).glob("*.mojo") if "_constant_subgraphs" not in path.stem)
        return model, Emitted(path.read_text())
